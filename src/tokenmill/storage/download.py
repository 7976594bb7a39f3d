"""Bringing an object to this machine: goes on where a killed one stopped, and believes nothing but its SHA-256.

train/00000.bin.part   grows in order, range after range; a killed process leaves what it has
train/00000.bin        linked when all of it is there, hashes right and is synced
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from tokenmill.errors import DatasetError, StorageError
from tokenmill.storage.folder import Folder
from tokenmill.storage.output import Digest, DirectOutput, explained
from tokenmill.storage.remote import stream

if TYPE_CHECKING:
    from tokenmill.storage.objects import ObjectFolder

PART_SUFFIX = ".part"
# The bytes that came, each time that some did.
Tell = Callable[[int], None]


def download(source: ObjectFolder, target: Folder, name: str, digest: Digest, tell: Tell = lambda _: None) -> None:
    """The object `name` as a file of the same name, or an error: `DatasetError` if it is not what `digest` says.

    Its own name is durable when its folder is synced.
    """
    for is_last in (False, True):
        output = PartOutput(target, name, digest.bytes)
        tell(output.size)
        try:
            with contextlib.closing(_blocks(source, name, digest.bytes, output.size)) as blocks:
                for block in blocks:
                    output.write(block)
                    tell(len(block))
            if output.digest() == digest:
                target.publish_unsynced(output)
                return
        finally:
            output.close()
        # What an earlier process left may be torn, or bytes were changed on their way: once more, from the start.
        tell(-digest.bytes)
        output.discard()
        if is_last:
            raise DatasetError(
                f"{source.at(name)} has the sha256 {output.digest().sha256}, not {digest.sha256}",
                hint=f"tokenmill verify {source.path}",
            )


def begin(target: Folder, name: str) -> None:
    """Have the first bytes of a file, and be it none, so that others see that it comes."""
    target.make(os.path.dirname(name))
    part = f"{name}{PART_SUFFIX}"
    if not target.exists(part):
        with explained(target.at(part)):
            target.fs.close(target.append(part))


def _blocks(source: ObjectFolder, name: str, size: int, start: int) -> Generator[memoryview]:
    """The rest of an object that must have this size. Only where that fails, the store is asked what it has."""
    from tokenmill.storage.store import Found

    try:
        yield from stream(source.store, Found(source.key(name), size, etag="", modified=0), start)
    except StorageError:
        found = source.store.find(source.key(name))
        if found is not None and found.size == size:
            raise
        seen = "is missing" if found is None else f"has {found.size} bytes, not {size}"
        raise DatasetError(f"{source.at(name)} {seen}", hint=f"tokenmill verify {source.path}") from None


class PartOutput(DirectOutput):
    """A file that grows by appending, over several processes if need be."""

    def __init__(self, folder: Folder, name: str, max_bytes: int) -> None:
        part = f"{name}{PART_SUFFIX}"
        there = folder.stat(part)
        if there is not None and (not there.is_file or there.size > max_bytes):
            folder.remove_tree(part)
        super().__init__(name, folder.at(part), folder.fs, folder.append(part))
        for block in folder.blocks(part):
            self._sha.update(block)
            self._size += len(block)

    @property
    def size(self) -> int:
        return self._size

    def digest(self) -> Digest:
        return Digest(bytes=self._size, sha256=self._sha.hexdigest())

    def close(self) -> None:
        """Stop writing; what is there stays, for the next process."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._fs.close(self._fd)
            self._fd = None
