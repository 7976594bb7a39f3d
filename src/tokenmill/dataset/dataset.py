"""A dataset, opened: its splits as one run of tokens and of documents, mapped and never copied whole."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset import manifest as placement
from tokenmill.dataset.bin_idx import Tokens, check_structure, document_starts, map_tokens, numpy_dtype
from tokenmill.dataset.manifest import Manifest, Nodes, Shard
from tokenmill.errors import DatasetError, UnknownSplitError
from tokenmill.storage.filesystem import explained
from tokenmill.storage.local import Folder
from tokenmill.storage.memory_maps import Map, map_file

if TYPE_CHECKING:
    from tokenmill.dataset.windows import Windows


Starts = npt.NDArray[np.int64]

BLOCK_TOKENS = 1 << 22
# Two for each shard. Beyond it, shards are unmapped again: the system allows a process 65,530.
MAX_MAPS = 40_000


class Dataset:
    """A finished dataset: `dataset["train"]` is a split. `path` is where its files are on this machine."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.path = folder.path
        self.manifest = manifest
        self._splits = {name: TokenSplit(folder, split.shards, manifest) for name, split in manifest.splits.items()}

    @property
    def splits(self) -> list[str]:
        return list(self._splits)

    @property
    def on_node(self) -> bool:
        """Whether this is what one node has of a dataset, and other nodes have the rest."""
        return placement.part_of(self.manifest.identity) is not None

    @property
    def nodes(self) -> Nodes | None:
        """Which node has what, if this is one node's part of a dataset."""
        return placement.load_nodes(Folder(self.path))

    def content(self, split: str) -> str:
        """A digest of what a split holds. It is the same wherever a copy of the dataset is."""
        return self.manifest.content(split)

    def pins(self, *splits: str) -> dict[str, Any]:
        """What pins the content of some splits, all of them by default, for what is derived from them here."""
        return {"content": self.manifest.content(*splits)}

    def __getitem__(self, split: str) -> TokenSplit:
        if split not in self:
            raise UnknownSplitError(f"no split {split!r}; there are {', '.join(self)}", hint="choose one of them")
        return self._splits[split]

    def __contains__(self, split: object) -> bool:
        return isinstance(split, str) and split in self._splits

    def __iter__(self) -> Iterator[str]:
        """The names of its splits, as with any mapping."""
        return iter(self._splits)

    def __len__(self) -> int:
        return len(self._splits)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        splits = ", ".join(f"{name}: {split.num_tokens:,} tokens" for name, split in self._splits.items())
        return f"Dataset({self.path!r}, {splits})"


class TokenSplit:
    """The documents of a split, in order, over all its shards."""

    def __init__(self, folder: Folder, shards: Sequence[Shard], manifest: Manifest) -> None:
        self.dtype = manifest.dtype
        self.eot: str = manifest.identity.get("eot", "none")
        self.eot_id: int | None = manifest.tokenizer.get("eot_id")
        self._folder = folder
        self._shards = shards
        counts = [(shard.tokens, shard.documents) for shard in shards]  # once: a long table is unpacked for it
        self.token_ends = list(accumulate(tokens for tokens, _ in counts))
        self._document_ends = list(accumulate(documents for _, documents in counts))
        self._numbers: dict[str, int] = {}  # of shards by name, once they are asked for
        self._maps: dict[int, tuple[Tokens, Starts]] = {}
        self._bytes: dict[int, memoryview] = {}
        self.num_unmapped = 0  # how often any were
        self.views: dict[int, Any] = {}  # what others have made of the maps: it goes with any of them

    def __getstate__(self) -> dict[str, Any]:
        """Other processes map the files themselves."""
        return {**self.__dict__, "_maps": {}, "_bytes": {}, "views": {}}

    @property
    def fits(self) -> bool:
        """Whether all shards may be on this machine at the same time; else they are best read one after the other."""
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

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the split, over shard borders."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        number = bisect.bisect_right(self.token_ends, start)
        first = self.token_ends[number - 1] if number else 0
        if start < stop <= self.token_ends[number]:
            return self._map(number)[0][start - first : stop - first]
        # Copied shard by shard: there may be no room for all of them at the same time.
        found, at = np.empty(stop - start, numpy_dtype(self.dtype)), start
        while at < stop:
            end = min(stop, self.token_ends[number])
            found[at - start : end - start] = self._map(number)[0][at - first : end - first]
            at = first = end
            number += 1
        return found

    def blocks(self, start: int, stop: int) -> Iterator[Tokens]:
        """Tokens [start, stop) block by block, each mapped for itself: what was read does not stay in memory."""
        dtype = numpy_dtype(self.dtype)
        number = bisect.bisect_right(self.token_ends, start)
        while start < stop:
            self._map(number)  # is it what the manifest says?
            path, offset = self._place(number)
            first = self.token_ends[number - 1] if number else 0
            end = min(stop, self.token_ends[number], start + BLOCK_TOKENS)
            place = offset + (start - first) * dtype.itemsize
            with self._here(number), explained(path):
                block = map_file(path, dtype, offset=place, count=end - start)
            yield block
            start = end
            number += start == self.token_ends[number]

    def samples(self, seq_len: int) -> Windows:
        """Samples of a fixed length: `len()` of them, and `[i]` has `seq_len` inputs and the last target."""
        from tokenmill.dataset.windows import Windows

        return Windows(self, seq_len)

    def document_ends(self, start: int, stop: int) -> Starts:
        """Where documents end, in tokens of the split, behind `start` and not behind `stop`."""
        found = []
        number = bisect.bisect_right(self.token_ends, start)
        while start < stop and number < len(self._shards):
            first = self._firsts(number)[0]
            starts, itemsize = self._map(number)[1], numpy_dtype(self.dtype).itemsize
            # The end of a document is the start of the next one, but for the last.
            begin = bisect.bisect_right(starts, (start - first) * itemsize)
            end = bisect.bisect_right(starts, (stop - first) * itemsize)
            found.append(starts[begin:end] // itemsize + first)
            if self.token_ends[number] <= stop and len(starts):
                found.append(np.array([self.token_ends[number]]))
            start, number = self.token_ends[number], number + 1
        return np.concatenate([np.zeros(0, np.int64), *found])

    def shard_bytes(self, number: int) -> memoryview:
        """The bytes of all tokens of one shard, mapped."""
        found = self._bytes.get(number)
        if found is None:
            mapped = self._map(number)
            found = self._bytes[number] = mapped[0].data.cast("B")
            if self._maps.get(number) is not mapped:  # it was forgotten meanwhile
                self._bytes.pop(number, None)
        return found

    def shard_place(self, number: int) -> tuple[str, int]:
        """The file of a shard, and the byte at which its tokens begin."""
        return self._place(number)

    def maps(self) -> Iterator[npt.NDArray[Any]]:
        """All that is mapped by now, of whatever kind."""
        return chain.from_iterable(list(self._maps.values()))

    def document_at(self, tokens: Starts) -> Starts:
        """The documents in which these tokens lie."""
        numbers = np.searchsorted(self.token_ends, tokens, side="right")
        found = np.empty(len(tokens), np.int64)
        for number in distinct(numbers):
            mine = numbers == number
            first_token, first_document = self._firsts(number)
            offsets = (tokens[mine] - first_token) * numpy_dtype(self.dtype).itemsize
            found[mine] = _last_up_to(self._map(number)[1], offsets) + first_document
        return found

    def document_starts(self, documents: Starts) -> Starts:
        """The first tokens of these documents."""
        numbers = np.searchsorted(self._document_ends, documents, side="right")
        found = np.empty(len(documents), np.int64)
        for number in distinct(numbers):
            mine = numbers == number
            first_token, first_document = self._firsts(number)
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
                        f"{self._folder.at(shard.name)}.idx: its documents do not lie end to end",
                        hint="run tokenmill repair",
                    )
                yield lengths.astype(np.int32)

    def _firsts(self, number: int) -> tuple[int, int]:
        """The first token and the first document of a shard."""
        return (self.token_ends[number - 1], self._document_ends[number - 1]) if number else (0, 0)

    def _place(self, number: int) -> tuple[str, int]:
        """The file that holds the tokens of a shard, and the byte at which they begin."""
        return f"{self._folder.at(self._shards[number].name)}.bin", 0

    def _map(self, number: int) -> tuple[Tokens, Starts]:
        """Tokens and document starts of a shard, mapped at its first use."""
        found = self._maps.get(number)
        if found is None:
            self._limit_maps()
            shard = self._shards[number]
            base = self._folder.at(shard.name)
            with self._here(number):
                check_structure(self._folder, shard, self.dtype)
                starts = document_starts(f"{base}.idx", shard.documents)
                found = self._maps[number] = (map_tokens(f"{base}.bin", self.dtype), starts)
        return found

    def _here(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Have the files of a shard on this machine."""
        name = self._shards[number].name
        return self._folder.need([f"{name}.bin", f"{name}.idx"], self._forget)

    def keeps(self, numbers: Iterable[int]) -> frozenset[int]:
        """Those of some shards that are still mapped."""
        return frozenset(number for number in numbers if number in self._maps)

    def _forget(self, names: Sequence[str]) -> None:
        """Unmap shards whose files are to go, so that they take no room on the disk. Any thread may do so."""
        if not self._numbers:
            self._numbers = {shard.name: number for number, shard in enumerate(self._shards)}
        self._unmap([self._numbers[name] for name in names if name in self._numbers])

    def _limit_maps(self) -> None:
        """Unmap the shards that were mapped first once there are too many; the next use of one maps it again."""
        if Map.num_live >= MAX_MAPS:
            self._unmap(list(self._maps)[: len(self._maps) // 4 + 1])

    def _unmap(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._maps.pop(number, None)
            self._bytes.pop(number, None)
        if numbers:
            self.num_unmapped += 1
            self.views.clear()


def _last_up_to(starts: Starts, offsets: Starts) -> Starts:
    """The last of the `starts` that is not beyond each offset; the first one never is.

    What `searchsorted` finds. But in a map these numbers are not aligned, and it would copy all of them each time.
    """
    half = 1 << (len(starts).bit_length() - 1)
    rest = len(starts) - half
    found = np.where(starts[rest] <= offsets, rest, 0)
    while half > 1:
        half >>= 1
        found += half * (starts[found + half] <= offsets)
    return found


def distinct(shards: Starts) -> list[int]:
    """The numbers of shards that occur. `np.unique` gives the same, but loads more than all of a first batch needs."""
    return np.flatnonzero(np.bincount(shards.ravel())).tolist()
