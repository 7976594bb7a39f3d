"""What is printed: nothing in a record can act on a terminal, and rates are those of this run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tokenmill as library
from conftest import Command, write_parquet
from tokenmill import manifest as manifests
from tokenmill.build.progress import Tally
from tokenmill.storage import Folder

HOSTILE = "a\x1b]0;pwned\x07\x9b31mb"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A dataset whose manifest was written by somebody who means harm."""
    write_parquet(tmp_path / "a.parquet", ["some text", ""])
    library.prepare(str(tmp_path / "a.parquet"), tmp_path / "out", tokenizer="byte", workers=1)
    found = manifests.load(Folder(str(tmp_path / "out")))
    forged = replace(found, tokenizer={**found.tokenizer, "name": HOSTILE}, dropped={HOSTILE: 1})
    (tmp_path / "out/dataset.json").write_bytes(manifests.seal(forged))
    return tmp_path / "out"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_no_text_of_a_manifest_acts_on_a_terminal(hostile: Path, tokenmill: Command, options: list[str]) -> None:
    shown = tokenmill("inspect", hostile, *options).stdout
    assert "pwned" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)
    if options:
        assert json.loads(shown)["tokenizer"]["name"] == HOSTILE


def test_a_rate_counts_what_this_run_did() -> None:
    tally = Tally(total_bytes=100, total_units=4, workers=1, done_bytes=50, done_tokens=10**12, tokens=0)
    assert tally.snapshot()["tokens_per_second"] == 0
    assert tally.snapshot()["tokens"] == 10**12


def test_a_current_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    move = "import os, sys; os.chdir('here'); os.rmdir('../here')"
    script = f"{move}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", script, "-P", "-m", "tokenmill", "verify", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the current folder is not there any more" in done.stderr
