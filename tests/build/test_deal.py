"""How units are dealt: each once, the same amount to each part, and of every kind of text its share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.build.deal import deal_units
from tokenmill.build.plan import Plan
from tokenmill.sources.base import Source, Unit


def plan_of(files: Sequence[tuple[str, int]], *, split: str = "") -> Plan:
    """A unit for each file: its name and its bytes of text. Files of `val/` are the validation split."""
    fields: dict[str, Any] = {"kind": "text", "compression": "", "bytes": 9, "modified": 0, "text": {}}
    return Plan(
        format=1,
        identity={},
        sources=tuple(Source(name=name, split="val" * name.startswith("val/"), **fields) for name, _ in files),
        units=tuple(
            Unit(index=index, source=index, num_sources=1, start=0, stop=-1, text_bytes=size)
            for index, (_, size) in enumerate(files)
        ),
        target_tokens=1,
    )


def shares(plan: Plan, count: int, begin: str) -> list[float]:
    """The fraction of the text of each part whose sources' names begin like this."""
    found = []
    for part in deal_units(plan, count):
        sizes = [plan.units[unit].text_bytes for unit in part]
        those = [plan.units[u].text_bytes for u in part if begin in plan.sources[plan.units[u].source].name]
        found.append(sum(those) / sum(sizes))
    return found


@settings(max_examples=60)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.data())
def test_every_unit_is_dealt_once_in_order_and_no_part_is_empty(sizes: list[int], data: Any) -> None:
    plan, count = plan_of([(f"{n:03}.txt", size) for n, size in enumerate(sizes)]), data.draw(st.integers(1, 80))
    parts = deal_units(plan, count)
    assert len(parts) == count
    assert sorted(itertools.chain(*parts)) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in parts)
    assert sum(bool(part) for part in parts) == min(count, len(sizes))
    assert parts == deal_units(plan, count)
    if len(sizes) >= count:
        totals = [sum(sizes[unit] for unit in part) for part in parts]
        assert max(totals) - min(totals) <= max(sizes) + len(sizes)  # a unit without text counts as a byte


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize(
    "names",
    [
        [f"{language}/{n:04}.txt" for language in ("de", "en") for n in range(120)],
        [f"{n:04}-{language}.txt" for n in range(120) for language in ("de", "en")],
        [f"{n:04}-{language}.txt" for n in range(60) for language in ("de", "en", "en", "en")],
    ],
    ids=["folders", "alternating", "one in four"],
)
def test_every_part_has_its_share_of_each_language(names: list[str], count: int) -> None:
    plan = plan_of([(name, 900 + 37 * (n % 5)) for n, name in enumerate(names)])
    whole = shares(plan, 1, "de")[0]
    assert all(abs(share - whole) < 0.03 for share in shares(plan, count, "de"))


def test_alternating_units_whose_names_say_nothing_are_not_dealt_to_one_part_each() -> None:
    """Even and odd units differ; parts that took turns would have one kind each."""
    plan = plan_of([(f"{n:04}.txt", 1000) for n in range(400)])
    for part in deal_units(plan, 2):
        assert 0.4 < sum(unit % 2 for unit in part) / len(part) < 0.6


def test_every_part_has_some_of_each_split() -> None:
    files = [(f"train/{n}.txt", 1000) for n in range(30)] + [(f"val/{n}.txt", 50) for n in range(4)]
    parts = deal_units(plan_of(files), 4)
    assert [sum(unit >= 30 for unit in part) for part in parts] == [1, 1, 1, 1]


def test_a_unit_that_is_much_of_a_part_comes_first() -> None:
    parts = deal_units(plan_of([*((f"a{n}.txt", 10) for n in range(60)), ("z.gz", 200)]), 4)
    totals = sorted(sum(200 if unit == 60 else 10 for unit in part) for part in parts)
    assert totals == [200, 200, 200, 200]
