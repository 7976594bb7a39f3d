"""An append-only log of events. Nothing depends on it, so it is not synced."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from tokenmill import records
from tokenmill.errors import StorageError
from tokenmill.storage.folder import Folder, explained, write_all


class EventLog:
    """Lines of JSON at the end of a file, one an event."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._fs = folder.fs
        self._path = folder.at(name)
        with explained(self._path):
            self._fd = self._fs.append(self._path)

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
