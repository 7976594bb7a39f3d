"""Rows out of many shards by one indexing of numpy: twice as quick as row by row.

Shards are mapped anywhere in memory. A view from the lowest up to the highest has a row at every
token of all of them, and at everything between, most of which is not ours. So a row is taken only
if it lies inside one shard that is mapped, and that shard is kept as long as the view is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.data.dataset import TokenSplit
from tokenmill.shards.layout import Tokens, numpy_dtype

Numbers = npt.NDArray[np.int64]

# Rows of more tokens are few, and a view of them could span more bytes than numpy counts.
_MAX_WIDTH = 1 << 15


@dataclass(frozen=True, slots=True)
class Reach:
    """Token t of the split, in shard s, begins `rows[t + shifts[s]]` if t is at most `lasts[s]`, which may be none.

    Shards that were unmapped since `num_unmapped` may be among them.
    """

    tokens: dict[int, Tokens]
    lasts: Numbers
    shifts: Numbers
    rows: Tokens
    lowest: int
    num_unmapped: int


def extend_reach(split: TokenSplit, width: int, reach: Reach, asked: Iterable[int]) -> Reach:
    """The same with these shards, and without those that had to make room for them.

    Threads may be in the middle of the old one, so it is not changed, and its shards stay mapped till they are done.
    """
    asked = list(asked)
    shards = {number: split.shard_bytes(number) for number in asked if number not in reach.tokens}
    if split.num_unmapped == reach.num_unmapped:
        return _add(split, width, reach, shards)
    fresh = make_reach(split, width)
    kept = {number: split.shard_bytes(number) for number in [*asked, *split.keeps(reach.tokens)]}
    return _add(split, width, fresh, kept)


def make_reach(split: TokenSplit, width: int) -> Reach:
    """Rows of `width` tokens in no shards yet."""
    count, dtype = len(split.token_ends), numpy_dtype(split.dtype)
    rows: Any = np.empty((0, width), dtype)
    return Reach({}, np.full(count, -1), np.zeros(count, np.int64), rows, 0, split.num_unmapped)


def _add(split: TokenSplit, width: int, reach: Reach, shards: Mapping[int, memoryview]) -> Reach:
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
            return _add(split, width, make_reach(split, width), every)
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
    return Reach(tokens, lasts, shifts, rows, lowest, reach.num_unmapped)
