"""The manifest, `dataset.json`: recipe, tokenizer, splits, and size and SHA-256 of every file.

It is written last; a folder without it is not a dataset. It contains no times, hosts, paths or worker counts: the
same sources and the same recipe give the same bytes.

A dataset may also be spread over nodes. Its plan is dealt into parts, each built on one node's own disk, and the
record `nodes.json` says which part is where:

    units of the plan    0 3 5 8 | 1 4 9 | 2 6 7     of similar size, spread over the whole plan
    parts                   0    |   1   |   2       each a dataset, in OUT on its node
    nodes.json            node1  | node3 | node2     written when all parts are complete, the same on every node

The plan of a part has only its own units and their sources, and names the whole plan. A restart reads from the disks
which node has which part, so no list of nodes has to be stored. Parts that version 0.1 dealt are runs of units.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill import records
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.records import Int, convert
from tokenmill.sizes import counted
from tokenmill.storage.base import Storage
from tokenmill.storage.output import Digest

_MAX_NAME_CHARS, _MAX_SPLIT_CHARS = 255, 64
_SHOWN_NODES = 4
# What a finished export says about itself.
EXPORT_RECORD = ".build/export.json"
MANIFEST = "dataset.json"
FORMAT = 1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.tiktoken", "characters.json", "tokenizer.model")
# Why a document is not kept: policy, and bad input, which is quarantined.
DROPS = ("empty", "too_short", "too_large", "filtered", "no_tokens", "over_budget")
# Left out by a sample of documents. Not among the reasons above, which every provenance file lists.
NOT_SAMPLED = "not_sampled"
BAD = ("invalid_json", "missing_field", "null_text", "not_text", "lone_surrogate", "invalid_utf8", "invalid_csv")
# Describes the tokenizer of imported tokens if none was named.
UNKNOWN_TOKENIZER: dict[str, Any] = {
    "name": "unknown",
    "kind": "unknown",
    "scheme": "",
    "file": None,
    "fingerprint": "",
    "vocab_size": 0,
    "eot_id": None,
    "engine": "",
}
NODES = "nodes.json"
# What a person looks at. It is not part of the dataset, and can be written again at any time.
REPORT = "report.html"
CARD = "README.md"
NODES_FORMAT = 1
# The key in a plan's or manifest's identity.
NODES_IDENTITY = "part"
# How a part was dealt: every part is a fair sample.
SPREAD = "spread"

_HINT = "the manifest is damaged or was not written by tokenmill"
_SAME_FOLDER = "rename one of them: they would be the same folder on many disks"
_NO_PLAN = "pull or import it again with the same command, or prepare the dataset again, into another folder"
_OTHER_FORMAT = "use the version of tokenmill that wrote it"
_NAME_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A .bin and .idx pair. Its files are `name` with those suffixes."""

    name: str
    tokens: Int
    documents: Int
    bin: Digest
    idx: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    tokens: Int
    documents: Int
    shards: Sequence[Shard]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTotal:
    """The documents of one source. `text_sum` is the sum of their 128-bit hashes."""

    name: str
    bytes: Int
    documents: Int
    text_sum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    format: Int
    fingerprint: str
    identity: dict[str, Any]
    tokenizer: dict[str, Any]
    parity: dict[str, Any]
    dtype: str
    splits: dict[str, Split]
    documents_read: Int
    dropped: dict[str, Int]
    text_sum: str
    sources: Sequence[SourceTotal]
    files: dict[str, Digest]

    def __repr__(self) -> str:
        totals = f"{counted(self.tokens, 'token')}, {counted(self.documents, 'document')}"
        return f"Manifest({totals} in {', '.join(self.splits)}; {self.fingerprint[:12]})"

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self.splits.values())

    @property
    def quarantined(self) -> int:
        """Documents that were bad input. `.build/rejects` lists them."""
        return sum(count for reason, count in self.dropped.items() if reason in BAD)

    @property
    def num_files(self) -> int:
        return len(self.files) + 2 * sum(len(split.shards) for split in self.splits.values())

    def content(self, *splits: str) -> str:
        """A digest of the files of some splits (by default all).

        The fingerprint only covers the recipe and the names and sizes of sources, so other text of the same size
        does not change it.
        """
        sha = hashlib.sha256()
        for name in splits or self.splits:
            shards = self.splits[name].shards
            sha.update(f"{name} {len(shards)}\n".encode())
            for shard in shards:
                sha.update(f"{shard.bin.sha256}{shard.idx.sha256}".encode())
        return sha.hexdigest()

    def all_files(self) -> dict[str, Digest]:
        """Every file of the dataset except the manifest itself."""
        return dict(self.each_file())

    def each_file(self) -> Iterator[tuple[str, Digest]]:
        """The same, one at a time: there may be millions."""
        yield from self.files.items()
        for split in self.splits.values():
            for shard in split.shards:
                yield f"{shard.name}.bin", shard.bin
                yield f"{shard.name}.idx", shard.idx


def seal_manifest(manifest: Manifest) -> bytes:
    return records.seal(manifest)


def unseal_manifest(data: bytes, *, where: str = MANIFEST) -> Manifest:
    """A manifest that was checked: its seal, types, file names and sums. Raises `DatasetError`."""
    manifest = records.unseal(Manifest, data, where=where)
    if manifest.format != FORMAT:
        raise DatasetError(
            f"{where}: format {manifest.format}, this version of tokenmill reads {FORMAT}", hint=_OTHER_FORMAT
        )
    if manifest.dtype not in ("uint16", "int32"):
        raise DatasetError(f"{where}: unknown dtype {manifest.dtype!r}", hint=_HINT)
    _check_files(manifest, where)
    _check_sums(manifest, where)
    check_tokenizer(manifest.tokenizer, where=where)
    return manifest


def _check_files(manifest: Manifest, where: str) -> None:
    """Splits are the sums of their shards, names stay in the folder, and no file is listed twice."""
    for name, digest in manifest.files.items():
        _check_file(name, digest, where)
    in_order = True
    for split_name, split in manifest.splits.items():
        check_split_name(split_name, where=where)
        before, tokens, documents = (0, ""), 0, 0
        for shard in split.shards:
            _check_shard(shard, where)
            tokens, documents = tokens + shard.tokens, documents + shard.documents
            # Shards in the order of their numbers, each in the folder of its split, are all different.
            number = len(shard.name), shard.name
            in_order = in_order and before < number and shard.name.startswith(f"{split_name}/")
            in_order = in_order and manifest.files.keys().isdisjoint((f"{shard.name}.bin", f"{shard.name}.idx"))
            before = number
        for what, found, total in (("tokens", split.tokens, tokens), ("documents", split.documents, documents)):
            if found != total:
                raise DatasetError(f"{where}: the {what} of a split do not add up", hint=_HINT)
    if not in_order and len(manifest.all_files()) < manifest.num_files:
        raise DatasetError(f"{where}: a file is listed twice", hint=_HINT)


def _check_shard(shard: Shard, where: str) -> None:
    for ending, digest in ((".bin", shard.bin), (".idx", shard.idx)):
        _check_file(f"{shard.name}{ending}", digest, where)
    if min(shard.tokens, shard.documents) < 0:
        raise DatasetError(f"{where}: a count is negative", hint=_HINT)


def _check_file(name: str, digest: Digest, where: str) -> None:
    check_name(name, where=where)
    if not _SHA256.fullmatch(digest.sha256):
        raise DatasetError(f"{where}: {name} has an invalid digest", hint=_HINT)
    if digest.bytes < 0:
        raise DatasetError(f"{where}: a count is negative", hint=_HINT)


def _check_sums(manifest: Manifest, where: str) -> None:
    """No count is negative, and every document is accounted for."""
    of_sources = (source.documents for source in manifest.sources)
    if min(itertools.chain([manifest.documents_read], manifest.dropped.values(), of_sources)) < 0:
        raise DatasetError(f"{where}: a count is negative", hint=_HINT)
    if manifest.documents_read != manifest.documents + sum(manifest.dropped.values()):
        raise DatasetError(
            f"{where}: {manifest.documents_read} documents read, but {manifest.documents} kept and "
            f"{sum(manifest.dropped.values())} dropped",
            hint=_HINT,
        )


def load_manifest(folder: Storage, *, command: str = "open") -> Manifest:
    """The manifest of a dataset folder. `command` is what the error for another folder is to help with."""
    if not folder.exists(MANIFEST):
        from tokenmill.dataset.folder_kinds import not_a_dataset

        raise not_a_dataset(folder, command)
    try:
        return unseal_manifest(folder.read(MANIFEST, max_bytes=records.MAX_RECORD_BYTES), where=folder.at(MANIFEST))
    except DatasetError as error:
        if error.hint == _OTHER_FORMAT:
            raise
        hint = "run tokenmill repair" if folder.exists(".build/plan.json") else _NO_PLAN
        raise DatasetError(error.message, hint=hint) from None


def check_name(name: str, *, where: str) -> None:
    """Refuse names that could lead out of the dataset's folder."""
    if not is_name(name):
        raise DatasetError(f"{where}: {name!r} is not a valid name for a file of a dataset", hint=_HINT)


def is_name(name: str) -> bool:
    """Whether a name stays inside the folder that it is in, and is valid on every system."""
    return all(_NAME_PART.fullmatch(part) for part in name.split("/")) and len(name) <= _MAX_NAME_CHARS


def check_split_name(name: str, *, where: str) -> None:
    if not (name.isascii() and name.isidentifier()) or len(name) > _MAX_SPLIT_CHARS or name == "provenance":
        raise DatasetError(f"{where}: {name!r} is not a valid name for a split", hint=_HINT)


def check_case(splits: Iterable[str], *, where: str) -> None:
    """Refuse splits whose names differ only in case: on many disks they are one folder."""
    known: dict[str, str] = {}
    for name in splits:
        if (other := known.setdefault(name.lower(), name)) != name:
            raise RecipeError(f"{where}: the splits {other!r} and {name!r} differ only in case", hint=_SAME_FOLDER)


def check_tokenizer(description: dict[str, Any], *, where: str) -> None:
    """Refuse a tokenizer description that tokenmill does not write."""
    found = convert(_Tokenizer, description, where=f"{where}.tokenizer")
    if found.file is not None and found.file not in TOKENIZER_FILES:
        raise DatasetError(f"{where}: {found.file!r} is not the name of a tokenizer file", hint=_HINT)
    if found.kind not in ("byte", "char", "hf", "sentencepiece", "tiktoken", "unknown"):
        raise DatasetError(f"{where}: unknown kind of tokenizer {found.kind!r}", hint=_HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokenizer:
    """What `TokenizerSpec.describe` records."""

    name: str
    kind: str
    scheme: str
    file: str | None
    fingerprint: str
    vocab_size: Int
    eot_id: Int | None
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """Part `number` of a plan that was dealt `into` so many parts. `whole` is the fingerprint of the whole plan.

    `dealt` is empty if the parts are runs of neighbours.
    """

    number: Int
    into: Int
    whole: str
    dealt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    tokens: Int
    documents: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLocation:
    """The node and folder of a part, its size, and the digest of its manifest.

    `units` are the numbers of its units in the whole plan, in the order of its documents. Empty if the parts are runs
    of neighbours: then all parts, one after the other, have the order of the whole.
    """

    host: str
    path: str
    splits: dict[str, Totals]
    manifest: Digest
    units: tuple[Int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The locations of all parts, in order. `fingerprint` is that of the whole plan."""

    format: Int
    fingerprint: str
    parts: tuple[PartLocation, ...]


def part_of(identity: Mapping[str, Any]) -> NodePart | None:
    """The part that a dataset is, from the identity in its plan or manifest; None if it is complete in itself."""
    found = identity.get(NODES_IDENTITY)
    return None if found is None else records.convert(NodePart, found, where=f"identity.{NODES_IDENTITY}")


def describe_nodes(
    manifest: Manifest, digest: Digest, *, host: str, path: str, units: tuple[int, ...] = ()
) -> PartLocation:
    """A complete part, as `nodes.json` lists it."""
    splits = {name: Totals(tokens=split.tokens, documents=split.documents) for name, split in manifest.splits.items()}
    return PartLocation(host=host, path=path, splits=splits, manifest=digest, units=units)


def load_nodes(folder: Storage) -> Nodes | None:
    """The `nodes.json` in a folder, beside a part or alone; None if there is none."""
    if not folder.exists(NODES):
        return None
    found = records.unseal(Nodes, folder.read(NODES, max_bytes=1 << 26), where=folder.at(NODES))
    if found.format != NODES_FORMAT:
        raise DatasetError(
            f"{folder.at(NODES)}: format {found.format}, this version of tokenmill reads {NODES_FORMAT}",
            hint=_OTHER_FORMAT,
        )
    return found


def describe_locations(nodes: Nodes) -> str:
    """Where the first parts are, for a message."""
    found = [f"{part.host}:{part.path}" for part in nodes.parts[:4]]
    return ", ".join(found) + (
        f" and {len(nodes.parts) - _SHOWN_NODES} more" if len(nodes.parts) > _SHOWN_NODES else ""
    )
