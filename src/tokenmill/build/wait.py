"""Waits for another process that builds the same dataset, so that only one of them builds it.

    rank 0   builds ............ done          dies -> the next one takes over
    rank 1   waits  ............ uses it       fails -> the others raise the same error
    rank 2   waits  ............ uses it

The process with the lock builds. A build that fails records its error for the processes that wait. A build that dies
records nothing, and the next process breaks its lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tokenmill import errors
from tokenmill.build.workspace import read_failure
from tokenmill.dataset import manifest
from tokenmill.errors import LockedError
from tokenmill.storage.base import Storage
from tokenmill.storage.locks import is_held

T = TypeVar("T")

POLL_SECONDS = 0.5


def wait_for(
    folder: Storage, attempt: Callable[[Callable[[], None]], T], *, timeout: float | None, tell: Callable[[str], None]
) -> T:
    """Retry until the lock is free. Raises the error of the build that was waited for, if it failed.

    An attempt checks for that error once more when it has the lock, since the other build may have failed in between.
    Between two attempts only the lock, the manifest and the record of a failure are read: an attempt makes the plan
    anew, which may read every source.
    """
    begin = time.monotonic()
    before = read_failure(folder)
    told = False

    def on_lock() -> None:
        now = read_failure(folder)
        if now is not None and now != before:
            raise errors.from_record(now.error)

    def wait(locked: LockedError) -> None:
        while True:
            if timeout is not None and time.monotonic() - begin > timeout:
                raise LockedError(
                    f"{locked.message}, and has not finished within {timeout:g} s",
                    hint="wait longer, or look at .build/events.jsonl",
                ) from None
            time.sleep(POLL_SECONDS)
            on_lock()
            if folder.exists(manifest.MANIFEST) or not is_held(folder):
                return

    while True:
        try:
            return attempt(on_lock)
        except LockedError as error:
            if not told:
                tell(f"{error.message}; waiting for it")
                told = True
            wait(error)
