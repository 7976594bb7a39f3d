"""Files while they are written: an output under a temp name, the event log, and temporary files.

    create x.3f9a...tmp -> write, hashing -> settle: fsync, close -> the folder gives it its name: see local.py

Large blocks are hashed in a thread while they are written: neither holds the interpreter lock, so a block takes the
longer of the two times, not their sum. The event log is only appended to and never synced, because nothing depends on
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol

from tokenmill import records
from tokenmill.errors import StorageError
from tokenmill.records import Int
from tokenmill.storage.filesystem import FileSystem, explained, write_all

if TYPE_CHECKING:
    from tokenmill.storage.local import Folder


TEMP_SUFFIX = ".tmp"
# Writing to disk begins before the file is complete. The piece of a 64 MB unit has about 30 MB, and its worker would
# otherwise wait for all of it at the end.
EARLY_BYTES = 4 << 20
_TEMP_NAME = re.compile(r".+\.[0-9a-f]{12}\.tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Size and SHA-256 of a file."""

    bytes: Int
    sha256: str


class Output(Protocol):
    """A file that is being written and does not have its final name yet."""

    name: str

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes. Returns their number."""

    def settle(self) -> tuple[str, Digest]:
        """Make the bytes durable under the temp name. Returns its path and the digest of the bytes."""

    def discard(self) -> None:
        """Remove the file, unless it has been published."""


class DirectOutput:
    """A new file that is written next to its target."""

    def __init__(self, name: str, temp: str, fs: FileSystem, fd: int) -> None:
        self.name = name
        self._temp = temp
        self._fs = fs
        self._fd: int | None = fd
        self._sha = hashlib.sha256()
        self._size = 0
        self._begun = 0  # bytes that the system was asked to write to disk

    def write(self, data: bytes | memoryview) -> int:
        assert self._fd is not None, "written after it was settled"
        with hashing_in_thread(self._sha.update, memoryview(data).cast("B")) as view:
            write_all(self._fs, self._fd, view, self._temp)
        self._size += len(view)
        if self._size - self._begun >= EARLY_BYTES:
            with contextlib.suppress(OSError):  # only advice: the fsync at the end makes it durable
                self._fs.begin_sync(self._fd, self._begun, self._size - self._begun)
            self._begun = self._size
        return len(view)

    def settle(self) -> tuple[str, Digest]:
        """Make the bytes durable; the file still lacks its name."""
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
        """Remove the file. Does nothing if it has been published."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._fs.close(self._fd)
            self._fd = None
        with contextlib.suppress(OSError):
            self._fs.unlink(self._temp)


def is_temp(name: str) -> bool:
    """Whether a name is that of a file that was being written."""
    return _TEMP_NAME.fullmatch(name) is not None


def _umask() -> int:
    """The umask of this process. Linux reports it; elsewhere it can only be read by setting it, for all threads."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


LARGE_BYTES = 4 << 20


@contextlib.contextmanager
def hashing_in_thread(update: Callable[[memoryview], object], view: memoryview) -> Iterator[memoryview]:
    """Hash a block in a thread while the body writes it. A small block is hashed first, without a thread."""
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
    """A file of JSON lines, one per event. Errors while appending are ignored."""

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
    """The path of a file with this content, for libraries that only take paths."""
    with _unnamed_file(suffix) or tempfile.NamedTemporaryFile(prefix="tokenmill-", suffix=suffix) as file:
        with explained("a temporary file"):
            file.write(content)
            file.flush()
        yield f"{_OPEN_FILES}/{file.fileno()}" if isinstance(file.name, int) else file.name


def _unnamed_file(suffix: str) -> IO[bytes] | None:
    """A file in memory, where the system supports it: if the process is killed, nothing is left behind."""
    if not hasattr(os, "memfd_create") or not os.path.isdir(_OPEN_FILES):
        return None
    return os.fdopen(os.memfd_create(f"tokenmill{suffix}"), "wb")


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """The path of an empty folder in the system's temp folder."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as path:
        yield path


def write_speed(folder: str, num_bytes: int) -> float:
    """Bytes a second that a folder takes, until they are durable. The file has no name, so nothing is left behind."""
    block = os.urandom(1 << 20)  # some disks compress
    with explained(folder), tempfile.TemporaryFile(dir=folder, prefix="tokenmill-") as file:
        begin = time.perf_counter()
        for _ in range(max(1, num_bytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return max(1, num_bytes // len(block)) * len(block) / (time.perf_counter() - begin)
