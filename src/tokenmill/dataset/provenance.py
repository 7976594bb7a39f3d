"""Provenance: for every document of the sources, where it stood and what became of it.

Columns: source, position (row or byte offset), split (null if dropped), dropped (the reason,
null if kept), tokens. Documents stand in the order of the plan, so the kept ones of a split are
in the order of its shards.
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
# Numbers that rise, or are small, take few bits as differences, and less time than looking for ones seen before.
_ENCODING: dict[str, Any] = {
    "compression": "zstd",
    "write_statistics": False,
    "use_dictionary": ["source", "split", "dropped"],
    "column_encoding": {"position": "DELTA_BINARY_PACKED", "tokens": "DELTA_BINARY_PACKED"},
}
GROUP_ROWS = 1 << 20
SMALL_ROWS = 1 << 14
# A table of two rows takes kilobytes.
TABLES_HELD = 1 << 10
REASONS = (*DROPS, *BAD)


class ProvenanceWriter:
    """A provenance file in the making; rows are gathered to large row groups."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self._sink = _Sink(output)
        try:  # it begins to write at once
            self._writer = pq.ParquetWriter(pa.PythonFile(self._sink, mode="w"), SCHEMA, **_ENCODING)
        except BaseException:
            output.discard()
            raise
        self._held: list[pa.Table] = []
        self._rows = 0

    def write(self, table: pa.Table) -> None:
        self._held.append(table)
        self._rows += table.num_rows
        if len(self._held) == TABLES_HELD:
            self._held = [_joined(self._held)]
        if self._rows >= GROUP_ROWS:
            self._flush(self._rows // GROUP_ROWS * GROUP_ROWS)

    def finish(self) -> Output:
        self._flush(self._rows)
        self._writer.close()
        return self.output

    def discard(self) -> None:
        """Throw the file away; Arrow's writer still wants to write its footer, to nowhere."""
        self._sink.is_discarded = True
        self._writer.close()
        self.output.discard()

    def _flush(self, count: int) -> None:
        """Write the first rows; where row groups end must not depend on how the rows came in."""
        if count:
            table = _joined(self._held)
            self._writer.write_table(table[:count], row_group_size=GROUP_ROWS)
            self._held, self._rows = [table[count:]], self._rows - count


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def join(parts: Iterable[pq.ParquetFile]) -> Iterator[pa.Table]:
    """The tables of several provenance files, one row group at a time."""
    for part in parts:
        for group in range(part.num_row_groups):
            # Threads cost more than they bring where there is little to read.
            many = part.metadata.row_group(group).num_rows > SMALL_ROWS
            table = part.read_row_group(group, use_threads=many)
            # Arrow before 20 reads every dictionary with indices of 32 bits.
            yield table if table.schema.equals(SCHEMA) else table.cast(SCHEMA)


def _choice(codes: npt.NDArray[np.int8], names: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), pa.array(names, pa.string()))


class _Sink:
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
