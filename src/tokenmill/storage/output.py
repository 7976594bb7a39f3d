"""A file while it is written: under a temp name, hashed on its way, synced before it gets its own name.

Every error of the operating system becomes one of ours here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tokenmill.errors import DiskFullError, StorageError
from tokenmill.storage.beside import hashed_beside
from tokenmill.storage.fs import FileSystem

TEMP_SUFFIX = ".tmp"
# The disk begins with a file while the rest is still being made: a piece of a unit of 64 MB has about 30 MB, and its
# worker would wait for all of it at the end.
EARLY_BYTES = 4 << 20
_TEMP_NAME = re.compile(r".+\.[0-9a-f]{12}\.tmp")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


class Output(Protocol):
    """A file that is being written and does not have its final name yet."""

    name: str

    def write(self, data: bytes | memoryview) -> int: ...
    def settle(self) -> tuple[str, Digest]: ...
    def discard(self) -> None: ...


class DirectOutput:
    """A new file that is written beside its target."""

    def __init__(self, name: str, temp: str, fs: FileSystem, fd: int) -> None:
        self.name = name
        self._temp = temp
        self._fs = fs
        self._fd: int | None = fd
        self._sha = hashlib.sha256()
        self._size = 0
        self._begun = 0  # bytes that the disk was asked to begin with

    def write(self, data: bytes | memoryview) -> int:
        assert self._fd is not None, "written after it was settled"
        with hashed_beside(self._sha.update, memoryview(data).cast("B")) as view:
            write_all(self._fs, self._fd, view, self._temp)
        self._size += len(view)
        if self._size - self._begun >= EARLY_BYTES:
            with contextlib.suppress(OSError):  # it is advice; the sync at the end counts
                self._fs.begin_sync(self._fd, self._begun, self._size - self._begun)
            self._begun = self._size
        return len(view)

    def settle(self) -> tuple[str, Digest]:
        """Make the bytes durable; only the name is missing then."""
        assert self._fd is not None, "settled twice"
        fd, self._fd = self._fd, None
        try:
            with explained(self._temp):
                self._fs.allow(fd, 0o666 & ~_umask())
                self._fs.fsync(fd)
        finally:
            with explained(self._temp):
                self._fs.close(fd)
        return self._temp, Digest(bytes=self._size, sha256=self._sha.hexdigest())

    def discard(self) -> None:
        """Throw the file away; harmless after it was published."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._fs.close(self._fd)
            self._fd = None
        with contextlib.suppress(OSError):
            self._fs.unlink(self._temp)


def is_temp(name: str) -> bool:
    """Whether a file is one that was being written, by its name."""
    return _TEMP_NAME.fullmatch(name) is not None


def write_all(fs: FileSystem, fd: int, view: memoryview, path: str) -> None:
    """Write every byte, however short the single writes are."""
    done = 0
    while done < len(view):
        with explained(path):
            count = fs.write(fd, view[done:])
        if count <= 0:
            raise StorageError(f"{path}: a write made no progress at byte {done}", hint="check the drive")
        done += count


@contextlib.contextmanager
def explained(path: str, *, but: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Turn the operating system's errors into ours, but for those that the caller judges."""
    try:
        yield
    except but:
        raise
    except OSError as error:
        raise storage_error(error, path) from None


def storage_error(error: OSError, path: str) -> StorageError:
    if error.errno in _FULL:
        return DiskFullError(
            f"no space left while writing {path}",
            hint="free some space and run the same command again: it goes on where it stopped",
        )
    if error.errno == errno.ELOOP:
        return StorageError(
            f"{path} is a link, or there is one too many on the way to it",
            hint="put the file or folder itself in its place, then run the same command again",
        )
    if error.errno in _OUT_OF_DESCRIPTORS:
        return StorageError(
            f"{path}: {error.strerror}", hint="raise the limit of open files (ulimit -n), or use fewer workers"
        )
    if isinstance(error, FileNotFoundError):
        return StorageError(
            f"{path} is gone", hint="does another process work on this folder? then run the same command again"
        )
    return StorageError(f"{path}: {error.strerror or error}", hint="check the drive and run the same command again")


def _umask() -> int:
    """What new files are denied. Linux tells it; elsewhere it must be set to be read, which other threads notice."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
