"""Copies of a remote dataset's files on this machine: they arrive when they are needed, verified.

    CACHE/datasets/1f3b.../origin.json          whose copies these are
                           train/00000.bin      linked here once it hashes to what the manifest says
                           train/00000.bin.part arriving; a killed process leaves it to the next one
                           train/00000.lock     held alone by who brings or removes the shard, shared by who maps it

All processes of a machine share it: one brings a file, the others wait for its lock, which a process that
dies lets go of. Above its limit copies have to go; `room` says which, and who waits for whom.

Room in a cache that all processes of a machine share: who gets it, and what has to go for it.

    CACHE/datasets/room.lock             held by who makes room: one process at a time
                   wanted.lock           held by who waits for others to let go; they see it, and open nothing meanwhile
                   1f3b.../origin.json   whose copies these are

What nobody has mapped goes first, then what only this process has, the oldest first each time. If others have the
rest, they are asked, and let go of all that they do not open or bring at that moment. So a copy goes only when
nobody holds it any more; but an array that a program keeps of it stays readable, and takes room till it is
dropped. What its store would not give again never goes.

Nobody waits in a circle. Who makes room waits for those that open or bring a shard, and these wait for
nobody: who brings one has its room already. Whoever else needs room, or wants to open a shard, waits in turn and
holds nothing that it would not let go of. So a cache that has room for one shard for each process that brings
one at the same time is enough. If all of it stands still for long, whoever waits gives up.
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
# FileLocks that a process holds at most, however many files it may open.
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
    """The folder of copies of a dataset that is told from others at the same URL by its `identity`."""
    place = os.path.join(cache, "datasets", records.digest([source.path, identity])[:16])
    origin = Origin(url=source.path, files=files)
    folder = Folder(place)
    folder.make()
    folder.write(ORIGIN, records.seal(origin))
    return CachedFolder(place, copies=Copies(place, source, origin, limit))


@dataclass(frozen=True, slots=True)
class Hold:
    """A shared lock on a shard. Whoever mapped the shard is told to `forget` it; what nobody mapped is just kept."""

    lock: int
    forget: weakref.WeakMethod[Forget] | None

    def tell(self, shard: str) -> None:
        forget = None if self.forget is None else self.forget()
        if forget is not None:
            forget([shard])


class Copies:
    """The copies that this process uses, and those that it fetches ahead."""

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
        self._changing = threading.Lock()  # what is held, and who looks after it
        self._held: dict[str, Hold] = {}
        self._is_watched = False
        self._coming: dict[str, threading.Thread] = {}
        self._last = -1
        self._end = weakref.finalize(self, self._locks.release_all, self._process)

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes have their own hold on the files."""
        return Copies, (self._folder.path, self._source, self._origin, self._limit)

    @contextlib.contextmanager
    def need(self, names: Sequence[str], forget: Forget | None) -> Iterator[None]:
        """Have the files of one shard here for as long as a with block, which maps them.

        After that they stay until somebody needs the room: then who mapped them must `forget` the shard. Without
        `forget` they stay until the process ends.
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
            )  # who waits for room goes first
            lock = self._locks.acquire(self._folder, shard_of(names[0]), exclusive=False)
            if not self._missing(names):
                return lock
            self._locks.release(lock)
            brought = self._bring(names, urgent=True)
            if brought is None:  # another process brings it, or has just looked whether it is there
                time.sleep(LOOK_SECONDS / 100)
                continue
            self._locks.share(brought)
            if not self._missing(names):
                return brought
            self._locks.release(brought)

    def _missing(self, names: Sequence[str]) -> list[str]:
        sizes = ((name, self._folder.stat(name)) for name in names)
        return [name for name, found in sizes if found is None or found.size != self._origin.files[name].bytes]

    def _bring(self, names: Sequence[str], *, urgent: bool) -> int | None:
        """Fetch what is missing of a shard; gives the lock on it. None if another one has it, or there is no room."""
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
        """Have room for these files, and let others see that it is taken."""
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
            self._held[shard] = hold  # the last of all: those that were mapped first go first
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
        """Let go of everything if somebody waits for room; False if there is nothing that one could let go of."""
        with self._changing:
            held = [shard for shard, hold in self._held.items() if hold.forget is not None]
            self._is_watched = bool(held)
        with contextlib.suppress(StorageError):  # whoever needs the folder will hear of it
            if not self._locks.is_free(self._root, WANTED):
                self._let_go_of(held)
        return bool(held)

    def _after_fork(self) -> None:
        """Threads do not come along with a fork, but locks do: what the parent holds must not be ours as well."""
        self._end.detach()
        self._locks.close_inherited()
        for shard, hold in self._held.items():
            hold.tell(shard)
        self._begin()

    def _fetch_ahead(self, shard: str) -> None:
        """Bring the next shards too, if all fits or they are read in their order."""
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
        # Whoever needs it will hear of it. When the program ends nobody does, and nothing can be begun any more.
        with contextlib.suppress(TokenmillError, RuntimeError):
            lock = self._bring([f"{shard}{ending}" for ending in _ENDINGS], urgent=False)
            if lock is not None:
                self._locks.release(lock)


# All of this process: each lock is an open file.
_LIVE: weakref.WeakSet[Copies] = weakref.WeakSet()


def _max_held() -> int:
    """How many shards each dataset of this process may hold: all of them together a quarter of the files it may open.

    The next use of one that was let go of maps it again.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MAX_LOCKS
    return max(1, min(limit // 4, _MAX_LOCKS) // len(_LIVE))


def _watch(copies: weakref.ref[Copies]) -> None:
    """Let a process answer those that wait for room, whatever else it does, as long as it holds something."""
    while (found := copies()) is not None and found.answer():
        del found
        time.sleep(LOOK_SECONDS)


def fetch(source: ObjectFolder, target: Folder, name: str, digest: Digest) -> None:
    """Download a file, in a process of its own if this one was forked: connections do not survive that."""
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
    """What the process of its own does."""
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
# How long nothing may change in a full cache: longer than a store that does not answer is asked.
PATIENCE_SECONDS = 300.0
# How often those that hold copies look whether somebody waits, and who waits whether they let go.
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where copies come from, and what each of them must be."""

    url: str
    files: dict[str, Digest]


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """A file of the cache, or what has come of it: `size_now` bytes so far, and `size` in the end."""

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
    """Files of a shard that are to come, whose lock is held alone. Unless it is urgent, nobody lets go for it."""

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
    """Remove copies until there is room for what is wanted; False if there is none, and no urgency.

    Called by who holds the lock on room; `let_go` is how this process does so.
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
            time.sleep(LOOK_SECONDS / 2)


def shard_of(name: str) -> str:
    """What the files of a shard have in common; they are locked together."""
    return name.removesuffix(PART_SUFFIX).removesuffix(".bin").removesuffix(".idx")


def _allowed(root: Folder, copies: list[Copy], wanted: Wanted, limit: int) -> int:
    """How many bytes the cache takes. Without a limit of its own, it leaves a tenth of what it could have."""
    allowed = limit or (sum(copy.size_now for copy in copies) + (root.free_bytes() or 0)) * 9 // 10
    if wanted.size > allowed:
        raise StorageError(
            f"{wanted.url} has {format_bytes(wanted.size)}, and the cache takes {format_bytes(allowed)}",
            hint=f"give it more room with {LIMIT}, or another place with TOKENMILL_CACHE",
        )
    return allowed


def _no_room(wanted: Wanted, allowed: int, *, held: int, lost: int) -> StorageError:
    return StorageError(
        f"the cache of {format_bytes(allowed)} has no room for {format_bytes(wanted.size)} of {wanted.url}: "
        f"{format_bytes(held - lost)} are in use, {format_bytes(lost)} cannot be had again",
        hint=f"give it {format_bytes(wanted.size + held)} or more with {LIMIT}, or let fewer processes share it",
    )


def _find_copies(root: Folder, locks: FileLocks) -> Iterator[Copy]:
    """Every copy in the cache, and what is on its way or was left there by a process that died."""
    for child in root.names():
        entry = Folder(root.at(child))
        with contextlib.suppress(DatasetError):  # not ours, or not yet
            files = _origin(entry).files
            parents = {os.path.dirname(name) for name in files}
            there = {os.path.join(parent, name) for parent in parents for name in entry.names(parent)}
            for name, digest in files.items():
                part = f"{name}{PART_SUFFIX}"
                # In this order, for it may be done while one looks.
                is_coming = part in there and not locks.is_free(entry, shard_of(name))
                for copy in (part, name) if part in there else (name,) if name in there else ():
                    if (found := entry.stat(copy)) is not None:
                        size = digest.bytes if is_coming else found.size
                        yield Copy(found.modified, entry.path, copy, size, found.size)
                        break


def _origin(entry: Folder) -> Origin:
    return records.unseal(Origin, entry.read(ORIGIN), where=entry.at(ORIGIN))


def _remove(copy: Copy, locks: FileLocks) -> Literal["removed", "used", "lost"]:
    """Remove a copy if nobody uses it and its store still has the original."""
    entry = Folder(copy.place)
    try:
        lock = locks.try_acquire(entry, copy.shard, exclusive=True)
        if lock is None:
            return "used"
        try:
            if not copy.name.endswith(PART_SUFFIX) and not _can_be_had_again(_origin(entry), copy.name):
                return "lost"
            entry.remove(copy.name)
            return "removed"
        finally:
            locks.release(lock)
    except (StorageError, DatasetError):  # whatever it is, the copy stays
        return "lost"


def _can_be_had_again(origin: Origin, name: str) -> bool:
    """Whether its store has a file as it was; asked by a process of its own if this one was forked."""
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
    """What the process of its own does."""
    url, name, size = json.loads(sys.argv[1])
    sys.exit(0 if _has(ObjectFolder(url), name, size) else 1)
