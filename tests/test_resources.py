from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill import __version__
from tokenmill.errors import RecipeError
from tokenmill.resources import MEMORY_BUDGET, allowed_cores, allowed_memory, num_cores, resolve_workers


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
    assert "`workers`" in caught.value.hint
    monkeypatch.setenv("DATASET_NUM_PROC", "100000")
    with pytest.raises(RecipeError, match="too many"):
        resolve_workers(None)


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "tokenmill", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tokenmill {__version__}\n"


@pytest.mark.parametrize(
    ("own", "files", "cores", "memory"),
    [
        ("0::/", {"cpu.max": "150000 100000", "memory.max": "2000000000"}, 1.5, 2e9),
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, math.inf, math.inf),
        # The group around ours may be the tighter one.
        ("0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, 2.0, math.inf),
        # In a container, what is ours is seen at the top, whatever it is called outside.
        (
            "3:cpu,cpuacct:/docker/x\n2:memory:/docker/x",
            {
                "cpu/cpu.cfs_quota_us": "300000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "500000000",
            },
            3.0,
            5e8,
        ),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf, math.inf),
        ("0::/", {"cpu.max": "rubbish", "memory.max": ""}, math.inf, math.inf),
        ("", {}, math.inf, math.inf),
    ],
)
def test_a_container_is_asked_what_it_allows(
    tmp_path: Path, own: str, files: dict[str, str], cores: float, memory: float
) -> None:
    groups, mine = tmp_path / "groups", tmp_path / "own"
    mine.write_text(own)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    assert (allowed_cores(groups, mine), allowed_memory(groups, mine)) == (cores, memory)


def test_a_container_bounds_workers_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATASET_NUM_PROC")
    monkeypatch.setattr("tokenmill.resources.allowed_memory", lambda: 1.9 * MEMORY_BUDGET)
    assert resolve_workers(None) == 1
    assert resolve_workers(2) == 2
    monkeypatch.setattr("tokenmill.resources.allowed_cores", lambda: 0.5)
    assert num_cores() == 1


@pytest.mark.parametrize(("limit", "refused"), [(600_000_000, True), (900_000_000, False)])
def test_a_limit_of_addresses_at_which_libraries_abort_is_refused(tmp_path: Path, limit: int, refused: bool) -> None:
    code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))"
    code += "; from tokenmill.cli.main import main; main()"
    run = [sys.executable, "-c", code, "plan", "a.txt", "--tokenizer", "byte", "-j", "1"]
    (tmp_path / "a.txt").write_text("a line\n")
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ("a process may have 600 MB of addresses here, and needs about 800 MB" in done.stderr) == refused
    assert (done.returncode == 0) != refused
