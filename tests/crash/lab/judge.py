"""Whether a build that was disturbed came out right: its bytes, its totals, and what it leaves behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.world import Tree, World, make_world
from tokenmill.build import commit, workspace
from tokenmill.dataset import manifest
from tokenmill.errors import TokenmillError
from tokenmill.storage.local import Folder

EVENTS = ".build/events.jsonl"
# What an untyped error looks like after it went from a worker to its parent as a record.
_UNTYPED = re.compile(r"\b[A-Za-z]*(Error|Exception|Interrupt): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A world, a place for its outputs, and what a quiet build of it leaves in .build."""

    world: World
    place: Path
    kept: Tree

    def output(self, name: object) -> str:
        return str(self.place / f"out-{name}")

    def remove(self, output: str) -> None:
        """Forget an output whose point is done."""
        shutil.rmtree(output, ignore_errors=True)
        for name in os.listdir(self.world.scratch) if self.world.scratch else ():
            shutil.rmtree(os.path.join(self.world.scratch or "", name))


@contextlib.contextmanager
def make_case(kind: str, *, documents: int = 24, **fields: Any) -> Iterator[Case]:
    """A world in a temp folder, in memory where the system has a place for that.

    Its right result is verified and its totals are checked here, once: what has the same bytes has the same verdict.
    """
    with quick_folder() as path:
        world = make_world(path, kind, documents=documents, **fields)
        right = str(path / "right")
        dataset, kept = _files(right)
        assert dataset == world.right
        assert world.verify(right).ok
        _check_totals(Folder(right))
        yield Case(world=world, place=path, kept=kept)


@contextlib.contextmanager
def quick_folder() -> Iterator[Path]:
    """A temp folder; in memory where that is possible, for no power is cut here and thousands of fsyncs cost."""
    memory = "/dev/shm"
    base = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tokenmill-lab-", dir=base) as path:
        yield Path(path)


def finish(case: Case, output: str) -> str | None:
    """Build, or go on with a build; a sentence if anything about the result is not as it must be."""
    try:
        case.world.build(output)
    except TokenmillError as error:
        return f"the build does not go on: {type(error).__name__}: {error.message}"
    return wrong_with(case, output)


def finish_in_parts(case: Case, output: str) -> str | None:
    """The same for a build in parts."""
    try:
        case.world.build_in_parts(output)
    except TokenmillError as error:
        return f"the parts do not go on: {type(error).__name__}: {error.message}"
    return wrong_with(case, output)


def mend(case: Case, output: str) -> str | None:
    """Repair; a sentence if the result is not as it must be."""
    try:
        case.world.repair(output)
    except TokenmillError as error:
        return f"repair does not go on: {type(error).__name__}: {error.message}"
    return wrong_with(case, output)


def wrong_with(case: Case, output: str) -> str | None:
    """What is wrong with a finished dataset, with what is left in .build or on the scratch disk; None if nothing."""
    dataset, kept = _files(output)
    if dataset != case.world.right:
        return f"wrong tree: {difference(dataset, case.world.right)}"
    if kept != case.kept:
        return f"in .build: {difference(kept, case.kept)}"
    if case.world.scratch is not None and (left := os.listdir(case.world.scratch)):
        return f"on the scratch disk: {left[0]}"
    return None


def wrong_tree(case: Case, output: str) -> str | None:
    """What is wrong with the files of a dataset; None if they are all there, with the right bytes, and no others."""
    dataset, _ = _files(output)
    return None if dataset == case.world.right else f"wrong tree: {difference(dataset, case.world.right)}"


def looks_finished_but_wrong(case: Case, output: str) -> str | None:
    """What a reader would be misled by: a manifest that stands over wrong files. Temp files mislead nobody."""
    if not os.path.lexists(os.path.join(output, manifest.MANIFEST)):
        return None
    found = {name: digest for name, digest in _files(output)[0].items() if not name.endswith(".tmp")}
    return None if found == case.world.right else f"looks finished: {difference(found, case.world.right)}"


def untyped(error: BaseException) -> str | None:
    """A sentence for an error that is not one of ours, or carries one that is not."""
    if not isinstance(error, TokenmillError):
        return f"a bare {type(error).__name__}: {error}"
    if _UNTYPED.search(error.message):
        return f"an untyped error in a {type(error).__name__}: {error.message}"
    return None


def _check_totals(folder: Folder) -> None:
    """The receipts must add up to the manifest."""
    plan = workspace.load_plan(folder)
    commit.check_totals(plan, workspace.dataset_receipts(folder, plan), manifest.load_manifest(folder))


def _files(output: str) -> tuple[Tree, Tree]:
    """SHA-256 of the files of a dataset, and of those in .build but for what a crash may leave there for people to see.

    What depends on the moment or the place counts by its name alone.
    """
    dataset: Tree = {}
    kept: Tree = {}
    for parent, _, names in os.walk(output):
        inside = os.path.relpath(parent, output)
        for name in names:
            path = name if inside == "." else f"{inside}/{name}"
            if path.startswith(".build/quarantine/"):
                continue
            full = os.path.join(parent, name)
            assert not os.path.islink(full), f"{full} is a link"
            data = b"" if path in (workspace.JOB, EVENTS) else Path(full).read_bytes()
            (kept if path.startswith(".build/") else dataset)[path] = hashlib.sha256(data).hexdigest()
    return dataset, kept


def difference(found: Tree, wanted: Tree) -> str:
    more, less = sorted(found.keys() - wanted.keys()), sorted(wanted.keys() - found.keys())
    other = sorted(name for name in found.keys() & wanted.keys() if found[name] != wanted[name])
    parts = (("too many", more), ("missing", less), ("other bytes", other))
    return "; ".join(f"{what} {', '.join(names[:3])}" for what, names in parts if names)
