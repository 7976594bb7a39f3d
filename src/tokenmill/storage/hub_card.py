"""A dataset's card: which files a config of it has, by the rules of Hugging Face's own `datasets` package.

configs:
- config_name: small
  data_dir: data              where the patterns begin; without any, all that lies below
  data_files:                 a pattern, a list of them, or one entry a split
  - split: train
    path: en/*.jsonl
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenmill.errors import RecipeError
from tokenmill.storage.patterns import is_pattern, matcher

_EVERYTHING = "**"
# Files about a dataset are none of its data, unless they are named.
_ABOUT = (
    "README.md",
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dummy_data.zip",
    "dataset_dict.json",
)
_CHECK = "check the card, or name the files with a glob"


def find_config(card: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What a card says of a config; None if it says nothing."""
    entries = card.get("configs")
    found = [
        entry
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict) and entry.get("config_name") == name
    ]
    return found[-1] if found else None


def files_of(config: Mapping[str, Any], keys: Iterable[str], *, where: str) -> list[str]:
    """The files of a config, in the order of `keys`. A file that is named and not there is a `RecipeError`."""
    keys = list(keys)
    wanted = config.get("data_files")
    found: set[str] = set()
    for pattern in [_EVERYTHING] if wanted is None else _patterns(wanted, where):
        if "://" in pattern or pattern.startswith("/"):
            raise RecipeError(f"{where} names files elsewhere: {pattern}", hint="name them yourself")
        some = select(keys, posixpath.join(str(config.get("data_dir") or ""), pattern))
        if not some and not is_pattern(pattern):
            raise RecipeError(f"{where} names {pattern}, which is not there", hint=_CHECK)
        found.update(some)
    if not found:
        raise RecipeError(f"{where} matches no files", hint=_CHECK)
    return [key for key in keys if key in found]


def select(keys: Iterable[str], pattern: str) -> list[str]:
    """The keys that a pattern of a card names. Folders that begin with two underscores have to be named, too."""
    pattern = "/".join(part for part in pattern.split("/") if part != ".")
    matches = matcher(pattern)
    named, num_special = posixpath.basename(pattern), _num_special(pattern)
    return [
        key
        for key in keys
        if matches(key)
        and _num_special(key) == num_special
        and (posixpath.basename(key) not in _ABOUT or posixpath.basename(key) == named)
    ]


def _num_special(key: str) -> int:
    return sum(part.startswith("__") for part in key.split("/")[:-1])


def _patterns(data_files: Any, where: str) -> Iterator[str]:
    if isinstance(data_files, str):
        yield data_files
    elif isinstance(data_files, list):
        for item in data_files:
            yield from _patterns(item.get("path") if isinstance(item, dict) else item, where)
    else:
        raise RecipeError(f"{where}: its data_files are neither patterns nor a list of them", hint=_CHECK)
