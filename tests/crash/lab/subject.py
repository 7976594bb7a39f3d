"""What is crashed in the model: a build, a repair, a joining; where it begins, and what it must come to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab import world as worlds
from lab.aftermath import Machine
from lab.modelfs import ROOT, Disk, ModelFileSystem
from lab.world import World, make_world

OUT = "/out"
SCRATCH = "/scratch"
MANIFEST = f"{OUT}/dataset.json"

Contents = dict[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A run on a disk, and the files that it must end with. `hurt` are those that were damaged when it began."""

    name: str
    world: World
    start: Disk
    run: Callable[[ModelFileSystem], object]
    right: Contents
    hurt: frozenset[str] = frozenset()


def lasting(contents: Contents) -> Contents:
    """The files that must be the same after every history: all but the event log and what was quarantined."""
    return {
        path: data
        for path, data in contents.items()
        if path != f"{OUT}/.build/events.jsonl" and not path.startswith(f"{OUT}/.build/quarantine/")
    }


def dataset_of(contents: Contents) -> Contents:
    """The files that a reader may look at."""
    return {path: data for path, data in contents.items() if not path.startswith(f"{OUT}/.build/")}


def make_subject(path: Path, kind: str) -> Subject:
    """One of `KINDS`, with its sources under `path`."""
    return KINDS[kind](path)


def _plain(path: Path) -> Subject:
    """Two units; train is linked, val is joined; a tokenizer with a file of its own; a reject."""
    return _build(path, "plain", "build", documents=4, tokenizer="char")


def _splits(path: Path) -> Subject:
    """Three splits, so that many files wait for one fsync of their folder; two of the splits are joined."""
    return _build(path, "plain", "build of three splits", documents=4, unit_bytes=500, split={"val": 0.3, "test": 0.3})


def _scratch(path: Path) -> Subject:
    return _build(path, "scratch", "build with scratch", documents=4)


def _budget(path: Path) -> Subject:
    """Three units, of which the second is cut and the third never begun."""
    return _build(path, "plain", "build with a budget", documents=4, unit_bytes=300, max_tokens=50)


def _packs(path: Path) -> Subject:
    """Four units, the receipts of two in a pack each."""
    return _build(path, "packs", "build with packs", documents=6, unit_bytes=300)


def _join(path: Path) -> Subject:
    """All of four units are done; some pieces are joined, others are linked, and many names wait for one fsync."""
    whole = _build(path, "plain", "joining", documents=6, unit_bytes=300, split={"val": 0.3, "test": 0.3})
    return replace(whole, start=_before_the_commit(whole))


def _update(path: Path) -> Subject:
    """All units are done, of a build that had one more source: each but its own is kept under another number."""
    whole = _build(path, "plain", "update", documents=6, unit_bytes=300)
    world = replace(whole.world, update=True)
    gone = world.sources / "0.txt"
    gone.write_text("it was there before, and sorts first\n" * 8)
    # By another name of the same place: what was found there is remembered by its name.
    before = replace(world, sources=world.sources / "*")
    start = _before_the_commit(replace(whole, run=lambda fs: before.build(OUT, fs)))
    gone.unlink()
    fs = ModelFileSystem(start)
    world.build(OUT, fs)
    assert worlds.tree(OUT, fs) == world.right, "an update gives another dataset than a build"
    right = lasting(fs.disk().contents())
    return replace(whole, world=world, start=start, run=lambda fs: world.build(OUT, fs), right=right)


def _before_the_commit(whole: Subject) -> Disk:
    """A disk on which all units are done."""
    fs = ModelFileSystem()
    whole.run(fs)
    noted = next(i for i, done in enumerate(fs.log) if (done.call, done.path) == ("rename", f"{OUT}/.build/clean.json"))
    machine = Machine(whole.start)
    machine.run(fs.log[: noted + 2])
    return machine.killed()


def _repair(path: Path) -> Subject:
    """A shard with other bytes, an index that is gone, a short provenance file, and a piece of it gone as well."""
    whole = _build(path, "plain", "repair", documents=4, tokenizer="char")
    hurt = (f"{OUT}/train/00000.bin", f"{OUT}/val/00000.idx", f"{OUT}/provenance/00000.parquet")
    damage = {
        hurt[0]: whole.right[hurt[0]][::-1],
        hurt[1]: None,
        hurt[2]: whole.right[hurt[2]][:-10],
        f"{OUT}/.build/pieces/000001.provenance.parquet": None,
    }
    return _damaged(whole, damage, frozenset(hurt))


def _remake(path: Path) -> Subject:
    """A repair that has lost the manifest and a receipt."""
    whole = _build(path, "plain", "repair without a manifest", documents=4)
    damage = {MANIFEST: whole.right[MANIFEST][:-40], f"{OUT}/.build/receipts/000000.json": None}
    return _damaged(whole, damage, frozenset((MANIFEST,)))


KINDS: dict[str, Callable[[Path], Subject]] = {
    "plain": _plain,
    "splits": _splits,
    "scratch": _scratch,
    "budget": _budget,
    "packs": _packs,
    "join": _join,
    "update": _update,
    "repair": _repair,
    "remake": _remake,
}


def _build(path: Path, kind: str, name: str, **fields: Any) -> Subject:
    world = make_world(path, kind, **fields)
    if world.scratch:
        world = replace(world, scratch=SCRATCH)
    fs = ModelFileSystem()
    world.build(OUT, fs)
    assert worlds.tree(OUT, fs) == world.right, "the model gives another dataset than the real disk"
    right = lasting(fs.disk().contents())
    return Subject(name=name, world=world, start=Disk(), run=lambda fs: world.build(OUT, fs), right=right)


def _damaged(whole: Subject, damage: dict[str, bytes | None], hurt: frozenset[str]) -> Subject:
    fs = ModelFileSystem()
    whole.run(fs)
    return replace(whole, start=altered(fs.disk(), damage), run=lambda fs: whole.world.repair(OUT, fs), hurt=hurt)


def altered(disk: Disk, contents: dict[str, bytes | None]) -> Disk:
    """A disk with other contents in some of its files, under all their names, or without those names."""
    files, folders = dict(disk.files), {inode: dict(entries) for inode, entries in disk.folders.items()}
    for path, data in contents.items():
        *parents, name = path.strip("/").split("/")
        entries = folders[functools.reduce(lambda inode, part: folders[inode][part], parents, ROOT)]
        if data is None:
            del entries[name]
        else:
            files[entries[name]] = data
    return Disk(files, folders)
