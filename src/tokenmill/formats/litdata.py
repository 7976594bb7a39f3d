"""litData: `{split}/chunk-0-0.bin` and `{split}/index.json`, for its TokensLoader.

    u32 n; u32[n + 1] offsets from the start of the file; the tokens of n documents, end to end

The chunks equal those that `optimize()` makes of the same documents with one worker and `chunk_size` tokens, byte for
byte. litData's index has the time of writing, which caches compare; this one has a digest of the chunks instead, so
that the same tokens give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill import records
from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
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
    require_shard_size,
)
from tokenmill.formats.rows import (
    ROWS_NOTE,
    RowsDataset,
    TokenRows,
    are_packed,
    cut_by_size,
    find_indexes,
    known_fields,
    map_bytes,
    narrowed,
    packed_note,
    rows_of,
)
from tokenmill.records import Int, convert

TRAITS = FormatTraits(options={"shard_size"}, document_bytes=4)

SHARD_TOKENS = 1 << 24
_MAX_BYTES = (1 << 32) - 1
_FACTS = {"items": int, "tokens": int}
_WHY = "offsets have 32 bits, so a chunk has less than 4 GiB"
# The codes of its serializers: numbers in its lists of torch's dtypes, and of numpy's.
_CODES = {"uint16": 20, "int32": 16}
_TENSORS = {20: "<u2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8"}
_ARRAYS = {5: "<u2", 2: "<i4", 6: "<u4", 3: "<i8", 7: "<u8"}
_FORMATS = {
    **{f"no_header_tensor:{code}": dtype for code, dtype in _TENSORS.items()},
    **{f"no_header_numpy:{code}": dtype for code, dtype in _ARRAYS.items()},
}
_COMPLETE = "is the file complete?"
# The description of a single tensor by torch's pytree.
_LEAF = '[1, {"type": null, "context": null, "children_spec": []}]'


def check(options: Options, outline: Outline) -> None:
    most = (_MAX_BYTES - 8) // (numpy_dtype(outline.dtype).itemsize + 4)
    require_shard_size(options, most=most, layout="litdata", why=_WHY)


def write(source: Dataset, options: Options) -> Export:
    itemsize = numpy_dtype(source.manifest.dtype).itemsize
    size = options.shard_size or SHARD_TOKENS
    splits, notes = rows_of(source, None)
    parts = [
        _part(f"{name}/chunk-0-{number}.bin", rows, bounds)
        for name, rows in splits.items()
        for number, bounds in enumerate(_cut(rows, size, (_MAX_BYTES - 12) // itemsize))
    ]
    about = _about(source.manifest.dtype, size)
    return Export(parts=tuple(parts), notes=notes, finish=lambda receipts: _indexes(about, receipts))


def read(path: str, hints: Hints) -> Dataset:
    """A folder with an index.json, or a folder of such folders, which are splits."""
    indexes = find_indexes(path, "index.json", "litdata", suffix=".bin")
    files = {split: _chunks(folder, index) for split, (folder, index) in indexes.items()}
    packed = are_packed(files)
    narrow = all(chunk.dtype == "<u2" for found in files.values() for chunk in found)
    return RowsDataset(
        path,
        "litdata",
        files,
        hints,
        dtype="uint16" if narrow else "int32",
        packed=packed,
        notes=[packed_note("litdata", hints.eot_id) if packed else ROWS_NOTE],
    )


def _cut(rows: TokenRows, size: int, most: int) -> list[tuple[int, int]]:
    ranges = cut_by_size(rows, size, lambda lengths: lengths)
    if (longest := max(stop - start for start, stop in ranges)) > max(size, most):
        raise RecipeError(f"litdata cannot hold a document of {longest} tokens: {_WHY}", hint="use another layout")
    return ranges


def _about(dtype: str, size: int) -> dict[str, Any]:
    """The configuration that litData's writer stores for chunks of tokens."""
    return {
        "chunk_bytes": None,
        "chunk_size": size,
        "compression": None,
        "compression_batch_size": None,
        "compression_level": None,
        "data_format": [f"no_header_tensor:{_CODES[dtype]}"],
        "data_spec": _LEAF,
        "encryption": None,
        "ipc_compression": None,
        "item_loader": "TokensLoader",
        "types": "tensor",
    }


def _part(name: str, rows: TokenRows, bounds: tuple[int, int]) -> OutputPart:
    start, stop = bounds
    itemsize = rows.stream.itemsize

    def write(files: Files) -> Facts:
        output = files.create(name)
        count = sum(map(len, rows.lengths(start, stop)))
        offset = 4 * (count + 2)
        output.write(np.array([count, offset], "<u4").tobytes())
        for lengths in rows.lengths(start, stop):
            offsets = np.cumsum(lengths) * itemsize + offset
            output.write(offsets.astype("<u4").tobytes())
            offset = int(offsets[-1])
        for data in rows.stream.data(start, stop):
            output.write(data)
        return {"items": count, "tokens": stop - start}

    return OutputPart(name=name, num_bytes=(stop - start) * itemsize, write=write, files=(name,), facts=_FACTS)


def _indexes(about: dict[str, Any], receipts: Sequence[PartReceipt]) -> Mapping[str, bytes]:
    """index.json of every split."""
    chunks: dict[str, list[dict[str, Any]]] = {}
    digests: dict[str, list[str]] = {}
    for receipt in receipts:
        split, _, name = receipt.part.partition("/")
        digest = receipt.files[receipt.part]
        chunks.setdefault(split, []).append(
            {
                "chunk_bytes": digest.bytes,
                "chunk_size": receipt.facts["items"],
                "dim": receipt.facts["tokens"],
                "filename": name,
            }
        )
        digests.setdefault(split, []).append(digest.sha256)
    return {
        f"{split}/index.json": json.dumps(
            {"chunks": found, "config": about, "updated_at": records.digest(digests[split])[:16]}, sort_keys=True
        ).encode()
        for split, found in chunks.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A chunk, mapped."""

    path: str
    num_items: int
    num_tokens: int
    dtype: str

    def ends(self) -> Starts:
        offsets = self._map()[4 : self._begin].view("<u4").astype(np.int64)
        ends, rest = np.divmod(offsets - self._begin, np.dtype(self.dtype).itemsize)
        if ends[0] != 0 or rest.any() or (np.diff(ends) < 0).any() or int(ends[-1]) != self.num_tokens:
            raise DatasetError(f"{self.path}: its items do not fill it", hint=_COMPLETE)
        return ends[1:]

    def blocks(self, first: int, last: int) -> Iterator[Tokens]:
        edges = np.concatenate(([0], self.ends()))
        tokens = self._map()[self._begin :].view(self.dtype)
        start, stop = int(edges[first]), int(edges[last])
        for at in range(start, stop, BLOCK_TOKENS):
            yield narrowed(tokens[at : min(at + BLOCK_TOKENS, stop)], where=self.path)

    @property
    def _begin(self) -> int:
        return 4 * (self.num_items + 2)

    def _map(self) -> npt.NDArray[np.uint8]:
        size = self._begin + self.num_tokens * np.dtype(self.dtype).itemsize
        return map_bytes(self.path, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkEntry:
    """The fields of an index entry that are used."""

    chunk_bytes: Int
    chunk_size: Int
    dim: Int
    filename: str


def _chunks(folder: str, index: Any) -> list[Chunk]:
    where = f"{folder}/index.json"
    config, entries = (index.get("config"), index.get("chunks")) if isinstance(index, dict) else (None, None)
    if not isinstance(config, dict) or not isinstance(entries, list):
        raise DatasetError(f"{where}: not an index of litData", hint="check the path")
    loader, formats = config.get("item_loader"), config.get("data_format")
    if loader != "TokensLoader" or not isinstance(formats, list) or len(formats) != 1 or formats[0] not in _FORMATS:
        raise DatasetError(
            f"{where}: {formats} for {loader}",
            hint="chunks for the TokensLoader are read, with one row of integers in each item",
        )
    if config.get("compression") or config.get("encryption"):
        raise DatasetError(f"{where}: its chunks are compressed or encrypted", hint="write them without both")
    dtype = _FORMATS[formats[0]]
    return [_chunk(folder, entry, dtype, f"{where}, chunk {number}") for number, entry in enumerate(entries)]


def _chunk(folder: str, entry: Any, dtype: str, where: str) -> Chunk:
    found = convert(_ChunkEntry, known_fields(_ChunkEntry, entry), where=where)
    check_name(found.filename, where=where)
    size = 4 * (found.chunk_size + 2) + found.dim * np.dtype(dtype).itemsize
    if min(found.chunk_size, found.dim) < 0 or size != found.chunk_bytes:
        raise DatasetError(f"{where}: {found.chunk_bytes} bytes, but its tokens need {size}", hint=_COMPLETE)
    return Chunk(path=f"{folder}/{found.filename}", num_items=found.chunk_size, num_tokens=found.dim, dtype=dtype)
