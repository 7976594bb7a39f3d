"""The steps of a build, from a recipe to a manifest, top to bottom.

    resolve -> finished already? -> lock -> preflight -> units -> commit -> clean up

Any interruption leaves whole files and receipts; the same call resumes from them.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill import records
from tokenmill.arguments import Watcher
from tokenmill.build import workspace
from tokenmill.build.commit import commit, copying_eagerly
from tokenmill.build.plan import Budget, Plan, make_task
from tokenmill.build.prefetch import FETCHED, prefetching
from tokenmill.build.preflight import Estimate, ParityResult, check_parity_of_plan, check_space, make_request
from tokenmill.build.progress import Progress, Tally
from tokenmill.build.resolve import ResolvedBuild, make_config, resolve_build
from tokenmill.build.update import finish_update, start_update
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
from tokenmill.executors.base import Executor, Listener, UnitFailure
from tokenmill.recipe import Recipe
from tokenmill.sizes import counted, few, format_bytes
from tokenmill.sources.base import Unit
from tokenmill.sources.files import ask, touch_times
from tokenmill.storage.base import Storage, is_hub
from tokenmill.storage.locks import LOCK, locked
from tokenmill.storage.scratch import Fallback, make_scratch_folder, scratch_folder
from tokenmill.tokenizers.spec import TokenizerSpec
from tokenmill.units import receipts as units_receipts
from tokenmill.units.receipts import (
    NO_LIMIT,
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
# How often the sources are compared that were touched while a build ran. Some network drives never have the same time.
_MOST_COMPARISONS = 3
ExecutorFactory = Callable[[Storage, BuildConfig, TokenizerSpec], Executor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How a build runs. None of this changes a byte of the dataset.

    `start_executor` starts the executor of the units. `restart` keeps nothing of an earlier build; `update` keeps the
    units of sources that have not changed. `on_lock` is called once this process holds the lock, and may raise before
    anything is written. `extra_bytes` says how many bytes will be written to the same disk afterwards, for a dtype, an
    estimate and the share of it that is built.
    """

    start_executor: ExecutorFactory
    scratch: str | None = None
    restart: bool = False
    update: bool = False
    watch: Watcher | None = None
    on_lock: Callable[[], None] = lambda: None
    extra_bytes: Callable[[str, Estimate, float], int] = lambda _dtype, _estimate, _share: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRun:
    """What the steps of a build share while it holds its lock."""

    resolved: ResolvedBuild
    config: BuildConfig
    folder: Storage
    scratch: Storage | None
    executor: Executor
    progress: Progress
    times: tuple[int, ...]
    """When the sources were touched, before anything was read for this run."""
    to_compare: frozenset[int]
    """Units whose sources were touched since the plan was made."""


def build(recipe: Recipe, folder: Storage, options: BuildOptions) -> tuple[Manifest, bool]:
    """The dataset of a recipe, and whether it was complete already."""
    workspace.check_ours(folder, restart=options.restart)
    starts_anew = options.restart or options.update
    resolved = resolve_build(recipe if starts_anew else workspace.pin_hub_commits(folder, recipe), output=folder.path)
    return run_build(resolved if options.restart else workspace.match_stored_plan(folder, resolved), folder, options)


def run_build(resolved: ResolvedBuild, folder: Storage, options: BuildOptions) -> tuple[Manifest, bool]:
    """The same for a recipe that is already resolved, perhaps on another machine."""
    progress = Progress(options.watch)
    for note in resolved.notes:
        progress.emit("note", message=note)
    times = touch_times(resolved.listing.root, resolved.plan.sources)
    scratch = scratch_folder(options.scratch, folder) if options.scratch else None
    complete = None if options.restart else workspace.finished(folder, resolved.plan)
    if complete is not None:
        compare_with_sources(resolved, folder, complete, times, progress)
        workspace.finish_clean_up(folder, resolved.recipe.splits, scratch)
        return complete, True
    folder.check_no_links({*resolved.recipe.splits, *workspace.known_splits(folder), "provenance", *workspace.MADE})
    folder.make(".build")
    folder, note = folder.ready()
    if note:
        progress.emit("note", message=note)
    with locked_and_logged(folder, progress):
        # The process that held the lock before may have finished in the meantime.
        complete = None if options.restart else workspace.finished(folder, resolved.plan)
        if complete is not None:
            compare_with_sources(resolved, folder, complete, times, progress)
            return complete, True
        options.on_lock()
        scratch = make_scratch_folder(scratch) if scratch else None
        if not options.restart and folder.exists(workspace.KEPT_PLAN):
            finish_update(folder)
        if options.update:
            start_update(folder, resolved.plan, times)
        workspace.start_or_resume(folder, resolved, times, restart=options.restart)
        with workspace.recording_failure(folder):
            try:
                return _build(resolved, folder, scratch, options, times, progress), False
            except TokenmillError:
                complete = finished_by_another(folder, resolved.plan)
                if complete is None:
                    raise
                return complete, True


def compare_with_sources(
    resolved: ResolvedBuild, folder: Storage, complete: Manifest, times: tuple[int, ...], progress: Progress
) -> None:
    """Compare the sources with a finished dataset by content, if its plan, which has their pins, is gone, or if they
    were touched since."""
    why = workspace.why_to_compare(folder, resolved.plan, times)
    if not why:
        return
    progress.emit("note", message=f"{why}: comparing all sources of the dataset with it")
    from tokenmill.build.check_sources import compare_sources

    progress.emit("note", message=compare_sources(resolved, folder, complete))
    workspace.record_comparison(folder, resolved.plan, times)


@contextlib.contextmanager
def locked_and_logged(folder: Storage, progress: Progress, *, lock: str = LOCK, log_name: str = LOG) -> Iterator[None]:
    """Hold the lock of the output, or of a part of it, and log all events."""
    waits: list[str] = []

    def tell(message: str) -> None:
        waits.append(message)
        progress.emit("waiting", message=message)

    with locked(folder, lock=lock, tell=tell), folder.open_log(log_name) as log:
        progress.log_to(log)
        for message in waits:  # these came before there was a log
            log.add({"time": round(time.time(), 3), "kind": "waiting", "message": message})
        yield


def finished_by_another(folder: Storage, plan: Plan) -> Manifest | None:
    """The dataset, if it is complete: if this process stalled, another one may have taken the lock and finished it."""
    with contextlib.suppress(TokenmillError):
        return workspace.finished(folder, plan)
    return None


def _build(
    resolved: ResolvedBuild,
    folder: Storage,
    scratch: Storage | None,
    options: BuildOptions,
    times: tuple[int, ...],
    progress: Progress,
) -> Manifest:
    """Preflight, units, commit and clean-up of a build whose lock is held."""
    splits = resolved.recipe.splits
    for name in workspace.MADE:
        folder.make(name)
    workspace.sweep(folder, splits)
    config = make_config(resolved, scratch=scratch.path if scratch else None)
    tokenizer_file = workspace.keep_tokenizer(folder, resolved.spec)
    executor = options.start_executor(folder, config, resolved.spec)
    run = BuildRun(
        resolved=resolved,
        config=config,
        folder=folder,
        scratch=scratch,
        executor=executor,
        progress=progress,
        times=times,
        to_compare=resolved.plan.units_of(workspace.touched_sources(folder, resolved.plan, times)),
    )
    try:
        found = preflight(run, options)
        record = workspace.BuildRecord(work=config, tokenizer=resolved.spec.describe(), parity=found.parity)
        workspace.save_build_record(folder, record)
        linked: set[str] = set()
        with reporting_missing_bytes(folder, output_bytes(resolved, found)):
            receipts = _run_units(run, found.estimate, linked)
        report_damage(folder, progress)
        if found.unread:  # the sources were unreadable for a moment only, and the manifest must not depend on that
            record = replace(record, parity=repeat_parity(run, len(receipts)))
            workspace.save_build_record(folder, record)
        executor.release()
        progress.emit("commit", units=len(receipts))
        manifest = commit(
            folder,
            resolved.plan,
            receipts,
            splits=splits,
            dtype=resolved.dtype,
            tokenizer=resolved.spec.describe(),
            tokenizer_file=tokenizer_file,
            parity=record.parity,
            linked=linked,
        )
    except DamagedPieceError:
        workspace.forget_clean_stop(folder)
        raise
    finally:
        executor.stop()
        workspace.sweep(folder, splits)
    workspace.clean_up(folder, scratch)
    progress.emit("finished", tokens=manifest.tokens, documents=manifest.documents)
    return manifest


def preflight(run: BuildRun, options: BuildOptions) -> ParityResult:
    """Before any unit: the engine against its reference, and the free space against the estimate."""
    resolved, folder, progress = run.resolved, run.folder, run.progress
    found = check_parity_of_plan(make_request(resolved.plan), run.config, resolved.spec, run.executor)
    progress.emit("parity", **found.parity)
    if resolved.spec.engine in _SLOW and found.survey.seconds:
        speed = found.survey.encoded_bytes / found.survey.seconds / 1e6
        progress.emit("note", message=f"{resolved.spec.engine} encodes {speed:.1f} MB/s on each core")
    dataset_bytes = output_bytes(resolved, found)
    share = found.estimate.share(resolved.recipe.max_tokens)
    extra_bytes = options.extra_bytes(resolved.dtype, found.estimate, share)
    try:
        check_space(folder, dataset_bytes + extra_bytes)
    except DiskFullError as error:
        if not extra_bytes:
            raise
        parts = f"{format_bytes(dataset_bytes)} of it for the dataset and {format_bytes(extra_bytes)} for the layout"
        raise DiskFullError(f"{error.message}; {parts}", hint=f"{error.hint}; or leave `layout` out") from None
    return found


def output_bytes(resolved: ResolvedBuild, found: ParityResult) -> int:
    """The size of the dataset, about."""
    return round(found.estimate.output_bytes * found.estimate.share(resolved.recipe.max_tokens))


def _run_units(run: BuildRun, expected: Estimate, linked: set[str]) -> Sequence[Receipt]:
    """Receipts of all units of the dataset, in order. Adds the shards that have their final names to `linked`."""
    plan, folder, executor = run.resolved.plan, run.folder, run.executor
    known = begin_units(run, expected.share(run.resolved.recipe.max_tokens))
    budget = Budget(run.resolved.recipe.max_tokens, known)
    try:
        with contextlib.ExitStack() as stack:
            tasks, after_unit = _start_background_tasks(run, known, budget, linked, stack)
            stack.enter_context(stop_on_error(executor, folder))
            failures = executor.run(tasks, make_listener(run, known, after_unit))
        raise_failures(failures, len(plan.units))
        cut = budget.cut(plan)
        if budget.is_spent():
            run.progress.set_remaining([cut.unit] if cut else [])
        if cut is not None:
            with stop_on_error(executor, folder):
                failures = executor.run(iter([_as_touched(run, cut)]), run.progress.handle)
            raise_failures(failures, len(plan.units))
        compare_touched(run, range(budget.num_units(len(plan.units))), cut)
    except KeyboardInterrupt:
        raise Interrupted(
            f"{len(known):,} of {counted(len(plan.units), 'unit')} are saved",
            hint="run the same command to resume",
        ) from None
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            workspace.record_clean_stop(folder, plan, known)
    return _verify_receipts(run, known, budget, cut)


def begin_units(run: BuildRun, share: float, units: Collection[int] | None = None) -> dict[int, int]:
    """The tokens of each unit that an earlier run has done. Starts the totals from them.

    `share` of the text of all units is to be done, or of only some `units` if they are given.
    """
    plan, executor = run.resolved.plan, run.executor
    known: dict[int, int] = {}  # not the receipts themselves: a million of them would be gigabytes
    documents = 0
    for receipt in workspace.trusted_receipts(run.folder, plan, units):
        if receipt.unit in run.to_compare:
            continue
        known[receipt.unit] = receipt.tokens
        documents += receipt.documents_read
    total_units = len(plan.units) if units is None else len(units)
    if before := workspace.num_receipts(run.folder, units):
        run.progress.emit("resume", units=before, total_units=total_units, trusted=len(known))
    text_bytes = plan.text_bytes() if units is None else sum(plan.units[index].text_bytes for index in units)
    run.progress.start(
        Tally(
            total_bytes=round(text_bytes * share),
            total_units=total_units,
            workers=executor.workers,
            done_bytes=sum(plan.units[index].text_bytes for index in known),
            done_units=len(known),
            documents=documents,
            done_tokens=sum(known.values()),
        )
    )
    return known


def _start_background_tasks(
    run: BuildRun, known: dict[int, int], budget: Budget, linked: set[str], stack: contextlib.ExitStack
) -> tuple[Iterator[UnitTask], list[Callable[[int], None]]]:
    """Start what runs beside the units. Returns the tasks, and what to call after each unit."""
    folder, plan = run.folder, run.resolved.plan
    tasks, release = start_fetching(run, (unit.index for unit in _units_left(plan, known, budget)), stack)
    copy_eagerly = stack.enter_context(copying_eagerly(folder, plan, run.resolved.recipe.splits, known, linked))
    pack = stack.enter_context(packing(folder, known))
    return tasks, [lambda _: copy_eagerly(), pack, *release]


def start_fetching(
    run: BuildRun, units: Iterable[int], stack: contextlib.ExitStack, *, note: str = FETCHED
) -> tuple[Iterator[UnitTask], list[Callable[[int], None]]]:
    """The tasks of units, whose files on the hub are fetched ahead, and what to call after each unit."""
    root, after_unit = run.resolved.listing.root, list[Callable[[int], None]]()
    tasks: Iterator[UnitTask] = (_as_touched(run, make_task(run.resolved.plan, unit)) for unit in units)
    if is_hub(root):
        tasks, done_with = stack.enter_context(prefetching(run.folder, root, tasks, note=note))
        after_unit.append(done_with)
    if run.scratch:
        fallback = Fallback(run.scratch, lambda message: run.progress.emit("note", message=message))
        after_unit.append(lambda _: fallback.check())
    return tasks, after_unit


def _units_left(plan: Plan, known: dict[int, int], budget: Budget) -> Iterator[Unit]:
    """Units that are not done, until the token budget is spent."""
    for unit in plan.units:
        if budget.is_spent():
            return
        if unit.index not in known:
            yield unit


def _as_touched(run: BuildRun, task: UnitTask) -> UnitTask:
    """The task, with the text to be compared if a source was touched since an earlier run."""
    return replace(task, compare_text=True) if task.unit.index in run.to_compare else task


def compare_touched(run: BuildRun, units: Container[int], cut: UnitTask | None = None) -> None:
    """Compare the units of sources that were touched while this run read them with their text as it is now."""
    plan, times = run.resolved.plan, run.times
    for _ in range(_MOST_COMPARISONS):
        now = touch_times(run.resolved.listing.root, plan.sources)
        if now == times:
            return
        touched = {source.name for source, was, is_now in zip(plan.sources, times, now, strict=True) if was != is_now}
        times = now
        run.progress.emit(
            "note",
            message=f"{few(sorted(touched), ', ')}: touched during the build; comparing the text with what was read",
        )
        tasks = [make_task(plan, unit) for unit in sorted(plan.units_of(touched)) if unit in units]
        tasks += [cut] if cut is not None else []
        with stop_on_error(run.executor, run.folder):
            failures = run.executor.run((replace(task, compare_text=True) for task in tasks), lambda message: None)
        raise_failures(failures, len(tasks))


def make_listener(run: BuildRun, known: dict[int, int], after_unit: Sequence[Callable[[int], None]]) -> Listener:
    """Counts the messages of an executor, and adds each unit that is done to `known`."""

    def listen(message: dict[str, Any]) -> None:
        if message.pop("silent", False):
            # These raise if this process gets no answer either: then no other unit would.
            run.folder.exists(units_receipts.PLAN)
            ask(run.resolved.listing.root)
        if message["kind"] == "done":  # a hint: the receipts themselves are read at the end
            unit = message["unit"]
            known[unit] = _num_tokens(run.folder, unit) if run.resolved.recipe.max_tokens else 0
            for call in after_unit:
                call(unit)
        run.progress.handle(message)

    return listen


@contextlib.contextmanager
def stop_on_error(executor: Executor, folder: Storage) -> Iterator[None]:
    """On any error, stop the workers before waiting for anything else."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, SilentStoreError):
            folder.back_off()
        executor.stop()
        raise


def _num_tokens(folder: Storage, unit: int) -> int:
    """Tokens of a unit that was just done; 0 if its receipt cannot be read, which `_in_order` will report."""
    try:
        return read_receipt(folder, receipt_name(unit, NO_LIMIT)).tokens
    except (DatasetError, BuildError):
        return 0


def _verify_receipts(run: BuildRun, known: dict[int, int], budget: Budget, cut: UnitTask | None) -> Sequence[Receipt]:
    """The receipts of all units in plan order, each checked again. The dataset must have a token."""
    folder, plan = run.folder, run.resolved.plan
    last, fingerprint = budget.num_units(len(plan.units)), plan.fingerprint

    def found() -> Iterator[Receipt]:
        # In an object store the commit itself asks for each file, and once is enough.
        for unit, receipt in enumerate(
            load_receipts(folder, range(last), fingerprint, check_files=folder.stat_is_cheap)
        ):
            if receipt is None or unit not in known:
                raise BuildError(
                    f"unit {unit} was reported done, but its receipt does not verify",
                    hint="check the drive, then run the same command again",
                )
            yield receipt
        if cut is not None:
            receipt = load_receipt(folder, cut.unit.index, cut.token_limit, fingerprint, rehash=False)
            if receipt is None:
                raise BuildError(
                    f"the receipt of the cut unit {cut.unit.index} does not verify", hint="run the same command again"
                )
            yield receipt

    receipts = records.make_table(Receipt, found(), many=records.MANY_LARGE)
    if not any(receipt.tokens for receipt in receipts):
        dropped: Counter[str] = Counter()
        for receipt in receipts:
            dropped.update(receipt.dropped)
        reasons = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(dropped.items())]
        what = f"dropped: {', '.join(reasons)}" if reasons else "there was none"
        raise BuildError(f"no document was kept; {what}", hint="check the sources and the filters")
    return receipts


def raise_failures(failures: Sequence[UnitFailure], total: int) -> None:
    """Raise if units failed. `total` units were to be done."""
    if failures:
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


def report_damage(folder: Storage, progress: Progress) -> None:
    """Damaged units were replayed by now, but the user should know of a drive that loses data."""
    units, files = workspace.quarantined(folder)
    if units:
        done = f"{counted(units, 'unit')} {'was' if units == 1 else 'were'} damaged and built again"
        kept = f"{counted(files, 'file')} of {'it' if units == 1 else 'them'} as found"
        progress.emit("note", message=f"{done}; {folder.at(workspace.QUARANTINE)} keeps {kept}")


def repeat_parity(run: BuildRun, num_units: int) -> dict[str, Any]:
    """The comparison with the reference again, now with the units that could not be read at first."""
    resolved = run.resolved
    found = check_parity_of_plan(make_request(resolved.plan), run.config, resolved.spec, run.executor)
    if left_out := [unit for unit in found.unread if unit < num_units]:
        source = resolved.plan.sources[resolved.plan.units[left_out[0]].source].name
        raise BuildError(
            f"{source} is only intermittently readable", hint="check the drive, then run the same command again"
        )
    return found.parity


@contextlib.contextmanager
def reporting_missing_bytes(folder: Storage, whole: int) -> Iterator[None]:
    """Add to an error of a full disk how much is still to be written."""
    try:
        yield
    except DiskFullError as error:
        left = max(0, whole - workspace.bytes_done(folder))
        raise DiskFullError(
            f"{error.message}: about {format_bytes(left)} of {format_bytes(whole)} are still to be written",
            hint=error.hint,
        ) from None
