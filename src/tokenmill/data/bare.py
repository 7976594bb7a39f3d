"""Token files of other layouts, opened as they are: mapped, not copied, with numpy alone.

    nanogpt    train.bin, val.bin             raw tokens, each document ends with the end of text
    megatron   X.bin and X.idx                documents by the index
    llmc       X_train_000001.bin             1024 bytes of header; each document begins with the end of text
    templar    train_000000.npy, tokens.bin   documents run on from file to file
    datatrove  X.ds and X.ds.index            documents by the index
    olmo       part-0-00000.npy, .csv.gz      raw tokens in spite of the name; documents by the table

A dataset that is opened in this way can be read, loaded and imported. It has no digests to be verified by:
its fingerprint is taken from the sizes of its files and a few places in them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from tokenmill import manifest as manifests
from tokenmill import records
from tokenmill.data.dataset import BLOCK_TOKENS, Dataset, Starts, TokenSplit
from tokenmill.data.ends import Ends, EotEnds, NoEnds, StoredEnds
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.manifest import Manifest, Split
from tokenmill.shards.layout import Tokens, numpy_dtype
from tokenmill.sizes import format_time
from tokenmill.storage import maps

PLACES = 8
PLACE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What the caller knows of files that do not tell it themselves."""

    layout: str | None = None
    dtype: str | None = None
    eot_id: int | None = None

    def stored_dtype(self, *, default: str | None = None, where: str) -> str:
        """The dtype as ours are named: ids have no sign to lose, so uint32 is read as int32."""
        if self.dtype is None and default is None:
            raise DatasetError(f"{where} does not tell its dtype", hint="give dtype: uint16 or uint32")
        try:
            return {"uint16": "uint16", "uint32": "int32", "int32": "int32"}[self.dtype or default or ""]
        except KeyError:
            raise RecipeError(f"dtype {self.dtype!r} is not known", hint="use uint16, int32 or uint32") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """Tokens in a file: from which byte on, and how many."""

    path: str
    offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found in files of another layout. `inner` are the ends of documents inside each file, if stored."""

    layout: str
    dtype: str
    eot: str
    eot_id: int | None
    files: Mapping[str, Sequence[TokenFile]]
    inner: Mapping[str, Sequence[Any]] | None = None
    unit: int = 1


def open_bare(path: str, hints: Hints) -> BareDataset:
    """Open token files of a layout that is given, or found by their names and first bytes."""
    from tokenmill.data.finding import find

    return BareDataset(path, find(path, hints))


class BareDataset(Dataset):
    """Token files of another layout. Its manifest tells what was found; it was read from no file."""

    def __init__(self, path: str, found: Found) -> None:
        self.path = path
        self.found = found
        self.manifest = _manifest(found)
        self._splits = {name: BareSplit(found, name) for name in found.files}

    def content(self, split: str) -> str:
        """What a few places of the files tell: all that can be had without reading them."""
        return self.manifest.fingerprint

    def pins(self, *splits: str) -> dict[str, Any]:
        paths = {file.path for name in splits or self.splits for file in self.found.files[name]}
        return {"content": self.manifest.fingerprint, "files": pin_files(paths)}


class BareSplit(TokenSplit):
    """The tokens of some files, end to end, and where their documents end."""

    def __init__(self, found: Found, name: str) -> None:
        files = found.files[name]
        self.dtype = found.dtype
        self.eot, self.eot_id = found.eot, found.eot_id
        self.files = tuple(files)
        self.token_ends = list(accumulate(file.num_tokens for file in files))
        self._maps = {}
        self._bytes = {}
        self.num_unmapped = 0
        self.views = {}
        edges = [0, *self.token_ends]
        self._ends: Ends
        if found.inner is not None:
            self._ends = StoredEnds(found.inner[name], edges, found.unit)
        elif found.eot_id is not None and found.eot != "none":
            self._ends = EotEnds(self.blocks, self.num_tokens, found.eot_id, found.eot == "prepend")
        else:
            self._ends = NoEnds(files[0].path)

    @property
    def fits(self) -> bool:
        return True

    @property
    def num_tokens(self) -> int:
        return self.token_ends[-1]

    @property
    def num_documents(self) -> int:
        return len(self._all_ends)

    def document_ends(self, start: int, stop: int) -> Starts:
        return self._ends.between(start, stop)

    def document(self, index: int) -> Tokens:
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        start = int(self._all_ends[index - 1]) if index else 0
        return self.tokens(start, int(self._all_ends[index]))

    def document_at(self, tokens: Starts) -> Starts:
        return np.searchsorted(self._all_ends, tokens, side="right").astype(np.int64)

    def document_starts(self, documents: Starts) -> Starts:
        return np.concatenate(([0], self._all_ends[:-1]))[documents]

    def document_lengths(self) -> Iterator[Any]:
        """Tokens of every document. Rows are packed from single files, so no document may go on in the next one."""
        if not np.isin(self.token_ends, self._all_ends).all():
            raise DatasetError(
                f"documents run on from {self.files[0].path} into the next file",
                hint="tokenmill import makes a dataset of them, which can be packed",
            )
        yield np.diff(self._all_ends, prepend=0).astype(np.int32)

    @cached_property
    def _all_ends(self) -> Starts:
        """Every end, in memory: eight bytes a document. Ranges are had without it."""
        steps = range(0, self.num_tokens, BLOCK_TOKENS)
        return np.concatenate([self.document_ends(at, min(at + BLOCK_TOKENS, self.num_tokens)) for at in steps])

    def _place(self, number: int) -> tuple[str, int]:
        return self.files[number].path, self.files[number].offset

    def _here(self, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _map(self, number: int) -> tuple[Tokens, Starts]:
        """Tokens of a file, mapped at its first use. Where documents start is not kept by file."""
        found = self._maps.get(number)
        if found is None:
            self._limit_maps()
            found = self._maps[number] = (map_file(self.files[number], self.dtype), np.zeros(0, np.int64))
        return found


def map_file(file: TokenFile, dtype: str) -> Tokens:
    """The tokens of a file, mapped."""
    kind = numpy_dtype(dtype)
    try:
        if os.path.getsize(file.path) < file.offset + file.num_tokens * kind.itemsize:
            raise DatasetError(f"{file.path} has become shorter", hint="is it still being written?")
        return maps.map_file(file.path, kind, offset=file.offset, count=file.num_tokens)
    except OSError as error:
        raise DatasetError(f"{file.path} cannot be read: {error.strerror}", hint="check the path") from None


def _manifest(found: Found) -> Manifest:
    """What stands for a manifest: sizes, and a fingerprint that other bytes at the places looked at would change."""
    about = {
        "layout": found.layout,
        "dtype": found.dtype,
        "eot": found.eot,
        "eot_id": found.eot_id,
        "splits": {name: [_look(file, found.dtype) for file in files] for name, files in found.files.items()},
    }
    tokens = {name: sum(file.num_tokens for file in files) for name, files in found.files.items()}
    return Manifest(
        format=manifests.FORMAT,
        fingerprint=records.digest(about),
        identity={"layout": found.layout, "eot": found.eot},
        tokenizer={**manifests.UNKNOWN_TOKENIZER, "eot_id": found.eot_id},
        parity={},
        dtype=found.dtype,
        splits={name: Split(tokens=count, documents=0, shards=()) for name, count in tokens.items()},
        documents_read=0,
        dropped={},
        text_sum="",
        sources=(),
        files={},
    )


def _look(file: TokenFile, dtype: str) -> dict[str, Any]:
    """A file's name, its size, and a digest of a few places in it: cheap, whatever its size."""
    places = _places(map_file(file, dtype).data.cast("B"))
    return {"name": os.path.basename(file.path), "tokens": file.num_tokens, "places": places}


def look_at(path: str) -> dict[str, Any]:
    """The same of a file that is no run of tokens."""
    try:
        size = os.path.getsize(path)
        data = maps.map_file(path, np.uint8)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}", hint="check the path") from None
    return {"bytes": size, "places": _places(data.data)}


def pin_files(paths: Collection[str]) -> dict[str, str]:
    """Sizes and times of these files, and of those beside them that bear their names or index them all.

    Where documents end is in one of those: X.idx of X.bin, X.ds.index, X.csv.gz, index.json.
    """
    found: dict[str, str] = {}
    folders = sorted({os.path.dirname(os.path.abspath(path)) for path in paths})
    root = os.path.commonpath(folders) if folders else ""
    for folder in folders:
        stems = {
            os.path.basename(path).partition(".")[0]
            for path in paths
            if os.path.dirname(os.path.abspath(path)) == folder
        }
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if (entry.name == "index.json" or entry.name.partition(".")[0] in stems) and entry.is_file():
                    about = entry.stat()
                    place = os.path.relpath(entry.path, root)  # wherever all of them are
                    found[place] = f"{about.st_size} bytes, {format_time(about.st_mtime_ns)}"
    return found


def _places(data: memoryview) -> str:
    sha = hashlib.sha256()
    for place in range(PLACES):
        start = max(0, len(data) - PLACE_BYTES) * place // (PLACES - 1)
        sha.update(data[start : start + PLACE_BYTES])
    return sha.hexdigest()
