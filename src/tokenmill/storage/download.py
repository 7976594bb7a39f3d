"""Bringing an object to this machine: goes on where a killed one stopped, and believes nothing but its SHA-256.

train/00000.bin.part   grows in order, range after range; a killed process leaves what it has
train/00000.bin        linked when all of it is there, hashes right and is synced
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenmill.errors import DatasetError, StorageError
from tokenmill.storage.folder import Folder
from tokenmill.storage.output import Digest, explained, write_all
from tokenmill.storage.remote import stream

if TYPE_CHECKING:
    from tokenmill.storage.objects import ObjectFolder

PART_SUFFIX = ".part"
# The bytes that came, each time that some did.
Tell = Callable[[int], None]


def download(source: ObjectFolder, target: Folder, name: str, digest: Digest, tell: Tell = lambda _: None) -> None:
    """The object `name` as a file of the same name, or an error: `DatasetError` if it is not what `digest` says."""
    found = source.store.find(source.key(name))
    if found is None or found.size != digest.bytes:
        seen = "is missing" if found is None else f"has {found.size} bytes, not {digest.bytes}"
        raise DatasetError(f"{source.at(name)} {seen}", hint=f"tokenmill verify {source.path}")
    for is_last in (False, True):
        output = PartOutput(target, name, digest.bytes)
        tell(output.size)
        try:
            with contextlib.closing(stream(source.store, found.key, output.size, found.size, found.etag)) as blocks:
                for block in blocks:
                    output.write(block)
                    tell(len(block))
            if output.digest() == digest:
                target.publish([output])
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


class PartOutput:
    """A file that grows by appending, over several processes if need be."""

    def __init__(self, folder: Folder, name: str, max_bytes: int) -> None:
        self.name = name
        self._part = f"{name}{PART_SUFFIX}"
        self._folder = folder
        self._sha = hashlib.sha256()
        self.size = 0
        there = folder.stat(self._part)
        if there is not None and (not there.is_file or there.size > max_bytes):
            folder.remove_tree(self._part)
        elif there is not None:
            for block in folder.blocks(self._part):
                self._sha.update(block)
                self.size += len(block)
        with explained(folder.at(self._part)):
            self._fd: int | None = folder.fs.append(folder.at(self._part))

    def write(self, data: bytes | memoryview) -> int:
        assert self._fd is not None, "written after it was settled"
        view = memoryview(data).cast("B")
        self._sha.update(view)
        write_all(self._folder.fs, self._fd, view, self._folder.at(self._part))
        self.size += len(view)
        return len(view)

    def digest(self) -> Digest:
        return Digest(bytes=self.size, sha256=self._sha.hexdigest())

    def settle(self) -> tuple[str, Digest]:
        assert self._fd is not None, "settled twice"
        fd, self._fd = self._fd, None
        path = self._folder.at(self._part)
        try:
            with explained(path):
                self._folder.fs.fsync(fd)
        finally:
            with explained(path):
                self._folder.fs.close(fd)
        return path, self.digest()

    def close(self) -> None:
        """Stop writing; what is there stays, for the next process."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._folder.fs.close(self._fd)
            self._fd = None

    def discard(self) -> None:
        self.close()
        with contextlib.suppress(StorageError):
            self._folder.remove(self._part)
