"""Token files of other layouts, opened as they are: mapped, not copied, with numpy alone.

    nanogpt    train.bin, val.bin             raw tokens, each document ends with the end of text
    megatron   X.bin and X.idx                documents by the index
    llmc       X_train_000001.bin             1024 bytes of header; each document begins with the end of text
    templar    train_000000.npy, tokens.bin   documents run on from file to file
    datatrove  X.ds and X.ds.index            documents by the index
    olmo       part-0-00000.npy, .csv.gz      raw tokens in spite of the name; documents by the table

A dataset that is opened in this way can be read, loaded and imported. It has no digests to be verified by:
its fingerprint is taken from the sizes of its files and a few places in them.

Where documents end in token files that are not ours: stored beside the tokens, or told by the end of text.

All positions are tokens of a whole split. Nothing is read before it is asked for, and no more than
asked for: a range of a split of any size takes little memory.

A dataset in an object store, opened: its manifest is read there, its shards are copied here as they are needed.

Which layout token files have, and what each layout says of itself: files, dtype, end of text, documents.

One function a layout. Each takes a path (a file, a prefix or a folder) and gives what it found, or None
if the path holds nothing of its kind; what is of its kind and wrong is a `DatasetError`.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import importlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from tokenmill import arguments, records
from tokenmill.dataset import manifest
from tokenmill.dataset import manifest as manifests
from tokenmill.dataset.bin_idx import Tokens
from tokenmill.dataset.dataset import BLOCK_TOKENS, Dataset, Starts, TokenSplit
from tokenmill.dataset.manifest import Manifest, Split
from tokenmill.errors import DatasetError, RecipeError, hint_for
from tokenmill.formats.base import FoundFiles, Hints, TokenFile, map_token_file
from tokenmill.sizes import format_time, parse_size
from tokenmill.storage import memory_maps
from tokenmill.storage.base import cache_path, local_folder, open_folder
from tokenmill.storage.local import Folder
from tokenmill.storage.object_folder import ObjectFolder
from tokenmill.storage.shard_cache import LIMIT, CachedFolder, open_cache


def open(
    path: str | os.PathLike[str],
    *,
    layout: str | None = None,
    dtype: str | None = None,
    eot_id: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | str | None = None,
) -> Dataset:
    """Open a dataset's folder or URL, or token files of another layout as they are. Anything else is a `DatasetError`.

    `layout`, `dtype` and `eot_id` tell what files of another layout do not tell themselves. The shards of a URL are
    copied to the folder `cache` as they are needed (TOKENMILL_CACHE, ~/.cache/tokenmill by default), which takes up to
    `cache_bytes` (TOKENMILL_CACHE_BYTES).
    """
    for name, hint in (("layout", layout), ("dtype", dtype)):
        arguments.text_or_none(name, hint)
    eot_id = arguments.whole_or_none("eot_id", eot_id)
    cache = arguments.place_or_none("cache", cache)
    folder = open_folder(path)
    if cache_bytes is not None:
        parse_size(cache_bytes, name="cache_bytes")
    if not folder.is_local:
        return Dataset(*open_remote(folder, cache=cache, cache_bytes=cache_bytes))
    if layout is None and folder.exists(manifests.MANIFEST):
        return Dataset(folder, manifests.load_manifest(folder))
    from tokenmill.formats.base import Hints

    return open_in_place(folder.path, Hints(layout=layout, dtype=dtype, eot_id=eot_id))


PLACES = 8
PLACE_BYTES = 4096


def open_in_place(path: str, hints: Hints) -> InPlaceDataset:
    """Open token files of a layout that is given, or found by their names and first bytes."""

    return InPlaceDataset(path, detect(path, hints))


class InPlaceDataset(Dataset):
    """Token files of another layout. Its manifest tells what was found; it was read from no file."""

    def __init__(self, path: str, found: FoundFiles) -> None:
        self.path = path
        self.found = found
        self.manifest = _manifest(found)
        self._splits = {name: InPlaceSplit(found, name) for name in found.files}

    def content(self, split: str) -> str:
        """What a few places of the files tell: all that can be had without reading them."""
        return self.manifest.fingerprint

    def pins(self, *splits: str) -> dict[str, Any]:
        paths = {file.path for name in splits or self.splits for file in self.found.files[name]}
        return {"content": self.manifest.fingerprint, "files": pin_files(paths)}


class InPlaceSplit(TokenSplit):
    """The tokens of some files, end to end, and where their documents end."""

    def __init__(self, found: FoundFiles, name: str) -> None:
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
            found = self._maps[number] = (map_token_file(self.files[number], self.dtype), np.zeros(0, np.int64))
        return found


def _manifest(found: FoundFiles) -> Manifest:
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
        format=manifest.FORMAT,
        fingerprint=records.digest(about),
        identity={"layout": found.layout, "eot": found.eot},
        tokenizer={**manifest.UNKNOWN_TOKENIZER, "eot_id": found.eot_id},
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
    places = _places(map_token_file(file, dtype).data.cast("B"))
    return {"name": os.path.basename(file.path), "tokens": file.num_tokens, "places": places}


def look_at(path: str) -> dict[str, Any]:
    """The same of a file that is no run of tokens."""
    try:
        size = os.path.getsize(path)
        data = memory_maps.map_file(path, np.uint8)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}", hint=hint_for(error, "check the path")) from None
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


Numbers = npt.NDArray[np.int64]
Blocks = Callable[[int, int], Iterator[Tokens]]


class Ends(Protocol):
    """The ends of a split's documents, in order."""

    def between(self, start: int, stop: int) -> Numbers:
        """Ends behind `start` and not behind `stop`."""
        ...


@dataclass(frozen=True, slots=True)
class NoEnds:
    """Nobody knows where documents end."""

    where: str

    def between(self, start: int, stop: int) -> Numbers:
        raise DatasetError(
            f"{self.where} does not tell where its documents end",
            hint="give the id that ends a text (eot_id, --eot-id), or the tokenizer",
        )


@dataclass(frozen=True, slots=True)
class StoredEnds:
    """Ends that were stored, file by file: those inside each file, and where the files themselves begin and end.

    `unit` is what the inner ones count in: tokens, or bytes of which a token has so many.
    """

    inner: Sequence[npt.NDArray[np.int64] | npt.NDArray[np.uint64]]
    edges: Sequence[int]
    unit: int = 1

    def between(self, start: int, stop: int) -> Numbers:
        found = [np.zeros(0, np.int64)]
        for ends, (begin, end) in zip(self.inner, itertools.pairwise(self.edges), strict=True):
            # Both ends of the range by bisection: the rest of a mapped index is not even read.
            first = bisect.bisect_right(ends, (start - begin) * self.unit) if start > begin else 0
            last = bisect.bisect_right(ends, (stop - begin) * self.unit) if stop > begin else 0
            if first < last:
                found.append(ends[first:last].astype(np.int64) // self.unit + begin)
            if start < end <= stop and end > begin:
                found.append(np.array([end]))
        return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class EotEnds:
    """Ends that the end-of-text id tells. It stands last in a document, or first."""

    blocks: Blocks = field(repr=False)
    num_tokens: int
    eot_id: int
    is_first: bool

    def between(self, start: int, stop: int) -> Numbers:
        stop = min(stop, self.num_tokens)
        shift = 0 if self.is_first else 1
        found = [np.zeros(0, np.int64)]
        # An end at e is told by token e - 1, or by token e where it begins the next document.
        at = start + 1
        for tokens in self.blocks(at - shift, min(stop + 1 - shift, self.num_tokens)):
            found.append(np.flatnonzero(tokens == self.eot_id) + at)
            at += len(tokens)
        if start < stop == self.num_tokens and not (found[-1].size and found[-1][-1] == stop):
            found.append(np.array([stop]))  # what follows the last end of text is a document, too
        return np.concatenate(found)


def open_remote(
    source: Folder, *, cache: str | os.PathLike[str] | None, cache_bytes: int | str | None
) -> tuple[CachedFolder, Manifest]:
    """The copies of a remote dataset on this machine, and its manifest."""
    assert isinstance(source, ObjectFolder), "there are no other remote folders"
    manifest = manifests.load_manifest(source)
    place = cache_path() if cache is None else local_folder(cache, name="cache").path
    folder = open_cache(
        source, manifest.all_files(), identity=records.digest(manifest), cache=place, limit=_limit(cache_bytes)
    )
    if manifest.tokenizer["file"]:
        with folder.need([manifest.tokenizer["file"]]):
            pass  # it stays here as long as this process may read it
    return folder, manifest


def _limit(given: int | str | None) -> int:
    """Bytes that the cache may take; 0 leaves it to the disk."""
    wanted = (os.environ.get(LIMIT) or None) if given is None else given
    return 0 if wanted is None else parse_size(wanted, name=LIMIT if given is None else "cache_bytes")


Detector = Callable[[str, Hints], FoundFiles | None]


def detect(path: str, hints: Hints) -> FoundFiles:
    """What a path holds. Raises `DatasetError` if it is of no layout that is read in place."""
    if hints.layout is not None:
        if hints.layout not in IN_PLACE:
            raise RecipeError(f"files of layout {hints.layout!r} are not read in place", hint=_KNOWN)
        found = _detector(hints.layout)(path, hints)
        if found is None:
            raise DatasetError(f"{path} holds nothing of layout {hints.layout}", hint="check the path and the layout")
        return found
    for layout in IN_PLACE:
        if (found := _detector(layout)(path, hints)) is not None:
            return found
    if nodes := manifest.load_nodes(Folder(path)):
        raise DatasetError(
            f"{path} holds no part of its dataset", hint=f"open it where one is: {manifest.where_parts_are(nodes)}"
        )
    if os.path.isdir(os.path.join(path, ".build")):
        hint = "its build has not finished: run the same tokenmill command again"
    else:
        hint = f"give the folder that tokenmill prepare wrote, or files of another layout. {_KNOWN}"
    raise DatasetError(f"{path} is not a dataset: it has no dataset.json", hint=hint)


# In this order: each is told from those below it by something that they do not have.
IN_PLACE = ("megatron", "llmc", "templar", "datatrove", "olmo", "nanogpt")
_KNOWN = f"Read in place: {', '.join(IN_PLACE)}"


def _detector(layout: str) -> Detector:
    """A format's own detection; its module is loaded only now."""
    return cast("Detector", importlib.import_module(f"tokenmill.formats.{layout}").detect)
