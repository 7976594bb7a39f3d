"""The agent of a host: what it starts ends with its life line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tokenmill.executors.host_agent import kill_below

AGENT = [sys.executable, "-m", "tokenmill.executors.host_agent"]


def agent(*arguments: str, place: Path = Path("/nowhere/ray")) -> subprocess.Popen[str]:
    process = subprocess.Popen(AGENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    request = {"arguments": arguments, "environment": {"RAY_USAGE_STATS_ENABLED": "0"}, "place": str(place)}
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return process


def test_a_ray_that_does_not_start_says_why() -> None:
    with agent("start", "--no-such-option") as process:
        assert process.stdout is not None
        message = json.loads(process.stdout.readline())
    assert message["kind"] == "ended"
    assert any("no-such-option" in line for line in message["log"])


def test_an_agent_whose_launcher_is_gone_ends_at_once_and_removes_the_folder_of_ray(tmp_path: Path) -> None:
    (tmp_path / "ray/session").mkdir(parents=True)
    (tmp_path / "ray/session/log").touch()
    (tmp_path / "other").mkdir()
    with agent("start", "--help", place=tmp_path / "ray") as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


KILL = """
import os, subprocess, sys, ctypes, time
from tokenmill.executors.host_agent import _SUBREAPER, kill_below
ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
subprocess.Popen(["sh", "-c", "setsid sh -c 'sleep 321.5 & sleep 321.5' & sleep 0.2"]).wait()
kill_below(os.getpid())
print("alive")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found by /proc")
def test_processes_in_other_sessions_whose_parents_have_ended_are_found() -> None:
    done = subprocess.run([sys.executable, "-c", KILL], capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n", done.stderr
    time.sleep(0.05)
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"321.5" in line for line in lines)
    assert kill_below(10**9) is None, "nothing is below a process that does not exist"
