"""An iterator that runs ahead of its consumer, in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

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
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: T | _End) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
        except BaseException as error:  # whatever it is, the consumer must see it
            put(_End(error))
        else:
            put(_End())

    thread = threading.Thread(target=work, daemon=True, name="tokenmill-ahead")
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stop.set()
        thread.join()
