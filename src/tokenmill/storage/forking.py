"""Requests that are under way when a process forks.

A child has none of its parent's other threads, so what one of them had begun would never end there.
"""

from __future__ import annotations

import os
import threading


class UnderWay:
    """Counts requests. A fork waits until there are none: a child would hang on what another thread has not ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_for_none(self) -> None:
        """Wait for the last one, and let no other begin."""
        self._changed.acquire()
        self._changed.wait_for(lambda: not self._count)

    def go_on(self) -> None:
        self._changed.release()


UNDER_WAY = UnderWay()
os.register_at_fork(before=UNDER_WAY.wait_for_none, after_in_parent=UNDER_WAY.go_on, after_in_child=UNDER_WAY.go_on)
