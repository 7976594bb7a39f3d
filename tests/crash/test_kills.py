"""Real processes, killed at operations of builds and repairs: the quick form. `run.py` kills at every one."""

from __future__ import annotations

import sys

import pytest
from lab.kills import BUILDS, REPAIRS, command_kills, kills, repeated_kills
from lab.transfers import transfer_kills

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are found by /proc")


def test_a_build_or_repair_that_is_killed_anywhere_goes_on_to_the_same_bytes() -> None:
    row = kills((*BUILDS, *REPAIRS), 90, seed=5)
    assert row.tried == 90
    assert not row.wrong
    assert row.hangs == 0


def test_so_does_one_that_is_killed_again_while_it_goes_on() -> None:
    row = repeated_kills(("build", "repair"), 12, seed=5)
    assert row.tried == 12
    assert not row.wrong
    assert row.hangs == 0


def test_so_does_an_export_or_import_of_any_layout() -> None:
    row = transfer_kills(60, seed=5)
    assert row.tried == 60
    assert not row.wrong
    assert row.hangs == 0


@linux
def test_a_command_whose_worker_or_parent_is_killed_goes_on_to_the_same_bytes() -> None:
    row = command_kills(2, seed=36)
    assert row.tried >= 2
    assert not row.wrong
    assert row.hangs == 0
