"""Statistics of a dataset, `statistics.json`: what each source gave to each split, lengths, drops, token frequencies.

    units     count the documents that they keep, exactly, while they have them in memory
    receipts  hold these counts, so they are as safe as the pieces
    commit    adds them up, and counts tokens in the shards: all of them, or blocks at equal distances

Like the manifest, it depends on the sources and the recipe only. Datasets of older versions and imports have none.
docs/explanation/statistics.md describes each field.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenmill import records
from tokenmill.arguments import MAX_INT
from tokenmill.dataset.manifest import Manifest, Split
from tokenmill.errors import DatasetError
from tokenmill.records import Int
from tokenmill.storage.base import Storage
from tokenmill.storage.output import Digest

STATISTICS = "statistics.json"
FORMAT = 1
# Dropped documents of each reason that are kept as examples, and how much of their text.
NUM_EXAMPLES = 3
MAX_EXAMPLE_CHARS = 96
# Token frequencies are counted in every 64th block, but in at least 16 blocks and at most 1,024.
BLOCK_TOKENS = 1 << 16
BLOCK_SHARE = 64
MIN_BLOCKS, MAX_BLOCKS = 16, 1024
_READ_TOKENS = 1 << 20
_READS_AT_ONCE = 32
_COLUMNS = ("documents", "tokens", "bytes", "characters")
_HINT = "run tokenmill repair; without sources, the dataset can be used as it is"


# The smallest length of each bin: 0, and the whole parts of 2 ** (k / 4), so four bins for each doubling from 8 on.
LENGTH_EDGES = np.unique([0, *(math.isqrt(math.isqrt(1 << k)) for k in range(160))])


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStatistics:
    """The kept documents of a split. The first four have a number for each source, in the order of the sources.

    `lengths` counts documents by their number of tokens, in the bins of `LENGTH_EDGES`.
    """

    documents: tuple[Int, ...]
    tokens: tuple[Int, ...]
    bytes: tuple[Int, ...]
    characters: tuple[Int, ...]
    lengths: tuple[Int, ...]
    shortest: Int
    longest: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropExample:
    """A document that was dropped: where it is, and the beginning of its text where that may be shown."""

    source: str
    position: Int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStatistics:
    """What a unit adds to the statistics. Splits without a document are left out."""

    splits: dict[str, SplitStatistics]
    examples: dict[str, tuple[DropExample, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropStatistics:
    """The documents that were dropped for one reason, and the first of them."""

    documents: Int
    examples: tuple[DropExample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """How often each id occurs in `counted` of `all_tokens` tokens: `ids` that occur, the most frequent first."""

    all_tokens: Int
    counted: Int
    vocab_size: Int
    ids: tuple[Int, ...]
    counts: tuple[Int, ...]

    @property
    def is_exact(self) -> bool:
        return self.counted == self.all_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatistics:
    """The statistics of a dataset. Its sources are those of the manifest, in the same order."""

    format: Int
    splits: dict[str, SplitStatistics]
    dropped: dict[str, DropStatistics]
    frequencies: TokenCounts


class DocumentCounts:
    """Running counts of documents by source and split: those of a unit, or of a dataset while units are added up."""

    def __init__(self, num_sources: int, splits: Sequence[str]) -> None:
        self._names = tuple(splits)
        self._columns = np.zeros((len(_COLUMNS), len(splits), num_sources), np.int64)
        self._lengths = np.zeros((len(splits), len(LENGTH_EDGES)), np.int64)
        self._shortest = np.full(len(splits), MAX_INT, np.int64)
        self._longest = np.zeros(len(splits), np.int64)

    def add(
        self,
        groups: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        num_bytes: npt.NDArray[np.int64],
        characters: npt.NDArray[np.int64],
    ) -> None:
        """Count documents: the group of each (as of `groups_of`), its tokens and bytes; and the characters by group."""
        if not len(groups):
            return
        size = characters.size
        found = (
            np.bincount(groups, minlength=size),
            _sums(groups, tokens, size),
            _sums(groups, num_bytes, size),
            characters,
        )
        self._columns += np.stack(found).reshape(self._columns.shape)
        bins = np.searchsorted(LENGTH_EDGES, tokens, side="right") - 1
        splits = groups // self._columns.shape[2]
        for split in np.flatnonzero(found[0].reshape(self._columns.shape[1:]).any(axis=1)).tolist():
            chosen = slice(None) if len(self._names) == 1 else splits == split
            self._lengths[split] += np.bincount(bins[chosen], minlength=len(LENGTH_EDGES))
            self._shortest[split] = min(self._shortest[split], tokens[chosen].min())
            self._longest[split] = max(self._longest[split], tokens[chosen].max())

    def groups_of(
        self, splits: npt.NDArray[np.int8], sources: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """A number for each pair of split and source, and how many numbers there are."""
        num_sources = self._columns.shape[2]
        return splits.astype(np.int64) * num_sources + sources, len(self._names) * num_sources

    def add_unit(self, first_source: int, unit: UnitStatistics) -> None:
        """Count the documents of a unit, which begins with this source."""
        for split_name, found in unit.splits.items():
            split, stop = self._names.index(split_name), first_source + len(found.documents)
            self._columns[:, split, first_source:stop] += np.array([getattr(found, name) for name in _COLUMNS])
            self._lengths[split, : len(found.lengths)] += np.array(found.lengths, np.int64)
            self._shortest[split] = min(self._shortest[split], found.shortest)
            self._longest[split] = max(self._longest[split], found.longest)

    def splits(self, *, empty: bool) -> dict[str, SplitStatistics]:
        """The counts of each split, also of those without a document if `empty`."""
        found = {}
        for split, name in enumerate(self._names):
            documents, tokens, num_bytes, characters = (tuple(row.tolist()) for row in self._columns[:, split])
            has_any = any(documents)
            if has_any or empty:
                found[name] = SplitStatistics(
                    documents=documents,
                    tokens=tokens,
                    bytes=num_bytes,
                    characters=characters,
                    lengths=tuple(np.trim_zeros(self._lengths[split], "b").tolist()),
                    shortest=int(self._shortest[split]) if has_any else 0,
                    longest=int(self._longest[split]),
                )
        return found


def _sums(groups: npt.NDArray[np.int64], values: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """The sum of the values of each group. Those of a batch are exact as floats."""
    if size == 1:
        return np.array([values.sum()], np.int64)
    return np.bincount(groups, weights=values, minlength=size).astype(np.int64)


def wrong_counts(found: SplitStatistics, *, sources: int, documents: int, tokens: int) -> bool:
    """Whether counts of a split are impossible for a split with so many sources, documents and tokens."""
    columns = [getattr(found, name) for name in _COLUMNS]
    counts = [*(count for column in columns for count in column), *found.lengths, found.shortest, found.longest]
    return (
        any(len(column) != sources for column in columns)
        or len(found.lengths) > len(LENGTH_EDGES)
        or min(counts) < 0
        or [sum(found.documents), sum(found.tokens), sum(found.lengths)] != [documents, tokens, documents]
    )


def add_examples(found: dict[str, list[DropExample]], more: Iterable[tuple[str, DropExample]]) -> None:
    """Keep the first examples of each reason."""
    for reason, example in more:
        kept = found.setdefault(reason, [])
        if len(kept) < NUM_EXAMPLES:
            kept.append(example)


def add_up(
    sources: int, splits: Sequence[str], dropped: dict[str, int], units: Iterable[tuple[int, UnitStatistics]]
) -> Callable[[TokenCounts], DatasetStatistics]:
    """The statistics of a dataset from those of its units, each with the number of its first source."""
    counts = DocumentCounts(sources, splits)
    examples: dict[str, list[DropExample]] = {}
    for first_source, unit in units:
        counts.add_unit(first_source, unit)
        for reason, some in unit.examples.items():
            add_examples(examples, ((reason, example) for example in some))
    return lambda frequencies: DatasetStatistics(
        format=FORMAT,
        splits=counts.splits(empty=True),
        dropped={
            reason: DropStatistics(documents=count, examples=tuple(examples.get(reason, ())))
            for reason, count in sorted(dropped.items())
        },
        frequencies=frequencies,
    )


def sampled_ranges(total: int) -> list[tuple[int, int]]:
    """Which of so many tokens are counted, as pairs of start and stop: blocks at equal distances, or all tokens."""
    if total <= MIN_BLOCKS * BLOCK_TOKENS:
        return [(0, total)]
    count = min(max(total // (BLOCK_TOKENS * BLOCK_SHARE), MIN_BLOCKS), MAX_BLOCKS)
    starts = ((total - BLOCK_TOKENS) * number // (count - 1) for number in range(count))
    return [(start, start + BLOCK_TOKENS) for start in starts]


def count_tokens(blocks: Iterable[npt.NDArray[np.integer]], *, all_tokens: int, vocab_size: int) -> TokenCounts:
    """The frequencies of ids in blocks of tokens. Ids beyond the vocabulary, in damaged files, are left out."""
    totals, counted = np.zeros(vocab_size, np.int64), 0
    for block in blocks:
        counted += len(block)
        for start in range(0, len(block), BLOCK_TOKENS):
            ids = block[start : start + BLOCK_TOKENS]
            least, most = int(ids.min()), int(ids.max())
            if not vocab_size and most >= len(totals):  # not known: it grows
                totals = np.pad(totals, (0, most + 1 - len(totals)))
            if least < 0 or most >= len(totals):
                ids = ids[(ids >= 0) & (ids < len(totals))]
            totals += np.bincount(ids, minlength=len(totals))
    order = np.argsort(-totals, kind="stable")[: np.count_nonzero(totals)]
    return TokenCounts(
        all_tokens=all_tokens,
        counted=counted,
        vocab_size=len(totals),
        ids=tuple(order.tolist()),
        counts=tuple(totals[order].tolist()),
    )


def count_in_shards(folder: Storage, splits: dict[str, Split], dtype: npt.DTypeLike, vocab_size: int) -> TokenCounts:
    """The frequencies of ids in the shards of a dataset."""
    kind = np.dtype(dtype)
    total = sum(split.tokens for split in splits.values())
    parts = folder.each(
        lambda part: np.frombuffer(folder.part(part[0], part[1] * kind.itemsize, part[2] * kind.itemsize), kind),
        _parts_of_shards(splits, sampled_ranges(total)),
        ahead=_READS_AT_ONCE,
    )
    return count_tokens(parts, all_tokens=total, vocab_size=vocab_size)


def _parts_of_shards(splits: dict[str, Split], ranges: list[tuple[int, int]]) -> Iterator[tuple[str, int, int]]:
    """File, offset and number of the tokens in ranges over all splits end to end, in the order of their names."""
    shards = [shard for name in sorted(splits) for shard in splits[name].shards]
    ends = list(itertools.accumulate(shard.tokens for shard in shards))
    for start, stop in ranges:
        at, number = start, bisect.bisect_right(ends, start)
        while at < stop:
            begin = ends[number] - shards[number].tokens
            upto = min(stop, ends[number], at + _READ_TOKENS)
            yield f"{shards[number].name}.bin", at - begin, upto - at
            at, number = upto, number + (upto == ends[number])


def write_statistics(folder: Storage, found: DatasetStatistics) -> Digest:
    return folder.write_parts(STATISTICS, records.sealed_parts(found))


def load_statistics(folder: Storage, manifest: Manifest) -> DatasetStatistics | None:
    """The statistics of a dataset; None if it has none. A file that is not what the manifest says is an error."""
    digest, where = manifest.files.get(STATISTICS), folder.at(STATISTICS)
    if digest is None:
        return None
    data = folder.read(STATISTICS, max_bytes=records.MAX_RECORD_BYTES)
    if Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()) != digest:
        raise DatasetError(f"{where} is not what the manifest says", hint=_HINT)
    found = records.unseal(DatasetStatistics, data, where=where)
    if found.format != FORMAT:
        raise DatasetError(
            f"{where}: format {found.format}, this version of tokenmill reads {FORMAT}",
            hint="use the version of tokenmill that wrote it",
        )
    if problem := _impossible(found, len(manifest.sources)):
        raise DatasetError(f"{where}: {problem}", hint="the file was not written by tokenmill")
    return found


def _impossible(found: DatasetStatistics, sources: int) -> str:
    """What is impossible in statistics; an empty string if nothing is."""
    for name, split in found.splits.items():
        if wrong_counts(split, sources=sources, documents=sum(split.documents), tokens=sum(split.tokens)):
            return f"the counts of split {name!r} do not add up"
    frequencies = found.frequencies
    ids, counts = frequencies.ids, frequencies.counts
    if len(ids) != len(counts) or (ids and not 0 <= min(ids) <= max(ids) < frequencies.vocab_size):
        return "the token frequencies are not those of its vocabulary"
    if min((*counts, 0)) < 0 or not sum(counts) <= frequencies.counted <= frequencies.all_tokens:
        return "the token frequencies do not add up"
    return ""
