"""Hashing files from memory maps: no byte is copied, so it goes at the speed of SHA-256 itself.

A map of a file that cannot be read would end the process (SIGBUS). So each stretch is populated
first, which reports the same trouble as an error, and only then hashed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import sys
from collections.abc import Callable

from tokenmill.storage.folder import Folder
from tokenmill.storage.fs import FileSystem
from tokenmill.storage.output import Digest, explained

Look = Callable[[memoryview], None]
_STRETCH = 16 << 20
_MAX_LOOK = 1 << 34
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14; Python has no name for it yet


def fast_digest(folder: Folder, name: str, look: Look | None = None) -> Digest:
    """Size and SHA-256 of a file that is there; maps where the system can, reads where it cannot.

    `look` sees all of the file, once it is known to be readable; it must neither keep it nor raise.
    """
    if sys.platform == "linux" and folder.is_local:
        path = folder.at(name)
        with explained(path):
            fd = folder.fs.open(path)
            try:
                return _hash_map(folder.fs, fd, path, look)
            except _CannotMapError:
                pass
            finally:
                with contextlib.suppress(OSError):  # nothing was written, so nothing can be lost
                    folder.fs.close(fd)
    if look is None:
        return folder.digest(name)
    data = folder.read(name, max_bytes=_MAX_LOOK)
    look(memoryview(data))
    return Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


class _CannotMapError(Exception):
    pass


def _hash_map(fs: FileSystem, fd: int, path: str, look: Look | None) -> Digest:
    sha = hashlib.sha256()
    try:
        mapped = fs.map(fd)
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
        if look is not None:
            look(view)
        return Digest(bytes=len(view), sha256=sha.hexdigest())
