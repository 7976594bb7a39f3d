"""`prepare --part 2/4` and `join`: machines without a cluster share the units of a build on one output.

    part 1/4   units 0 5 9 ...  ->  pieces, receipts  \\
    part 2/4   units 1 4 8 ...  ->  pieces, receipts   >  OUT/.build  ->  join: all units have a receipt -> commit
    ...                                               /

Every part makes the same plan, so all agree which units are whose (`deal.py`). A unit writes the same bytes wherever it
runs, so a part may run again, anywhere, in any order, beside all others, and may be killed at any moment. `join` trusts
receipts alone; it does not ask which part wrote them, or how many parts there were.

Each part notes its lock, its events and the units of its last clean stop in `.build/parts`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from tokenmill import arguments, records
from tokenmill.arguments import Watcher
from tokenmill.build import pipeline, workspace
from tokenmill.build.api import PartStatus, PrepareResult
from tokenmill.build.commit import commit, total_of
from tokenmill.build.deal import deal_units
from tokenmill.build.pipeline import BuildOptions, BuildRun
from tokenmill.build.plan import Plan
from tokenmill.build.progress import Progress
from tokenmill.build.resolve import ResolvedBuild, make_config, resolve_build
from tokenmill.dataset import manifest
from tokenmill.dataset.manifest import Manifest, Split
from tokenmill.errors import (
    BuildError,
    DamagedPieceError,
    DatasetError,
    Interrupted,
    OutputError,
    RecipeError,
    TokenmillError,
)
from tokenmill.recipe import Recipe
from tokenmill.resources import resolve_workers
from tokenmill.sizes import counted
from tokenmill.sources.files import touch_times
from tokenmill.storage.base import Storage, open_folder
from tokenmill.storage.locks import LOCK_SUFFIX, PARTS, is_held, part_lock
from tokenmill.storage.output import is_temp
from tokenmill.storage.scratch import make_scratch_folder, remove_scratch_folder, scratch_folder
from tokenmill.units.receipts import NO_LIMIT, PLAN, Receipt, load_receipt, load_receipts

_PART = re.compile(r"(\d{1,7})/(\d{1,7})", re.ASCII)
_HINT = "give the number of the part and how many there are, like 2/4; parts count from 1"


@dataclass(frozen=True, slots=True)
class PartNumber:
    """Part `number` of `into`."""

    number: int
    into: int

    def __str__(self) -> str:
        return f"{self.number}/{self.into}"

    @property
    def lock(self) -> str:
        return part_lock(self.number, self.into)

    def note(self, ending: str) -> str:
        """The name of what this part notes."""
        return f"{self.lock.removesuffix(LOCK_SUFFIX)}{ending}"


def parse_part(text: str) -> PartNumber:
    """`2/4`, or an error that says what is wrong with it."""
    found = _PART.fullmatch(arguments.text("part", text).strip())
    if found is None:
        raise RecipeError(f"part is {arguments.show(text)}", hint=_HINT)
    part = PartNumber(int(found[1]), int(found[2]))
    if not 1 <= part.number <= part.into:
        hint = "parts count from 1: add 1 to an index that counts from 0" if not part.number else _HINT
        raise RecipeError(f"there is no part {part}", hint=hint)
    return part


def check_part(recipe: Recipe) -> None:
    """Refuse what a part cannot know."""
    if recipe.max_tokens is not None:
        raise RecipeError("`max_tokens` counts through all units, and a part has only some", hint="use `sample`")


def build_part(
    recipe: Recipe, folder: Storage, options: BuildOptions, *, part: PartNumber
) -> tuple[Manifest, bool, PartStatus]:
    """Build a part: its totals, as a manifest without files; whether all was done already; and what is left."""
    check_part(recipe)
    workspace.check_ours(folder)
    resolved = resolve_build(workspace.pin_hub_commits(folder, recipe), output=folder.path)
    resolved = workspace.match_stored_plan(folder, resolved)
    plan, progress = resolved.plan, Progress(options.watch)
    for note in resolved.notes:
        progress.emit("note", message=note)
    times = touch_times(resolved.listing.root, plan.sources)
    complete = workspace.finished(folder, plan)
    if complete is not None:
        pipeline.compare_with_sources(resolved, folder, complete, times, progress)
        return complete, True, _status(part, len(plan.units), 0, finished=True)
    folder.check_no_links({*resolved.recipe.splits, "provenance", *workspace.MADE})
    folder.make(PARTS)
    folder, note = folder.ready()
    if note:
        progress.emit("note", message=note)
    with pipeline.locked_and_logged(folder, progress, lock=part.lock, log_name=part.note(".events.jsonl")):
        complete = workspace.finished(folder, plan)
        if complete is not None:
            return complete, True, _status(part, len(plan.units), 0, finished=True)
        options.on_lock()
        workspace.start_part(folder, plan, times)
        try:
            totals, already, num_units = _build_part(resolved, folder, options, times, progress, part)
        except TokenmillError:
            complete = pipeline.finished_by_another(folder, plan)
            if complete is None:
                raise
            return complete, True, _status(part, len(plan.units), 0, finished=True)
        missing = len(plan.units) - workspace.num_receipts(folder, range(len(plan.units)))
        return totals, already, _status(part, num_units, missing)


def _status(part: PartNumber, units: int, missing: int, *, finished: bool = False) -> PartStatus:
    return PartStatus(number=part.number, into=part.into, units=units, missing_units=missing, is_joined=finished)


def _build_part(
    resolved: ResolvedBuild,
    folder: Storage,
    options: BuildOptions,
    times: tuple[int, ...],
    progress: Progress,
    part: PartNumber,
) -> tuple[Manifest, bool, int]:
    """Preflight and units of a part whose lock is held. Also returns how many units it has."""
    plan = resolved.plan
    units = deal_units(plan, part.into)[part.number - 1]
    mine = frozenset(units)
    for name in workspace.MADE:
        folder.make(name)
    _sweep(folder, mine)
    scratch = scratch_folder(options.scratch, folder) if options.scratch else None
    if scratch is not None:  # parts of one machine may share the disk
        scratch = make_scratch_folder(replace(scratch, path=f"{scratch.path}-{part.number}-of-{part.into}"))
    config = make_config(resolved, scratch=scratch.path if scratch else None)
    workspace.keep_tokenizer(folder, resolved.spec)
    executor = options.start_executor(folder, config, resolved.spec)
    touched = plan.units_of(workspace.touched_sources(folder, plan, times))
    run = BuildRun(
        resolved=resolved,
        config=config,
        folder=folder,
        scratch=scratch,
        executor=executor,
        progress=progress,
        times=times,
        to_compare=touched & mine,
    )
    known: dict[int, int] = {}
    try:
        found = pipeline.preflight(run, options)
        record = workspace.BuildRecord(work=config, tokenizer=resolved.spec.describe(), parity=found.parity)
        _note_record(folder, record, is_complete=not found.unread)
        known = pipeline.begin_units(run, 1.0, mine)
        already = len(known) == len(units)
        with pipeline.reporting_missing_bytes(folder, pipeline.output_bytes(resolved, found)):
            _run_units(run, part, units, known)
        pipeline.report_damage(folder, progress)
        if found.unread:  # the sources were unreadable for a moment only, and the manifest must not depend on that
            record = replace(record, parity=pipeline.repeat_parity(run, len(plan.units)))
            _note_record(folder, record, is_complete=True)
        executor.release()
    finally:
        executor.stop()
        with contextlib.suppress(KeyboardInterrupt):
            workspace.record_clean_stop(folder, plan, known, part.note(workspace.CLEAN_SUFFIX))
            if scratch is not None:
                remove_scratch_folder(scratch)
    return _totals(run, record, _receipts(folder, plan, units)), already, len(units)


def _note_record(folder: Storage, record: workspace.BuildRecord, *, is_complete: bool) -> None:
    """Write down how units are done. All parts find the same, unless a source could not be read for a moment: then
    `parity` is left empty until a part has compared all of it."""
    if is_complete:
        workspace.save_build_record(folder, record)
    elif not folder.exists(workspace.JOB):
        folder.claim(workspace.JOB, records.seal(replace(record, parity={})))


def _sweep(folder: Storage, mine: frozenset[int]) -> None:
    """Remove the temp files of this part's units; others are being written."""
    for parent in workspace.MADE:
        found = (name for name in folder.names(parent) if is_temp(name))
        folder.remove_all([f"{parent}/{name}" for name in found if _unit_of(name) in mine])


def _unit_of(name: str) -> int:
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else -1


def _run_units(run: BuildRun, part: PartNumber, units: Sequence[int], known: dict[int, int]) -> None:
    """Run the units that are not done. Adds them to `known`."""
    try:
        with contextlib.ExitStack() as stack:
            left = (unit for unit in units if unit not in known)
            tasks, after_unit = pipeline.start_fetching(run, left, stack, note=part.note(".fetched.json"))
            stack.enter_context(pipeline.stop_on_error(run.executor, run.folder))
            failures = run.executor.run(tasks, pipeline.make_listener(run, known, after_unit))
        pipeline.raise_failures(failures, len(units))
        pipeline.compare_touched(run, units)
    except KeyboardInterrupt:
        raise Interrupted(
            f"{len(known):,} of {counted(len(units), 'unit')} of part {part} are saved",
            hint="run the same command to resume",
        ) from None


def _receipts(folder: Storage, plan: Plan, units: Iterable[int]) -> Iterator[Receipt]:
    found = load_receipts(folder, units, plan.fingerprint, check_files=folder.stat_is_cheap)
    for unit, receipt in zip(units, found, strict=True):
        if receipt is None:
            raise BuildError(
                f"unit {unit} was reported done, but its receipt does not verify",
                hint="check the drive, then run the same command again",
            )
        yield receipt


def _totals(run: BuildRun, record: workspace.BuildRecord, found: Iterable[Receipt]) -> Manifest:
    """What a part wrote, as a manifest without files."""
    receipts = records.make_table(Receipt, found, many=records.MANY_LARGE)
    whole = total_of(receipts)
    splits = {
        name: Split(
            tokens=sum(one.pieces[name].tokens for one in receipts if name in one.pieces),
            documents=sum(one.pieces[name].documents for one in receipts if name in one.pieces),
            shards=(),
        )
        for name in run.resolved.recipe.splits
    }
    return Manifest(
        format=manifest.FORMAT,
        fingerprint=run.resolved.plan.fingerprint,
        identity=run.resolved.plan.identity,
        tokenizer=record.tokenizer,
        parity=record.parity,
        dtype=run.resolved.dtype,
        splits=splits,
        documents_read=whole.documents_read,
        dropped=dict(sorted(whole.dropped.items())),
        text_sum=whole.read_sum,
        sources=(),
        files={},
    )


_AGAIN = "then run `tokenmill.join` again"


def join(output: str | os.PathLike[str], *, workers: int | None = None, watch: Watcher | None = None) -> PrepareResult:
    """Make the dataset, once every unit of its parts is done; else say which parts miss how many units.

    The dataset has the same bytes as one that a single `prepare` makes. The sources are not read. Files of parts that
    were killed are hashed again, by `workers` threads. `watch` is called with progress events, which are dicts.
    """
    begin = time.monotonic()
    arguments.function_or_none("watch", watch)
    threads = resolve_workers(arguments.workers_or_none(workers))
    folder = open_folder(output, name="output")
    found, already = join_folder(folder, threads=threads, watch=watch)
    return PrepareResult(output=folder.path, manifest=found, already_complete=already, seconds=time.monotonic() - begin)


def join_folder(folder: Storage, *, threads: int, watch: Watcher | None = None) -> tuple[Manifest, bool]:
    progress = Progress(watch)
    complete = _complete(folder)
    if complete is not None:
        workspace.finish_clean_up(folder, complete.splits, None)
        return complete, True
    plan, record = _load(folder)
    _refuse_missing(folder, plan, set(workspace.units_with_receipt(folder)))
    _check_compared(record)
    folder.check_no_links({*record.work.split_names, "provenance", *workspace.MADE})
    folder, note = folder.ready()
    if note:
        progress.emit("note", message=note)
    with pipeline.locked_and_logged(folder, progress):
        complete = _complete(folder)
        if complete is not None:
            return complete, True
        plan, record = _load(folder)
        _check_compared(record)
        receipts = _verified(folder, plan, threads, progress)
        workspace.sweep(folder, record.work.split_names)
        progress.emit("commit", units=len(receipts))
        try:
            made = commit(
                folder,
                plan,
                receipts,
                splits=record.work.split_names,
                dtype=record.work.dtype,
                tokenizer=record.tokenizer,
                tokenizer_file=folder.digest(record.tokenizer["file"]) if record.tokenizer["file"] else None,
                parity=record.parity,
            )
        except DamagedPieceError:
            workspace.forget_clean_stop(folder)
            raise
        except KeyboardInterrupt:
            raise Interrupted("the units are saved", hint="run the same command to resume") from None
        finally:
            workspace.sweep(folder, record.work.split_names)
        workspace.clean_up(folder, None)
        progress.emit("finished", tokens=made.tokens, documents=made.documents)
        return made, False


def _complete(folder: Storage) -> Manifest | None:
    if not folder.exists(manifest.MANIFEST):
        return None
    found = manifest.load_manifest(folder)
    workspace.check_file_sizes(folder, found)
    return found


def _load(folder: Storage) -> tuple[Plan, workspace.BuildRecord]:
    """The plan and the record that the parts have written."""
    if not folder.exists(PLAN):
        raise DatasetError(
            f"{folder.path} has no part of a dataset",
            hint="give the output of `tokenmill.prepare` with `part`",
        )
    plan = workspace.load_plan(folder)
    if plan.identity.get("max_tokens") is not None:
        raise OutputError(
            f"{folder.path} holds an unfinished build with `max_tokens`, which has no parts",
            hint="run the same `tokenmill.prepare` command again",
        )
    if not folder.exists(workspace.JOB):
        _refuse_missing(folder, plan, set())
    return plan, workspace.load_build_record(folder)


def _check_compared(record: workspace.BuildRecord) -> None:
    """Refuse a comparison with the reference that is not complete: it is a part of the manifest."""
    if not record.parity:
        raise BuildError(
            "a source could not be read when the tokenizer was compared with its reference",
            hint=f"run one of the parts again, {_AGAIN}",
        )


def _verified(folder: Storage, plan: Plan, threads: int, progress: Progress) -> Sequence[Receipt]:
    """The receipts of all units. Files that were not there at a clean stop are hashed."""
    clean = {receipt.unit for receipt in workspace.trusted_receipts(folder, plan)}
    others = [unit.index for unit in plan.units if unit.index not in clean]
    if others:
        progress.emit("note", message=f"{counted(len(others), 'unit')} of parts that were cut off are hashed again")
    rehash = partial(_is_intact, folder, plan)
    with ThreadPoolExecutor(threads, thread_name_prefix="tokenmill-join") as pool:
        try:
            intact = {unit for unit, holds in zip(others, pool.map(rehash, others), strict=True) if holds}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # do not delay shutdown
            raise
    _refuse_missing(folder, plan, clean | intact)
    units = range(len(plan.units))
    return records.make_table(Receipt, _receipts(folder, plan, units), many=records.MANY_LARGE)


def _is_intact(folder: Storage, plan: Plan, unit: int) -> bool:
    return load_receipt(folder, unit, NO_LIMIT, plan.fingerprint, rehash=True) is not None


def _refuse_missing(folder: Storage, plan: Plan, done: set[int]) -> None:
    """Raise unless all units are done, with the parts that have to run."""
    missing = {unit.index for unit in plan.units} - done
    if not missing:
        return
    into = _num_parts(folder)
    total = counted(len(plan.units), "unit")
    if into is None:
        raise BuildError(
            f"{len(missing):,} of {total} are missing in {folder.path}",
            hint="run the same `tokenmill.prepare` command again",
        )
    lines, numbers = [], []
    for number, units in enumerate(deal_units(plan, into), 1):
        lost = len(missing.intersection(units))
        if lost:
            running = (
                ", and is running or was cut off" if is_held(folder, part_lock(number, into), patience=None) else ""
            )
            lines.append(f"part {number}/{into} misses {lost:,} of {counted(len(units), 'unit')}{running}")
            numbers.append(number)
    raise BuildError(
        f"{len(missing):,} of {total} are missing in {folder.path}:\n  " + "\n  ".join(lines),
        hint=f"run the same `tokenmill.prepare` command with `part='{numbers[0]}/{into}'`"
        + (f" and so on ({', '.join(map(str, numbers))})" if len(numbers) > 1 else "")
        + f", {_AGAIN}",
    )


def _num_parts(folder: Storage) -> int | None:
    """Into how many parts the build was dealt the last time; None if it has none."""
    found = []
    for name in folder.names(PARTS):
        numbers = re.match(r"(\d+)-of-(\d+)\.", name)
        stat = folder.stat(f"{PARTS}/{name}") if numbers else None
        if numbers and stat is not None:
            found.append((stat.modified, int(numbers[2])))
    return max(found)[1] if found else None
