"""Enough room before the work begins, rather than a full disk after hours."""

from __future__ import annotations

from tokenmill.errors import DiskFullError
from tokenmill.sizes import format_bytes
from tokenmill.storage.folder import Folder

MARGIN_BYTES = 64_000_000


def require_space(folder: Folder, need: int, *, hint: str = "free some space, or choose another output") -> None:
    """Raise `DiskFullError` unless so many bytes, and a margin, are free."""
    free = folder.free_bytes()
    if free is not None and need > 0 and need + MARGIN_BYTES > free:
        raise DiskFullError(
            f"{folder.path} needs about {format_bytes(need + MARGIN_BYTES)} and has {format_bytes(free)} free: "
            f"{format_bytes(need + MARGIN_BYTES - free)} are missing",
            hint=hint,
        )
