"""Local-first writing: a file grows on a fast local disk, then goes to the target in one pass.

    scratch/x.tmp  --write, write, write-->  complete
    target/x.tmp   <--one sequential copy--  fsync, read back, compare
    target/x       <--link

When the scratch disk is too small for a file, what is there so far moves to the target and
the rest follows it directly. Some of the disk is left to others: RESERVE_BYTES stay free.
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
# How much is written between two looks at the free space.
_LOOK_BYTES = 1 << 20
# A file in a corner that says that something did not fit. It has a temp name, so that the next run sweeps it.
_FULL = f"full.000000000000{TEMP_SUFFIX}"


def scratch_corner(scratch: str, target: Storage) -> Folder | None:
    """A folder on the scratch disk for this target alone; None if the target has a spool, which is the same thing."""
    if target.has_spool:
        return None
    return Folder(os.path.join(scratch, f"tokenmill-{records.digest(target.path)[:12]}"), target.fs)


def make_corner(corner: Folder) -> Folder | None:
    """The corner, made and swept; None if nothing fits into it. It must not be a link."""
    check_itself(corner.fs, corner.path)
    try:
        corner.make()
        corner.sweep()
    except DiskFullError:  # what does not fit there goes straight to the output
        return None
    return corner


def leave_corner(corner: Storage) -> None:
    """Remove what is ours in the corner, and the corner unless something else is in it."""
    check_itself(corner.fs, corner.path)
    corner.sweep()
    corner.remove_empty("")


class Fallback:
    """Says, once, that files go straight to the output because the scratch disk is full."""

    def __init__(self, corner: Storage, tell: Callable[[str], None]) -> None:
        self._corner: Storage | None = corner
        self._tell = tell

    def look(self) -> None:
        """Whichever process it was that had no room there."""
        if self._corner is not None and self._corner.exists(_FULL):
            free = format_bytes(self._corner.free_bytes() or 0)
            place = os.path.dirname(self._corner.path)
            self._tell(
                f"the scratch disk at {place} is full ({free} free, {format_bytes(RESERVE_BYTES)} of them reserved): "
                "what does not fit is written straight to the output"
            )
            self._corner = None


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
        self._looked = -_LOOK_BYTES
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
        # The copy crossed a network drive: believe only what comes back from it.
        if digest != wanted or self._target.digest(self._target.relative(temp), cold=True) != wanted:
            raise StorageError(
                f"{temp} came back with other bytes than were sent", hint="check the drive; the unit will be redone"
            )
        return temp, digest

    def discard(self) -> None:
        self._drop_local()
        if self._direct is not None:
            self._direct.discard()

    def _require_room(self, more: int) -> None:
        """Raise `DiskFullError` if the scratch disk would be left with less than its reserve."""
        if self._size + more - self._looked < _LOOK_BYTES:
            return
        self._looked = self._size + more
        free = self._scratch.free_bytes()
        if free is not None and free - more < RESERVE_BYTES:
            raise DiskFullError(f"{self._scratch.path} has only {format_bytes(free)} free", hint="free some space")

    def _fall_back(self) -> None:
        with contextlib.suppress(OSError):  # it was said already, or the disk has room for nothing
            path = self._scratch.at(_FULL)
            self._scratch.fs.close(self._scratch.fs.create(path))

    def _move(self) -> Output:
        """Copy the bytes that were accepted so far to the target, and forget the local file."""
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
