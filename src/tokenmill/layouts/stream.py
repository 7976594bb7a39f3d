"""The tokens of a split as a layout wants them: with the end of text first or last, cut where it may be cut.

    append    d d E  d d d E  d E        every document ends with it
    prepend   E d d  E d d d  E d        the same tokens, one place later: a document is as long as before

So one form is made from the other without a look at documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenmill.data.dataset import BLOCK_TOKENS, Starts, TokenSplit
from tokenmill.shards.layout import Tokens, numpy_dtype

_LOOK = 1 << 16


@dataclass(frozen=True, slots=True)
class TokenStream:
    """A split's tokens with the end of text where `eot` says; "" leaves it where it is."""

    split: TokenSplit
    eot: str = ""

    @property
    def num_tokens(self) -> int:
        return self.split.num_tokens

    @property
    def itemsize(self) -> int:
        return numpy_dtype(self.split.dtype).itemsize

    def blocks(self, start: int, stop: int) -> Iterator[Tokens]:
        """Tokens [start, stop), mapped block by block."""
        turn = {("append", "prepend"): -1, ("prepend", "append"): 1}.get(
            (self.split.eot, self.eot or self.split.eot), 0
        )
        end: Any = np.array([self.split.eot_id or 0], numpy_dtype(self.split.dtype))
        begin, last = start + turn, stop + turn
        if begin < 0 and start < stop:
            yield end
        yield from self.split.blocks(max(begin, 0), min(last, self.num_tokens))
        if last > self.num_tokens and start < stop:
            yield end

    def data(self, start: int, stop: int) -> Iterator[memoryview]:
        """The same as bytes."""
        for tokens in self.blocks(start, stop):
            yield tokens.data.cast("B")


def cut_anywhere(num_tokens: int, size: int) -> list[tuple[int, int]]:
    """Ranges of exactly `size` tokens, but for the last."""
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def cut_at_documents(split: TokenSplit, size: int) -> list[tuple[int, int]]:
    """Ranges of whole documents: each ends with the first document that reaches the next multiple of `size`."""
    split.document_ends(0, 1)  # does anybody know where documents end?
    cuts = [0]
    for multiple in range(size, split.num_tokens, size):
        if multiple > cuts[-1]:
            cuts.append(_first_end(split, multiple))
    if cuts[-1] < split.num_tokens:
        cuts.append(split.num_tokens)
    return list(itertools.pairwise(cuts))


def document_lengths(split: TokenSplit, start: int, stop: int) -> Starts:
    """Tokens of the documents that fill a range."""
    return np.diff(split.document_ends(start, stop), prepend=start)


def lengths_by_block(split: TokenSplit, start: int, stop: int, *, block_tokens: int = BLOCK_TOKENS) -> Iterator[Starts]:
    """The same, some at a time: an index of any size takes little memory."""
    before = start
    for at in range(start, stop, block_tokens):
        ends = split.document_ends(at, min(at + block_tokens, stop))
        if len(ends):
            yield np.diff(ends, prepend=before)
            before = int(ends[-1])


def _first_end(split: TokenSplit, at: int) -> int:
    """The first end of a document that is not before a token."""
    look = _LOOK
    while True:
        found = split.document_ends(at - 1, min(at - 1 + look, split.num_tokens))
        if len(found):
            return int(found[0])
        if at - 1 + look >= split.num_tokens:
            return split.num_tokens
        look *= 4
