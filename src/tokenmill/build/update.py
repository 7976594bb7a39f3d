"""Going on with sources that changed: what was made of the others is kept, under the numbers of the new plan.

    .build/receipts, pieces, rejects    of the old plan: untouched until all that is kept has been gathered
    .build/kept/receipts, pieces, ...   the same files by their new names, and receipts of the new plan for them
    .build/kept/plan.json               comes last: from here on it is decided, and whoever was killed goes on with it

What a unit wrote depends on its own sources and the recipe, so that nothing of it changes but its name. No step
moves a file: each gives it a second name, which a store can do as well.
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
from tokenmill.storage.local import Folder
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


def start_update(folder: Folder, plan: Plan) -> None:
    """Make the unfinished build in a folder one of this plan, if it is of the same recipe. The lock is held."""
    finish_update(folder)
    if not folder.exists(receipts.PLAN) or workspace.is_stored(folder, plan):
        return
    old = workspace.load_plan(folder)
    if old.identity != plan.identity:
        return  # whoever enters with it is told
    if plan.identity.get("split") == "nanogpt":
        raise RecipeError(
            "--update does not go with --split nanogpt: which documents it holds out depends on all of them",
            hint="start over with --restart",
        )
    if not _gather(folder, old, plan) and workspace.num_receipts(folder):
        raise OutputError(
            f"nothing in {folder.path} can be kept: no unit that is done would be one of the new plan",
            hint="choose another output, or start this one over with --restart",
        )
    folder.write_parts(KEPT_PLAN, records.sealed_parts(plan))
    finish_update(folder)


def finish_update(folder: Folder) -> None:
    """Do what is left of an update that was decided, if there was one."""
    if not folder.exists(KEPT_PLAN):
        return
    workspace.start_over(folder, but=(KEPT,))
    for parent in (PIECES, RECEIPTS, REJECTS):
        folder.make(parent)
    folder.link_all(link for _, receipt in _kept(folder) for link in _links(receipt))
    for parent in (PIECES, REJECTS):
        folder.sync(parent)
    folder.link_all(_receipt_link(data, receipt) for data, receipt in _kept(folder))
    folder.sync(RECEIPTS)
    folder.replace(workspace.CLEAN, folder.read(_CLEAN))
    folder.write_parts(receipts.PLAN, map(bytes, folder.blocks(KEPT_PLAN, max_bytes=records.MAX_RECORD_BYTES)))
    workspace.forget_kept(folder)


def num_kept(folder: Folder, old: Plan, new: Plan) -> int:
    """How many units that are done an update would keep."""
    done = set(folder.names(RECEIPTS))
    return sum(f"{unit_name(was, NO_LIMIT)}.json" in done for was, _ in _twins(old, new))


def _gather(folder: Folder, old: Plan, new: Plan) -> bool:
    """Give what is kept its new names, beside the old ones; says whether there was anything."""
    workspace.forget_kept(folder)
    for parent in (PIECES, RECEIPTS, REJECTS):
        folder.make(_place(parent))
    twins = dict(_twins(old, new))
    clean = set(workspace.clean_units(folder, old))
    found = load_receipts(folder, twins, old.fingerprint)

    def keep(receipt: Receipt) -> int:
        kept = _renamed(receipt, twins[receipt.unit], new.fingerprint)
        for (was, digest), now in zip(receipt.all_files().items(), kept.all_files(), strict=True):
            folder.link(was, _place(now), digest)
        folder.write(_place(receipt_name(*kept.key)), records.seal(kept))
        return receipt.unit

    kept = list(folder.each(keep, (receipt for receipt in found if receipt is not None)))
    for parent in (PIECES, REJECTS):
        folder.sync(_place(parent))
    units = tuple(sorted(twins[unit] for unit in kept if unit in clean))
    folder.replace(_CLEAN, records.seal(workspace.Clean(fingerprint=new.fingerprint, units=units)))
    return bool(kept)


def _twins(old: Plan, new: Plan) -> Iterator[tuple[int, int]]:
    """Units of both plans that read the same part of the same sources, as numbers in the old one and in the new one."""
    numbers = {(new.sources[unit.source].name, unit.start): unit.index for unit in new.units}
    for unit in old.units:
        number = numbers.get((old.sources[unit.source].name, unit.start))
        if number is not None:
            was, now = make_task(old, unit.index), make_task(new, number)
            if was.sources == now.sources and was.unit.stop == now.unit.stop:
                yield unit.index, number


def _renamed(receipt: Receipt, unit: int, fingerprint: str) -> Receipt:
    """The receipt of the same work as a unit of another plan."""
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


def _kept(folder: Folder) -> Iterable[tuple[bytes, Receipt]]:
    """Receipts that were gathered, each with its text."""

    def read(name: str) -> tuple[bytes, Receipt]:
        data = folder.read(name)
        return data, open_receipt(data, where=folder.at(name))

    return folder.each(read, [f"{_place(RECEIPTS)}/{name}" for name in folder.names(_place(RECEIPTS))])


def _links(receipt: Receipt) -> Iterator[tuple[str, str, Digest]]:
    return ((_place(name), name, digest) for name, digest in receipt.all_files().items())


def _receipt_link(data: bytes, receipt: Receipt) -> tuple[str, str, Digest]:
    name = receipt_name(*receipt.key)
    return _place(name), name, Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _place(name: str) -> str:
    """Where a file is kept until it gets its name."""
    return f"{KEPT}/{name.removeprefix('.build/')}"
