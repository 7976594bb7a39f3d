"""System calls, each once: every operation on files that tokenmill makes, behind the `FileSystem` protocol.

`LOCAL` makes the calls. The crash lab replaces it to model kills and power cuts, so each operation is as small as one
system call and makes no decisions.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from tokenmill.errors import AccessError, DiskFullError, FileLimitError, StorageError, hint_for
from tokenmill.sizes import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_FILE_LIMIT_HINT = "raise the limit (ulimit -f unlimited) or choose another place, then run the same command again"
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def write_all(fs: FileSystem, fd: int, view: memoryview, path: str) -> None:
    """Write every byte, in as many calls as it takes."""
    done = 0
    while done < len(view):
        with explained(path):
            count = fs.write(fd, view[done:])
        if count <= 0:
            raise StorageError(f"{path}: a write made no progress at byte {done}", hint="check the drive")
        done += count


@contextlib.contextmanager
def explained(path: str, *, but: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Turn errors of the operating system into ours, except those that the caller handles."""
    try:
        yield
    except but:
        raise
    except OSError as error:
        raise storage_error(error, path) from None


def storage_error(error: OSError, path: str) -> StorageError:  # noqa: PLR0911  one for each kind of error
    """The error of ours for an error of the operating system, with a hint."""
    if error.errno in _FULL:
        return DiskFullError(
            f"no space left while writing {path}",
            hint="free some space, then run the same command again to resume",
        )
    if error.errno == errno.EFBIG:
        return FileLimitError(f"{path} cannot grow further: {_file_limit()}", hint=_FILE_LIMIT_HINT)
    if error.errno in _NO_ACCESS:
        return AccessError(f"{path}: {error.strerror}", hint=hint_for(error, ""))
    if error.errno == errno.ELOOP:
        return StorageError(
            f"{path} is a link, or there are too many links in its path",
            hint="replace the link by the file or folder itself, then run the same command again",
        )
    if error.errno in _OUT_OF_DESCRIPTORS:
        return StorageError(
            f"{path}: {error.strerror}", hint="raise the limit of open files (ulimit -n), or use fewer workers"
        )
    if isinstance(error, FileNotFoundError):
        return StorageError(
            f"{path} is gone", hint="is another process using this folder? then run the same command again"
        )
    return StorageError(f"{path}: {error.strerror or error}", hint="check the drive and run the same command again")


def _file_limit() -> str:
    """What limits the size of a file: the limit of this process, or the file system."""
    import resource  # not every system has it

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return "its file system does not store larger files"
    return f"this process may write files of {format_bytes(limit)} (ulimit -f)"


class FileStat(NamedTuple):
    """Size, time and kind of a file. A tuple, because resuming a build can ask for millions of them."""

    size: int
    modified: int
    is_file: bool
    is_folder: bool
    inode: tuple[int, int]


class FileSystem(Protocol):
    """The operations on files that tokenmill makes."""

    def create(self, path: str) -> int: ...
    def open(self, path: str) -> int: ...
    def append(self, path: str) -> int: ...
    def read(self, fd: int, buffer: memoryview) -> int: ...
    def seek(self, fd: int, offset: int) -> None: ...
    def map(self, fd: int) -> mmap.mmap: ...
    def write(self, fd: int, data: memoryview) -> int: ...
    def allow(self, fd: int, mode: int) -> None: ...
    def fsync(self, fd: int) -> None: ...
    def begin_sync(self, fd: int, start: int, size: int) -> None: ...
    def forget(self, fd: int) -> None: ...
    def expect(self, path: str) -> None: ...
    def close(self, fd: int) -> None: ...
    def link(self, path: str, new: str) -> None: ...
    def rename(self, path: str, new: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def touch(self, path: str) -> None: ...
    def mkdir(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def fsync_folder(self, path: str) -> None: ...
    def stat(self, path: str) -> FileStat: ...
    def names(self, path: str) -> list[str]: ...
    def free_bytes(self, path: str) -> int: ...


class LocalFileSystem:
    """The files of the operating system."""

    def create(self, path: str) -> int:
        """Open a new file for writing. An existing file or link is an error."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def open(self, path: str) -> int:
        """Open a plain file or a folder for reading. Links, pipes and devices are errors."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        return _checked(fd, path, stat.S_ISREG, stat.S_ISDIR)

    def append(self, path: str) -> int:
        """Open a file for appending. A file with a second name is an error: it may belong to another folder."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = _checked(os.open(path, flags, 0o644), path, stat.S_ISREG)
        if os.fstat(fd).st_nlink > 1:
            os.close(fd)
            raise OSError(errno.EMLINK, "it has a second name, so it may belong to another folder", path)
        return fd

    def read(self, fd: int, buffer: memoryview) -> int:
        return os.readv(fd, [buffer])

    def seek(self, fd: int, offset: int) -> None:
        os.lseek(fd, offset, os.SEEK_SET)

    def map(self, fd: int) -> mmap.mmap:
        """The pages of a file, read-only."""
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def allow(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def begin_sync(self, fd: int, start: int, size: int) -> None:
        """Ask the system to begin writing these bytes to disk. By itself it waits until much of the memory is dirty."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)

    def forget(self, fd: int) -> None:
        """Drop cached pages, so that the next read comes from the disk."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def expect(self, path: str) -> None:
        """Ask for a file to be read into memory, without waiting; a pipe does not block either."""
        if hasattr(os, "posix_fadvise"):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def link(self, path: str, new: str) -> None:
        os.link(path, new, follow_symlinks=False)

    def rename(self, path: str, new: str) -> None:
        os.rename(path, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def touch(self, path: str) -> None:
        os.utime(path, follow_symlinks=False)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def fsync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def stat(self, path: str) -> FileStat:
        found = os.lstat(path)
        mode = found.st_mode
        inode = (found.st_dev, found.st_ino)
        return FileStat(found.st_size, found.st_mtime_ns, stat.S_ISREG(mode), stat.S_ISDIR(mode), inode)

    def names(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def free_bytes(self, path: str) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


def _checked(fd: int, path: str, *kinds: Callable[[int], bool]) -> int:
    """The descriptor, if its file is of one of these kinds. Otherwise it is closed, and an error is raised."""
    mode = os.fstat(fd).st_mode
    if not any(is_kind(mode) for is_kind in kinds):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a plain file", path)
    return fd


LOCAL = LocalFileSystem()
