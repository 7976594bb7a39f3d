"""Memory maps that hold no file descriptor, so that a process may map as many files as it likes.

Python's own maps keep a descriptor each for as long as they live, and a process may have few of them: 1,024 by
default, 256 on some systems. A dataset has thousands of shards, and a mixture those of several datasets.

Hashing files from memory maps: no byte is copied, so it goes at the speed of SHA-256 itself.

A map of a file that cannot be read would end the process (SIGBUS). So each stretch is populated
first, which reports the same trouble as an error, and only then hashed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import mmap
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.storage.base import Storage
from tokenmill.storage.filesystem import FileSystem, explained
from tokenmill.storage.output import Digest

_FAILED = ctypes.c_void_p(-1).value


class Map:
    """The pages of one file, not to be written to. They are unmapped with the last array that shows them."""

    num_live = 0  # a process may have 65,530 on Linux, unless it was told otherwise

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size
        Map.num_live += 1
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, True)}

    def madvise(self, advice: int) -> None:
        """Tell the system how the pages will be used; one that does not listen does as it did."""
        _libc().madvise(self._address, self._size, advice)

    def __del__(self) -> None:
        with contextlib.suppress(TypeError):  # the interpreter is ending, and takes the pages with it
            _libc().munmap(self._address, self._size)
            Map.num_live -= 1


def map_file(path: str, dtype: npt.DTypeLike, *, offset: int = 0, count: int | None = None) -> npt.NDArray[Any]:
    """`count` items of a file from a byte on, or all that there are, mapped. A plain array: slices of numpy's own
    kind of map take several times as long.

    Raises `OSError` where the file cannot be read or mapped, `ValueError` where it has not that many items.
    """
    kind = np.dtype(dtype)
    fd = open_plain(path)
    try:
        size = os.fstat(fd).st_size
        if count is None:
            count, rest = divmod(size - offset, kind.itemsize)
            if rest or count < 0:
                raise ValueError(f"{path}: {size} bytes, which are not whole items of {kind} from byte {offset} on")
        end = offset + count * kind.itemsize
        if end > size:
            raise ValueError(f"{path}: {size} bytes, fewer than the {end} that its content needs")
        if not count:
            return np.zeros(0, kind)
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        data = _map(fd, path, start, end - start)
        return data[offset - start :].view(kind)
    finally:
        os.close(fd)


def open_plain(path: str, _: int = 0) -> int:
    """Open a plain file for reading, wherever links lead. A pipe, which would be waited for, is an `OSError`.

    It is also an opener for `open`, whose flags are those of reading.
    """
    flags = (getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
    fd = os.open(path, sum(flags, os.O_RDONLY))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a plain file", path)
    return fd


def find_maps(arrays: Any) -> list[Map]:
    """What these arrays are mapped by."""
    found = []
    for array in arrays:
        base = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, Map):
            found.append(base)
    return found


def _map(fd: int, path: str, start: int, size: int) -> npt.NDArray[np.uint8]:
    if sys.platform == "win32":  # a map there holds a handle, of which a process may have millions
        return np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ, offset=start), np.uint8)
    address = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), path)
    return np.asarray(Map(address, size))


@functools.cache
def _libc() -> ctypes.CDLL:
    """The system's own calls, with the types of their arguments."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    # Files of more than 2 GB: the offset has 64 bits on every system that Python supports by this name.
    libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_int64)
    libc.mmap.restype = pointer
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    return libc


Look = Callable[[memoryview], None]
_STRETCH = 16 << 20
_MAX_LOOK = 1 << 34
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14; Python has no name for it yet


def fast_digest(folder: Storage, name: str, look: Look | None = None) -> Digest:
    """Size and SHA-256 of a file that is there; maps where the system can, reads where it cannot.

    `look` sees all of the file, once it is known to be readable; it must neither keep it nor raise.
    """
    if sys.platform == "linux" and folder.can_map:
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
