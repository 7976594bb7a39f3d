"""The shard cache: verified copies of a remote dataset's shards, shared by all processes of a machine; and eviction.

    CACHE/datasets/room.lock                    exclusive: a process that makes room, one at a time
                   wanted.lock                  exclusive: a process that waits for others to release copies
                   1f3b.../origin.json          the URL of the dataset and the digests of its files
                           train/00000.bin      linked here once it has the digest of the manifest
                           train/00000.bin.part being downloaded; a killed process leaves it to the next one
                           train/00000.lock     exclusive: being downloaded or removed; shared: mapped

One process downloads a shard while the others wait for its lock, which the system releases if the process dies.

Eviction. If a new shard exceeds the limit, copies that no process has mapped are removed first, then those of this
process alone, oldest first. If other processes have the rest, `wanted.lock` asks them: they release all copies that
they are not opening or downloading, and open no others meanwhile. An array that a program keeps of a removed copy stays
readable, and takes disk space until it is dropped. A copy that its store could not provide again is never removed.

There is no deadlock: a process that makes room waits for processes that open or download a shard, which wait for
nothing, because a download has its room already. All others wait in turn, without holding anything that they would not
release. So a cache needs room for one shard per process that downloads at the same time. If nothing changes for
PATIENCE_SECONDS, the waiting process gives up.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenmill import records
from tokenmill.errors import DatasetError, StorageError, TokenmillError, from_record, to_record
from tokenmill.sizes import format_bytes
from tokenmill.storage.local import Folder, Forget
from tokenmill.storage.locks import FileLocks
from tokenmill.storage.object_folder import PART_SUFFIX, ObjectFolder, begin, download
from tokenmill.storage.output import Digest

SHARDS_AHEAD = 3
# A process holds at most this many locks, however many files it may open.
_MAX_LOCKS = 4096
_ENDINGS = (".bin", ".idx")


@dataclass(frozen=True, slots=True)
class CachedFolder(Folder):
    """A folder of copies."""

    copies: Copies = field(kw_only=True, repr=False)

    @property
    def holds_all(self) -> bool:
        return self.copies.all_fit

    def need(self, names: Sequence[str], forget: Forget | None = None) -> contextlib.AbstractContextManager[None]:
        return self.copies.need(names, forget)


def open_cache(
    source: ObjectFolder, files: dict[str, Digest], *, identity: str, cache: str, limit: int
) -> CachedFolder:
    """The folder of copies of a dataset. `identity` distinguishes it from others at the same URL."""
    place = os.path.join(cache, "datasets", records.digest([source.path, identity])[:16])
    origin = Origin(url=source.path, files=files)
    folder = Folder(place)
    folder.make()
    folder.write(ORIGIN, records.seal(origin))
    return CachedFolder(place, copies=Copies(place, source, origin, limit))


@dataclass(frozen=True, slots=True)
class Hold:
    """A shared lock on a shard, and the function by which those who mapped it `forget` it; None if they never do."""

    lock: int
    forget: weakref.WeakMethod[Forget] | None

    def tell(self, shard: str) -> None:
        forget = None if self.forget is None else self.forget()
        if forget is not None:
            forget([shard])


class Copies:
    """The copies that this process uses and prefetches."""

    def __init__(self, place: str, source: ObjectFolder, origin: Origin, limit: int) -> None:
        self._folder = Folder(place)
        self._root = Folder(os.path.dirname(place))
        self._source = source
        self._origin = origin
        self._limit = limit
        self._shards = [name.removesuffix(".bin") for name in sorted(origin.files) if name.endswith(".bin")]
        self.all_fit = not limit or sum(digest.bytes for digest in origin.files.values()) <= limit
        self._begin()

    def _begin(self) -> None:
        _LIVE.add(self)
        self._process = os.getpid()
        self._locks = FileLocks()
        self._changing = threading.Lock()  # guards the two fields below
        self._held: dict[str, Hold] = {}
        self._is_watched = False
        self._coming: dict[str, threading.Thread] = {}
        self._last = -1
        self._end = weakref.finalize(self, self._locks.release_all, self._process)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process takes locks of its own."""
        return Copies, (self._folder.path, self._source, self._origin, self._limit)

    @contextlib.contextmanager
    def need(self, names: Sequence[str], forget: Forget | None) -> Iterator[None]:
        """Have the files of one shard here during a `with` block, which maps them.

        Afterwards they stay until room is needed: then `forget` is called to drop the maps. Without `forget` they stay
        until the process ends.
        """
        if self._process != os.getpid():
            self._after_fork()
        unknown = [name for name in names if name not in self._origin.files]
        if unknown:
            raise DatasetError(f"{self._origin.url} has no {unknown[0]}", hint="open it again")
        shard, lock = shard_of(names[0]), self._have(names)
        try:
            for name in names:
                self._folder.touch(name)
            yield
        except BaseException:
            self._locks.release(lock)
            raise
        self._keep(shard, Hold(lock, None if forget is None else weakref.WeakMethod(forget)))
        self._fetch_ahead(shard)

    def _have(self, names: Sequence[str]) -> int:
        """A shared lock on a shard whose files are here."""
        while True:
            self._locks.release(
                self._locks.acquire(self._root, WANTED, exclusive=False)
            )  # a process that waits for room goes first
            lock = self._locks.acquire(self._folder, shard_of(names[0]), exclusive=False)
            if not self._missing(names):
                return lock
            self._locks.release(lock)
            brought = self._bring(names, urgent=True)
            if brought is None:  # another process downloads it, or has just checked it
                time.sleep(POLL_SECONDS / 100)
                continue
            self._locks.share(brought)
            if not self._missing(names):
                return brought
            self._locks.release(brought)

    def _missing(self, names: Sequence[str]) -> list[str]:
        sizes = ((name, self._folder.stat(name)) for name in names)
        return [name for name, found in sizes if found is None or found.size != self._origin.files[name].bytes]

    def _bring(self, names: Sequence[str], *, urgent: bool) -> int | None:
        """Download the missing files of a shard. Returns its lock; None if another process has it, or without room."""
        with contextlib.ExitStack() as stack:
            with self._locks.exclusive(self._root, ROOM):
                lock = self._locks.try_acquire(self._folder, shard_of(names[0]), exclusive=True)
                if lock is None:
                    return None
                stack.callback(self._locks.release, lock)
                missing = self._missing(names)
                if missing and not self._make_room(missing, urgent=urgent):
                    return None
            for name in missing:
                fetch(self._source, self._folder, name, self._origin.files[name])
            stack.pop_all()
            return lock

    def _make_room(self, names: Sequence[str], *, urgent: bool) -> bool:
        """Make room for these files, and mark it as taken."""
        size = sum(self._origin.files[name].bytes for name in names)
        place, shard = self._folder.path, shard_of(names[0])
        for name in names:
            self._folder.remove_tree(name)
        wanted = Wanted(place=place, shard=shard, url=self._source.at(names[0]), size=size, urgent=urgent)
        if not make_room(self._root, self._locks, wanted, self._limit, self._let_go):
            return False
        for name in names:
            begin(self._folder, name)
        return True

    def _keep(self, shard: str, hold: Hold) -> None:
        with self._changing:
            before = self._held.pop(shard, None)
            self._held[shard] = hold  # last, because the shard that was mapped first is released first
            if before is not None:
                self._locks.release(before.lock)
            if hold.forget is not None and not self._is_watched:
                self._is_watched = True
                threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()
            held = [shard for shard, hold in self._held.items() if hold.forget is not None]
        self._let_go_of(held[: max(0, len(held) - _max_held())])

    def _let_go(self, copy: Copy) -> None:
        if copy.place == self._folder.path:
            self._let_go_of([copy.shard])

    def _let_go_of(self, shards: Sequence[str]) -> None:
        with self._changing:
            for shard in shards:
                if shard in self._held and self._held[shard].forget is not None:
                    hold = self._held.pop(shard)
                    hold.tell(shard)
                    self._locks.release(hold.lock)

    def answer(self) -> bool:
        """Release everything if another process waits for room; False if there is nothing to release."""
        with self._changing:
            held = [shard for shard, hold in self._held.items() if hold.forget is not None]
            self._is_watched = bool(held)
        with contextlib.suppress(StorageError):  # the next use of the folder reports it
            if not self._locks.is_free(self._root, WANTED):
                self._let_go_of(held)
        return bool(held)

    def _after_fork(self) -> None:
        """Begin anew in a forked process: it inherits locks, which belong to its parent, but no threads."""
        self._end.detach()
        self._locks.close_inherited()
        for shard, hold in self._held.items():
            hold.tell(shard)
        self._begin()

    def _fetch_ahead(self, shard: str) -> None:
        """Prefetch the next shards, if all fit or they are read in order."""
        if shard not in self._shards:
            return
        number, before = self._shards.index(shard), self._last
        self._last = number
        if number == before or (number != before + 1 and not self.all_fit):
            return
        self._coming = {name: thread for name, thread in self._coming.items() if thread.is_alive()}
        for following in self._shards[number + 1 : number + 1 + SHARDS_AHEAD if self.all_fit else number + 2]:
            if following not in self._coming and following not in self._held:
                thread = threading.Thread(target=self._bring_shard, args=(following,), daemon=True)
                self._coming[following] = thread
                thread.start()

    def _bring_shard(self, shard: str) -> None:
        # The use of the shard reports the error. RuntimeError: at shutdown, no thread can be started.
        with contextlib.suppress(TokenmillError, RuntimeError):
            lock = self._bring([f"{shard}{ending}" for ending in _ENDINGS], urgent=False)
            if lock is not None:
                self._locks.release(lock)


# All instances of this process, which share its limit of open files: each lock is one.
_LIVE: weakref.WeakSet[Copies] = weakref.WeakSet()


def _max_held() -> int:
    """How many shards each dataset of this process may keep mapped: together a quarter of the limit of open files.

    The next use of a released shard maps it again.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MAX_LOCKS
    return max(1, min(limit // 4, _MAX_LOCKS) // len(_LIVE))


def _watch(copies: weakref.ref[Copies]) -> None:
    """Answer processes that wait for room, in a thread, as long as this one holds anything."""
    while (found := copies()) is not None and found.answer():
        del found
        time.sleep(POLL_SECONDS)


def fetch(source: ObjectFolder, target: Folder, name: str, digest: Digest) -> None:
    """Download a file, in a new process if this one was forked: connections do not survive a fork."""
    target.make(os.path.dirname(name))
    if source.store.is_usable():
        download(source, target, name, digest)
        return
    asked = json.dumps([source.path, target.path, name, digest.bytes, digest.sha256])
    line = [sys.executable, "-c", "from tokenmill.storage.shard_cache import main_fetch; main_fetch()", asked]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stdout.strip().splitlines()
        raise from_record(json.loads(said[-1])) if said else StorageError(f"{source.at(name)} cannot be fetched")


def main_fetch() -> None:
    """The body of the process that `fetch` starts."""
    url, place, name, size, sha256 = json.loads(sys.argv[1])
    try:
        download(ObjectFolder(url), Folder(place), name, Digest(bytes=size, sha256=sha256))
    except TokenmillError as error:
        sys.stdout.write(json.dumps(to_record(error)))
        sys.exit(1)


LIMIT = "TOKENMILL_CACHE_BYTES"
ORIGIN = "origin.json"
ROOM = "room"
WANTED = "wanted"
# How long a full cache may stay unchanged: longer than requests to a silent store are repeated.
PATIENCE_SECONDS = 300.0
# The interval in which holders of copies check for waiting processes, and those check for released copies.
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where copies come from, and the digest of each."""

    url: str
    files: dict[str, Digest]


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """A file of the cache, or its part so far: `size_now` bytes of `size`."""

    modified: int
    place: str
    name: str
    size: int
    size_now: int

    @property
    def shard(self) -> str:
        return shard_of(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A shard to download, whose exclusive lock this process has. Only if it is `urgent`, others release copies."""

    place: str
    shard: str
    url: str
    size: int
    urgent: bool

    def counts(self, copy: Copy) -> bool:
        """Whether a copy is the beginning of what is wanted."""
        return copy.name.endswith(PART_SUFFIX) and (copy.place, copy.shard) == (self.place, self.shard)


def make_room(  # noqa: C901  the loop decides anew after every answer
    root: Folder, locks: FileLocks, wanted: Wanted, limit: int, let_go: Callable[[Copy], None]
) -> bool:
    """Remove copies until there is room for a shard; False if there is not enough and it is not urgent.

    The caller has the lock on room. `let_go` releases a copy that this process has mapped.
    """
    lost: set[Copy] = set()
    seen: list[Copy] = []
    until, is_asking = 0.0, False
    with contextlib.ExitStack() as stack:
        while True:
            copies = sorted(copy for copy in _find_copies(root, locks) if not wanted.counts(copy))
            allowed = _allowed(root, copies, wanted, limit)
            excess = wanted.size + sum(copy.size for copy in copies) - allowed
            for ours_too in (False, True) if wanted.urgent else (False,):
                for copy in [copy for copy in copies if copy not in lost]:
                    if excess <= 0:
                        return True
                    if ours_too:
                        let_go(copy)
                    answer = _remove(copy, locks)
                    if answer == "removed":
                        copies.remove(copy)
                        excess -= copy.size
                    elif answer == "lost":
                        lost.add(copy)
            if excess <= 0 or not wanted.urgent:
                return excess <= 0
            lost_bytes = sum(copy.size for copy in copies if copy in lost)
            if copies != seen:
                seen, until = copies, time.monotonic() + PATIENCE_SECONDS
            if time.monotonic() >= until or wanted.size + lost_bytes > allowed:
                raise _no_room(wanted, allowed, held=sum(copy.size for copy in copies), lost=lost_bytes)
            if not is_asking:
                stack.enter_context(locks.exclusive(root, WANTED))
                is_asking = True
            time.sleep(POLL_SECONDS / 2)


def shard_of(name: str) -> str:
    """The common part of the names of a shard's files, which are locked together."""
    return name.removesuffix(PART_SUFFIX).removesuffix(".bin").removesuffix(".idx")


def _allowed(root: Folder, copies: list[Copy], wanted: Wanted, limit: int) -> int:
    """How many bytes the cache may have. Without a limit, it leaves a tenth of the available space free."""
    allowed = limit or (sum(copy.size_now for copy in copies) + (root.free_bytes() or 0)) * 9 // 10
    if wanted.size > allowed:
        raise StorageError(
            f"{wanted.url} has {format_bytes(wanted.size)}, and the cache is limited to {format_bytes(allowed)}",
            hint=f"give it more room with {LIMIT}, or another place with TOKENMILL_CACHE",
        )
    return allowed


def _no_room(wanted: Wanted, allowed: int, *, held: int, lost: int) -> StorageError:
    return StorageError(
        f"the cache of {format_bytes(allowed)} has no room for {format_bytes(wanted.size)} of {wanted.url}: "
        f"{format_bytes(held - lost)} are in use, {format_bytes(lost)} cannot be downloaded again",
        hint=f"give it {format_bytes(wanted.size + held)} or more with {LIMIT}, or let fewer processes share it",
    )


def _find_copies(root: Folder, locks: FileLocks) -> Iterator[Copy]:
    """Every copy in the cache, including partial files of running and killed downloads."""
    for child in root.names():
        entry = Folder(root.at(child))
        with contextlib.suppress(DatasetError):  # not a folder of copies, or not yet
            files = _origin(entry).files
            parents = {os.path.dirname(name) for name in files}
            there = {os.path.join(parent, name) for parent in parents for name in entry.names(parent)}
            for name, digest in files.items():
                part = f"{name}{PART_SUFFIX}"
                # In this order, because a download may end during the checks.
                is_coming = part in there and not locks.is_free(entry, shard_of(name))
                for copy in (part, name) if part in there else (name,) if name in there else ():
                    if (found := entry.stat(copy)) is not None:
                        size = digest.bytes if is_coming else found.size
                        yield Copy(found.modified, entry.path, copy, size, found.size)
                        break


def _origin(entry: Folder) -> Origin:
    return records.unseal(Origin, entry.read(ORIGIN), where=entry.at(ORIGIN))


def _remove(copy: Copy, locks: FileLocks) -> Literal["removed", "used", "lost"]:
    """Remove a copy if no process uses it and its store still has the original."""
    entry = Folder(copy.place)
    try:
        lock = locks.try_acquire(entry, copy.shard, exclusive=True)
        if lock is None:
            return "used"
        try:
            if not copy.name.endswith(PART_SUFFIX) and not _is_in_store(_origin(entry), copy.name):
                return "lost"
            entry.remove(copy.name)
            return "removed"
        finally:
            locks.release(lock)
    except (StorageError, DatasetError):  # whatever the error, the copy stays
        return "lost"


def _is_in_store(origin: Origin, name: str) -> bool:
    """Whether the store still has the original of a copy. A new process asks if this one was forked."""
    source = ObjectFolder(origin.url)
    if source.store.is_usable():
        return _has(source, name, origin.files[name].bytes)
    asked = json.dumps([origin.url, name, origin.files[name].bytes])
    line = [sys.executable, "-c", "from tokenmill.storage.shard_cache import main_check; main_check()", asked]
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


def _has(source: ObjectFolder, name: str, size: int) -> bool:
    found = source.store.find(source.key(name))
    return found is not None and found.size == size


def main_check() -> None:
    """The body of the process that `_is_in_store` starts."""
    url, name, size = json.loads(sys.argv[1])
    sys.exit(0 if _has(ObjectFolder(url), name, size) else 1)
