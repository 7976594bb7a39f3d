"""What a folder is: a dataset that was built, pulled or imported, an export, something unfinished; and what helps then.

    dataset.json             with .build/plan.json built, with .build/request.json imported, with neither a copy
    nodes.json               a dataset in parts, on the disks of nodes
    .build/request.json      a conversion: an export, an import, or Templar's files that `consolidate` wrote
    .build/plan.json         a build that has not finished
    other names              files of another layout, a pull that has not finished, or anything else

`kind_of` decides, for all commands. Loaded only to explain: opening a dataset needs none of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill import records
from tokenmill.dataset import manifest as manifests
from tokenmill.errors import DatasetError, NotADatasetError, OutputError, TokenmillError
from tokenmill.sizes import few
from tokenmill.storage.base import Storage, is_url

PLAN = ".build/plan.json"
REQUEST = ".build/request.json"
ONLY_LAYOUT = ".build/only_layout.json"
# What a build writes before its plan; a pull has only a lock there.
_OF_A_BUILD = {"events.jsonl", "pieces", "receipts", "rejects", "job.json", "packs"}
_SHARD = re.compile(r"\d{5,}\.(bin|idx)(\.part)?")
# Names by which files of other layouts are recognised, in a folder or in one for each split.
_LAYOUT_NAMES = {
    "megatron": re.compile(r".+_document\.idx"),
    "templar": re.compile(r"train_\d{6,}\.npy|tokens\.bin"),
    "llmc": re.compile(r".+_\d{6}\.bin"),
    "datatrove": re.compile(r".+\.ds"),
    "olmo": re.compile(r"part-\d+-\d{5}\.npy"),
    "nanogpt": re.compile(r"(train|val)\.bin"),
    "catid": re.compile(r"index_0\.bin"),
    "mds": re.compile(r"shard\.\d{5}\.mds"),
    "litdata": re.compile(r"chunk-\d+-\d+\.bin"),
    "huggingface": re.compile(r".+-\d{5}-of-\d{5}\.(parquet|arrow)"),
}
_ANY_HINT = "give the folder that tokenmill prepare wrote, or files of a trainer's layout"
_FINISHED_BY = {
    "unfinished_build": "prepare",
    "unfinished_import": "import",
    "unfinished_export": "export",
    "unfinished_consolidation": "consolidate",
}
_AGAIN = "Otherwise prepare it again, with `restart=True` or into another folder"


@dataclass(frozen=True, slots=True)
class FolderKind:
    """What a folder is: a word for programs, a phrase for people, and the layout of its files if they have one."""

    name: str
    what: str
    layout: str = ""

    @property
    def is_dataset(self) -> bool:
        return self.name in ("built", "copy", "imported", "part")

    @property
    def has_digests(self) -> bool:
        """Whether files that are not a dataset have a record of their digests, by which they can be verified."""
        return self.name in ("export", "consolidation")


def kind_of(folder: Storage) -> FolderKind:
    """What a folder is, by the names of the files in it and by its records."""
    if folder.exists(manifests.MANIFEST):
        return _kind_of_dataset(folder)
    if names := [name for name in folder.names() if not name.endswith(".tmp")]:
        return _kind_of_records(folder) or _kind_of_names(folder, names)
    return _kind_of_nothing(folder)


def _kind_of_records(folder: Storage) -> FolderKind | None:
    """What the records of tokenmill say; None if there are none."""
    if folder.exists(ONLY_LAYOUT):
        layout = str(_unsealed(folder, ONLY_LAYOUT).get("layout", ""))
        return FolderKind("only_layout", f"a dataset of which only the export to {layout} was kept", layout)
    if folder.exists(REQUEST):
        return _kind_of_conversion(folder)
    if folder.exists(PLAN) or _OF_A_BUILD & set(folder.names(".build")):
        return FolderKind("unfinished_build", "a build that has not finished")
    if folder.exists(manifests.NODES):
        return FolderKind("nodes", "a dataset in parts, none of which is on this machine")
    return None


def _kind_of_names(folder: Storage, names: Sequence[str]) -> FolderKind:
    inside = [child for name in names if name != ".build" for child in folder.names(name)]
    if any(_SHARD.fullmatch(child) for child in inside):
        return FolderKind("unfinished_copy", "a copy of a dataset that has not finished")
    for layout, pattern in _LAYOUT_NAMES.items():
        if any(pattern.fullmatch(name) for name in (*names, *inside)):
            return FolderKind("layout", f"files of layout {layout}", layout)
    return FolderKind("unknown", f"other files: {few(names)}")


def _kind_of_nothing(folder: Storage) -> FolderKind:
    try:
        folder.check_place()
    except OutputError:
        return FolderKind("file", "a single file")
    return FolderKind("empty", "an empty folder") if folder.exists("") else FolderKind("missing", "not there")


def _kind_of_dataset(folder: Storage) -> FolderKind:
    if folder.exists(REQUEST):
        return FolderKind("imported", "imported")
    try:
        part = manifests.part_of(manifests.load_manifest(folder).identity)
    except DatasetError:  # the code that uses the manifest says what is wrong with it
        part = None
    if part is not None:
        return FolderKind("part", f"part {part.number} of {part.into} of a dataset on several nodes")
    if folder.exists(PLAN):
        return FolderKind("built", "built here")
    if "imported" in _identity(folder):
        return FolderKind("imported", "imported, without its .build folder")
    return FolderKind("copy", "a copy without its .build folder: pulled, or .build was removed")


def _kind_of_conversion(folder: Storage) -> FolderKind:
    about = _unsealed(folder, REQUEST).get("about", {})
    layout = str(about.get("layout", ""))
    if folder.exists(manifests.EXPORT_RECORD):
        return FolderKind("export", f"an export to {layout}", layout)
    if "dataset" in about:
        return FolderKind("unfinished_export", f"an export to {layout} that has not finished", layout)
    if "tokenizer" in about:
        return FolderKind("unfinished_import", f"an import from {layout} that has not finished", layout)
    if folder.exists(".build/receipts/tokens.bin.json") and folder.exists(".build/receipts/sample_ids.bin.json"):
        return FolderKind("consolidation", "Templar's shards, consolidated", "templar")
    what = "a consolidation of Templar's shards that has not finished"
    return FolderKind("unfinished_consolidation", what, "templar")


def _identity(folder: Storage) -> Mapping[str, Any]:
    try:
        return manifests.load_manifest(folder).identity
    except DatasetError:
        return {}


def _unsealed(folder: Storage, name: str) -> Mapping[str, Any]:
    """A record as far as it can be read. It only serves a message, so its seal does not matter."""
    try:
        found = msgspec.json.decode(folder.read(name, max_bytes=records.MAX_RECORD_BYTES))
    except (TokenmillError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def not_a_dataset(folder: Storage, command: str) -> DatasetError:
    """Why a command cannot use a folder without a manifest, and which command helps. Unfinished work fails a check."""
    kind = kind_of(folder)
    path = folder.path
    if kind.name == "missing":
        place = "dataset" if is_url(path) else "folder"
        return NotADatasetError(f"there is no {place} {path}", hint="check the path, or prepare the dataset first")
    is_unfinished, lacks = kind.name.startswith("unfinished"), f"it has no {manifests.MANIFEST}"
    said = f"{lacks}, but {kind.what}" if kind.name == "unknown" else f"it is {kind.what}"
    said = f"{lacks}; {said}" if is_unfinished else said
    error = DatasetError if is_unfinished else NotADatasetError
    return error(f"{path} is not a dataset: {said}", hint=help_for(kind, folder, command))


def help_for(kind: FolderKind, folder: Storage, command: str) -> str:
    """Which command helps someone who gave such a folder to `command`: open, verify, repair or push."""
    path = folder.path
    again = {**_FINISHED_BY, "unfinished_copy": "push" if is_url(path) else "pull"}
    if kind.name in again:
        return f"to finish it, run the same tokenmill {again[kind.name]} command again"
    if kind.name == "only_layout":
        return f"use its files: `tokenmill.verify({f'{path}/{kind.layout}'!r})` checks them"
    if command == "repair" and kind.has_digests:
        return help_after_damage(kind)
    nodes = manifests.load_nodes(folder) if kind.name == "nodes" else None
    if nodes is not None:
        return f"open it where a part is: {manifests.describe_locations(nodes)}"
    return _help_with_files(kind, path, command) if kind.layout else _ANY_HINT


def _help_with_files(kind: FolderKind, path: str, command: str) -> str:
    """What to do with files of a layout, which are not a dataset."""
    call = f"`tokenmill.import_({path!r}, 'OUT', layout={kind.layout!r})`"
    if command == "push":
        return f"push copies datasets: push the dataset that the files were made of, or import them first: {call}"
    unknown = "" if kind.has_digests else "they have no record of their digests; "
    return f"{unknown}to make a dataset of them: {call}"


def help_after_damage(kind: FolderKind) -> str:
    """What restores the files of a dataset, or of another folder with digests."""
    if kind.name in ("built", "part"):
        return "tokenmill repair restores the files"
    if kind.name == "copy":
        return "if it was pulled, run the same tokenmill pull command again: it copies what is damaged. " + _AGAIN
    again = {"imported": "import", "consolidation": "consolidate"}.get(kind.name, "export")
    return f"run the same tokenmill {again} command again: it writes what is damaged, and keeps the rest"
