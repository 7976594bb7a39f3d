"""Kills and power cuts in the model, one, two or three in a row: the quick form. `run.py` tries 100,000 states."""

from __future__ import annotations

from lab.powercut import crashes_in_a_row, kills, power_cuts

MIXED = {
    **{"plain": 2, "splits": 4, "scratch": 0, "budget": 2, "packs": 1},
    **{"join": 20, "update": 1, "repair": 1, "remake": 1},
}
HISTORIES = {
    **{"plain": 8, "splits": 8, "scratch": 5, "budget": 8, "packs": 5},
    **{"join": 8, "update": 5, "repair": 3, "remake": 3},
}


def test_a_kill_after_any_operation_leaves_what_the_same_call_finishes_for_good() -> None:
    row = kills()
    assert not row.wrong
    assert row.hangs == 0
    assert row.tried > 500


def test_a_power_cut_after_any_operation_shows_no_reader_a_corrupt_dataset_and_the_same_call_gives_the_same_bytes() -> (
    None
):
    row = power_cuts(MIXED, seed=1, thinned=4)
    assert not row.wrong
    assert row.hangs == 0
    assert row.tried > 750


def test_crashes_of_runs_that_finish_what_a_crash_left_are_no_worse() -> None:
    row = crashes_in_a_row(HISTORIES, seed=2)
    assert not row.wrong
    assert row.hangs == 0
    assert row.tried > 200
