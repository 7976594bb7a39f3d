"""Rows: what layouts store that know samples rather than tokens. A row is a document, or `seq_len` tokens.

    documents   d d E | d d d E | d E        as long as they are, with the end of text as the dataset has it
    packed      d d E d | d d E d |          all of one length; what does not fill the last row is left out

Files hold whole rows. They are filled in order, each with as many rows as fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokenmill.data.dataset import Dataset, Starts, TokenSplit
from tokenmill.errors import RecipeError
from tokenmill.layouts.shape import filled_splits
from tokenmill.layouts.stream import TokenStream, lengths_by_block
from tokenmill.shards.layout import Tokens

if TYPE_CHECKING:
    import pyarrow as pa

# Rows are copied more than once on their way: a block of them should stay near the core.
BLOCK_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a split, in order, given in blocks of about so many tokens."""

    split: TokenSplit
    seq_len: int | None = None
    block_tokens: int = BLOCK_TOKENS

    @property
    def stream(self) -> TokenStream:
        """Packed rows end documents by the end of text alone, so it stands where readers look for it: last."""
        return TokenStream(self.split, "append" if self.seq_len else "")

    @property
    def num_tokens(self) -> int:
        """Tokens that are in rows."""
        return self.split.num_tokens - self.split.num_tokens % (self.seq_len or 1)

    def lengths(self, start: int, stop: int) -> Iterator[Starts]:
        """Tokens of the rows that fill a range, some rows at a time."""
        if self.seq_len is None:
            for lengths in lengths_by_block(self.split, start, stop, block_tokens=self.block_tokens):
                if len(filled := lengths[lengths > 0]):
                    yield filled
            return
        step = max(1, self.block_tokens // self.seq_len)
        count = (stop - start) // self.seq_len
        for first in range(0, count, step):
            yield np.full(min(step, count - first), self.seq_len, np.int64)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[Tokens, Starts]]:
        """The same with the tokens themselves. A block is as long as its longest row, or some megabytes."""
        for lengths in self.lengths(start, stop):
            end = start + int(lengths.sum())
            parts: list[Any] = list(self.stream.blocks(start, end))
            yield parts[0] if len(parts) == 1 else np.concatenate(parts), lengths
            start = end


def rows_of(source: Dataset, layout: str, seq_len: int | None) -> tuple[dict[str, Rows], tuple[str, ...]]:
    """The rows of every split, and what is not kept of it."""
    found = {name: Rows(split, seq_len) for name, split in filled_splits(source).items()}
    if seq_len is None:
        return found, ()
    if source.manifest.identity.get("eot", "none") == "none":
        raise RecipeError(
            f"packed rows of {layout} tell documents by an end of text, and those of {source.path} have none",
            hint="drop --seq-len for a row a document, or prepare the dataset with --eot append",
        )
    notes = []
    for name, rows in found.items():
        if not rows.num_tokens:
            raise RecipeError(
                f"{name} has {rows.split.num_tokens} tokens, which fill no row of {seq_len}",
                hint="use a smaller --seq-len",
            )
        if left := rows.split.num_tokens - rows.num_tokens:
            notes.append(f"the last {left:,} tokens of {name} do not fill a row of {seq_len:,}, and are left out")
    return found, tuple(notes)


def cut_by_size(rows: Rows, limit: int, cost: Callable[[Starts], Starts]) -> list[tuple[int, int]]:
    """Ranges of tokens for files: each has as many rows as cost no more than `limit` together, and one at least."""
    cuts = [0]
    end, spent = 0, 0  # of the file that is being filled: tokens up to here, and what its rows cost
    for lengths in rows.lengths(0, rows.num_tokens):
        ends = np.cumsum(lengths) + end
        costs = np.cumsum(cost(lengths))
        first, before = 0, 0
        while True:
            last = int(np.searchsorted(costs, limit - spent + before, side="right"))
            if last == first and not spent:
                last += 1
            if last >= len(ends):
                spent += int(costs[-1]) - before
                break
            cuts.append(int(ends[last - 1]) if last else end)
            first, before, spent = last, int(costs[last - 1]) if last else 0, 0
        end = int(ends[-1])
    return [(start, stop) for start, stop in zip(cuts, [*cuts[1:], end], strict=True) if start < stop]


def interleave(*columns: tuple[npt.NDArray[Any], Starts]) -> memoryview:
    """Row after row, what each column has for it. A column is an array, and how many of its bytes each row has."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = pa.large_binary()

    def strings(data: npt.NDArray[Any], sizes: Starts) -> pa.Array:
        edges = np.concatenate(([0], np.cumsum(sizes)))
        return pa.LargeBinaryArray.from_buffers(kind, len(sizes), [None, pa.py_buffer(edges), pa.py_buffer(data)])

    between = strings(np.empty(0), np.zeros(1, np.int64))[0]  # `pa.scalar` would load pandas
    joined = pc.binary_join_element_wise(*itertools.starmap(strings, columns), between)
    return memoryview(joined.buffers()[2])
