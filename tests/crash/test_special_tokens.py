from __future__ import annotations

from lab.specials import special_strings


def test_special_strings_stay_text_at_ten_thousand_places() -> None:
    row = special_strings(10_000, seed=0)
    assert row.tried >= 10_000
    assert not row.wrong
