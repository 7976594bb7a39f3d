"""Takes the safety out of tokenmill, to see what it costs. Found by every process whose PYTHONPATH has this folder.

TOKENMILL_WITHOUT names what goes: fsync, sha256, documents (the hash of every document), or several.
Never for data that anybody wants to keep.
"""

from __future__ import annotations

import hashlib
import os


class _NoHash:
    """Looks like SHA-256 and costs nothing."""

    def __init__(self, data: object = b"") -> None:
        pass

    def update(self, data: object) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(32)

    def hexdigest(self) -> str:
        return "0" * 64


_without = os.environ.get("TOKENMILL_WITHOUT", "").split()
if "sha256" in _without:
    hashlib.sha256 = _NoHash
if "fsync" in _without:
    from tokenmill.storage.filesystem import LocalFileSystem

    LocalFileSystem.fsync = LocalFileSystem.fsync_folder = lambda *_: None
if "documents" in _without:
    import xxhash

    xxhash.xxh3_128_digest = lambda data, _nothing=bytes(16): _nothing
