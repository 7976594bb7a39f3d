"""push() and pull(): copy a dataset to or from an object store, and verify every file.

    push   hash the file -> upload with that checksum -> compare what is stored    } only files that are missing or
    pull   ranges -> NAME.part, kept if interrupted -> hash -> link                } wrong; the manifest last

A part of a dataset (`split`, `shards`) is a dataset too: its manifest counts the documents that were left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tokenmill import arguments, records
from tokenmill.arguments import Watcher
from tokenmill.dataset import manifest
from tokenmill.dataset.manifest import Manifest, Shard, Split
from tokenmill.errors import DatasetError, OutputError, RecipeError
from tokenmill.sizes import counted, few, format_bytes, format_seconds
from tokenmill.storage.base import Storage, is_url, open_folder, require_space
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import locked, telling
from tokenmill.storage.memory_maps import fast_digest
from tokenmill.storage.output import Digest, is_temp
from tokenmill.threads import ByteTally, as_done

_MAX_SHARD = 1_000_000
FILES_AT_ONCE = 4
MAX_FILES_AT_ONCE = 1024
LEFT_BEHIND = "left_behind"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """A finished push or pull. Of `files` with `num_bytes`, `moved_files` were missing or wrong, and copied."""

    source: str
    target: str
    files: int
    num_bytes: int
    moved_files: int
    moved_bytes: int
    seconds: float

    def __repr__(self) -> str:
        whole = f"{counted(self.files, 'file')}, {format_bytes(self.num_bytes)}"
        moved = f"moved {self.moved_files:,} of them in {format_seconds(self.seconds)}"
        return f"TransferResult({self.source!r} -> {self.target!r}: {whole}; {moved})"


def push(
    dataset: str | os.PathLike[str],
    url: str,
    *,
    split: str | Sequence[str] | None = None,
    shards: str | None = None,
    workers: int | None = None,
    watch: Watcher | None = None,
) -> TransferResult:
    """Copy a local dataset to a URL. Called again, it copies only files that are missing or wrong there."""
    source, target = open_folder(dataset, name="dataset"), open_folder(url, name="url")
    if is_url(source.path) or not is_url(target.path):
        raise RecipeError(
            "push goes from a folder to a URL", hint="write it like `tokenmill.push('data/owt', 's3://bucket/owt')`"
        )
    manifest.load_manifest(source, command="push")  # before the store is asked
    target, _ = target.ready()
    return _move(
        source, target, partial(_put, source, target), split=split, shards=shards, workers=workers, watch=watch
    )


def pull(
    url: str,
    folder: str | os.PathLike[str],
    *,
    split: str | Sequence[str] | None = None,
    shards: str | None = None,
    workers: int | None = None,
    watch: Watcher | None = None,
) -> TransferResult:
    """Copy a dataset from a URL to a folder. Called again, it copies only files that are missing or wrong there."""
    source, target = open_folder(url, name="url"), open_folder(folder, name="folder")
    if not is_url(source.path) or is_url(target.path):
        raise RecipeError(
            "pull goes from a URL to a folder", hint="write it like `tokenmill.pull('s3://bucket/owt', 'data/owt')`"
        )
    return _move(
        source, target, partial(_get, source, target), split=split, shards=shards, workers=workers, watch=watch
    )


def _move(
    source: Storage,
    target: Storage,
    move: Callable[[str, Digest, ByteTally], bool],
    *,
    split: str | Sequence[str] | None,
    shards: str | None,
    workers: int | None,
    watch: Watcher | None,
) -> TransferResult:
    begin = time.monotonic()
    if workers is not None:
        workers = arguments.whole("workers", workers, least=1, most=MAX_FILES_AT_ONCE)
    if split is not None:
        split = [split] if isinstance(split, str) else split
        split = arguments.texts("split", split, hint="give the name of a split, or several")
    arguments.text_or_none("shards", shards, hint="write them like 0-9 or 0,3,5-7")
    arguments.function_or_none("watch", watch)
    full = manifest.load_manifest(source)
    wanted = part_of(full, split, shards)
    _check_target(target, wanted)
    target.check_no_links({os.path.dirname(name) for name in wanted.all_files()} - {""})
    target.make(".build")
    with locked(target, tell=telling(watch)):
        result = _merged_with_stored(target, full, wanted)
        files = wanted.all_files()
        parents = sorted({"", *map(os.path.dirname, files)})
        for parent in parents:
            target.make(parent)
            target.sweep(parent)
        count = workers or FILES_AT_ONCE
        tally = ByteTally(watch)
        tally.start(sum(digest.bytes for digest in files.values()), workers=count)
        # The largest first, so that none is still being copied when the others are done.
        names = sorted(files, key=lambda name: -files[name].bytes)
        work = as_done(lambda name: move(name, files[name], tally), names, count, stop=tally.stop)
        with contextlib.closing(work) as results:  # does not wait for a silent connection
            moved = []
            for done in results:
                if done is not None and done[1]:
                    moved.append(done[0])
                tally.show(workers=count)
        tally.show(is_last=True, workers=count)
        for parent in parents:
            target.sync(parent)
        if not target.exists(manifest.MANIFEST) or manifest.load_manifest(target) != result:
            target.replace(manifest.MANIFEST, manifest.seal_manifest(result))
    target.remove_empty(".build")
    return TransferResult(
        source=source.path,
        target=target.path,
        files=len(files),
        num_bytes=sum(digest.bytes for digest in files.values()),
        moved_files=len(moved),
        moved_bytes=sum(files[name].bytes for name in moved),
        seconds=time.monotonic() - begin,
    )


def _put(source: Storage, target: Storage, name: str, digest: Digest, tally: ByteTally) -> bool:
    """Upload a file unless it is stored already. Returns whether it was uploaded."""
    from tokenmill.storage.object_folder import ObjectFolder

    assert isinstance(target, ObjectFolder), "checked before"
    there = target.store.find(target.key(name))
    if there is not None and (there.size, there.sha256) == (digest.bytes, digest.sha256):
        tally.add(digest.bytes, moved=False)
        return False
    found = source.stat(name)
    if found is None or not found.is_file or fast_digest(source, name) != digest:
        raise DatasetError(
            f"{source.at(name)} is not what the manifest says",
            hint=f"repair it with `tokenmill.repair({source.path!r})`, then push again",
        )
    target.store.put(target.key(name), Path(source.at(name)), sha256=digest.sha256)
    target.check(name, digest)
    tally.add(digest.bytes)
    return True


def _get(source: Storage, target: Storage, name: str, digest: Digest, tally: ByteTally) -> bool:
    """Download a file unless it is here already. Returns whether it was downloaded."""
    from tokenmill.storage.object_folder import ObjectFolder, download

    assert isinstance(source, ObjectFolder), "checked before"
    assert isinstance(target, Folder), "checked before"
    found = target.stat(name)
    if found is not None and found.is_file and found.size == digest.bytes and fast_digest(target, name) == digest:
        tally.add(digest.bytes, moved=False)
        return False
    require_space(target, digest.bytes)
    download(source, target, name, digest, tally.add)
    return True


def part_of(whole: Manifest, split: str | Sequence[str] | None, shards: str | None) -> Manifest:
    """The manifest of some splits and shards; the whole one if nothing is left out."""
    names = [split] if isinstance(split, str) else list(whole.splits if split is None else split)
    if unknown := [name for name in names if name not in whole.splits]:
        raise RecipeError(f"there is no split {unknown[0]!r}", hint=f"there are {', '.join(whole.splits)}")
    wanted = _numbers(shards) if shards is not None else None
    parts = {
        name: _split_of(shard for number, shard in enumerate(split.shards) if wanted is None or number in wanted)
        for name, split in whole.splits.items()
        if name in names
    }
    if not any(part.shards for part in parts.values()):
        raise RecipeError(f"there are no shards {shards or ''}".rstrip(), hint="the first one is 0")
    return _with_splits(whole, parts)


def _joined(whole: Manifest, first: Manifest, second: Manifest) -> Manifest:
    """The manifest of the union of two parts of a dataset."""
    parts = {}
    for name, split in whole.splits.items():
        if name in first.splits or name in second.splits:
            has = {shard for part in (first, second) if name in part.splits for shard in part.splits[name].shards}
            parts[name] = _split_of(shard for shard in split.shards if shard in has)
    return _with_splits(whole, parts)


def _with_splits(whole: Manifest, parts: dict[str, Split]) -> Manifest:
    """The manifest of some shards; the whole one if none is left out."""
    if parts == whole.splits:
        return whole
    kept = sum(part.documents for part in parts.values())
    left_behind = whole.dropped.get(LEFT_BEHIND, 0) + whole.documents - kept
    return replace(
        whole,
        fingerprint=records.digest([whole.fingerprint, {n: [s.name for s in p.shards] for n, p in parts.items()}]),
        splits=parts,
        dropped=dict(sorted({**whole.dropped, LEFT_BEHIND: left_behind}.items())),
    )


def _split_of(shards: Iterable[Shard]) -> Split:
    kept = tuple(shards)
    return Split(
        tokens=sum(shard.tokens for shard in kept), documents=sum(shard.documents for shard in kept), shards=kept
    )


def _numbers(shards: str) -> set[int]:
    """`0-9,12` as numbers."""
    found: set[int] = set()
    for part in shards.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]) or int(match[2] or match[1]) > _MAX_SHARD:
            raise RecipeError(f"{shards!r} does not name shards", hint="write them like 0-9 or 0,3,5-7")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _check_target(target: Storage, wanted: Manifest) -> None:
    """Refuse a target that has anything but this dataset or a part of it."""
    from tokenmill.storage.object_folder import PART_SUFFIX

    names = target.names()  # before the manifest, which another process may be writing
    if target.exists(manifest.MANIFEST):
        stored = manifest.load_manifest(target)
        if (stored.identity, stored.sources) != (wanted.identity, wanted.sources):
            raise OutputError(f"{target.path} has another dataset", hint="choose another target, or remove it first")
        return
    known = {name.partition("/")[0] for name in wanted.all_files()} | {
        ".build",
        "packing",
        manifest.CARD,
        manifest.REPORT,
    }
    begun = {f"{name}{PART_SUFFIX}" for name in known}
    if strange := sorted(name for name in names if name not in known | begun and not is_temp(name)):
        raise OutputError(
            f"{target.path} has other files: {few(strange)}",
            hint="choose a target that is empty or does not exist",
        )


def _merged_with_stored(target: Storage, whole: Manifest, wanted: Manifest) -> Manifest:
    """The manifest that the target will have: the wanted shards, and those of the same dataset that it has already.

    If its own shards stay as they are, it remains a dataset while more are copied. Otherwise its manifest is removed
    first.
    """
    if not target.exists(manifest.MANIFEST):
        return wanted
    stored = manifest.load_manifest(target)
    files, coming = stored.all_files(), wanted.all_files()
    if coming.items() <= files.items():
        return stored
    result = _joined(whole, stored, wanted)
    if files.items() <= result.all_files().items():
        return result
    if all(files.get(name, digest) == digest for name, digest in coming.items()):
        raise OutputError(
            f"{target.path} has shards of this dataset that the source does not have",
            hint="copy from a source that has all of them",
        )
    target.remove(manifest.MANIFEST)
    target.sync("")
    return wanted
