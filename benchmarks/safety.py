"""What safety costs: builds with and without fsyncs and digests, and a resume over many receipts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from measure import Bench, Row, run

WITHOUT = str(Path(__file__).parent / "without")
RECEIPTS = 10_000
KINDS = ("fsync", "sha256", "documents")


def cost(bench: Bench) -> Iterator[Row]:
    """The same build with all of it, without one kind, and without any.

    A machine changes more from minute to minute than this costs. So builds are compared only with those of
    the same round, and every other round goes the other way about.
    """
    variants = ("", *KINDS, " ".join(KINDS))
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(bench.repeats):
        for variant in variants if number % 2 else reversed(variants):
            bench.clear()
            command = [*bench.prepare_command(bench.corpus.parquet), "--unit-bytes", "64MB"]
            seconds[variant].append(run(command, environment=_without(variant)).seconds)
    safe = median(seconds[""])
    for variant in variants[1:]:
        bare = median(seconds[variant])
        shares = [1 - without / with_all for with_all, without in zip(seconds[""], seconds[variant], strict=True)]
        whole = variant == variants[-1]
        yield Row(
            name="safety",
            what=f"share of the build that goes to {'all of these' if whole else variant}, 64 MB units",
            ours=f"{safe:.2f} s",
            peer=f"{bare:.2f} s",
            figure=median(shares),
            bar=0.05,
            judged=whole,
            raw={"with": seconds[""], "without": seconds[variant]},
        )


BUILD = """
import sys
import tokenmill
from tokenmill.build import pipeline as build
def stop(*_, **__):
    raise SystemExit
build.commit = stop
tokenmill.prepare(sys.argv[1], sys.argv[2], tokenizer="byte", unit_bytes=122, workers=2)
"""
RESUME = """
import json, sys, time
from tokenmill.build import workspace as state
from tokenmill.storage.local import Folder
folder = Folder(sys.argv[1])
plan = state.load_plan(folder)
begin = time.perf_counter()
found = list(state.trusted_receipts(folder, plan))
print(json.dumps({"seconds": time.perf_counter() - begin, "receipts": len(found)}))
"""


def receipts(bench: Bench) -> Iterator[Row]:
    """How long a build that goes on takes to read what is done already."""
    source = bench.work / "lines.txt"
    source.write_text(("x" * 60 + "\n") * (2 * RECEIPTS))
    bench.clear()
    run([sys.executable, "-c", BUILD, str(source), str(bench.output)], environment=_without("fsync"))
    found = [run([sys.executable, "-c", RESUME, str(bench.output)]).result() for _ in range(bench.repeats)]
    yield Row(
        name="receipts",
        what=f"s to trust {found[0]['receipts']:,} receipts",
        ours=f"{median(one['seconds'] for one in found):.2f} s",
        figure=median(one["seconds"] for one in found),
        bar=2.0,
        raw={"found": found},
    )


def _without(kinds: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (WITHOUT, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "TOKENMILL_WITHOUT": kinds}
