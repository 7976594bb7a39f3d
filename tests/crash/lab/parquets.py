"""Provenance files that were encoded or decoded before: the lab has Arrow do each of them once.

The same rows give the same bytes. They are written in the pieces in which Arrow's own writer wrote them the first
time, and every piece still goes its way through the seam.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.build import commit
from tokenmill.dataset import provenance


@contextlib.contextmanager
def remembered_parquets() -> Iterator[None]:
    """Within it, a provenance file with the rows of an earlier one costs next to nothing."""
    encoded: dict[bytes, list[bytes]] = {}
    decoded: dict[bytes, _Decoded] = {}

    def make_writer(where: pa.PythonFile, schema: pa.Schema, **options: Any) -> _Writer:
        return _Writer(encoded, where, schema, options)

    def open_file(source: pa.BufferReader) -> _Decoded:
        data = source.read()
        if data not in decoded:
            decoded[data] = _Decoded(data)
        return decoded[data]

    with (
        patch.object(provenance, "pq", SimpleNamespace(ParquetWriter=make_writer)),
        patch.object(commit, "pq", SimpleNamespace(ParquetFile=open_file)),
    ):
        yield


class _Writer:
    """Stands in for a `ParquetWriter`. `known` are the writes of each step, by all that came before it."""

    def __init__(
        self, known: dict[bytes, list[bytes]], where: pa.PythonFile, schema: pa.Schema, options: dict[str, Any]
    ) -> None:
        self._known = known
        self._where = where
        self._schema = schema
        self._options = options
        self._groups: list[tuple[pa.Table, int]] = []
        self._so_far = b""
        self._is_open = True
        self._put()

    def write_table(self, table: pa.Table, row_group_size: int) -> None:
        self._groups.append((table, row_group_size))
        with pa.BufferOutputStream() as stream:
            with pa.ipc.new_stream(stream, table.schema) as writer:
                writer.write_table(table)
            self._so_far += stream.getvalue().to_pybytes()
        self._put()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._so_far += b"end"
            self._put()

    def _put(self) -> None:
        if self._so_far not in self._known:
            self._known[self._so_far] = self._encode()
        for chunk in self._known[self._so_far]:
            self._where.write(chunk)

    def _encode(self) -> list[bytes]:
        """What the real writer writes in the last step, after all the steps before it."""
        sink = _Chunks()
        writer = pq.ParquetWriter(pa.PythonFile(sink, mode="w"), self._schema, **self._options)
        for table, rows in self._groups:
            if self._is_open:
                sink.chunks.clear()
            writer.write_table(table, row_group_size=rows)
        if self._is_open:
            found = list(sink.chunks)
            writer.close()
            return found
        sink.chunks.clear()
        writer.close()
        return sink.chunks


class _Chunks:
    closed = False

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> int:
        self.chunks.append(bytes(data))
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Decoded:
    """Stands in for a `ParquetFile`."""

    def __init__(self, data: bytes) -> None:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            self._groups = [file.read_row_group(group) for group in range(file.num_row_groups)]
            self.metadata = file.metadata
        self.num_row_groups = len(self._groups)

    def read_row_group(self, group: int, *, use_threads: bool = True) -> pa.Table:
        return self._groups[group]

    def __enter__(self) -> _Decoded:
        return self

    def __exit__(self, *_: object) -> None:
        pass
