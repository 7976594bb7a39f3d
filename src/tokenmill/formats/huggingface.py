"""Hugging Face: `data/{split}-00000-of-00001.parquet` with a column `input_ids`. A row is a document, or packed.

`load_dataset(folder)` finds the splits by these names. An import also reads the Arrow files of `save_to_disk`, and
other Parquet files with such a column. It decodes one row group, or one record batch, at a time. Rows without ids are
not documents. The bytes of exported files depend on the version of pyarrow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.bin_idx import Tokens
from tokenmill.dataset.dataset import Dataset, Starts
from tokenmill.errors import DatasetError
from tokenmill.formats.base import Export, Facts, Files, FormatTraits, Hints, Options, Outline, OutputPart, require_rows
from tokenmill.formats.rows import (
    ROWS_NOTE,
    RowsDataset,
    TokenRows,
    are_packed,
    cut_by_size,
    narrowed,
    packed_note,
    rows_of,
)
from tokenmill.storage.memory_maps import open_plain
from tokenmill.storage.output import Output

if TYPE_CHECKING:
    import pyarrow as pa


TRAITS = FormatTraits(options={"shard_size", "seq_len"}, bytes_per_token=(4, 4), document_bytes=1, has_columns=True)

SHARD_TOKENS = 1 << 25
GROUP_TOKENS = 1 << 20
COLUMN = "input_ids"
# The metadata key with which exported files record what a row is.
ROW_KIND = b"tokenmill"
ROW_KINDS = {"packed": b"packed rows", "documents": b"a row is a document"}
_SHARDED = re.compile(r"([A-Za-z_]\w*)-(\d{5})-of-(\d{5})\.(?:parquet|arrow)")


def check(options: Options, outline: Outline) -> None:
    require_rows(options, outline, layout="huggingface")


def write(source: Dataset, options: Options) -> Export:
    splits, notes = rows_of(source, options.seq_len)
    size = options.shard_size or SHARD_TOKENS
    parts = []
    for name, rows in splits.items():
        ranges = cut_by_size(rows, size, lambda lengths: lengths)
        parts += [
            _part(f"data/{name}-{number:05d}-of-{len(ranges):05d}.parquet", rows, bounds)
            for number, bounds in enumerate(ranges)
        ]
    return Export(parts=tuple(parts), notes=notes)


def _part(name: str, rows: TokenRows, bounds: tuple[int, int]) -> OutputPart:
    start, stop = bounds

    def write(files: Files) -> Facts:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema(
            [pa.field(COLUMN, pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False)],
            metadata={ROW_KIND: ROW_KINDS["packed" if rows.seq_len else "documents"]},
        )
        sink = _ParquetSink(files.create(name))
        # Ids repeat too rarely for a dictionary, and statistics of ids are useless.
        with pq.ParquetWriter(
            sink, schema, compression="none", use_dictionary=False, write_statistics=False, store_schema=False
        ) as writer:
            for batch in _batches(rows, start, stop, schema):
                writer.write_batch(batch)
        return {}

    return OutputPart(name=name, num_bytes=4 * (stop - start), write=write)


def _batches(rows: TokenRows, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Record batches, each of which becomes a row group."""
    import pyarrow as pa

    for tokens, lengths in replace(rows, block_tokens=GROUP_TOKENS).blocks(start, stop):
        values = pa.array(tokens.astype(np.int32, copy=False))
        edges = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        yield pa.record_batch([pa.ListArray.from_arrays(edges, values, type=schema.field(0).type)], schema=schema)


class _ParquetSink:
    """An output as a file for pyarrow. Closing it does not publish the output."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.closed = False

    def write(self, data: bytes) -> int:
        return self._output.write(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows that are decoded together: those of a row group, or of a record batch."""

    path: str
    num_tokens: int
    load: Callable[[], pa.ChunkedArray]

    def ends(self) -> Starts:
        ends = np.cumsum(lengths_of(self.load()))
        if (found := int(ends[-1]) if len(ends) else 0) != self.num_tokens:
            raise DatasetError(
                f"{self.path}: rows of {found} ids, of which {self.num_tokens} are not null", hint="remove those rows"
            )
        return ends

    def blocks(self, first: int, last: int) -> Iterator[Tokens]:
        yield narrowed(values_of(self.load().slice(first, last - first), self.path), where=self.path)


def read(path: str, hints: Hints) -> RowsDataset:
    """A Parquet or Arrow file, or a folder. Splits are in names like `train-00000-of-00001`, or are folders."""
    import pyarrow as pa

    column = hints.column or COLUMN
    files: dict[str, list[RowGroup]] = {}
    kinds, row_kinds = set(), set()
    for split, paths in _paths(path).items():
        for one in paths:
            try:
                os.close(open_plain(one))  # Arrow would wait for a pipe
                kind, row_kind, groups = _parquet(one, column) if one.endswith(".parquet") else _arrow(one, column)
            except (pa.ArrowException, OSError) as error:
                raise DatasetError(f"{one} cannot be read: {error}", hint="is the file complete?") from None
            files.setdefault(split, []).extend(groups)
            kinds.add(kind)
            row_kinds.add(row_kind)
    if not files:
        raise DatasetError(f"{path} has no files of layout huggingface", hint="parquet or Arrow files are read")
    recorded = row_kinds == {ROW_KINDS["packed"]} or row_kinds == {ROW_KINDS["documents"]}
    packed = row_kinds == {ROW_KINDS["packed"]} if recorded else are_packed(files)
    return RowsDataset(
        path,
        "huggingface",
        files,
        hints,
        dtype="uint16" if kinds == {"uint16"} else "int32",
        packed=packed,
        notes=[packed_note("huggingface", hints.eot_id) if packed else ROWS_NOTE],
    )


def lengths_of(rows: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """The number of tokens of every row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = pc.list_value_length(rows).fill_null(0).cast(pa.int64())
    return np.asarray(found.to_numpy(), np.int64)


def values_of(rows: pa.ChunkedArray, where: str) -> npt.NDArray[Any]:
    """The tokens of all rows, end to end."""
    import pyarrow.compute as pc

    values = pc.list_flatten(rows)
    if values.null_count:
        raise DatasetError(f"{where}: {values.null_count} ids are null", hint="remove those rows")
    return np.asarray(values.to_numpy())


def _paths(path: str) -> dict[str, list[str]]:
    """Files by split, in order of name."""
    if os.path.isfile(path):
        return {"train": [path]}
    found: dict[str, list[str]] = {}
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = os.path.relpath(folder, path).split(os.sep)[0]
        for name in sorted(names):
            if name.endswith((".parquet", ".arrow")) and not name.startswith("cache-"):
                sharded = _SHARDED.fullmatch(name)
                split = sharded[1] if sharded and sharded[1] != "data" else inside
                split = split if split.isidentifier() and split != "data" else "train"
                found.setdefault(split, []).append(f"{folder}/{name}")
        _check_numbers(folder, names)
    return {split: found[split] for split in sorted(found)}


def _check_numbers(folder: str, names: list[str]) -> None:
    """Refuse a folder with missing files. Their names say how many there should be."""
    wanted: dict[tuple[str, int], set[int]] = {}
    for sharded in filter(None, map(_SHARDED.fullmatch, names)):
        wanted.setdefault((sharded[1], int(sharded[3])), set()).add(int(sharded[2]))
    for (split, count), numbers in sorted(wanted.items()):
        if missing := sorted(set(range(count)) - numbers):
            raise DatasetError(
                f"{folder} has {len(numbers)} of {count} files of {split}: number {missing[0]} is missing",
                hint="download the missing files, or import files one by one",
            )


def _check(schema: pa.Schema, path: str, column: str) -> str:
    """The integer type of the ids."""
    import pyarrow as pa

    number = schema.get_field_index(column)
    kind = schema.field(number).type if number >= 0 else pa.null()
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        found = ", ".join(f"{field.name}: {field.type}" for field in schema)
        hint = f"a column {column} with lists of integers is read; name another one with `column`"
        raise DatasetError(f"{path} has {found}", hint=hint)
    return str(kind.value_type)


def _parquet(path: str, column: str) -> tuple[str, bytes | None, list[RowGroup]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        metadata, schema = file.metadata, file.schema_arrow
    kind = _check(schema, path, column)
    row_kind = (schema.metadata or {}).get(ROW_KIND)
    leaf = next(n for n in range(metadata.num_columns) if metadata.schema.column(n).path.split(".")[0] == column)

    def group(number: int) -> RowGroup:
        def load() -> pa.ChunkedArray:
            with pq.ParquetFile(path, metadata=metadata, memory_map=True) as file:
                return file.read_row_group(number, columns=[column], use_threads=False)[column]

        about = metadata.row_group(number).column(leaf)
        stats = about.statistics
        if row_kind is not None:
            count = about.num_values
        elif stats is not None and stats.has_null_count:  # a row without ids counts as a null here
            count = about.num_values - stats.null_count
        else:
            count = int(lengths_of(load()).sum())
        return RowGroup(path=path, num_tokens=count, load=load)

    return kind, row_kind, [group(number) for number in range(metadata.num_row_groups)]


def _arrow(path: str, column: str) -> tuple[str, bytes | None, list[RowGroup]]:
    """The record batches of an Arrow stream, mapped: nothing is copied before it is needed."""
    import pyarrow as pa

    with pa.memory_map(path) as source, pa.ipc.open_stream(source) as reader:
        kind = _check(reader.schema, path, column)
        rows = [pa.chunked_array([batch.column(column)]) for batch in reader]
    return (
        kind,
        None,
        [
            RowGroup(path=path, num_tokens=int(lengths_of(one).sum()), load=partial(_same, one))
            for one in rows
            if len(one)
        ],
    )


def _same(rows: pa.ChunkedArray) -> pa.ChunkedArray:
    return rows
