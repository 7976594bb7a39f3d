"""Remote objects as files: byte ranges with read ahead.

    read       [ read ][ read ][ read ]
    fetched    [ range     ][ range     ][ range     ]...      some ahead, while reads follow each other

`ExpectedFile` is told in advance what will be read, such as the columns of some row groups of a parquet file:

    expected   | text |id| text |id| text | ...   with other columns in between
    requests   [1 MB][ 2 MB     ][ 4 MB    ...    neighbours are joined; later requests are larger

They are fetched before they are read, in the order of their offsets.
"""

from __future__ import annotations

import functools
import io
import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.storage.hub import HubStore
    from tokenmill.storage.object_store import ObjectInfo, Store


RANGE_BYTES = 8 << 20
RANGES_AHEAD = 2
# Whole objects are read in larger ranges, one ahead: a request costs the same for any size.
STREAM_BYTES = 4 * RANGE_BYTES
_FIRST_BYTES = 1 << 16
_TAILS_HELD = 64


def stream(store: Store, found: ObjectInfo, start: int = 0) -> Generator[memoryview]:
    """The bytes of an object from offset `start` on, as they arrive."""
    waiting: deque[tuple[Future[None], SimpleQueue[Any]]] = deque()
    coming = _ranges(start, found.size)
    try:
        while True:
            for begin, end in itertools.islice(coming, 2 - len(waiting)):
                waiting.append(_begin(store, found, begin, end))
            if not waiting:
                return
            future, parts = waiting.popleft()
            yield from (memoryview(part) for part in iter(parts.get, None))
            future.result()
    finally:
        for future, _ in waiting:
            future.cancel()


def _ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Ranges of even size, so that no request is wasted on a short last one."""
    count = max(1, round((stop - start) / STREAM_BYTES))
    cuts = [start + (stop - start) * number // count for number in range(count + 1)]
    return ((begin, end) for begin, end in itertools.pairwise(cuts) if begin < end)


def _begin(store: Store, found: ObjectInfo, start: int, stop: int) -> tuple[Future[None], SimpleQueue[Any]]:
    """Begin to fetch a range. The queue receives its parts, then None; it is bounded by the size of the range only."""
    parts: SimpleQueue[Any] = SimpleQueue()
    future = store.begin(store.fetch_parts, found, start, stop, parts.put)
    future.add_done_callback(lambda _: parts.put(None))
    return future, parts


@functools.lru_cache(maxsize=_TAILS_HELD)
def _fetch_tail(store: Store | HubStore, key: str, start: int, stop: int, etag: str) -> Any:
    """The end of an object, cached: each unit of a parquet file reads its footer."""
    return store.fetch(key, start, stop, etag)


class RemoteFile(io.RawIOBase):
    """An object as a read-only file. Reads that follow each other fetch `ahead` bytes more."""

    def __init__(
        self, store: Store | HubStore, key: str, size: int, etag: str, ahead: int = RANGES_AHEAD * RANGE_BYTES
    ) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._etag = etag
        self._ahead = ahead
        self._at = 0
        self._end = 0  # of the last read
        self._held: deque[tuple[int, int, Future[Any]]] = deque()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._size, self._at + size)
        if stop <= self._at:
            return b""
        parts = self._parts(self._at, stop)
        self._at = stop
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._size, self._at + len(view))
        done = 0
        for part in self._parts(self._at, stop) if stop > self._at else ():
            view[done : done + len(part)] = part
            done += len(part)
        self._at += done
        return done

    def close(self) -> None:
        self._forget()
        super().close()

    def _parts(self, start: int, stop: int) -> list[memoryview]:
        """The bytes [start, stop), in parts."""
        follows = start == self._end and start > 0
        while self._held and (self._held[0][1] <= start or self._held[0][0] > start):
            self._held.popleft()[2].cancel()
        held_to = self._held[-1][1] if self._held else start
        # A single read fetches little more than its bytes. A second read that follows it begins to read ahead.
        wanted = min(self._size, stop + self._ahead if follows else max(stop, start + _FIRST_BYTES))
        while held_to < (wanted if follows or held_to < stop else stop):
            end = min(wanted, held_to + RANGE_BYTES)
            is_tail = end == self._size and end - held_to <= _FIRST_BYTES and self._etag
            fetch = partial(_fetch_tail, self._store) if is_tail else self._store.fetch
            self._held.append((held_to, end, self._store.begin(fetch, self._key, held_to, end, self._etag)))
            held_to = end
        self._end = stop
        parts = []
        for first, last, future in self._held:
            if first >= stop:
                break
            parts.append(memoryview(future.result())[max(start, first) - first : min(stop, last) - first])
        return parts

    def _forget(self) -> None:
        for _, _, future in self._held:
            future.cancel()
        self._held.clear()


Range = tuple[int, int]

# The first request is small, so that work can begin; each one after it may be twice as large.
FIRST_BYTES = 1 << 20
# Smaller gaps between expected bytes are fetched too: another request would take longer.
GAP_BYTES = 1 << 18
# Columns that are read alternately have requests at several offsets. Beyond this number, the oldest are cancelled.
_BLOCKS_HELD = 16


def blocks_of(ranges: Iterable[Range]) -> list[Range]:
    """The requests that cover some ranges, in the order of their offsets; they do not overlap."""
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
    """The maximum size of the block of this number."""
    return min(RANGE_BYTES, FIRST_BYTES << min(number, 16))


def _common(block: Range, ranges: Iterable[Range]) -> int:
    """How many bytes of the ranges are in a block."""
    return sum(max(0, min(block[1], stop) - max(block[0], start)) for start, stop in ranges)


class ExpectedFile(RemoteFile):
    """An object as a file of which some `ranges` will be read. Other reads work too, but slower."""

    def __init__(
        self, store: Store | HubStore, key: str, size: int, etag: str, ahead: int, ranges: Iterable[Range]
    ) -> None:
        super().__init__(store, key, size, etag, ahead)
        inside = [(max(0, start), min(size, stop)) for start, stop in ranges]
        self._blocks = blocks_of(inside)
        self._begins = [begin for begin, _ in self._blocks]
        self._left = [_common(block, inside) for block in self._blocks]  # bytes that are not read yet
        self._coming: dict[int, Future[Any]] = {}

    def _parts(self, start: int, stop: int) -> list[memoryview]:
        parts = []
        number = bisect_right(self._begins, start) - 1
        while start < stop and 0 <= number < len(self._blocks) and self._blocks[number][0] <= start:
            begin, end = self._blocks[number]
            if end <= start:
                break
            self._fetch_from(number)
            last = min(stop, end)
            parts.append(memoryview(self._coming[number].result())[start - begin : last - begin])
            self._left[number] -= last - start
            if self._left[number] <= 0:
                del self._coming[number]
            start, number = last, number + 1
        return parts if start == stop else parts + super()._parts(start, stop)

    def _fetch_from(self, number: int) -> None:
        """Begin to fetch a block and those after it, as far as the read ahead reaches."""
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
