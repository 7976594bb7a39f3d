"""Samples that lie end to end in a split: window i holds tokens [i * T, i * T + T], over shard borders.

The last token of a window is the first one of the next, since it is a target here and an input
there. So no target is lost, and nothing is dropped but a last window that is not full.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenmill.data.dataset import TokenSplit
from tokenmill.errors import RecipeError
from tokenmill.shards.layout import Tokens, numpy_dtype

Numbers = npt.NDArray[np.int64]


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

    def __len__(self) -> int:
        return (self.split.num_tokens - 1) // self.seq_len

    def __getitem__(self, index: int) -> Tokens:
        """The tokens of a sample: `seq_len` inputs and one more, the last target."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index % len(self) * self.seq_len
        return self.split.tokens(start, start + self.seq_len + 1)

    def gather(self, starts: Numbers) -> Tokens:
        """A row for each of these starts, anywhere in the split, as stored.

        Rows are copied as bytes: for a few thousand of them, that is quicker than any indexing of numpy's.
        """
        shards = np.searchsorted(self._ends, starts, side="right")
        places = ((starts - self._begins[shards]) * self.dtype.itemsize).tolist()
        rows = np.empty((len(starts), self.seq_len + 1), self.dtype)
        width = rows.strides[0]
        out = rows.data.cast("B")
        end = 0
        for row, (shard, place) in enumerate(zip(shards.tolist(), places, strict=True)):
            begin, end = end, end + width
            data = self.split.shard_bytes(shard)[place : place + width]
            if len(data) == width:
                out[begin:end] = data
            else:  # it goes on in the next shard
                start = int(starts[row])
                rows[row] = self.split.tokens(start, start + self.seq_len + 1)
        return rows
