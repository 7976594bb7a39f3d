from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill import records
from tokenmill.build.plan import Plan, make_plan
from tokenmill.records import RUN, Table, make_table
from tokenmill.sources.base import Extent, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    title: str
    rows: Any
    more: dict[str, Any]


def some_rows(count: int) -> list[Row]:
    return [Row(name=f"Zeile {number}", size=number * 7) for number in range(count)]


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MANY", 10)


def test_few_rows_are_a_tuple() -> None:
    assert make_table(Row, iter(some_rows(3))) == tuple(some_rows(3))
    assert isinstance(make_table(Row, some_rows(3)), tuple)


@pytest.mark.parametrize("count", [10, RUN - 1, RUN, RUN + 1, 3 * RUN + 5])
def test_many_rows_are_a_table_that_reads_like_a_tuple(few_are_many: None, count: int) -> None:
    rows = tuple(some_rows(count))
    table = make_table(Row, iter(rows))
    assert isinstance(table, Table)
    assert (len(table), tuple(table), table[0], table[-1]) == (count, rows, rows[0], rows[-1])
    assert table[3:9:2] == rows[3:9:2]
    assert table == rows
    assert table != rows[:-1]
    with pytest.raises(IndexError):
        table[count]


@settings(max_examples=50, deadline=None, database=None)
@given(count=st.integers(0, 40), texts=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4))
def test_a_value_has_one_text_whether_it_is_made_at_once_or_in_parts(count: int, texts: dict[str, str]) -> None:
    rows = some_rows(count)
    packed = Table(rows, records.canonical, lambda text: [])
    plain = Whole(title="t", rows=rows, more=texts)
    for value in (packed, iter(rows), tuple(rows)):
        whole = Whole(title="t", rows=value, more=texts)
        assert b"".join(records.canonical_parts(whole)) == records.canonical(plain)


def test_a_plan_of_many_units_is_sealed_and_read_back_as_one_of_few_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [
        Source(name=f"{n:04d}.txt", kind="text", compression="", bytes=100, modified=n, split="", text={})
        for n in range(3 * RUN)
    ]
    extents = [Extent(text_bytes=100) for _ in sources]

    def plan() -> Plan:
        return make_plan(identity={"a": 1}, sources=sources, extents=extents, unit_bytes=100, sample=None, seed=0)

    short = plan()
    monkeypatch.setattr(records, "MANY", 10)
    long = plan()
    assert isinstance(long.units, Table)
    assert isinstance(long.sources, Table)
    assert long.fingerprint == short.fingerprint
    assert records.seal(long) == records.seal(short)
    assert records.unseal(Plan, records.seal(long), where="plan") == short


def test_the_seal_of_a_record_is_its_digest_and_a_changed_byte_breaks_it() -> None:
    value = Whole(title="t", rows=some_rows(20), more={})
    data = records.seal(value)
    for size in (1, 7, 76, 77, 1000):
        blocks = [data[at : at + size] for at in range(0, len(data), size)]
        assert records.seal_of(blocks) == records.digest(value)
    for at in (0, len(data) // 2, len(data) - 1):
        assert records.seal_of([data[:at], bytes([data[at] ^ 1]), data[at + 1 :]]) is None
    assert records.seal_of([]) is None
