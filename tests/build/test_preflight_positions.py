"""Where to look before the work."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.build.plan import Plan, make_plan
from tokenmill.build.preflight import make_request
from tokenmill.sources.base import Extent, Source

SOURCE = Source(name="a.txt", kind="text", compression="", bytes=0, modified=0, split="", text={})


def plan_of(*sources: Source, sizes: list[int], unit_bytes: int) -> Plan:
    extents = [
        Extent(text_bytes=size, divisible=not source.compression) for source, size in zip(sources, sizes, strict=True)
    ]
    return make_plan(identity={}, sources=sources, extents=extents, unit_bytes=unit_bytes, sample=None, seed=0)


def texts(*sizes: int, unit_bytes: int) -> Plan:
    sources = [replace(SOURCE, name=f"{number}.txt", bytes=size) for number, size in enumerate(sizes)]
    return plan_of(*sources, sizes=list(sizes), unit_bytes=unit_bytes)


def positions_of(plan: Plan, count: int) -> list[tuple[int, int, tuple[int, ...]]]:
    request = make_request(plan, count)
    return [(one.task.unit.index, one.task.unit.source, one.positions) for one in request.slices]


def test_positions_are_at_even_distances_over_units_of_any_size() -> None:
    assert positions_of(texts(80, unit_bytes=1000), 4) == [(0, 0, (10, 30, 50, 70))]
    assert positions_of(texts(60, 20, unit_bytes=20), 4) == [(0, 0, (10,)), (1, 0, (10,)), (2, 0, (10,)), (3, 1, (10,))]


def test_a_unit_of_many_files_is_visited_file_by_file() -> None:
    request = make_request(texts(10, 50, 20, unit_bytes=1000), 4)
    assert [(one.task.sources[0].name, one.at, one.positions) for one in request.slices] == [
        ("1.txt", 10, (0, 20, 40)),
        ("2.txt", 60, (10,)),
    ]
    assert request.num_files == 3


def test_tables_share_what_was_planned_for_them() -> None:
    text = replace(SOURCE, name="a.txt", bytes=100)
    packed = replace(SOURCE, name="b.txt.gz", bytes=25, compression="gz")
    tables = [replace(SOURCE, name=name, bytes=10, kind="parquet") for name in ("c.parquet", "d.parquet")]
    plan = plan_of(text, packed, *tables, sizes=[100, 100, 90, 110], unit_bytes=1000)
    sizes = [one.task.unit.text_bytes for one in make_request(plan, 8).slices]
    assert sizes == [100, 100, 100, 100]


def test_tables_without_a_byte_share_it_too() -> None:
    text = replace(SOURCE, name="a.txt", bytes=14)
    tables = [replace(SOURCE, name=name, bytes=0, kind="parquet") for name in ("y.parquet", "z.parquet")]
    slices = make_request(plan_of(text, *tables, sizes=[14, 1, 1], unit_bytes=1000), 8).slices
    assert [(one.task.sources[0].name, one.task.unit.text_bytes) for one in slices] == [
        ("a.txt", 14),
        ("z.parquet", 1),
    ]


def test_a_plan_of_nothing_is_looked_at_all_the_same() -> None:
    assert positions_of(texts(0, unit_bytes=10), 2) == [(0, 0, (0, 0))]
