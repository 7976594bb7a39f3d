"""Provenance: the source, position and fate of every document.

    source     position   split   dropped     tokens
    a.parquet  0          train   null        812         position: the row, or the byte offset
    a.parquet  1          null    too_short   0           split is null if the document was dropped
    b.jsonl    0          val     null        75

Documents are in the order of the plan, so those of a split are in the order of its shards. The files are Parquet
with large row groups, whose boundaries do not depend on how the rows arrive.

    document 7 of train    the 8th row whose split is train: rows of each split are counted once per row group
    a.parquet, row 1       the row with this source and position: both grow, so row groups are bisected
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.dataset.dataset import SourceRow
from tokenmill.dataset.manifest import BAD, DROPS, Manifest
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.sizes import few
from tokenmill.sources.reader import positions_are_bytes
from tokenmill.storage.base import Storage
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
# What provenance lists in any case. Other reasons follow in files that have them.
REASONS = (*DROPS, *(reason for reason in BAD if reason != "invalid_csv"))


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


class _RowGroup(NamedTuple):
    """A row group of one of the files, and the number of its first row in all of them."""

    file: int
    group: int
    first: int


class ProvenanceReader:
    """Finds single rows in the provenance of a dataset. Reads only the row groups and columns that it needs."""

    def __init__(self, folder: Storage, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._names = sorted(name for name in manifest.files if name.startswith("provenance/"))
        if not self._names:
            raise DatasetError(
                f"{folder.path} has no provenance: it does not record where its documents came from",
                hint="use the dataset that tokenmill prepare wrote",
            )
        self._files: dict[int, pq.ParquetFile] = {}
        # For each split, its rows before each row group. Extended as far as it is needed.
        self._before: dict[str, list[int]] = {name: [0] for name in manifest.splits}
        self._num_counted = 0

    def of_documents(self, split: str, documents: Sequence[int]) -> list[SourceRow]:
        """Where these documents of a split came from."""
        found: dict[int, SourceRow] = {}
        by_group: dict[int, list[int]] = {}
        for document in documents:
            by_group.setdefault(self._group_of(split, document), []).append(document)
        for number, inside in by_group.items():
            table = self._read(number, ["source", "position", "split", "tokens"])
            rows = np.flatnonzero(_is_value(table["split"], split))
            before = self._before[split][number]
            for document in inside:
                found[document] = self._describe(table, int(rows[document - before]), document)
        return [found[document] for document in documents]

    def at(self, source: str, position: int) -> SourceRow:
        """The document at a position of a source. A byte offset may be anywhere inside of it."""
        name = self._full_name(source)
        wanted, low, high = (self._source_numbers[name], position), 0, len(self._groups)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._first_of(middle) <= wanted else (low, middle)
        table = self._read(low, SCHEMA.names)
        mine = np.flatnonzero(_is_value(table["source"], name))
        positions = table["position"].to_numpy()[mine]
        at = int(np.searchsorted(positions, position, side="right")) - 1
        if at < 0 or (not positions_are_bytes(name) and positions[at] != position):
            what = "byte" if positions_are_bytes(name) else "row"
            raise RecipeError(f"{name} has no document at {what} {position}", hint="positions count from 0")
        row = int(mine[at])
        split = table["split"][row].as_py()
        if split is None:
            return self._describe(table, row, None)
        self._count_up_to(low)
        inside = int(np.count_nonzero(_is_value(table["split"][:row], split)))
        return self._describe(table, row, self._before[split][low] + inside)

    @cached_property
    def _groups(self) -> list[_RowGroup]:
        groups, first = [], 0
        for number in range(len(self._names)):
            about = self._open(number).metadata
            for group in range(about.num_row_groups):
                groups.append(_RowGroup(number, group, first))
                first += about.row_group(group).num_rows
        return groups

    @cached_property
    def _source_numbers(self) -> dict[str, int]:
        return {source.name: number for number, source in enumerate(self._manifest.sources)}

    def _full_name(self, source: str) -> str:
        """The name of a source in the manifest, given that or the end of it."""
        if source in self._source_numbers:
            return source
        ending = "/" + source.lstrip("./")
        found = [name for name in self._source_numbers if f"/{name}".endswith(ending) or source.endswith(f"/{name}")]
        if len(found) == 1:
            return found[0]
        if found:
            raise RecipeError(f"{source} is one of {few(found, ', ')}", hint="give more of its path")
        known = few(list(self._source_numbers), ", ")
        raise RecipeError(f"{source} is not a source of {self._folder.path}", hint=f"its sources are {known}")

    def _group_of(self, split: str, document: int) -> int:
        """The row group that has a document of a split."""
        before = self._before[split]
        while before[-1] <= document and self._num_counted < len(self._groups):
            self._count_up_to(self._num_counted + 1)
        return bisect.bisect_right(before, document) - 1

    def _count_up_to(self, number: int) -> None:
        """Count the rows of each split before row group `number`."""
        for group in range(self._num_counted, number):
            splits = self._read(group, ["split"])["split"]
            for name, before in self._before.items():
                before.append(before[-1] + int(np.count_nonzero(_is_value(splits, name))))
        self._num_counted = max(number, self._num_counted)

    def _first_of(self, number: int) -> tuple[int, int]:
        """The source and the position of the first row of a row group."""
        file, group, _ = self._groups[number]
        with self._explained(file):
            first = next(self._open(file).iter_batches(1, [group], ["source", "position"]))
        return self._source_numbers[first["source"][0].as_py()], first["position"][0].as_py()

    def _describe(self, table: pa.Table, row: int, document: int | None) -> SourceRow:
        source = table["source"][row].as_py()
        return SourceRow(
            source=source,
            position=table["position"][row].as_py(),
            unit="byte" if positions_are_bytes(source) else "row",
            split=table["split"][row].as_py(),
            document=document,
            num_tokens=table["tokens"][row].as_py(),
            dropped=table["dropped"][row].as_py() if document is None else None,
        )

    def _read(self, number: int, columns: Sequence[str]) -> pa.Table:
        file, group, _ = self._groups[number]
        with self._explained(file):
            return self._open(file).read_row_group(group, columns=list(columns))

    def _open(self, number: int) -> pq.ParquetFile:
        if number not in self._files:
            name = self._names[number]
            with self._explained(number), self._folder.need([name]):
                self._files[number] = pq.ParquetFile(self._folder.at(name), memory_map=True)
        return self._files[number]

    @contextlib.contextmanager
    def _explained(self, number: int) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            where = self._folder.at(self._names[number])
            raise DatasetError(f"{where} cannot be read: {error}", hint="run tokenmill repair") from None


def _is_value(column: pa.ChunkedArray, value: str) -> npt.NDArray[np.bool_]:
    """Which rows of a dictionary column have this value."""
    found = [np.zeros(0, np.bool_)]
    for chunk in column.chunks:
        names = chunk.dictionary.to_pylist()
        number = names.index(value) if value in names else -2
        found.append(chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) == number)
    return np.concatenate(found)
