"""verify(): checks that a dataset is what its manifest says.

quick    every file exists and has its size, and every index fits its tokens
full     and every file has its SHA-256
source   and the sources, tokenized again, give the tokens of the shards
export   the files of another layout, by the sizes and SHA-256 that their export or consolidation recorded
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tokenmill import arguments
from tokenmill.build.commit import group_pieces
from tokenmill.build.plan import make_task
from tokenmill.build.workspace import SOURCE_CHANGED, dataset_receipts, reopen
from tokenmill.dataset import manifest
from tokenmill.dataset.bin_idx import check_index, wrong_structure
from tokenmill.dataset.folder_kinds import FolderKind, help_after_damage, kind_of
from tokenmill.dataset.manifest import Manifest, Shard
from tokenmill.errors import (
    AccessError,
    BuildError,
    DatasetError,
    RecipeError,
    SourceChangedError,
    StorageError,
    TokenmillError,
)
from tokenmill.formats.resumable import recorded_digests
from tokenmill.recipe import check_filter
from tokenmill.resources import resolve_workers
from tokenmill.sizes import counted, few, format_bytes
from tokenmill.sources.files import open_file
from tokenmill.storage.base import Storage, open_folder
from tokenmill.storage.local import Folder
from tokenmill.storage.memory_maps import fast_digest
from tokenmill.storage.output import Digest, temporary_folder
from tokenmill.threads import as_done
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.spec import from_dataset
from tokenmill.units.receipts import PIECES, RECEIPTS, REJECTS, Receipt
from tokenmill.units.run import run_unit

SAMPLE_UNITS = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that is not what it should be."""

    file: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was checked, and what is wrong. `hint` says what restores its files.

    `what` says what the files are, if they are not a dataset.
    """

    path: str
    files: int
    bytes_hashed: int
    units_checked: int
    seconds: float
    problems: tuple[Problem, ...]
    what: str = ""
    hint: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems

    def __repr__(self) -> str:
        found = few([f"{problem.file}: {problem.what}" for problem in self.problems], "; ") or "ok"
        hashed = f", {format_bytes(self.bytes_hashed)} hashed" if self.bytes_hashed else ""
        return f"VerifyReport({self.path!r}: {counted(self.files, 'file')}{hashed}; {found})"


def verify(
    path: str | os.PathLike[str],
    *,
    quick: bool = False,
    source: Literal["sample", "all"] | None = None,
    workers: int | None = None,
    filter: str | None = None,
) -> VerifyReport:
    """Check a dataset, or the files of an export by its own record. Problems are in the report.

    A dataset without a readable manifest is a `DatasetError`, and another folder a `NotADatasetError`. `source`
    tokenizes sources again. If the dataset was made with a filter, it must be named.
    """
    known = ("sample", "all")
    if source is not None and arguments.text("source", source, hint=f"one of {', '.join(known)}") not in known:
        raise RecipeError(f"source is {source!r}", hint=f"one of {', '.join(known)}")
    arguments.name_or_none("filter", filter)
    quick = arguments.flag("quick", quick)
    return verify_folder(open_folder(path), quick=quick, source=source, threads=resolve_workers(workers), filter=filter)


def verify_folder(
    folder: Storage,
    *,
    threads: int,
    quick: bool = False,
    source: Literal["sample", "all"] | None = None,
    filter: str | None = None,
) -> VerifyReport:
    begin = time.monotonic()
    if filter is not None and source is None:
        raise RecipeError("`filter` is only used with `source`", hint="add `source='sample'`, or drop `filter`")
    if not folder.exists(manifest.MANIFEST) and (kind := kind_of(folder)).has_digests:
        return _verify_conversion(folder, kind, threads=threads, quick=quick, source=source, begin=begin)
    found = manifest.load_manifest(folder, command="verify")
    if source is not None:
        check_filter(found.identity.get("filter"), filter, where=folder.path)
    structure = [Problem(*wrong) for wrong in wrong_structure(folder, found)]
    problems = [*structure, *strays(folder, found), *_unlisted(folder, found)]
    hashed = 0
    if not quick:
        known_bad = {problem.file for problem in problems}
        files = {name: digest for name, digest in found.all_files().items() if name not in known_bad}
        indexes = {f"{shard.name}.idx": shard for split in found.splits.values() for shard in split.shards}
        problems += _hash_all(folder, files, threads, indexes, found.dtype)
        hashed = sum(digest.bytes for digest in files.values())
    units = 0
    if source is not None and not problems:
        units, more = _check_sources(folder, found, everything=source == "all", filter=filter)
        problems += more
    kind = kind_of(folder)
    return VerifyReport(
        path=folder.path,
        files=found.num_files + 1,
        bytes_hashed=hashed,
        units_checked=units,
        seconds=time.monotonic() - begin,
        problems=tuple(problems),
        hint=help_after_damage(kind) if problems else "",
    )


def _verify_conversion(
    folder: Storage, kind: FolderKind, *, threads: int, quick: bool, source: str | None, begin: float
) -> VerifyReport:
    """Check the files of an export or a consolidation by the digests that it recorded."""
    if source is not None:
        hint = "verify the dataset that was exported with `source`, and these files without it"
        raise RecipeError(f"{folder.path} is {kind.what}, which does not know its sources", hint=hint)
    files = recorded_digests(folder)
    sizes = folder.sizes_in(sorted({name.rpartition("/")[0] for name in files}))
    problems = []
    for name, digest in files.items():
        size = sizes(name)
        if size is None:
            problems.append(Problem(name, "is missing"))
        elif size != digest.bytes:
            problems.append(Problem(name, f"has {size} bytes, expected {digest.bytes}"))
    known_bad = {problem.file for problem in problems}
    intact = {} if quick else {name: digest for name, digest in files.items() if name not in known_bad}
    problems += _hash_all(folder, intact, threads, {}, "")
    return VerifyReport(
        path=folder.path,
        files=len(files),
        bytes_hashed=sum(digest.bytes for digest in intact.values()),
        units_checked=0,
        seconds=time.monotonic() - begin,
        problems=tuple(problems),
        what=kind.what,
        hint=help_after_damage(kind) if problems else "",
    )


def strays(folder: Storage, found: Manifest) -> Iterator[Problem]:
    """Files beside the shards that are not in the manifest. A program that lists folders would read them."""
    left = {parent: set(folder.names(parent)) for parent in (*found.splits, "provenance")}
    for name, _ in found.each_file():
        parent, _, child = name.rpartition("/")
        left.get(parent, set()).discard(child)
    for parent, children in left.items():
        for name in sorted(children):
            yield Problem(f"{parent}/{name}", "is not part of the dataset")


def _unlisted(folder: Storage, found: Manifest) -> Iterator[Problem]:
    """A `nodes.json` that is damaged, or lists another dataset in the place of this part."""
    part = manifest.part_of(found.identity)
    try:
        nodes = manifest.load_nodes(folder)
    except DatasetError as error:
        yield Problem(manifest.NODES, error.message.partition(": ")[2])
        return
    if part is not None and nodes is not None:
        listed = [place.manifest for place in nodes.parts[part.number : part.number + 1]]
        if listed != [folder.digest(manifest.MANIFEST)]:
            yield Problem(manifest.NODES, f"lists another dataset as part {part.number}")


def _hash_all(
    folder: Storage, files: dict[str, Digest], threads: int, indexes: Mapping[str, Shard], dtype: str
) -> list[Problem]:
    """What is wrong with the content of files. Indexes of shards are also checked against their tokens."""

    def check(item: tuple[str, Digest]) -> Problem | None:
        name, digest = item
        wrong: list[str] = []

        def check_whole_index(data: memoryview) -> None:
            try:
                check_index(data, indexes[name], dtype, where=name)
            except DatasetError as error:
                wrong.append(error.message.partition(": ")[2])

        try:
            actual = fast_digest(folder, name, check_whole_index if name in indexes else None)
        except AccessError:  # a file without read permission need not be damaged
            raise
        except (StorageError, DatasetError) as error:
            return Problem(name, f"cannot be read: {error}")
        if actual != digest:
            return Problem(name, f"sha256 is {actual.sha256}, expected {digest.sha256}")
        return Problem(name, wrong[0]) if wrong else None

    # The largest first, so that no thread is still reading a large one when the others are done.
    items = sorted(files.items(), key=lambda item: -item[1].bytes)
    with contextlib.closing(as_done(check, items, threads)) as results:
        problems = [done[1] for done in results if done is not None and done[1] is not None]
    return sorted(problems, key=lambda problem: problem.file)


def _check_sources(
    folder: Storage, found: Manifest, *, everything: bool, filter: str | None
) -> tuple[int, list[Problem]]:
    """Tokenize units again, each into its own folder, and compare with the shards."""
    plan, job = reopen(folder, filter)
    receipts = dataset_receipts(folder, plan)
    engine = open_engine(from_dataset(found.tokenizer, _tokenizer_content(folder, found)))
    places: dict[str, Iterator[tuple[int, str, int]]] = {}
    count = len(receipts) if everything else min(SAMPLE_UNITS, len(receipts))
    problems = []
    for index in np.unique(np.linspace(0, len(receipts) - 1, count).astype(int)).tolist():
        receipt = receipts[index]
        where = f"{plan.sources[plan.units[receipt.unit].source].name}, unit {receipt.unit}"
        with temporary_folder() as path:
            fresh = Folder(path)
            for name in (PIECES, RECEIPTS, REJECTS):
                fresh.make(name)
            try:
                again = run_unit(fresh, job.work, make_task(plan, *receipt.key), lambda: engine, lambda *_, **__: None)
            except SourceChangedError as error:
                raise SourceChangedError(error.message, hint=SOURCE_CHANGED) from None
            except TokenmillError:
                raise
            except Exception as error:  # .build may have been written by another program
                said = f"{where} cannot be run again: {type(error).__name__}: {error}"
                raise BuildError(said, hint="check the sources and .build") from None
            for split in sorted(again.pieces.keys() | receipt.pieces.keys()):
                if split not in receipt.pieces:
                    problems.append(Problem(split, f"has no tokens of {where}, which has some now"))
                    continue
                following = places.setdefault(split, _places(receipts, split, plan.target_tokens))
                _, shard, offset = next(place for place in following if place[0] == receipt.unit)
                before = receipt.pieces[split]
                # Equal bytes are not enough: the fresh piece may be shorter, or have other document bounds.
                if again.pieces.get(split) != before or not _same(
                    folder, f"{shard}.bin", offset, fresh, f"{before.name}.bin"
                ):
                    problems.append(Problem(f"{shard}.bin", f"has other tokens than {where}"))
    return count, problems


def _places(receipts: Sequence[Receipt], split: str, target: int) -> Iterator[tuple[int, str, int]]:
    """For each unit with a piece in a split: its shard, and the byte at which the piece begins."""
    for group in group_pieces(receipts, [split], target):
        offset = 0
        for (unit, _), piece in zip(group.keys, group.pieces, strict=True):
            yield unit, group.name, offset
            offset += piece.bin.bytes


def _same(folder: Storage, shard: str, offset: int, fresh: Storage, piece: str) -> bool:
    """Whether a shard has a piece at this byte. If receipts do not match the manifest, the shard may not exist."""
    if folder.stat(shard) is None:
        return False
    with open_file(folder.at(shard)) as stored, open(fresh.at(piece), "rb") as expected:
        stored.seek(offset)
        while block := expected.read(1 << 20):
            if stored.read(len(block)) != block:
                return False
    return True


def _tokenizer_content(folder: Storage, found: Manifest) -> bytes | None:
    return folder.read(found.tokenizer["file"]) if found.tokenizer["file"] else None
