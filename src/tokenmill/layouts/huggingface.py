"""Hugging Face: `data/{split}-00000-of-00001.parquet` with a column `input_ids`, a row a document or packed rows.

`load_dataset(folder)` finds the splits by these names. Imports also take what `save_to_disk` writes, and other
parquet with such a column. The bytes of the files are those that the installed pyarrow writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.data.bare import Hints
from tokenmill.data.dataset import Dataset
from tokenmill.layouts.huggingface_files import COLUMN, MARK, MARKS, open_rows
from tokenmill.layouts.rows import Rows, cut_by_size, rows_of
from tokenmill.layouts.shape import Export, Facts, Files, Options, Part
from tokenmill.storage import Output

if TYPE_CHECKING:
    import pyarrow as pa

SUMMARY = "parquet with a column input_ids, a row a document or packed rows"
OPTIONS = frozenset({"shard_size", "seq_len"})
NEEDS: frozenset[str] = frozenset()
WIDTHS = (4, 4)

SHARD_TOKENS = 1 << 25
GROUP_TOKENS = 1 << 20


def plan(source: Dataset, options: Options) -> Export:
    splits, notes = rows_of(source, "huggingface", options.seq_len)
    size = options.shard_size or SHARD_TOKENS
    parts = []
    for name, rows in splits.items():
        ranges = cut_by_size(rows, size, lambda lengths: lengths)
        parts += [
            _part(f"data/{name}-{number:05d}-of-{len(ranges):05d}.parquet", rows, bounds)
            for number, bounds in enumerate(ranges)
        ]
    return Export(parts=tuple(parts), notes=notes)


def open(path: str, hints: Hints) -> Dataset:
    return open_rows(path, hints)


def _part(name: str, rows: Rows, bounds: tuple[int, int]) -> Part:
    start, stop = bounds

    def write(files: Files) -> Facts:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema(
            [pa.field(COLUMN, pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False)],
            metadata={MARK: MARKS["packed" if rows.seq_len else "documents"]},
        )
        sink = _Sink(files.create(name))
        # Ids repeat too little for a dictionary, and nobody searches by their range.
        with pq.ParquetWriter(
            sink, schema, compression="none", use_dictionary=False, write_statistics=False, store_schema=False
        ) as writer:
            for batch in _batches(rows, start, stop, schema):
                writer.write_batch(batch)
        return {}

    return Part(name=name, num_bytes=4 * (stop - start), write=write)


def _batches(rows: Rows, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """A block of rows each, which becomes a row group."""
    import pyarrow as pa

    for tokens, lengths in replace(rows, block_tokens=GROUP_TOKENS).blocks(start, stop):
        values = pa.array(tokens.astype(np.int32, copy=False))
        edges = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        yield pa.record_batch([pa.ListArray.from_arrays(edges, values, type=schema.field(0).type)], schema=schema)


class _Sink:
    """An output as the kind of file that pyarrow writes to. Whoever made the output publishes it."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.closed = False

    def write(self, data: bytes) -> int:
        return self._output.write(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
