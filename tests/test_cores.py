from __future__ import annotations

import subprocess
import sys

import pytest

from tokenmill import __version__
from tokenmill.cores import num_cores, resolve_workers
from tokenmill.errors import RecipeError


def test_workers_are_as_asked_or_as_the_machine_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_workers(3) == 3
    assert resolve_workers(0) == resolve_workers(-1) == max(1, num_cores() * 3 // 4)
    monkeypatch.setenv("DATASET_NUM_PROC", "5")
    assert resolve_workers(None) == 5
    monkeypatch.delenv("DATASET_NUM_PROC")
    assert resolve_workers(None) == num_cores()


def test_more_workers_than_the_machine_can_bear_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="100000 workers are too many") as caught:
        resolve_workers(100_000)
    assert "-j" in caught.value.hint
    monkeypatch.setenv("DATASET_NUM_PROC", "100000")
    with pytest.raises(RecipeError, match="too many"):
        resolve_workers(None)


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "tokenmill", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tokenmill {__version__}\n"
