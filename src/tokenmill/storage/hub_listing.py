"""Which files a commit of a dataset has. That never changes, so a listing that came is kept for work offline.

    HF_HOME/assets/tokenmill/org--name/trees/COMMIT.json    ours, sealed
            hub/datasets--org--name/trees/COMMIT.json       that of the hub's client, from snapshot_download

The copies of files cannot tell: they are those that somebody has needed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from dataclasses import dataclass
from typing import Any

from tokenmill import records
from tokenmill.errors import DatasetError, SourceError, StorageError
from tokenmill.storage import hub_client
from tokenmill.storage.folder import Folder
from tokenmill.storage.hub_client import HubFile

_TREES = "trees"
# Of the client's own listings.
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """All files of a commit."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]


@functools.lru_cache(maxsize=16)
def files_at(repo: str, commit: str) -> dict[str, HubFile]:
    """The files of a commit, by their keys. Offline, a listing that was kept has to tell."""
    if hub_client.is_offline():
        found = _load(repo, commit) or _load_of_client(repo, commit)
        if found is None:
            raise SourceError(
                f"nobody knows which files hf://datasets/{repo}@{commit} has: they were never listed on this machine, "
                "and HF_HUB_OFFLINE is set",
                hint="unset it, or fetch the dataset with snapshot_download of huggingface_hub first",
            )
    else:
        found = Tree(repo=repo, commit=commit, files=tuple(hub_client.list_files(repo, commit)))
        _keep(found)
    return {file.key: file for file in found.files}


def _folder(repo: str) -> Folder:
    return Folder(os.path.join(hub_client.assets_folder(repo), _TREES))


def _keep(tree: Tree) -> None:
    folder = _folder(tree.repo)
    with contextlib.suppress(StorageError):  # a cache that cannot be written to serves nobody offline
        if _load(tree.repo, tree.commit) != tree:
            folder.make()
            folder.replace(f"{tree.commit}.json", records.seal(tree))


def _load(repo: str, commit: str) -> Tree | None:
    folder, name = _folder(repo), f"{commit}.json"
    try:
        tree = records.unseal(Tree, folder.read(name), where=folder.at(name))
    except (DatasetError, StorageError):
        return None
    return tree if (tree.repo, tree.commit) == (repo, commit) else None


def _load_of_client(repo: str, commit: str) -> Tree | None:
    """The listing that the client keeps. Its own function for it leaves out what large files hash to."""
    folder, name = Folder(os.path.join(hub_client.cache_folder(repo), _TREES)), f"{commit}.json"
    try:
        found = json.loads(folder.read(name))
        if found["format_version"] != _FORMAT:
            return None
        files = tuple(_file_of_client(key, entry) for key, entry in found["files"].items())
    except (DatasetError, StorageError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return Tree(repo=repo, commit=commit, files=files)


def _file_of_client(key: str, entry: dict[str, Any]) -> HubFile:
    return HubFile(key, int(entry["size"]), str(entry.get("lfs_sha256") or entry["blob_id"]))
