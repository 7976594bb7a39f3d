"""Faults of networks and stores: the quick form. `run.py` injects many more."""

from __future__ import annotations

from lab.network import KINDS, network


def test_any_fault_gives_the_right_bytes_or_an_error_of_ours_and_the_same_call_goes_on() -> None:
    row = network(KINDS, 40, seed=5)
    assert row.tried >= 40
    assert not row.wrong
    assert row.hangs == 0
