"""Errors from the operating system at operations of every kind: the quick form. `run.py` tries all of them."""

from __future__ import annotations

from lab.faults import faults

SCALES = {
    "build": 80,
    "build with scratch": 50,
    "build when finished": 20,
    "repair": 60,
    "repair without manifest": 30,
    "verify": 30,
    "verify of damage": 20,
}


def test_any_error_gives_the_right_bytes_or_an_error_of_ours_and_the_same_call_goes_on() -> None:
    row = faults(SCALES, seed=3)
    assert row.tried == sum(SCALES.values())
    assert not row.wrong
    assert row.hangs == 0
