"""A million units: how long it takes to plan them, to go on with them and to commit them, and in how much memory.

python benchmarks/scale.py [--units 1000000] [--receipts 100000] [--json FILE]

plan      a real one: text files of this machine, cut into so many units of 122 bytes by the whole of `set_up`
read      that plan again, all of it, as `repair` needs it
listing   a plan over as many sources as units. The listing is made up: nobody has a million files at hand
files     what listing one real file costs
shards    a manifest of as many shards as units, made up like the listing, as a trainer loads it
resume    receipts, packs of them and pieces of a real unit under the names of so many units, as a build finds them when
          it goes on
cold      the same once the system has forgotten all files, if it lets us ask for that: the clock counts, not the core
enter     what else a build that goes on looks at: leftovers, how many receipts
commit    and their commit: shards, provenance, manifest; then the pieces' own names are removed
open      their manifest, as a trainer loads it
verify    all of it, by `verify --quick`

Each step is a process of its own, whose peak memory is its own, and one thread: beside the clock stands the time that
it had a core for, which is what counts on a machine that others use as well. Bars are printed, never enforced.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from made_up import made_up_manifest, made_up_sources
from measure import Row, describe_machine, format_table, run

import tokenmill
from tokenmill import records
from tokenmill.build import commit as build_commit
from tokenmill.build import pipeline, workspace
from tokenmill.build.commit import commit
from tokenmill.build.plan import make_plan
from tokenmill.build.resolve import resolve_build
from tokenmill.dataset import manifest
from tokenmill.recipe import make_recipe
from tokenmill.sources.base import Extent
from tokenmill.storage.local import Folder
from tokenmill.units import receipts as units_receipts
from tokenmill.units.receipts import (
    NO_LIMIT,
    PACK_UNITS,
    PIECES,
    Receipt,
    load_receipts,
    receipt_name,
    unit_name,
    write_pack,
)

LINE = "x" * 60 + "\n"
LINES_A_UNIT = 2
LINES_A_FILE = 100_000
SMALL_FILES = 2_000
CACHES = Path("/proc/sys/vm/drop_caches")


def plan(work: Path, units: int) -> dict[str, Any]:
    """Listing, cutting, fingerprint and storing, as `prepare` does them."""
    recipe = make_recipe(
        {"sources": (str(work / "text"),), "tokenizer": "byte", "unit_bytes": LINES_A_UNIT * len(LINE)}
    )
    begin = _now()
    setup = resolve_build(recipe)
    folder = Folder(str(work / "planned"))
    folder.make(".build")
    workspace.start_or_resume(folder, setup, restart=False)
    made = _now()
    workspace.start_or_resume(folder, setup, restart=False)
    again = _now()
    size = (work / "planned" / units_receipts.PLAN).stat().st_size
    return {
        "seconds": _apart(begin, made),
        "found_again": _apart(made, again),
        "units": len(setup.plan.units),
        "bytes": size,
    }


def reading(work: Path, units: int) -> dict[str, Any]:
    """The plan as a whole once more, as `repair` and `verify --source` begin."""
    begin = _now()
    found = workspace.load_plan(Folder(str(work / "planned")))
    return {"seconds": _apart(begin, _now()), "units": len(found.units)}


def listing(work: Path, units: int) -> dict[str, Any]:
    """The same for a listing that is made up: one source a unit."""
    begin = _now()
    sources = made_up_sources(units)
    extents = [Extent(text_bytes=64_000_000 + 4 * number) for number in range(units)]
    made = make_plan(identity={}, sources=sources, extents=extents, unit_bytes=64_000_000, sample=None, seed=0)
    folder = Folder(str(work / "listed"))
    folder.make()
    folder.write_parts("plan.json", records.sealed_parts(made))
    found = made.fingerprint
    seconds = _apart(begin, _now())
    size = (work / "listed" / "plan.json").stat().st_size
    return {"seconds": seconds, "units": len(made.units), "bytes": size, "fingerprint": found}


def files(work: Path, units: int) -> dict[str, Any]:
    """What one more file costs: small files of JSON lines, listed for real."""
    folder = work / "small"
    folder.mkdir()
    for number in range(SMALL_FILES):
        (folder / f"{number:06d}.jsonl").write_text('{"text": "some words"}\n' * 4)
    begin = _now()
    setup = resolve_build(make_recipe({"sources": (str(folder),), "tokenizer": "byte"}))
    seconds = _apart(begin, _now())
    return {"seconds": seconds, "files": len(setup.listing.sources)}


def resume(work: Path, units: int) -> dict[str, Any]:
    """What a build that goes on reads before it works."""
    folder, found = _opened(work)
    begin = _now()
    known = {receipt.unit: receipt.tokens for receipt in workspace.trusted_receipts(folder, found)}
    seconds = _apart(begin, _now())
    if len(known) != units:
        raise SystemExit(f"{len(known)} of {units} receipts were trusted")
    return {"seconds": seconds, "receipts": len(known)}


def entering(work: Path, units: int) -> dict[str, Any]:
    """What comes before the receipts."""
    folder = Folder(str(work / "built"))
    begin = _now()
    workspace.sweep(folder, ["train"])
    if workspace.num_receipts(folder) != units:
        raise SystemExit("some receipts are gone")
    return {"seconds": _apart(begin, _now())}


def committing(work: Path, units: int) -> dict[str, Any]:
    """Receipts once more, in order, and the commit."""
    folder, found = _opened(work)
    job = workspace.load_build_record(folder)
    begin = _now()
    receipts = records.make_table(
        Receipt, (one for one in load_receipts(folder, range(units), found.fingerprint) if one)
    )
    read = _now()
    result = commit(
        folder,
        found,
        receipts,
        splits=job.work.split_names,
        dtype=job.work.dtype,
        tokenizer=job.tokenizer,
        tokenizer_file=None,
        parity=job.parity,
    )
    made = _now()
    workspace.clean_up(folder, None)
    return {
        "read": _apart(begin, read),
        "seconds": _apart(read, made),
        "cleaned": _apart(made, _now()),
        "shards": sum(len(split.shards) for split in result.splits.values()),
        "bytes": (work / "built" / "dataset.json").stat().st_size,
    }


def make_shards(work: Path, units: int) -> dict[str, Any]:
    """A manifest of so many shards that nobody wrote: no shard is read when a dataset is opened."""
    folder = Folder(str(work / "shards"))
    folder.make()
    return {"bytes": folder.write_parts(manifest.MANIFEST, records.sealed_parts(made_up_manifest(units))).bytes}


def opening(work: Path, units: int) -> dict[str, Any]:
    """The manifest that was made up, or the one that was committed."""
    begin = _now()
    found = tokenmill.open(work / ("built" if (work / "built" / manifest.MANIFEST).exists() else "shards"))
    return {"seconds": _apart(begin, _now()), "shards": len(found.manifest.splits["train"].shards)}


def verifying(work: Path, units: int) -> dict[str, Any]:
    begin = _now()
    report = tokenmill.verify(work / "built", quick=True)
    if not report.ok:
        raise SystemExit(f"{len(report.problems)} problems: {report.problems[0]}")
    return {"seconds": _apart(begin, _now()), "files": report.files}


def make_built(work: Path, units: int) -> dict[str, Any]:
    """A folder as a build of so many units leaves it before its commit, made from the one that did a single unit."""
    source = work / "built.txt"
    source.write_text(LINE * LINES_A_UNIT * units)
    folder = Folder(str(work / "built"))

    def stop(*_: Any, **__: Any) -> None:
        raise SystemExit

    real, pipeline.commit = build_commit.commit, stop
    small = work / "one.txt"
    small.write_text(LINE * LINES_A_UNIT)
    options = {"tokenizer": "byte", "unit_bytes": LINES_A_UNIT * len(LINE)}
    try:
        tokenmill.prepare(str(small), str(work / "one"), workers=1, **options)
    except SystemExit:
        pass
    finally:
        pipeline.commit = real
    one = Folder(str(work / "one"))
    receipt = next(receipt for receipt in load_receipts(one, [0], workspace.load_plan(one).fingerprint) if receipt)
    contents = {name: one.read(name) for name in receipt.all_files()}
    setup = resolve_build(make_recipe({"sources": (str(source),), **options}))
    folder.make(PIECES)
    folder.make(".build/receipts")
    folder.make(".build/rejects")
    workspace.start_or_resume(folder, setup, restart=False)
    job = workspace.load_build_record(one)
    workspace.save_build_record(folder, replace(job, work=replace(job.work, fingerprint=setup.plan.fingerprint)))
    for unit in range(units):
        _copy_unit(folder, receipt, contents, unit, setup.plan.fingerprint, source)
    for number in range(units // PACK_UNITS):
        write_pack(folder, number)
    workspace.record_clean_stop(folder, setup.plan, range(units))
    return {"units": len(setup.plan.units)}


def _copy_unit(
    folder: Folder, receipt: Receipt, contents: dict[str, bytes], unit: int, fingerprint: str, source: Path
) -> None:
    """The receipt of a unit, and its files. Not synced: nobody pulls a plug here."""
    own, mine = unit_name(0, NO_LIMIT), unit_name(unit, NO_LIMIT)
    for name, content in contents.items():
        Path(folder.at(name.replace(own, mine))).write_bytes(content)
    there = replace(
        receipt,
        unit=unit,
        fingerprint=fingerprint,
        pieces={split: replace(piece, name=piece.name.replace(own, mine)) for split, piece in receipt.pieces.items()},
        sources=tuple(replace(total, name=source.name, bytes=source.stat().st_size) for total in receipt.sources),
        files={name.replace(own, mine): digest for name, digest in receipt.files.items()},
    )
    Path(folder.at(receipt_name(unit, NO_LIMIT))).write_bytes(records.seal(there))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _apart(begin: tuple[float, float], end: tuple[float, float]) -> list[float]:
    """Seconds of the clock, and of a core."""
    return [end[0] - begin[0], end[1] - begin[1]]


def _opened(work: Path) -> tuple[Folder, Any]:
    folder = Folder(str(work / "built"))
    return folder, workspace.load_plan(folder)


STEPS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "plan": plan,
    "read": reading,
    "listing": listing,
    "files": files,
    "build": make_built,
    "resume": resume,
    "enter": entering,
    "commit": committing,
    "shards": make_shards,
    "open": opening,
    "verify": verifying,
}


def measured(step: str, work: Path, units: int) -> dict[str, Any]:
    """A step in a process of its own."""
    return run([sys.executable, __file__, "--step", step, "--work", str(work), "--units", str(units)]).result()


def rows(work: Path, units: int, receipts: int) -> Iterator[Row]:
    text = work / "text"
    text.mkdir()
    for number in range(0, units * LINES_A_UNIT, LINES_A_FILE):
        (text / f"{number:09d}.txt").write_text(LINE * min(LINES_A_FILE, units * LINES_A_UNIT - number))
    for step, what in (("plan", "real files"), ("listing", "a made-up listing of as many sources")):
        found = measured(step, work, units)
        size = f"{found['bytes'] / 1e6:.0f} MB"
        yield _seconds(step, f"to plan {found['units']:,} units of {what}; {size}", found, bar=60)
        if "found_again" in found:
            yield _seconds(step, "to find it again", found, key="found_again")
        yield _memory(step, found)
    found = measured("read", work, units)
    yield _seconds("read", f"to read {found['units']:,} units back as a whole", found)
    yield _memory("read", found)
    found = measured("files", work, units)
    yield _seconds("files", f"to list and plan {found['files']:,} small files", found)
    size = measured("shards", work, units)["bytes"]
    found = measured("open", work, units)
    what = f"to open a dataset of {found['shards']:,} made-up shards; {size / 1e6:.0f} MB"
    yield _seconds("shards", what, found)
    yield _memory("shards", found)
    measured("build", work, receipts)
    yield from resumed(work, receipts)
    found = measured("enter", work, receipts)
    yield _seconds("enter", f"to look for leftovers among {receipts:,} units", found)
    yield _memory("enter", found)
    yield from committed(work, receipts)


def resumed(work: Path, receipts: int) -> Iterator[Row]:
    """Going on, with the files in the system's memory and without."""
    for step in ("resume", "cold"):
        if step == "cold" and not _forget():
            yield Row(name=step, what="s: not measured, only root may do this", figure=math.nan, bar=10, judged=False)
            return
        found = measured("resume", work, receipts)
        clock, core = (seconds * 100_000 / found["receipts"] for seconds in found["seconds"])
        what = f"a 100,000 receipts, of {found['receipts']:,}"
        figures = (core, clock) if step == "cold" else (clock, core)
        yield _seconds(step, what, {"seconds": figures}, bar=10)
        yield _memory(step, found)


def _forget() -> bool:
    """Have the system forget all files, if we may."""
    os.sync()
    try:
        CACHES.write_text("3")
    except OSError:
        return False
    return True


def committed(work: Path, receipts: int) -> Iterator[Row]:
    """The commit, and what reads a manifest of that size."""
    found = measured("commit", work, receipts)
    yield _seconds("commit", "to read the receipts in order", found, key="read")
    what = f"to commit {found['shards']:,} shards; a manifest of {found['bytes'] / 1e6:.0f} MB"
    yield _seconds("commit", what, found)
    yield _seconds("commit", "to remove the pieces' names", found, key="cleaned")
    yield _memory("commit", found)
    found = measured("open", work, receipts)
    yield _seconds("open", f"to open a dataset of {found['shards']:,} shards", found)
    yield _memory("open", found)
    found = measured("verify", work, receipts)
    yield _seconds("verify", f"to verify {found['files']:,} files quickly", found)
    yield _memory("verify", found)


def _seconds(step: str, what: str, found: dict[str, Any], *, key: str = "seconds", bar: float = 0) -> Row:
    clock, core = found[key]
    return Row(name=step, what=f"s {what}", ours=f"{clock:.1f} s", figure=core, bar=bar, judged=bar > 0, raw=found)


def _memory(step: str, found: dict[str, Any]) -> Row:
    return Row(name=step, what="MB of memory at the peak", figure=found["peak"] / 1e6, bar=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--units", type=int, default=1_000_000, help="units of the plans")
    parser.add_argument("--receipts", type=int, default=100_000, help="receipts to go on with and to commit")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        found = STEPS[given.step](given.work, given.units)
        found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        sys.stdout.write(json.dumps(found) + "\n")
        return
    with tempfile.TemporaryDirectory() as work:
        table = []
        for row in rows(Path(work), given.units, given.receipts):
            sys.stderr.write(f"{'  '.join(row.cells())}\n")  # the next one may take many minutes
            table.append(row)
    sys.stdout.write(f"{format_table(table)}\n\n{describe_machine()}\n")
    if given.json:
        given.json.write_text(json.dumps({"machine": describe_machine(), "rows": [asdict(row) for row in table]}))


if __name__ == "__main__":
    main()
