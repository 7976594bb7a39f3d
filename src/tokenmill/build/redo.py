"""Redoing units of a finished build: what repair and `verify --source` stand on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenmill.build import state
from tokenmill.build.budget import Budget
from tokenmill.build.executor import Executor
from tokenmill.build.receipt import NO_LIMIT, RECEIPTS, Receipt, read_receipt, receipt_name
from tokenmill.build.task import Task, make_task
from tokenmill.errors import BuildError, DatasetError
from tokenmill.layouts.transfer import REQUEST
from tokenmill.planning import Plan
from tokenmill.storage import Folder

Receipts = dict[tuple[int, int], Receipt]

_PREPARE_AGAIN = "prepare it again, with --restart here or into another folder, and compare the two manifests"


def reopen(folder: Folder, filter: str | None) -> tuple[Plan, state.Job]:
    """Plan and job of a finished build. Code that a folder names is run only if the caller names it too."""
    if folder.exists(REQUEST):
        raise DatasetError(
            f"{folder.path} was imported: it has no sources to be made of again",
            hint="run the same tokenmill import command again: it writes what is damaged, and keeps the rest",
        )
    if not folder.exists(state.PLAN) or not folder.exists(state.JOB):
        raise DatasetError(
            f"{folder.path} does not say where its sources are: its .build folder is gone",
            hint=_PREPARE_AGAIN,
        )
    try:
        plan, job = state.load_plan(folder), state.load_job(folder)
    except DatasetError as error:
        raise DatasetError(error.message, hint=_PREPARE_AGAIN) from None
    if job.work.filter != filter:
        raise DatasetError(
            f"{folder.path} was made with the filter {job.work.filter!r}, not {filter!r}",
            hint="if you trust that function, name it with --filter",
        )
    return plan, job


def load_receipts(folder: Folder, plan: Plan) -> Receipts:
    """Every receipt that can be read, by unit and token limit. Their pieces may be gone: they became shards."""
    found: Receipts = {}
    for name in folder.names(RECEIPTS):
        path = f"{RECEIPTS}/{name}"
        try:
            receipt = read_receipt(folder, path)
        except (DatasetError, BuildError):
            continue
        key = (receipt.unit, receipt.token_limit)
        if receipt.fingerprint == plan.fingerprint and path == receipt_name(*key):
            found[key] = receipt
    return found


def dataset_receipts(plan: Plan, receipts: Receipts) -> list[Receipt]:
    """The receipts that the dataset consists of, in order: a token budget may have cut it short."""
    whole = {unit: receipt.tokens for (unit, limit), receipt in receipts.items() if limit == NO_LIMIT}
    budget = Budget(plan.identity.get("max_tokens"), whole)
    wanted = [(unit, NO_LIMIT) for unit in range(budget.num_units(len(plan.units)))]
    cut = budget.cut(plan)
    if cut is not None:
        wanted.append((cut.unit.index, cut.token_limit))
    if missing := [key for key in wanted if key not in receipts]:
        raise DatasetError(f"the receipt of unit {missing[0][0]} is missing or damaged", hint="run tokenmill repair")
    return [receipts[key] for key in wanted]


def task_of(plan: Plan, receipt: Receipt) -> Task:
    return make_task(plan, receipt.unit, receipt.token_limit)


def run_tasks(executor: Executor, tasks: Iterable[Task]) -> None:
    """Do some units; any failure is an error."""
    failures = executor.run(iter(tasks), lambda message: None)
    if failures:
        raise BuildError(
            f"{len(failures)} units cannot be done again: {failures[0].error.message}", hint=failures[0].error.hint
        )


def same_result(before: Mapping[tuple[int, int], Receipt], now: Mapping[tuple[int, int], Receipt]) -> list[int]:
    """Units that gave another result than the first time."""
    return [key[0] for key in before.keys() & now.keys() if before[key] != now[key]]
