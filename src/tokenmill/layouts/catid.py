"""catid's dataloader, version 14 of its format: `{split}/data_0.bin`, `index_0.bin`, `index.yaml`, `args.yml`.

    data    a zstd frame a document, over its tokens as four planes of bytes, the lowest first; u8 14; u8 4; u64 hash
    index   u32 place and u32 tokens of every document; u32 bytes of all frames; u8 14; u8 4; u64 hash

A hash is the XOR of the CityHash64 of every frame or record, and of what stands before it in the trailer. The end of
text is not stored: its loader separates documents by padding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tokenmill.data.bare import Hints
from tokenmill.data.dataset import Dataset, Starts, TokenSplit
from tokenmill.errors import RecipeError
from tokenmill.layouts.catid_files import VERSION, open_catid
from tokenmill.layouts.cityhash import cityhash64, hash_one
from tokenmill.layouts.rows import Rows, cut_by_size, interleave, rows_of
from tokenmill.layouts.shape import Export, Facts, Files, Options, Part, Receipt, require_shard_size
from tokenmill.shards.layout import Tokens

SUMMARY = "compressed documents with indexes and hashes for catid's dataloader"
OPTIONS = frozenset({"shard_size"})
NEEDS: frozenset[str] = frozenset()
WIDTHS = (4, 4)

SHARD_TOKENS = 1 << 25
TOKEN_BYTES = 4
# Its reader counts bytes of a file in signed 32 bits, and its writer keeps this far from their end.
_MAX_BYTES = (1 << 31) - 1 - 1_000_000
_WHY = "its reader counts the bytes of a file in 31 bits"
# Compressing is quicker near the core, hashing the more documents there are at once.
_BLOCK_TOKENS = 1 << 20
_HASHED_TOKENS = 1 << 23


def plan(source: Dataset, options: Options) -> Export:
    most = _MAX_BYTES // TOKEN_BYTES
    size = require_shard_size(options.shard_size or SHARD_TOKENS, most=most, layout="catid", why=_WHY)
    splits, _ = rows_of(source, "catid", None)
    parts: list[Part] = []
    notes = []
    for name, rows in splits.items():
        if left_out := _check(name, rows):
            notes.append(f"{left_out:,} documents of {name} have no tokens but the end of text, and are left out")
        ranges = cut_by_size(rows, TOKEN_BYTES * size, partial(_frame_bytes, rows.split))
        parts += [_part(name, number, rows, bounds) for number, bounds in enumerate(ranges)]
    if source.manifest.identity.get("eot", "none") != "none":
        notes.append("catid does not store the end of text: an import puts it back if it is told the id")
    about = source.manifest.tokenizer
    return Export(parts=tuple(parts), notes=tuple(notes), finish=lambda receipts: _indexes(about, receipts))


def open(path: str, hints: Hints) -> Dataset:
    return open_catid(path, hints)


def _counts(split: TokenSplit, lengths: Starts) -> Starts:
    """Tokens of documents without the end of text."""
    return lengths - (split.eot != "none")


def _frame_bytes(split: TokenSplit, lengths: Starts) -> Starts:
    """Bytes that frames of documents have at most; one without tokens has no frame."""
    size = TOKEN_BYTES * _counts(split, lengths)
    return np.where(size > 0, size + (size >> 8) + 64, 0)


def _check(name: str, rows: Rows) -> int:
    """How many documents have no tokens. Refuses a split that has no others, and documents that are too long."""
    empty, total = 0, 0
    for lengths in rows.lengths(0, rows.num_tokens):
        counts = _counts(rows.split, lengths)
        empty, total = empty + int(np.count_nonzero(counts == 0)), total + len(counts)
        if int(_frame_bytes(rows.split, lengths).max()) > _MAX_BYTES:
            raise RecipeError(
                f"catid cannot hold a document of {counts.max()} tokens: {_WHY}", hint="use another layout"
            )
    if empty == total:
        raise RecipeError(f"{name} has no tokens but ends of text", hint="catid stores none of them")
    return empty


def _part(split_name: str, number: int, rows: Rows, bounds: tuple[int, int]) -> Part:
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

    return Part(name=f"{split_name}/data_{number}", num_bytes=TOKEN_BYTES * (stop - start), write=write)


def _frames(rows: Rows, start: int, stop: int) -> Iterator[Any]:
    """The frames of documents that fill a range."""
    compress = compressor()
    for tokens, lengths in replace(rows, block_tokens=_BLOCK_TOKENS).blocks(start, stop):
        counts = _counts(rows.split, lengths)
        begins = np.cumsum(lengths) - lengths + (rows.split.eot == "prepend")
        begins, counts = begins[counts > 0], counts[counts > 0]
        yield from compress(byte_planes(tokens, begins, counts), TOKEN_BYTES * begins, TOKEN_BYTES * counts)


def byte_planes(tokens: Tokens, begins: Starts, counts: Starts) -> memoryview:
    """Documents as planes of bytes, each where it would begin if all tokens had four bytes.

    Planes of the whole block are made first, and cut at documents and at what lies between them.
    """
    edges = np.stack((begins, begins + counts), axis=1).ravel()
    sizes = np.diff(edges, prepend=0, append=len(tokens))
    columns = [((tokens >> 8 * place).astype(np.uint8), sizes) for place in range(tokens.itemsize)]
    if rest := TOKEN_BYTES - tokens.itemsize:
        columns.append((np.zeros(rest * len(tokens), np.uint8), rest * sizes))
    return interleave(*columns)


def compressor(threads: int = 1) -> Callable[[memoryview, Starts, Starts], Sequence[Any]]:
    """A function that makes a zstd frame of each of some strings in the data, all in one call."""
    import zstandard

    zstd = zstandard.ZstdCompressor(level=1)

    def compress(data: memoryview, begins: Starts, sizes: Starts) -> Sequence[Any]:
        if not len(sizes):
            return ()
        places = np.stack((begins, sizes), axis=1).astype("<u8")
        strings = zstandard.BufferWithSegments(data, places.tobytes())
        frames = zstd.multi_compress_to_buffer(strings, threads=threads)
        return [frames[number] for number in range(len(frames))]

    return compress


def _hash_all(data: bytes, sizes: Starts) -> int:
    """The XOR of the hashes of strings that lie end to end."""
    hashes = cityhash64(np.frombuffer(data, np.uint8), np.cumsum(sizes) - sizes, sizes)
    return int(np.bitwise_xor.reduce(hashes))


def _indexes(about: dict[str, Any], receipts: Sequence[Receipt]) -> Mapping[str, bytes]:
    """index.yaml of every split, and what the loader's users look up beside it."""
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
