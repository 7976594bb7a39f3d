"""Reading catid's files: frames are decompressed where they are asked for; hashes are checked before anything else."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.data.bare import Hints
from tokenmill.data.dataset import BLOCK_TOKENS, Starts
from tokenmill.errors import DatasetError
from tokenmill.layouts.cityhash import cityhash64, hash_one
from tokenmill.layouts.foreign import find_indexes, map_bytes, map_file_bytes, picked
from tokenmill.layouts.stored import StoredDataset
from tokenmill.manifest import check_name
from tokenmill.shards.layout import Tokens
from tokenmill.typed import convert

VERSION = 14
_HASH_BYTES = 1 << 26
_INDEX_END = struct.Struct("<IBBQ")
_DATA_END = struct.Struct("<BBQ")
_DAMAGED = "the file is damaged: make it again"


@dataclass(frozen=True, kw_only=True)
class CatidFile:
    """Documents of one data file. With an `eot_id`, each is given its end of text back."""

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
                raise DatasetError(f"{self.path}: the frame at {begin} is broken: {error}", hint=_DAMAGED) from None
            raw[at : at + count] = 0
            raw[at : at + count, :width] = planes.reshape(width, count).T
            at += count + marks
        return found

    @cached_property
    def _records(self) -> npt.NDArray[np.uint32]:
        """Place and tokens of every document, checked."""
        data = map_file_bytes(self.index_path)
        count, rest = divmod(len(data) - _INDEX_END.size, 8)
        if count < 0 or rest:
            raise DatasetError(f"{self.index_path}: {len(data)} bytes are no index", hint=_DAMAGED)
        end = bytes(data[8 * count :])
        _, version, token_bytes, total = _INDEX_END.unpack(end)
        self._check_kind(self.index_path, version, token_bytes)
        hashes = cityhash64(data, np.arange(count) * 8, np.full(count, 8))
        if int(np.bitwise_xor.reduce(hashes)) ^ hash_one(end[:-8]) != total:
            raise DatasetError(f"{self.index_path}: its hash does not fit", hint=_DAMAGED)
        records = data[: 8 * count].view("<u4").reshape(count, 2)
        if count and (records[0, 0] != 0 or records[:, 1].min() < 1):
            raise DatasetError(f"{self.index_path}: its documents do not lie end to end", hint=_DAMAGED)
        return records

    @cached_property
    def _bounds(self) -> Starts:
        """Where frames begin, and the last one ends."""
        end = _INDEX_END.unpack(bytes(map_file_bytes(self.index_path)[-_INDEX_END.size :]))[0]
        bounds = np.append(self._records[:, 0].astype(np.int64), end)
        if (np.diff(bounds) < 1).any():
            raise DatasetError(f"{self.index_path}: its documents do not lie end to end", hint=_DAMAGED)
        return bounds

    @cached_property
    def _data(self) -> npt.NDArray[np.uint8]:
        """The data file, mapped, when its hash is found right: once, some megabytes at a time."""
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
            raise DatasetError(f"{self.path}: its hash does not fit", hint=_DAMAGED)
        return data

    def _check_kind(self, path: str, version: int, token_bytes: int) -> None:
        if (version, token_bytes) != (VERSION, self.token_bytes):
            raise DatasetError(
                f"{path}: version {version} with {token_bytes} bytes a token, not {VERSION} with {self.token_bytes}",
                hint="files of one version belong together",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """index.yaml."""

    version: int
    token_bytes: int
    total_tokens: int
    data_files: tuple[str, ...]
    index_files: tuple[str, ...]


def open_catid(path: str, hints: Hints) -> StoredDataset:
    """A folder with an index.yaml, or a folder of such folders, which are splits then."""
    indexes = find_indexes(path, "index.yaml", "catid", ending=".bin")
    files = {split: _files(folder, index, hints.eot_id) for split, (folder, index) in indexes.items()}
    notes = (
        () if hints.eot_id is None else (f"catid stores no end of text: {hints.eot_id} is put behind every document",)
    )
    eot = "none" if hints.eot_id is None else "append"
    return StoredDataset(path, "catid", files, hints, dtype="int32", packed=False, eot=eot, notes=notes)


def _files(folder: str, index: Any, eot_id: int | None) -> list[CatidFile]:
    where = f"{folder}/index.yaml"
    found = convert(_Index, picked(_Index, index), where=where)
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
