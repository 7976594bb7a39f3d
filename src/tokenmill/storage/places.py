"""Where a dataset is: a path of this machine or a URL, and the folder that stands for it."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tokenmill import arguments, records
from tokenmill.errors import RecipeError
from tokenmill.storage.folder import Folder
from tokenmill.storage.urls import is_url, parse_url

CACHE = "TOKENMILL_CACHE"


def open_folder(
    path: str | os.PathLike[str], *, spool: str | os.PathLike[str] | None = None, name: str = "path"
) -> Folder:
    """The folder at a path or a URL. What is written to a URL grows below `spool` first. Errors say its `name`."""
    text = arguments.place(name, path)
    if not is_url(text):
        return Folder(os.path.abspath(text))
    url = str(parse_url(text))
    # Only here: a trainer that reads a local dataset needs no object stores.
    from tokenmill.storage.objects import ObjectFolder

    base = local_folder(spool).path if spool is not None else os.path.join(cache_path(), "spool")
    return ObjectFolder(url, spool=os.path.join(base, f"tokenmill-{records.digest(url)[:12]}"))


def local_folder(path: str | os.PathLike[str], *, name: str = "path") -> Folder:
    """The folder at a path of this machine."""
    text = arguments.place(name, path)
    if is_url(text):
        raise RecipeError(f"{text.partition(':')[0]}:// is no place on this machine", hint="give a local folder")
    return Folder(os.path.abspath(text))


def cache_path() -> str:
    """Where copies of remote files are kept on this machine: TOKENMILL_CACHE, or a folder of the user's."""
    found = os.environ.get(CACHE) or os.path.join(os.path.expanduser("~"), ".cache", "tokenmill")
    return local_folder(found).path


def to_record(folder: Folder) -> dict[str, Any]:
    """A folder as plain data, for another process of this machine."""
    names = [field.name for field in dataclasses.fields(folder)]
    return {name: getattr(folder, name) for name in names if name != "fs"}


def from_record(record: dict[str, Any]) -> Folder:
    """The folder that `to_record` wrote down."""
    if "spool" not in record:
        return Folder(**record)
    from tokenmill.storage.objects import ObjectFolder

    return ObjectFolder(**record)


def ready(folder: Folder) -> tuple[Folder, str]:
    """The folder as a writer needs it, and what its user should know: not every store keeps two writers apart."""
    if folder.is_local:
        return folder, ""
    from tokenmill.storage.objects import ObjectFolder

    assert isinstance(folder, ObjectFolder), "there are no others"
    probed = folder.probed()
    note = f"{folder.path}: this store ignores conditional puts, so nothing but this one build may write there"
    return probed, "" if probed.conditional else note
