"""Prepare once: many processes want the same dataset, one of them builds it.

    rank 0   builds ............ done          dies -> the next one takes over
    rank 1   waits  ............ uses it       fails -> the others get the same error
    rank 2   waits  ............ uses it

The lock tells who builds. A build that fails leaves a note for those who wait; one that dies
leaves none, and its lock is broken by whoever tries next.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tokenmill import errors, records
from tokenmill.dataset import manifest
from tokenmill.errors import DatasetError, Interrupted, LockedError, StorageError, TokenmillError
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import is_held

T = TypeVar("T")

NOTE = ".build/failure.json"
POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFailure:
    """Why a build ended. `token` tells one failure from the next."""

    token: str
    error: dict[str, str]


@contextlib.contextmanager
def recording_failure(folder: Folder) -> Iterator[None]:
    """Have an error of this build reach those who wait for it. An interruption is no reason for them to stop."""
    folder.remove(NOTE)
    try:
        yield
    except Interrupted:
        raise
    except TokenmillError as error:
        with contextlib.suppress(StorageError):  # on a full disk they find out by themselves
            folder.replace(NOTE, records.seal(BuildFailure(token=secrets.token_hex(8), error=errors.to_record(error))))
        raise


def wait_for(
    folder: Folder, attempt: Callable[[Callable[[], None]], T], *, timeout: float | None, tell: Callable[[str], None]
) -> T:
    """Try until nobody else holds the lock. Raises what the build that was waited for failed of.

    An attempt asks for that as well once it has the lock: the other build may have failed since it began. Between two
    attempts only the lock, the manifest and a note are looked at: an attempt plans anew, which may read every source.
    """
    begin = time.monotonic()
    before = _note(folder)
    told = False

    def on_lock() -> None:
        now = _note(folder)
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


def _note(folder: Folder) -> BuildFailure | None:
    try:
        return records.unseal(BuildFailure, folder.read(NOTE, max_bytes=1 << 20), where=NOTE)
    except (DatasetError, StorageError):
        return None
