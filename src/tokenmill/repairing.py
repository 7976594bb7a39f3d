"""repair: make a damaged dataset what it was, byte for byte.

What is bad moves to `.build/quarantine`; the units that it came from are done again; the commit
puts in place what is missing. Nothing that is healthy is touched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from tokenmill import manifest as manifests
from tokenmill.build import state
from tokenmill.build.budget import Budget
from tokenmill.build.build import make_executor
from tokenmill.build.commit import commit
from tokenmill.build.executor import Executor
from tokenmill.build.groups import group_pieces, group_provenance
from tokenmill.build.receipt import NO_LIMIT, PIECES, RECEIPTS, REJECTS, Receipt
from tokenmill.build.redo import (
    Receipts,
    dataset_receipts,
    load_receipts,
    reopen,
    run_tasks,
    same_result,
    task_of,
)
from tokenmill.build.task import make_task
from tokenmill.cores import resolve_workers
from tokenmill.errors import DatasetError, DeterminismError
from tokenmill.manifest import Manifest
from tokenmill.planning import Plan
from tokenmill.storage import Digest, Folder, open_folder
from tokenmill.storage.lock import locked
from tokenmill.storage.places import ready
from tokenmill.tokenizer.spec import TokenizerSpec, from_dataset
from tokenmill.verifying import Problem, strays, verify_folder


def repair(
    path: str | os.PathLike[str], *, workers: int | None = None, filter: str | None = None
) -> tuple[Problem, ...]:
    """Restore a damaged dataset; gives what was wrong. The sources must be where they were.

    A dataset that was made with a filter runs that function again, so it must be named here.
    """
    return repair_folder(open_folder(path), workers=resolve_workers(workers), filter=filter)


def repair_folder(folder: Folder, *, workers: int, filter: str | None = None) -> tuple[Problem, ...]:
    if not folder.exists(state.PLAN) and not folder.exists(manifests.NAME):
        manifests.load(folder)  # says what is not there
    try:
        found: Manifest | None = manifests.load(folder)
        problems = verify_folder(folder, threads=workers).problems
    except DatasetError as error:
        if not folder.exists(state.PLAN):
            raise
        found, problems = None, (Problem(manifests.NAME, error.message),)
    if problems:
        plan, job = reopen(folder, filter)
        folder, _ = ready(folder)
        with locked(folder):
            _repair(folder, plan, job, found, problems, workers)
    elif found is not None:
        state.tidy(folder, found.splits, None)
    return problems


def _repair(
    folder: Folder,
    plan: Plan,
    job: state.Job,
    found: Manifest | None,
    problems: tuple[Problem, ...],
    workers: int,
) -> None:
    bad = {problem.file for problem in problems}
    for name in sorted(bad):
        if folder.exists(name):
            folder.quarantine(name)
    for name in _impostors(folder, job.work.split_names):
        folder.quarantine(name)
    for name in (PIECES, RECEIPTS, REJECTS):
        folder.make(name)
    state.sweep(folder, job.work.split_names)
    spec = _restore_tokenizer(folder, job)
    executor = make_executor(workers, None, folder, job.work, spec)
    try:
        receipts = _complete(folder, plan, executor)
        parts = dataset_receipts(plan, receipts)
        intact = _intact(folder, plan, parts, found, bad)
        run_tasks(executor, [task_of(plan, part) for part in _lost(folder, plan, parts, intact)])
    finally:
        executor.stop()
    now = load_receipts(folder, plan)
    if changed := same_result(receipts, now):
        raise DeterminismError(
            f"unit {changed[0]} gave other bytes than the first time",
            hint="has the source changed? see verify --source",
        )
    result = commit(
        folder,
        plan,
        dataset_receipts(plan, now),
        splits=job.work.split_names,
        dtype=job.work.dtype,
        tokenizer=job.tokenizer,
        tokenizer_file=folder.digest(job.tokenizer["file"]) if job.tokenizer["file"] else None,
        parity=job.parity,
        intact=intact,
    )
    if found is not None and result != found:
        raise DeterminismError("the repaired dataset is not the one that was damaged", hint="has a source changed?")
    for stray in strays(folder, result):
        folder.quarantine(stray.file)
    state.clean_up(folder, None)


def _impostors(folder: Folder, splits: Iterable[str]) -> Iterator[str]:
    """What stands in the place of the dataset's folders and files, and is none. A folder may be a link to one."""
    for parent in (*splits, "provenance"):
        names = folder.names(parent)
        found = folder.stat(parent)
        if found is not None and not found.is_folder and not names:
            yield parent
        for name in names:
            found = folder.stat(f"{parent}/{name}")
            if found is not None and not found.is_file:
                yield f"{parent}/{name}"


def _restore_tokenizer(folder: Folder, job: state.Job) -> TokenizerSpec:
    """The tokenizer, from the dataset or from the copy that its build kept."""
    name = job.tokenizer["file"]
    if not name:
        return from_dataset(job.tokenizer, None)
    for place in (name, state.TOKENIZER_COPY):
        with contextlib.suppress(DatasetError):  # it is lost, or not a file: the other one may be well
            spec = from_dataset(job.tokenizer, folder.read(place))
            if spec.fingerprint == job.tokenizer["fingerprint"]:
                if place != name and folder.exists(name):
                    folder.quarantine(name)
                folder.write(name, spec.content)
                return spec
    raise DatasetError(
        f"neither {folder.at(name)} nor {state.TOKENIZER_COPY} is the tokenizer of this dataset",
        hint="put the right file in its place",
    )


def _complete(folder: Folder, plan: Plan, executor: Executor) -> Receipts:
    """All receipts; units whose receipt is lost are done again, for nobody knows what they held."""
    max_tokens = plan.identity.get("max_tokens")
    found = load_receipts(folder, plan)
    if max_tokens is None:
        run_tasks(executor, [make_task(plan, unit.index) for unit in plan.units if (unit.index, NO_LIMIT) not in found])
        return load_receipts(folder, plan)
    for unit in plan.units:
        # How many units a budget takes, only the ones before tell.
        whole = {index: receipt.tokens for (index, limit), receipt in found.items() if limit == NO_LIMIT}
        budget = Budget(max_tokens, whole)
        if budget.is_spent():
            cut = budget.cut(plan)
            if cut is not None and (cut.unit.index, cut.token_limit) not in found:
                run_tasks(executor, [cut])
            break
        if unit.index not in whole:
            run_tasks(executor, [make_task(plan, unit.index)])
            found = load_receipts(folder, plan)
    return load_receipts(folder, plan)


def _intact(
    folder: Folder, plan: Plan, parts: list[Receipt], found: Manifest | None, bad: set[str]
) -> dict[str, Digest]:
    """Files that need not be made again. Without a manifest, those that a receipt vouches for."""
    if found is not None:
        return {name: digest for name, digest in found.all_files().items() if name not in bad}
    splits = sorted({split for part in parts for split in part.pieces})
    links = (link for group in group_pieces(parts, splits, plan.target_tokens) for link in group.links())
    return {name: digest for _, name, digest in links if _holds(folder, name, digest)}


def _lost(folder: Folder, plan: Plan, parts: list[Receipt], intact: dict[str, Digest]) -> list[Receipt]:
    """The units without which the missing files cannot be made."""
    lost: dict[int, Receipt] = {}
    splits = sorted({split for part in parts for split in part.pieces})
    for group in group_pieces(parts, splits, plan.target_tokens):
        if not all(f"{group.name}{ending}" in intact for ending in (".bin", ".idx")):
            lost.update({unit: parts[unit] for unit, _ in group.keys})
    for index, receipts in enumerate(group_provenance(parts)):
        if f"provenance/{index:05d}.parquet" not in intact:
            for part in receipts:
                if not _holds(folder, part.provenance, part.files[part.provenance]):
                    lost[part.unit] = part
    return [lost[unit] for unit in sorted(lost)]


def _holds(folder: Folder, name: str, digest: Digest) -> bool:
    """Whether a plain file is there with this content."""
    found = folder.stat(name)
    return found is not None and found.is_file and folder.digest(name) == digest
