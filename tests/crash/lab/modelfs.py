"""A file system in memory that writes down all it does, so that crashes can be thought through afterwards.

It answers as Linux does, with the same errors. Nothing in it is ever durable: every operation that changes
something goes to `log` as the changes it is made of, and `aftermath` derives from the log what a kill or a
power cut would have left at any moment of the run.

    /out/a  ->  entry "a" of a folder  ->  inode 7  ->  bytes
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from tokenmill.storage.filesystem import FileStat

ROOT = 1
_DEVICE = 0x0DE1


class Born(NamedTuple):
    """A new inode, which has no name yet."""

    inode: int
    is_folder: bool


class Named(NamedTuple):
    """An entry of a folder now leads to an inode, or to none."""

    folder: int
    name: str
    inode: int | None


class Written(NamedTuple):
    inode: int
    offset: int
    data: bytes


class Synced(NamedTuple):
    """The bytes of a file, or the entries of a folder, are durable up to here."""

    inode: int


Change = Born | Named | Written | Synced


class Operation(NamedTuple):
    """One call, which a kill cannot divide."""

    call: str
    path: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Disk:
    """What stands on a disk. Contents are immutable and shared by all disks that hold them."""

    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})

    def walk(self, folder: int = ROOT, path: str = "") -> Iterator[tuple[str, bytes | None]]:
        """Every path with its content; a folder has none."""
        for name, inode in self.folders[folder].items():
            child = f"{path}/{name}"
            if inode in self.folders:
                yield child, None
                yield from self.walk(inode, child)
            else:
                yield child, self.files[inode]

    def contents(self) -> dict[str, bytes]:
        """Every file with its content."""
        return {path: data for path, data in self.walk() if data is not None}


@dataclass(slots=True)
class _Handle:
    inode: int
    path: str
    reads: bool
    writes: bool
    appends: bool = False
    position: int = 0


class ModelFileSystem:
    """A `FileSystem` that begins with what is on a disk and leaves that disk alone."""

    def __init__(self, disk: Disk | None = None, *, first_inode: int = 2, free_bytes: int = 1 << 40) -> None:
        disk = disk or Disk()
        self.log: list[Operation] = []
        self._folders = {inode: dict(entries) for inode, entries in disk.folders.items()}
        self._files: dict[int, bytes | bytearray] = dict(disk.files)
        self._modified: dict[int, int] = {}
        self._clock = 0
        self._handles: dict[int, _Handle] = {}
        self._next_fd = 100
        self._next_inode = max((first_inode - 1, *disk.files, *disk.folders)) + 1
        self._free_bytes = free_bytes

    def disk(self) -> Disk:
        """What running processes see."""
        folders = {ROOT: dict(self._folders[ROOT])}
        files = {}
        waiting = list(folders[ROOT].values())
        for inode in waiting:
            if inode in self._folders:
                folders[inode] = dict(self._folders[inode])
                waiting += folders[inode].values()
            else:
                files[inode] = bytes(self._files[inode])
        return Disk(files, folders)

    def create(self, path: str) -> int:
        folder, name = self._place(path)
        if name in self._folders[folder]:
            _fail(errno.EEXIST, path)
        return self._open_new("create", path, folder, name)

    def open(self, path: str) -> int:
        return self._hand_out(_Handle(self._find(path), path, reads=True, writes=False))

    def append(self, path: str) -> int:
        folder, name = self._place(path)
        inode = self._folders[folder].get(name)
        if inode is None:
            return self._open_new("append", path, folder, name, appends=True)
        if inode in self._folders:
            _fail(errno.EISDIR, path)
        if sum(found == inode for entries in self._folders.values() for found in entries.values()) > 1:
            _fail(errno.EMLINK, path)
        return self._hand_out(_Handle(inode, path, reads=False, writes=True, appends=True))

    def read(self, fd: int, buffer: memoryview) -> int:
        handle = self._handle(fd)
        if not handle.reads:
            _fail(errno.EBADF, handle.path)
        if handle.inode in self._folders:
            _fail(errno.EISDIR, handle.path)
        data = self._files[handle.inode][handle.position : handle.position + len(buffer)]
        buffer[: len(data)] = data
        handle.position += len(data)
        return len(data)

    def seek(self, fd: int, offset: int) -> None:
        self._handle(fd).position = offset

    def map(self, fd: int) -> mmap.mmap:
        handle = self._handle(fd)
        if handle.inode in self._folders:
            _fail(errno.ENODEV, handle.path)
        data = self._files[handle.inode]
        if not data:
            raise ValueError("cannot mmap an empty file")
        if not handle.reads:
            _fail(errno.EACCES, handle.path)
        mapped = mmap.mmap(-1, len(data))
        mapped[:] = bytes(data)
        return mapped

    def write(self, fd: int, data: memoryview) -> int:
        handle = self._handle(fd)
        if not handle.writes:
            _fail(errno.EBADF, handle.path)
        content = self._files[handle.inode]
        if not isinstance(content, bytearray):  # the disk that we began with keeps its bytes
            content = self._files[handle.inode] = bytearray(content)
        added = bytes(data)
        offset = len(content) if handle.appends else handle.position
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(added)] = added
        handle.position = offset + len(added)
        self._touched(handle.inode)
        self._note("write", handle.path, Written(handle.inode, offset, added))
        return len(added)

    def allow(self, fd: int, mode: int) -> None:
        self._handle(fd)

    def fsync(self, fd: int) -> None:
        handle = self._handle(fd)
        self._note("fsync", handle.path, Synced(handle.inode))

    def begin_sync(self, fd: int, start: int, size: int) -> None:
        self._handle(fd)

    def forget(self, fd: int) -> None:
        self._handle(fd)

    def expect(self, path: str) -> None:
        self._find(path)

    def close(self, fd: int) -> None:
        self._handle(fd)
        del self._handles[fd]

    def link(self, path: str, new: str) -> None:
        inode = self._find(path)
        folder, name = self._place(new)
        if name in self._folders[folder]:
            _fail(errno.EEXIST, new)
        if inode in self._folders:
            _fail(errno.EPERM, path)
        self._note("link", new, self._set(folder, name, inode))

    def rename(self, path: str, new: str) -> None:
        (folder, name), (new_folder, new_name) = self._place(path), self._place(new)
        inode, target = self._folders[folder].get(name), self._folders[new_folder].get(new_name)
        if inode is None:
            _fail(errno.ENOENT, path)
        if inode in self._folders and self._is_below(new_folder, inode):
            _fail(errno.EINVAL, new)
        if target is not None and target in self._folders and self._is_below(folder, target):
            _fail(errno.ENOTEMPTY, new)
        if inode == target:
            return
        if target is not None:
            if inode in self._folders and target not in self._folders:
                _fail(errno.ENOTDIR, new)
            if inode not in self._folders and target in self._folders:
                _fail(errno.EISDIR, new)
            if self._folders.get(target):
                _fail(errno.ENOTEMPTY, new)
        self._note("rename", new, self._set(folder, name, None), self._set(new_folder, new_name, inode))

    def unlink(self, path: str) -> None:
        folder, name = self._place(path)
        inode = self._folders[folder].get(name)
        if inode is None:
            _fail(errno.ENOENT, path)
        if inode in self._folders:
            _fail(errno.EISDIR, path)
        self._note("unlink", path, self._set(folder, name, None))

    def touch(self, path: str) -> None:
        self._touched(self._find(path))

    def mkdir(self, path: str) -> None:
        folder, name = self._place(path)
        if name in self._folders[folder]:
            _fail(errno.EEXIST, path)
        inode = self._new_inode()
        self._folders[inode] = {}
        self._note("mkdir", path, Born(inode, is_folder=True), self._set(folder, name, inode))

    def rmdir(self, path: str) -> None:
        folder, name = self._place(path)
        inode = self._folders[folder].get(name)
        if inode is None:
            _fail(errno.ENOENT, path)
        if inode not in self._folders:
            _fail(errno.ENOTDIR, path)
        if self._folders[inode]:
            _fail(errno.ENOTEMPTY, path)
        self._note("rmdir", path, self._set(folder, name, None))

    def fsync_folder(self, path: str) -> None:
        inode = self._find(path)
        if inode not in self._folders:
            _fail(errno.ENOTDIR, path)
        self._note("fsync_folder", path, Synced(inode))

    def stat(self, path: str) -> FileStat:
        inode = self._find(path)
        is_folder = inode in self._folders
        return FileStat(
            size=4096 if is_folder else len(self._files[inode]),
            modified=self._modified.get(inode, 0),
            is_file=not is_folder,
            is_folder=is_folder,
            inode=(_DEVICE, inode),
        )

    def names(self, path: str) -> list[str]:
        inode = self._find(path)
        if inode not in self._folders:
            _fail(errno.ENOTDIR, path)
        return sorted(self._folders[inode])

    def free_bytes(self, path: str) -> int:
        self._find(path)
        return self._free_bytes

    def _note(self, call: str, path: str, *changes: Change) -> None:
        self.log.append(Operation(call, path, changes))

    def _set(self, folder: int, name: str, inode: int | None) -> Named:
        entries = self._folders[folder]
        if inode is None:
            del entries[name]
        else:
            entries[name] = inode
        return Named(folder, name, inode)

    def _open_new(self, call: str, path: str, folder: int, name: str, *, appends: bool = False) -> int:
        inode = self._new_inode()
        self._files[inode] = bytearray()
        self._touched(inode)
        self._note(call, path, Born(inode, is_folder=False), self._set(folder, name, inode))
        return self._hand_out(_Handle(inode, path, reads=False, writes=True, appends=appends))

    def _hand_out(self, handle: _Handle) -> int:
        self._next_fd += 1
        self._handles[self._next_fd] = handle
        return self._next_fd

    def _handle(self, fd: int) -> _Handle:
        if fd not in self._handles:
            _fail(errno.EBADF, f"descriptor {fd}")
        return self._handles[fd]

    def _new_inode(self) -> int:
        self._next_inode += 1
        return self._next_inode - 1

    def _touched(self, inode: int) -> None:
        self._clock += 1
        self._modified[inode] = self._clock

    def _find(self, path: str) -> int:
        """The inode of a path, or the error that Linux gives."""
        inode = ROOT
        for part in path.split("/"):
            entries = self._folders.get(inode)
            if entries is None:
                _fail(errno.ENOTDIR, path)
            if part not in ("", "."):
                if part not in entries:
                    _fail(errno.ENOENT, path)
                inode = entries[part]
        return inode

    def _place(self, path: str) -> tuple[int, str]:
        """The folder of a path, which must be there, and the last name, which need not."""
        parent, _, name = path.rstrip("/").rpartition("/")
        folder = self._find(parent)
        if folder not in self._folders:
            _fail(errno.ENOTDIR, path)
        return folder, name

    def _is_below(self, inode: int, folder: int) -> bool:
        return inode == folder or any(
            self._is_below(inode, child) for child in self._folders[folder].values() if child in self._folders
        )


def _fail(code: int, path: str) -> NoReturn:
    raise OSError(code, os.strerror(code), path)
