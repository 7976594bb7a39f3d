"""Builders on the same output at the same time: the quick form. `run.py` runs many more."""

from __future__ import annotations

from lab.races import races, stops


def test_eight_builders_with_and_without_a_lock_come_to_the_right_bytes_or_an_error_of_ours() -> None:
    row = races(8, seed=2)
    assert row.tried == 8
    assert not row.wrong
    assert row.hangs == 0


def test_a_builder_that_was_stopped_past_its_heartbeat_does_no_harm_when_it_goes_on() -> None:
    row = stops(18, seed=2)
    assert row.tried == 18
    assert not row.wrong
    assert row.hangs == 0
