"""Builds on a Ray cluster of two nodes on this machine: fixtures, and a filter that comes to a halt.

The plugin of conftest.py: tests ask for its fixtures by their names.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenmill as library
from conftest import command, tree
from nodes import ray_cluster

RECIPE: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": "4kB", "split": "val=0.1"}
OPTIONS = ("--tokenizer", "byte", "--unit-bytes", "4kB", "--split", "val=0.1", "-q", "--executor", "ray")
# A filter that comes to a halt at one document, and says so, until it may go on. Its code is part of the fingerprint,
# which decides which node gets the document, so it names no folder of a test.
HALT = """
import os, time

HERE = os.path.dirname(__file__)

def keep(text):
    while "HALT" in text and not os.path.exists(os.path.join(HERE, "go")):
        open(os.path.join(HERE, "halted"), "w").close()
        time.sleep(0.01)
    return True
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one slot each."""
    with ray_cluster(nodes=1, head_slots=1) as made:
        yield made


@pytest.fixture
def all_slots(one_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many units at once as the cluster has slots."""
    monkeypatch.delenv("DATASET_NUM_PROC")


@pytest.fixture
def right(corpus: Path, tmp_path: Path) -> dict[str, str]:
    library.prepare(str(corpus), tmp_path / "right", workers=1, **RECIPE)
    return tree(tmp_path / "right")


@pytest.fixture
def halting(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A last source where a build comes to a halt: it makes the second file, and goes on once there is the first."""
    go, halted = tmp_path / "go", tmp_path / "halted"
    (tmp_path / "halting.py").write_text(HALT)
    monkeypatch.delitem(sys.modules, "halting", raising=False)  # that of another test
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NODE", "driver")
    (corpus / "d.txt").write_text("the last unit\nHALT\n")
    return go, halted


def halting_command(cluster: Any, corpus: Path, out: object) -> list[str]:
    # The path of modules is the driver's alone: nodes that are started meanwhile outlive this test.
    options = (*OPTIONS, "--filter", "halting:keep", "--ray-address", cluster.address)
    return ["env", f"PYTHONPATH={corpus.parent}", *command("prepare", corpus, "-o", out, *options)]


def wait_for(is_so: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.002)
