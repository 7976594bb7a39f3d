"""Byte layout of a shard: Megatron-LM's indexed-dataset pair.

    .bin   tokens back to back, little-endian, no header
    .idx   9 s  magic "MMIDIDX\\0\\0"
           u64  version, 1
           u8   dtype code, 8 for uint16, 4 for int32
           u64  n, number of sequences; ours are documents
           u64  n + 1
           i32[n]      tokens of each document
           i64[n]      byte offset of each document in .bin
           i64[n + 1]  document starts as sequence indices: 0, 1, ..., n

One sequence a document, so the index of a document is the index of its sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenmill.errors import DatasetError, RecipeError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES = {"uint16": 8, "int32": 4}
NAMES = {code: name for name, code in CODES.items()}
MAX_DOCUMENT_TOKENS = (1 << 31) - 1
_CHUNK = 1 << 18

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    dtype: str
    num_documents: int


def dtype_for(vocab_size: int) -> str:
    """uint16 while every id fits, else int32: the format has no uint32."""
    if vocab_size <= 1 << 16:
        return "uint16"
    if vocab_size <= 1 << 31:
        return "int32"
    raise RecipeError(f"a vocabulary of {vocab_size} does not fit the token format", hint="ids must be below 2^31")


def numpy_dtype(name: str) -> np.dtype[np.uint16] | np.dtype[np.int32]:
    return np.dtype("<u2") if name == "uint16" else np.dtype("<i4")


def index_bytes(num_documents: int) -> int:
    """Size of the .idx of so many documents."""
    return HEADER.size + 12 * num_documents + 8 * (num_documents + 1)


def index_blocks(dtype: str, lengths: npt.NDArray[np.int32]) -> Iterator[bytes]:
    """The .idx of documents of these lengths, block by block."""
    count = len(lengths)
    itemsize = numpy_dtype(dtype).itemsize
    yield HEADER.pack(MAGIC, 1, CODES[dtype], count, count + 1)
    for start in range(0, count, _CHUNK):
        yield lengths[start : start + _CHUNK].astype("<i4").tobytes()
    offset = 0
    for start in range(0, count, _CHUNK):
        ends = np.cumsum(lengths[start : start + _CHUNK], dtype=np.int64) * itemsize + offset
        yield np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes()
        offset = int(ends[-1])
    for start in range(0, count + 1, _CHUNK):
        yield np.arange(start, min(start + _CHUNK, count + 1), dtype="<i8").tobytes()


def parse_header(data: bytes, *, where: str) -> IndexHeader:
    """The header of an .idx, checked."""
    if len(data) < HEADER.size:
        raise DatasetError(f"{where}: {len(data)} bytes are too few for an index", hint="run tokenmill repair")
    magic, version, code, count, count_and_one = HEADER.unpack_from(data)
    if magic != MAGIC or version != 1 or code not in NAMES or count_and_one != count + 1:
        raise DatasetError(
            f"{where}: not an index of ours (magic {magic!r}, version {version}, dtype code {code}, "
            f"{count} sequences, {count_and_one} document bounds)",
            hint="run tokenmill repair",
        )
    return IndexHeader(dtype=NAMES[code], num_documents=count)


def parse_index(data: memoryview, *, bin_bytes: int, where: str) -> tuple[IndexHeader, npt.NDArray[np.int32]]:
    """Header and document lengths of a whole .idx; every offset is checked against the .bin."""
    header = parse_header(bytes(data[: HEADER.size]), where=where)
    count = header.num_documents
    if len(data) != index_bytes(count):
        raise DatasetError(
            f"{where}: {len(data)} bytes, but {count} documents need {index_bytes(count)}", hint="run tokenmill repair"
        )
    lengths = np.frombuffer(data, "<i4", count, HEADER.size)
    offsets = np.frombuffer(data, "<i8", count, HEADER.size + 4 * count)
    bounds = np.frombuffer(data, "<i8", count + 1, HEADER.size + 12 * count)
    ends = np.cumsum(lengths, dtype=np.int64) * numpy_dtype(header.dtype).itemsize
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if count else ends
    if (
        (lengths < 0).any()
        or not np.array_equal(offsets, starts)
        or not np.array_equal(bounds, np.arange(count + 1))
        or (int(ends[-1]) if count else 0) != bin_bytes
    ):
        raise DatasetError(
            f"{where}: its documents do not lie end to end in the .bin of {bin_bytes} bytes",
            hint="run tokenmill repair",
        )
    return header, lengths
