"""Samples that lie end to end in a split: window i holds tokens [i * T, i * T + T], over shard borders.

The last token of a window is the first one of the next, since it is a target here and an input
there. So no target is lost, and nothing is dropped but a last window that is not full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.data.dataset import TokenSplit
from tokenmill.errors import RecipeError
from tokenmill.shards.layout import Tokens, numpy_dtype

Numbers = npt.NDArray[np.int64]


# Rows of more tokens are copied one by one: there are few, and a view of them could span more than numpy counts.
_WIDE = 1 << 15


@dataclass(frozen=True, slots=True)
class _Reach:
    """Rows at every token of the shards that are mapped: token i of shard s is `rows[i + shifts[s], 0]`.

    The shards lie anywhere in memory. `rows` is one view from the lowest up to the highest, so that
    one indexing takes rows out of many shards: twice as quick as row by row. Most of what it
    spans is not ours: only rows that lie inside a mapped shard may be asked for.
    """

    tokens: dict[int, Tokens]
    mapped: npt.NDArray[np.bool_]
    shifts: Numbers
    rows: Tokens


class Windows:
    """Fixed-length samples of a split, each of `seq_len` inputs and their targets."""

    def __init__(self, split: TokenSplit, seq_len: int) -> None:
        if seq_len < 1:
            raise RecipeError(f"seq_len is {seq_len}", hint="give a positive number of tokens")
        if split.num_tokens <= seq_len:
            raise RecipeError(
                f"{split.num_tokens} tokens make no sample of seq_len {seq_len}, which takes {seq_len + 1}",
                hint="use a smaller seq_len or more text",
            )
        self.split = split
        self.seq_len = seq_len
        self.dtype = numpy_dtype(split.dtype)
        self._ends = np.array(split.token_ends, np.int64)
        self._begins = np.concatenate(([0], self._ends[:-1]))
        count = len(self._ends)
        nothing = np.empty((0, seq_len + 1), self.dtype)
        self._reach = _Reach({}, np.zeros(count, bool), np.zeros(count, np.int64), nothing)

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
        width = self.seq_len + 1
        if len(starts) and (starts.min() < 0 or starts.max() + width > self.split.num_tokens):
            raise IndexError(f"rows from {starts.min()} to {starts.max() + width} of {self.split.num_tokens} tokens")
        shards = self._ends.searchsorted(starts, side="right")
        reach = self._reach
        if not reach.mapped[shards].all():
            reach = self._reach = self._extend(reach, np.unique(shards).tolist())
        inside = starts + width <= self._ends[shards]
        if width > _WIDE:
            inside[:] = False
        places = starts + reach.shifts[shards]
        if inside.all():
            found: Tokens = reach.rows[places]
            return found
        rows = np.empty((len(starts), width), self.dtype)
        rows[inside] = reach.rows[places[inside]]
        for row in np.flatnonzero(~inside).tolist():
            start = int(starts[row])
            rows[row] = self.split.tokens(start, start + width)
        return rows

    def _extend(self, reach: _Reach, shards: list[int]) -> _Reach:
        """The same with these shards as well. It is a new one: threads may be in the middle of the old one."""
        if self.seq_len >= _WIDE:
            return replace(reach, mapped=np.ones_like(reach.mapped))
        tokens: dict[int, Any] = dict(reach.tokens)
        tokens |= {shard: np.frombuffer(self.split.shard_bytes(shard), self.dtype) for shard in shards}
        addresses = {shard: mapped.__array_interface__["data"][0] for shard, mapped in tokens.items()}
        lowest = min(addresses, key=lambda shard: addresses[shard])
        mapped, shifts = reach.mapped.copy(), reach.shifts.copy()
        num_rows = 0
        for shard, address in addresses.items():
            place = (address - addresses[lowest]) // self.dtype.itemsize  # maps begin at pages: nothing is left over
            mapped[shard], shifts[shard] = True, place - self._begins[shard]
            num_rows = max(num_rows, place + len(tokens[shard]) - self.seq_len)
        shape, strides = (max(num_rows, 0), self.seq_len + 1), (self.dtype.itemsize, self.dtype.itemsize)
        rows = np.lib.stride_tricks.as_strided(tokens[lowest], shape, strides, writeable=False)
        return _Reach(tokens, mapped, shifts, rows)

    def __getstate__(self) -> dict[str, Any]:
        """Addresses mean nothing in another process."""
        return {"split": self.split, "seq_len": self.seq_len}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # it is made anew
