"""Provenance: the source, position and fate of every document.

    source     position   split   dropped     tokens
    a.parquet  0          train   null        812         position: the row, or the byte offset
    a.parquet  1          null    too_short   0           split is null if the document was dropped
    b.jsonl    0          val     null        75

Documents are in the order of the plan, so those of a split are in the order of its shards. The files are Parquet
with large row groups, whose boundaries do not depend on how the rows arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.dataset.manifest import BAD, DROPS
from tokenmill.storage.output import Output

SCHEMA = pa.schema(
    [
        ("source", pa.dictionary(pa.int32(), pa.string())),
        ("position", pa.int64()),
        ("split", pa.dictionary(pa.int8(), pa.string())),
        ("dropped", pa.dictionary(pa.int8(), pa.string())),
        ("tokens", pa.int32()),
    ]
)
# Differences of increasing or small numbers take few bits, and less time than a dictionary.
_ENCODING: dict[str, Any] = {
    "compression": "zstd",
    "write_statistics": False,
    "use_dictionary": ["source", "split", "dropped"],
    "column_encoding": {"position": "DELTA_BINARY_PACKED", "tokens": "DELTA_BINARY_PACKED"},
}
GROUP_ROWS = 1 << 20
SMALL_ROWS = 1 << 14
# Joined when there are this many: even a table of two rows takes kilobytes.
MAX_PENDING_TABLES = 1 << 10
REASONS = (*DROPS, *BAD)


class ProvenanceWriter:
    """A provenance file being written. Rows are collected into large row groups."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self._sink = _ProvenanceSink(output)
        try:  # the constructor already writes
            self._writer = pq.ParquetWriter(pa.PythonFile(self._sink, mode="w"), SCHEMA, **_ENCODING)
        except BaseException:
            output.discard()
            raise
        self._pending: list[pa.Table] = []
        self._rows = 0

    def write(self, table: pa.Table) -> None:
        self._pending.append(table)
        self._rows += table.num_rows
        if len(self._pending) == MAX_PENDING_TABLES:
            self._pending = [_join(self._pending)]
        if self._rows >= GROUP_ROWS:
            self._flush(self._rows // GROUP_ROWS * GROUP_ROWS)

    def finish(self) -> Output:
        self._flush(self._rows)
        self._writer.close()
        return self.output

    def discard(self) -> None:
        """Discard the file. Arrow's writer still writes its footer, which the sink ignores."""
        self._sink.is_discarded = True
        self._writer.close()
        self.output.discard()

    def _flush(self, count: int) -> None:
        """Write the first `count` rows. Whole row groups, except at the end of the file."""
        if count:
            table = _join(self._pending)
            self._writer.write_table(table[:count], row_group_size=GROUP_ROWS)
            self._pending, self._rows = [table[count:]], self._rows - count


def _join(tables: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def join(parts: Iterable[pq.ParquetFile]) -> Iterator[pa.Table]:
    """The tables of several provenance files, one row group at a time."""
    for part in parts:
        for group in range(part.num_row_groups):
            # For small row groups, threads cost more than they save.
            many = part.metadata.row_group(group).num_rows > SMALL_ROWS
            table = part.read_row_group(group, use_threads=many)
            # Arrow before 20 reads every dictionary with indices of 32 bits.
            yield table if table.schema.equals(SCHEMA) else table.cast(SCHEMA)


def dictionary_column(codes: npt.NDArray[np.int8], names: Sequence[str]) -> pa.DictionaryArray:
    """A column of names by their number; below 0 is null."""
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), pa.array(names, pa.string()))


class _ProvenanceSink:
    """An output as the file object that Arrow writes to."""

    closed = False
    is_discarded = False

    def __init__(self, output: Output) -> None:
        self._output = output
        self._size = 0

    def write(self, data: bytes) -> int:
        self._size += len(data)
        return len(data) if self.is_discarded else self._output.write(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Publishing makes it durable."""

    def close(self) -> None:
        """The output is closed when it is published."""
