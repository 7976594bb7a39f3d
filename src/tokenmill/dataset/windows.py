"""Samples that lie end to end in a split: window i holds tokens [i * T, i * T + T], over shard borders.

The last token of a window is the first one of the next, since it is a target here and an input
there. So no target is lost, and nothing is dropped but a last window that is not full.

Rows out of many shards by one indexing of numpy: twice as quick as row by row.

Shards are mapped anywhere in memory. A view from the lowest up to the highest has a row at every
token of all of them, and at everything between, most of which is not ours. So a row is taken only
if it lies inside one shard that is mapped, and that shard is kept as long as the view is.

Stretches of a split's tokens, copied out of the maps of its shards.

    tokens [start, stop) of the split  --cut where shards end-->  slices of maps  --joined-->  one run

Where everything lies is computed for many batches at once; then each of them is a single join.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill import arguments
from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
from tokenmill.dataset.dataset import TokenSplit, distinct
from tokenmill.errors import RecipeError

Numbers = npt.NDArray[np.int64]


class Windows:
    """Fixed-length samples of a split, each of `seq_len` inputs and their targets."""

    def __init__(self, split: TokenSplit, seq_len: int) -> None:
        seq_len = check_seq_len(seq_len)
        check_tokens(split.num_tokens, seq_len)
        self.split = split
        self.seq_len = seq_len
        self.dtype = numpy_dtype(split.dtype)

    def __len__(self) -> int:
        return (self.split.num_tokens - 1) // self.seq_len

    def __getitem__(self, index: int) -> Tokens:
        """The tokens of a sample: `seq_len` inputs and one more, the last target."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index % len(self) * self.seq_len
        return self.split.tokens(start, start + self.seq_len + 1)

    def gather(self, starts: Numbers) -> Tokens:
        """A row for each of these starts, anywhere in the split, as stored."""
        return next(self.gather_batches(starts[None]))

    def gather_batches(self, starts: Numbers) -> Iterator[Tokens]:
        """The same for one batch of starts after another; quicker for many than for each alone."""
        width = self.seq_len + 1
        if starts.size and (starts.min() < 0 or starts.max() + width > self.split.num_tokens):
            raise IndexError(f"rows from {starts.min()} to {starts.max() + width} of {self.split.num_tokens} tokens")
        if not self.split.fits:
            yield from (tokens.reshape(-1, width) for tokens in read_ranges(self.split, self.stretches(starts)))
            return
        shards = np.searchsorted(self.split.token_ends, starts, side="right")
        reach = self._reach_of(shards)
        places = starts + reach.shifts[shards]
        beyond = np.count_nonzero(starts > reach.lasts[shards], axis=1)
        for number, num_beyond in enumerate(beyond.tolist()):
            if not num_beyond:
                yield reach.rows[places[number]]
            else:
                (tokens,) = read_ranges(self.split, self.stretches(starts[number : number + 1]))
                yield tokens.reshape(-1, width)

    def _reach_of(self, shards: Numbers) -> RowView:
        """A reach that has these shards, and those that were asked for before."""
        asked, width, views = distinct(shards), self.seq_len + 1, self.split.views
        reach: RowView | None = views.get(width)
        if reach is None or not reach.tokens.keys() >= set(asked):
            reach = views[width] = extend_row_view(self.split, width, reach or make_row_view(self.split, width), asked)
            if self.split.num_unmapped != reach.num_unmapped:  # some may have been forgotten meanwhile
                views.pop(width, None)
        return reach

    def stretches(self, starts: Numbers) -> TokenRanges:
        """The tokens of windows, batch after batch of starts."""
        num_batches, num_rows = starts.shape
        begins = starts.ravel()
        return TokenRanges(begins, begins + self.seq_len + 1, np.arange(num_batches + 1) * num_rows)


def check_seq_len(seq_len: int) -> int:
    return arguments.whole("seq_len", seq_len, least=1, hint="give a positive number of tokens")


def check_tokens(num_tokens: int, seq_len: int) -> None:
    """Raise unless so many tokens make a sample."""
    if num_tokens <= seq_len:
        raise RecipeError(
            f"{num_tokens} tokens make no sample of seq_len {seq_len}, which takes {seq_len + 1}",
            hint="use a smaller `seq_len` or more text",
        )


# Rows of more tokens are few, and a view of them could span more bytes than numpy counts.
_MAX_WIDTH = 1 << 15


@dataclass(frozen=True, slots=True)
class RowView:
    """Token t of the split, in shard s, begins `rows[t + shifts[s]]` if t is at most `lasts[s]`, which may be none.

    Shards that were unmapped since `num_unmapped` may be among them.
    """

    tokens: dict[int, Tokens]
    lasts: Numbers
    shifts: Numbers
    rows: Tokens
    lowest: int
    num_unmapped: int


def extend_row_view(split: TokenSplit, width: int, reach: RowView, asked: Iterable[int]) -> RowView:
    """The same with these shards, and without those that had to make room for them.

    Threads may be in the middle of the old one, so it is not changed, and its shards stay mapped till they are done.
    """
    asked = list(asked)
    shards = {number: split.shard_bytes(number) for number in asked if number not in reach.tokens}
    if split.num_unmapped == reach.num_unmapped:
        return _add(split, width, reach, shards)
    fresh = make_row_view(split, width)
    kept = {number: split.shard_bytes(number) for number in [*asked, *split.keeps(reach.tokens)]}
    return _add(split, width, fresh, kept)


def make_row_view(split: TokenSplit, width: int) -> RowView:
    """Rows of `width` tokens in no shards yet."""
    count, dtype = len(split.token_ends), numpy_dtype(split.dtype)
    rows: Any = np.empty((0, width), dtype)
    return RowView({}, np.full(count, -1), np.zeros(count, np.int64), rows, 0, split.num_unmapped)


def _add(split: TokenSplit, width: int, reach: RowView, shards: Mapping[int, memoryview]) -> RowView:
    dtype = numpy_dtype(split.dtype)
    added: dict[int, Any] = {number: np.frombuffer(data, dtype) for number, data in shards.items()}
    addresses = {number: found.__array_interface__["data"][0] for number, found in added.items()}
    tokens = {**reach.tokens, **added}
    lasts, shifts = reach.lasts.copy(), reach.shifts.copy()
    lowest = min(addresses.values(), default=0)
    num_rows = 0
    if reach.tokens:
        lowest = min(lowest or reach.lowest, reach.lowest)
        down, left_over = divmod(reach.lowest - lowest, dtype.itemsize)
        if left_over:  # files of others may begin with headers of any size
            every = {number: split.shard_bytes(number) for number in tokens}
            return _add(split, width, make_row_view(split, width), every)
        shifts[lasts >= 0] += down
        num_rows = len(reach.rows) + down
    for number, address in addresses.items():
        place, left_over = divmod(address - lowest, dtype.itemsize)
        if left_over or width > _MAX_WIDTH:
            continue
        end = split.token_ends[number]
        lasts[number], shifts[number] = end - width, place - (end - len(tokens[number]))
        num_rows = max(num_rows, place + len(tokens[number]) - width + 1)
    strides = (dtype.itemsize, dtype.itemsize)
    first = next((found for number, found in added.items() if addresses[number] == lowest), None)
    rows = np.lib.stride_tricks.as_strided(
        reach.rows if first is None else first, (num_rows, width), strides, writeable=False
    )
    return RowView(tokens, lasts, shifts, rows, lowest, reach.num_unmapped)


@dataclass(frozen=True, slots=True)
class TokenRanges:
    """Tokens from `starts[i]` up to `stops[i]`. Batch b is made of those from `edges[b]` up to `edges[b + 1]`."""

    starts: Numbers
    stops: Numbers
    edges: Numbers


@dataclass(frozen=True, slots=True)
class ShardSlices:
    """The same, each within one shard: bytes of it."""

    shards: Numbers
    begins: Numbers
    ends: Numbers
    edges: Numbers
    itemsize: int


def read_ranges(split: TokenSplit, wanted: TokenRanges, padding: bytes = b"") -> Iterator[Tokens]:
    """The tokens of each batch, end to end, in memory of its own. `padding` is found behind the split's last token."""
    slices = slice_ranges(split, wanted, len(padding))
    data: dict[int, memoryview] = {}
    found: Iterator[tuple[int, int | None, int | None]]
    if split.fits:
        data = {number: _shard(split, number, padding) for number in distinct(slices.shards)}
        found = zip(slices.shards.tolist(), slices.begins.tolist(), slices.ends.tolist(), strict=True)
    else:  # each shard comes once, and nothing is left of its map
        for number in distinct(slices.shards):
            data |= _copy(_shard(split, number, padding), slices, number)
        found = ((at, None, None) for at in range(len(slices.shards)))
    dtype = numpy_dtype(split.dtype)
    for count in np.diff(slices.edges).tolist():
        joined = bytearray().join([data[number][begin:end] for number, begin, end in islice(found, count)])
        tokens: Any = np.frombuffer(joined, dtype)
        yield tokens


def _copy(shard: memoryview, slices: ShardSlices, number: int) -> dict[int, memoryview]:
    """The slices that lie in a shard, in memory of their own."""
    places = np.flatnonzero(slices.shards == number).tolist()
    return {at: memoryview(bytes(shard[slices.begins[at] : slices.ends[at]])) for at in places}


def _shard(split: TokenSplit, number: int, padding: bytes) -> memoryview:
    """The bytes of a shard. Padding counts as one more."""
    return split.shard_bytes(number) if number < len(split.token_ends) else memoryview(padding)


def slice_ranges(split: TokenSplit, wanted: TokenRanges, padding_bytes: int = 0) -> ShardSlices:
    """Where the stretches lie. Padding counts as one more shard."""
    itemsize = numpy_dtype(split.dtype).itemsize
    shard_ends = np.array([*split.token_ends, split.num_tokens + padding_bytes // itemsize])
    shard_begins = np.concatenate(([0], shard_ends[:-1]))
    starts, stops, edges = wanted.starts, wanted.stops, wanted.edges
    shards = shard_ends.searchsorted(starts, side="right")
    if (stops > shard_ends[shards]).any():
        counts = shard_ends.searchsorted(stops - 1, side="right") - shards + 1
        totals = np.concatenate(([0], np.cumsum(counts)))
        shards = np.repeat(shards - totals[:-1], counts) + np.arange(totals[-1])
        starts = np.maximum(np.repeat(starts, counts), shard_begins[shards])
        stops = np.minimum(np.repeat(stops, counts), shard_ends[shards])
        edges = totals[edges]
    begins = shard_begins[shards]
    return ShardSlices(shards, (starts - begins) * itemsize, (stops - begins) * itemsize, edges, itemsize)
