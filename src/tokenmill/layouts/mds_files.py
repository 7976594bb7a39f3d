"""Reading Mosaic's shards: where the tokens of each sample lie, found for all samples of a shard at once.

    a sample   u32 size of every column that has no fixed one; then the columns, in the order of their names

Other columns are passed over. A column of tokens has a dtype; its shape is fixed, or stands before its values.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.data.bare import Hints
from tokenmill.data.dataset import BLOCK_TOKENS, Starts
from tokenmill.errors import DatasetError
from tokenmill.layouts.foreign import find_indexes, map_bytes, picked
from tokenmill.layouts.stored import ROWS_NOTE, StoredDataset, are_packed, narrowed, packed_note
from tokenmill.manifest import check_name
from tokenmill.shards.layout import Tokens
from tokenmill.typed import convert

COLUMNS = ("tokens", "input_ids")
_DTYPES = {"uint16": "<u2", "int32": "<i4", "uint32": "<u4", "int64": "<i8", "uint64": "<u8"}
# Those of Mosaic's that Python has; its others are left alone.
_HASHES = {name for name in hashlib.algorithms_guaranteed if not name.startswith("shake")}
_WHOLE = "is it whole?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What a shard says of its tokens. `length` is that of packed samples."""

    number: int
    dtype: str
    length: int | None
    sizes: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class MdsShard:
    """A shard, mapped."""

    path: str
    num_samples: int
    num_bytes: int
    hashes: tuple[tuple[str, str], ...]
    column: Column

    @cached_property
    def num_tokens(self) -> int:
        if self.column.length is not None:
            return self.num_samples * self.column.length
        return int(self.ends()[-1]) if self.num_samples else 0

    def ends(self) -> Starts:
        if self.column.length is not None:
            return np.arange(1, self.num_samples + 1) * self.column.length
        begins, stops = self._places(0, self.num_samples)
        return np.cumsum(stops - begins) // np.dtype(self.column.dtype).itemsize

    def blocks(self, first: int, last: int) -> Iterator[Tokens]:
        itemsize = np.dtype(self.column.dtype).itemsize
        data = self._checked.data
        begins, stops = self._places(first, last)
        edges = np.searchsorted(
            np.cumsum(stops - begins), np.arange(0, (stops - begins).sum(), BLOCK_TOKENS * itemsize)
        )
        for low, high in zip(edges.tolist(), [*edges[1:].tolist(), last - first], strict=True):
            pairs = zip(begins[low:high].tolist(), stops[low:high].tolist(), strict=True)
            joined = b"".join([data[begin:end] for begin, end in pairs])
            yield narrowed(np.frombuffer(joined, self.column.dtype), where=self.path)

    def _map(self) -> npt.NDArray[np.uint8]:
        return map_bytes(self.path, self.num_bytes)

    @cached_property
    def _checked(self) -> npt.NDArray[np.uint8]:
        """The shard, mapped, when the hashes that its index has are found right: once, before any token is taken."""
        data = self._map()
        for kind, wanted in self.hashes:
            if kind in _HASHES and (found := hashlib.new(kind, data.data).hexdigest()) != wanted:
                raise DatasetError(f"{self.path}: its {kind} is {found}, the index says {wanted}", hint=_WHOLE)
        return data

    def _places(self, first: int, last: int) -> tuple[Starts, Starts]:
        """Where the tokens of samples begin and end, in bytes of the file."""
        data, floor = self._map(), 4 * (self.num_samples + 2)
        if len(data) < floor:
            raise DatasetError(f"{self.path}: too short for {self.num_samples} samples", hint=_WHOLE)
        offsets = data[:floor].view("<u4").astype(np.int64)
        bounds = (int(offsets[0]), int(offsets[-1]))
        if bounds != (self.num_samples, len(data)) or offsets[1] < floor or (np.diff(offsets[1:]) < 0).any():
            raise DatasetError(f"{self.path}: its samples do not fill it", hint=_WHOLE)
        begins, limits = offsets[1 + first : 1 + last], offsets[2 + first : 2 + last]
        variable = [number for number, size in enumerate(self.column.sizes) if size is None]
        at = begins + 4 * len(variable)
        for number, size in enumerate(self.column.sizes[: self.column.number + 1]):
            begin = at
            if size is None:
                at = begin + self._numbers(data, begins + 4 * variable.index(number), "<u4", limits)
            else:
                at = begin + size
        if self.column.length is None:
            begin = self._behind_shape(data, begin, at)
        if (at > limits).any() or (begin > at).any() or ((at - begin) % np.dtype(self.column.dtype).itemsize).any():
            raise DatasetError(f"{self.path}: a sample does not hold its tokens", hint=_WHOLE)
        return begin, at

    def _behind_shape(self, data: npt.NDArray[np.uint8], begin: Starts, end: Starts) -> Starts:
        """Where values begin, behind the shape that stands before them."""
        kind = self._numbers(data, begin, "u1", end)
        if (kind >> 2 != 1).any() or (kind & 3 == 3).any():
            raise DatasetError(f"{self.path}: a sample is no row of tokens", hint="arrays of one dimension are read")
        width = np.int64(1) << (kind & 3)
        lengths = np.zeros(len(begin), np.int64)
        for size in (1, 2, 4):
            mine = width == size
            lengths[mine] = self._numbers(data, begin[mine] + 1, f"<u{size}", end[mine])
        first = begin + 1 + width
        if (first + lengths * np.dtype(self.column.dtype).itemsize != end).any():
            raise DatasetError(f"{self.path}: a sample has another length than it says", hint=_WHOLE)
        return first

    def _numbers(self, data: npt.NDArray[np.uint8], at: Starts, kind: str, limits: Starts) -> Starts:
        """Numbers at any places of the file."""
        size = np.dtype(kind).itemsize
        if len(at) and (at + size > limits).any():
            raise DatasetError(f"{self.path}: a sample is too short", hint=_WHOLE)
        rows: npt.NDArray[Any] = data[at[:, None] + np.arange(size)]
        return rows.view(kind).astype(np.int64).reshape(len(at))


def open_mds(path: str, hints: Hints) -> StoredDataset:
    """A folder with an index.json, or a folder of such folders, which are splits then."""
    indexes = find_indexes(path, "index.json", "mds", ending=".mds")
    files = {split: _shards(folder, index) for split, (folder, index) in indexes.items()}
    columns = {shard.column for found in files.values() for shard in found}
    if len(columns) != 1:
        raise DatasetError(f"{path}: shards of {len(columns)} kinds", hint="open a folder whose shards are of one kind")
    (column,) = columns
    packed = column.length is not None or are_packed(files)
    return StoredDataset(
        path,
        "mds",
        files,
        hints,
        dtype="uint16" if column.dtype == "<u2" else "int32",
        packed=packed,
        notes=[packed_note("mds", hints.eot_id) if packed else ROWS_NOTE],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RawData:
    basename: str
    bytes: int
    hashes: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What is taken from an entry of the index."""

    version: int
    format: str
    compression: str | None
    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    column_sizes: tuple[int | None, ...]
    raw_data: _RawData
    samples: int


def _shards(folder: str, index: Any) -> list[MdsShard]:
    where = f"{folder}/index.json"
    entries = index.get("shards") if isinstance(index, dict) else None
    if not isinstance(entries, list) or index.get("version") != 2:
        raise DatasetError(f"{where}: not an index of Mosaic's, version 2", hint="check the path")
    return [_shard(folder, entry, f"{where}, shard {number}") for number, entry in enumerate(entries)]


def _shard(folder: str, entry: Any, where: str) -> MdsShard:
    if isinstance(entry, dict):
        entry = {**entry, "raw_data": picked(_RawData, entry.get("raw_data"))}
    found = convert(_Entry, picked(_Entry, entry), where=where)
    if found.version != 2 or found.format != "mds":
        raise DatasetError(
            f"{where}: format {found.format!r}, version {found.version}", hint="mds of version 2 is read"
        )
    check_name(found.raw_data.basename, where=where)
    path = f"{folder}/{found.raw_data.basename}"
    if found.compression is not None and not os.path.isfile(path):
        raise DatasetError(
            f"{where}: compressed with {found.compression}, which is not read",
            hint="decompress the shards beside themselves, or write them without compression",
        )
    return MdsShard(
        path=path,
        num_samples=found.samples,
        num_bytes=found.raw_data.bytes,
        hashes=tuple(sorted(found.raw_data.hashes.items())),
        column=_column(found, where),
    )


def _column(entry: _Entry, where: str) -> Column:
    """Which column has the tokens, and how."""
    names = entry.column_names
    number = next((names.index(name) for name in COLUMNS if name in names), None)
    if number is None or not len(names) == len(entry.column_encodings) == len(entry.column_sizes):
        raise DatasetError(f"{where}: columns {', '.join(names)}", hint=f"tokens stand in {' or '.join(COLUMNS)}")
    kind, _, rest = entry.column_encodings[number].partition(":")
    dtype, _, shape = rest.partition(":")
    size = entry.column_sizes[number]
    if kind != "ndarray" or dtype not in _DTYPES or not (shape.isdecimal() or not shape):
        raise DatasetError(
            f"{where}: tokens are {entry.column_encodings[number]!r}",
            hint=f"ndarray:DTYPE or ndarray:DTYPE:LENGTH is read, of {', '.join(_DTYPES)}",
        )
    length = int(shape) if shape else None
    counts = [one for one in (*entry.column_sizes, length) if one is not None]
    if size != (None if length is None else length * np.dtype(dtype).itemsize) or min([1, *counts]) < 1:
        raise DatasetError(f"{where}: {size} bytes are not {length} tokens of {dtype}", hint=_WHOLE)
    if entry.samples < 0:
        raise DatasetError(f"{where}: {entry.samples} samples", hint=_WHOLE)
    return Column(number=number, dtype=_DTYPES[dtype], length=length, sizes=entry.column_sizes)
