"""Reading objects: ranges in order, the next ones on their way while this one is used.

asked for     [ read ][ read ][ read ]
fetched       [ range     ][ range     ][ range     ]...      a few ahead, as long as reads follow each other
"""

from __future__ import annotations

import functools
import io
import itertools
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # whoever has a store has loaded it
    from tokenmill.storage.hub import HubStore
    from tokenmill.storage.store import Found, Store

RANGE_BYTES = 8 << 20
RANGES_AHEAD = 2
# Whole objects go in larger ranges, one ahead: a request costs the same for any size.
STREAM_BYTES = 4 * RANGE_BYTES
_FIRST_BYTES = 1 << 16
_TAILS_HELD = 64


def stream(store: Store, found: Found, start: int = 0) -> Generator[memoryview]:
    """The bytes of an object from one place on, as they come."""
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
    """Even ranges: a short last one would be a request for little."""
    count = max(1, round((stop - start) / STREAM_BYTES))
    cuts = [start + (stop - start) * number // count for number in range(count + 1)]
    return ((begin, end) for begin, end in itertools.pairwise(cuts) if begin < end)


def _begin(store: Store, found: Found, start: int, stop: int) -> tuple[Future[None], SimpleQueue[Any]]:
    """A range on its way; None ends its parts. They are bounded by its size alone: it never waits for its reader."""
    parts: SimpleQueue[Any] = SimpleQueue()
    future = store.begin(store.fetch_parts, found, start, stop, parts.put)
    future.add_done_callback(lambda _: parts.put(None))
    return future, parts


@functools.lru_cache(maxsize=_TAILS_HELD)
def _fetch_tail(store: Store | HubStore, key: str, start: int, stop: int, etag: str) -> Any:
    """The end of an object. That of a parquet file says what is in it, and is asked for again by each unit."""
    return store.fetch(key, start, stop, etag)


class RemoteFile(io.RawIOBase):
    """An object as a file that can only be read. Those in a row fetch `ahead` bytes more."""

    def __init__(
        self, store: Store | HubStore, key: str, size: int, etag: str, ahead: int = RANGES_AHEAD * RANGE_BYTES
    ) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._etag = etag
        self._ahead = ahead
        self._at = 0
        self._end = 0  # of what was asked for last
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
        """The bytes [start, stop), in pieces."""
        follows = start == self._end and start > 0
        while self._held and (self._held[0][1] <= start or self._held[0][0] > start):
            self._held.popleft()[2].cancel()
        held_to = self._held[-1][1] if self._held else start
        # A single read fetches little more than it wants; the second one in a row is taken for a stream.
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
