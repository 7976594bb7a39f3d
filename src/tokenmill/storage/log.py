"""An append-only log of events. Nothing depends on it, so it is not synced.

An object cannot grow, so of the log of a remote folder the last megabytes are held in memory, and put now and then.
"""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Any

from tokenmill import records
from tokenmill.errors import DatasetError, StorageError
from tokenmill.storage.folder import Folder
from tokenmill.storage.output import write_all

_PUT_SECONDS = 60.0
_KEPT_BYTES = 1 << 23
_MAX_BYTES = 2 * _KEPT_BYTES


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


class RemoteLog(EventLog):
    """A log that is put to its folder every minute, and at the end."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._lines = bytearray()
        with contextlib.suppress(DatasetError):  # there is none yet
            self._lines += folder.read(name, max_bytes=_MAX_BYTES)
        self._put_at = time.monotonic()

    def add(self, event: dict[str, Any]) -> None:
        self._lines += records.canonical(event) + b"\n"
        if len(self._lines) > _MAX_BYTES:
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


def open_log(folder: Folder, name: str) -> EventLog:
    return EventLog(folder, name) if folder.is_local else RemoteLog(folder, name)
