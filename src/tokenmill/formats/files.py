"""Files that are opened in place: names, splits, headers and memory maps.

    train_000001.bin  val_000000.bin     a split by a word in the name
    train/00000.ds    val/00000.ds       or by the folder

Everything here takes files as other programs left them: what is missing, damaged or changed is a `DatasetError`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
from tokenmill.errors import DatasetError, hint_for
from tokenmill.formats.base import TokenFile
from tokenmill.storage.memory_maps import map_file, open_plain

NPY_MAGIC = b"\x93NUMPY"
DTYPE_HINT = "is the file complete? Otherwise give `dtype`: uint16 or uint32"


def map_token_file(file: TokenFile, dtype: str) -> Tokens:
    """The tokens of a file, mapped."""
    kind = numpy_dtype(dtype)
    try:
        if os.path.getsize(file.path) < file.offset + file.num_tokens * kind.itemsize:
            raise DatasetError(f"{file.path} has become shorter", hint="is it still being written?")
        return map_file(file.path, kind, offset=file.offset, count=file.num_tokens)
    except OSError as error:
        raise DatasetError(
            f"{file.path} cannot be read: {error.strerror}", hint=hint_for(error, "check the path")
        ) from None


def fitting_dtype(size: int, table: npt.NDArray[np.int64] | None) -> str | None:
    """The dtype with which this many bytes hold the tokens of a table of document ends."""
    count = int(table[-1]) if table is not None else 0
    return {2 * count: "uint16", 4 * count: "int32"}.get(size) if count else None


def eot_policy(
    files: dict[str, list[TokenFile]],
    dtype: str,
    eot_id: int | None,
    inner_ends: dict[str, list[Any]],
    units_per_token: int,
) -> str:
    """Where the end of text is in the first document of each split, if all agree."""
    if eot_id is None:
        return "none"
    seen = set()
    for split, found in files.items():
        first = inner_ends[split][0]
        end = int(first[0]) // units_per_token if len(first) else found[0].num_tokens
        document = map_token_file(found[0], dtype)[:end]
        seen.add("append" if document[-1] == eot_id else "prepend" if document[0] == eot_id else "none")
    return seen.pop() if len(seen) == 1 else "none"


def groups_by_name(paths: Sequence[str]) -> dict[str, list[str]]:
    """Files by split: `val` or `test` as a word of the name, everything else is train."""
    groups: dict[str, list[str]] = {}
    for path in sorted(paths):
        words = re.split(r"[_.-]", os.path.basename(path))
        groups.setdefault(next((word for word in words if word in ("val", "test")), "train"), []).append(path)
    return groups


def files_by_folder(path: str, suffix: str, index_suffix: str) -> dict[str, list[str]]:
    """A file, the files of a folder, or those of its folders, which are splits then.

    `index_suffix` is that of the file beside each that stores where its documents end.
    """
    if os.path.isfile(path):
        return {"train": [path]} if path.endswith(suffix) else {}
    folders = {"train": path}
    if not any(name.endswith(suffix) for name in names_in(path)):
        folders = {name: f"{path}/{name}" for name in names_in(path) if name.isidentifier()}
    found = {}
    for split, folder in folders.items():
        inside = [f"{folder}/{name}" for name in names_in(folder) if name.endswith(suffix)]
        if inside or any(name.endswith(index_suffix) for name in names_in(folder)):
            found[split] = inside
    if any(found.values()):
        for split in found:
            check_pairs(folders[split], index_suffix, suffix)
    return {split: inside for split, inside in found.items() if inside}


def check_pairs(folder: str, suffix: str, other_suffix: str) -> None:
    """Refuse a file without the other file of its pair: its tokens would be left out silently."""
    names = set(names_in(folder))
    for name in sorted(names):
        if name.endswith(suffix) and (missing := f"{name.removesuffix(suffix)}{other_suffix}") not in names:
            raise DatasetError(
                f"{folder} has {name} without {missing}", hint="is a file missing? Otherwise move it away"
            )


def check_numbers(paths: Sequence[str]) -> None:
    """Refuse a gap in numbered files: a document may continue from one to the next."""
    numbers = [int(found[-1]) for path in paths if (found := re.findall(r"\d+", os.path.basename(path)))]
    for before, number, path in zip(numbers, numbers[1:], paths[1:], strict=False):
        if number != before + 1:
            raise DatasetError(f"{path} follows number {before}", hint="is a file missing between them?")


def names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if isinstance(error, PermissionError):
            raise DatasetError(f"{folder} cannot be read: {error.strerror}", hint=hint_for(error, "")) from None
        return []


def size_of(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read: {error.strerror}", hint=hint_for(error, "is a file missing?")
        ) from None


def head_of(path: str, size: int) -> bytes:
    try:
        with open(path, "rb", opener=open_plain) as file:
            return file.read(size)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}", hint=hint_for(error, "check the path")) from None


def mapped(path: str, kind: str, offset: int = 0, count: int | None = None) -> npt.NDArray[Any]:
    try:
        return map_file(path, kind, offset=offset, count=count)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be mapped: {error}", hint="is the file complete?") from None
