"""Arrow files and streams, such as those of a saved Hugging Face dataset: a unit is a run of record batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa

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

_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
_LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


class ArrowFormat(TableFormat):
    """Sections are record batches. A local file is mapped, so planning does not read its texts."""

    def columns(self, path: str, source: Source) -> list[str]:
        with _batches(path, pin_of(source)) as (schema, _), explained(path):
            return list(schema.names)

    def sections(self, path: str, source: Source) -> list[Section]:
        with _batches(path, pin_of(source)) as (schema, batches):
            check_columns(schema, source.text, path)
            names = rule_columns(source.text)
            return [
                Section(max(1, sum(_num_bytes(batch.column(name), path) for name in names)), batch.num_rows)
                for batch in batches
            ]

    def read(self, part: SourceSlice, *, limit: int, batch_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
        row, path, rule = 0, part.path, part.source.text
        with _batches(path, pin_of(part.source)) as (_, batches):
            for number, batch in enumerate(batches):
                if 0 <= part.stop <= number:
                    return
                if number >= part.start and batch.num_rows:
                    chosen = batch.select(columns_to_read(rule))
                    _check_offsets(chosen, path, number)
                    for first in range(0, batch.num_rows, MAX_BATCH_ROWS):
                        with explained(path, where=f", record batch {number}"):
                            texts = table_batch(part.index, chosen.slice(first, MAX_BATCH_ROWS), rule, row + first)
                        yield texts
                row += batch.num_rows


def _num_bytes(column: pa.Array, path: str) -> int:
    """The bytes of a column. Arrow counts by the column's own offsets, so they are validated first."""
    with explained(path):
        column.validate()
    return int(column.nbytes)


def _check_offsets(batch: pa.RecordBatch, path: str, number: int) -> None:
    """Refuse offsets that point outside of the mapped file before they are followed.

    Text is validated as bytes. Invalid UTF-8 concerns one document, which the unit quarantines; here it would be the
    first error of a column, and Arrow would not look for others.
    """
    with explained(path, where=f", record batch {number}"):
        for column in batch.columns:
            column.view(_as_bytes(column.type)).validate(full=True)


def _as_bytes(kind: pa.DataType) -> pa.DataType:  # noqa: PLR0911  one for each kind of type
    """The type of the same buffers with bytes in place of strings, at any depth."""
    types = pa.types
    if kind in _BYTES:
        return _BYTES[kind]
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _as_bytes(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        return pa.struct([_field_as_bytes(field) for field in kind])
    if types.is_map(kind):
        return pa.map_(_field_as_bytes(kind.key_field), _field_as_bytes(kind.item_field), kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pa.list_(_field_as_bytes(kind.value_field), kind.list_size)
    for is_kind, make in _LISTS:
        if is_kind(kind):
            return make(_field_as_bytes(kind.value_field))
    return kind


def _field_as_bytes(field: pa.Field) -> pa.Field:
    return field.with_type(_as_bytes(field.type))


@contextlib.contextmanager
def _batches(path: str, pin: Pin) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Schema and record batches of an Arrow stream or file."""
    with explained(path):
        mapped = open_file(path, pin) if is_url(path) else pa.memory_map(path)
    with mapped:
        with explained(path):
            is_file = mapped.read(6) == b"ARROW1"
            mapped.seek(0)
            reader = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
        yield reader.schema, _explained_batches(reader, path, is_file)


def _explained_batches(
    reader: pa.RecordBatchFileReader | pa.RecordBatchStreamReader, path: str, is_file: bool
) -> Iterator[pa.RecordBatch]:
    number = 0
    while True:
        with explained(path, where=f", record batch {number}"):
            try:
                if is_file and number == reader.num_record_batches:
                    return
                batch = reader.get_batch(number) if is_file else reader.read_next_batch()
            except StopIteration:
                return
        yield batch
        number += 1
