"""Files that other programs wrote: found, mapped and parsed with nothing believed."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import DatasetError
from tokenmill.storage.maps import map_file

_MAX_INDEX_BYTES = 1 << 30
_WHOLE = "is it whole?"


def find_indexes(path: str, name: str, layout: str, *, ending: str) -> dict[str, tuple[str, Any]]:
    """By split: a folder with an index of some name, and what the index says. Folders in a folder are splits.

    One that has files with this ending and no index is a split that has lost it.
    """
    folders = {"train": path}
    if not os.path.isfile(f"{path}/{name}"):
        names = [one for one in sorted(os.listdir(path)) if one.isidentifier()] if os.path.isdir(path) else []
        folders = {one: f"{path}/{one}" for one in names if os.path.isfile(f"{path}/{one}/{name}")}
        for one in names:
            if folders and one not in folders and _has_files(f"{path}/{one}", ending):
                raise DatasetError(f"{path}/{one} has no {name}", hint=f"{_WHOLE} else move the folder away")
    if not folders:
        raise DatasetError(f"{path} holds nothing of layout {layout}", hint=f"give the folder that has the {name}")
    return {split: (folder, read_index(f"{folder}/{name}")) for split, folder in folders.items()}


def _has_files(folder: str, ending: str) -> bool:
    return os.path.isdir(folder) and any(name.endswith(ending) for name in os.listdir(folder))


def read_index(path: str) -> Any:
    """A small file of JSON, or of YAML if its name says so."""
    try:
        if os.path.getsize(path) > _MAX_INDEX_BYTES:
            raise DatasetError(f"{path} is too large for an index", hint=_WHOLE)
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}", hint="check the path") from None
    try:
        if not path.endswith(".yaml"):
            return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is no JSON: {error}", hint=_WHOLE) from None
    import yaml

    try:
        return yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is no YAML: {error}", hint=_WHOLE) from None


def picked(kind: Any, record: Any) -> Any:
    """A record without the keys that a dataclass has no field for."""
    if not isinstance(record, dict):
        return record
    return {name: record[name] for name in kind.__dataclass_fields__ if name in record}


def map_bytes(path: str, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a file that must have so many, mapped."""
    data = map_file_bytes(path)
    if len(data) != size:
        raise DatasetError(f"{path}: {len(data)} bytes, the index says {size}", hint=_WHOLE)
    return data


def map_file_bytes(path: str) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped."""
    try:
        return map_file(path, np.uint8)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}", hint="check the path") from None
