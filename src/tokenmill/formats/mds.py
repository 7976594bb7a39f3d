"""Mosaic streaming: `{split}/shard.00000.mds` and `{split}/index.json`, samples with a column of tokens.

    u32 n; u32[n + 1] offsets from the start of the file; a description as JSON; n samples
    a sample of any length   u32 size; u8 4 | log2 w; its length in w bytes; int32 tokens
    a packed sample          int32 tokens: the description has their number

A sample is a document, or with `--seq-len` that many tokens. The files are equal to those that MDSWriter makes of the
same samples with `hashes=["sha256"]` and a size limit of four bytes a token, byte for byte.

An import finds the tokens of all samples of a shard at once:

    a sample   u32 size of every column without a fixed size; then the columns, in the order of their names

Other columns are skipped. A column of tokens has a dtype; its shape is fixed, or stored before its values.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.bin_idx import Tokens
from tokenmill.dataset.dataset import BLOCK_TOKENS, Dataset, Starts
from tokenmill.dataset.manifest import check_name
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats.base import (
    Export,
    Facts,
    Files,
    FormatTraits,
    Hints,
    Options,
    Outline,
    OutputPart,
    PartReceipt,
    require_rows,
    require_shard_size,
)
from tokenmill.formats.rows import (
    ROWS_NOTE,
    RowsDataset,
    TokenRows,
    are_packed,
    cut_by_size,
    find_indexes,
    interleave,
    known_fields,
    map_bytes,
    narrowed,
    packed_note,
    rows_of,
)
from tokenmill.records import Int, convert

_VERSION = 2
_BITS_3 = 0b11
TRAITS = FormatTraits(options={"shard_size", "seq_len"}, bytes_per_token=(4, 4), document_bytes=12)

SHARD_TOKENS = 1 << 24
_MAX_BYTES = (1 << 32) - 1
_FACTS = {"samples": int}
_WHY = "offsets have 32 bits"
COLUMNS = ("tokens", "input_ids")
_DTYPES = {"uint16": "<u2", "int32": "<i4", "uint32": "<u4", "int64": "<i8", "uint64": "<u8"}
# Hashes of Mosaic that Python has too. Others are not checked.
_HASHES = {name for name in hashlib.algorithms_guaranteed if not name.startswith("shake")}
_COMPLETE = "is the file complete?"


def check(options: Options, outline: Outline) -> None:
    require_shard_size(options, most=_MAX_BYTES // 4, layout="mds", why=_WHY)
    require_rows(options, outline, layout="mds")


def write(source: Dataset, options: Options) -> Export:
    size = options.shard_size or SHARD_TOKENS
    splits, notes = rows_of(source, options.seq_len)
    about = _about(options.seq_len, 4 * size)
    config = json.dumps(about, sort_keys=True).encode()
    parts = [
        _part(f"{name}/shard.{number:05d}.mds", rows, bounds, config)
        for name, rows in splits.items()
        for number, bounds in enumerate(_cut(rows, 4 * size - 8 - len(config)))
    ]
    return Export(parts=tuple(parts), notes=notes, finish=lambda receipts: _indexes(about, receipts))


def _about(seq_len: int | None, size_limit: int) -> dict[str, Any]:
    """The description of a shard, as Mosaic's writer stores it in the shard and in the index."""
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": ["sha256"],
        "size_limit": size_limit,
        "column_names": ["tokens"],
        "column_encodings": [f"ndarray:int32:{seq_len}" if seq_len else "ndarray:int32"],
        "column_sizes": [4 * seq_len if seq_len else None],
    }


def _cut(rows: TokenRows, limit: int) -> list[tuple[int, int]]:
    longest = max(int(lengths.max()) for lengths in rows.lengths(0, rows.num_tokens))
    if 4 * longest + 1024 > _MAX_BYTES:
        raise RecipeError(f"mds cannot hold a document of {longest} tokens: {_WHY}", hint="use another layout")
    return cut_by_size(rows, limit, lambda lengths: sample_bytes(lengths, rows.seq_len) + 4)


def _part(name: str, rows: TokenRows, bounds: tuple[int, int], config: bytes) -> OutputPart:
    start, stop = bounds

    def write(files: Files) -> Facts:
        output = files.create(name)
        count = sum(map(len, rows.lengths(start, stop)))
        place = 4 + 4 * (count + 1) + len(config)
        output.write(np.array([count, place], "<u4").tobytes())
        for lengths in rows.lengths(start, stop):
            places = np.cumsum(sample_bytes(lengths, rows.seq_len)) + place
            output.write(places.astype("<u4").tobytes())
            place = int(places[-1])
        output.write(config)
        for tokens, lengths in rows.blocks(start, stop):
            values = tokens.astype("<i4", copy=False)
            output.write(values.data.cast("B") if rows.seq_len else _samples(values, lengths))
        return {"samples": count}

    return OutputPart(name=name, num_bytes=4 * (stop - start), write=write, files=(name,), facts=_FACTS)


def sample_bytes(lengths: Starts, seq_len: int | None) -> Starts:
    """Bytes of samples with these numbers of tokens."""
    return 4 * lengths if seq_len else 4 * lengths + 5 + _width(lengths)


def _width(lengths: Starts) -> Starts:
    """Bytes of a stored length."""
    return 1 + (lengths >= 1 << 8) + 2 * (lengths >= 1 << 16)


def _samples(values: Tokens, lengths: Starts) -> memoryview:
    """Samples of any length, end to end. The headers of all samples are computed at once."""
    width = _width(lengths)
    heads = np.zeros((len(lengths), 9), np.uint8)
    heads[:, :4] = (sample_bytes(lengths, None) - 4).astype("<u4").view(np.uint8).reshape(-1, 4)
    heads[:, 4] = 1 << 2 | width >> 1
    heads[:, 5:] = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    used = np.arange(9) < 5 + width[:, None]
    return interleave((heads[used], 5 + width), (values, 4 * lengths))


def _indexes(about: dict[str, Any], receipts: Sequence[PartReceipt]) -> Mapping[str, bytes]:
    """index.json of every split."""
    shards: dict[str, list[dict[str, Any]]] = {}
    for receipt in receipts:
        split, _, name = receipt.part.partition("/")
        digest = receipt.files[receipt.part]
        raw = {"basename": name, "bytes": digest.bytes, "hashes": {"sha256": digest.sha256}}
        shards.setdefault(split, []).append(
            {**about, "samples": receipt.facts["samples"], "raw_data": raw, "zip_data": None}
        )
    return {
        f"{split}/index.json": json.dumps({"version": 2, "shards": found}, sort_keys=True).encode()
        for split, found in shards.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumn:
    """The column of tokens, as a shard describes it. `length` is that of packed samples."""

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
    column: TokenColumn

    @cached_property
    def num_tokens(self) -> int:
        if self.column.length is not None:
            return self.num_samples * self.column.length
        return int(self.ends()[-1]) if self.num_samples else 0

    def ends(self) -> Starts:
        if self.column.length is not None:
            return np.arange(1, self.num_samples + 1) * self.column.length
        begins, stops = self._token_bytes(0, self.num_samples)
        return np.cumsum(stops - begins) // np.dtype(self.column.dtype).itemsize

    def blocks(self, first: int, last: int) -> Iterator[Tokens]:
        itemsize = np.dtype(self.column.dtype).itemsize
        data = self._checked.data
        begins, stops = self._token_bytes(first, last)
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
        """The shard, mapped. Its hashes are compared with the index once, before any token is read."""
        data = self._map()
        for kind, wanted in self.hashes:
            if kind in _HASHES and (found := hashlib.new(kind, data.data).hexdigest()) != wanted:
                raise DatasetError(f"{self.path}: its {kind} is {found}, the index says {wanted}", hint=_COMPLETE)
        return data

    def _token_bytes(self, first: int, last: int) -> tuple[Starts, Starts]:
        """Where the tokens of samples begin and end, in bytes of the file."""
        data, floor = self._map(), 4 * (self.num_samples + 2)
        if len(data) < floor:
            raise DatasetError(f"{self.path}: too short for {self.num_samples} samples", hint=_COMPLETE)
        offsets = data[:floor].view("<u4").astype(np.int64)
        bounds = (int(offsets[0]), int(offsets[-1]))
        if bounds != (self.num_samples, len(data)) or offsets[1] < floor or (np.diff(offsets[1:]) < 0).any():
            raise DatasetError(f"{self.path}: its samples do not fill it", hint=_COMPLETE)
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
            begin = self._skip_shape(data, begin, at)
        if (at > limits).any() or (begin > at).any() or ((at - begin) % np.dtype(self.column.dtype).itemsize).any():
            raise DatasetError(f"{self.path}: a sample does not hold its tokens", hint=_COMPLETE)
        return begin, at

    def _skip_shape(self, data: npt.NDArray[np.uint8], begin: Starts, end: Starts) -> Starts:
        """Where values begin, behind their shape."""
        kind = self._numbers(data, begin, "u1", end)
        if (kind >> 2 != 1).any() or (kind & _BITS_3 == _BITS_3).any():
            raise DatasetError(f"{self.path}: a sample is not a row of tokens", hint="arrays of one dimension are read")
        width = np.int64(1) << (kind & 3)
        lengths = np.zeros(len(begin), np.int64)
        for size in (1, 2, 4):
            mine = width == size
            lengths[mine] = self._numbers(data, begin[mine] + 1, f"<u{size}", end[mine])
        first = begin + 1 + width
        if (first + lengths * np.dtype(self.column.dtype).itemsize != end).any():
            raise DatasetError(f"{self.path}: a sample does not have its stored length", hint=_COMPLETE)
        return first

    def _numbers(self, data: npt.NDArray[np.uint8], at: Starts, kind: str, limits: Starts) -> Starts:
        """Numbers at any offsets of the file."""
        size = np.dtype(kind).itemsize
        if len(at) and (at + size > limits).any():
            raise DatasetError(f"{self.path}: a sample is too short", hint=_COMPLETE)
        rows: npt.NDArray[Any] = data[at[:, None] + np.arange(size)]
        return rows.view(kind).astype(np.int64).reshape(len(at))


def read(path: str, hints: Hints) -> RowsDataset:
    """A folder with an index.json, or a folder of such folders, which are splits."""
    indexes = find_indexes(path, "index.json", "mds", suffix=".mds")
    files = {split: _shards(folder, index) for split, (folder, index) in indexes.items()}
    columns = {shard.column for found in files.values() for shard in found}
    if len(columns) != 1:
        raise DatasetError(f"{path}: shards of {len(columns)} kinds", hint="open a folder whose shards are of one kind")
    (column,) = columns
    packed = column.length is not None or are_packed(files)
    return RowsDataset(
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
    bytes: Int
    hashes: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardEntry:
    """The fields of an index entry that are used."""

    version: Int
    format: str
    compression: str | None
    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    column_sizes: tuple[Int | None, ...]
    raw_data: _RawData
    samples: Int


def _shards(folder: str, index: Any) -> list[MdsShard]:
    where = f"{folder}/index.json"
    entries = index.get("shards") if isinstance(index, dict) else None
    if not isinstance(entries, list) or index.get("version") != _VERSION:
        raise DatasetError(f"{where}: not an index of Mosaic's, version 2", hint="check the path")
    return [_shard(folder, entry, f"{where}, shard {number}") for number, entry in enumerate(entries)]


def _shard(folder: str, entry: Any, where: str) -> MdsShard:
    if isinstance(entry, dict):
        entry = {**entry, "raw_data": known_fields(_RawData, entry.get("raw_data"))}
    found = convert(_ShardEntry, known_fields(_ShardEntry, entry), where=where)
    if found.version != _VERSION or found.format != "mds":
        raise DatasetError(
            f"{where}: format {found.format!r}, version {found.version}", hint="mds of version 2 is read"
        )
    check_name(found.raw_data.basename, where=where)
    path = f"{folder}/{found.raw_data.basename}"
    if found.compression is not None and not os.path.isfile(path):
        raise DatasetError(
            f"{where}: compressed with {found.compression}, which is not supported",
            hint="decompress the shards in their folder, or write them without compression",
        )
    return MdsShard(
        path=path,
        num_samples=found.samples,
        num_bytes=found.raw_data.bytes,
        hashes=tuple(sorted(found.raw_data.hashes.items())),
        column=_column(found, where),
    )


def _column(entry: _ShardEntry, where: str) -> TokenColumn:
    """The column of tokens: the first of `COLUMNS` that the shard has."""
    names = entry.column_names
    number = next((names.index(name) for name in COLUMNS if name in names), None)
    if number is None or not len(names) == len(entry.column_encodings) == len(entry.column_sizes):
        raise DatasetError(f"{where}: columns {', '.join(names)}", hint=f"tokens are read from {' or '.join(COLUMNS)}")
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
        raise DatasetError(f"{where}: {size} bytes are not {length} tokens of {dtype}", hint=_COMPLETE)
    if entry.samples < 0:
        raise DatasetError(f"{where}: {entry.samples} samples", hint=_COMPLETE)
    return TokenColumn(number=number, dtype=_DTYPES[dtype], length=length, sizes=entry.column_sizes)
