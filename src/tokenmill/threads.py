"""Work side by side in threads, for a main thread that may be interrupted at any moment.

    items -> threads -> one queue -> results, as they come

A pool of `concurrent.futures` waits inside Python code that holds locks. An interrupt that is raised there leaves
them locked, and then the pool waits for ever. Here the main thread waits in `SimpleQueue.get` alone, which is one call
of C and leaves nothing behind; and it waits for threads that are to stop for a limited time.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Generator, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

POLL_SECONDS = 0.2
# How long threads are waited for after an error or an interrupt. What they do then is thrown away.
STOP_SECONDS = 1.0
_NOTHING = object()


def as_done(
    work: Callable[[T], R], items: Sequence[T], threads: int, *, stop: Callable[[], None] = lambda: None
) -> Generator[tuple[T, R] | None]:
    """Each item with what `work` gives for it, as soon as it does; None when nothing has come for a moment.

    The first error ends it and is raised. If it ends early for whatever reason, `stop` is called: it should have `work`
    raise soon. Close it (`contextlib.closing`), so that nothing runs on when the caller is interrupted.
    """
    todo = iter(items)
    turn = threading.Lock()  # the threads' own: nothing interrupts them
    said: SimpleQueue[tuple[T, R] | BaseException | None] = SimpleQueue()
    is_over = False

    def run() -> None:
        try:
            while not is_over:
                with turn:
                    item = next(todo, _NOTHING)
                if item is _NOTHING:
                    return
                said.put((item, work(item)))  # type: ignore[arg-type]  # it is one of the items
        except BaseException as error:
            said.put(error)
        finally:
            said.put(None)

    running, left = 0, len(items)
    try:
        for _ in range(min(threads, left)):
            running += 1
            _thread.start_new_thread(run, ())  # `Thread.start` waits, and holds a lock of all threads meanwhile
        while left:
            try:
                heard = said.get(timeout=POLL_SECONDS)
            except Empty:
                yield None
                continue
            if heard is None:
                running -= 1
            elif isinstance(heard, BaseException):
                raise heard
            else:
                left -= 1
                yield heard
    except BaseException:
        is_over = True
        stop()
        raise
    finally:
        _await_end(said, running)


def _await_end(said: SimpleQueue[tuple[T, R] | BaseException | None], running: int) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while running and (seconds := deadline - time.monotonic()) > 0:
        try:
            running -= said.get(timeout=seconds) is None
        except Empty:
            return
