"""The manifest, `dataset.json`: what a dataset is, and what every file of it must hash to.

Written last; a folder without it is not a dataset. It holds no times, hosts, paths or
worker counts: the same sources and the same recipe give the same bytes of it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from tokenmill import records
from tokenmill.errors import DatasetError

NAME = "dataset.json"
FORMAT = 1
# Why a document is not kept. The first group is policy; the second is bad input, which is quarantined.
DROPS = ("empty", "too_short", "too_large", "filtered", "over_budget")
BAD = ("invalid_json", "missing_field", "null_text", "not_text", "lone_surrogate", "invalid_utf8")
_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What a .bin and .idx pair holds. Its files are `name` with those endings."""

    name: str
    tokens: int
    documents: int
    bin: Digest
    idx: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    tokens: int
    documents: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTotal:
    """What came from one source. `text_sum` is the sum of its documents' 128-bit hashes."""

    name: str
    bytes: int
    documents: int
    text_sum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    format: int
    fingerprint: str
    identity: dict[str, Any]
    tokenizer: dict[str, Any]
    parity: dict[str, Any]
    dtype: str
    splits: dict[str, Split]
    documents_read: int
    dropped: dict[str, int]
    text_sum: str
    sources: tuple[SourceTotal, ...]
    files: dict[str, Digest]

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self.splits.values())

    @property
    def quarantined(self) -> int:
        """Documents that were bad input; `.build/rejects` names them."""
        return sum(count for reason, count in self.dropped.items() if reason in BAD)

    def all_files(self) -> dict[str, Digest]:
        """Every file that the dataset consists of, but for the manifest itself."""
        found = dict(self.files)
        for split in self.splits.values():
            for shard in split.shards:
                found[f"{shard.name}.bin"] = shard.bin
                found[f"{shard.name}.idx"] = shard.idx
        return found


def seal(manifest: Manifest) -> bytes:
    return records.seal(manifest)


def unseal(data: bytes, *, where: str = NAME) -> Manifest:
    """A manifest that can be trusted: sealed, typed, names plain, sums right. Or `DatasetError`."""
    manifest = records.unseal(Manifest, data, where=where)
    if manifest.format != FORMAT:
        raise DatasetError(
            f"{where}: format {manifest.format}, this tokenmill reads {FORMAT}", hint="use the tokenmill that wrote it"
        )
    if manifest.dtype not in ("uint16", "int32"):
        raise DatasetError(f"{where}: unknown dtype {manifest.dtype!r}", hint=_HINT)
    seen = 0
    for split in manifest.splits.values():
        seen += 2 * len(split.shards)
        for what in ("tokens", "documents"):
            if getattr(split, what) != sum(getattr(shard, what) for shard in split.shards):
                raise DatasetError(f"{where}: the {what} of a split do not sum up", hint=_HINT)
    files = manifest.all_files()
    if len(files) != seen + len(manifest.files):
        raise DatasetError(f"{where}: a file stands twice", hint=_HINT)
    for name, digest in files.items():
        check_name(name, where=where)
        if not _SHA256.fullmatch(digest.sha256) or digest.bytes < 0:
            raise DatasetError(f"{where}: {name} has no sensible digest", hint=_HINT)
    return manifest


def load(path: str) -> Manifest:
    """The manifest of a dataset folder."""
    where = os.path.join(path, NAME)
    try:
        with open(where, "rb") as file:
            return unseal(file.read(records.MAX_RECORD_BYTES + 1), where=where)
    except FileNotFoundError:
        hint = (
            "its build has not finished: run the same tokenmill prepare command again"
            if os.path.isdir(os.path.join(path, ".build"))
            else "give the folder that tokenmill prepare wrote"
        )
        raise DatasetError(f"{path} is not a dataset: it has no {NAME}", hint=hint) from None
    except OSError as error:
        raise DatasetError(f"{where}: {error.strerror}", hint="check the drive") from None


def check_name(name: str, *, where: str) -> None:
    """Refuse names that could lead out of the dataset's folder."""
    if not all(_PART.fullmatch(part) for part in name.split("/")) or len(name) > 255:
        raise DatasetError(f"{where}: {name!r} is no name for a file of a dataset", hint=_HINT)


_HINT = "the manifest is damaged or was not written by tokenmill"
