"""Hashing beside writing: neither holds the interpreter, so a large block takes the longer of the two, not both."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

LARGE_BYTES = 4 << 20


@contextlib.contextmanager
def hashed_beside(update: Callable[[memoryview], object], view: memoryview) -> Iterator[memoryview]:
    """Hash a block while the body writes it; a small one is hashed first, for a thread would cost more."""
    if len(view) < LARGE_BYTES:
        update(view)
        yield view
        return
    hashing = threading.Thread(target=update, args=(view,))
    hashing.start()
    try:
        yield view
    finally:
        hashing.join()
