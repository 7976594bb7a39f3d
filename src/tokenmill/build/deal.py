"""Deals the units of a plan to parts of about the same text, each of them a fair sample of the corpus.

    plan     en en en en en en de de de fr fr fr       units in order
    part 1   en    en    en       de       fr          in each run of the plan, every part gets its share
    part 2      en    en    en de    de       fr

The units are taken in order, and each goes to the part with the least text so far. So parts have the same amount of any
run of the plan, within a unit: of each folder, each language, each month. Names that differ in their digits only count
as one run, so that sources that alternate (`001-de`, `001-en`, `002-de`, ...) are fairly dealt as well. Each split is
dealt by itself. A unit that is much of a part's text by itself comes first.

Pure: the plan and the number of parts decide everything.
"""

from __future__ import annotations

import heapq
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tokenmill.build.plan import Plan
from tokenmill.sources.base import Unit

_DIGITS = re.compile(r"\d+")
# Units of more than this share of a part are dealt first.
_LARGE = 0.25


def deal_units(plan: Plan, count: int) -> list[list[int]]:
    """The units of each of `count` parts, in the order of the plan. With at least as many units, no part is empty."""
    chance = random.Random(f"{plan.fingerprint} {count}")  # decides between parts that are equal
    by_split: dict[str, list[Unit]] = defaultdict(list)
    for unit in plan.units:
        by_split[plan.sources[unit.source].split].append(unit)
    parts: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    # The largest split first. The parts that got less of it are the first to get units of the next.
    for units in sorted(by_split.values(), key=_text_bytes, reverse=True):
        extra = _deal(_in_turn(plan, units, count), sizes, parts, chance)
        sizes = [size + more for size, more in zip(sizes, extra, strict=True)]
    return [sorted(part) for part in parts]


def _deal(units: Iterable[Unit], before: Sequence[int], parts: list[list[int]], chance: random.Random) -> list[int]:
    """Give each unit to the part that has got the least of these; of equal ones, to the one with the least before."""
    dealt = [(0, size, chance.random(), number) for number, size in enumerate(before)]
    heapq.heapify(dealt)
    for unit in units:
        size, earlier, _, number = dealt[0]
        parts[number].append(unit.index)
        heapq.heapreplace(dealt, (size + max(1, unit.text_bytes), earlier, chance.random(), number))
    return [size for size, _, _, _ in sorted(dealt, key=lambda item: item[3])]


def _in_turn(plan: Plan, units: Sequence[Unit], count: int) -> list[Unit]:
    """Large units first, the largest of them at the beginning; then the others, kind by kind."""
    large_bytes = _LARGE * _text_bytes(units) / count
    names: dict[str, int] = {}
    kinds: dict[int, int] = {}  # of every source, in order of appearance
    for unit in units:
        if unit.source not in kinds:
            kinds[unit.source] = names.setdefault(_kind(plan.sources[unit.source].name), len(names))

    def turn(unit: Unit) -> tuple[int, int, int]:
        if unit.text_bytes > large_bytes:
            return 0, -unit.text_bytes, unit.index
        return 1, kinds[unit.source], unit.index

    return sorted(units, key=turn)


def _kind(name: str) -> str:
    """What the names of similar sources have in common."""
    return _DIGITS.sub("0", name)


def _text_bytes(units: Sequence[Unit]) -> int:
    return sum(unit.text_bytes for unit in units)
