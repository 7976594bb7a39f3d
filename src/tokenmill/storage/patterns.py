"""Patterns: which keys of a listing a glob names, in an object store and on the hub alike.

    *       any characters of a name           ?       one character
    [a-z]   one of these characters            [!a-z]  one that is none of these
    **      any number of folders; it stands alone between slashes

A name that begins with a dot is matched by a part that begins with one, and by no other. Everything else is itself,
braces too. Local patterns (sources/walking.py) have the same rules.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from tokenmill.errors import RecipeError

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
