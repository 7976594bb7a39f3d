"""An open dataset: its splits as memory-mapped arrays of tokens and documents.

    dataset["train"]   shard 0            shard 1            shard 2
    tokens             0 1 2 ... 999      1000 ... 1999      2000 ...        token_ends: 1000, 2000, ...
    documents          0 | 1 | 2 | ...    40 | 41 | ...      77 | ...        none crosses a shard boundary

A shard is checked and mapped at its first use. Everything here needs numpy, msgspec and the standard library only;
`decode` and `text` load the tokenizer when they are called.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tokenmill import arguments
from tokenmill.dataset import manifest as manifests
from tokenmill.dataset.bin_idx import Tokens, check_structure, document_starts, map_tokens, numpy_dtype
from tokenmill.dataset.manifest import Manifest, Nodes
from tokenmill.errors import DatasetError, RecipeError, UnknownSplitError
from tokenmill.storage.base import Storage
from tokenmill.storage.filesystem import explained
from tokenmill.storage.local import Folder
from tokenmill.storage.memory_maps import Map, map_file

if TYPE_CHECKING:
    from tokenmill.dataset.windows import Windows


Starts = npt.NDArray[np.int64]

BLOCK_TOKENS = 1 << 22
# Two maps per shard. Beyond this number shards are unmapped again: Linux allows a process 65,530.
MAX_MAPS = 40_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """Where a document came from, and what became of it.

    `position` counts rows of the source if `unit` is "row". If it is "byte", it is the offset of the document in the
    text of the file, which is decompressed. A document that was dropped has a reason, and no number in a split.
    """

    source: str
    position: int
    unit: Literal["row", "byte"]
    split: str | None
    document: int | None
    num_tokens: int
    dropped: str | None

    def __str__(self) -> str:
        return f"{self.source}, {self.unit} {self.position:,}"


class Dataset:
    """A finished dataset. `dataset["train"]` is a split; `path` is the folder with its files on this machine."""

    def __init__(self, folder: Storage, manifest: Manifest) -> None:
        self.path = folder.path
        self.manifest = manifest
        self._decoder = Decoder(folder.path, manifest.tokenizer)
        self._provenance = LazyProvenance(folder, manifest)
        self._splits = {
            name: TokenSplit(folder, name, manifest, self._decoder, self._provenance) for name in manifest.splits
        }

    @property
    def splits(self) -> list[str]:
        return list(self._splits)

    @property
    def has_provenance(self) -> bool:
        """Whether it is recorded where the documents came from. It is not for tokens that were imported."""
        return any(name.startswith("provenance/") for name in self.manifest.files)

    @property
    def is_node_part(self) -> bool:
        """Whether this is one node's part of a dataset, and other nodes have the rest."""
        return manifests.part_of(self.manifest.identity) is not None

    @property
    def nodes(self) -> Nodes | None:
        """Which node has which part, if this is one node's part of a dataset."""
        return manifests.load_nodes(Folder(self.path))

    def content(self, split: str) -> str:
        """A digest of the tokens and documents of a split. It is the same for every copy of the dataset."""
        return self.manifest.content(split)

    def pins(self, *splits: str) -> dict[str, Any]:
        """What identifies the content of some splits (by default all), recorded with everything derived from them."""
        return {"content": self.manifest.content(*splits)}

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of these ids. Ends of text decode to nothing. Loads the dataset's tokenizer at the first call."""
        return self._decoder.decode(ids)

    def find(self, source: str, position: int) -> SourceRow:
        """The document at a row or byte offset of a source. The end of the source's path is enough if it is unique."""
        hint = "give a row, or a byte offset, counted from 0"
        position = arguments.whole("position", position, hint=hint)
        found: SourceRow = self._provenance.load().at(arguments.text("source", source), position)
        return found

    def __getitem__(self, split: str) -> TokenSplit:
        if split not in self:
            raise UnknownSplitError(f"no split {split!r}; there are {', '.join(self)}", hint="choose one of them")
        return self._splits[split]

    def __contains__(self, split: object) -> bool:
        return isinstance(split, str) and split in self._splits

    def __iter__(self) -> Iterator[str]:
        """The names of the splits, as with any mapping."""
        return iter(self._splits)

    def __len__(self) -> int:
        return len(self._splits)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        splits = ", ".join(f"{name}: {split.summary()}" for name, split in self._splits.items())
        return f"{type(self).__name__}({self.path!r}, {splits})"


class TokenSplit:
    """The documents of a split, in order, across all of its shards."""

    def __init__(
        self, folder: Storage, name: str, manifest: Manifest, decoder: Decoder, provenance: LazyProvenance
    ) -> None:
        self.name = name
        self._provenance = provenance
        shards = manifest.splits[name].shards
        self.dtype = manifest.dtype
        self.eot: str = manifest.identity.get("eot", "none")
        self.eot_id: int | None = manifest.tokenizer.get("eot_id")
        self._decoder = decoder
        self._folder = folder
        self._shards = shards
        counts = [(shard.tokens, shard.documents) for shard in shards]  # one pass: a long table is unpacked for it
        self.token_ends = list(accumulate(tokens for tokens, _ in counts))
        self._document_ends = list(accumulate(documents for _, documents in counts))
        self._shard_numbers: dict[str, int] = {}  # by name, filled when a shard is evicted
        self._maps: dict[int, tuple[Tokens, Starts]] = {}
        self._bytes: dict[int, memoryview] = {}
        self.num_unmapped = 0  # how often shards were unmapped
        self.row_views: dict[int, Any] = {}  # views of the maps, by width; dropped when any shard is unmapped

    def __getstate__(self) -> dict[str, Any]:
        """Other processes map the files themselves."""
        return {**self.__dict__, "_maps": {}, "_bytes": {}, "row_views": {}}

    @property
    def fits_on_disk(self) -> bool:
        """Whether all shards may be on this machine at once. Otherwise they are best read one after the other."""
        return self._folder.holds_all

    @property
    def num_tokens(self) -> int:
        return self.token_ends[-1] if self._shards else 0

    @property
    def num_documents(self) -> int:
        return self._document_ends[-1] if self._shards else 0

    def __len__(self) -> int:
        return self.num_documents

    def __iter__(self) -> Iterator[Tokens]:
        return (self.document(index) for index in range(self.num_documents))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary()}, {self.dtype})"

    def summary(self) -> str:
        """The size of the split, from what is known without reading it."""
        return f"{self.num_tokens:,} tokens in {self.num_documents:,} documents"

    def document(self, index: int) -> Tokens:
        """The tokens of one document, with its end of text."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        number = bisect.bisect_right(self._document_ends, index)
        local = index - (self._document_ends[number - 1] if number else 0)
        tokens, starts = self._map(number)
        itemsize = numpy_dtype(self.dtype).itemsize
        begin = int(starts[local]) // itemsize
        end = int(starts[local + 1]) // itemsize if local + 1 < len(starts) else len(tokens)
        return tokens[begin:end]

    def text(self, index: int) -> str:
        """The text of one document. Loads the dataset's tokenizer at the first call."""
        return self._decoder.decode(self.document(index))

    def source(self, index: int) -> SourceRow:
        """Where one document came from. Reads the provenance at the first call, which needs pyarrow."""
        return self.sources([index])[0]

    def sources(self, indices: Sequence[int]) -> list[SourceRow]:
        """Where these documents came from. Faster than one call for each."""
        for index in indices:
            if not 0 <= index < self.num_documents:
                raise IndexError(f"document {index} of {self.num_documents}")
        found: list[SourceRow] = self._provenance.load().of_documents(self.name, indices)
        return found

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the split, across shard boundaries."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        number = bisect.bisect_right(self.token_ends, start)
        first = self.token_ends[number - 1] if number else 0
        if start < stop <= self.token_ends[number]:
            return self._map(number)[0][start - first : stop - first]
        # Copied shard by shard: there may be no space for all of them at once.
        found, at = np.empty(stop - start, numpy_dtype(self.dtype)), start
        while at < stop:
            end = min(stop, self.token_ends[number])
            found[at - start : end - start] = self._map(number)[0][at - first : end - first]
            at = first = end
            number += 1
        return found

    def blocks(self, start: int, stop: int) -> Iterator[Tokens]:
        """Tokens [start, stop), block by block. Each is mapped separately, so pages that were read are released."""
        dtype = numpy_dtype(self.dtype)
        number = bisect.bisect_right(self.token_ends, start)
        while start < stop:
            self._map(number)  # checks the shard against the manifest
            path, offset = self.shard_location(number)
            first = self.token_ends[number - 1] if number else 0
            end = min(stop, self.token_ends[number], start + BLOCK_TOKENS)
            with self._local_files(number), explained(path):
                block = map_file(path, dtype, offset=offset + (start - first) * dtype.itemsize, count=end - start)
            yield block
            start = end
            number += start == self.token_ends[number]

    def samples(self, seq_len: int) -> Windows:
        """Samples of a fixed length: `len()` tells how many, `[i]` has `seq_len` inputs and the last target."""
        from tokenmill.dataset.windows import Windows

        return Windows(self, seq_len)

    def document_ends(self, start: int, stop: int) -> Starts:
        """The document ends in (start, stop], in tokens of the split."""
        found = []
        number = bisect.bisect_right(self.token_ends, start)
        while start < stop and number < len(self._shards):
            first = self._shard_start(number)[0]
            starts, itemsize = self._map(number)[1], numpy_dtype(self.dtype).itemsize
            # A document ends where the next one starts, except for the last.
            begin = bisect.bisect_right(starts, (start - first) * itemsize)
            end = bisect.bisect_right(starts, (stop - first) * itemsize)
            found.append(starts[begin:end] // itemsize + first)
            if self.token_ends[number] <= stop and len(starts):
                found.append(np.array([self.token_ends[number]]))
            start, number = self.token_ends[number], number + 1
        return np.concatenate([np.zeros(0, np.int64), *found])

    def document_at(self, tokens: Starts) -> Starts:
        """The documents that contain these tokens."""
        numbers = np.searchsorted(self.token_ends, tokens, side="right")
        found = np.empty(len(tokens), np.int64)
        for number in distinct(numbers):
            mine = numbers == number
            first_token, first_document = self._shard_start(number)
            offsets = (tokens[mine] - first_token) * numpy_dtype(self.dtype).itemsize
            found[mine] = _last_up_to(self._map(number)[1], offsets) + first_document
        return found

    def document_starts(self, documents: Starts) -> Starts:
        """The first tokens of these documents."""
        numbers = np.searchsorted(self._document_ends, documents, side="right")
        found = np.empty(len(documents), np.int64)
        for number in distinct(numbers):
            mine = numbers == number
            first_token, first_document = self._shard_start(number)
            offsets = self._map(number)[1][documents[mine] - first_document]
            found[mine] = offsets // numpy_dtype(self.dtype).itemsize + first_token
        return found

    def document_lengths(self) -> Iterator[npt.NDArray[np.int32]]:
        """Tokens of every document, shard by shard."""
        for number, shard in enumerate(self._shards):
            if shard.documents:
                tokens, starts = self._map(number)
                lengths = np.diff(starts, append=tokens.nbytes) // tokens.itemsize
                if starts[0] != 0 or lengths.min() < 0:
                    raise DatasetError(
                        f"{self._folder.at(shard.name)}.idx: its documents are not contiguous",
                        hint="run tokenmill repair",
                    )
                yield lengths.astype(np.int32)

    def shard_bytes(self, number: int) -> memoryview:
        """The tokens of one shard as bytes, mapped."""
        found = self._bytes.get(number)
        if found is None:
            mapped = self._map(number)
            found = self._bytes[number] = mapped[0].data.cast("B")
            if self._maps.get(number) is not mapped:  # another thread unmapped it meanwhile
                self._bytes.pop(number, None)
        return found

    def shard_location(self, number: int) -> tuple[str, int]:
        """The file of a shard, and the byte at which its tokens begin."""
        return f"{self._folder.at(self._shards[number].name)}.bin", 0

    def maps(self) -> Iterator[npt.NDArray[Any]]:
        """All open memory maps, of tokens and of indexes."""
        return chain.from_iterable(list(self._maps.values()))

    def still_mapped(self, numbers: Iterable[int]) -> frozenset[int]:
        """Those of some shards that are mapped."""
        return frozenset(number for number in numbers if number in self._maps)

    def unmap(self, shard_names: Sequence[str]) -> None:
        """Unmap shards whose files are evicted, so that their space is freed. Any thread may call this."""
        if not self._shard_numbers:
            self._shard_numbers = {shard.name: number for number, shard in enumerate(self._shards)}
        self._unmap([self._shard_numbers[name] for name in shard_names if name in self._shard_numbers])

    def _shard_start(self, number: int) -> tuple[int, int]:
        """The first token and the first document of a shard."""
        return (self.token_ends[number - 1], self._document_ends[number - 1]) if number else (0, 0)

    def _map(self, number: int) -> tuple[Tokens, Starts]:
        """Tokens and document starts of a shard, mapped at its first use."""
        found = self._maps.get(number)
        if found is None:
            self._limit_maps()
            shard = self._shards[number]
            base = self._folder.at(shard.name)
            with self._local_files(number):
                check_structure(self._folder, shard, self.dtype)
                starts = document_starts(f"{base}.idx", shard.documents)
                found = self._maps[number] = (map_tokens(f"{base}.bin", self.dtype), starts)
        return found

    def _local_files(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Keep the files of a shard on this machine while they are opened; a remote one is copied first."""
        name = self._shards[number].name
        return self._folder.need([f"{name}.bin", f"{name}.idx"], self.unmap)

    def _limit_maps(self) -> None:
        """Unmap the shards that were mapped first once there are too many. The next use maps them again."""
        if Map.num_live >= MAX_MAPS:
            self._unmap(list(self._maps)[: len(self._maps) // 4 + 1])

    def _unmap(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._maps.pop(number, None)
            self._bytes.pop(number, None)
        if numbers:
            self.num_unmapped += 1
            self.row_views.clear()


class Decoder:
    """Turns ids back into text with the tokenizer that a manifest describes. The tokenizer loads at the first use."""

    def __init__(self, path: str, tokenizer: dict[str, Any]) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._engine: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Other processes load the tokenizer themselves."""
        return {**self.__dict__, "_engine": None}

    def decode(self, ids: npt.ArrayLike) -> str:
        if self._engine is None:
            self._engine = self._load()
        return str(self._engine.decode(self._text_ids(ids)))

    def _text_ids(self, ids: npt.ArrayLike) -> npt.NDArray[np.uint32]:
        """The ids without ends of text, checked: what a tokenizer does with unknown ids is undefined."""
        found, vocab_size = np.asarray(ids), self._tokenizer["vocab_size"]
        if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
            raise RecipeError(f"ids is {arguments.show(ids)}", hint="give the ids of one sequence of tokens")
        if len(found) and not 0 <= int(found.min()) <= int(found.max()) < vocab_size:
            raise RecipeError(
                f"ids from {found.min()} to {found.max()}, but the vocabulary has 0 to {vocab_size - 1}",
                hint="decode input_ids: labels of -100 are not tokens",
            )
        kept = found if self._tokenizer["eot_id"] is None else found[found != self._tokenizer["eot_id"]]
        return kept.astype(np.uint32)

    def _load(self) -> Any:
        if self._tokenizer["kind"] == "unknown":
            raise DatasetError(
                f"the tokenizer of {self._path} is unknown",
                hint="import the files with `tokenizer`: `tokenmill.import_('FILES', 'OUT', layout='nanogpt')`",
            )
        # By name, so that nothing of a tokenizer is imported on a trainer node.
        spec, engine = (importlib.import_module(f"tokenmill.tokenizers.{name}") for name in ("spec", "engine"))
        file = self._tokenizer["file"]
        content = None if file is None else Folder(self._path).read(file, max_bytes=spec.MAX_CONTENT_BYTES)
        return engine.open_engine(spec.from_dataset(self._tokenizer, content))


class LazyProvenance:
    """Where the documents of a dataset came from. Read at the first use."""

    def __init__(self, folder: Storage, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest: Manifest | None = manifest
        self._reader: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Other processes open the files themselves, if they need them."""
        return {**self.__dict__, "_manifest": None, "_reader": None}

    def load(self) -> Any:
        if self._reader is None:
            # By name, so that nothing of Arrow is imported on a trainer node.
            provenance = importlib.import_module("tokenmill.dataset.provenance")
            manifest = self._manifest or manifests.load_manifest(self._folder)
            self._reader = provenance.ProvenanceReader(self._folder, manifest)
        return self._reader


def _last_up_to(starts: Starts, offsets: Starts) -> Starts:
    """The index of the last start that is not beyond each offset; the first start never is.

    `searchsorted` gives the same, but these numbers are not aligned in the map, and it would copy all of them.
    """
    half = 1 << (len(starts).bit_length() - 1)
    rest = len(starts) - half
    found = np.where(starts[rest] <= offsets, rest, 0)
    while half > 1:
        half >>= 1
        found += half * (starts[found + half] <= offsets)
    return found


def distinct(shards: Starts) -> list[int]:
    """The shard numbers that occur. `np.unique` gives the same, but loads modules that a first batch does not need."""
    return np.flatnonzero(np.bincount(shards.ravel())).tolist()
