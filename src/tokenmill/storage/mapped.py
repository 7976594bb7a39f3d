"""Hashing files from memory maps: no byte is copied, so it goes at the speed of SHA-256 itself.

A map of a file that cannot be read would end the process (SIGBUS). So each stretch is populated
first, which reports the same trouble as an error, and only then hashed.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import sys

from tokenmill.manifest import Digest
from tokenmill.storage.folder import Folder, explained

_STRETCH = 16 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14; Python has no name for it yet


def fast_digest(folder: Folder, name: str) -> Digest:
    """Size and SHA-256 of a file that is there; maps where the system can, reads where it cannot."""
    path = folder.at(name)
    if sys.platform != "linux":
        return folder.digest(name)
    try:
        with explained(path), open(path, "rb") as file:
            return _hash_map(file.fileno(), path)
    except _CannotMapError:
        return folder.digest(name)


class _CannotMapError(Exception):
    pass


def _hash_map(fd: int, path: str) -> Digest:
    sha = hashlib.sha256()
    try:
        mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except (ValueError, OSError):
        raise _CannotMapError from None  # empty, or a file system without maps
    with mapped, memoryview(mapped) as view:
        for start in range(0, len(view), _STRETCH):
            size = min(_STRETCH, len(view) - start)
            try:
                mapped.madvise(_POPULATE_READ, start, size)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    raise _CannotMapError from None  # an older kernel
                raise OSError(errno.EIO, "cannot be read", path) from None
            with view[start : start + size] as stretch:
                sha.update(stretch)
        return Digest(bytes=len(view), sha256=sha.hexdigest())
