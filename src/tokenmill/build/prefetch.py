"""Files of the hub for the next units, fetched while these are done, and given back when they are through.

    units done       0  1  2
    units at work             3  4
    files coming                    of 5  6  7     as many units ahead, as long as there is room for their files

What was in the hub's cache before stays there, so a build notes what it fetches: one that goes on after a kill knows
its own copies again. Whoever needs a file that is still coming waits for it.
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
from tokenmill.storage.base import is_hub
from tokenmill.storage.local import Folder
from tokenmill.units.task import UnitTask

FETCHED = ".build/fetched.json"
LIMIT = "TOKENMILL_HUB_BYTES"
DEFAULT_LIMIT = 50_000_000_000
UNITS_AHEAD = 8
_FILES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Fetched:
    """Files that a build has fetched, or was about to."""

    names: tuple[str, ...]


class Prefetcher:
    """The files of a build's tasks, from when they are wanted until they are done with. `folder` is its output."""

    def __init__(self, folder: Folder, root: str, limit: int | None = None) -> None:
        self._folder = folder
        self._root = root
        self._before = set(_noted(folder))
        self._limit = limit or positive_from_environment(LIMIT) or DEFAULT_LIMIT
        self._pool = ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="tokenmill-hub")
        self._coming: dict[str, Future[None]] = {}  # files that were not here before
        self._sizes: dict[str, int] = {}
        self._users: dict[str, set[int]] = {}  # units that still need a file
        self._is_through = False  # no task is left
        self._last: tuple[str, ...] = ()  # files of the last task that was taken: the next one may need them too

    def lead(self, tasks: Iterator[UnitTask]) -> Iterator[UnitTask]:
        """The same tasks, each handed out when the files of the following ones are on their way."""
        waiting: deque[UnitTask] = deque()
        while True:
            while len(waiting) <= UNITS_AHEAD and (not waiting or self._has_room()):
                task = next(tasks, None)
                if task is None:
                    self._last = ()
                    self._is_through = True
                    break
                self._take(task)
                waiting.append(task)
            if not waiting:
                return
            yield waiting.popleft()

    def release(self, unit: int) -> None:
        """A unit is done: files that no other one needs give their room back."""
        for name, users in list(self._users.items()):
            users.discard(unit)
            if not users and name not in self._last:
                del self._users[name]
                coming = self._coming.pop(name, None)
                if coming is not None:
                    coming.cancel()
                    hub.remove(f"{self._root}/{name}")
                    del self._sizes[name]

    def stop(self, *, wait: bool = True) -> None:
        """Start nothing more; `wait` until what is coming has come. Of an earlier run's copies, those go that nobody
        has asked for although all tasks were handed out."""
        self._pool.shutdown(wait=wait, cancel_futures=True)
        if wait and self._is_through and not self._coming:
            for name in self._before:
                hub.remove(f"{self._root}/{name}")
            self._folder.remove(FETCHED)

    def _take(self, task: UnitTask) -> None:
        self._last = tuple(source.name for source in task.sources)
        for source in task.sources:
            self._users.setdefault(source.name, set()).add(task.unit.index)
            path = f"{self._root}/{source.name}"
            is_new = source.name not in self._coming and not hub.is_here(path)
            if is_new:
                note = Fetched(tuple(sorted({*self._coming, *self._before, source.name})))
                self._folder.replace(FETCHED, records.seal(note))
            if is_new or source.name in self._before:
                self._before.discard(source.name)
                self._sizes[source.name] = source.bytes
                self._coming[source.name] = self._pool.submit(_fetch, path)

    def _has_room(self) -> bool:
        return sum(self._sizes.values()) < self._limit


def _fetch(path: str) -> None:
    with contextlib.suppress(TokenmillError):  # the unit that needs it will say what is wrong
        hub.fetch(path)


def _noted(folder: Folder) -> tuple[str, ...]:
    try:
        return records.unseal(Fetched, folder.read(FETCHED, max_bytes=1 << 26), where=FETCHED).names
    except DatasetError:
        return ()


@contextlib.contextmanager
def prefetching(
    folder: Folder, root: str, tasks: Iterator[UnitTask]
) -> Iterator[tuple[Iterator[UnitTask], Callable[[int], None]]]:
    """Tasks with their files fetched ahead, if these are on the hub; and what to call with each unit that is done."""
    if not is_hub(root):
        yield tasks, lambda unit: None
        return
    ahead = Prefetcher(folder, root)
    try:
        yield ahead.lead(tasks), ahead.release
    except BaseException:
        ahead.stop(wait=False)  # nobody waits for a file who wants to stop
        raise
    ahead.stop()
