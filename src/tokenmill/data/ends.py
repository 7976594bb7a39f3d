"""Where documents end in token files that are not ours: stored beside the tokens, or told by the end of text.

All positions are tokens of a whole split. Nothing is read before it is asked for, and no more than
asked for: a range of a split of any size takes little memory.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.errors import DatasetError
from tokenmill.shards.layout import Tokens

Numbers = npt.NDArray[np.int64]
Blocks = Callable[[int, int], Iterator[Tokens]]


class Ends(Protocol):
    """The ends of a split's documents, in order."""

    def between(self, start: int, stop: int) -> Numbers:
        """Ends behind `start` and not behind `stop`."""
        ...


@dataclass(frozen=True, slots=True)
class NoEnds:
    """Nobody knows where documents end."""

    where: str

    def between(self, start: int, stop: int) -> Numbers:
        raise DatasetError(
            f"{self.where} does not tell where its documents end",
            hint="give the id that ends a text (eot_id, --eot-id), or the tokenizer",
        )


@dataclass(frozen=True, slots=True)
class StoredEnds:
    """Ends that were stored, file by file: those inside each file, and where the files themselves begin and end.

    `unit` is what the inner ones count in: tokens, or bytes of which a token has so many.
    """

    inner: Sequence[npt.NDArray[np.int64] | npt.NDArray[np.uint64]]
    edges: Sequence[int]
    unit: int = 1

    def between(self, start: int, stop: int) -> Numbers:
        found = [np.zeros(0, np.int64)]
        for ends, (begin, end) in zip(self.inner, itertools.pairwise(self.edges), strict=True):
            # Both ends of the range by bisection: the rest of a mapped index is not even read.
            first = bisect.bisect_right(ends, (start - begin) * self.unit) if start > begin else 0
            last = bisect.bisect_right(ends, (stop - begin) * self.unit) if stop > begin else 0
            if first < last:
                found.append(ends[first:last].astype(np.int64) // self.unit + begin)
            if start < end <= stop and end > begin:
                found.append(np.array([end]))
        return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class EotEnds:
    """Ends that the end-of-text id tells. It stands last in a document, or first."""

    blocks: Blocks = field(repr=False)
    num_tokens: int
    eot_id: int
    is_first: bool

    def between(self, start: int, stop: int) -> Numbers:
        stop = min(stop, self.num_tokens)
        shift = 0 if self.is_first else 1
        found = [np.zeros(0, np.int64)]
        # An end at e is told by token e - 1, or by token e where it begins the next document.
        at = start + 1
        for tokens in self.blocks(at - shift, min(stop + 1 - shift, self.num_tokens)):
            found.append(np.flatnonzero(tokens == self.eot_id) + at)
            at += len(tokens)
        if start < stop == self.num_tokens and not (found[-1].size and found[-1][-1] == stop):
            found.append(np.array([stop]))  # what follows the last end of text is a document, too
        return np.concatenate(found)
