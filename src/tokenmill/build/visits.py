"""What to look at before the work: places at even distances over all that was planned.

planned   | a.parquet  | b.jsonl         | c.txt, d.txt |
places        x      x       x      x        x      x       a visit for each unit and source that holds any
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tokenmill.build.task import Task, make_task
from tokenmill.planning import EXPANSION, Plan

# Places that are looked at before the work; text that is encoded, and read to get there, of them all together.
PLACES = 8
ENCODE_BYTES = 256_000
READ_BYTES = 1_000_000
# Kinds of sources that say how many rows they have, and how large those are.
TABLES = ("parquet", "arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A slice of one source, and the places in it to look at: bytes of the slice, as far as it was planned.

    `at` is where the slice begins among all planned bytes.
    """

    task: Task
    at: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to look at before the work: `encode_bytes` of text at each place. `planned_bytes` are those of all units.

    Where nothing but reading leads to a place, `read_bytes` are read for each; the places are moved closer if need be.
    """

    visits: tuple[Visit, ...]
    encode_bytes: int
    read_bytes: int
    planned_bytes: int
    num_files: int


def make_request(
    plan: Plan, places: int = PLACES, *, encode_bytes: int = ENCODE_BYTES, read_bytes: int = READ_BYTES
) -> Request:
    """Places at even distances over all that was planned."""
    total = plan.text_bytes()
    wanted = [total * (2 * place + 1) // (2 * places) for place in range(places)]
    visits: list[Visit] = []
    num_files = begin = taken = 0
    for unit in plan.units:
        end = begin + unit.text_bytes
        first = taken
        while taken < places and (wanted[taken] < end or unit.index == len(plan.units) - 1):
            taken += 1
        if first < taken:
            visits += _visits(make_task(plan, unit.index), begin, [at - begin for at in wanted[first:taken]])
        num_files += unit.num_sources
        begin = end
    return Request(
        visits=tuple(visits),
        encode_bytes=encode_bytes // places,
        read_bytes=read_bytes // places,
        planned_bytes=total,
        num_files=num_files,
    )


def _visits(task: Task, begin: int, places: list[int]) -> Iterator[Visit]:
    """A visit to each source of a unit that holds any of the places."""
    if len(task.sources) == 1:
        yield Visit(task=task, at=begin, places=tuple(places))
        return
    sizes = _planned_sizes(task)
    ends = list(itertools.accumulate(sizes))
    last = len(ends) - 1
    for number, inside in itertools.groupby(places, lambda place: min(bisect_right(ends, place), last)):
        start = ends[number] - sizes[number]
        unit = replace(task.unit, source=task.unit.source + number, num_sources=1, text_bytes=sizes[number])
        yield Visit(
            task=Task(unit=unit, sources=(task.sources[number],)),
            at=begin + start,
            places=tuple(place - start for place in inside),
        )


def _planned_sizes(task: Task) -> list[int]:
    """What was planned for each source of a unit. Of tables only the sum is known, so that files share it."""
    tables = [source.kind in TABLES for source in task.sources]
    # A table without a byte is none, but its unit was planned, and will say so.
    sizes = [
        max(1, source.bytes) if table else source.bytes * (EXPANSION if source.compression else 1)
        for source, table in zip(task.sources, tables, strict=True)
    ]
    in_tables = sum(itertools.compress(sizes, tables))
    left = task.unit.text_bytes - (sum(sizes) - in_tables)
    return [size * left // in_tables if table else size for size, table in zip(sizes, tables, strict=True)]
