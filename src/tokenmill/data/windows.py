"""Samples that lie end to end in a split: window i holds tokens [i * T, i * T + T], over shard borders.

The last token of a window is the first one of the next, since it is a target here and an input
there. So no target is lost, and nothing is dropped but a last window that is not full.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tokenmill import arguments
from tokenmill.data.dataset import TokenSplit, distinct
from tokenmill.data.reach import Reach, extend_reach, make_reach
from tokenmill.data.stretches import Stretches, read
from tokenmill.errors import RecipeError
from tokenmill.shards.layout import Tokens, numpy_dtype

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
            yield from (tokens.reshape(-1, width) for tokens in read(self.split, self.stretches(starts)))
            return
        shards = np.searchsorted(self.split.token_ends, starts, side="right")
        reach = self._reach_of(shards)
        places = starts + reach.shifts[shards]
        beyond = np.count_nonzero(starts > reach.lasts[shards], axis=1)
        for number, num_beyond in enumerate(beyond.tolist()):
            if not num_beyond:
                yield reach.rows[places[number]]
            else:
                (tokens,) = read(self.split, self.stretches(starts[number : number + 1]))
                yield tokens.reshape(-1, width)

    def _reach_of(self, shards: Numbers) -> Reach:
        """A reach that has these shards, and those that were asked for before."""
        asked, width, views = distinct(shards), self.seq_len + 1, self.split.views
        reach: Reach | None = views.get(width)
        if reach is None or not reach.tokens.keys() >= set(asked):
            reach = views[width] = extend_reach(self.split, width, reach or make_reach(self.split, width), asked)
            if self.split.num_unmapped != reach.num_unmapped:  # some may have been forgotten meanwhile
                views.pop(width, None)
        return reach

    def stretches(self, starts: Numbers) -> Stretches:
        """The tokens of windows, batch after batch of starts."""
        num_batches, num_rows = starts.shape
        begins = starts.ravel()
        return Stretches(begins, begins + self.seq_len + 1, np.arange(num_batches + 1) * num_rows)


def check_seq_len(seq_len: int) -> int:
    return arguments.whole("seq_len", seq_len, least=1, hint="give a positive number of tokens")


def check_tokens(num_tokens: int, seq_len: int) -> None:
    """Raise unless so many tokens make a sample."""
    if num_tokens <= seq_len:
        raise RecipeError(
            f"{num_tokens} tokens make no sample of seq_len {seq_len}, which takes {seq_len + 1}",
            hint="use a smaller seq_len or more text",
        )
