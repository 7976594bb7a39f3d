"""The quick form: some interrupts of a few commands. It is patient with busy machines; `make differ` is strict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from differ.seeding import Bug, is_caught

from differ import interrupts as lab

PATIENT = 6.0


def test_an_interrupted_command_ends_and_resumes() -> None:
    jobs = [job for job in lab.JOBS if job.name in ("prepare -j 2", "export to megatron")]
    row = lab.interrupts(jobs, 1, seed=1, limit=PATIENT)
    assert row.tried == 2 and not row.wrong


def test_an_interrupt_that_is_swallowed_ends_a_command() -> None:
    assert not lab.swallowed(limit=PATIENT).wrong


@pytest.mark.parametrize("bug", lab.BUGS, ids=lambda bug: bug.name)
def test_the_lab_notices(bug: Bug) -> None:
    assert is_caught(bug)


def _ending_of(code: str, *rivals: str) -> lab.Ending:
    """How a command ended that shares one core with others."""
    core = min(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", rival]) for rival in rivals]
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        for one in (process, *others):
            os.sched_setaffinity(one.pid, {core})
        ending = lab.Ending(process, ())
        assert ending.wait(PATIENT) is not None
        return ending
    finally:
        for one in (process, *others):
            one.kill()
            one.wait()


def test_time_that_a_command_was_kept_from_running_is_taken_off() -> None:
    forever, busy = "while True: pass", "import time\nwhile time.process_time() < 0.3: pass"
    ending = _ending_of(busy, forever, forever)
    assert ending.kept_from_running > 0.2
    assert 0.2 < ending.seconds < 1.0


def test_time_that_a_command_sleeps_is_not_taken_off() -> None:
    assert _ending_of("import time; time.sleep(0.5)", "while True: pass").seconds > 0.45
