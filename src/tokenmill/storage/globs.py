"""Patterns: which files a glob names, in a folder of this machine, in an object store and on the hub alike.

    *       any characters of a name           ?       one character
    [a-z]   one of these characters            [!a-z]  one character except these
    **      any number of folders; it is a whole part between slashes

Only a part that begins with a dot matches a name that begins with one. All other characters, braces included, match
themselves.

In a local folder, anything unreadable is an error, so that no file is left out. Links to folders are followed unless
they lead back to a folder that contains them. Hidden files and folders are skipped unless a pattern names them.
Datasets, finished or not, are always skipped.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterator

from tokenmill.errors import RecipeError, SourceError, hint_for

Matcher = Callable[[str], bool]

_MAGIC = re.compile(r"[*?[]")
_FOLDERS = "**"


def is_pattern(key: str) -> bool:
    """Whether a key may name more than itself."""
    return _MAGIC.search(key) is not None


def folder_of(pattern: str) -> str:
    """The longest folder without wildcards that all matches of a pattern are in."""
    return _MAGIC.split(pattern)[0].rpartition("/")[0]


def matcher(pattern: str) -> Matcher:
    """A function that says whether the pattern names a key."""
    tests = [None if part == _FOLDERS else _name_test(part) for part in _parts(pattern)]

    def matches(key: str) -> bool:
        # All numbers of parts that may be used up so far, at once: some patterns match a key in millions of ways.
        used = _through_folders({0}, tests)
        for name in key.split("/"):
            used = _through_folders({after for at in used for after in _steps(name, at, tests)}, tests)
        return len(tests) in used

    return matches


def _parts(pattern: str) -> list[str]:
    parts = pattern.split("/")
    if any(_FOLDERS in part and part != _FOLDERS for part in parts):
        raise RecipeError(
            f"{pattern!r}: ** must be a whole part between slashes", hint="write it like data/**/*.parquet"
        )
    return [*parts, "*"] if parts[-1] == _FOLDERS else parts


def _name_test(part: str) -> Matcher:
    """Whether one part of a pattern names a file or folder."""
    fits = re.compile(fnmatch.translate(part)).match
    takes_hidden = part.startswith(".")
    return lambda name: fits(name) is not None and (takes_hidden or not name.startswith("."))


def _steps(name: str, at: int, tests: list[Matcher | None]) -> list[int]:
    """How many parts of the pattern may be used up after a name."""
    if at == len(tests):
        return []
    test = tests[at]
    if test is None:
        return [] if name.startswith(".") else [at]
    return [at + 1] if test(name) else []


def _through_folders(used: set[int], tests: list[Matcher | None]) -> set[int]:
    """The same numbers, and those after a `**` that matches no folder."""
    found = set(used)
    while more := {at + 1 for at in found if at < len(tests) and tests[at] is None} - found:
        found |= more
    return found


# Folders that the system or Python makes, without texts of the user.
_NOT_OURS = ("__pycache__", "lost+found")
# A build writes its plan here first.
DATASET_PLAN = (".build", "plan.json")
_NOT_THERE = (FileNotFoundError, NotADirectoryError)

# The folders that contain a file, by device and inode.
_Parents = frozenset[tuple[int, int]]


def walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each folder from this one downwards, with the names of its folders and files, like `os.walk`.

    Folders that the caller removes from the list are not entered.
    """
    yield from _walk(folder, frozenset({_inode(folder)}))


def _walk(folder: str, parents: _Parents) -> Iterator[tuple[str, list[str], list[str]]]:
    entries = _entries(folder)
    folders = [entry.name for entry in entries if _is_folder(entry)]
    yield folder, folders, [entry.name for entry in entries if not _is_folder(entry)]
    for name in folders:
        below = os.path.join(folder, name)
        inode = _inode(below)
        if inode not in parents:
            yield from _walk(below, parents | {inode})


def matches(pattern: str, datasets: list[str] | None = None) -> list[str]:
    """The local files that an absolute pattern matches, in order.

    Datasets are skipped; their folders are added to `datasets`.
    """
    parts = [part for part in _parts(pattern) if part]
    return sorted(set(_matches(os.sep, parts, frozenset(), [] if datasets is None else datasets)))


def is_dataset(folder: str) -> bool:
    """Whether a folder is a dataset, finished or not. Its files were made from texts, and are not sources."""
    if os.path.isfile(os.path.join(folder, *DATASET_PLAN)):
        return True
    return os.path.isfile(os.path.join(folder, "dataset.json")) and os.path.isdir(os.path.join(folder, "provenance"))


def _matches(folder: str, parts: list[str], parents: _Parents, datasets: list[str]) -> Iterator[str]:
    part, *rest = parts
    if part == _FOLDERS:
        yield from _matches(folder, rest, parents, datasets)
        parents |= {_inode(folder)}
        for entry in _entries(folder):
            if not is_passed_over(entry.name) and _is_folder(entry) and _inode(entry.path) not in parents:
                if is_dataset(entry.path):
                    datasets.append(entry.path)
                else:
                    yield from _matches(entry.path, parts, parents, datasets)
    elif is_pattern(part):
        test = _name_test(part)
        for entry in _entries(folder):
            if test(entry.name) and entry.name not in _NOT_OURS:
                yield from _enter(entry.path, rest, parents, datasets)
    else:
        yield from _enter(os.path.join(folder, part), rest, parents, datasets)


def _enter(path: str, rest: list[str], parents: _Parents, datasets: list[str]) -> Iterator[str]:
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except _NOT_THERE:
        return
    except OSError as error:
        raise _unreadable(path, error) from None
    if rest and is_folder:
        yield from _matches(path, rest, parents, datasets)
    elif not rest and not is_folder:
        yield path


def is_passed_over(name: str) -> bool:
    """Whether a folder or file is hidden, or made by the system."""
    return name.startswith(".") or name in _NOT_OURS


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except _NOT_THERE:
        return []
    except OSError as error:
        raise _unreadable(folder, error) from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # reading it reports the error
        return False


def _inode(folder: str) -> tuple[int, int]:
    try:
        found = os.stat(folder)
    except OSError as error:
        raise _unreadable(folder, error) from None
    return found.st_dev, found.st_ino


def _unreadable(path: str, error: OSError) -> SourceError:
    return SourceError(
        f"cannot look into {path}: {error.strerror or error}",
        hint=f"{hint_for(error, 'check the drive')}; or name the sources without it",
    )
