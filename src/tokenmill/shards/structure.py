"""The structure of a dataset: every file is there with its size, every index fits its tokens. Reads no tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tokenmill.errors import DatasetError, StorageError
from tokenmill.manifest import Manifest, Shard
from tokenmill.shards.reader import check_header, check_sizes
from tokenmill.storage import Digest, Folder
from tokenmill.storage.folder import SizeOf

# A file, and what is wrong with it.
Wrong = tuple[str, str]


def wrong_structure(folder: Folder, manifest: Manifest) -> Iterator[Wrong]:
    """Files that are not as the manifest says, in its order. A store is asked for lists, for indexes side by side."""
    size_of = folder.sizes_in(sorted({*map(os.path.dirname, manifest.files), *manifest.splits}))
    yield from _wrong_sizes(manifest.files, size_of)

    def check(shard: Shard) -> list[Wrong]:
        return list(_wrong_shard(folder, shard, manifest.dtype, size_of))

    for split in manifest.splits.values():
        for wrong in folder.each(check, split.shards):
            yield from wrong


def _wrong_sizes(files: dict[str, Digest], size_of: SizeOf) -> Iterator[Wrong]:
    for name, digest in files.items():
        size = size_of(name)
        if size is None:
            yield name, "is missing or not a plain file"
        elif size != digest.bytes:
            yield name, f"has {size} bytes, expected {digest.bytes}"


def _wrong_shard(folder: Folder, shard: Shard, dtype: str, size_of: SizeOf) -> Iterator[Wrong]:
    files = {f"{shard.name}.bin": shard.bin, f"{shard.name}.idx": shard.idx}
    wrong = list(_wrong_sizes(files, size_of))
    yield from wrong
    if wrong:
        return
    try:
        check_sizes(shard, dtype, lambda name: files[name].bytes, where=folder.path)
        check_header(folder, shard, dtype)
    except (DatasetError, StorageError) as error:
        yield f"{shard.name}.idx", error.message.partition(": ")[2]
