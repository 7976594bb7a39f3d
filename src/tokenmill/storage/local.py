"""A local folder, and the one way in which its files become durable.

    create  temp file next to the target, exclusive, mode 0600
    write   all of it, hashed in memory
    publish fsync, close, link to the final name without overwriting, unlink temp, fsync the folder

So a file under its final name is whole, or a leftover of a power cut, which the digests in receipts and the manifest
reveal. `publish` takes several files at once, so that they share one fsync of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from tokenmill.errors import DatasetError, DeterminismError, MissingFileError, OutputError, StorageError
from tokenmill.storage.filesystem import LOCAL, FileStat, FileSystem, explained, storage_error
from tokenmill.storage.output import TEMP_SUFFIX, Digest, DirectOutput, EventLog, Output, is_temp

T = TypeVar("T")
R = TypeVar("R")

SizeOf = Callable[[str], int | None]
# Drops the memory maps of some shards. Any thread may call it.
Forget = Callable[[Sequence[str]], None]

BLOCK = 1 << 20
_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder on a file system: `Storage` on this machine."""

    path: str
    fs: FileSystem = field(default=LOCAL, repr=False)

    can_map: ClassVar[bool] = True
    links_are_free: ClassVar[bool] = True
    stat_is_cheap: ClassVar[bool] = True
    writes_are_fast: ClassVar[bool] = True
    has_spool: ClassVar[bool] = False

    def at(self, name: str) -> str:
        return f"{self.path}/{name}"

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.path)

    def to_record(self) -> dict[str, Any]:
        """This folder as plain data, for `from_record` in another process of this machine."""
        return {"path": self.path}

    def ready(self) -> tuple[Folder, str]:
        """The folder itself: two writers cannot overwrite each other, because a link never replaces a file."""
        return self, ""

    def open_log(self, name: str) -> EventLog:
        """A log of events to append to."""
        return EventLog(self, name)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold a lock of the operating system on the folder; a process that dies releases it."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except _NOT_THERE:
            yield
            return
        try:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def make(self, name: str = "") -> None:
        """Make the folder and its missing parents, each one durable."""
        if name:
            check_parents(self.fs, self.path, f"{name}/")
        path = self.at(name).rstrip("/") if name else self.path
        missing = []
        while path and not is_there(self.fs, path):
            missing.append(path)
            path = os.path.dirname(path)
        if path and not is_folder(self.fs, path):
            hint = "move it away, then run the same command again" if name else "choose another folder"
            raise StorageError(f"{path} is not a folder", hint=hint)
        if path:
            self._sync_parent(path)
        for folder in reversed(missing):
            try:
                with contextlib.suppress(FileExistsError), explained(folder, but=(FileExistsError, NotADirectoryError)):
                    self.fs.mkdir(folder)
            except NotADirectoryError:
                raise StorageError(f"{folder}: a part of this path is a file", hint="choose another place") from None
            with explained(folder):
                self.fs.fsync_folder(os.path.dirname(folder) or ".")

    def create(self, name: str) -> DirectOutput:
        """Start a new file; it appears under its name only when it is published."""
        with explained(self.at(name)):
            return self._create(name)

    def _create(self, name: str) -> DirectOutput:
        check_parents(self.fs, self.path, name)
        temp = f"{self.at(name)}.{secrets.token_hex(6)}{TEMP_SUFFIX}"
        return DirectOutput(name, temp, self.fs, self.fs.create(temp))

    def publish(self, outputs: Sequence[Output], *, committed: Callable[[], bool] = lambda: False) -> dict[str, Digest]:
        """Make files durable under their final names, all before the folder's fsync.

        An existing file with the same digest counts as success. One with another digest is a leftover and goes to
        quarantine, unless a receipt has `committed` it: then the work is not deterministic, and the build must stop.
        """
        digests = {output.name: self.publish_unsynced(output, committed=committed) for output in outputs}
        for folder in sorted({os.path.dirname(self.at(output.name)) for output in outputs}):
            with explained(folder):
                self.fs.fsync_folder(folder)
        return digests

    def publish_unsynced(self, output: Output, *, committed: Callable[[], bool] = lambda: False) -> Digest:
        """Publish one of many files. Its bytes are durable; its name is once the caller has synced the folder."""
        temp, digest = output.settle()
        self._take_name(temp, output.name, digest, committed)
        return digest

    def write(self, name: str, data: bytes, *, committed: Callable[[], bool] = lambda: False) -> Digest:
        """Publish one small file."""
        return self.write_parts(name, (data,), committed=committed)

    def write_parts(
        self, name: str, parts: Iterable[bytes], *, committed: Callable[[], bool] = lambda: False
    ) -> Digest:
        """Publish one file from its parts, which need not be in memory together."""
        output = self.create(name)
        try:
            for part in parts:
                output.write(part)
            return self.publish([output], committed=committed)[name]
        except BaseException:
            output.discard()
            raise

    def replace(self, name: str, data: bytes) -> None:
        """Publish a small file in place of its older version."""
        output = self.create(name)
        try:
            output.write(data)
            temp, _ = output.settle()
            with explained(self.at(name)):
                self.fs.rename(temp, self.at(name))
                self.fs.fsync_folder(os.path.dirname(self.at(name)))
        except BaseException:
            output.discard()
            raise

    def link(self, name: str, new: str, digest: Digest) -> None:
        """Give a published file with this digest a second name. A leftover of that name goes to quarantine."""
        self._take_name(self.at(name), new, digest, lambda: False, keep=True)

    def link_all(self, links: Iterable[tuple[str, str, Digest]]) -> None:
        for link in links:
            self.link(*link)

    def each(self, ask: Callable[[T], R], items: Iterable[T], *, ahead: int = 64) -> Iterator[R]:
        """The answer of `ask` for each item, in order."""
        return map(ask, items)

    def announce(self, items: Iterable[T], name: Callable[[T], str], *, ahead: int = 128) -> Iterator[T]:
        """The items, in order. The file of each is read ahead into memory, `ahead` items before its turn."""
        announced: deque[T] = deque()
        for item in items:
            with contextlib.suppress(OSError):  # its reader reports the error
                self.fs.expect(self.at(name(item)))
            announced.append(item)
            if len(announced) > ahead:
                yield announced.popleft()
        yield from announced

    def claim(self, name: str, data: bytes) -> bool:
        """Publish a small file unless it exists, without its durability; False if another process was faster."""
        try:
            with explained(self.at(name), but=(FileNotFoundError,)):
                output = self._create(name)
        except FileNotFoundError:  # another process has removed the folder
            self.make(os.path.dirname(name))
            return False
        try:
            output.write(data)
            temp, _ = output.settle()
            self.fs.link(temp, self.at(name))
        except (FileExistsError, FileNotFoundError):  # another process was faster, or swept our temp file
            return False
        except OSError:
            self.replace(name, data)  # a file system without links; the name was free just before
        finally:
            output.discard()
        return True

    def append(self, name: str) -> int:
        """Open a file for appending. A file with a second name may belong to another folder, and is replaced."""
        check_parents(self.fs, self.path, name)
        with explained(self.at(name)):
            try:
                return self.fs.append(self.at(name))
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
            self._remove(name)
            return self.fs.append(self.at(name))

    def touch(self, name: str) -> None:
        """Renew the time of a file: a heartbeat."""
        check_parents(self.fs, self.path, name)
        with contextlib.suppress(OSError):
            self.fs.touch(self.at(name))

    def back_off(self) -> None:
        """Do nothing: a disk always answers."""

    @property
    def holds_all(self) -> bool:
        """Whether all files may be here at the same time."""
        return True

    def need(self, names: Sequence[str], forget: Forget | None = None) -> contextlib.AbstractContextManager[None]:
        """Do nothing: the files are on this machine."""
        return contextlib.nullcontext()

    def sync(self, name: str) -> None:
        """Make the names inside a folder durable."""
        with explained(self.at(name)):
            self.fs.fsync_folder(self.at(name))

    def exists(self, name: str) -> bool:
        return is_there(self.fs, self.at(name))

    def check_no_links(self, names: Iterable[str]) -> None:
        """Raise `StorageError` if one of these folders, or one in .build, is a link. Changes nothing."""
        check_folders(self.fs, self.path, names)

    def check_place(self) -> None:
        """Raise `OutputError` if the path exists and is neither a folder nor a link to one."""
        if not is_there(self.fs, self.path) or is_folder(self.fs, self.path):
            return
        with explained(self.path):
            is_file = self.fs.stat(self.path).is_file
        if is_file:
            raise OutputError(f"{self.path} is a file", hint="choose another output")
        raise OutputError(
            f"{self.path} is neither a folder nor a link to one",
            hint="if it is a link to another disk, mount that disk; otherwise choose another output",
        )

    def stat(self, name: str) -> FileStat | None:
        """Size and kind of a file or folder; None if it does not exist."""
        path = self.at(name)
        try:
            return self.fs.stat(path)
        except _NOT_THERE:
            return None
        except OSError as error:
            raise storage_error(error, path) from None

    def size_of(self, name: str) -> int | None:
        """The size of a plain file; None if it does not exist."""
        found = self.stat(name)
        return found.size if found is not None and found.is_file else None

    def sizes_in(self, parents: Iterable[str]) -> SizeOf:
        """`size_of`: asking file by file is fast enough here."""
        return self.size_of

    def names(self, name: str = "") -> list[str]:
        try:
            with explained(self.at(name), but=_NOT_THERE):
                return self.fs.names(self.at(name))
        except _NOT_THERE:
            return []

    def sizes(self, name: str) -> dict[str, int]:
        """The files in a folder, and the size of each."""
        found = ((child, self.stat(os.path.join(name, child))) for child in self.names(name))
        return {child: stat.size for child, stat in found if stat is not None and stat.is_file}

    def read(self, name: str, *, max_bytes: int = 1 << 30) -> bytes:
        """All of a small file."""
        path = self.at(name)
        found = self._readable(name, max_bytes)
        try:
            fd = self._open(path)
            try:
                # The buffer has one byte more, so a read of exactly the size has reached the end of the file.
                buffer = memoryview(bytearray(found.size + 1))
                at = self.fs.read(fd, buffer)
                while at != found.size and (count := self.fs.read(fd, buffer[at:])):
                    at += count
            finally:
                self._close(fd)
        except OSError as error:
            raise storage_error(error, path) from None
        # A longer file may have replaced it in the meantime.
        return bytes(buffer[:at]) if at <= found.size else self.read(name, max_bytes=max_bytes)

    def part(self, name: str, start: int, size: int) -> bytes:
        """These bytes of a file; fewer where it ends."""
        path = self.at(name)
        with explained(path):
            size = min(size, max(0, self._readable(name, None).size - start))
            fd = self._open(path)
            try:
                self.fs.seek(fd, start)
                buffer, at = memoryview(bytearray(size)), 0
                while at < size and (count := self.fs.read(fd, buffer[at:])):
                    at += count
            finally:
                self._close(fd)
        return bytes(buffer[:at])

    def blocks(self, name: str, *, max_bytes: int | None = None, cold: bool = False) -> Generator[memoryview]:
        """A file's bytes, block by block; each block is valid until the next one."""
        path = self.at(name)
        with explained(path):
            found = self._readable(name, max_bytes)
            fd = self._open(path)
            try:
                if cold:
                    self.fs.forget(fd)
                buffer = memoryview(bytearray(min(BLOCK, max(found.size, 1))))
                while count := self.fs.read(fd, buffer):
                    yield buffer[:count]
            finally:
                self._close(fd)

    def _readable(self, name: str, max_bytes: int | None) -> FileStat:
        """The stat of a plain file of at most `max_bytes`. Anything else is an error."""
        found, path = self.stat(name), self.at(name)
        if found is None:
            raise MissingFileError(f"{path} is missing", hint="tokenmill repair restores the files of a dataset")
        if not found.is_file:
            raise DatasetError(f"{path} is not a plain file", hint="remove it: tokenmill reads no links or devices")
        if max_bytes is not None and found.size > max_bytes:
            raise DatasetError(f"{path} has {found.size} bytes, too many", hint="the file is damaged")
        return found

    def _open(self, path: str) -> int:
        try:
            return self.fs.open(path)
        except FileNotFoundError:
            raise MissingFileError(f"{path} is gone", hint="is another process using this folder?") from None

    def _close(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # nothing was written, so nothing is lost
            self.fs.close(fd)

    def digest(self, name: str, *, cold: bool = False) -> Digest:
        """Size and SHA-256 of a file as it is on disk now."""
        size, sha = 0, hashlib.sha256()
        for block in self.blocks(name, cold=cold):
            size += len(block)
            sha.update(block)
        return Digest(bytes=size, sha256=sha.hexdigest())

    def quarantine(self, name: str) -> str:
        """Move a file that cannot be trusted out of the way, and keep it."""
        check_parents(self.fs, self.path, name)
        self.make(".build/quarantine")
        kept = f".build/quarantine/{name.replace('/', '-')}.{secrets.token_hex(4)}"
        # A file that is already gone needs no quarantine.
        with contextlib.suppress(FileNotFoundError), explained(self.at(name), but=(FileNotFoundError,)):
            self.fs.rename(self.at(name), self.at(kept))
            self.fs.fsync_folder(os.path.dirname(self.at(kept)))
            self.fs.fsync_folder(os.path.dirname(self.at(name)))
        return kept

    def remove(self, name: str) -> None:
        check_parents(self.fs, self.path, name)
        self._remove(name)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), explained(self.at(name), but=(FileNotFoundError,)):
            self.fs.unlink(self.at(name))

    def remove_tree(self, name: str) -> None:
        """Remove a file, or a folder with its content. Links are removed, not followed."""
        check_parents(self.fs, self.path, name)
        self._remove_tree(name)

    def _remove_tree(self, name: str) -> None:
        found = self.stat(name)
        if found is None or not found.is_folder:
            self._remove(name)
            return
        for child in self.names(name):
            self._remove_tree(os.path.join(name, child))
        with contextlib.suppress(FileNotFoundError), explained(self.at(name), but=(FileNotFoundError,)):
            self.fs.rmdir(self.at(name))

    def remove_all(self, names: Sequence[str]) -> None:
        for parent in {os.path.dirname(name) for name in names}:  # once: there may be a million names
            check_parents(self.fs, self.path, f"{parent}/" if parent else "")
        for name in names:
            self._remove_tree(name)

    def remove_empty(self, name: str) -> None:
        """Remove a folder if it is empty."""
        check_parents(self.fs, self.path, name)
        with contextlib.suppress(OSError):
            self.fs.rmdir(self.at(name))

    def sweep(self, name: str = "") -> None:
        """Remove temp files that a killed writer left."""
        found = [child for child in self.names(name) if is_temp(child)]
        if found and name:
            check_parents(self.fs, self.path, f"{name}/")
        for child in found:
            self._remove(os.path.join(name, child))

    def free_bytes(self) -> int | None:
        """How much can still be written; None if that is unknown."""
        path = self.path
        while path and not is_there(self.fs, path):
            path = os.path.dirname(path)
        with explained(path):
            return self.fs.free_bytes(path or ".")

    def _sync_parent(self, path: str) -> None:
        """Make an existing folder durable: the process that created it may have been killed before its fsync."""
        parent = os.path.dirname(path) or "."
        if path.startswith(f"{self.path}/"):
            with explained(parent):
                self.fs.fsync_folder(parent)
        else:
            with contextlib.suppress(OSError):  # the parent of the output may belong to another user
                self.fs.fsync_folder(parent)

    def _take_name(
        self, temp: str, name: str, digest: Digest | None, committed: Callable[[], bool], *, keep: bool = False
    ) -> None:
        final = self.at(name)
        check_parents(self.fs, self.path, name)
        try:
            self.fs.link(temp, final)
        except FileExistsError:
            if not self._is_same(temp, name, digest):
                self._quarantine_conflict(name, committed)
                self._take_name(temp, name, digest, committed, keep=keep)
                return
        except OSError as error:
            if error.errno in _NO_LINKS:
                self._rename_to(temp, name, digest, committed)
                return
            if not self._was_linked(temp, final):  # on NFS the reply may be lost, and the link made
                raise storage_error(error, final) from None
        if not keep:
            self.remove(self.relative(temp))

    def _is_same(self, temp: str, name: str, digest: Digest | None) -> bool:
        """Whether the name belongs to the same file, or to one with the same bytes."""
        with explained(self.at(name)):
            ours, there = self.fs.stat(temp), self.fs.stat(self.at(name))
        if ours.inode == there.inode:
            return True
        if there.is_file and there.size != ours.size:  # it may be too large to read
            return False
        return self.digest(name) == (digest or self.digest(self.relative(temp)))

    def _quarantine_conflict(self, name: str, committed: Callable[[], bool]) -> None:
        """Move a leftover out of the way. A file that a receipt vouches for is not a leftover, but an error."""
        check_not_committed(self.at(name), committed)
        self.quarantine(name)

    def _was_linked(self, temp: str, final: str) -> bool:
        try:
            return self.fs.stat(temp).inode == self.fs.stat(final).inode
        except OSError:
            return False

    def _rename_to(self, temp: str, name: str, digest: Digest | None, committed: Callable[[], bool]) -> None:
        """On file systems without links: rename, after the same checks."""
        if self.exists(name):
            if self._is_same(temp, name, digest):
                self.remove(self.relative(temp))
                return
            self._quarantine_conflict(name, committed)
        with explained(self.at(name)):
            self.fs.rename(temp, self.at(name))


def check_not_committed(path: str, committed: Callable[[], bool]) -> None:
    """Raise `DeterminismError` if a receipt vouches for the file at a path that would now get other bytes."""
    if committed():
        raise DeterminismError(
            f"{path} exists with other bytes under a receipt",
            hint="the same work gave two results: please report this, with the recipe",
        )


def is_there(fs: FileSystem, path: str) -> bool:
    """Whether a path exists; a broken link does, too."""
    try:
        with explained(path, but=_NOT_THERE):
            return fs.stat(path) is not None
    except _NOT_THERE:
        return False


def is_folder(fs: FileSystem, path: str) -> bool:
    """Whether a path is a folder, or a link to one."""
    try:
        with explained(path, but=_NOT_THERE):
            return fs.stat(path).is_folder or fs.names(path) is not None
    except _NOT_THERE:
        return False


def check_parents(fs: FileSystem, root: str, name: str) -> None:
    """Raise `StorageError` if a folder between `root` and the file of this name is a link."""
    at = name.find("/")
    while at >= 0:
        _check_folder(fs, f"{root}/{name[:at]}")
        at = name.find("/", at + 1)


def check_folders(fs: FileSystem, root: str, names: Iterable[str]) -> None:
    """Raise `StorageError` if one of these folders, or anything in .build, is a link; before anything is written."""
    for name in names:
        check_parents(fs, root, f"{name}/")
    check_parents(fs, root, ".build/")
    try:
        with explained(f"{root}/.build", but=_NOT_THERE):
            inside = fs.names(f"{root}/.build")
    except _NOT_THERE:
        return
    for name in inside:
        path = f"{root}/.build/{name}"
        if _is_odd(fs, path) and _is_listed(fs, path):
            raise _refusal(path)


def check_itself(fs: FileSystem, path: str) -> None:
    """Raise `StorageError` if a folder of our own is a link."""
    _check_folder(fs, path)


def _check_folder(fs: FileSystem, path: str) -> None:
    if _is_odd(fs, path):
        raise _refusal(path)


def _is_odd(fs: FileSystem, path: str) -> bool:
    """Whether something exists that is neither a folder nor a plain file: a link, a pipe or a device."""
    try:
        with explained(path, but=_NOT_THERE):
            found = fs.stat(path)
    except _NOT_THERE:
        return False
    return not found.is_folder and not found.is_file


def _is_listed(fs: FileSystem, path: str) -> bool:
    try:
        fs.names(path)
    except OSError:
        return False
    return True


def _refusal(path: str) -> StorageError:
    return StorageError(
        f"{path} is a link or a device: tokenmill reads through it, but does not write, move or remove anything there",
        hint=f"replace {os.path.basename(path)} by the folder itself, then run the same command again",
    )
