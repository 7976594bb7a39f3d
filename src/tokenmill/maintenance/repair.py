"""repair(): restores a damaged dataset, byte for byte.

    verify -> damaged files to .build/quarantine -> run their units again -> commit what is missing

Intact files are not touched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tokenmill import arguments
from tokenmill.arguments import Watcher
from tokenmill.build import workspace
from tokenmill.build.api import open_executor
from tokenmill.build.commit import commit, group_pieces, group_provenance
from tokenmill.build.plan import Budget, Plan, make_task
from tokenmill.build.workspace import (
    _PREPARE_AGAIN,
    SOURCE_CHANGED,
    dataset_receipts,
    find_receipt,
    key_of,
    load_all_receipts,
    reopen,
    require_receipt,
)
from tokenmill.dataset import manifest
from tokenmill.dataset.manifest import Manifest
from tokenmill.dataset.statistics import STATISTICS
from tokenmill.errors import BuildError, DatasetError, DeterminismError, SourceChangedError, StorageError
from tokenmill.executors.base import Executor
from tokenmill.maintenance.verify import Problem, strays, verify_folder
from tokenmill.resources import resolve_workers
from tokenmill.sizes import counted
from tokenmill.storage.base import Storage, open_folder
from tokenmill.storage.locks import locked, telling
from tokenmill.storage.output import Digest
from tokenmill.tokenizers.spec import TokenizerSpec, from_dataset
from tokenmill.units import receipts as units_receipts
from tokenmill.units.receipts import NO_LIMIT, Key, Receipt, receipt_name
from tokenmill.units.task import UnitTask


def run_tasks(executor: Executor, tasks: Iterable[UnitTask]) -> None:
    """Run units. Any failure is an error."""
    failures = executor.run(iter(tasks), lambda message: None)
    if failures:
        error = failures[0].error
        raise BuildError(
            f"{counted(len(failures), 'unit')} cannot be run again: {error.message}",
            hint=SOURCE_CHANGED if isinstance(error, SourceChangedError) else error.hint or _PREPARE_AGAIN,
        )


def repair(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    filter: str | None = None,
    watch: Watcher | None = None,
) -> tuple[Problem, ...]:
    """Restore a damaged dataset, and return what was wrong. The sources must be where they were.

    If the dataset was made with a filter, that function runs again, so it must be named here. `watch` is called with an
    event, a dict, while this waits for a lock.
    """
    arguments.function_or_none("watch", watch)
    arguments.name_or_none("filter", filter)
    return repair_folder(open_folder(path), workers=resolve_workers(workers), filter=filter, watch=watch)


def repair_folder(
    folder: Storage, *, workers: int, filter: str | None = None, watch: Watcher | None = None
) -> tuple[Problem, ...]:
    if not folder.exists(units_receipts.PLAN) and not folder.exists(manifest.MANIFEST):
        manifest.load_manifest(folder, command="repair")  # says what is not there
    try:
        found: Manifest | None = manifest.load_manifest(folder)
        problems = verify_folder(folder, threads=workers).problems or tuple(_lost_receipts(folder))
    except DatasetError as error:
        if not folder.exists(units_receipts.PLAN):
            raise
        found, problems = None, (Problem(manifest.MANIFEST, error.message),)
    if problems:
        plan, job = reopen(folder, filter)
        shards = _folders_in(folder, (*job.work.split_names, "provenance"))
        folder.check_no_links((*shards, *workspace.MADE, workspace.QUARANTINE))
        folder, _ = folder.ready()
        with locked(folder, tell=telling(watch)):
            _repair(folder, plan, job, found, problems, workers)
    elif found is not None:
        workspace.finish_clean_up(folder, found.splits, None)
    return problems


def _repair(
    folder: Storage,
    plan: Plan,
    job: workspace.BuildRecord,
    found: Manifest | None,
    problems: tuple[Problem, ...],
    workers: int,
) -> None:
    bad = {problem.file for problem in problems}
    for name in sorted(bad):
        if folder.exists(name):
            folder.quarantine(name)
    for name in _misplaced(folder, job.work.split_names):
        folder.quarantine(name)
    for name in workspace.MADE:
        folder.make(name)
    workspace.sweep(folder, job.work.split_names)
    spec = _restore_tokenizer(folder, job)
    executor = open_executor(workers, None, folder, job.work, spec)
    try:
        _rerun_lost(folder, plan, executor)
        parts = dataset_receipts(folder, plan)
        intact = _intact(folder, plan, parts, found, bad)
        lost = _lost(folder, plan, parts, intact)
        run_tasks(executor, (make_task(plan, *key) for key in lost))
    finally:
        executor.stop()
    for key in lost:
        if find_receipt(folder, plan, key) != parts[key[0]]:
            raise DeterminismError(
                f"unit {key[0]} did not give the same bytes as the first time",
                hint=f"check the source with `tokenmill.verify({folder.path!r}, source='all')`",
            )
    result = commit(
        folder,
        plan,
        parts,
        splits=job.work.split_names,
        dtype=job.work.dtype,
        tokenizer=job.tokenizer,
        tokenizer_file=folder.digest(job.tokenizer["file"]) if job.tokenizer["file"] else None,
        parity=job.parity,
        intact=intact,
        # A dataset of an older version has none, and must stay as it is.
        with_statistics=found is None or STATISTICS in found.files,
        # If a drive had stored other tokens than were written, they were counted.
        recount=any(name.endswith(".bin") for name in bad),
    )
    if found is not None and _without_statistics(result) != _without_statistics(found):
        raise DeterminismError("the repaired dataset is not the same as before", hint="has a source changed?")
    for stray in strays(folder, result):
        folder.quarantine(stray.file)
    workspace.clean_up(folder, None)


def _without_statistics(manifest: Manifest) -> Manifest:
    return replace(manifest, files={name: digest for name, digest in manifest.files.items() if name != STATISTICS})


def _folders_in(folder: Storage, names: Iterable[str]) -> list[str]:
    """Those of some folders that are not empty. A broken link is not one: it is only moved away."""
    return [name for name in names if _names(folder, name)]


def _names(folder: Storage, name: str) -> list[str]:
    try:
        return folder.names(name)
    except StorageError:  # a loop of links
        return []


def _misplaced(folder: Storage, splits: Iterable[str]) -> Iterator[str]:
    """What has the name of a folder or file of the dataset, and is not one."""
    for parent in (*splits, "provenance"):
        names = _names(folder, parent)
        found = folder.stat(parent)
        if found is not None and not found.is_folder and not names:
            yield parent
        for name in names:
            found = folder.stat(f"{parent}/{name}")
            if found is not None and not found.is_file:
                yield f"{parent}/{name}"
    found = folder.stat(STATISTICS)
    if found is not None and not found.is_file:
        yield STATISTICS


def _restore_tokenizer(folder: Storage, job: workspace.BuildRecord) -> TokenizerSpec:
    """The tokenizer, from the dataset or from the copy of its build."""
    name = job.tokenizer["file"]
    if not name:
        return from_dataset(job.tokenizer, None)
    for place in (name, workspace.TOKENIZER_COPY):
        with contextlib.suppress(DatasetError):  # missing, or not a file: the other one may be intact
            spec = from_dataset(job.tokenizer, folder.read(place))
            if spec.fingerprint == job.tokenizer["fingerprint"]:
                if place != name and folder.exists(name):
                    folder.quarantine(name)
                folder.write(name, spec.content)
                return spec
    raise DatasetError(
        f"neither {folder.at(name)} nor {workspace.TOKENIZER_COPY} is the tokenizer of this dataset",
        hint="put the right file in its place",
    )


def _lost_receipts(folder: Storage) -> Iterator[Problem]:
    """Receipts that only `verify` of sources and the next repair need. Without a plan, neither of them can use any."""
    try:
        plan = workspace.load_plan(folder)
    except DatasetError:
        return
    max_tokens = plan.identity.get("max_tokens")
    known: dict[int, int] = {}
    budget = Budget(max_tokens, known)
    for unit, receipt in enumerate(load_all_receipts(folder, plan)):
        if receipt is None:
            yield Problem(receipt_name(unit, NO_LIMIT), "is missing or damaged")
        if receipt is None and max_tokens is not None:  # the units that follow depend on it
            return
        known[unit] = receipt.tokens if receipt is not None else 0
        if budget.is_spent():
            cut = budget.cut(plan)
            if cut is not None and find_receipt(folder, plan, key_of(cut)) is None:
                yield Problem(receipt_name(*key_of(cut)), "is missing or damaged")
            return


def _rerun_lost(folder: Storage, plan: Plan, executor: Executor) -> None:
    """Run the units again whose receipts are lost: what they contained is unknown."""
    max_tokens = plan.identity.get("max_tokens")
    if max_tokens is None:
        missing = [unit for unit, found in enumerate(load_all_receipts(folder, plan)) if found is None]
        run_tasks(executor, (make_task(plan, unit) for unit in missing))
        return
    known: dict[int, int] = {}
    budget = Budget(max_tokens, known)
    for unit in range(len(plan.units)):  # how many units a budget takes depends on those before
        known[unit] = _receipt_of(folder, plan, executor, make_task(plan, unit)).tokens
        if budget.is_spent():
            cut = budget.cut(plan)
            if cut is not None:
                _receipt_of(folder, plan, executor, cut)
            return


def _receipt_of(folder: Storage, plan: Plan, executor: Executor, task: UnitTask) -> Receipt:
    """The receipt of a unit, which runs if it has none."""
    found = find_receipt(folder, plan, key_of(task))
    if found is None:
        run_tasks(executor, [task])
        found = find_receipt(folder, plan, key_of(task))
    return require_receipt(found, task.unit.index)


def _intact(
    folder: Storage, plan: Plan, parts: Sequence[Receipt], found: Manifest | None, bad: set[str]
) -> dict[str, Digest]:
    """Intact files, by the manifest, or by the receipts if there is no manifest."""
    if found is not None:
        return {name: digest for name, digest in found.all_files().items() if name not in bad}
    groups = group_pieces(parts, _splits(parts), plan.target_tokens)
    links = (link for group in groups for link in group.links())
    return {name: digest for _, name, digest in links if _has(folder, name, digest)}


def _lost(folder: Storage, plan: Plan, parts: Sequence[Receipt], intact: dict[str, Digest]) -> list[Key]:
    """The units whose pieces the missing files need."""
    lost: set[Key] = set()
    for group in group_pieces(parts, _splits(parts), plan.target_tokens):
        if not all(f"{group.name}{ending}" in intact for ending in (".bin", ".idx")):
            lost.update(group.keys)
    for index, receipts in enumerate(group_provenance(parts)):
        if f"provenance/{index:05d}.parquet" not in intact:
            lost.update(part.key for part in receipts if not _has(folder, part.provenance, part.files[part.provenance]))
    return sorted(lost)


def _splits(parts: Iterable[Receipt]) -> list[str]:
    return sorted({split for part in parts for split in part.pieces})


def _has(folder: Storage, name: str, digest: Digest) -> bool:
    """Whether there is a plain file with this content."""
    found = folder.stat(name)
    return found is not None and found.is_file and found.size == digest.bytes and folder.digest(name) == digest
