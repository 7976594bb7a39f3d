"""Memory maps of files: as arrays, and for hashing; and their pages, which are read ahead and released.

`map_file` uses mmap directly because each of Python's own maps keeps a file descriptor open. A process may have as few
as 256 of them (1,024 by default on Linux), and a mixture of datasets has thousands of shards.

`fast_digest` hashes a map without copying, at the speed of SHA-256 itself. Touching an unreadable page of a map would
end the process (SIGBUS), so each block is populated first, which reports the problem as an error.

Anonymous files are memory that travels between processes as a descriptor. There is no name to remove.

A page that is not in memory stalls its reader, so the system is told early which bytes will be read. Mapped pages
count as memory of the process while they are mapped. Beyond a limit, all of them are released at once; the system
keeps them in its cache as long as it has memory to spare. All of this is advice to Linux. Elsewhere nothing is done.
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
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.storage.base import Storage
from tokenmill.storage.filesystem import LOCAL, FileSystem, explained, write_all
from tokenmill.storage.output import Digest

_FAILED = ctypes.c_void_p(-1).value


class Map:
    """The pages of one file, read-only. They are unmapped with the last array that uses them."""

    num_live = 0  # Linux allows 65,530 in a process by default

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size
        self._unmap = _libc().munmap  # when the interpreter ends, the names of this module are gone before the last map
        Map.num_live += 1
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, True)}

    def madvise(self, advice: int) -> None:
        """Tell the system how the pages will be used. It may ignore the advice."""
        _libc().madvise(self._address, self._size, advice)

    def __del__(self) -> None:
        self._unmap(self._address, self._size)
        type(self).num_live -= 1


def map_file(path: str, dtype: npt.DTypeLike, *, offset: int = 0, count: int | None = None) -> npt.NDArray[Any]:
    """`count` items of a file from byte `offset` on, or all items, mapped as a plain array. Slices of `numpy.memmap`
    take several times as long.

    Raises `OSError` if the file cannot be read or mapped, `ValueError` if it has fewer items.
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


def write_anonymous(arrays: Iterable[npt.NDArray[Any]]) -> int:
    """A descriptor of a new file that has no name and holds these arrays, one after the other.

    The system frees it with the last process that has it open or mapped, however that ends. On Linux it is memory.
    """
    name = "tokenmill"
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(prefix=name) as file:
            fd = os.dup(file.fileno())
    try:
        for array in arrays:
            if len(array):
                write_all(LOCAL, fd, np.ascontiguousarray(array).view(np.uint8).data, "shared memory")
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_anonymous(fd: int) -> npt.NDArray[np.uint8]:
    """The bytes of a file of `write_anonymous`. The descriptor may be closed afterwards."""
    return _map(fd, "shared memory", 0, os.fstat(fd).st_size)


def open_plain(path: str, _: int = 0) -> int:
    """Open a plain file for reading. Links are followed. A pipe, which could block, is an `OSError`.

    It can also be the `opener` of `open`; flags are ignored.
    """
    flags = (getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
    fd = os.open(path, sum(flags, os.O_RDONLY))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a plain file", path)
    return fd


def find_maps(arrays: Any) -> list[Map]:
    """The maps behind these arrays."""
    found = []
    for array in arrays:
        base = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, Map):
            found.append(base)
    return found


def _map(fd: int, path: str, start: int, size: int) -> npt.NDArray[np.uint8]:
    if sys.platform == "win32":  # a map there keeps a handle, and a process may have millions
        return np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ, offset=start), np.uint8)
    address = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), path)
    return np.asarray(Map(address, size))


@functools.cache
def _libc() -> ctypes.CDLL:
    """The calls of the C library, with the types of their arguments."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    # For files larger than 2 GB, the offset has 64 bits on every system that Python supports.
    libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_int64)
    libc.mmap.restype = pointer
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    return libc


MAX_RESIDENT_BYTES = 1 << 30
# What will be read completely is read in a few large blocks, which is faster than many small ones.
_BLOCK_BYTES = 1 << 16
CAN_READ_AHEAD = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT") and hasattr(mmap, "MADV_RANDOM")
_CAN_RELEASE = hasattr(mmap, "MADV_DONTNEED") and os.path.exists("/proc/self/statm")

Numbers = npt.NDArray[np.int64]


def release(maps: Iterable[npt.NDArray[Any]], others_bytes: int = 0) -> int:
    """Release the pages of these maps once there are too many. Other maps of the process have `others_bytes`.

    Returns what the others have, which is known exactly after a release, for the next call.
    """
    maps = list(maps)
    if not _CAN_RELEASE or sum(mapped.nbytes for mapped in maps) <= MAX_RESIDENT_BYTES:
        return others_bytes
    if resident_bytes() - others_bytes <= MAX_RESIDENT_BYTES:
        return others_bytes
    for mapped in find_maps(maps):
        mapped.madvise(mmap.MADV_DONTNEED)
    return resident_bytes()


def resident_bytes() -> int:
    """Bytes of mapped files that are in memory for this process."""
    fd = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(fd, 256).split()[2]) * mmap.PAGESIZE
    finally:
        os.close(fd)


def read_pages_ahead(path: str, begins: Numbers, ends: Numbers, *, fits_in_memory: bool) -> None:
    """Have the system read these ranges of bytes of a file in the background."""
    try:
        fd = open_plain(path)
    except OSError:
        return  # the read itself reports the error; a shard of a URL may not be copied yet
    try:
        for begin, end in merge(begins, ends, _BLOCK_BYTES if fits_in_memory else mmap.PAGESIZE):
            os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)


def merge(begins: Numbers, ends: Numbers, block_bytes: int) -> Iterator[tuple[int, int]]:
    """These ranges of bytes as whole blocks. Ranges that touch are merged."""
    by_begin = np.argsort(begins)
    begins = begins[by_begin] // block_bytes * block_bytes
    ends = np.maximum.accumulate(-(-ends[by_begin] // block_bytes) * block_bytes)
    firsts = np.flatnonzero(np.append(True, begins[1:] > ends[:-1]))
    lasts = np.append(firsts[1:], len(begins)) - 1
    return zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True)


def is_cached(path: str, position: int) -> bool:
    """Whether a byte of a file can be read without waiting. False if the file system cannot tell."""
    try:
        fd = open_plain(path)
        try:
            return os.preadv(fd, [bytearray(1)], position, os.RWF_NOWAIT) == 1
        finally:
            os.close(fd)
    except OSError:
        return False


def machine_memory() -> int:
    """The memory of this machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


Visitor = Callable[[memoryview], None]
_BLOCK = 16 << 20
_MAX_READ = 1 << 34
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14; Python has no name for it yet


def fast_digest(folder: Storage, name: str, visit: Visitor | None = None) -> Digest:
    """Size and SHA-256 of an existing file: from a map where the system allows it, otherwise by reading.

    `visit` is called with all bytes of the file once they are known to be readable. It must not keep them or raise.
    """
    if sys.platform == "linux" and folder.can_map:
        path = folder.at(name)
        with explained(path):
            fd = folder.fs.open(path)
            try:
                return _hash_map(folder.fs, fd, path, visit)
            except _CannotMapError:
                pass
            finally:
                with contextlib.suppress(OSError):  # nothing was written, so nothing is lost
                    folder.fs.close(fd)
    if visit is None:
        return folder.digest(name)
    data = folder.read(name, max_bytes=_MAX_READ)
    visit(memoryview(data))
    return Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


class _CannotMapError(Exception):
    pass


def _hash_map(fs: FileSystem, fd: int, path: str, visit: Visitor | None) -> Digest:
    sha = hashlib.sha256()
    try:
        mapped = fs.map(fd)
    except (ValueError, OSError):
        raise _CannotMapError from None  # empty, or a file system without maps
    with mapped, memoryview(mapped) as view:
        for start in range(0, len(view), _BLOCK):
            size = min(_BLOCK, len(view) - start)
            try:
                mapped.madvise(_POPULATE_READ, start, size)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    raise _CannotMapError from None  # an older kernel
                raise OSError(errno.EIO, "cannot be read", path) from None
            with view[start : start + size] as block:
                sha.update(block)
        if visit is not None:
            visit(view)
        return Digest(bytes=len(view), sha256=sha.hexdigest())
