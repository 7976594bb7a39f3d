"""Whatever happens to the files of a finished dataset: verify sees it, repair mends it."""

from __future__ import annotations

import pytest
from lab.damage import DAMAGES, run


@pytest.mark.parametrize(("kind", "points", "floor"), [("verify", 200, 300), ("repair", 30, 45), ("state", 30, 30)])
def test_damage_is_named_and_mended_and_healthy_files_are_left_alone(kind: str, points: int, floor: int) -> None:
    row = run(kind, points, seed=1)
    assert not row.wrong, "\n".join(row.wrong)
    assert row.hangs == 0
    assert row.tried >= floor


def test_there_are_many_kinds_of_damage() -> None:
    assert len(DAMAGES) >= 12
