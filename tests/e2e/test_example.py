"""The example trains, is killed, and goes on with another number of ranks as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenmill
from conftest import make_texts, write_jsonl
from ranks import meeting_place

pytestmark = pytest.mark.xdist_group("example")  # one process, so that its dataset is made once

EXAMPLE = Path(__file__).parents[2] / "examples/train_gpt.py"
SMALL = [
    *("--batch-size", "6", "--seq-len", "32", "--width", "32", "--layers", "2", "--heads", "2"),
    *("--save-every", "4", "--learning-rate", "3e-3"),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("example")
    write_jsonl(path / "a.jsonl", make_texts(100, seed=5, words=30))
    tokenmill.prepare(str(path / "a.jsonl"), path / "out", tokenizer="byte", workers=1)
    return path / "out"


def start(dataset: Path, checkpoint: Path, ranks: int, *options: str) -> tuple[Any, list[subprocess.Popen[str]]]:
    """The example as torchrun starts it, but for torchrun: then the processes are ours to kill. And where they meet."""
    store, group = meeting_place(ranks)
    command = [sys.executable, str(EXAMPLE), str(dataset), "--checkpoint", str(checkpoint), *SMALL, *options]
    return store, [
        subprocess.Popen(
            command,
            env={**os.environ, **group, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss ([\d.]+)$", text, re.MULTILINE)}


def train(dataset: Path, checkpoint: Path, ranks: int, *options: str) -> str:
    _store, processes = start(dataset, checkpoint, ranks, *options)
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks
    return printed[0]


def train_until_killed(dataset: Path, checkpoint: Path, ranks: int, *, after: str) -> str:
    """What was printed by the time that all ranks were killed, which is some time after a line of it."""
    _store, processes = start(dataset, checkpoint, ranks, "--steps", "1000000")
    seen = []
    assert processes[0].stdout is not None
    for line in processes[0].stdout:
        seen.append(line)
        if line.strip() == after:
            break
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them is to see that another one is gone
        for process in processes:
            process.send_signal(number)
    rest = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * ranks
    return "".join([*seen, rest[0]])


def test_a_killed_run_goes_on_with_another_number_of_ranks_to_the_same_losses(dataset: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "killed.pt"
    first = losses(train_until_killed(dataset, checkpoint, 2, after="saved step 4"))
    saved = torch.load(checkpoint)["step"]
    assert saved >= 4
    steps = saved + 8
    second = train(dataset, checkpoint, 1, "--steps", "1000000", "--stop-at", str(steps))
    assert f"resumed at step {saved} on 1 ranks" in second
    assert list(losses(second)) == list(range(saved + 1, steps + 1))

    expected = losses(train(dataset, tmp_path / "whole.pt", 1, "--steps", str(steps)))
    assert list(expected) == list(range(1, steps + 1))
    assert expected[steps] < expected[1] - 0.1, "it learns"
    for found in (first, losses(second)):
        for step in found.keys() & expected.keys():
            assert found[step] == pytest.approx(expected[step], abs=1e-5), step
