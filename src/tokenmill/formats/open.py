"""open(): opens a prepared dataset, local or remote, or the files of another format in place.

    dataset.json       a prepared dataset, local; from a URL its shards are copied here as they are needed
    X.bin and X.idx    megatron    documents by the index
    X_000001.bin       llmc        1024 bytes of header; each document begins with the end of text
    train_000000.npy   templar     and tokens.bin; documents continue from file to file
    X.ds, X.ds.index   datatrove   documents by the index
    part-0-00000.npy   olmo        raw tokens in spite of the name; documents by its .csv.gz
    train.bin          nanogpt     raw tokens, each document ends with the end of text

Files in place are memory-mapped, not copied, with numpy alone. They can be read, loaded and imported, but not verified:
there are no digests, and the fingerprint is taken from the sizes of the files and a few samples of their bytes.
Document ends are stored beside the tokens, or found by the end of text, for the range that is asked for.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill import arguments, records
from tokenmill.dataset import manifest as manifests
from tokenmill.dataset.bin_idx import Tokens
from tokenmill.dataset.dataset import BLOCK_TOKENS, Dataset, Decoder, LazyProvenance, Starts, TokenSplit
from tokenmill.dataset.manifest import Manifest, Split
from tokenmill.errors import DatasetError, hint_for
from tokenmill.formats.base import (
    IN_PLACE,
    DetectedFiles,
    Hints,
    TokenFile,
    load_in_place_format,
    load_readable_format,
)
from tokenmill.formats.files import map_token_file
from tokenmill.sizes import format_time, parse_size
from tokenmill.storage import memory_maps
from tokenmill.storage.base import Storage, cache_path, local_folder, open_folder
from tokenmill.storage.local import Folder

if TYPE_CHECKING:
    from tokenmill.storage.shard_cache import CachedFolder

Numbers = npt.NDArray[np.int64]
Blocks = Callable[[int, int], Iterator[Tokens]]

# What the fingerprint of files in place covers.
NUM_BYTE_SAMPLES = 8
BYTE_SAMPLE_BYTES = 4096


def open(
    path: str | os.PathLike[str],
    *,
    layout: str | None = None,
    dtype: str | None = None,
    eot_id: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | str | None = None,
) -> Dataset:
    """Open a dataset's folder or URL, or files of another layout in place. Anything else is a `DatasetError`.

    `layout`, `dtype` and `eot_id` describe files of another layout that do not record it. The shards of a URL are
    copied to the folder `cache` as they are needed (by default TOKENMILL_CACHE, else ~/.cache/tokenmill), which may
    take `cache_bytes` (by default TOKENMILL_CACHE_BYTES).
    """
    for name, hint in (("layout", layout), ("dtype", dtype)):
        arguments.text_or_none(name, hint)
    eot_id = arguments.whole_or_none("eot_id", eot_id)
    cache = arguments.place_or_none("cache", cache)
    folder = open_folder(path)
    if cache_bytes is not None:
        parse_size(cache_bytes, name="cache_bytes")
    if not folder.can_map:
        return Dataset(*open_remote(folder, cache=cache, cache_bytes=cache_bytes))
    if layout is None and folder.exists(manifests.MANIFEST):
        return Dataset(folder, manifests.load_manifest(folder))
    return open_in_place(folder.path, Hints(layout=layout, dtype=dtype, eot_id=eot_id))


def open_remote(
    source: Storage, *, cache: str | os.PathLike[str] | None, cache_bytes: int | str | None
) -> tuple[CachedFolder, Manifest]:
    """The local cache of a remote dataset, and its manifest."""
    # These load the client of object stores, which local files do not need.
    from tokenmill.storage.object_folder import ObjectFolder
    from tokenmill.storage.shard_cache import LIMIT, open_cache

    assert isinstance(source, ObjectFolder), "there are no other remote folders"
    manifest = manifests.load_manifest(source)
    cache_folder = cache_path() if cache is None else local_folder(cache, name="cache").path
    wanted, name = (os.environ.get(LIMIT) or None, LIMIT) if cache_bytes is None else (cache_bytes, "cache_bytes")
    limit = 0 if wanted is None else parse_size(wanted, name=name)  # 0 for as much as the disk allows
    folder = open_cache(
        source, manifest.all_files(), identity=records.digest(manifest), cache=cache_folder, limit=limit
    )
    if manifest.tokenizer["file"]:
        with folder.need([manifest.tokenizer["file"]]):
            pass  # stays in the cache as long as this process may read it
    return folder, manifest


def open_in_place(path: str, hints: Hints) -> InPlaceDataset:
    """Open files of a format that is given, or detected by their names and first bytes."""
    return InPlaceDataset(path, detect(path, hints))


def read_files(path: str, layout: str, hints: Hints) -> Dataset:
    """Files of a format as a dataset with splits: opened in place if the format can be, else decoded."""
    if layout in IN_PLACE:
        return open_in_place(path, replace(hints, layout=layout))
    return load_readable_format(layout).read(path, hints)


def detect(path: str, hints: Hints) -> DetectedFiles:
    """The files of a path, and their format. Raises `DatasetError` if no format that is read in place has them."""
    if hints.layout is not None:
        found = load_in_place_format(hints.layout).detect(path, hints)
        if found is None:
            raise DatasetError(f"{path} has no files of layout {hints.layout}", hint="check the path and the layout")
        return found
    for layout in IN_PLACE:
        if (found := load_in_place_format(layout).detect(path, hints)) is not None:
            return found
    from tokenmill.dataset.folder_kinds import not_a_dataset

    raise not_a_dataset(Folder(path), "open")


class InPlaceDataset(Dataset):
    """Files of another format. Its manifest describes what was detected, and is not stored anywhere."""

    def __init__(self, path: str, detected: DetectedFiles) -> None:
        self.path = path
        self.detected = detected
        self.manifest = _describe(detected)
        self._decoder = Decoder(path, self.manifest.tokenizer)
        self._provenance = LazyProvenance(Folder(path), self.manifest)
        self._splits = {name: InPlaceSplit(detected, name, self._decoder, self._provenance) for name in detected.files}

    def content(self, split: str) -> str:
        """The fingerprint: everything that is known without reading the files."""
        return self.manifest.fingerprint

    def pins(self, *splits: str) -> dict[str, Any]:
        paths = {file.path for name in splits or self.splits for file in self.detected.files[name]}
        return {"content": self.manifest.fingerprint, "files": pin_files(paths)}


class InPlaceSplit(TokenSplit):
    """The tokens of some files, end to end, and where their documents end."""

    def __init__(self, detected: DetectedFiles, name: str, decoder: Decoder, provenance: LazyProvenance) -> None:
        files = detected.files[name]
        self.name = name
        self._provenance = provenance
        self.dtype = detected.dtype
        self.eot, self.eot_id = detected.eot, detected.eot_id
        self.files = tuple(files)
        self.token_ends = list(accumulate(file.num_tokens for file in files))
        self._decoder = decoder
        self._maps = {}
        self._bytes = {}
        self.num_unmapped = 0
        self.row_views = {}
        edges = [0, *self.token_ends]
        self._ends: DocumentEnds
        if detected.inner_ends is not None:
            self._ends = IndexedEnds(detected.inner_ends[name], edges, detected.units_per_token)
        elif detected.eot_id is not None and detected.eot != "none":
            self._ends = EotEnds(self.blocks, self.num_tokens, detected.eot_id, detected.eot == "prepend")
        else:
            self._ends = UnknownEnds(files[0].path)

    @property
    def fits_on_disk(self) -> bool:
        return True

    @property
    def num_tokens(self) -> int:
        return self.token_ends[-1]

    @property
    def num_documents(self) -> int:
        return len(self._all_ends)

    def summary(self) -> str:
        """Documents are not counted: that may read all tokens."""
        return f"{self.num_tokens:,} tokens"

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
        """Tokens of every document. Rows are packed from single files, so no document may cross files."""
        if not np.isin(self.token_ends, self._all_ends).all():
            raise DatasetError(
                f"documents of {self.files[0].path} continue in the next file",
                hint="import the files with tokenmill import: the dataset can be packed",
            )
        yield np.diff(self._all_ends, prepend=0).astype(np.int32)

    def shard_location(self, number: int) -> tuple[str, int]:
        return self.files[number].path, self.files[number].offset

    @cached_property
    def _all_ends(self) -> Starts:
        """Every end, in memory: eight bytes a document. Reading ranges does not need them."""
        steps = range(0, self.num_tokens, BLOCK_TOKENS)
        return np.concatenate([self.document_ends(at, min(at + BLOCK_TOKENS, self.num_tokens)) for at in steps])

    def _local_files(self, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _map(self, number: int) -> tuple[Tokens, Starts]:
        """The tokens of a file, mapped at its first use. Document starts are not kept by file."""
        found = self._maps.get(number)
        if found is None:
            self._limit_maps()
            found = self._maps[number] = (map_token_file(self.files[number], self.dtype), np.zeros(0, np.int64))
        return found


class DocumentEnds(Protocol):
    """The ends of a split's documents, in tokens of the whole split."""

    def between(self, start: int, stop: int) -> Numbers:
        """The ends in (start, stop]."""
        ...


@dataclass(frozen=True, slots=True)
class UnknownEnds:
    """Document ends that are unknown."""

    path: str

    def between(self, start: int, stop: int) -> Numbers:
        raise DatasetError(
            f"{self.path} does not record where its documents end",
            hint="name the `tokenizer` if you peek or import, or import with `eot_id`; tokenmill.open takes it, too",
        )


@dataclass(frozen=True, slots=True)
class IndexedEnds:
    """Stored ends: those inside each file, in units of which a token has `units_per_token`, and the ends of files."""

    inner_ends: Sequence[npt.NDArray[np.int64] | npt.NDArray[np.uint64]]
    edges: Sequence[int]
    units_per_token: int = 1

    def between(self, start: int, stop: int) -> Numbers:
        found, units = [np.zeros(0, np.int64)], self.units_per_token
        for ends, (begin, end) in zip(self.inner_ends, itertools.pairwise(self.edges), strict=True):
            # Bisection for both ends of the range: the rest of a mapped index is not even read.
            first = bisect.bisect_right(ends, (start - begin) * units) if start > begin else 0
            last = bisect.bisect_right(ends, (stop - begin) * units) if stop > begin else 0
            if first < last:
                found.append(ends[first:last].astype(np.int64) // units + begin)
            if start < end <= stop and end > begin:
                found.append(np.array([end]))
        return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class EotEnds:
    """Ends found by the end-of-text id, which is the last token of each document, or with `eot_first` the first."""

    blocks: Blocks = field(repr=False)
    num_tokens: int
    eot_id: int
    eot_first: bool

    def between(self, start: int, stop: int) -> Numbers:
        stop = min(stop, self.num_tokens)
        shift = 0 if self.eot_first else 1
        found = [np.zeros(0, np.int64)]
        # An end at e is marked by token e - 1, or by token e if that begins the next document.
        at = start + 1
        for tokens in self.blocks(at - shift, min(stop + 1 - shift, self.num_tokens)):
            found.append(np.flatnonzero(tokens == self.eot_id) + at)
            at += len(tokens)
        if start < stop == self.num_tokens and not (found[-1].size and found[-1][-1] == stop):
            found.append(np.array([stop]))  # tokens behind the last end of text are a document, too
        return np.concatenate(found)


def _describe(detected: DetectedFiles) -> Manifest:
    """A manifest of what was detected. Its fingerprint depends on sizes and on samples of the bytes."""
    about = {
        "layout": detected.layout,
        "dtype": detected.dtype,
        "eot": detected.eot,
        "eot_id": detected.eot_id,
        "splits": {
            name: [_sample_tokens(file, detected.dtype) for file in files] for name, files in detected.files.items()
        },
    }
    tokens = {name: sum(file.num_tokens for file in files) for name, files in detected.files.items()}
    return describe_splits(
        tokens,
        fingerprint=records.digest(about),
        layout=detected.layout,
        dtype=detected.dtype,
        eot=detected.eot,
        eot_id=detected.eot_id,
    )


def describe_splits(
    num_tokens: dict[str, int], *, fingerprint: str, layout: str, dtype: str, eot: str, eot_id: int | None
) -> Manifest:
    """The manifest of files that were not written by tokenmill."""
    return Manifest(
        format=manifests.FORMAT,
        fingerprint=fingerprint,
        identity={"layout": layout, "eot": eot},
        tokenizer={**manifests.UNKNOWN_TOKENIZER, "eot_id": eot_id},
        parity={},
        dtype=dtype,
        splits={name: Split(tokens=count, documents=0, shards=()) for name, count in num_tokens.items()},
        documents_read=0,
        dropped={},
        text_sum="",
        sources=(),
        files={},
    )


# The keys of the next two are hashed for the order of samples in files in place: they never change.


def _sample_tokens(file: TokenFile, dtype: str) -> dict[str, Any]:
    """A file's name, its size, and a digest of samples of its bytes: cheap for any size."""
    sampled = _digest_samples(map_token_file(file, dtype).data.cast("B"))
    return {"name": os.path.basename(file.path), "tokens": file.num_tokens, "places": sampled}


def sample_file(path: str) -> dict[str, Any]:
    """The same for a file that is not a plain run of tokens."""
    try:
        size = os.path.getsize(path)
        data = memory_maps.map_file(path, np.uint8)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}", hint=hint_for(error, "check the path")) from None
    return {"bytes": size, "places": _digest_samples(data.data)}


def _digest_samples(data: memoryview) -> str:
    sha = hashlib.sha256()
    for number in range(NUM_BYTE_SAMPLES):
        start = max(0, len(data) - BYTE_SAMPLE_BYTES) * number // (NUM_BYTE_SAMPLES - 1)
        sha.update(data[start : start + BYTE_SAMPLE_BYTES])
    return sha.hexdigest()


def pin_files(paths: Collection[str]) -> dict[str, str]:
    """Sizes and times of these files, and of the indexes beside them: X.idx, X.ds.index, X.csv.gz, index.json."""
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
                    name = os.path.relpath(entry.path, root)  # the same wherever the folder is
                    found[name] = f"{about.st_size} bytes, {format_time(about.st_mtime_ns)}"
    return found
