"""Batches are even by all that they hold, and not only by their text."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokenmill.build.resolve import resolve_build
from tokenmill.recipe import make_recipe
from tokenmill.sources.base import MAX_DOCUMENTS, Batch, Skip, even, make_batch
from tokenmill.sources.reader import read_unit


def skips(count: int, first: int = 0) -> Batch:
    some = [Skip(0, first + i, "invalid_json") for i in range(count)]
    return make_batch(0, pa.array([], pa.large_string()), np.zeros(0, np.int64), some)


def test_documents_that_are_skipped_count_as_those_that_are_kept() -> None:
    batches = list(even((skips(10, 10 * i) for i in range(10)), max_documents=25))
    assert [batch.num_read for batch in batches] == [20, 20, 20, 20, 20]
    positions = [skip.position for batch in batches for skip in batch.skips]
    assert positions == list(range(100))


def test_no_bound_at_all_is_a_bound_all_the_same() -> None:
    batches = list(even(skips(MAX_DOCUMENTS // 4, i) for i in range(9)))
    assert max(batch.num_read for batch in batches) <= MAX_DOCUMENTS
    assert sum(batch.num_read for batch in batches) == 9 * (MAX_DOCUMENTS // 4)


@pytest.mark.parametrize(
    ("name", "data", "read"),
    [
        ("bad.jsonl.gz", b"{}\n" * 400_000, 400_000),
        ("short.txt.gz", b"a\n" * 400_000, 400_000),
        ("blank.txt.gz", b"\n" * 400_000 + b"x", 1),
    ],
)
def test_a_chunk_of_many_small_documents_comes_in_small_batches(
    tmp_path: Path, name: str, data: bytes, read: int
) -> None:
    (tmp_path / name).write_bytes(gzip.compress(data, 1))
    check_batches(tmp_path / name, read)


def test_a_column_of_one_text_a_hundred_thousand_times_comes_in_small_batches(tmp_path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(200_000, np.int32)), ["x" * 1000])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet", row_group_size=200_000)
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    check_batches(tmp_path / "a.parquet", 200_000)


def check_batches(path: Path, read: int) -> None:
    plan = resolve_build(make_recipe({"sources": (str(path),), "tokenizer": "byte"})).plan
    total = 0
    for batch in read_unit(plan.units[0], [str(path)], list(plan.sources), documents="lines", limit=1000):
        total += batch.num_read
        assert batch.num_read <= MAX_DOCUMENTS
        assert batch.text.nbytes <= 20_000_000
    assert total == read


def test_values_for_a_filter_stay_with_their_documents_when_batches_are_cut() -> None:
    texts = [f"text {number}" for number in range(10)]
    beside = tuple({"n": number} for number in range(10))
    whole = replace(make_batch(0, pa.array(texts), np.arange(10)), beside=beside)
    parts = list(even([whole, whole], max_documents=4))
    assert [text for part in parts for text in part.text.to_pylist()] == texts * 2
    assert [values for part in parts for values in part.beside] == [*beside, *beside]
    assert all(len(part.beside) == len(part.text) <= 4 for part in parts)
