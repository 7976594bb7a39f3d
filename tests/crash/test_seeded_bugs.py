"""The lab notices when a protective line is missing, and finds nothing where none is."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from lab.bugs import BUGS
from lab.seeded import catches, seeded_bugs, troubles


def test_a_protective_line_that_is_taken_out_is_missed_by_an_experiment() -> None:
    """Every third of them; `make crash` takes out all, one after the other."""
    row = seeded_bugs(BUGS[::3])
    assert not row.wrong
    assert row.tried >= 12


def test_a_bug_that_is_none_is_not_noticed() -> None:
    (sweep,) = (bug for bug in BUGS if bug.name == "no sweep of temp files")
    assert [found for _, found in catches([replace(sweep, plant=nullcontext)])] == [None]


def test_troubles_that_are_no_crashes_give_the_right_bytes_or_are_told() -> None:
    row = troubles(("plain",), {"plain": 60, "splits": 60, "budget": 60, "packs": 60}, every=20)
    assert not row.wrong
    assert row.hangs == 0
    assert row.tried > 300
