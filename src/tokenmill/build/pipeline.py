"""The whole build, from a recipe to a manifest.

    set up -> is it done already? -> lock -> parity, space -> units -> commit -> manifest

Any interruption leaves whole files and receipts; the same call goes on from there.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenmill import records
from tokenmill.build import update as updating
from tokenmill.build import workspace
from tokenmill.build.commit import commit, copying_eagerly
from tokenmill.build.plan import Budget, Plan, make_task
from tokenmill.build.prefetch import prefetching
from tokenmill.build.preflight import Estimate, ParityResult, check_parity_of_plan, check_space, make_request
from tokenmill.build.progress import Progress, Tally, Watcher
from tokenmill.build.resolve import ResolvedBuild, make_config, resolve_build
from tokenmill.build.wait import recording_failure
from tokenmill.dataset.manifest import Manifest
from tokenmill.errors import (
    BuildError,
    DamagedPieceError,
    DatasetError,
    DiskFullError,
    Interrupted,
    SilentStoreError,
    TokenmillError,
)
from tokenmill.executors.base import Executor, UnitFailure
from tokenmill.recipe import Recipe
from tokenmill.sizes import counted, few, format_bytes
from tokenmill.sources.files import ask
from tokenmill.storage.base import ready
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import locked
from tokenmill.storage.output import open_log
from tokenmill.storage.scratch import Fallback, make_corner, scratch_corner
from tokenmill.tokenizers.spec import TokenizerSpec
from tokenmill.units import receipts as units_receipts
from tokenmill.units.receipts import (
    NO_LIMIT,
    PIECES,
    RECEIPTS,
    REJECTS,
    Receipt,
    load_receipt,
    load_receipts,
    packing,
    read_receipt,
    receipt_name,
)
from tokenmill.units.task import BuildConfig, UnitTask

_SLOW = ("sentencepiece", "tiktoken", "tokenizers")
LOG = ".build/events.jsonl"
ExecutorFactory = Callable[[Folder, BuildConfig, TokenizerSpec], Executor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How a build goes about it, which changes no byte. `hire` gives what runs its units.

    With `restart` nothing is kept of what is there; with `update`, what was made of sources that have not changed.
    `heed` is called once nobody else builds, and may raise: then nothing is begun. `bytes_beside` tells what will be
    written to the same disk afterwards, of the dtype and the estimate, of which the build takes a share.
    """

    hire: ExecutorFactory
    scratch: str | None = None
    restart: bool = False
    update: bool = False
    watch: Watcher | None = None
    heed: Callable[[], None] = lambda: None
    bytes_beside: Callable[[str, Estimate, float], int] = lambda _dtype, _estimate, _share: 0


def build(recipe: Recipe, folder: Folder, manner: BuildOptions) -> tuple[Manifest, bool]:
    """The dataset of a recipe, and whether it stood already."""
    workspace.check_ours(folder)
    anew = manner.restart or manner.update
    setup = resolve_build(recipe if anew else workspace.as_before(folder, recipe), output=folder.path)
    return build_planned(setup if manner.restart else workspace.as_begun(folder, setup), folder, manner)


def build_planned(setup: ResolvedBuild, folder: Folder, manner: BuildOptions) -> tuple[Manifest, bool]:
    """The same for what is set up already, maybe on another machine."""
    restart = manner.restart
    progress = Progress(manner.watch)
    for note in setup.notes:
        progress.tell("note", message=note)
    done = None if restart else workspace.finished(folder, setup.plan)
    local = scratch_corner(manner.scratch, folder)
    if done is not None:
        if unknown := workspace.what_was_compared(folder):
            progress.tell("note", message=unknown)
        workspace.tidy(folder, setup.recipe.splits, local)
        return done, True
    folder.check_no_links({*setup.recipe.splits, *workspace.known_splits(folder), "provenance"})
    folder.make(".build")
    folder, note = ready(folder)
    if note:
        progress.tell("note", message=note)
    waits: list[str] = []
    with locked(folder, tell=partial(_tell_of_waiting, progress, waits)), open_log(folder, LOG) as log:
        # Whoever held the lock before may have finished since the look above.
        done = None if restart else workspace.finished(folder, setup.plan)
        if done is not None:
            return done, True
        manner.heed()
        progress.log_to(log)
        for message in waits:  # it was said when there was no log yet
            log.add({"time": round(time.time(), 3), "kind": "waiting", "message": message})
        local = make_corner(local)
        if not restart:
            updating.finish_update(folder)
        if manner.update:
            updating.start_update(folder, setup.plan)
        workspace.enter(folder, setup, restart=restart)
        with recording_failure(folder):
            try:
                return _build(setup, folder, local, manner, progress), False
            except TokenmillError:
                done = _finished_by_another(folder, setup.plan)
                if done is None:
                    raise
                return done, True


def _tell_of_waiting(progress: Progress, waits: list[str], message: str) -> None:
    waits.append(message)
    progress.tell("waiting", message=message)


def _finished_by_another(folder: Folder, plan: Plan) -> Manifest | None:
    """The dataset, if it stands. Who stood still for long may have been taken for dead, and the work done."""
    with contextlib.suppress(TokenmillError):
        return workspace.finished(folder, plan)
    return None


def _build(
    setup: ResolvedBuild, folder: Folder, local: Folder | None, manner: BuildOptions, progress: Progress
) -> Manifest:
    for name in (PIECES, RECEIPTS, REJECTS):
        folder.make(name)
    workspace.sweep(folder, setup.recipe.splits)
    work = make_config(setup, scratch=local.path if local else None)
    tokenizer_file = workspace.keep_tokenizer(folder, setup.spec)
    executor = manner.hire(folder, work, setup.spec)
    try:
        checked = _check_first(setup, work, folder, executor, progress)
        _check_space(setup, folder, checked, manner)
        job = workspace.BuildRecord(work=work, tokenizer=setup.spec.describe(), parity=checked.parity)
        workspace.save_job(folder, job)
        linked: set[str] = set()
        with _telling_what_is_missing(folder, _output_bytes(setup, checked)):
            receipts = _run_units(setup, folder, local, executor, progress, linked, checked.estimate)
        _tell_of_damage(folder, progress)
        if checked.unread:  # whatever it was, it has passed, and the manifest must not tell of it
            job = replace(job, parity=_check_again(setup, work, executor, len(receipts)))
            workspace.save_job(folder, job)
        executor.dismiss()
        progress.tell("commit", units=len(receipts))
        result = commit(
            folder,
            setup.plan,
            receipts,
            splits=setup.recipe.splits,
            dtype=setup.dtype,
            tokenizer=setup.spec.describe(),
            tokenizer_file=tokenizer_file,
            parity=job.parity,
            linked=linked,
        )
    except DamagedPieceError:
        workspace.distrust(folder)
        raise
    finally:
        executor.stop()
        workspace.sweep(folder, setup.recipe.splits)
    workspace.clean_up(folder, local)
    progress.tell("finished", tokens=result.tokens, documents=result.documents)
    return result


def _tell_of_damage(folder: Folder, progress: Progress) -> None:
    """What was wrong is done again by now; but somebody should look at a drive that loses what it was given."""
    units, files = workspace.quarantined(folder)
    if units:
        done = f"{counted(units, 'unit')} {'was' if units == 1 else 'were'} damaged and done again"
        kept = f"{counted(files, 'file')} of {'it' if units == 1 else 'them'} as found"
        progress.tell("note", message=f"{done}; {folder.at(workspace.QUARANTINE)} keeps {kept}")


def _check_first(
    setup: ResolvedBuild, work: BuildConfig, folder: Folder, executor: Executor, progress: Progress
) -> ParityResult:
    """Before the work: the engine against its reference."""
    checked = check_parity_of_plan(make_request(setup.plan), work, setup.spec, executor)
    progress.tell("parity", **checked.parity)
    if setup.spec.engine in _SLOW and checked.survey.seconds:
        speed = checked.survey.encoded_bytes / checked.survey.seconds / 1e6
        progress.tell("note", message=f"{setup.spec.engine} encodes {speed:.1f} MB/s on each core")
    return checked


def _check_space(setup: ResolvedBuild, folder: Folder, checked: ParityResult, manner: BuildOptions) -> None:
    """Before the work: the disk against the estimate, with what will be written beside the dataset."""
    whole = _output_bytes(setup, checked)
    found = checked.estimate
    beside = manner.bytes_beside(setup.dtype, found, found.share(setup.recipe.max_tokens))
    try:
        check_space(folder, whole + beside)
    except DiskFullError as error:
        if not beside:
            raise
        parts = f"{format_bytes(whole)} of it for the dataset and {format_bytes(beside)} for the layout"
        raise DiskFullError(f"{error.message}; {parts}", hint=f"{error.hint}; or leave --layout out") from None


def _output_bytes(setup: ResolvedBuild, checked: ParityResult) -> int:
    """How large the dataset will be, about."""
    return round(checked.estimate.output_bytes * checked.estimate.share(setup.recipe.max_tokens))


def _check_again(setup: ResolvedBuild, work: BuildConfig, executor: Executor, num_units: int) -> dict[str, Any]:
    """The comparison with the reference once more, with none left out of the units that were read since."""
    checked = check_parity_of_plan(make_request(setup.plan), work, setup.spec, executor)
    if left_out := [unit for unit in checked.unread if unit < num_units]:
        source = setup.plan.sources[setup.plan.units[left_out[0]].source].name
        raise BuildError(
            f"{source} can be read now and then only", hint="check the drive, then run the same command again"
        )
    return checked.parity


@contextlib.contextmanager
def _telling_what_is_missing(folder: Folder, whole: int) -> Iterator[None]:
    """Who has to free space wants to know how much."""
    try:
        yield
    except DiskFullError as error:
        left = max(0, whole - workspace.bytes_done(folder))
        raise DiskFullError(
            f"{error.message}: about {format_bytes(left)} of {format_bytes(whole)} are still to be written",
            hint=error.hint,
        ) from None


def _run_units(
    setup: ResolvedBuild,
    folder: Folder,
    scratch: Folder | None,
    executor: Executor,
    progress: Progress,
    linked: set[str],
    expected: Estimate,
) -> Sequence[Receipt]:
    """Receipts of all units that the dataset consists of, in order. Shards that stand already are put to `linked`."""
    plan = setup.plan
    known: dict[int, int] = {}  # tokens of the units that are done: a million receipts would be gigabytes
    documents = 0
    for receipt in workspace.trusted_receipts(folder, plan):
        known[receipt.unit] = receipt.tokens
        documents += receipt.documents_read
    budget = Budget(setup.recipe.max_tokens, known)
    if before := workspace.num_receipts(folder):
        progress.tell("resume", units=before, total_units=len(plan.units), trusted=len(known))
    progress.start(
        Tally(
            total_bytes=round(plan.text_bytes() * expected.share(setup.recipe.max_tokens)),
            total_units=len(plan.units),
            workers=executor.workers,
            done_bytes=sum(plan.units[index].text_bytes for index in known),
            done_units=len(known),
            documents=documents,
            done_tokens=sum(known.values()),
        )
    )

    def tasks() -> Iterator[UnitTask]:
        for unit in plan.units:
            if budget.is_spent():
                return
            if unit.index not in known:
                yield make_task(plan, unit.index)

    fallback = Fallback(scratch, lambda message: progress.tell("note", message=message))

    def listen(message: dict[str, Any]) -> None:
        if message.pop("silent", False):
            # These raise if there is no answer for us either: no other unit would fare better.
            folder.exists(units_receipts.PLAN)
            ask(setup.listing.root)
        if message["kind"] == "done":  # a hint: all receipts are read in the end, side by side
            known[message["unit"]] = _num_tokens(folder, message["unit"]) if setup.recipe.max_tokens else 0
            look()
            pack(message["unit"])
            release(message["unit"])
            fallback.look()
        progress.hear(message)

    try:
        with (
            prefetching(folder, setup.listing.root, tasks()) as (leading, release),
            copying_eagerly(folder, plan, setup.recipe.splits, known, linked) as look,
            packing(folder, known) as pack,
            _stopping(executor, folder),
        ):
            failures = executor.run(leading, listen)
        _raise_failures(failures, setup)
        cut = budget.cut(plan)
        if budget.is_spent():
            progress.settle([cut.unit] if cut else [])
        if cut is not None:
            with _stopping(executor, folder):
                failures = executor.run(iter([cut]), progress.hear)
            _raise_failures(failures, setup)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped; {len(known):,} of {counted(len(plan.units), 'unit')} done and kept",
            hint="run the same command again: it goes on from there",
        ) from None
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            workspace.note_clean_stop(folder, plan, known)
    return _in_order(folder, setup, known, budget, cut)


@contextlib.contextmanager
def _stopping(executor: Executor, folder: Folder) -> Iterator[None]:
    """Whatever goes wrong within it, the workers stop before anything else is waited for."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, SilentStoreError):
            folder.leave_alone()
        executor.stop()
        raise


def _num_tokens(folder: Folder, unit: int) -> int:
    """Tokens of a unit that was just done; none if its receipt cannot be read, which will come to light."""
    try:
        return read_receipt(folder, receipt_name(unit, NO_LIMIT)).tokens
    except (DatasetError, BuildError):
        return 0


def _in_order(
    folder: Folder, setup: ResolvedBuild, known: dict[int, int], budget: Budget, cut: UnitTask | None
) -> Sequence[Receipt]:
    last, fingerprint = budget.num_units(len(setup.plan.units)), setup.plan.fingerprint

    def found() -> Iterator[Receipt]:
        # In a store the commit asks for each file that it copies or reads: once is enough.
        for unit, receipt in enumerate(load_receipts(folder, range(last), fingerprint, look=folder.is_local)):
            if receipt is None or unit not in known:
                raise BuildError(
                    f"unit {unit} was reported done, but its receipt cannot be trusted",
                    hint="check the drive, then run the same command again",
                )
            yield receipt
        if cut is not None:
            receipt = load_receipt(folder, cut.unit.index, cut.token_limit, fingerprint, rehash=False)
            if receipt is None:
                raise BuildError(f"the cut unit {cut.unit.index} cannot be trusted", hint="run the same command again")
            yield receipt

    receipts = records.pack_table(Receipt, found())
    if not any(receipt.tokens for receipt in receipts):
        dropped: Counter[str] = Counter()
        for receipt in receipts:
            dropped.update(receipt.dropped)
        reasons = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(dropped.items())]
        what = f"dropped: {', '.join(reasons)}" if reasons else "there was none"
        raise BuildError(f"no document was kept; {what}", hint="check the sources and the filters")
    return receipts


def _raise_failures(failures: Sequence[UnitFailure], setup: ResolvedBuild) -> None:
    if failures:
        total = len(setup.plan.units)
        units: dict[str, list[str]] = {}
        for failure in failures:
            units.setdefault(failure.error.message, []).append(_place(failure.task))
        lines = [f"{few(found)}: {message}" for message, found in units.items()]
        others = ", the others are done" if len(failures) < total else ""
        raise BuildError(
            f"{len(failures):,} of {counted(total, 'unit')} failed{others}:\n  " + few(lines, "\n  "),
            hint=failures[0].error.hint or "the same command tries them again and keeps what is done",
        )


def _place(task: UnitTask) -> str:
    """Which part of the sources a unit is."""
    names = [source.name for source in task.sources]
    where = f"{names[0]} from {task.unit.start} on" if len(names) == 1 else f"{len(names)} files from {names[0]} on"
    return f"unit {task.unit.index} ({where})"
