"""Enough room before the work begins, rather than a full disk after hours."""

from __future__ import annotations

import os

from tokenmill.errors import DiskFullError
from tokenmill.sizes import format_bytes
from tokenmill.storage.folder import Folder

MARGIN_BYTES = 64_000_000


def same_disk(one: Folder, other: Folder) -> bool:
    """Whether two folders of this machine, made already or not, are on the same file system."""
    return _device(one.path) == _device(other.path)


def _device(path: str) -> int:
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev


def has_space(folder: Folder, need: int) -> bool:
    """Whether so many bytes, and a margin, are free, as far as anybody knows."""
    return _fits(need, folder.free_bytes())


def require_space(folder: Folder, need: int, *, hint: str = "free some space, or choose another output") -> None:
    """Raise `DiskFullError` unless so many bytes, and a margin, are free."""
    free = folder.free_bytes()
    if free is not None and not _fits(need, free):
        raise DiskFullError(
            f"{folder.path} needs about {format_bytes(need + MARGIN_BYTES)} and has {format_bytes(free)} free: "
            f"{format_bytes(need + MARGIN_BYTES - free)} are missing",
            hint=hint,
        )


def _fits(need: int, free: int | None) -> bool:
    return free is None or need <= 0 or need + MARGIN_BYTES <= free
