"""Shards as .bin/.idx pairs of Megatron-LM: byte layout, reader and writer.

    .bin   tokens back to back, little-endian, no header
    .idx   9 s  magic "MMIDIDX\\0\\0"
           u64  version, 1
           u8   dtype code, 8 for uint16, 4 for int32
           u64  n, number of sequences
           u64  n + 1
           i32[n]      tokens of each sequence
           i64[n]      byte offset of each sequence in .bin
           i64[n + 1]  document bounds as sequence indices: 0, 1, ..., n

In tokenmill's shards every document is one sequence. Nothing in an index is used before it was checked: `check_sizes`
and `check_header` read a few bytes, `parse_index` all of them. A writer streams tokens into .bin; the index follows
at the end.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.manifest import Manifest, Shard
from tokenmill.errors import AccessError, BuildError, DatasetError, RecipeError, StorageError
from tokenmill.storage.base import Storage
from tokenmill.storage.filesystem import explained
from tokenmill.storage.local import SizeOf
from tokenmill.storage.memory_maps import map_file
from tokenmill.storage.output import Digest, Output

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES = {"uint16": 8, "int32": 4}
NAMES = {code: name for name, code in CODES.items()}
MAX_DOCUMENT_TOKENS = (1 << 31) - 1
_CHUNK_DOCUMENTS = 1 << 18
_HINT = "run tokenmill repair"

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.int32]
# A file, and what is wrong with it.
Defect = tuple[str, str]


Lengths = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    """The header of an .idx. Megatron may combine sequences into documents; in ours every sequence is a document."""

    dtype: str
    num_sequences: int
    num_bounds: int


def dtype_for(vocab_size: int) -> str:
    """uint16 if every id fits, else int32: the format has no uint32."""
    if vocab_size <= 1 << 16:
        return "uint16"
    if vocab_size <= 1 << 31:
        return "int32"
    raise RecipeError(f"a vocabulary of {vocab_size} does not fit the token format", hint="ids must be below 2^31")


def numpy_dtype(name: str) -> np.dtype[np.uint16] | np.dtype[np.int32]:
    return np.dtype("<u2") if name == "uint16" else np.dtype("<i4")


def index_bytes(num_documents: int) -> int:
    """Size of the .idx of this many documents."""
    return HEADER.size + 12 * num_documents + 8 * (num_documents + 1)


def index_blocks(dtype: str, lengths: Callable[[], Iterable[Lengths]]) -> Iterator[bytes]:
    """The .idx of documents, block by block. `lengths()` is iterated several times, so it need not be in memory."""
    count = sum(map(len, lengths()))
    itemsize = numpy_dtype(dtype).itemsize
    yield HEADER.pack(MAGIC, 1, CODES[dtype], count, count + 1)
    for block in lengths():
        yield block.astype("<i4").tobytes()
    offset = 0
    for block in lengths():
        ends = np.cumsum(block, dtype=np.int64) * itemsize + offset
        yield (ends - block.astype(np.int64) * itemsize).astype("<i8").tobytes()
        offset = int(ends[-1]) if len(ends) else offset
    for start in range(0, count + 1, _CHUNK_DOCUMENTS):
        yield np.arange(start, min(start + _CHUNK_DOCUMENTS, count + 1), dtype="<i8").tobytes()


def parse_header(data: bytes, *, where: str, hint: str = _HINT) -> IndexHeader:
    """The header of an .idx of ours or of Megatron's, checked."""
    if len(data) < HEADER.size:
        raise DatasetError(f"{where}: {len(data)} bytes are too few for an index", hint=hint)
    magic, version, code, num_sequences, num_bounds = HEADER.unpack_from(data)
    if magic != MAGIC or version != 1 or code not in NAMES:
        told = f"magic {magic!r}, version {version}, dtype code {code}"
        raise DatasetError(f"{where}: not an index of uint16 or int32 tokens ({told})", hint=hint)
    return IndexHeader(dtype=NAMES[code], num_sequences=num_sequences, num_bounds=num_bounds)


def _parse_own_header(data: bytes, *, where: str) -> IndexHeader:
    """The header of an .idx in which every sequence is a document."""
    header = parse_header(data, where=where)
    if header.num_bounds != header.num_sequences + 1:
        raise DatasetError(
            f"{where}: {header.num_sequences} sequences, but {header.num_bounds} document bounds",
            hint=_HINT,
        )
    return header


def parse_index(data: memoryview, *, bin_bytes: int, where: str) -> tuple[IndexHeader, npt.NDArray[np.int32]]:
    """Header and document lengths of a complete .idx, with every offset checked against the .bin."""
    header = _parse_own_header(bytes(data[: HEADER.size]), where=where)
    count = header.num_sequences
    if len(data) != index_bytes(count):
        raise DatasetError(f"{where}: {len(data)} bytes, but {count} documents need {index_bytes(count)}", hint=_HINT)
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
            f"{where}: its documents do not fill the .bin of {bin_bytes} bytes",
            hint=_HINT,
        )
    return header, lengths


def map_tokens(path: str, dtype: str) -> Tokens:
    """The tokens of a .bin, mapped."""
    with explained(path):
        return map_file(path, numpy_dtype(dtype))


def document_starts(path: str, num_documents: int) -> npt.NDArray[np.int64]:
    """Byte offset of every document of an .idx, mapped. They were checked when they were written, and by `verify`."""
    with explained(path):
        return map_file(path, "<i8", offset=HEADER.size + 4 * num_documents, count=num_documents)


def check_structure(folder: Storage, shard: Shard, dtype: str) -> None:
    """Raise `DatasetError` unless a pair has the right sizes and header. Reads no tokens."""
    check_sizes(shard, dtype, folder.size_of, where=folder.path)
    check_header(folder, shard, dtype)


def check_sizes(shard: Shard, dtype: str, size_of: SizeOf, *, where: str) -> None:
    """Raise `DatasetError` unless a pair has the sizes that follow from its tokens and documents."""
    needs = {
        f"{shard.name}.bin": (shard.tokens * numpy_dtype(dtype).itemsize, f"{shard.tokens} tokens"),
        f"{shard.name}.idx": (index_bytes(shard.documents), f"{shard.documents} documents"),
    }
    for name, (size, what) in needs.items():
        found = size_of(name)
        if found is None:
            raise DatasetError(f"{where}/{name}: missing, or not a plain file", hint=_HINT)
        if found != size:
            raise DatasetError(f"{where}/{name}: {found} bytes, but {what} need {size}", hint=_HINT)


def check_header(folder: Storage, shard: Shard, dtype: str) -> None:
    """Raise `DatasetError` unless an .idx has the header of this shard."""
    name = f"{shard.name}.idx"
    _check_header(folder.part(name, 0, HEADER.size), shard, dtype, where=folder.at(name))


def check_index(data: memoryview, shard: Shard, dtype: str, *, where: str) -> None:
    """Raise `DatasetError` unless a complete .idx describes its .bin, document by document."""
    _check_header(bytes(data[: HEADER.size]), shard, dtype, where=where)
    parse_index(data, bin_bytes=shard.tokens * numpy_dtype(dtype).itemsize, where=where)


def _check_header(data: bytes, shard: Shard, dtype: str, *, where: str) -> None:
    header = _parse_own_header(data, where=where)
    if header.dtype != dtype or header.num_sequences != shard.documents:
        raise DatasetError(
            f"{where}: {header.num_sequences} documents of {header.dtype}, expected {shard.documents} of {dtype}",
            hint=_HINT,
        )


def wrong_structure(folder: Storage, manifest: Manifest) -> Iterator[Defect]:
    """Files that differ from the manifest, in its order. Sizes come from listings, and headers are read in parallel."""
    size_of = folder.sizes_in(sorted({*map(os.path.dirname, manifest.files), *manifest.splits}))
    yield from _wrong_sizes(manifest.files, size_of)

    def check(shard: Shard) -> list[Defect]:
        return list(_wrong_shard(folder, shard, manifest.dtype, size_of))

    for split in manifest.splits.values():
        for wrong in folder.each(check, split.shards):
            yield from wrong


def _wrong_sizes(files: dict[str, Digest], size_of: SizeOf) -> Iterator[Defect]:
    for name, digest in files.items():
        size = size_of(name)
        if size is None:
            yield name, "is missing or not a plain file"
        elif size != digest.bytes:
            yield name, f"has {size} bytes, expected {digest.bytes}"


def _wrong_shard(folder: Storage, shard: Shard, dtype: str, size_of: SizeOf) -> Iterator[Defect]:
    files = {f"{shard.name}.bin": shard.bin, f"{shard.name}.idx": shard.idx}
    wrong = list(_wrong_sizes(files, size_of))
    yield from wrong
    if wrong:
        return
    try:
        check_sizes(shard, dtype, lambda name: files[name].bytes, where=folder.path)
        check_header(folder, shard, dtype)
    except AccessError:  # what may not be read need not be wrong
        raise
    except (DatasetError, StorageError) as error:
        yield f"{shard.name}.idx", error.message.partition(": ")[2]


class ShardWriter:
    """A .bin and .idx pair being written. No file is created before the first token."""

    def __init__(self, create: Callable[[str], Output], name: str, dtype: str) -> None:
        self.name = name
        self._create = create
        self._dtype = dtype
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._bin: Output | None = None
        self._idx: Output | None = None
        self.tokens = 0
        self.documents = 0

    def write(self, tokens: Tokens, lengths: npt.NDArray[np.int64]) -> None:
        """Add documents: their tokens end to end, and the length of each."""
        assert tokens.dtype == numpy_dtype(self._dtype), "narrow the ids before writing them"
        if len(lengths) and int(lengths.max()) > MAX_DOCUMENT_TOKENS:
            raise BuildError(f"{self.name}: a document has 2^31 tokens or more", hint="lower `max_document_bytes`")
        self._lengths.append(lengths.astype(np.int32))
        self.documents += len(lengths)
        self.append(tokens.data.cast("B"))

    def append(self, data: memoryview) -> None:
        """Add tokens as raw bytes. Their document lengths are passed to `add_lengths`, before or after."""
        if len(data):
            if self._bin is None:
                self._bin = self._create(f"{self.name}.bin")
            self._bin.write(data)
            self.tokens += len(data) // numpy_dtype(self._dtype).itemsize

    def add_lengths(self, lengths: npt.NDArray[np.int32]) -> None:
        """Add documents whose tokens are passed to `append`."""
        self._lengths.append(lengths)
        self.documents += len(lengths)

    def outputs(self) -> list[Output]:
        """The files to publish. None if there are no tokens, since an empty .bin cannot be mapped."""
        if self._bin is None:
            return []
        self._idx = self._create(f"{self.name}.idx")
        for block in index_blocks(self._dtype, lambda: self._lengths):
            self._idx.write(block)
        return [self._bin, self._idx]

    def describe(self, digests: dict[str, Digest]) -> Shard:
        """The manifest entry of the published pair."""
        return Shard(
            name=self.name,
            tokens=self.tokens,
            documents=self.documents,
            bin=digests[f"{self.name}.bin"],
            idx=digests[f"{self.name}.idx"],
        )

    def discard(self) -> None:
        """Remove what was written."""
        for output in (self._bin, self._idx):
            if output is not None:
                output.discard()
