"""Redoing units of a finished build: what repair and `verify --source` stand on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from tokenmill.build import quick, state
from tokenmill.build.budget import Budget
from tokenmill.build.executor import Executor
from tokenmill.build.receipt import NO_LIMIT, Key, Receipt, read_receipt, receipt_name
from tokenmill.build.task import Task
from tokenmill.errors import BuildError, DatasetError, SourceChangedError
from tokenmill.filters import check_filter
from tokenmill.layouts.transfer import REQUEST
from tokenmill.planning import Plan
from tokenmill.sizes import counted
from tokenmill.storage import Folder

# A finished dataset is not updated: what a build says of a source that changed would be no help.
SOURCE_CHANGED = "put the old file back, with its time, or prepare the dataset again, with --restart or elsewhere"
_PREPARE_AGAIN = "prepare it again, with --restart here or into another folder, and compare the two manifests"


def reopen(folder: Folder, filter: str | None) -> tuple[Plan, state.Job]:
    """Plan and job of a finished build. Code that a folder names is run only if the caller names it too."""
    if folder.exists(REQUEST):
        raise DatasetError(
            f"{folder.path} was imported: it has no sources to be made of again",
            hint="run the same tokenmill import command again: it writes what is damaged, and keeps the rest",
        )
    if lost := [name for name in (state.PLAN, state.JOB) if not folder.exists(name)]:
        what = lost[0] if folder.exists(".build") else "its .build folder"
        raise DatasetError(
            f"{folder.path} does not say where its sources are: {what} is gone",
            hint=_PREPARE_AGAIN,
        )
    try:
        plan, job = state.load_plan(folder), state.load_job(folder)
    except DatasetError as error:
        raise DatasetError(error.message, hint=_PREPARE_AGAIN) from None
    check_filter(plan.identity.get("filter"), filter, where=folder.path)
    if job.work.filter != filter:  # whoever had the folder may have changed it
        raise DatasetError(
            f"{folder.path} was made with the filter {job.work.filter!r}, not {filter!r}",
            hint="its .build names code that --filter did not: trust neither, and prepare the dataset again",
        )
    return plan, job


def find_receipt(folder: Folder, plan: Plan, key: Key) -> Receipt | None:
    """A receipt, if it is there and can be read. Its pieces may be gone: they became shards."""
    try:
        receipt = read_receipt(folder, receipt_name(*key))
    except (DatasetError, BuildError):
        return None
    return receipt if (receipt.key, receipt.fingerprint) == (key, plan.fingerprint) else None


def whole_receipts(folder: Folder, plan: Plan) -> Iterator[Receipt | None]:
    """The receipt of every unit, in order, as long as they are asked for."""
    return folder.each(partial(find_receipt, folder, plan), ((unit, NO_LIMIT) for unit in range(len(plan.units))))


def dataset_receipts(folder: Folder, plan: Plan) -> Sequence[Receipt]:
    """The receipts that the dataset consists of, in order: a token budget may have cut it short."""

    def found() -> Iterator[Receipt]:
        known: dict[int, int] = {}
        budget = Budget(plan.identity.get("max_tokens"), known)
        for unit, receipt in enumerate(whole_receipts(folder, plan)):
            known[unit] = there(receipt, unit).tokens
            if budget.is_spent():
                cut = budget.cut(plan)
                yield there(receipt if cut is None else find_receipt(folder, plan, key_of(cut)), unit)
                return
            yield there(receipt, unit)

    return quick.table(Receipt, found())


def there(receipt: Receipt | None, unit: int) -> Receipt:
    """A receipt that a unit must have."""
    if receipt is None:
        raise DatasetError(f"the receipt of unit {unit} is missing or damaged", hint="run tokenmill repair")
    return receipt


def key_of(task: Task) -> Key:
    return task.unit.index, task.token_limit


def run_tasks(executor: Executor, tasks: Iterable[Task]) -> None:
    """Do some units; any failure is an error."""
    failures = executor.run(iter(tasks), lambda message: None)
    if failures:
        error = failures[0].error
        raise BuildError(
            f"{counted(len(failures), 'unit')} cannot be done again: {error.message}",
            hint=SOURCE_CHANGED if isinstance(error, SourceChangedError) else error.hint,
        )
