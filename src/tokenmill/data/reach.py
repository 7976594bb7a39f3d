"""Rows out of many shards by one indexing of numpy: twice as quick as row by row.

Shards are mapped anywhere in memory. A view from the lowest up to the highest has a row at every
token of all of them, and at everything between, most of which is not ours. So a row is taken only
if it lies inside one shard that is mapped, and that shard is kept as long as the view is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
    """Token t of the split, in shard s, begins `rows[t + shifts[s]]` if t is at most `lasts[s]`, which may be none."""

    tokens: dict[int, Tokens]
    lasts: Numbers
    shifts: Numbers
    rows: Tokens


def extend_reach(split: TokenSplit, width: int, reach: Reach, asked: Iterable[int]) -> Reach:
    """The same with these shards, and without those that had to make room for them.

    Threads may be in the middle of the old one, so it is not changed, and its shards stay mapped till they are done.
    """
    shards = {number: split.shard_bytes(number) for number in asked}
    return make_reach(
        split, width, shards | {number: split.shard_bytes(number) for number in split.keeps(reach.tokens)}
    )


def make_reach(split: TokenSplit, width: int, shards: Mapping[int, memoryview] = MappingProxyType({})) -> Reach:
    """Rows of `width` tokens in these shards."""
    dtype = numpy_dtype(split.dtype)
    tokens: dict[int, Any] = {number: np.frombuffer(data, dtype) for number, data in shards.items()}
    lasts = np.full(len(split.token_ends), -1)
    shifts = np.zeros(len(split.token_ends), np.int64)
    addresses = {number: found.__array_interface__["data"][0] for number, found in tokens.items()}
    lowest = min(addresses.values(), default=0)
    num_rows = 0
    for number, address in addresses.items():
        place, left_over = divmod(address - lowest, dtype.itemsize)
        if left_over or width > _MAX_WIDTH:
            continue
        end = split.token_ends[number]
        lasts[number], shifts[number] = end - width, place - (end - len(tokens[number]))
        num_rows = max(num_rows, place + len(tokens[number]) - width + 1)
    strides = (dtype.itemsize, dtype.itemsize)
    first = next((found for number, found in tokens.items() if addresses[number] == lowest), np.empty(0, dtype))
    rows = np.lib.stride_tricks.as_strided(first, (num_rows, width), strides, writeable=False)
    return Reach(tokens, lasts, shifts, rows)
