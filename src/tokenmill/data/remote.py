"""A dataset in an object store, opened: its manifest is read there, its shards are copied here as they are needed."""

from __future__ import annotations

import os

from tokenmill import manifest as manifests
from tokenmill import records
from tokenmill.manifest import Manifest
from tokenmill.sizes import parse_size
from tokenmill.storage.cache import CachedFolder, open_cache
from tokenmill.storage.folder import Folder
from tokenmill.storage.objects import ObjectFolder
from tokenmill.storage.places import cache_path, local_folder
from tokenmill.storage.room import LIMIT


def open_remote(
    source: Folder, *, cache: str | os.PathLike[str] | None, cache_bytes: int | str | None
) -> tuple[CachedFolder, Manifest]:
    """The copies of a remote dataset on this machine, and its manifest."""
    assert isinstance(source, ObjectFolder), "there are no other remote folders"
    manifest = manifests.load(source)
    place = cache_path() if cache is None else local_folder(cache).path
    folder = open_cache(
        source, manifest.all_files(), identity=records.digest(manifest), cache=place, limit=_limit(cache_bytes)
    )
    if manifest.tokenizer["file"]:
        with folder.need([manifest.tokenizer["file"]]):
            pass  # it stays here as long as this process may read it
    return folder, manifest


def _limit(given: int | str | None) -> int:
    """Bytes that the cache may take; 0 leaves it to the disk."""
    wanted = (os.environ.get(LIMIT) or None) if given is None else given
    return 0 if wanted is None else parse_size(wanted, name=LIMIT if given is None else "cache_bytes")
