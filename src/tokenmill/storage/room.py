"""Room in a cache that all processes of a machine share: who gets it, and what has to go for it.

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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tokenmill import records
from tokenmill.errors import DatasetError, StorageError
from tokenmill.sizes import format_bytes
from tokenmill.storage.download import PART_SUFFIX
from tokenmill.storage.flock import Locks
from tokenmill.storage.folder import Folder
from tokenmill.storage.objects import ObjectFolder
from tokenmill.storage.output import Digest

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


def make_room(root: Folder, locks: Locks, wanted: Wanted, limit: int, let_go: Callable[[Copy], None]) -> bool:
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
                stack.enter_context(locks.alone(root, WANTED))
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


def _find_copies(root: Folder, locks: Locks) -> Iterator[Copy]:
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


def _remove(copy: Copy, locks: Locks) -> Literal["removed", "used", "lost"]:
    """Remove a copy if nobody uses it and its store still has the original."""
    entry = Folder(copy.place)
    try:
        lock = locks.try_to_take(entry, copy.shard, alone=True)
        if lock is None:
            return "used"
        try:
            if not copy.name.endswith(PART_SUFFIX) and not _can_be_had_again(_origin(entry), copy.name):
                return "lost"
            entry.remove(copy.name)
            return "removed"
        finally:
            locks.give_back(lock)
    except (StorageError, DatasetError):  # whatever it is, the copy stays
        return "lost"


def _can_be_had_again(origin: Origin, name: str) -> bool:
    """Whether its store has a file as it was; asked by a process of its own if this one was forked."""
    source = ObjectFolder(origin.url)
    if source.store.is_usable():
        return _has(source, name, origin.files[name].bytes)
    asked = json.dumps([origin.url, name, origin.files[name].bytes])
    line = [sys.executable, "-c", "from tokenmill.storage.room import main; main()", asked]
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


def _has(source: ObjectFolder, name: str, size: int) -> bool:
    found = source.store.find(source.key(name))
    return found is not None and found.size == size


def main() -> None:
    """What the process of its own does."""
    url, name, size = json.loads(sys.argv[1])
    sys.exit(0 if _has(ObjectFolder(url), name, size) else 1)
