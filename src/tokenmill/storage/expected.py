"""Objects of which it is known what will be read: a parquet file's columns of some row groups.

    wanted     | text |id| text |id| text | ...   other columns in between
    requests   [1 MB][ 2 MB     ][ 4 MB    ...    near neighbours in one, those after the first ones larger

They are fetched before they are asked for, in the order of their places.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tokenmill.storage.remote import RANGE_BYTES, RemoteFile

if TYPE_CHECKING:  # whoever has a store has loaded it
    from tokenmill.storage.hub import HubStore
    from tokenmill.storage.store import Store

Range = tuple[int, int]

# The first request is small, so that work can begin; each one behind it may be twice as large.
FIRST_BYTES = 1 << 20
# What is not wanted is fetched along if it is no more than this: a request would take longer.
GAP_BYTES = 1 << 18
# Columns that are read in turns have requests ahead at several places. Beyond this, the oldest are given up.
_BLOCKS_HELD = 16


def blocks_of(ranges: Iterable[Range]) -> list[Range]:
    """The requests that cover some ranges, in order of their places; they do not overlap."""
    blocks: list[Range] = []
    for start, stop in sorted(ranges):
        at = max(start, blocks[-1][1]) if blocks else start
        while at < stop:
            if blocks and at - blocks[-1][1] <= GAP_BYTES and at - blocks[-1][0] < _limit(len(blocks) - 1):
                begin = blocks.pop()[0]
            else:
                begin = at
            at = min(stop, begin + _limit(len(blocks)))
            blocks.append((begin, at))
    return blocks


def _limit(number: int) -> int:
    """How large the block of that number may be."""
    return min(RANGE_BYTES, FIRST_BYTES << min(number, 16))


def _common(block: Range, ranges: Iterable[Range]) -> int:
    """How many bytes of some ranges are in a block."""
    return sum(max(0, min(block[1], stop) - max(block[0], start)) for start, stop in ranges)


class ExpectedFile(RemoteFile):
    """An object as a file of which some `ranges` will be read; reads of others are as good, if not as quick."""

    def __init__(
        self, store: Store | HubStore, key: str, size: int, etag: str, ahead: int, ranges: Iterable[Range]
    ) -> None:
        super().__init__(store, key, size, etag, ahead)
        inside = [(max(0, start), min(size, stop)) for start, stop in ranges]
        self._blocks = blocks_of(inside)
        self._begins = [begin for begin, _ in self._blocks]
        self._left = [_common(block, inside) for block in self._blocks]  # bytes that are still to be read
        self._coming: dict[int, Future[Any]] = {}

    def _parts(self, start: int, stop: int) -> list[memoryview]:
        parts = []
        number = bisect_right(self._begins, start) - 1
        while start < stop and 0 <= number < len(self._blocks) and self._blocks[number][0] <= start:
            begin, end = self._blocks[number]
            if end <= start:
                break
            self._ask_from(number)
            last = min(stop, end)
            parts.append(memoryview(self._coming[number].result())[start - begin : last - begin])
            self._left[number] -= last - start
            if self._left[number] <= 0:
                del self._coming[number]
            start, number = last, number + 1
        return parts if start == stop else parts + super()._parts(start, stop)

    def _ask_from(self, number: int) -> None:
        """Have a block on its way, and those that follow it as far as is looked ahead."""
        enough = self._blocks[number][1] + self._ahead
        for index in range(number, len(self._blocks)):
            begin, end = self._blocks[index]
            if begin >= enough and index > number:
                break
            if index not in self._coming:
                self._coming[index] = self._store.begin(self._store.fetch, self._key, begin, end, self._etag)
        for index in list(self._coming)[:-_BLOCKS_HELD]:
            if index != number:
                self._coming.pop(index).cancel()

    def _forget(self) -> None:
        super()._forget()
        for future in self._coming.values():
            future.cancel()
        self._coming.clear()
