"""Scratch: a file grows on a fast local disk, then is copied to a slow target in one pass and compared.

    scratch/x.tmp  --write, write, write-->  complete
    target/x.tmp   <--one sequential copy--  fsync, read back, compare
    target/x       <--link

If the scratch disk is too small for a file, the bytes so far move to the target and the rest is written there directly.
RESERVE_BYTES of the disk always stay free for others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable

from tokenmill import records
from tokenmill.errors import DiskFullError, StorageError
from tokenmill.sizes import format_bytes
from tokenmill.storage.base import Storage
from tokenmill.storage.filesystem import explained, write_all
from tokenmill.storage.local import Folder, check_itself
from tokenmill.storage.output import TEMP_SUFFIX, Digest, Output

RESERVE_BYTES = 64_000_000
# Bytes that are written between two checks of the free space.
_CHECK_BYTES = 1 << 20
# This file in the scratch folder records that something did not fit. The next run sweeps it by its temp name.
_FULL = f"full.000000000000{TEMP_SUFFIX}"


def scratch_folder(scratch: str, target: Storage) -> Folder | None:
    """A folder on the scratch disk for this target alone; None if the target has a spool, which does the same."""
    if target.has_spool:
        return None
    return Folder(os.path.join(scratch, f"tokenmill-{records.digest(target.path)[:12]}"), target.fs)


def make_scratch_folder(folder: Folder) -> Folder | None:
    """The scratch folder, created and swept; None if the disk is full. It must not be a link."""
    check_itself(folder.fs, folder.path)
    try:
        folder.make()
        folder.sweep()
    except DiskFullError:  # files are then written straight to the output
        return None
    return folder


def remove_scratch_folder(folder: Storage) -> None:
    """Remove our temp files from the scratch folder, and the folder if it is empty then."""
    check_itself(folder.fs, folder.path)
    folder.sweep()
    folder.remove_empty("")


class Fallback:
    """Tells the user, once, that the scratch disk is full and files are written straight to the output."""

    def __init__(self, folder: Storage, tell: Callable[[str], None]) -> None:
        self._folder: Storage | None = folder
        self._tell = tell

    def check(self) -> None:
        """Tell it if the disk was full for any process of this build."""
        if self._folder is not None and self._folder.exists(_FULL):
            free = format_bytes(self._folder.free_bytes() or 0)
            place = os.path.dirname(self._folder.path)
            self._tell(
                f"the scratch disk at {place} has {free} free, and {format_bytes(RESERVE_BYTES)} are kept in reserve: "
                "files that do not fit are written straight to the output"
            )
            self._folder = None


class ScratchOutput:
    """A new file of `target` that is written in `scratch` first."""

    def __init__(self, scratch: Storage, target: Storage, name: str) -> None:
        self.name = name
        self._scratch = scratch
        self._target = target
        self._local_name = f"{os.path.basename(name)}.{secrets.token_hex(6)}{TEMP_SUFFIX}"
        self._fd: int | None = None
        self._direct: Output | None = None
        self._sha = hashlib.sha256()
        self._size = 0
        self._checked = -_CHECK_BYTES
        try:
            self._require_room(0)
            with explained(scratch.at(self._local_name)):
                self._fd = scratch.fs.create(scratch.at(self._local_name))
        except DiskFullError:
            self._fall_back()
            self._direct = target.create(name)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if self._direct is None:
            assert self._fd is not None, "written after it was settled"
            try:
                self._require_room(len(view))
                write_all(self._scratch.fs, self._fd, view, self._scratch.at(self._local_name))
            except DiskFullError:
                self._fall_back()
                self._direct = self._move()
        if self._direct is not None:
            self._direct.write(view)
        self._sha.update(view)
        self._size += len(view)
        return len(view)

    def settle(self) -> tuple[str, Digest]:
        if self._direct is None:
            self._direct = self._move()
        temp, digest = self._direct.settle()
        wanted = Digest(bytes=self._size, sha256=self._sha.hexdigest())
        # The copy may have crossed a network: trust only what can be read back.
        if digest != wanted or self._target.digest(self._target.relative(temp), cold=True) != wanted:
            raise StorageError(
                f"{temp} was read back with other bytes than were written",
                hint="check the drive; the unit will run again",
            )
        return temp, digest

    def discard(self) -> None:
        self._drop_local()
        if self._direct is not None:
            self._direct.discard()

    def _require_room(self, more: int) -> None:
        """Raise `DiskFullError` if less than the reserve would stay free on the scratch disk."""
        if self._size + more - self._checked < _CHECK_BYTES:
            return
        self._checked = self._size + more
        free = self._scratch.free_bytes()
        if free is not None and free - more < RESERVE_BYTES:
            raise DiskFullError(f"{self._scratch.path} has only {format_bytes(free)} free", hint="free some space")

    def _fall_back(self) -> None:
        with contextlib.suppress(OSError):  # it is recorded already, or the disk is completely full
            path = self._scratch.at(_FULL)
            self._scratch.fs.close(self._scratch.fs.create(path))

    def _move(self) -> Output:
        """Copy the bytes so far to the target, and remove the local file."""
        direct = self._target.create(self.name)
        try:
            left = self._size
            for block in self._scratch.blocks(self._local_name):
                direct.write(block[:left])
                left -= min(left, len(block))
            if left:
                raise StorageError(f"the scratch file of {self.name} lost {left} bytes", hint="check the scratch disk")
        except BaseException:
            direct.discard()
            raise
        finally:
            self._drop_local()
        return direct

    def _drop_local(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._scratch.fs.close(self._fd)
            self._fd = None
        with contextlib.suppress(OSError):
            self._scratch.fs.unlink(self._scratch.at(self._local_name))
