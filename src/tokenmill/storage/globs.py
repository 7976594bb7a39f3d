"""Patterns: which keys of a listing a glob names, in an object store and on the hub alike.

    *       any characters of a name           ?       one character
    [a-z]   one of these characters            [!a-z]  one that is none of these
    **      any number of folders; it stands alone between slashes

A name that begins with a dot is matched by a part that begins with one, and by no other. Everything else is itself,
braces too. Local patterns (storage/globs.py) have the same rules.

Files below a folder, and files that a pattern matches. What cannot be looked into is an error: nothing is left out.

Links to folders are followed, but for those that lead back to where they stand in. Hidden files and folders are
passed over unless a pattern names them. So are datasets, finished or not, wherever a link to one stands.
"""

from __future__ import annotations

import fnmatch
import glob
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
    """The folder that all matches of a pattern lie in, as far as it is spelled out."""
    return _MAGIC.split(pattern)[0].rpartition("/")[0]


def matcher(pattern: str) -> Matcher:
    """What says of a key whether the pattern names it."""
    parts = pattern.split("/")
    if any(_FOLDERS in part and part != _FOLDERS for part in parts):
        raise RecipeError(f"{pattern!r} is no pattern: ** stands for folders", hint="write it like data/**/*.parquet")
    if parts[-1] == _FOLDERS:
        parts.append("*")
    tests = [None if part == _FOLDERS else _name_test(part) for part in parts]

    def matches(key: str) -> bool:
        # How many parts of the pattern may be used up: all ways at once, for some patterns have millions of them.
        used = _through_folders({0}, tests)
        for name in key.split("/"):
            used = _through_folders({after for at in used for after in _steps(name, at, tests)}, tests)
        return len(tests) in used

    return matches


def _name_test(part: str) -> Matcher:
    fits = re.compile(fnmatch.translate(part)).match
    takes_hidden = part.startswith(".")
    return lambda name: fits(name) is not None and (takes_hidden or not name.startswith("."))


def _steps(name: str, at: int, tests: list[Matcher | None]) -> list[int]:
    """Where a name leads to from a place in the pattern."""
    if at == len(tests):
        return []
    test = tests[at]
    if test is None:
        return [] if name.startswith(".") else [at]
    return [at + 1] if test(name) else []


def _through_folders(used: set[int], tests: list[Matcher | None]) -> set[int]:
    """The same places, and those behind parts that may stand for no folder at all."""
    found = set(used)
    while more := {at + 1 for at in found if at < len(tests) and tests[at] is None} - found:
        found |= more
    return found


# Folders that a system or Python makes, and nobody's texts are in.
_NOT_OURS = ("__pycache__", "lost+found")
# Where a build keeps its plan, from its beginning on.
DATASET_PLAN = (".build", "plan.json")
_NOT_THERE = (FileNotFoundError, NotADirectoryError)

# The folders that lead to a place, as the system knows them.
_Way = frozenset[tuple[int, int]]


def walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each folder from this one on down, with the names of the folders and of the files in it, as `os.walk` has them.

    Folders that the caller takes out of the list are not looked into.
    """
    yield from _walk(folder, frozenset({_place(folder)}))


def _walk(folder: str, way: _Way) -> Iterator[tuple[str, list[str], list[str]]]:
    entries = _entries(folder)
    folders = [entry.name for entry in entries if _is_folder(entry)]
    yield folder, folders, [entry.name for entry in entries if not _is_folder(entry)]
    for name in folders:
        below = os.path.join(folder, name)
        place = _place(below)
        if place not in way:
            yield from _walk(below, way | {place})


def matches(pattern: str, datasets: list[str] | None = None) -> list[str]:
    """The files that an absolute pattern matches, in order. `**` stands for any number of folders.

    None of them are datasets: those that it comes by are gathered in `datasets`.
    """
    parts = [part for part in pattern.split(os.sep) if part]
    if parts and parts[-1] == "**":
        parts.append("*")
    return sorted(set(_matches(os.sep, parts, frozenset(), [] if datasets is None else datasets)))


def is_dataset(folder: str) -> bool:
    """Whether a folder is a dataset, finished or not: what is in it was made of texts, and is none itself."""
    if os.path.isfile(os.path.join(folder, *DATASET_PLAN)):
        return True
    return os.path.isfile(os.path.join(folder, "dataset.json")) and os.path.isdir(os.path.join(folder, "provenance"))


def _matches(folder: str, parts: list[str], way: _Way, datasets: list[str]) -> Iterator[str]:
    part, *rest = parts
    if part == "**":
        yield from _matches(folder, rest, way, datasets)
        way |= {_place(folder)}
        for entry in _entries(folder):
            if not is_passed_over(entry.name) and _is_folder(entry) and _place(entry.path) not in way:
                if is_dataset(entry.path):
                    datasets.append(entry.path)
                else:
                    yield from _matches(entry.path, parts, way, datasets)
    elif glob.has_magic(part):
        for entry in _entries(folder):
            is_hidden = is_passed_over(entry.name) and not part.startswith(".")
            if fnmatch.fnmatchcase(entry.name, part) and not is_hidden:
                yield from _go_on(entry.path, rest, way, datasets)
    else:
        yield from _go_on(os.path.join(folder, part), rest, way, datasets)


def _go_on(path: str, rest: list[str], way: _Way, datasets: list[str]) -> Iterator[str]:
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except _NOT_THERE:
        return
    except OSError as error:
        raise _unreadable(path, error) from None
    if rest and is_folder:
        yield from _matches(path, rest, way, datasets)
    elif not rest and not is_folder:
        yield path


def is_passed_over(name: str) -> bool:
    """Whether a folder or a file is none of the user's texts, by its name."""
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
    except OSError:  # whoever reads it will say what is wrong
        return False


def _place(folder: str) -> tuple[int, int]:
    try:
        found = os.stat(folder)
    except OSError as error:
        raise _unreadable(folder, error) from None
    return found.st_dev, found.st_ino


def _unreadable(path: str, error: OSError) -> SourceError:
    return SourceError(
        f"cannot look into {path}: {error.strerror or error}",
        hint=f"{hint_for(error, 'mend the drive')}; or name the sources so that it is not among them",
    )
