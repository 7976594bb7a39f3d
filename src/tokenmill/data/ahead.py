"""An iterator that runs ahead of its consumer, in a thread of its own."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

from tokenmill.errors import StateError

T = TypeVar("T")


class _End:
    """The last thing in the queue: the iterator is exhausted, or failed."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def ahead(items: Iterator[T], depth: int) -> Generator[T]:
    """The same items; up to `depth` of them are made before they are asked for. None are with 0, and no thread."""
    if depth == 0:
        yield from items
        return
    ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
    room: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each item that may be made
    for _ in range(depth):
        room.put(None)
    wanted = True

    def work() -> None:
        try:
            while room.get() or wanted:
                ready.put(next(items))
        except StopIteration:
            ready.put(_End())
        except BaseException as error:  # whatever it is, the consumer must see it
            ready.put(_End(error))

    thread = threading.Thread(target=work, daemon=True, name="tokenmill-ahead")
    thread.start()
    process = os.getpid()
    try:
        while True:
            if os.getpid() != process:
                raise StateError(
                    "this iterator was begun in another process, and what makes its items is a thread of that one",
                    hint="call iter() again in this process: it continues where the other one was at the fork",
                )
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            room.put(None)
            yield item
    finally:
        wanted = False
        room.put(None)
        thread.join()
