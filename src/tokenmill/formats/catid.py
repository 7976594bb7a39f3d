"""catid's dataloader, version 14 of its format: `{split}/data_0.bin`, `index_0.bin`, `index.yaml`, `args.yml`.

    data    a zstd frame for each document, over its tokens as four planes of bytes, lowest first; u8 14; u8 4; u64 hash
    index   u32 offset and u32 tokens of every document; u32 bytes of all frames; u8 14; u8 4; u64 hash

A hash is the XOR of the CityHash64 of every frame or record, and of the trailer before it. The end of text is not
stored: catid's loader separates documents by padding. An import checks the hashes before anything else, and
decompresses frames where they are needed.

CityHash64 (of Geoff Pike and Jyrki Alakuijala, Google, version 1.1) is computed for many strings at once, each step for
all strings of similar length as arrays of 64-bit numbers, which wrap. Strings of up to 64 bytes have a formula for
their length. Longer ones are processed in steps of 64 bytes with a state of seven numbers, those with the most steps
first, so that the active ones are always a prefix. When only a few are left, plain numbers are faster than arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.bin_idx import Tokens
from tokenmill.dataset.dataset import BLOCK_TOKENS, Dataset, Starts, TokenSplit
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
    require_shard_size,
)
from tokenmill.formats.rows import (
    RowsDataset,
    TokenRows,
    cut_by_size,
    find_indexes,
    interleave,
    known_fields,
    map_bytes,
    map_file_bytes,
    rows_of,
)
from tokenmill.records import Int, convert

TRAITS = FormatTraits(options={"shard_size"}, bytes_per_token=(4, 4), document_bytes=24)

SHARD_TOKENS = 1 << 25
VERSION = 14
TOKEN_BYTES = 4
_WORD_BYTES = 8
# catid's reader counts bytes of a file in signed 32 bits, and its writer keeps this margin.
_MAX_BYTES = (1 << 31) - 1 - 1_000_000
_WHY = "its reader counts the bytes of a file in 31 bits"
# Compression is fastest in blocks that fit into the CPU's cache, hashing with many documents at once.
_BLOCK_TOKENS = 1 << 20
_FACTS = {"tokens": int}
_HASHED_TOKENS = 1 << 23
_HASH_BYTES = 1 << 26
_INDEX_END = struct.Struct("<IBBQ")
_DATA_END = struct.Struct("<BBQ")
_DAMAGED = "the file is damaged: export it again"

Hashes = npt.NDArray[np.uint64]
N = TypeVar("N", Hashes, int)
State = tuple[N, N, N, N, N, N, N]

_K0 = 0xC3A5C85C97CB3127
_K1 = 0xB492B66FBE98F273
_K2 = 0x9AE16A3B2F90404F
_MUL = 0x9DDFEA08EB382D69
_MASK = (1 << 64) - 1
_FEW = 12


def check(options: Options, _: Outline) -> None:
    require_shard_size(options, most=_MAX_BYTES // TOKEN_BYTES, layout="catid", why=_WHY)


def write(source: Dataset, options: Options) -> Export:
    size = options.shard_size or SHARD_TOKENS
    splits, _ = rows_of(source, None)
    parts: list[OutputPart] = []
    notes = []
    for name, rows in splits.items():
        if left_out := _check(name, rows):
            notes.append(f"{left_out:,} documents of {name} have only the end of text, and are left out")
        ranges = cut_by_size(rows, TOKEN_BYTES * size, partial(_frame_bytes, rows.split))
        parts += [_part(name, number, rows, bounds) for number, bounds in enumerate(ranges)]
    if source.manifest.identity.get("eot", "none") != "none":
        notes.append("catid does not store the end of text: an import adds it again if the id is given")
    about = source.manifest.tokenizer
    return Export(parts=tuple(parts), notes=tuple(notes), finish=lambda receipts: _indexes(about, receipts))


def _counts(split: TokenSplit, lengths: Starts) -> Starts:
    """The lengths of documents without the end of text."""
    return lengths - (split.eot != "none")


def _frame_bytes(split: TokenSplit, lengths: Starts) -> Starts:
    """An upper bound on the bytes of frames. Documents without tokens have no frame."""
    size = TOKEN_BYTES * _counts(split, lengths)
    return np.where(size > 0, size + (size >> 8) + 64, 0)


def _check(name: str, rows: TokenRows) -> int:
    """The number of documents without tokens. Refuses documents that are too long, and splits without tokens."""
    empty, total = 0, 0
    for lengths in rows.lengths(0, rows.num_tokens):
        counts = _counts(rows.split, lengths)
        empty, total = empty + int(np.count_nonzero(counts == 0)), total + len(counts)
        if int(_frame_bytes(rows.split, lengths).max()) > _MAX_BYTES:
            raise RecipeError(
                f"catid cannot hold a document of {counts.max()} tokens: {_WHY}", hint="use another layout"
            )
    if empty == total:
        raise RecipeError(f"{name} has only ends of text", hint="catid does not store them")
    return empty


def _part(split_name: str, number: int, rows: TokenRows, bounds: tuple[int, int]) -> OutputPart:
    start, stop = bounds

    def write(files: Files) -> Facts:
        data = files.create(f"{split_name}/data_{number}.bin")
        index = files.create(f"{split_name}/index_{number}.bin")
        data_hash, index_hash, at, place, num_tokens = 0, 0, start, 0, 0
        for lengths in replace(rows, block_tokens=_HASHED_TOKENS).lengths(start, stop):
            end = at + int(lengths.sum())
            frames = list(_frames(rows, at, end))
            sizes = np.fromiter(map(len, frames), np.int64, len(frames))
            packed = b"".join(frames)
            counts = _counts(rows.split, lengths)
            records = np.stack((np.cumsum(sizes) - sizes + place, counts[counts > 0]), axis=1).astype("<u4")
            data_hash ^= _hash_all(packed, sizes)
            index_hash ^= _hash_all(records.tobytes(), np.full(len(records), 8))
            data.write(packed)
            index.write(records.tobytes())
            at, place, num_tokens = end, place + len(packed), num_tokens + int(counts.sum())
        kind = bytes((VERSION, TOKEN_BYTES))
        data.write(kind + struct.pack("<Q", data_hash ^ hash_one(kind)))
        trailer = struct.pack("<I", place) + kind
        index.write(trailer + struct.pack("<Q", index_hash ^ hash_one(trailer)))
        return {"tokens": num_tokens}

    return OutputPart(
        name=f"{split_name}/data_{number}", num_bytes=TOKEN_BYTES * (stop - start), write=write, facts=_FACTS
    )


def _frames(rows: TokenRows, start: int, stop: int) -> Iterator[Any]:
    """The frames of the documents of a range."""
    compress = compressor()
    for tokens, lengths in replace(rows, block_tokens=_BLOCK_TOKENS).blocks(start, stop):
        counts = _counts(rows.split, lengths)
        begins = np.cumsum(lengths) - lengths + (rows.split.eot == "prepend")
        begins, counts = begins[counts > 0], counts[counts > 0]
        yield from compress(byte_planes(tokens, begins, counts), TOKEN_BYTES * begins, TOKEN_BYTES * counts)


def byte_planes(tokens: Tokens, begins: Starts, counts: Starts) -> memoryview:
    """Documents as planes of bytes, each at the offset that it would have if all tokens had four bytes.

    The planes of the whole block are made first, then cut at the documents and at the gaps between them.
    """
    edges = np.stack((begins, begins + counts), axis=1).ravel()
    sizes = np.diff(edges, prepend=0, append=len(tokens))
    columns = [((tokens >> 8 * place).astype(np.uint8), sizes) for place in range(tokens.itemsize)]
    if rest := TOKEN_BYTES - tokens.itemsize:
        columns.append((np.zeros(rest * len(tokens), np.uint8), rest * sizes))
    return interleave(*columns)


def compressor(threads: int = 1) -> Callable[[memoryview, Starts, Starts], Sequence[Any]]:
    """A function that compresses strings of the data into a zstd frame each, all in one call."""
    import zstandard

    zstd = zstandard.ZstdCompressor(level=1)

    def compress(data: memoryview, begins: Starts, sizes: Starts) -> Sequence[Any]:
        if not len(sizes):
            return ()
        segments = np.stack((begins, sizes), axis=1).astype("<u8")
        strings = zstandard.BufferWithSegments(data, segments.tobytes())
        frames = zstd.multi_compress_to_buffer(strings, threads=threads)
        return [frames[number] for number in range(len(frames))]

    return compress


def _hash_all(data: bytes, sizes: Starts) -> int:
    """The XOR of the hashes of contiguous strings."""
    hashes = cityhash64(np.frombuffer(data, np.uint8), np.cumsum(sizes) - sizes, sizes)
    return int(np.bitwise_xor.reduce(hashes))


def _indexes(about: dict[str, Any], receipts: Sequence[PartReceipt]) -> Mapping[str, bytes]:
    """index.yaml of every split, and args.yml, which users of the loader read."""
    tokens: dict[str, list[int]] = {}
    for receipt in receipts:
        tokens.setdefault(receipt.part.partition("/")[0], []).append(receipt.facts["tokens"])
    files = {}
    for split, found in tokens.items():
        lines = [f"version: {VERSION}", f"token_bytes: {TOKEN_BYTES}", f"total_tokens: {sum(found)}"]
        for kind in ("data", "index"):
            lines += [f"{kind}_files:", *(f"  - {kind}_{number}.bin" for number in range(len(found)))]
        files[f"{split}/index.yaml"] = "\n".join([*lines, ""]).encode()
        files[f"{split}/args.yml"] = f"encoding: {about['name']!r}\nn_vocab: {about['vocab_size']}\n".encode()
    return files


@dataclass(frozen=True, kw_only=True)
class CatidFile:
    """The documents of one data file. With an `eot_id`, the end of text is added to each."""

    path: str
    index_path: str
    token_bytes: int
    eot_id: int | None

    @cached_property
    def num_tokens(self) -> int:
        return int(self.ends()[-1]) if len(self._records) else 0

    def ends(self) -> Starts:
        return np.cumsum(self._records[:, 1].astype(np.int64) + (self.eot_id is not None))

    def blocks(self, first: int, last: int) -> Iterator[Tokens]:
        counts = self._records[first:last, 1].astype(np.int64)
        edges = np.searchsorted(np.cumsum(counts), np.arange(0, counts.sum(), BLOCK_TOKENS))
        for low, high in zip(edges.tolist(), [*edges[1:].tolist(), last - first], strict=True):
            yield self._decompressed(first + low, first + high)

    def _decompressed(self, first: int, last: int) -> Tokens:
        import pyarrow as pa

        codec, data, width = pa.Codec("zstd"), self._data, self.token_bytes
        counts = self._records[first:last, 1].astype(np.int64)
        marks = int(self.eot_id is not None)
        found = np.full(int(counts.sum()) + marks * len(counts), self.eot_id or 0, "<i4")
        raw = found.view(np.uint8).reshape(-1, 4)
        at = 0
        bounds = self._bounds[first : last + 1].tolist()
        for begin, end, count in zip(bounds[:-1], bounds[1:], counts.tolist(), strict=True):
            try:
                planes = np.frombuffer(codec.decompress(data[begin:end], width * count), np.uint8)
            except (pa.ArrowException, OSError, ValueError) as error:
                raise DatasetError(f"{self.path}: the frame at {begin} is damaged: {error}", hint=_DAMAGED) from None
            raw[at : at + count] = 0
            raw[at : at + count, :width] = planes.reshape(width, count).T
            at += count + marks
        return found

    @cached_property
    def _records(self) -> npt.NDArray[np.uint32]:
        """Offset and number of tokens of every document, checked."""
        data = map_file_bytes(self.index_path)
        count, rest = divmod(len(data) - _INDEX_END.size, 8)
        if count < 0 or rest:
            raise DatasetError(f"{self.index_path}: {len(data)} bytes are not an index", hint=_DAMAGED)
        end = bytes(data[8 * count :])
        _, version, token_bytes, total = _INDEX_END.unpack(end)
        self._check_kind(self.index_path, version, token_bytes)
        hashes = cityhash64(data, np.arange(count) * 8, np.full(count, 8))
        if int(np.bitwise_xor.reduce(hashes)) ^ hash_one(end[:-8]) != total:
            raise DatasetError(f"{self.index_path}: its hash does not match", hint=_DAMAGED)
        records = data[: 8 * count].view("<u4").reshape(count, 2)
        if count and (records[0, 0] != 0 or records[:, 1].min() < 1):
            raise DatasetError(f"{self.index_path}: its documents are not contiguous", hint=_DAMAGED)
        return records

    @cached_property
    def _bounds(self) -> Starts:
        """The offsets of frames, and the end of the last one."""
        end = _INDEX_END.unpack(bytes(map_file_bytes(self.index_path)[-_INDEX_END.size :]))[0]
        bounds = np.append(self._records[:, 0].astype(np.int64), end)
        if (np.diff(bounds) < 1).any():
            raise DatasetError(f"{self.index_path}: its documents are not contiguous", hint=_DAMAGED)
        return bounds

    @cached_property
    def _data(self) -> npt.NDArray[np.uint8]:
        """The data file, mapped. Its hash is checked once, some megabytes at a time."""
        bounds = self._bounds
        data = map_bytes(self.path, int(bounds[-1]) + _DATA_END.size)
        end = bytes(data[-_DATA_END.size :])
        version, token_bytes, total = _DATA_END.unpack(end)
        self._check_kind(self.path, version, token_bytes)
        found = hash_one(end[:-8])
        edges = np.searchsorted(bounds, np.arange(0, int(bounds[-1]), _HASH_BYTES)).tolist()
        for low, high in zip(edges, [*edges[1:], len(bounds) - 1], strict=True):
            hashes = cityhash64(data, bounds[low:high], np.diff(bounds[low : high + 1]))
            found ^= int(np.bitwise_xor.reduce(hashes))
        if found != total:
            raise DatasetError(f"{self.path}: its hash does not match", hint=_DAMAGED)
        return data

    def _check_kind(self, path: str, version: int, token_bytes: int) -> None:
        if (version, token_bytes) != (VERSION, self.token_bytes):
            raise DatasetError(
                f"{path}: version {version} with {token_bytes} bytes a token, not {VERSION} with {self.token_bytes}",
                hint="all files of a dataset have the same version",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CatidIndex:
    """index.yaml."""

    version: Int
    token_bytes: Int
    total_tokens: Int
    data_files: tuple[str, ...]
    index_files: tuple[str, ...]


def read(path: str, hints: Hints) -> RowsDataset:
    """A folder with an index.yaml, or a folder of such folders, which are splits."""
    indexes = find_indexes(path, "index.yaml", "catid", suffix=".bin")
    files = {split: _files(folder, index, hints.eot_id) for split, (folder, index) in indexes.items()}
    notes = (
        ()
        if hints.eot_id is None
        else (f"catid does not store the end of text: {hints.eot_id} is added to every document",)
    )
    eot = "none" if hints.eot_id is None else "append"
    return RowsDataset(path, "catid", files, hints, dtype="int32", packed=False, eot=eot, notes=notes)


def _files(folder: str, index: Any, eot_id: int | None) -> list[CatidFile]:
    where = f"{folder}/index.yaml"
    found = convert(_CatidIndex, known_fields(_CatidIndex, index), where=where)
    if found.version != VERSION or found.token_bytes not in range(1, 5):
        raise DatasetError(
            f"{where}: version {found.version} with {found.token_bytes} bytes a token",
            hint=f"version {VERSION} is read, with up to four",
        )
    if len(found.data_files) != len(found.index_files):
        raise DatasetError(f"{where}: not as many data files as index files", hint=_DAMAGED)
    files = []
    for data, name in zip(found.data_files, found.index_files, strict=True):
        check_name(data, where=where)
        check_name(name, where=where)
        files.append(
            CatidFile(
                path=f"{folder}/{data}", index_path=f"{folder}/{name}", token_bytes=found.token_bytes, eot_id=eot_id
            )
        )
    marks = sum(len(file.ends()) for file in files) if eot_id is not None else 0
    if (total := sum(file.num_tokens for file in files) - marks) != found.total_tokens:
        raise DatasetError(f"{where}: {found.total_tokens} tokens, the files have {total}", hint=_DAMAGED)
    return files


def cityhash64(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Hashes:
    """The hashes of the strings at `starts` in the data."""
    found = np.empty(len(starts), np.uint64)
    classes: list[tuple[int, int, Callable[..., Any]]] = [
        (0, 0, lambda _, at, size: np.full(len(at), _K2, np.uint64)),
        (1, 3, _up_to_3),
        (4, 7, _up_to_7),
        (8, 16, _up_to_16),
        (17, 32, _up_to_32),
        (33, 64, _up_to_64),
        (65, int(sizes.max(initial=0)), _longer),
    ]
    for least, most, formula in classes:
        mine = np.flatnonzero((sizes >= least) & (sizes <= most))
        if len(mine):
            found[mine] = formula(data, starts[mine], sizes[mine])
    return found


def hash_one(data: bytes) -> int:
    """The hash of a single string."""
    return int(cityhash64(np.frombuffer(data, np.uint8), np.array([0]), np.array([len(data)]))[0])


def _wide(value: Hashes) -> Hashes:
    """Arrays wrap by themselves."""
    return value


def _narrow(value: int) -> int:
    return value & _MASK


def _fetch(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: int = 8) -> Any:
    """Consecutive words of eight bytes at some offsets: an array for each word."""
    words = _strings(data, at, size).view("<u8")
    return np.ascontiguousarray(words.reshape(len(at), -1).T) if size > _WORD_BYTES else words


def _fetch32(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64]) -> Any:
    return _strings(data, at, 4).view("<u4").astype(np.uint64)


def _strings(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.void]:
    """`size` bytes at each of some offsets, copied as if they were one item."""
    every = np.ndarray(len(data) - size + 1, f"V{size}", data, strides=(1,))
    return every[at]


def _rotate(value: Any, by: int, wrap: Callable[[Any], Any]) -> Any:
    return wrap(value >> by | value << (64 - by))


def _mix(value: Any) -> Any:
    return value ^ value >> 47


def _pair(u: Any, v: Any, mul: Any = _MUL) -> Any:
    a = _mix((u ^ v) * mul)
    return _mix((v ^ a) * mul) * mul


def _mul_of(size: npt.NDArray[np.int64]) -> Any:
    return 2 * size.astype(np.uint64) + _K2


def _up_to_3(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Any:
    a, b, c = (data[at + place].astype(np.uint64) for place in (0, size >> 1, size - 1))
    return _mix((a + (b << 8)) * _K2 ^ (size.astype(np.uint64) + (c << 2)) * _K0) * _K2


def _up_to_7(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Any:
    first = size.astype(np.uint64) + (_fetch32(data, at) << 3)
    return _pair(first, _fetch32(data, at + size - 4), _mul_of(size))


def _up_to_16(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Any:
    mul = _mul_of(size)
    a, b = _fetch(data, at) + _K2, _fetch(data, at + size - 8)
    return _pair(_rotate(b, 37, _wide) * mul + a, (_rotate(a, 25, _wide) + b) * mul, mul)


def _up_to_32(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Any:
    mul = _mul_of(size)
    a, b = _fetch(data, at) * _K1, _fetch(data, at + 8)
    c, d = _fetch(data, at + size - 8) * mul, _fetch(data, at + size - 16) * _K2
    return _pair(_rotate(a + b, 43, _wide) + _rotate(c, 30, _wide) + d, a + _rotate(b + _K2, 18, _wide) + c, mul)


def _up_to_64(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Any:
    mul = _mul_of(size)
    a, b, e, f = _fetch(data, at, 32)
    d, c, h, g = _fetch(data, at + size - 32, 32)
    a, e, f, h = a * _K2, e * _K2, f * 9, h * mul
    u = _rotate(a + g, 43, _wide) + (_rotate(b, 30, _wide) + c) * 9
    v = ((a + g) ^ d) + f + 1
    w = ((u + v) * mul).byteswap() + h
    x = _rotate(e + f, 42, _wide) + c
    y = (((v + w) * mul).byteswap() + g) * mul
    z = e + f + c
    a = ((x + z) * mul + y).byteswap() + b
    return _mix((z + a) * mul + d + h) * mul + x


def _longer(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Hashes:
    order = np.argsort(-size, kind="stable")
    at, size = at[order], size[order]
    steps = (size - 1) >> 6
    last = _fetch(data, at + size - 64, 64)
    length = size.astype(np.uint64)
    x, y, z = last[3], last[6] + last[1], _pair(last[2] + length, last[5])
    v, second = _weak(last[0], last[1], last[2], last[3], length, z, _wide)
    w, fourth = _weak(last[4], last[5], last[6], last[7], y + _K1, x, _wide)
    x = x * _K1 + _fetch(data, at)
    state = np.stack((x, y, z, v, second, w, fourth))
    for step in range(int(steps[0])):
        active = int(np.searchsorted(-steps, -step))
        if active < _FEW:
            for number in range(active):
                state[:, number] = _finish(data, int(at[number]), step, int(steps[number]), state[:, number].tolist())
            break
        words = _fetch(data, at[:active] + 64 * step, 64)
        state[:, :active] = _step(tuple(state[:, :active]), words, _wide)
    x, y, z, v, second, w, fourth = state
    found = np.empty(len(at), np.uint64)
    found[order] = _pair(_pair(v, w) + _mix(y) * _K1 + z, _pair(second, fourth) + x)
    return found


def _finish(data: npt.NDArray[np.uint8], at: int, step: int, last: int, state: list[int]) -> State[int]:
    """The remaining steps of one long string, on plain numbers."""
    words = data[at + 64 * step : at + 64 * last].tobytes()
    found: State[int] = tuple(state)  # type: ignore[assignment]  # seven numbers
    for row in np.frombuffer(words, "<u8").reshape(-1, 8).tolist():
        found = _step(found, row, _narrow)
    return found


def _weak(  # noqa: PLR0917  as CityHash has it
    p: N, q: N, r: N, s: N, a: N, b: N, wrap: Callable[[N], N]
) -> tuple[N, N]:
    """A pair of numbers from four words and two seeds."""
    a = wrap(a + p)
    b = _rotate(wrap(b + a + s), 21, wrap)
    total = wrap(a + q + r)
    return wrap(total + s), wrap(wrap(b + _rotate(total, 44, wrap)) + a)


def _step(state: State[N], words: Any, wrap: Callable[[N], N]) -> State[N]:
    """Mix eight words into the state."""
    x, y, z, v, second, w, fourth = state
    x = wrap(_rotate(wrap(x + y + v + words[1]), 37, wrap) * _K1)
    y = wrap(_rotate(wrap(y + second + words[6]), 42, wrap) * _K1)
    x = x ^ fourth
    y = wrap(y + v + words[5])
    z = wrap(_rotate(wrap(z + w), 33, wrap) * _K1)
    v, second = _weak(words[0], words[1], words[2], words[3], wrap(second * _K1), wrap(x + w), wrap)
    w, fourth = _weak(words[4], words[5], words[6], words[7], wrap(z + fourth), wrap(y + words[2]), wrap)
    return z, y, x, v, second, w, fourth
