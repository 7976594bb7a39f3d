"""A dataset with its documents in a shuffled order, for trainers that read their files in order.

    seed, fingerprint -> keyed permutation -> position in the export -> document -> gathered from the maps

The view has the same splits with the same tokens, so every format writes it as it writes any dataset. The start and the
end of each document are held in memory, sixteen bytes; the tokens are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

import numpy as np

from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
from tokenmill.dataset.dataset import Dataset, Starts, TokenSplit
from tokenmill.errors import RecipeError
from tokenmill.formats.nanogpt import slices_of
from tokenmill.formats.rows import RowsSplit
from tokenmill.permutation import make_key, permute

BLOCK_DOCUMENTS = 1 << 14
BLOCK_TOKENS = 1 << 22


class ShuffledDataset(Dataset):
    """A view of a dataset. Each split has its documents in an order of its own."""

    def __init__(self, source: Dataset, seed: int) -> None:
        self._source = source
        self.path, self.manifest = source.path, source.manifest
        fingerprint = source.manifest.fingerprint
        self._splits = {
            name: ShuffledSplit(source[name], make_key("documents", fingerprint, name, seed), where=source.path)
            for name in source.splits
        }

    def content(self, split: str) -> str:
        return self._source.content(split)

    def pins(self, *splits: str) -> dict[str, Any]:
        return self._source.pins(*splits)


class ShuffledSplit(TokenSplit):
    """The documents of a split in the order of a key."""

    def __init__(self, split: TokenSplit, key: bytes, *, where: str) -> None:
        if isinstance(split, RowsSplit):
            raise RecipeError(
                f"{where}: its documents cannot be read in any order but their own",
                hint="import the files first, and export the dataset",
            )
        self._split, self._key = split, key
        self.dtype, self.eot, self.eot_id = split.dtype, split.eot, split.eot_id

    @property
    def num_tokens(self) -> int:
        return self._split.num_tokens

    def summary(self) -> str:
        return self._split.summary()

    @cached_property
    def _documents(self) -> tuple[Starts, Starts]:
        """In the shuffled order: where each document begins in the split, and where it ends in this one."""
        ends = self._split.document_ends(0, self.num_tokens)
        order = permute(np.arange(len(ends)), len(ends), self._key)
        starts = np.concatenate(([0], ends[:-1]))
        lengths = (ends - starts)[order]
        return starts[order], np.cumsum(lengths)

    def document_ends(self, start: int, stop: int) -> Starts:
        ends = self._documents[1]
        first, last = np.searchsorted(ends, [start, stop], side="right").tolist()
        return ends[first:last]

    def blocks(self, start: int, stop: int) -> Iterator[Tokens]:
        begins, ends = self._documents
        at = start
        while at < stop:
            first = int(np.searchsorted(ends, at, side="right"))
            most = min(stop, at + BLOCK_TOKENS)
            last = min(int(np.searchsorted(ends, most, side="left")) + 1, first + BLOCK_DOCUMENTS)
            lengths = np.diff(ends[first:last], prepend=ends[first - 1] if first else 0)
            low = begins[first:last].copy()
            high = low + lengths
            # The first and the last document may be cut by the range.
            end = min(most, int(ends[last - 1]))
            high[-1] -= int(ends[last - 1]) - end
            low[0] += at - (int(ends[first - 1]) if first else 0)
            data = b"".join(slices_of(self._split, low, high))
            yield cast("Tokens", np.frombuffer(data, numpy_dtype(self.dtype)))
            at = end
