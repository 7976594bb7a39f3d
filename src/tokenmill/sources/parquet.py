"""Parquet files: a unit is a run of row groups, read column by column in small batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pyarrow.parquet as pq

from tokenmill.sources.base import BATCH_BYTES, Batch, Section, Source, SourceSlice
from tokenmill.sources.files import Pin, explained, open_file, pin_of
from tokenmill.sources.text_columns import (
    MAX_BATCH_ROWS,
    TableFormat,
    check_columns,
    columns_to_read,
    rule_columns,
    table_batch,
)
from tokenmill.storage.base import is_url


class ParquetFormat(TableFormat):
    """Sections are row groups. Everything that a plan needs is in the footer."""

    def columns(self, path: str, source: Source) -> list[str]:
        with _open(path, pin_of(source)) as file, explained(path):
            return list(file.schema_arrow.names)

    def sections(self, path: str, source: Source) -> list[Section]:
        with _open(path, pin_of(source)) as file, explained(path):
            check_columns(file.schema_arrow, source.text, path)
            wanted = _column_numbers(file, rule_columns(source.text))
            found = []
            for index in range(file.metadata.num_row_groups):
                _check_metadata(file, index, wanted)
                group = file.metadata.row_group(index)
                size = sum(group.column(i).total_uncompressed_size for i in wanted)
                found.append(Section(text_bytes=size, num_rows=group.num_rows))
        return found

    def read(self, part: SourceSlice, *, limit: int, batch_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
        path, rule, start = part.path, part.source.text, part.start
        names = columns_to_read(rule)
        with _open_groups(
            path, pin_of(part.source), names, start, part.stop, step=min(batch_bytes, BATCH_BYTES)
        ) as file:
            metadata = file.metadata
            stop = metadata.num_row_groups if part.stop < 0 else part.stop
            row = sum(metadata.row_group(i).num_rows for i in range(start))
            for group in range(start, stop):
                size, rows = metadata.row_group(group).total_byte_size, metadata.row_group(group).num_rows
                batch_rows = max(1, min(rows, MAX_BATCH_ROWS, batch_bytes * rows // max(size, 1)))
                batches = file.iter_batches(batch_rows, row_groups=[group], columns=names, use_threads=False)
                while True:
                    with explained(path, where=f", row group {group}, from row {row} on"):
                        table = next(batches, None)
                        texts = None if table is None else table_batch(part.index, table, rule, row)
                    if table is None or texts is None:
                        break
                    yield texts
                    row += table.num_rows


def _check_metadata(file: pq.ParquetFile, group: int, columns: list[int]) -> None:
    """Have a reader of zero rows report a damaged footer as an error.

    Asked for an impossible column, the metadata of a row group would end the process instead.
    """
    next(file.reader.iter_batches(0, row_groups=[group], column_indices=columns, use_threads=False), None)


def _column_numbers(file: pq.ParquetFile, names: list[str]) -> list[int]:
    """The numbers of some columns; a nested column has several."""
    paths = (file.schema.column(i).path for i in range(len(file.schema)))
    return [i for i, path in enumerate(paths) if any(path == name or path.startswith(f"{name}.") for name in names)]


@contextlib.contextmanager
def _open_groups(
    path: str, pin: Pin, names: list[str], start: int, stop: int, *, step: int
) -> Iterator[pq.ParquetFile]:
    """A file whose row groups [start, stop) will be read. In an object store, their byte ranges are announced."""
    with _open(path, pin, step=step) as file:
        if not is_url(path) or step < BATCH_BYTES:  # a probe reads only a little of them
            yield file
            return
        with explained(path):
            wanted, last = _column_numbers(file, names), file.metadata.num_row_groups if stop < 0 else stop
            expected = [found for group in range(start, last) for found in _chunks(file, group, wanted)]
            footer = file.metadata
    with _open(path, pin, step=step, expected=expected, footer=footer) as file:
        yield file


def _chunks(file: pq.ParquetFile, group: int, columns: list[int]) -> Iterator[tuple[int, int]]:
    """The byte ranges of the columns of a row group."""
    _check_metadata(file, group, columns)
    for index in columns:
        chunk = file.metadata.row_group(group).column(index)
        begin = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
        yield begin, begin + chunk.total_compressed_size


@contextlib.contextmanager
def _open(
    path: str,
    pin: Pin,
    *,
    step: int = BATCH_BYTES,
    expected: Sequence[tuple[int, int]] = (),
    footer: pq.FileMetaData | None = None,
) -> Iterator[pq.ParquetFile]:
    with explained(path):
        opened = open_file(path, pin, step=step, expected=expected)
    with opened:
        with explained(path):
            file = pq.ParquetFile(opened, metadata=footer, buffer_size=step, pre_buffer=False)
        with file:
            yield file
