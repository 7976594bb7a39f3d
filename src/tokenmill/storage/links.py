"""Links inside a dataset: what they lead to belongs to somebody else.

A dataset may come from anywhere, and a folder of it may be a link to any other place. Such a folder can be read, but
nothing is written, moved or removed through it. The path of the dataset itself may have as many links as it likes.

    data/owt -> /big/owt          fine: the user named it
    data/owt/train -> /other      read and verified; what would write there is refused before it begins
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from tokenmill.errors import StorageError
from tokenmill.storage.filesystem import FileSystem, explained

_NOT_THERE = (FileNotFoundError, NotADirectoryError)


def is_there(fs: FileSystem, path: str) -> bool:
    """Whether a path leads to something, and be it a link that leads to nothing."""
    try:
        with explained(path, but=_NOT_THERE):
            return fs.stat(path) is not None
    except _NOT_THERE:
        return False


def is_folder(fs: FileSystem, path: str) -> bool:
    """Whether files can be in there: a folder, or a link to one."""
    try:
        with explained(path, but=_NOT_THERE):
            return fs.stat(path).is_folder or fs.names(path) is not None
    except _NOT_THERE:
        return False


def check_way(fs: FileSystem, root: str, name: str) -> None:
    """Raise `StorageError` if the way from a folder to what has a name in it leads through a link."""
    at = name.find("/")
    while at >= 0:
        _check_folder(fs, f"{root}/{name[:at]}")
        at = name.find("/", at + 1)


def check_ways(fs: FileSystem, root: str, names: Iterable[str]) -> None:
    """The same for folders that are about to be written to, and all of .build: before anything is touched."""
    for name in names:
        check_way(fs, root, f"{name}/")
    check_way(fs, root, ".build/")
    try:
        with explained(f"{root}/.build", but=_NOT_THERE):
            inside = fs.names(f"{root}/.build")
    except _NOT_THERE:
        return
    for name in inside:
        path = f"{root}/.build/{name}"
        if _is_odd(fs, path) and _is_listed(fs, path):
            raise _refusal(path)


def check_itself(fs: FileSystem, path: str) -> None:
    """Raise `StorageError` if a folder that is ours alone is a link."""
    _check_folder(fs, path)


def _check_folder(fs: FileSystem, path: str) -> None:
    if _is_odd(fs, path):
        raise _refusal(path)


def _is_odd(fs: FileSystem, path: str) -> bool:
    """Whether something exists that is neither a folder nor a plain file: a link, a pipe or a device."""
    try:
        with explained(path, but=_NOT_THERE):
            found = fs.stat(path)
    except _NOT_THERE:
        return False
    return not found.is_folder and not found.is_file


def _is_listed(fs: FileSystem, path: str) -> bool:
    try:
        fs.names(path)
    except OSError:
        return False
    return True


def _refusal(path: str) -> StorageError:
    return StorageError(
        f"{path} is a link or a device: tokenmill reads what it leads to, but writes, moves and removes nothing there",
        hint=f"put the folder itself in the place of {os.path.basename(path)}, then run the same command again",
    )
