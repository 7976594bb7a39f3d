"""The shape of a layout: a module with a few names in it.

    SUMMARY                  one line for people
    OPTIONS                  which options of `Options` it takes
    NEEDS                    what the tokens must have: "eot" (documents with an end of text), "uint16"
    WIDTHS                   bytes that a token takes here if the dataset has it in two, and in four
    plan(source, options)    what to write: parts, each with the files that belong together, and notes
    open(path, hints)        files of the layout as a dataset with splits, for import

A part is the atom of work and of resume: it is written by one thread, in pieces of bounded size, and done when its
receipt stands. What `plan` refuses, it refuses before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from tokenmill.data.bare import Hints
from tokenmill.data.dataset import Dataset, TokenSplit
from tokenmill.errors import RecipeError
from tokenmill.storage import Digest, Output

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be asked of an export. A layout takes some of them; sizes are in tokens."""

    name: str | None = None
    shard_size: int | None = None
    seq_len: int | None = None
    order: str | None = None
    seed: int | None = None
    templar_compat: bool | None = None

    def given(self) -> dict[str, Any]:
        """Options that were set."""
        pairs = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in pairs.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A part that is done: its files with their digests, and what the part said of itself."""

    fingerprint: str
    part: str
    files: dict[str, Digest]
    facts: dict[str, Any]


class Files(Protocol):
    """Where a part puts its files; they appear under their names when the part is done."""

    def create(self, name: str) -> Output: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Files that belong together. `num_bytes` is about how many; `write` gives facts for its receipt."""

    name: str
    num_bytes: int
    write: Callable[[Files], Facts]


def file_part(name: str, num_bytes: int, blocks: Callable[[], Iterable[bytes | memoryview]]) -> Part:
    """A part of a single file."""

    def write(files: Files) -> Facts:
        output = files.create(name)
        for block in blocks():
            output.write(block)
        return {}

    return Part(name=name, num_bytes=num_bytes, write=write)


def no_more_files(_: Sequence[Receipt]) -> Mapping[str, bytes]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What an export writes: its parts, then small files that sum them up. `notes` say what is not kept."""

    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    finish: Callable[[Sequence[Receipt]], Mapping[str, bytes]] = no_more_files


class Layout(Protocol):
    """A layout module."""

    SUMMARY: str
    OPTIONS: frozenset[str]
    NEEDS: frozenset[str]
    WIDTHS: tuple[int, int]

    def plan(self, source: Dataset, options: Options) -> Export: ...
    def open(self, path: str, hints: Hints) -> Dataset: ...


def filled_splits(source: Dataset) -> dict[str, TokenSplit]:
    """The splits that have tokens: no reader can map an empty file."""
    return {name: source[name] for name in source.splits if source[name].num_tokens}


def train_and_val(source: Dataset, layout: str) -> dict[str, TokenSplit]:
    """The same of a layout that knows no other splits."""
    splits = filled_splits(source)
    if others := sorted(splits.keys() - {"train", "val"}):
        raise RecipeError(f"{layout} has no place for the split {others[0]!r}", hint="it has train and val alone")
    return splits


def require_shard_size(size: int, *, most: int, layout: str, why: str) -> int:
    """A shard size that the layout's readers can seek in."""
    if not 1 <= size <= most:
        raise RecipeError(f"{layout} cannot have shards of {size} tokens: {why}", hint=f"use at most {most}")
    return size
