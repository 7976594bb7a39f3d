"""What will be read of an object is fetched in few requests, ahead, and is what is there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_object_folder import lead

from proxy import fault_proxy
from s3 import Bucket
from tokenmill.build.api import prepare
from tokenmill.storage import ranged_reader
from tokenmill.storage.ranged_reader import ExpectedFile, blocks_of

ranges = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 900)).map(lambda pair: (pair[0], sum(pair))))
AHEAD = 1000


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Requests of bytes, where there would be megabytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranged_reader, "FIRST_BYTES", 16)
        patch.setattr(ranged_reader, "GAP_BYTES", 20)
        patch.setattr(ranged_reader, "RANGE_BYTES", 300)
        yield


class Memory:
    """An object in memory: whoever fetches from it is counted."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.fetched: list[tuple[int, int]] = []
        self.pool = ThreadPoolExecutor(4)

    def begin(self, ask: Any, *given: Any) -> Any:
        return self.pool.submit(ask, *given)

    def fetch(self, key: str, start: int, stop: int, etag: str) -> bytes:
        self.fetched.append((start, stop))
        return self.data[start:stop]


@given(ranges)
def test_blocks_cover_what_is_wanted_in_order_and_little_else(wanted: list[tuple[int, int]]) -> None:
    blocks = blocks_of(wanted)
    covered = {byte for start, stop in blocks for byte in range(start, stop)}
    needed = {byte for start, stop in wanted for byte in range(start, stop)}
    assert needed <= covered
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(blocks))
    assert all(0 < stop - start <= min(300, 16 << number) for number, (start, stop) in enumerate(blocks))
    gaps = sorted(covered - needed)
    runs = [len(list(run)) for _, run in itertools.groupby(enumerate(gaps), key=lambda item: item[1] - item[0])]
    assert all(length <= 20 for length in runs)


def test_near_neighbours_share_a_request_and_far_ones_do_not() -> None:
    assert blocks_of([(0, 8), (10, 14), (100, 110)]) == [(0, 14), (100, 110)]


@given(ranges, st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 700)), max_size=30))
def test_any_read_gives_the_bytes_that_are_there(wanted: list[tuple[int, int]], reads: list[tuple[int, int]]) -> None:
    store: Any = Memory(os.urandom(5500))
    with store.pool, ExpectedFile(store, "key", 5500, "", AHEAD, wanted) as file:
        for at, size in [*reads, *((start, stop - start) for start, stop in sorted(wanted))]:
            file.seek(at)
            assert file.read(size) == store.data[at : at + size]


def test_what_is_read_as_expected_is_fetched_once() -> None:
    store: Any = Memory(os.urandom(5000))
    columns = [(at, at + 90) for at in range(0, 5000, 100)]
    with store.pool, ExpectedFile(store, "key", 5000, "", AHEAD, columns) as file:
        for start, stop in columns:
            file.seek(start)
            assert file.read(stop - start) == store.data[start:stop]
    assert sorted(store.fetched) == blocks_of(columns)


def test_columns_that_are_read_in_turns_do_not_hold_more_and_more() -> None:
    store: Any = Memory(os.urandom(60_000))
    columns = [(start, start + 6000) for start in range(0, 60_000, 6000)]
    with store.pool, ExpectedFile(store, "key", 60_000, "", AHEAD, columns) as file:
        for step, (start, _) in itertools.product(range(0, 6000, 500), columns):
            file.seek(start + step)
            assert file.read(500) == store.data[start + step : start + step + 500]
            assert len(file._coming) <= ranged_reader._BLOCKS_HELD


def test_two_columns_of_a_row_group_that_are_read_in_turns_are_fetched_once() -> None:
    store: Any = Memory(os.urandom(4000))
    columns = [(0, 2000), (2000, 4000)]
    with store.pool, ExpectedFile(store, "key", 4000, "", AHEAD, columns) as file:
        for step, (start, _) in itertools.product(range(0, 2000, 130), columns):
            stop = min(start + step + 130, start + 2000)
            file.seek(start + step)
            assert file.read(stop - start - step) == store.data[start + step : stop]
    assert sorted(store.fetched) == blocks_of(columns)


def test_ranges_beyond_the_object_are_no_harm() -> None:
    store: Any = Memory(b"abc")
    with store.pool, ExpectedFile(store, "key", 3, "", AHEAD, [(-5, 2), (2, 1 << 40), (9, 4)]) as file:
        assert file.read() == b"abc"


def test_row_groups_of_a_table_come_in_few_requests(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranged_reader, "RANGE_BYTES", 8 << 20)
    monkeypatch.setattr(ranged_reader, "FIRST_BYTES", 1 << 20)
    monkeypatch.setattr(ranged_reader, "GAP_BYTES", 1 << 18)
    texts = [os.urandom(500).hex() for _ in range(1000)]
    table = pa.table({"id": [f"{number}" for number in range(1000)], "text": texts})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20, compression="none")
    bucket.put("a.parquet", (tmp_path / "a.parquet").read_bytes())
    prepare(str(tmp_path / "a.parquet"), tmp_path / "here", tokenizer="byte", workers=1)
    asked: list[str] = []

    def note(method: str, path: str) -> str:
        asked.append(f"{method} {path.rpartition('/')[2]}")
        return ""

    with fault_proxy(bucket.endpoint) as proxy:
        lead(monkeypatch, bucket, proxy)
        proxy.choose = note
        prepare(f"{bucket.url}/a.parquet", tmp_path / "there", tokenizer="byte", workers=1)
    here, there = ((tmp_path / name / "train/00000.bin").read_bytes() for name in ("here", "there"))
    assert here == there
    # The footer, three requests at most for each of the eight places that are looked at, and the rows: not one a group.
    assert asked.count("GET a.parquet") <= 1 + 3 * 8 + 2 < 50
