"""Disks that are really full: the quick form. `run.py` fills them at every page and at every file."""

from __future__ import annotations

import pytest
from lab.disks import disks, why_not

REASON = why_not()


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_full_disk_stops_a_build_cleanly_and_it_goes_on_when_there_is_space() -> None:
    row = disks(8)
    assert row.tried >= 30
    assert not row.wrong
    assert row.hangs == 0
