"""Prefetches hub files for the next units, and removes them after their last use.

    units done       0  1  2
    units running             3  4
    files fetched                 of 5  6  7     a few units ahead, as long as there is space for their files

Files that were in the hub's cache before stay there. So a build records what it fetches, and a build that resumes
recognises its own copies. A unit whose file is still being fetched waits for it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tokenmill import records
from tokenmill.errors import DatasetError, TokenmillError
from tokenmill.resources import positive_from_environment
from tokenmill.storage import hub
from tokenmill.storage.base import Storage
from tokenmill.units.task import UnitTask

FETCHED = ".build/fetched.json"
LIMIT = "TOKENMILL_HUB_BYTES"
DEFAULT_LIMIT = 50_000_000_000
UNITS_AHEAD = 8
_FILES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Fetched:
    """Files that a build has fetched or was about to fetch."""

    names: tuple[str, ...]


class Prefetcher:
    """Fetches the files of a build's tasks, and removes them after use. `folder` is the output of the build, and `note`
    the record there of what was fetched."""

    def __init__(self, folder: Storage, root: str, limit: int | None = None, *, note: str = FETCHED) -> None:
        self._folder = folder
        self._root = root
        self._note = note
        self._before = set(_noted(folder, note))
        self._limit = limit or positive_from_environment(LIMIT) or DEFAULT_LIMIT
        self._pool = ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="tokenmill-hub")
        self._fetching: dict[str, Future[None]] = {}  # files that were not in the cache before
        self._sizes: dict[str, int] = {}
        self._users: dict[str, set[int]] = {}  # units that still need a file
        self._is_exhausted = False  # no task is left
        self._last: tuple[str, ...] = ()  # files of the last task that was taken: the next one may need them as well

    def prefetch(self, tasks: Iterator[UnitTask]) -> Iterator[UnitTask]:
        """The same tasks; before each one, fetching begins for those that follow."""
        waiting: deque[UnitTask] = deque()
        while True:
            while len(waiting) <= UNITS_AHEAD and (not waiting or self._has_space()):
                task = next(tasks, None)
                if task is None:
                    self._last = ()
                    self._is_exhausted = True
                    break
                self._take(task)
                waiting.append(task)
            if not waiting:
                return
            yield waiting.popleft()

    def release(self, unit: int) -> None:
        """A unit is done: remove the files that no other unit needs."""
        for name, users in list(self._users.items()):
            users.discard(unit)
            if not users and name not in self._last:
                del self._users[name]
                coming = self._fetching.pop(name, None)
                if coming is not None:
                    coming.cancel()
                    hub.remove(f"{self._root}/{name}")
                    del self._sizes[name]

    def stop(self, *, wait: bool = True) -> None:
        """Start no more fetches; `wait` for those that run. If all tasks were handed out, copies of an earlier run that
        no task asked for are removed."""
        self._pool.shutdown(wait=wait, cancel_futures=True)
        if wait and self._is_exhausted and not self._fetching:
            for name in self._before:
                hub.remove(f"{self._root}/{name}")
            self._folder.remove(self._note)

    def _take(self, task: UnitTask) -> None:
        self._last = tuple(source.name for source in task.sources)
        for source in task.sources:
            self._users.setdefault(source.name, set()).add(task.unit.index)
            path = f"{self._root}/{source.name}"
            is_new = source.name not in self._fetching and not hub.is_here(path)
            if is_new:
                fetched = Fetched(tuple(sorted({*self._fetching, *self._before, source.name})))
                self._folder.replace(self._note, records.seal(fetched))
            if is_new or source.name in self._before:
                self._before.discard(source.name)
                self._sizes[source.name] = source.bytes
                self._fetching[source.name] = self._pool.submit(_fetch, path)

    def _has_space(self) -> bool:
        return sum(self._sizes.values()) < self._limit


def _fetch(path: str) -> None:
    with contextlib.suppress(TokenmillError):  # the unit that needs the file will report it
        hub.fetch(path)


def _noted(folder: Storage, note: str) -> tuple[str, ...]:
    try:
        return records.unseal(Fetched, folder.read(note, max_bytes=1 << 26), where=note).names
    except DatasetError:
        return ()


@contextlib.contextmanager
def prefetching(
    folder: Storage, root: str, tasks: Iterator[UnitTask], *, note: str = FETCHED
) -> Iterator[tuple[Iterator[UnitTask], Callable[[int], None]]]:
    """The tasks of sources on the hub, whose files are fetched ahead, and a function to call with each unit that is
    done."""
    prefetcher = Prefetcher(folder, root, note=note)
    try:
        yield prefetcher.prefetch(tasks), prefetcher.release
    except BaseException:
        prefetcher.stop(wait=False)  # do not delay shutdown
        raise
    prefetcher.stop()
