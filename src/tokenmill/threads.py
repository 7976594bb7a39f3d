"""Concurrent work in threads that can be interrupted at any moment, and its progress.

    items -> threads -> one queue -> results, as they come
                |
            ByteTally    -> progress events, told by the main thread

A pool of `concurrent.futures` waits in Python code that holds locks. An interrupt that is raised there leaves them
locked, and then the pool waits forever. Here the main thread waits only in `SimpleQueue.get`, which is one call of C,
and it waits for stopping threads for a limited time.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Generator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tokenmill.arguments import Watcher, progress_event
from tokenmill.errors import Interrupted

T = TypeVar("T")
R = TypeVar("R")

POLL_SECONDS = 0.2
# How long to wait for threads after an error or an interrupt. Their results are discarded.
STOP_SECONDS = 1.0
_NOTHING = object()
_TELL_SECONDS = 0.1


class ByteTally:
    """The bytes that threads have handled. After `stop`, the next `add` or `check` raises `Interrupted`."""

    def __init__(self, watch: Watcher | None) -> None:
        self._watch = watch
        self._lock = threading.Lock()  # held only by the threads that work
        self._done = self._moved = self._total = 0
        self._began = self._told = 0.0
        self._is_stopped = False

    def start(self, total_bytes: int, **about: Any) -> None:
        self._total, self._began = total_bytes, time.monotonic()
        if self._watch is not None:
            self._watch({"kind": "start", "bytes": 0, "total_bytes": total_bytes, **about})

    def stop(self) -> None:
        self._is_stopped = True

    def check(self) -> None:
        if self._is_stopped:
            raise Interrupted("interrupted", hint="run the same command to resume")

    def add(self, count: int, *, moved: bool = True) -> None:
        """Count bytes. Those that were complete already are not `moved`."""
        self.check()
        with self._lock:
            self._done += count
            self._moved += count if moved else 0

    def show(self, *, is_last: bool = False, **about: Any) -> None:
        """Tell the watcher how far it is, a few times a second and at the end."""
        now = time.monotonic()
        if self._watch is not None and (is_last or now - self._told >= _TELL_SECONDS):
            self._told = now
            seconds = now - self._began
            self._watch(progress_event(self._done, self._total, moved_bytes=self._moved, seconds=seconds, **about))


def as_done(  # noqa: C901  what an interrupt may hit belongs together
    work: Callable[[T], R], items: Sequence[T], threads: int, *, stop: Callable[[], None] = lambda: None
) -> Generator[tuple[T, R] | None]:
    """Yield each item with its result, as they are ready, and None when nothing was ready for a moment.

    The first error is raised and ends the iteration. If it ends early for any reason, `stop` is called: it should make
    `work` raise soon. Close the iterator (`contextlib.closing`), so that no thread runs on after an interrupt.
    """
    todo = iter(items)
    lock = threading.Lock()  # held only by these threads, which nothing interrupts
    results: SimpleQueue[tuple[T, R] | BaseException | None] = SimpleQueue()
    is_over = False

    def run() -> None:
        try:
            while not is_over:
                with lock:
                    item = next(todo, _NOTHING)
                if item is _NOTHING:
                    return
                results.put((item, work(item)))  # type: ignore[arg-type]  # it is one of the items
        except BaseException as error:
            results.put(error)
        finally:
            results.put(None)

    running, left = 0, len(items)
    try:
        for _ in range(min(threads, left)):
            running += 1
            _thread.start_new_thread(run, ())  # `Thread.start` waits, holding a lock
        while left:
            try:
                result = results.get(timeout=POLL_SECONDS)
            except Empty:
                yield None
                continue
            if result is None:
                running -= 1
            elif isinstance(result, BaseException):
                raise result
            else:
                left -= 1
                yield result
    except BaseException:
        is_over = True
        stop()
        raise
    finally:
        _await_end(results, running)


def _await_end(results: SimpleQueue[tuple[T, R] | BaseException | None], running: int) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while running and (seconds := deadline - time.monotonic()) > 0:
        try:
            running -= results.get(timeout=seconds) is None
        except Empty:
            return
