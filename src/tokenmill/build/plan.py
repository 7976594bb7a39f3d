"""The plan: a recipe resolved against the real sources, as an ordered table of units; and the token budget.

    sources, in order     a.parquet              b.jsonl          c.txt d.txt e.txt
    units                 [0 row groups 0-3]     [2 bytes 0-64M]  [4 whole files]
                          [1 row groups 4-7]     [3 bytes 64M-..]

Opening a file costs time as well, so a unit has fewer small files than their text alone would allow.

Pure: the same sources and the same recipe give the same plan, whatever the number of workers, the machine or the time
of day. Its fingerprint is the dataset's identity.

A token budget is met exactly. Units count in the order of the plan. When all units from the first one on reach the
budget, no more are started, and the unit that crosses the budget is built again, cut to what is left.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenmill import records
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.records import Int
from tokenmill.sizes import format_bytes
from tokenmill.sources.base import MIN_UNIT_BYTES, Extent, Source, Unit, default_unit_bytes
from tokenmill.units.receipts import NO_LIMIT
from tokenmill.units.task import UnitTask


def make_task(plan: Plan, unit: int, token_limit: int = NO_LIMIT) -> UnitTask:
    """The task of a unit of a plan."""
    found = plan.units[unit]
    sources = tuple(plan.sources[found.source : found.source + found.num_sources])
    return UnitTask(unit=found, sources=sources, token_limit=token_limit)


FORMAT = 1


MAX_UNITS = 4_000_000


# To open a file, check it and close it takes about as long as so much of its text: less if it is in memory, more over
# a network. A unit of fewer than `MANY_FILES` is never cut for it.
FILE_BYTES = 32_000
MANY_FILES = MIN_UNIT_BYTES // FILE_BYTES


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sources, units and everything else that decides the bytes of a dataset. There may be millions of them."""

    format: Int
    identity: dict[str, Any]
    sources: Sequence[Source]
    units: Sequence[Unit]
    target_tokens: Int

    @cached_property
    def fingerprint(self) -> str:
        return records.digest(
            {
                "format": self.format,
                "identity": self.identity,
                "sources": (source.identity() for source in self.sources),
                "units": self.units,
                "target_tokens": self.target_tokens,
            }
        )

    def text_bytes(self) -> int:
        return sum(unit.text_bytes for unit in self.units)

    def units_of(self, names: Collection[str]) -> frozenset[int]:
        """The units that read any of these sources."""
        numbers = {number for number, source in enumerate(self.sources) if source.name in names} if names else set()
        if not numbers:
            return frozenset()
        return frozenset(
            unit.index
            for unit in self.units
            if not numbers.isdisjoint(range(unit.source, unit.source + unit.num_sources))
        )


def make_plan(
    *,
    identity: Mapping[str, Any],
    sources: Sequence[Source],
    extents: Sequence[Extent],
    unit_bytes: int | None,
    sample: float | None,
    seed: int,
    count_files: bool = True,
) -> Plan:
    """Cut the sources into units of about `unit_bytes` of text, and draw the sample if one is wanted.

    Without `count_files` only text is counted, as 0.1 did: then any number of files may be in a unit.
    """
    total = sum(extent.text_bytes for extent in extents)
    size = unit_bytes or default_unit_bytes(total, sample=sample)
    if total // size > MAX_UNITS:
        raise RecipeError(
            f"units of {format_bytes(size)} would be {total // size:,}, more than {MAX_UNITS:,}",
            hint=f"give `unit_bytes={total // MAX_UNITS + 1}` or more",
        )
    slices = _slices(sources, extents, size, _most_work(total, len(extents), size) if count_files else None)
    if sample is not None:
        slices = _sample_units(list(slices), sample=sample, seed=seed)
    units = records.make_table(Unit, (Unit(index=index, **fields) for index, fields in enumerate(slices)))
    # Any unit of half the wanted size or more reaches the target, so that its piece becomes a shard as it is.
    return Plan(
        format=FORMAT,
        identity=dict(identity),
        sources=records.make_table(Source, sources),
        units=units,
        target_tokens=max(1, size // 16),
    )


def counts_files(plan: Plan) -> bool:
    """Whether a plan may be one that counts files. Of a sample that cannot be known."""
    if plan.identity.get("sample") is not None:
        return True
    total = plan.text_bytes()
    most = _most_work(total, len(plan.sources), plan.identity.get("unit_bytes") or default_unit_bytes(total))
    return all(unit.num_sources == 1 or _parts(unit.text_bytes, unit.num_sources, most) == 1 for unit in plan.units)


def _most_work(total: int, num_files: int, size: int) -> int:
    """The most text, with the cost of opening files added, that a unit of whole files has before it is cut."""
    return max(size, default_unit_bytes(total + num_files * FILE_BYTES))


def _parts(text_bytes: int, num_files: int, most_work: int) -> int:
    """Into how many units a run of whole files is cut: more than one only if opening them is most of the work."""
    return max(1, (text_bytes + num_files * FILE_BYTES) // most_work)


def _slices(
    sources: Sequence[Source], extents: Sequence[Extent], size: int, most_work: int | None
) -> Iterator[dict[str, int]]:
    sizes = [extent.text_bytes for extent in extents]
    for first, stop in _groups([source.split for source in sources], sizes, size):
        if stop - first == 1:
            yield from _cut(first, sources[first], extents[first], size)
        else:
            yield from _whole_files(first, sizes[first:stop], most_work)


def _groups(splits: list[str], sizes: list[int], size: int) -> Iterator[tuple[int, int]]:
    """Neighbours of one split that have up to `size` of text together; what is larger is alone."""
    first = gathered = 0
    for index, text_bytes in enumerate(sizes):
        if index > first and (gathered + text_bytes > size or splits[index] != splits[first]):
            yield first, index
            first, gathered = index, 0
        gathered += text_bytes
    if sizes:
        yield first, len(sizes)


def _whole_files(first: int, sizes: list[int], most_work: int | None) -> Iterator[dict[str, int]]:
    """A unit of whole files, or several with about the same work each if there are very many."""
    parts = 1 if most_work is None else _parts(sum(sizes), len(sizes), most_work)
    for start, stop in _section_bounds([size + FILE_BYTES for size in sizes], parts):
        yield {
            "source": first + start,
            "num_sources": stop - start,
            "start": 0,
            "stop": -1,
            "text_bytes": sum(sizes[start:stop]),
        }


def _cut(index: int, source: Source, extent: Extent, size: int) -> Iterator[dict[str, int]]:
    """Even parts of one source: a short last part would make a small piece, which must be copied at commit."""
    parts = max(1, round(extent.text_bytes / size))
    if extent.sections:
        bounds = _section_bounds(extent.sections, parts)
        weights = [sum(extent.sections[a:b]) for a, b in bounds]
    elif extent.cuts and parts > 1:
        spans = _section_bounds([b - a for a, b in itertools.pairwise(extent.cuts)], parts)
        bounds = [(extent.cuts[a], extent.cuts[b]) for a, b in spans]
        weights = [b - a for a, b in bounds]
    elif extent.divisible and parts > 1:
        cuts = [source.bytes * part // parts for part in range(parts + 1)]
        bounds = list(itertools.pairwise(cuts))
        weights = [b - a for a, b in bounds]
    else:
        bounds, weights = [(0, -1)], [extent.text_bytes]
    for (start, stop), weight in zip(bounds, weights, strict=True):
        yield {"source": index, "num_sources": 1, "start": start, "stop": stop, "text_bytes": weight}


def _section_bounds(sections: Sequence[int], parts: int) -> list[tuple[int, int]]:
    total, seen, starts, last = sum(sections), 0, [0], 0
    for index, weight in enumerate(sections):
        part = (2 * seen + weight) * parts // (2 * total) if total else 0
        if part != last and index:
            starts.append(index)
        last = part
        seen += weight
    return list(zip(starts, [*starts[1:], len(sections)], strict=True))


def _sample_units(slices: list[dict[str, int]], *, sample: float, seed: int) -> Iterator[dict[str, int]]:
    """A seeded choice of whole units, in order. Other units are not read at all."""
    wanted = max(1, round(sample * len(slices)))
    return (slices[i] for i in sorted(random.Random(seed).sample(range(len(slices)), wanted)))


def check_plan(plan: Plan, *, where: str) -> None:
    """Refuse a plan that was read and cannot be one: units out of order, or of sources that are not there."""
    max_tokens = plan.identity.get("max_tokens")
    right = {
        f"format {plan.format}, this tokenmill reads {FORMAT}": plan.format == FORMAT,
        f"{plan.target_tokens} tokens a shard": plan.target_tokens > 0,
        f"a budget of {max_tokens!r} tokens": max_tokens is None or (type(max_tokens) is int and max_tokens > 0),
        "its units are not numbered in order": all(unit.index == index for index, unit in enumerate(plan.units)),
        "a unit of sources that are not there": all(
            0 <= unit.source < unit.source + unit.num_sources <= len(plan.sources) and unit.start >= 0
            for unit in plan.units
        ),
    }
    for what, holds in right.items():
        if not holds:
            raise DatasetError(f"{where}: {what}", hint="the plan is damaged or was not written by this tokenmill")


def differences(old: Plan, new: Plan) -> list[str]:
    """What makes two plans differ, one line each, with both values."""
    lines = [
        f"{key}: was {old.identity.get(key)!r}, now {new.identity.get(key)!r}"
        for key in sorted(old.identity.keys() | new.identity.keys())
        if old.identity.get(key) != new.identity.get(key)
    ]
    before = {source.name: source for source in old.sources}
    after = {source.name: source for source in new.sources}
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was is None or now is None:
            lines.append(f"source {name}: {'was not there' if was is None else 'is gone'}")
        elif was.bytes != now.bytes:
            lines.append(f"source {name}: was {was.bytes} bytes, now {now.bytes}")
        elif was.identity() != now.identity():
            lines.append(f"source {name}: was {was.identity()}, now {now.identity()}")
    if not lines and old.fingerprint != new.fingerprint:
        lines.append("the sources are cut into other units")
    return lines


class Budget:
    """How many units a budget takes. `known`, the tokens of units, is shared with the build, and grows."""

    def __init__(self, max_tokens: int | None, known: Mapping[int, int]) -> None:
        self._max = max_tokens
        self._known = known
        self._next = 0
        self._tokens = 0

    def is_spent(self) -> bool:
        """Whether the units done so far, without a gap, reach the budget."""
        if self._max is None:
            return False
        while self._tokens < self._max and self._next in self._known:
            self._tokens += self._known[self._next]
            self._next += 1
        return self._tokens >= self._max

    def num_units(self, total: int) -> int:
        """How many whole units the dataset takes."""
        if not self.is_spent():
            return total
        return self._next if self._tokens == self._max else self._next - 1

    def cut(self, plan: Plan) -> UnitTask | None:
        """The unit that crosses the budget, cut to what is left of it; None if none has to be cut."""
        if not self.is_spent() or self._max is None or self._tokens == self._max:
            return None
        unit = plan.units[self._next - 1]
        room = self._max - (self._tokens - self._known[unit.index])
        return make_task(plan, unit.index, room)
