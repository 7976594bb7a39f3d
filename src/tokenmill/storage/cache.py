"""Copies of a remote dataset's files on this machine: they arrive when they are needed, verified.

    CACHE/datasets/1f3b.../origin.json          whose copies these are
                           train/00000.bin      linked here once it hashes to what the manifest says
                           train/00000.bin.part arriving; a killed process leaves it to the next one
                           train/00000.lock     held alone by who brings or removes the shard, shared by who reads it

All processes of a machine share it: one brings a file, the others wait for its lock, which a process that
dies lets go of. Above its limit the oldest copies go, but none that is in use, and none that its
store would not give again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill import records
from tokenmill.errors import DatasetError, StorageError, TokenmillError, from_record, to_record
from tokenmill.sizes import format_bytes
from tokenmill.storage.download import download
from tokenmill.storage.folder import Folder
from tokenmill.storage.objects import ObjectFolder
from tokenmill.storage.output import Digest, explained

LIMIT = "TOKENMILL_CACHE_BYTES"
ORIGIN = "origin.json"
SHARDS_AHEAD = 3
_ENDINGS = (".bin", ".idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where copies come from, and what each of them must be."""

    url: str
    files: dict[str, Digest]


@dataclass(frozen=True, slots=True)
class CachedFolder(Folder):
    """A folder of copies."""

    copies: Copies = field(kw_only=True, repr=False)

    def need(self, names: Sequence[str]) -> list[str]:
        return self.copies.need(names)


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


class Copies:
    """The copies that this process uses, and those that it fetches ahead."""

    def __init__(self, place: str, source: ObjectFolder, origin: Origin, limit: int) -> None:
        self._folder = Folder(place)
        self._source = source
        self._origin = origin
        self._limit = limit
        self._shards = [name.removesuffix(".bin") for name in sorted(origin.files) if name.endswith(".bin")]
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._busy: set[int] = set()  # locks that are held alone, for a while
        self._held: dict[str, int] = {}  # shards, and a shared lock on each
        self._coming: dict[str, threading.Thread] = {}
        self._last = -1
        self._end = weakref.finalize(self, _close_all, self._held)

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes have their own hold on the files."""
        return Copies, (self._folder.path, self._source, self._origin, self._limit)

    def need(self, names: Sequence[str]) -> list[str]:
        """Have the files of one shard here until the process ends, or until room is needed; gives what had to go."""
        if self._process != os.getpid():
            self._after_fork()
        stem = _stem(names[0])
        unknown = [name for name in names if name not in self._origin.files]
        if unknown:
            raise DatasetError(f"{self._origin.url} has no {unknown[0]}", hint="open it again")
        gone: list[str] = []
        while stem not in self._held:
            fd = _lock(self._folder, stem, fcntl.LOCK_SH)
            if not self._missing(names):
                self._held[stem] = fd
                for name in names:
                    self._folder.touch(name)
            else:
                _unlock(fd)
                gone += self._bring_now(names)
        self._fetch_ahead(stem)
        return gone

    def _bring_now(self, names: Sequence[str]) -> list[str]:
        try:
            return self._bring(names, ours_too=True)
        except StorageError:
            if not any(thread.is_alive() for thread in self._coming.values()):
                raise
        for thread in self._coming.values():  # what was fetched ahead may take the room
            thread.join()
        return self._bring(names, ours_too=True)

    def _after_fork(self) -> None:
        """Threads do not come along with a fork, but locks do: what the parent holds must not be ours as well."""
        self._end.detach()
        for fd in (*self._busy, *self._held.values()):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._begin()

    @contextlib.contextmanager
    def _alone(self, folder: Folder, name: str) -> Iterator[None]:
        """Hold a lock that nobody else has."""
        fd = _lock(folder, name, fcntl.LOCK_EX)
        self._busy.add(fd)
        try:
            yield
        finally:
            self._busy.discard(fd)
            _unlock(fd)

    def _missing(self, names: Sequence[str]) -> list[str]:
        sizes = ((name, self._folder.stat(name)) for name in names)
        return [name for name, found in sizes if found is None or found.size != self._origin.files[name].bytes]

    def _bring(self, names: Sequence[str], *, ours_too: bool = False) -> list[str]:
        """Fetch files of a shard, unless another process has done so by the time that we may."""
        gone = []
        with self._alone(self._folder, _stem(names[0])):
            for name in self._missing(names):
                digest = self._origin.files[name]
                self._folder.remove_tree(name)
                gone += self._make_room(digest.bytes, name, ours_too=ours_too)
                fetch(self._source, self._folder, name, digest)
        return gone

    def _make_room(self, need: int, name: str, *, ours_too: bool) -> list[str]:
        """Remove the oldest copies until so many bytes fit; gives those that this process used."""
        root = Folder(os.path.dirname(self._folder.path))
        gone: list[str] = []
        with self._alone(root, "room"):
            copies = sorted(_copies(root))
            used = sum(size for _, size, _, _ in copies)
            # Without a limit of its own, a cache leaves a tenth of what it could have.
            limit = self._limit or (used + (root.free_bytes() or 0)) * 9 // 10
            if need > limit:
                raise StorageError(
                    f"{self._source.at(name)} has {format_bytes(need)}, and the cache takes {format_bytes(limit)}",
                    hint=f"give it more room with {LIMIT}, or another place with TOKENMILL_CACHE",
                )
            total = need + used
            for _, size, path, copy in copies:
                if total <= limit:
                    break
                ours = path == self._folder.path and _stem(copy) in (*self._held, *gone)
                if ours and not ours_too:
                    continue
                if ours and _stem(copy) in self._held:  # a map of it stays readable until it is dropped
                    _unlock(self._held.pop(_stem(copy)))
                    gone.append(_stem(copy))
                if _remove_copy(Folder(path), copy):
                    total -= size
            if total > limit:
                raise StorageError(
                    f"the cache of {format_bytes(limit)} is full of files in use or that cannot be had again",
                    hint=f"give it more room with {LIMIT}",
                )
        return gone

    def _fetch_ahead(self, shard: str) -> None:
        """Bring the next shards too, if all fits or they are read in their order."""
        if shard not in self._shards:
            return
        number, before = self._shards.index(shard), self._last
        self._last = number
        all_fits = not self._limit or sum(digest.bytes for digest in self._origin.files.values()) <= self._limit
        if not all_fits and number != before + 1:
            return
        self._coming = {name: thread for name, thread in self._coming.items() if thread.is_alive()}
        for following in self._shards[number + 1 : number + 1 + SHARDS_AHEAD if all_fits else number + 2]:
            if following not in self._coming and following not in self._held:
                thread = threading.Thread(target=self._bring_shard, args=(following,), daemon=True)
                self._coming[following] = thread
                thread.start()

    def _bring_shard(self, stem: str) -> None:
        # Whoever needs it will hear of it. When the program ends nobody does, and nothing can be begun any more.
        with contextlib.suppress(TokenmillError, RuntimeError):
            self._bring([f"{stem}{ending}" for ending in _ENDINGS])


def _close_all(held: dict[str, int]) -> None:
    while held:
        _unlock(held.popitem()[1])


def fetch(source: ObjectFolder, target: Folder, name: str, digest: Digest) -> None:
    """Download a file, in a process of its own if this one was forked: connections do not survive that."""
    target.make(os.path.dirname(name))
    if source.store.is_usable():
        download(source, target, name, digest)
        return
    asked = json.dumps([source.path, target.path, name, digest.bytes, digest.sha256])
    line = [sys.executable, "-c", "from tokenmill.storage.cache import main; main()", asked]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stdout.strip().splitlines()
        raise from_record(json.loads(said[-1])) if said else StorageError(f"{source.at(name)} cannot be fetched")


def main() -> None:
    """What the process of its own does."""
    url, place, name, size, sha256 = json.loads(sys.argv[1])
    try:
        download(ObjectFolder(url), Folder(place), name, Digest(bytes=size, sha256=sha256))
    except TokenmillError as error:
        sys.stdout.write(json.dumps(to_record(error)))
        sys.exit(1)


def _lock(folder: Folder, name: str, how: int) -> int:
    folder.make(os.path.dirname(name))
    with explained(folder.at(name)):
        fd = folder.fs.append(folder.at(f"{name}.lock"))
        try:
            fcntl.flock(fd, how)
        except OSError:
            os.close(fd)
            raise
    return fd


def _unlock(fd: int) -> None:
    """Let go of a lock, for processes that were forked meanwhile as well."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _copies(root: Folder) -> Iterator[tuple[int, int, str, str]]:
    """Time, size, folder and name of every copy in the cache."""
    for child in root.names():
        entry = Folder(root.at(child))
        with contextlib.suppress(DatasetError):  # not ours, or not yet
            for name in records.unseal(Origin, entry.read(ORIGIN), where=entry.at(ORIGIN)).files:
                found = entry.stat(name)
                if found is not None:
                    yield found.modified, found.size, entry.path, name


def _remove_copy(entry: Folder, name: str) -> bool:
    """Remove a copy if nobody uses it and its store still has the original."""
    origin = records.unseal(Origin, entry.read(ORIGIN), where=entry.at(ORIGIN))
    try:
        fd = _lock(entry, _stem(name), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except StorageError:
        return False
    try:
        source = ObjectFolder(origin.url)
        found = source.store.find(source.key(name)) if source.store.is_usable() else None
        if found is None or found.size != origin.files[name].bytes:
            return False
        entry.remove(name)
        return True
    except StorageError:
        return False
    finally:
        _unlock(fd)


def _stem(name: str) -> str:
    """What the files of a shard have in common; they come and go together."""
    return name.removesuffix(".bin").removesuffix(".idx")
