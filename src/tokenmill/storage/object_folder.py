"""A folder in an object store: `Storage` by the rules of a store; and resumable downloads of objects.

    create    a file in a local spool, because an object cannot grow
    publish   put it to its final key with a checksum, then compare what the store has
    write     put it only if the key is free (receipts, plan, manifest); if the answer was lost, look what is there
    link      a copy inside of the store; nothing is ever renamed

An object appears whole or not at all, so there are no temp names and nothing to sync.

`download` resumes where a killed process stopped, and trusts only the SHA-256:

    train/00000.bin.part   grows in order, range after range; a killed process leaves it
    train/00000.bin        linked when it is complete, has the right hash and is synced
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from tokenmill import records
from tokenmill.errors import DatasetError, MissingFileError, OutputError, StorageError
from tokenmill.storage.base import Url, parse_url
from tokenmill.storage.filesystem import LOCAL, FileStat, FileSystem, explained
from tokenmill.storage.local import Folder, Forget, R, SizeOf, T, check_itself, check_not_committed
from tokenmill.storage.object_store import WHOLE_BYTES, ObjectInfo, Store, all_at_once, open_store
from tokenmill.storage.output import TEMP_SUFFIX, Digest, DirectOutput, EventLog, Output
from tokenmill.storage.ranged_reader import stream

# Stores do not copy larger objects in one request.
MAX_COPY_BYTES = 5 << 30
# The store does the work of a copy; this process only waits.
COPIES_AT_ONCE = 256
# A conditional put whose answer was lost may not simply be repeated, as other requests are: what is there comes first.
_TRIES = 5
# How long to wait in a store without conditional puts until the last of several writers is visible.
_SETTLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ObjectFolder:
    """The objects below a prefix. Files grow in `spool`, a folder of this machine.

    A store that is not `conditional` replaces existing objects in any put, so it must have one writer only.
    """

    path: str
    fs: FileSystem = field(default=LOCAL, repr=False)
    spool: str = field(default="", kw_only=True)
    conditional: bool = field(default=True, kw_only=True)

    can_map: ClassVar[bool] = False
    links_are_free: ClassVar[bool] = False
    stat_is_cheap: ClassVar[bool] = False
    writes_are_fast: ClassVar[bool] = False
    has_spool: ClassVar[bool] = True
    holds_all: ClassVar[bool] = True

    @property
    def store(self) -> Store:
        return open_store(Url(self._url.scheme, self._url.bucket, ""))

    @property
    def _url(self) -> Url:
        return parse_url(self.path)

    def at(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def relative(self, path: str) -> str:
        return path.removeprefix(f"{self.path}/")

    def key(self, name: str) -> str:
        return "/".join(part for part in (self._url.key, name.strip("/")) if part)

    def to_record(self) -> dict[str, Any]:
        return {"path": self.path, "spool": self.spool, "conditional": self.conditional}

    def ready(self) -> tuple[ObjectFolder, str]:
        """The folder, after a test whether its store supports conditional puts."""
        folder = self._probed()
        note = f"{self.path}: this store ignores conditional puts, so nothing but this one build may write there"
        return folder, "" if folder.conditional else note

    def open_log(self, name: str) -> ObjectLog:
        return ObjectLog(self, name)

    def alone(self) -> AbstractContextManager[None]:
        """Do nothing: a store has no locks."""
        return contextlib.nullcontext()

    def need(self, names: Sequence[str], forget: Forget | None = None) -> AbstractContextManager[None]:
        """Do nothing: the files are not on this machine, except in a cache."""
        return contextlib.nullcontext()

    def _probed(self) -> ObjectFolder:
        key = self.key(f".build/probe-{secrets.token_hex(6)}")
        try:
            self.store.put(key, b"first")
            try:
                keeps = not self.store.put_new(key, b"second")
            except StorageError:  # it refuses the condition
                keeps = False
        finally:
            self.store.delete([key])
        return replace(self, conditional=keeps)

    def make(self, name: str = "") -> None:
        """Make the spool. A store has no folders."""
        check_itself(self.fs, self.spool)
        Folder(self.spool, self.fs).make()

    def create(self, name: str) -> SpooledOutput:
        self.make()
        temp = os.path.join(self.spool, f"{name.replace('/', '-')}.{secrets.token_hex(6)}{TEMP_SUFFIX}")
        with explained(temp):
            return SpooledOutput(name, temp, self.fs, self.fs.create(temp))

    def publish(self, outputs: Sequence[Output], *, committed: Callable[[], bool] = lambda: False) -> dict[str, Digest]:
        def put(output: Output) -> Digest:
            temp, digest = output.settle()
            self._put(temp, output.name, digest, committed)
            output.discard()
            return digest

        digests = all_at_once([partial(put, output) for output in outputs])
        return {output.name: digest for output, digest in zip(outputs, digests, strict=True)}

    def write(self, name: str, data: bytes, *, committed: Callable[[], bool] = lambda: False) -> Digest:
        digest = Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        failure = StorageError(f"{self.at(name)} is replaced again and again", hint="is a second build writing there?")
        for attempt in range(_TRIES):
            try:
                if self._put_new(name, data, digest.sha256):
                    return digest
            except StorageError as error:  # the answer was lost, so it may have been put or not
                failure = error
                time.sleep(0.1 * 2**attempt)
            there = self.store.read(self.key(name), max_bytes=max(1 << 30, len(data)))
            if there == data:
                return digest
            if there is not None:
                self._quarantine_conflict(name, committed)
        raise failure

    def write_parts(
        self, name: str, parts: Iterable[bytes], *, committed: Callable[[], bool] = lambda: False
    ) -> Digest:
        """Publish one file from its parts, in one put: only that can be conditional."""
        return self.write(name, b"".join(parts), committed=committed)

    def replace(self, name: str, data: bytes) -> None:
        self.store.put(self.key(name), data, sha256=hashlib.sha256(data).hexdigest())

    def link(self, name: str, new: str, digest: Digest) -> None:
        there = self.store.find_copy(self.key(new), digest.bytes)
        if there is not None:
            if self._is(there, digest):
                return
            self.quarantine(new)
        try:
            self._copy(
                ObjectInfo(self.key(name), digest.bytes, etag="", modified=0, sha256=digest.sha256), self.key(new)
            )
        except FileNotFoundError:
            raise StorageError(f"{self.at(name)} is gone", hint="run the same command again") from None
        self.check(new, digest)

    def link_all(self, links: Iterable[tuple[str, str, Digest]]) -> None:
        for _ in self.each(lambda link: self.link(*link), links, ahead=COPIES_AT_ONCE):
            pass

    def each(self, ask: Callable[[T], R], items: Iterable[T], *, ahead: int = 64) -> Iterator[R]:
        """The answer of `ask` for each item, in order, with up to `ahead` requests in flight."""
        pool = ThreadPoolExecutor(ahead, thread_name_prefix="tokenmill-each")
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(ask, item))
                if len(waiting) == ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def announce(self, items: Iterable[T], name: Callable[[T], str], *, ahead: int = 128) -> Iterator[T]:
        """The items. Objects are not read ahead into memory."""
        return iter(items)

    def claim(self, name: str, data: bytes) -> bool:
        if self.conditional:
            return self._put_new(name, data, "")
        if self.exists(name):
            return False
        self.replace(name, data)
        time.sleep(_SETTLE_SECONDS)
        return self.store.read(self.key(name), max_bytes=1 << 20) == data

    def touch(self, name: str) -> None:
        """Put a small object again, unless another process has replaced it."""
        found = self.store.find(self.key(name))
        data = self.store.read(self.key(name), max_bytes=1 << 20)
        if found is not None and data is not None:
            if self.conditional:
                self.store.put_over(found, data)
            else:
                self.replace(name, data)

    def back_off(self) -> None:
        self.store.back_off()

    def sync(self, name: str) -> None:
        """Do nothing: an object is durable once it is put."""

    def exists(self, name: str) -> bool:
        return self.stat(name) is not None

    def check_no_links(self, names: Iterable[str]) -> None:
        """Do nothing: a store has no links."""

    def check_place(self) -> None:
        found = self.stat("")
        if found is not None and not found.is_folder:
            raise OutputError(f"{self.path} is an object", hint="choose another output")

    def stat(self, name: str) -> FileStat | None:
        """Size of an object. A prefix with objects below it counts as a folder."""
        found = self.store.find(self.key(name)) if self.key(name) else None
        if found is not None:
            return _stat(found.size, found.modified)
        return _stat(0, 0, is_folder=True) if self.store.has_children(self.key(name)) else None

    def names(self, name: str = "") -> list[str]:
        prefixes, objects = self.store.children(self.key(name))
        found = {prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes}
        return sorted(found | {item.key.rpartition("/")[2] for item in objects if item.key != self.key(name)})

    def sizes(self, name: str) -> dict[str, int]:
        return {item.key.rpartition("/")[2]: item.size for item in self.store.children(self.key(name))[1]}

    def size_of(self, name: str) -> int | None:
        found = self.stat(name)
        return found.size if found is not None and found.is_file else None

    def sizes_in(self, parents: Iterable[str]) -> SizeOf:
        listed = {parent: self.sizes(parent) for parent in parents}

        def size_of(name: str) -> int | None:
            parent, _, child = name.rpartition("/")
            return listed[parent].get(child) if parent in listed else self.size_of(name)

        return size_of

    def read(self, name: str, *, max_bytes: int = 1 << 30) -> bytes:
        data = self.store.read(self.key(name), max_bytes)
        if data is None:
            raise self._missing(name)
        return data

    def part(self, name: str, start: int, size: int) -> bytes:
        found = self.store.find(self.key(name))
        if found is None:
            raise self._missing(name)
        stop = min(start + size, found.size)
        return bytes(self.store.fetch(found.key, start, stop, found.etag)) if start < stop else b""

    def blocks(self, name: str, *, max_bytes: int | None = None, cold: bool = False) -> Generator[memoryview]:
        found = self.store.find(self.key(name))
        if found is None:
            raise self._missing(name)
        if max_bytes is not None and found.size > max_bytes:
            raise DatasetError(f"{self.at(name)} has {found.size} bytes, too many", hint="the object is damaged")
        yield from stream(self.store, found)

    def digest(self, name: str, *, cold: bool = False) -> Digest:
        size, sha = 0, hashlib.sha256()
        for block in self.blocks(name):
            size += len(block)
            sha.update(block)
        return Digest(bytes=size, sha256=sha.hexdigest())

    def quarantine(self, name: str) -> str:
        kept = f".build/quarantine/{name.replace('/', '-')}.{secrets.token_hex(4)}"
        found = self.store.find(self.key(name))
        if found is not None:
            with contextlib.suppress(FileNotFoundError):  # an object that is already gone needs no quarantine
                self._copy(found, self.key(kept))
                self._check(kept, found.size, found.sha256)
            self.store.delete([found.key])
        return kept

    def remove(self, name: str) -> None:
        self.store.delete([self.key(name)])

    def remove_tree(self, name: str) -> None:
        self.remove(name)
        self.store.delete([found.key for found in self.store.under(self.key(name))])

    def remove_all(self, names: Sequence[str]) -> None:
        self.store.delete([self.key(name) for name in names])

    def remove_empty(self, name: str) -> None:
        """Do nothing: a prefix without objects does not exist."""

    def sweep(self, name: str = "") -> None:
        """Remove temp files from the spool. A store has none."""
        if not name:
            check_itself(self.fs, self.spool)
            Folder(self.spool, self.fs).sweep()

    def free_bytes(self) -> int | None:
        return None

    def check(self, name: str, digest: Digest) -> None:
        """Raise `StorageError` unless the store has an object with this digest."""
        self._check(name, digest.bytes, digest.sha256)

    def _put(self, path: str, name: str, digest: Digest, committed: Callable[[], bool]) -> None:
        """Put a file under its final key, unless the same bytes are stored there already."""
        if not self._put_first(path, name, digest):
            there = self.store.find(self.key(name))
            if there is not None:
                if there.size == digest.bytes and self.digest(name) == digest:
                    return
                self._quarantine_conflict(name, committed)
            self.store.put(self.key(name), Path(path), sha256=digest.sha256)
        self._check(name, digest.bytes, digest.sha256)

    def _put_first(self, path: str, name: str, digest: Digest) -> bool:
        """Put a file if its key is free, without asking first; False if the key is taken, or may be."""
        if not self.conditional or digest.bytes > WHOLE_BYTES:
            return False
        try:
            return self.store.put_new(self.key(name), Path(path), sha256=digest.sha256)
        except StorageError:  # the answer was lost, so it may have been put or not
            return False

    def _put_new(self, name: str, data: bytes, sha256: str) -> bool:
        if self.conditional:
            return self.store.put_new(self.key(name), data, sha256=sha256)
        if self.store.find(self.key(name)) is not None:
            return False
        self.store.put(self.key(name), data, sha256=sha256)
        return True

    def _copy(self, found: ObjectInfo, new: str) -> None:
        if found.size <= MAX_COPY_BYTES:
            self.store.copy(found.key, new)
        else:
            self.store.put_stream(new, lambda: stream(self.store, found), sha256=found.sha256)

    def _is(self, found: ObjectInfo, digest: Digest) -> bool:
        """Whether an object has these bytes. The SHA-256 of its writer is trusted; without one, the object is read."""
        if found.size != digest.bytes or found.sha256:
            return (found.size, found.sha256) == (digest.bytes, digest.sha256)
        return self.digest(self._name(found.key)) == digest

    def _name(self, key: str) -> str:
        return key.removeprefix(f"{self._url.key}/")

    def _check(self, name: str, size: int, sha256: str) -> None:
        """Compare with what the store has now."""
        found = self.store.find_copy(self.key(name), size)
        if found is None or found.size != size or (sha256 and found.sha256 not in ("", sha256)):
            seen = "no object" if found is None else f"{found.size} bytes"
            raise StorageError(
                f"{self.at(name)}: {size} bytes were written, and the store has {seen}",
                hint="is a second build writing there?",
            )

    def _quarantine_conflict(self, name: str, committed: Callable[[], bool]) -> None:
        check_not_committed(self.at(name), committed)
        self.quarantine(name)

    def _missing(self, name: str) -> MissingFileError:
        return MissingFileError(f"{self.at(name)} is missing", hint="tokenmill repair restores the files of a dataset")


class SpooledOutput(DirectOutput):
    """A file that grows in the spool. It is useless after a crash, so it is not synced."""

    def settle(self) -> tuple[str, Digest]:
        assert self._fd is not None, "settled twice"
        fd, self._fd = self._fd, None
        with explained(self._temp):
            self._fs.close(fd)
        return self._temp, Digest(bytes=self._size, sha256=self._sha.hexdigest())


def _stat(size: int, modified: int, *, is_folder: bool = False) -> FileStat:
    return FileStat(size=size, modified=modified, is_file=not is_folder, is_folder=is_folder, inode=(0, 0))


_PUT_SECONDS = 60.0
_KEPT_BYTES = 1 << 23
_MAX_LOG_BYTES = 2 * _KEPT_BYTES


class ObjectLog(EventLog):
    """An event log in a store. An object cannot grow, so the last megabytes are kept in memory and put every minute."""

    def __init__(self, folder: ObjectFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._lines = bytearray()
        with contextlib.suppress(DatasetError):  # it does not exist yet
            self._lines += folder.read(name, max_bytes=_MAX_LOG_BYTES)
        self._put_at = time.monotonic()

    def add(self, event: dict[str, Any]) -> None:
        self._lines += records.canonical(event) + b"\n"
        if len(self._lines) > _MAX_LOG_BYTES:
            del self._lines[: self._lines.index(b"\n", len(self._lines) - _KEPT_BYTES) + 1]
        if time.monotonic() - self._put_at > _PUT_SECONDS:
            self._put()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put()

    def _put(self) -> None:
        self._put_at = time.monotonic()
        with contextlib.suppress(StorageError):
            self._folder.replace(self._name, bytes(self._lines))


PART_SUFFIX = ".part"
# Called with the number of bytes that have arrived.
Tell = Callable[[int], None]


def download(source: ObjectFolder, target: Folder, name: str, digest: Digest, tell: Tell = lambda _: None) -> None:
    """Download the object `name` to a file of the same name. Another digest is a `DatasetError`.

    The name is durable once the caller has synced the folder.
    """
    for is_last in (False, True):
        output = PartOutput(target, name, digest.bytes)
        tell(output.size)
        try:
            with contextlib.closing(_blocks(source, name, digest.bytes, output.size)) as blocks:
                for block in blocks:
                    output.write(block)
                    tell(len(block))
            if output.digest() == digest:
                target.publish_unsynced(output)
                return
        finally:
            output.close()
        # The rest of an earlier process may be torn, or bytes changed in transit: once more, from the start.
        tell(-digest.bytes)
        output.discard()
        if is_last:
            raise DatasetError(
                f"{source.at(name)} has the sha256 {output.digest().sha256}, not {digest.sha256}",
                hint=f"tokenmill verify {source.path}",
            )


def begin(target: Folder, name: str) -> None:
    """Create the partial file of a download, so that other processes see that it has begun."""
    target.make(os.path.dirname(name))
    part = f"{name}{PART_SUFFIX}"
    if not target.exists(part):
        with explained(target.at(part)):
            target.fs.close(target.append(part))


def _blocks(source: ObjectFolder, name: str, size: int, start: int) -> Generator[memoryview]:
    """The rest of an object that must have this size. The store is asked for the size only if that fails."""
    from tokenmill.storage.object_store import ObjectInfo

    try:
        yield from stream(source.store, ObjectInfo(source.key(name), size, etag="", modified=0), start)
    except StorageError:
        found = source.store.find(source.key(name))
        if found is not None and found.size == size:
            raise
        seen = "is missing" if found is None else f"has {found.size} bytes, not {size}"
        raise DatasetError(f"{source.at(name)} {seen}", hint=f"tokenmill verify {source.path}") from None


class PartOutput(DirectOutput):
    """A partial file that is appended to, by several processes one after another."""

    def __init__(self, folder: Folder, name: str, max_bytes: int) -> None:
        part = f"{name}{PART_SUFFIX}"
        there = folder.stat(part)
        if there is not None and (not there.is_file or there.size > max_bytes):
            folder.remove_tree(part)
        super().__init__(name, folder.at(part), folder.fs, folder.append(part))
        for block in folder.blocks(part):
            self._sha.update(block)
            self._size += len(block)

    @property
    def size(self) -> int:
        return self._size

    def digest(self) -> Digest:
        return Digest(bytes=self._size, sha256=self._sha.hexdigest())

    def close(self) -> None:
        """Stop writing. The partial file stays for the next process."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._fs.close(self._fd)
            self._fd = None
