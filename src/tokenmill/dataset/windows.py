"""Fixed-length windows of a split, read across shards: window i is tokens [i * T, i * T + T].

The last token of a window is the first one of the next: a target here, an input there. So no target is lost, and
only an incomplete last window is dropped.

Windows in single shards are gathered by one indexing of numpy, twice as fast as row by row:

    shard 7 ......|ttttttttt|.......|ttttttt|.... shard 3     mapped anywhere in memory
            rows:  ^ a view from the lowest to the highest address has a row at every token

Most rows of such a view are not tokens of these shards. A row is used only if it lies inside one mapped shard, and
the view keeps its shards mapped. Other token ranges are cut where shards end, and the slices of all batches are
computed at once:

    tokens [start, stop) of the split  --cut at shard ends-->  slices of maps  --joined-->  one array

A row that is not in memory stalls its reader, one disk access after another. So `read_ahead` tells the system about
the rows of many batches at once, and it reads them while others are in use.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tokenmill import arguments
from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
from tokenmill.dataset.dataset import TokenSplit, distinct
from tokenmill.errors import RecipeError
from tokenmill.storage import memory_maps
from tokenmill.storage.memory_maps import Numbers

# Wider rows are few, and a view of them could span more bytes than numpy can address.
_MAX_VIEW_WIDTH = 1 << 15
# Samples that are probed: if they are in memory, the others are not read ahead.
_NUM_PROBES = 4


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

    def __repr__(self) -> str:
        return f"Windows({len(self):,} samples of {self.seq_len:,} tokens)"

    def gather(self, starts: Numbers) -> Tokens:
        """The rows that begin at these tokens, anywhere in the split, as stored."""
        return next(self.gather_batches(starts[None]))

    def gather_batches(self, starts: Numbers) -> Iterator[Tokens]:
        """The rows of several batches, one batch after the other. Faster than a call for each."""
        width = self.seq_len + 1
        if starts.size and (starts.min() < 0 or starts.max() + width > self.split.num_tokens):
            raise IndexError(f"rows from {starts.min()} to {starts.max() + width} of {self.split.num_tokens} tokens")
        if not self.split.fits_on_disk:
            yield from (tokens.reshape(-1, width) for tokens in read_ranges(self.split, self.token_ranges(starts)))
            return
        shards = np.searchsorted(self.split.token_ends, starts, side="right")
        view = self._row_view_of(shards)
        row_numbers = starts + view.shifts[shards]
        num_outside = np.count_nonzero(starts > view.last_starts[shards], axis=1)
        for number, outside in enumerate(num_outside.tolist()):
            if not outside:
                yield view.rows[row_numbers[number]]
            else:
                (tokens,) = read_ranges(self.split, self.token_ranges(starts[number : number + 1]))
                yield tokens.reshape(-1, width)

    def _row_view_of(self, shards: Numbers) -> RowView:
        """A view of these shards, and of those that earlier calls needed."""
        wanted, width, views = distinct(shards), self.seq_len + 1, self.split.row_views
        view: RowView | None = views.get(width)
        if view is None or not view.tokens.keys() >= set(wanted):
            view = views[width] = extend_row_view(self.split, width, view or make_row_view(self.split, width), wanted)
            if self.split.num_unmapped != view.num_unmapped:  # another thread unmapped shards meanwhile
                views.pop(width, None)
        return view

    def token_ranges(self, starts: Numbers) -> TokenRanges:
        """The tokens of windows, for batch after batch of starts."""
        num_batches, num_rows = starts.shape
        begins = starts.ravel()
        return TokenRanges(begins, begins + self.seq_len + 1, np.arange(num_batches + 1) * num_rows)


def check_seq_len(seq_len: int) -> int:
    return arguments.whole("seq_len", seq_len, least=1, hint="give a positive number of tokens")


def check_tokens(num_tokens: int, seq_len: int) -> None:
    """Raise `RecipeError` unless this many tokens make a sample."""
    if num_tokens <= seq_len:
        raise RecipeError(
            f"{num_tokens} tokens make no sample of seq_len {seq_len}, which takes {seq_len + 1}",
            hint="use a smaller `seq_len` or more text",
        )


@dataclass(frozen=True, slots=True)
class RowView:
    """Rows at every token of some shards: token t of shard s begins row `t + shifts[s]` if t <= `last_starts[s]`.

    `last_starts` is -1 for shards without a row. Shards that were unmapped after `num_unmapped` may be included.
    """

    tokens: dict[int, Tokens]
    last_starts: Numbers
    shifts: Numbers
    rows: Tokens
    lowest_address: int
    num_unmapped: int


def extend_row_view(split: TokenSplit, width: int, view: RowView, wanted: Iterable[int]) -> RowView:
    """The view with these shards added, and without shards that were unmapped since.

    Other threads may be reading through the old view, so it is not changed, and its shards stay mapped until they
    are done.
    """
    wanted = list(wanted)
    added = {number: split.shard_bytes(number) for number in wanted if number not in view.tokens}
    if split.num_unmapped == view.num_unmapped:
        return _add(split, width, view, added)
    fresh = make_row_view(split, width)
    kept = {number: split.shard_bytes(number) for number in [*wanted, *split.still_mapped(view.tokens)]}
    return _add(split, width, fresh, kept)


def make_row_view(split: TokenSplit, width: int) -> RowView:
    """A view of rows of `width` tokens, without any shards yet."""
    count, dtype = len(split.token_ends), numpy_dtype(split.dtype)
    rows: Any = np.empty((0, width), dtype)
    return RowView({}, np.full(count, -1), np.zeros(count, np.int64), rows, 0, split.num_unmapped)


def _add(split: TokenSplit, width: int, view: RowView, shards: Mapping[int, memoryview]) -> RowView:
    dtype = numpy_dtype(split.dtype)
    added: dict[int, Any] = {number: np.frombuffer(data, dtype) for number, data in shards.items()}
    addresses = {number: found.__array_interface__["data"][0] for number, found in added.items()}
    tokens = {**view.tokens, **added}
    last_starts, shifts = view.last_starts.copy(), view.shifts.copy()
    lowest = min(addresses.values(), default=0)
    num_rows = 0
    if view.tokens:
        lowest = min(lowest or view.lowest_address, view.lowest_address)
        down, remainder = divmod(view.lowest_address - lowest, dtype.itemsize)
        if remainder:  # other formats have headers of any size, so addresses need not be aligned
            every = {number: split.shard_bytes(number) for number in tokens}
            return _add(split, width, make_row_view(split, width), every)
        shifts[last_starts >= 0] += down
        num_rows = len(view.rows) + down
    for number, address in addresses.items():
        offset, remainder = divmod(address - lowest, dtype.itemsize)
        if remainder or width > _MAX_VIEW_WIDTH:
            continue
        end = split.token_ends[number]
        last_starts[number], shifts[number] = end - width, offset - (end - len(tokens[number]))
        num_rows = max(num_rows, offset + len(tokens[number]) - width + 1)
    strides = (dtype.itemsize, dtype.itemsize)
    first = next((found for number, found in added.items() if addresses[number] == lowest), None)
    rows = np.lib.stride_tricks.as_strided(
        view.rows if first is None else first, (num_rows, width), strides, writeable=False
    )
    return RowView(tokens, last_starts, shifts, rows, lowest, view.num_unmapped)


@dataclass(frozen=True, slots=True)
class TokenRanges:
    """Tokens from `starts[i]` up to `stops[i]`. Batch b consists of the ranges `edges[b]` up to `edges[b + 1]`."""

    starts: Numbers
    stops: Numbers
    edges: Numbers


@dataclass(frozen=True, slots=True)
class ShardSlices:
    """Token ranges cut at shard ends: bytes `begins[i]` up to `ends[i]` of shard `shards[i]`."""

    shards: Numbers
    begins: Numbers
    ends: Numbers
    edges: Numbers
    itemsize: int


def read_ranges(split: TokenSplit, wanted: TokenRanges, padding: bytes = b"") -> Iterator[Tokens]:
    """The tokens of each batch, end to end, copied. `padding` follows the last token of the split."""
    slices = slice_ranges(split, wanted, len(padding))
    data: dict[int, memoryview] = {}
    found: Iterator[tuple[int, int | None, int | None]]
    if split.fits_on_disk:
        data = {number: _shard_data(split, number, padding) for number in distinct(slices.shards)}
        found = zip(slices.shards.tolist(), slices.begins.tolist(), slices.ends.tolist(), strict=True)
    else:  # each shard is needed once, and its map is not kept
        for number in distinct(slices.shards):
            data |= _copy_slices(_shard_data(split, number, padding), slices, number)
        found = ((at, None, None) for at in range(len(slices.shards)))
    dtype = numpy_dtype(split.dtype)
    for count in np.diff(slices.edges).tolist():
        joined = bytearray().join([data[number][begin:end] for number, begin, end in islice(found, count)])
        tokens: Any = np.frombuffer(joined, dtype)
        yield tokens


def slice_ranges(split: TokenSplit, wanted: TokenRanges, padding_bytes: int = 0) -> ShardSlices:
    """Token ranges as slices of shards. Padding counts as one more shard."""
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


def _shard_data(split: TokenSplit, number: int, padding: bytes) -> memoryview:
    """The bytes of a shard. Padding counts as one more shard."""
    return split.shard_bytes(number) if number < len(split.token_ends) else memoryview(padding)


def _copy_slices(shard: memoryview, slices: ShardSlices, number: int) -> dict[int, memoryview]:
    """The slices of one shard, copied."""
    found = np.flatnonzero(slices.shards == number).tolist()
    return {at: memoryview(bytes(shard[slices.begins[at] : slices.ends[at]])) for at in found}


def read_ahead(split: TokenSplit, batches: Sequence[Numbers], find: Callable[[Numbers], TokenRanges]) -> Iterator[None]:
    """With each step, have the system read the tokens of one more batch; `find` gives the tokens of samples.

    There are no steps if the dataset fits into memory and a few probed samples are already there. A larger dataset is
    never completely cached: it is read without readahead around its rows, which would evict other rows.
    """
    samples = np.concatenate(batches)
    if not memory_maps.CAN_READ_AHEAD or not len(samples):
        return
    fits = split.num_tokens * numpy_dtype(split.dtype).itemsize <= memory_maps.machine_memory() // 2
    if not fits:
        for mapped in memory_maps.find_maps(split.maps()):
            mapped.madvise(mmap.MADV_RANDOM)
    elif all(_is_cached(split, token) for token in find(samples[:: -(-len(samples) // _NUM_PROBES)]).starts.tolist()):
        return
    for batch in batches:
        slices = slice_ranges(split, find(batch))
        for number in distinct(slices.shards):
            mine = slices.shards == number
            path, offset = split.shard_location(number)
            begins, ends = slices.begins[mine] + offset, slices.ends[mine] + offset
            memory_maps.read_pages_ahead(path, begins, ends, fits_in_memory=fits)
        yield


def _is_cached(split: TokenSplit, token: int) -> bool:
    number = bisect.bisect_right(split.token_ends, token)
    path, offset = split.shard_location(number)
    first = split.token_ends[number - 1] if number else 0
    return memory_maps.is_cached(path, offset + (token - first) * numpy_dtype(split.dtype).itemsize)
