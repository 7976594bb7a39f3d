"""Token files of others, listed: which there are by split, whether some are missing, how large they are."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from tokenmill.errors import DatasetError
from tokenmill.storage.maps import map_file


def groups_by_name(paths: Sequence[str]) -> dict[str, list[str]]:
    """Files by split, as their names tell it: `val` in a name is validation, `test` a test, all else is training."""
    groups: dict[str, list[str]] = {}
    for path in sorted(paths):
        parts = re.split(r"[_.-]", os.path.basename(path))
        groups.setdefault(next((part for part in parts if part in ("val", "test")), "train"), []).append(path)
    return groups


def files_by_folder(path: str, ending: str, beside: str) -> dict[str, list[str]]:
    """A file, the files of a folder, or those of the folders in it, which are splits then.

    `beside` is how the file ends that says where the documents of another are.
    """
    if os.path.isfile(path):
        return {"train": [path]} if path.endswith(ending) else {}
    folders = {"train": path}
    if not any(name.endswith(ending) for name in names_in(path)):
        folders = {name: f"{path}/{name}" for name in names_in(path) if name.isidentifier()}
    found = {}
    for split, folder in folders.items():
        inside = [f"{folder}/{name}" for name in names_in(folder) if name.endswith(ending)]
        if inside or any(name.endswith(beside) for name in names_in(folder)):
            found[split] = inside
    if any(found.values()):
        for split in found:
            check_pairs(folders[split], beside, ending)
    return {split: inside for split, inside in found.items() if inside}


def check_pairs(folder: str, ending: str, other: str) -> None:
    """Refuse a file whose other half is missing: its tokens would be left out without a word."""
    names = set(names_in(folder))
    for name in sorted(names):
        if name.endswith(ending) and (missing := f"{name.removesuffix(ending)}{other}") not in names:
            raise DatasetError(f"{folder} has {name} without {missing}", hint="is a file missing? else move it away")


def check_numbers(paths: Sequence[str]) -> None:
    """Refuse to close a gap between numbered files: a document may go on from one to the next."""
    numbers = [int(found[-1]) for path in paths if (found := re.findall(r"\d+", os.path.basename(path)))]
    for before, number, path in zip(numbers, numbers[1:], paths[1:], strict=False):
        if number != before + 1:
            raise DatasetError(f"{path} comes after number {before}", hint="is a file missing between them?")


def names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def size_of(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}", hint="is a file missing?") from None


def head_of(path: str, size: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}", hint="check the path") from None


def mapped(path: str, kind: str, offset: int = 0, count: int | None = None) -> npt.NDArray[Any]:
    try:
        return map_file(path, kind, offset=offset, count=count)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be mapped: {error}", hint="is it whole?") from None
