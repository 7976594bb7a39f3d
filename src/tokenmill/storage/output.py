"""A file while it is written: under a temp name, hashed on its way, synced before it gets its own name.

Every error of the operating system becomes one of ours here.

Hashing beside writing: neither holds the interpreter, so a large block takes the longer of the two, not both.

An append-only log of events. Nothing depends on it, so it is not synced.

Files and folders that live as long as a with block.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol

from tokenmill import records
from tokenmill.errors import StorageError
from tokenmill.storage.filesystem import FileSystem, explained, write_all

if TYPE_CHECKING:
    from tokenmill.storage.local import Folder


TEMP_SUFFIX = ".tmp"
# The disk begins with a file while the rest is still being made: a piece of a unit of 64 MB has about 30 MB, and its
# worker would wait for all of it at the end.
EARLY_BYTES = 4 << 20
_TEMP_NAME = re.compile(r".+\.[0-9a-f]{12}\.tmp")


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


def _umask() -> int:
    """What new files are denied. Linux tells it; elsewhere it must be set to be read, which other threads notice."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


LARGE_BYTES = 4 << 20


@contextlib.contextmanager
def hashed_beside(update: Callable[[memoryview], object], view: memoryview) -> Iterator[memoryview]:
    """Hash a block while the body writes it; a small one is hashed first, for a thread would cost more."""
    if len(view) < LARGE_BYTES:
        update(view)
        yield view
        return
    hashing = threading.Thread(target=update, args=(view,))
    hashing.start()
    try:
        yield view
    finally:
        hashing.join()


class EventLog:
    """Lines of JSON at the end of a file, one an event."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._fs = folder.fs
        self._path = folder.at(name)
        self._fd = folder.append(name)

    def add(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(StorageError):
            write_all(self._fs, self._fd, memoryview(records.canonical(event) + b"\n"), self._path)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._fs.close(self._fd)


_OPEN_FILES = "/proc/self/fd"


@contextlib.contextmanager
def temporary_file(content: bytes, *, suffix: str) -> Iterator[str]:
    """The path of a file with this content, for libraries that take paths and nothing else."""
    with _unnamed_file(suffix) or tempfile.NamedTemporaryFile(prefix="tokenmill-", suffix=suffix) as file:
        with explained("a temporary file"):
            file.write(content)
            file.flush()
        yield f"{_OPEN_FILES}/{file.fileno()}" if isinstance(file.name, int) else file.name


def _unnamed_file(suffix: str) -> IO[bytes] | None:
    """A file in memory, where the system has such: nothing is left of it by whoever is killed."""
    if not hasattr(os, "memfd_create") or not os.path.isdir(_OPEN_FILES):
        return None
    return os.fdopen(os.memfd_create(f"tokenmill{suffix}"), "wb")


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """The path of an empty folder in the system's temp folder."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as path:
        yield path
