"""plan: what a build would do, without doing any of it. The output stays as it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tokenmill import arguments
from tokenmill.build import state
from tokenmill.build.check import Here, check
from tokenmill.build.estimate import Estimate
from tokenmill.build.export import bytes_beside, check_layout
from tokenmill.build.prepare import check_executor, check_place
from tokenmill.build.rehearsal import elapsed, rehearse
from tokenmill.build.setup import Setup, make_work, set_up
from tokenmill.build.updating import num_kept
from tokenmill.build.visits import Request, make_request
from tokenmill.cores import MEMORY_BUDGET, num_cores, resolve_workers
from tokenmill.errors import DatasetError, OutputError, SourceChangedError
from tokenmill.layouts.registry import layout_bytes
from tokenmill.planning import Plan
from tokenmill.recipe import Sources, make_recipe
from tokenmill.storage import Folder, local_folder, open_folder
from tokenmill.storage.space import MARGIN_BYTES
from tokenmill.storage.urls import is_url
from tokenmill.tokenizer.engine import open_engine

# Places to look at, text that is encoded, and read to get there. An object store is asked for less.
PLACES = 64
ENCODE_BYTES = 512_000
READ_BYTES = 64_000_000
STORE_PLACES = 16
STORE_READ_BYTES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a build would read, write and take.

    `seconds` are an estimate for all workers, `seconds_alone` for a single one. They are those of encoding alone, the
    least that it takes, unless some of the work `was_rehearsed`.
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
    fingerprint: str
    finished: bool
    conflict: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def disk_missing(self) -> int:
        """Bytes that are not free on the output's disk, and would have to be; those of `disk_layout` are among them."""
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
    executor: str = "local",
    **recipe: Any,
) -> Preview:
    """Files, units, tokens with an error bar, disk, memory and time of a build that is not started.

    With `executor="ray"` the workers are those of a cluster, which is not asked: as many as given, or as are here.
    """
    check_executor(executor)
    arguments.text_or_none("layout", layout)
    restart, update = arguments.flag("restart", restart), arguments.flag("update", update)
    workers = arguments.workers_or_none(workers)
    arguments.place_or_none("scratch", scratch)
    wanted = make_recipe({"sources": sources, **recipe}, config=config)
    folder = open_folder(output, name="output") if output is not None else None
    notes: list[str] = []
    if layout is not None:
        check_place(layout, folder)
        check_layout(layout, wanted)
        notes.append(f"the time is that of the dataset, without the export to {layout.partition(':')[0]}")
    if folder is not None and not restart and not update:
        wanted = state.as_before(folder, wanted)
    setup = set_up(wanted, output=None if folder is None else folder.path)
    count, at_once = _num_workers(workers, executor)
    if executor == "ray" and workers is None:
        notes.append("the cluster is not asked for its workers: memory and time are for as many as fit here")
    work = make_work(setup, scratch=None, only_look=True)
    engine = open_engine(setup.spec)
    expected = check(_make_request(setup), work, setup.spec, Here(work, engine)).estimate
    share = expected.share(wanted.max_tokens)
    standing = (0, False, ()) if folder is None or restart else _standing(folder, setup.plan, update=update)
    done, finished, conflict = standing
    needed = 0 if finished else round(expected.output_bytes * share)
    if folder is not None and not restart:
        needed -= state.bytes_done(folder)
    beside = 0
    if layout is not None:
        beside = _layout_bytes(folder, layout, setup.dtype, round(expected.tokens * share))
    # A store is not read from for its speed: it would be asked for much, and at another time be another one.
    cost = None if is_url(setup.listing.root) else rehearse(setup.plan, work, engine)
    seconds = expected.encode_seconds if cost is None else expected.text_bytes * cost
    longest = seconds * max(unit.text_bytes for unit in setup.plan.units) / max(1, setup.plan.text_bytes())
    left = seconds * max(0.0, share - done / len(setup.plan.units))
    return Preview(
        files=len(setup.listing.sources),
        source_bytes=sum(source.bytes for source in setup.listing.sources),
        units=len(setup.plan.units),
        units_done=done,
        workers=count,
        estimate=expected,
        seconds=elapsed(left, longest, at_once),
        seconds_alone=elapsed(left, longest, 1),
        was_rehearsed=cost is not None,
        max_tokens=wanted.max_tokens,
        disk_needed=max(0, needed),
        disk_layout=beside,
        disk_free=folder.free_bytes() if folder is not None else None,
        scratch_free=local_folder(scratch).free_bytes() if scratch is not None else None,
        memory=count * MEMORY_BUDGET,
        fingerprint=setup.plan.fingerprint,
        finished=finished,
        conflict=conflict,
        notes=(*setup.notes, *notes),
    )


def _layout_bytes(folder: Folder | None, layout: str, dtype: str, num_tokens: int) -> int:
    """What an export would write on the output's disk. If it goes to another one that is full, that is an error."""
    if folder is not None:
        return bytes_beside(folder, layout, dtype, num_tokens)
    return layout_bytes(layout.partition(":")[0], dtype, num_tokens)


def _num_workers(workers: int | None, executor: str) -> tuple[int, int]:
    """How many workers there are, and how many of them have a core."""
    if executor == "ray":
        count = workers if workers is not None and workers > 0 else num_cores()
        return count, count
    count = resolve_workers(workers)
    return count, min(count, num_cores())


def _make_request(setup: Setup) -> Request:
    far = is_url(setup.listing.root)
    return make_request(
        setup.plan,
        STORE_PLACES if far else PLACES,
        encode_bytes=ENCODE_BYTES,
        read_bytes=STORE_READ_BYTES if far else READ_BYTES,
    )


def _standing(folder: Folder, plan: Plan, *, update: bool) -> tuple[int, bool, tuple[str, ...]]:
    """Units done, whether the dataset stands, and what a build would refuse to go on with."""
    state.check_ours(folder)
    try:
        if state.finished(folder, plan) is not None:
            return len(plan.units), True, ()
        if update and folder.exists(state.PLAN) and (found := state.load_plan(folder)).identity == plan.identity:
            return num_kept(folder, found, plan), False, ()
        state.check_begun(folder, plan)
    except (OutputError, SourceChangedError, DatasetError) as error:
        return 0, False, (error.message,)
    return state.num_receipts(folder), False, ()
