"""Stretches of a split's tokens, copied out of the maps of its shards.

    tokens [start, stop) of the split  --cut where shards end-->  slices of maps  --joined-->  one run

Where everything lies is computed for many batches at once; then each of them is a single join.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.data.dataset import TokenSplit, distinct
from tokenmill.shards.layout import Tokens, numpy_dtype

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stretches:
    """Tokens from `starts[i]` up to `stops[i]`. Batch b is made of those from `edges[b]` up to `edges[b + 1]`."""

    starts: Numbers
    stops: Numbers
    edges: Numbers


@dataclass(frozen=True, slots=True)
class Slices:
    """The same, each within one shard: bytes of it."""

    shards: Numbers
    begins: Numbers
    ends: Numbers
    edges: Numbers
    itemsize: int


def read(split: TokenSplit, wanted: Stretches, padding: bytes = b"") -> Iterator[Tokens]:
    """The tokens of each batch, end to end, in memory of its own. `padding` is found behind the split's last token."""
    slices = cut(split, wanted, len(padding))
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


def _copy(shard: memoryview, slices: Slices, number: int) -> dict[int, memoryview]:
    """The slices that lie in a shard, in memory of their own."""
    places = np.flatnonzero(slices.shards == number).tolist()
    return {at: memoryview(bytes(shard[slices.begins[at] : slices.ends[at]])) for at in places}


def _shard(split: TokenSplit, number: int, padding: bytes) -> memoryview:
    """The bytes of a shard. Padding counts as one more."""
    return split.shard_bytes(number) if number < len(split.token_ends) else memoryview(padding)


def cut(split: TokenSplit, wanted: Stretches, padding_bytes: int = 0) -> Slices:
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
    return Slices(shards, (starts - begins) * itemsize, (stops - begins) * itemsize, edges, itemsize)
