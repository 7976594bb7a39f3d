"""plan(): what a build would do, without changing the output.

A throughput trial runs the beginnings of some units as a build does, and discards the output. From it follows the time
of the whole build.

    read -> documents and their tokens -> hash -> write to the null device

The trial does not measure the disk of the output, nor how busy the machine will be.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Unpack

import numpy as np

from tokenmill import arguments
from tokenmill.arguments import RecipeOptions, Sources
from tokenmill.build import workspace
from tokenmill.build.api import check_executor, check_only_layout, check_place
from tokenmill.build.export_layout import GIVEN_UP, plan_layout_export
from tokenmill.build.plan import Plan, make_task
from tokenmill.build.preflight import Estimate, check_parity_of_plan, make_request
from tokenmill.build.resolve import ResolvedBuild, make_config, resolve_build
from tokenmill.build.update import num_kept
from tokenmill.errors import DatasetError, OutputError, SourceChangedError, TokenmillError
from tokenmill.executors.in_process import InProcessProber
from tokenmill.formats.nanogpt import TEST_SIZE
from tokenmill.recipe import make_recipe
from tokenmill.resources import MEMORY_BUDGET, check_addresses, free_memory, num_cores, resolve_workers
from tokenmill.sizes import counted, format_bytes, format_count, format_seconds
from tokenmill.sources.base import Batch, text_array, text_buffers
from tokenmill.sources.files import touch_times
from tokenmill.storage.base import MARGIN_BYTES, Storage, is_url, local_folder, open_folder
from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.tokenizers.base import Engine
from tokenmill.tokenizers.engine import open_engine
from tokenmill.units import receipts
from tokenmill.units.encode import read_batches
from tokenmill.units.run import UnitRun
from tokenmill.units.task import BuildConfig, ProbeRequest, UnitTask

# When a job of Slurm ends, in seconds since 1970.
JOB_END = "SLURM_JOB_END_TIME"
# Sampled positions, bytes to encode, and bytes to read for them. Fewer from an object store.
POSITIONS = 64
ENCODE_BYTES = 512_000
READ_BYTES = 64_000_000
STORE_POSITIONS = 16
STORE_READ_BYTES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What a build would read, write and take.

    `split` has the share of the documents that each split holds out, `parity` what was compared with the reference, and
    `warnings` say what does not fit: memory, or the time that a job may take.

    `seconds` is an estimate for all workers, `seconds_alone` for a single one. Unless the work `was_rehearsed`, both
    are the time of encoding only, which is a lower bound.
    """

    files: int
    source_bytes: int
    units: int
    units_done: int
    workers: int
    estimate: Estimate
    seconds: float
    seconds_alone: float
    was_rehearsed: bool
    max_tokens: int | None
    disk_needed: int
    disk_layout: int
    disk_free: int | None
    scratch_free: int | None
    memory: int
    memory_free: int | None
    fingerprint: str
    finished: bool
    conflict: tuple[str, ...]
    notes: tuple[str, ...]
    split: dict[str, float]
    parity: dict[str, Any]
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        tokens = f"about {format_count(self.estimate.tokens)} tokens (± {format_count(self.estimate.error)})"
        time = f"{format_seconds(self.seconds)} with {counted(self.workers, 'worker')}"
        left = f"{self.units - self.units_done:,} of {counted(self.units, 'unit')} left"
        return f"PlanResult({counted(self.files, 'file')}, {left}: {tokens}, {format_bytes(self.disk_needed)}, {time})"

    @property
    def disk_missing(self) -> int:
        """Bytes that the output's disk lacks, `disk_layout` included."""
        need = self.disk_needed + self.disk_layout
        return max(0, need + MARGIN_BYTES - self.disk_free) if need and self.disk_free is not None else 0


def plan(
    sources: Sources = (),
    output: str | os.PathLike[str] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    restart: bool = False,
    update: bool = False,
    layout: str | None = None,
    only_layout: bool = False,
    executor: str = "local",
    **recipe: Unpack[RecipeOptions],
) -> PlanResult:
    """Files, units, tokens with an error bar, disk, memory and time of a build, without starting it.

    With `executor="ray"`, the cluster is not contacted: `workers` counts its workers, by default as many as the cores
    of this machine.
    """
    check_executor(executor)
    arguments.text_or_none("layout", layout)
    restart, update = arguments.flag("restart", restart), arguments.flag("update", update)
    workers = arguments.workers_or_none(workers)
    arguments.place_or_none("scratch", scratch)
    wanted = make_recipe({"sources": sources, **recipe}, config=config)
    folder = open_folder(output, name="output") if output is not None else None
    notes: list[str] = []
    exported = None
    if layout is not None:
        check_place(layout, folder)
        exported = plan_layout_export(layout, wanted)
        notes.append(f"the time is that of the dataset, without the export to {layout.partition(':')[0]}")
    if check_only_layout(only_layout, layout):
        notes.append(GIVEN_UP)
    if folder is not None and not restart and not update:
        wanted = workspace.pin_hub_commits(folder, wanted)
    check_addresses()
    setup = resolve_build(wanted, output=None if folder is None else folder.path)
    if folder is not None and not restart:
        setup = workspace.match_stored_plan(folder, setup)
    count, at_once = _num_workers(workers, executor)
    if executor == "ray" and workers is None:
        notes.append("the cluster was not contacted: memory and time are for as many workers as this machine has cores")
    work = make_config(setup, scratch=None, only_look=True)
    engine = open_engine(setup.spec)
    found = check_parity_of_plan(_make_request(setup), work, setup.spec, InProcessProber(work, engine))
    expected = found.estimate
    share = expected.share(wanted.max_tokens)
    standing = (0, False, ()) if folder is None or restart else _build_status(folder, setup.plan, update=update)
    done, finished, conflict = standing
    times = touch_times(setup.listing.root, setup.plan.sources) if finished else ()
    if folder is not None and finished and (why := workspace.why_to_compare(folder, setup.plan, times)):
        notes.append(f"{why}: a build reads all of its sources, and compares them with it")
    needed = 0 if finished else round(expected.output_bytes * share)
    if folder is not None and not restart:
        needed -= workspace.bytes_done(folder)
    of_layout = 0 if exported is None else exported.bytes_needed(folder, setup.dtype, expected, share)
    # No trial on an object store: it would read much, and the store's speed varies.
    cost = None if is_url(setup.listing.root) else run_trial(setup.plan, work, engine)
    seconds = expected.encode_seconds if cost is None else expected.text_bytes * cost
    longest = seconds * max(unit.text_bytes for unit in setup.plan.units) / max(1, setup.plan.text_bytes())
    left = seconds * max(0.0, share - done / len(setup.plan.units))
    took = elapsed(left, longest, at_once)
    runs_here = executor == "local"
    memory, memory_free = count * MEMORY_BUDGET, free_memory() if runs_here else math.inf
    return PlanResult(
        files=len(setup.listing.sources),
        source_bytes=sum(source.bytes for source in setup.listing.sources),
        units=len(setup.plan.units),
        units_done=done,
        workers=count,
        estimate=expected,
        seconds=took,
        seconds_alone=elapsed(left, longest, 1),
        was_rehearsed=cost is not None,
        max_tokens=wanted.max_tokens,
        disk_needed=max(0, needed),
        disk_layout=of_layout,
        disk_free=folder.free_bytes() if folder is not None else None,
        scratch_free=local_folder(scratch).free_bytes() if scratch is not None else None,
        memory=memory,
        memory_free=None if math.isinf(memory_free) else int(memory_free),
        fingerprint=setup.plan.fingerprint,
        finished=finished,
        conflict=conflict,
        notes=(*setup.notes, *notes),
        split={"val": TEST_SIZE} if wanted.split == "nanogpt" else dict(wanted.split),
        parity=found.parity,
        warnings=tuple(_warnings(took, memory, memory_free)) if left else (),
    )


def _warnings(seconds: float, memory: int, memory_free: float) -> Iterator[str]:
    """What does not fit: the memory of all workers, and the time of a batch job."""
    if memory > memory_free:
        fitting = max(1, int(memory_free // MEMORY_BUDGET))
        missing = format_bytes(memory - int(memory_free))
        yield f"memory: the workers may need {missing} more than is free; `workers={fitting}` would fit"
    end = os.environ.get(JOB_END, "")
    if end.isdecimal() and (allowed := int(end) - time.time()) < seconds:
        yield (
            f"time: the job ends in {format_seconds(max(0.0, allowed))} ({JOB_END}), before the build; "
            "the same command in the next job resumes it"
        )


def _num_workers(workers: int | None, executor: str) -> tuple[int, int]:
    """The number of workers, and how many of them have a core."""
    if executor == "ray":
        cores = num_cores()
        count = cores if workers is None else workers if workers > 0 else max(1, cores * 3 // 4)
        return count, count
    count = resolve_workers(workers)
    return count, min(count, num_cores())


def _make_request(setup: ResolvedBuild) -> ProbeRequest:
    far = is_url(setup.listing.root)
    return make_request(
        setup.plan,
        STORE_POSITIONS if far else POSITIONS,
        encode_bytes=ENCODE_BYTES,
        read_bytes=STORE_READ_BYTES if far else READ_BYTES,
    )


def _build_status(folder: Storage, plan: Plan, *, update: bool) -> tuple[int, bool, tuple[str, ...]]:
    """Completed units, whether the dataset is complete, and why a build would refuse to resume."""
    workspace.check_ours(folder)
    try:
        if workspace.finished(folder, plan) is not None:
            return len(plan.units), True, ()
        if update and folder.exists(receipts.PLAN) and (found := workspace.load_plan(folder)).identity == plan.identity:
            return num_kept(folder, found, plan), False, ()
        workspace.check_begun(folder, plan)
    except (OutputError, SourceChangedError, DatasetError) as error:
        return 0, False, (error.message,)
    return workspace.num_receipts(folder), False, ()


UNITS = 4
# For each unit, whichever is reached first.
TEXT_BYTES = 32_000_000
SECONDS = 0.4
# Larger documents are cut to their beginning.
_LONG_BYTES = 4_000_000
_HEAD_BYTES = 1_000_000
# What any build takes, whatever its size: processes start, libraries load, the manifest is written.
START_SECONDS = 1.0

Clock = Callable[[], float]


def run_trial(plan: Plan, work: BuildConfig, engine: Engine, *, clock: Clock = time.perf_counter) -> float | None:
    """Seconds that one worker takes for a byte of text; None if no unit can be read."""
    last = len(plan.units) - 1
    chosen = sorted({last * (2 * place + 1) // (2 * UNITS) for place in range(UNITS)})
    calm = replace(work, on_bad="quarantine")  # a build reports bad documents
    costs: list[float] = []
    for unit in chosen if plan.units else ():
        with contextlib.suppress(TokenmillError):  # the unit itself will report it
            discarded = Folder(os.devnull, _DiscardingFolder())
            costs += _seconds_per_byte(discarded, calm, make_task(plan, unit), engine, clock)
    return fmean(costs) if costs else None


class _DiscardingFolder(LocalFileSystem):
    """Accepts what is written, and discards it."""

    def create(self, path: str) -> int:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def unlink(self, path: str) -> None:
        """There is no file."""


def _seconds_per_byte(folder: Storage, work: BuildConfig, task: UnitTask, engine: Engine, clock: Clock) -> list[float]:
    """Seconds for a byte of text, from the beginning of a unit; empty if it has no text."""
    begin, text_bytes = clock(), 0
    run = UnitRun(work, task, folder)
    try:
        for batch in read_batches(work, task):
            sample = _cut_long_documents(batch)
            run.add(sample, engine)
            text_bytes += sample.text.nbytes
            if text_bytes >= TEXT_BYTES or clock() - begin >= SECONDS:
                break
    finally:
        run.discard()
    return [(clock() - begin) / text_bytes] if text_bytes else []


def _cut_long_documents(batch: Batch) -> Batch:
    """A batch with its long documents cut: 60 MB take minutes, and tell no more than their beginning."""
    offsets, data = text_buffers(batch.text)
    if not len(batch.text) or int(np.diff(offsets).max()) <= _LONG_BYTES:
        return batch
    heads = [data[a : min(b, a + _HEAD_BYTES)] for a, b in itertools.pairwise(offsets.tolist())]
    texts = [head.tobytes().decode(errors="ignore") for head in heads]
    return replace(batch, text=text_array(texts))


def elapsed(seconds: float, longest: float, workers: int) -> float:
    """The time of several workers for work that takes one worker `seconds`. The longest unit cannot be divided."""
    return START_SECONDS + max(seconds / workers, min(seconds, longest)) if seconds > 0 else 0.0
