"""Resumes a build whose sources changed: units of unchanged sources are kept, renumbered for the new plan.

    .build/receipts, pieces, rejects    of the old plan: untouched until everything that is kept has been gathered
    .build/kept/receipts, pieces, ...   the same files by their new names, and receipts of the new plan for them
    .build/kept/plan.json               written last: from here on the update is decided, and the next run completes it

What a unit wrote depends on its own sources and the recipe, so only its name changes. No step moves a file: each gives
it a second name, which works in an object store as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tokenmill import records
from tokenmill.build import workspace
from tokenmill.build.plan import Plan, make_task
from tokenmill.build.workspace import KEPT, KEPT_PLAN
from tokenmill.errors import OutputError, RecipeError
from tokenmill.storage.base import Storage
from tokenmill.storage.output import Digest
from tokenmill.units import receipts
from tokenmill.units.receipts import (
    NO_LIMIT,
    PIECES,
    RECEIPTS,
    REJECTS,
    Receipt,
    load_receipts,
    open_receipt,
    receipt_name,
    unit_name,
)

_CLEAN = f"{KEPT}/clean.json"
_TOUCHED = f"{KEPT}/touched.json"


def start_update(folder: Storage, plan: Plan, times: tuple[int, ...]) -> None:
    """Turn the unfinished build in a folder into one of this plan, if the recipe is the same. The lock is held, and
    no earlier update is unfinished. `times` are those at which the sources of the plan were touched."""
    if not folder.exists(receipts.PLAN):
        return
    old = plan if workspace.is_stored(folder, plan) else workspace.load_plan(folder)
    touched = workspace.touched_sources(folder, old, _times_of(old, plan, times))
    if old is plan and not touched:
        return
    if old.identity != plan.identity:
        return  # workspace.start_or_resume raises
    if plan.identity.get("split") == "nanogpt":
        raise RecipeError(
            "`update` does not go with `split='nanogpt'`: which documents it holds out depends on all of them",
            hint="start over with `restart=True`",
        )
    if not _gather(folder, old, plan, touched) and workspace.num_receipts(folder):
        raise OutputError(
            f"nothing in {folder.path} can be kept: no unit that is done would be one of the new plan",
            hint="choose another output, or start this one over with `restart=True`",
        )
    if times:
        folder.replace(_TOUCHED, records.seal(workspace.TouchTimes(times=times)))
    folder.write_parts(KEPT_PLAN, records.sealed_parts(plan))
    finish_update(folder)


def _times_of(old: Plan, new: Plan, times: tuple[int, ...]) -> tuple[int, ...]:
    """The times of the new plan's sources, in the order of the old plan; 0 for a source that is gone."""
    if old is new or not times:
        return times
    found = {source.name: time for source, time in zip(new.sources, times, strict=True)}
    return tuple(found.get(source.name, 0) for source in old.sources)


def finish_update(folder: Storage) -> None:
    """Complete an update that was decided: `KEPT_PLAN` exists. The lock is held."""
    workspace.start_over(folder, but=(KEPT,))
    for parent in (PIECES, RECEIPTS, REJECTS):
        folder.make(parent)
    folder.link_all(link for _, receipt in _kept(folder) for link in _links(receipt))
    for parent in (PIECES, REJECTS):
        folder.sync(parent)
    folder.link_all(_receipt_link(data, receipt) for data, receipt in _kept(folder))
    folder.sync(RECEIPTS)
    folder.replace(workspace.CLEAN, folder.read(_CLEAN))
    if folder.exists(_TOUCHED):
        folder.replace(workspace.TOUCHED, folder.read(_TOUCHED))
    folder.write_parts(receipts.PLAN, map(bytes, folder.blocks(KEPT_PLAN, max_bytes=records.MAX_RECORD_BYTES)))
    workspace.remove_kept(folder)


def num_kept(folder: Storage, old: Plan, new: Plan) -> int:
    """How many finished units an update would keep."""
    done = set(folder.names(RECEIPTS))
    return sum(f"{unit_name(was, NO_LIMIT)}.json" in done for was, _ in _matching_units(old, new))


def _gather(folder: Storage, old: Plan, new: Plan, touched: frozenset[str]) -> bool:
    """Give what is kept its new names beside the old ones. True if there was anything to keep."""
    workspace.remove_kept(folder)
    for parent in (PIECES, RECEIPTS, REJECTS):
        folder.make(_kept_name(parent))
    matches = dict(_matching_units(old, new, touched))
    clean = set(workspace.clean_units(folder, old))
    found = load_receipts(folder, matches, old.fingerprint)

    def keep(receipt: Receipt) -> int:
        kept = _renamed(receipt, matches[receipt.unit], new.fingerprint)
        for (was, digest), now in zip(receipt.all_files().items(), kept.all_files(), strict=True):
            folder.link(was, _kept_name(now), digest)
        folder.write(_kept_name(receipt_name(*kept.key)), records.seal(kept))
        return receipt.unit

    kept = list(folder.each(keep, (receipt for receipt in found if receipt is not None)))
    for parent in (PIECES, REJECTS):
        folder.sync(_kept_name(parent))
    units = tuple(sorted(matches[unit] for unit in kept if unit in clean))
    folder.replace(_CLEAN, records.seal(workspace.CleanStop(fingerprint=new.fingerprint, units=units)))
    return bool(kept)


def _matching_units(old: Plan, new: Plan, touched: frozenset[str] = frozenset()) -> Iterator[tuple[int, int]]:
    """Units of both plans that read the same part of the same sources: numbers in the old and in the new plan.

    Sources that were touched since may be others, although their pins are the same.
    """
    numbers = {(new.sources[unit.source].name, unit.start): unit.index for unit in new.units}
    for unit in old.units:
        number = numbers.get((old.sources[unit.source].name, unit.start))
        if number is not None:
            was, now = make_task(old, unit.index), make_task(new, number)
            is_same = was.sources == now.sources and was.unit.stop == now.unit.stop
            if is_same and touched.isdisjoint(source.name for source in now.sources):
                yield unit.index, number


def _renamed(receipt: Receipt, unit: int, fingerprint: str) -> Receipt:
    """The receipt of a unit, as the same unit of another plan."""
    was, now = (unit_name(number, NO_LIMIT) for number in (receipt.unit, unit))

    def rename(name: str) -> str:
        parent, _, own = name.rpartition("/")
        return f"{parent}/{now}{own.removeprefix(was)}"

    return replace(
        receipt,
        fingerprint=fingerprint,
        unit=unit,
        pieces={split: replace(piece, name=rename(piece.name)) for split, piece in receipt.pieces.items()},
        files={rename(name): digest for name, digest in receipt.files.items()},
    )


def _kept(folder: Storage) -> Iterable[tuple[bytes, Receipt]]:
    """Receipts that were gathered, each with its bytes."""

    def read(name: str) -> tuple[bytes, Receipt]:
        data = folder.read(name)
        return data, open_receipt(data, where=folder.at(name))

    return folder.each(read, [f"{_kept_name(RECEIPTS)}/{name}" for name in folder.names(_kept_name(RECEIPTS))])


def _links(receipt: Receipt) -> Iterator[tuple[str, str, Digest]]:
    return ((_kept_name(name), name, digest) for name, digest in receipt.all_files().items())


def _receipt_link(data: bytes, receipt: Receipt) -> tuple[str, str, Digest]:
    name = receipt_name(*receipt.key)
    return _kept_name(name), name, Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _kept_name(name: str) -> str:
    """The name under which a file is kept until it gets its final name."""
    return f"{KEPT}/{name.removeprefix('.build/')}"
