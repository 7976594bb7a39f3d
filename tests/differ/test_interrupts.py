"""The quick form: some interrupts of a few commands. It is patient with busy machines; `make differ` is strict."""

from __future__ import annotations

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
