"""plan: what a build would do, without doing any of it. Writes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tokenmill import manifest as manifests
from tokenmill.build import state
from tokenmill.build.check import check
from tokenmill.build.estimate import Estimate
from tokenmill.build.setup import Setup, make_work, set_up
from tokenmill.build.visits import Request, make_request
from tokenmill.cores import MEMORY_BUDGET, resolve_workers
from tokenmill.errors import DatasetError
from tokenmill.recipe import Sources, make_recipe
from tokenmill.storage import Folder, local_folder, open_folder
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
    """What a build would read, write and take."""

    files: int
    source_bytes: int
    units: int
    units_done: int
    workers: int
    estimate: Estimate
    seconds: float
    max_tokens: int | None
    disk_needed: int
    disk_free: int | None
    scratch_free: int | None
    memory: int
    fingerprint: str
    finished: bool
    conflict: tuple[str, ...]
    notes: tuple[str, ...]


def plan(
    sources: Sources = (),
    output: str | os.PathLike[str] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    restart: bool = False,
    **recipe: Any,
) -> Preview:
    """Files, units, tokens with an error bar, disk, memory and time of a build that is not started."""
    wanted = make_recipe({"sources": sources, **recipe}, config=config)
    folder = open_folder(output) if output is not None else None
    if folder is not None and not restart:
        wanted = state.as_before(folder, wanted)
    setup = set_up(wanted, output=None if folder is None else folder.path)
    count = resolve_workers(workers)
    work = make_work(setup, scratch=None, only_look=True)
    expected = check(_make_request(setup), work, setup.spec, open_engine(setup.spec)).estimate
    share = min(1.0, wanted.max_tokens / expected.tokens) if wanted.max_tokens and expected.tokens else 1.0
    standing = (0, False, ()) if folder is None or restart else _standing(folder, setup.plan.fingerprint)
    done, finished, conflict = standing
    needed = 0 if finished else round(expected.output_bytes * share)
    if folder is not None and not restart:
        needed -= state.bytes_done(folder)
    return Preview(
        files=len(setup.listing.sources),
        source_bytes=sum(source.bytes for source in setup.listing.sources),
        units=len(setup.plan.units),
        units_done=len(setup.plan.units) if finished else done,
        workers=count,
        estimate=expected,
        seconds=expected.seconds * share / count,
        max_tokens=wanted.max_tokens,
        disk_needed=max(0, needed),
        disk_free=folder.free_bytes() if folder is not None else None,
        scratch_free=local_folder(scratch).free_bytes() if scratch is not None else None,
        memory=count * MEMORY_BUDGET,
        fingerprint=setup.plan.fingerprint,
        finished=finished,
        conflict=conflict,
        notes=setup.notes,
    )


def _make_request(setup: Setup) -> Request:
    far = is_url(setup.listing.root)
    return make_request(
        setup.plan,
        STORE_PLACES if far else PLACES,
        encode_bytes=ENCODE_BYTES,
        read_bytes=STORE_READ_BYTES if far else READ_BYTES,
    )


def _standing(folder: Folder, fingerprint: str) -> tuple[int, bool, tuple[str, ...]]:
    """Units done, whether the dataset stands, and what else is in the way."""
    state.check_ours(folder)
    try:
        if folder.exists(manifests.NAME):
            same = manifests.load(folder).fingerprint == fingerprint
            return 0, same, () if same else (f"{folder.path} holds a dataset of another recipe",)
        if folder.exists(state.PLAN) and state.has_work(folder):
            same = state.load_plan(folder).fingerprint == fingerprint
            return (
                state.num_receipts(folder) if same else 0,
                False,
                () if same else (f"{folder.path} holds a build of another recipe",),
            )
    except DatasetError as error:
        return 0, False, (error.message,)
    return 0, False, ()
