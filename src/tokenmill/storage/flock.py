"""Locks of the operating system: whoever dies lets go of them, so no claim is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from tokenmill.storage.folder import Folder
from tokenmill.storage.links import check_way
from tokenmill.storage.output import explained


class Locks:
    """The locks that this process holds or waits for: files beside what they are for."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def take(self, folder: Folder, name: str, *, alone: bool) -> int:
        """Wait for a lock; it is to be given back."""
        found = self._take(folder, name, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        assert found is not None, "it was waited for"
        return found

    def try_to_take(self, folder: Folder, name: str, *, alone: bool) -> int | None:
        """The same without the wait: None if somebody has it."""
        return self._take(folder, name, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)

    @contextlib.contextmanager
    def alone(self, folder: Folder, name: str) -> Iterator[None]:
        """Have a lock that nobody else has."""
        fd = self.take(folder, name, alone=True)
        try:
            yield
        finally:
            self.give_back(fd)

    def is_free(self, folder: Folder, name: str) -> bool:
        """Whether nobody has a lock alone."""
        fd = self.try_to_take(folder, name, alone=False)
        if fd is not None:
            self.give_back(fd)
        return fd is not None

    def share(self, fd: int) -> None:
        """Have a lock with others from now on. Somebody else may have had it alone in between."""
        fcntl.flock(fd, fcntl.LOCK_SH)

    def give_back(self, fd: int) -> None:
        """Let go of a lock, for processes that were forked meanwhile as well."""
        self._open.discard(fd)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def give_all_back(self, process: int) -> None:
        """Let go of everything if this is the process that took it: another one has only inherited it."""
        while self._open and process == os.getpid():
            self.give_back(next(iter(self._open)))

    def forget(self) -> None:
        """Close what came along with a fork: it would still be held when the parent has died."""
        while self._open:
            with contextlib.suppress(OSError):
                os.close(self._open.pop())

    def _take(self, folder: Folder, name: str, how: int) -> int | None:
        path = folder.at(f"{name}.lock")
        check_way(folder.fs, folder.path, name)
        with explained(path):
            try:
                fd = folder.fs.append(path)
            except FileNotFoundError:
                folder.make(os.path.dirname(name))
                fd = folder.fs.append(path)
            self._open.add(fd)
            try:
                fcntl.flock(fd, how)
            except BlockingIOError:
                self.give_back(fd)
                return None
            except BaseException:
                self.give_back(fd)
                raise
        return fd
