"""15 trillion tokens on 10 to 1,000 nodes: time, requests, metadata, stragglers and failures, from costs measured here.

python benchmarks/simulate.py [--tokens 15T] [--unit-bytes 512MB] [--cores 64] [--costs FILE]

    measured here, one core       assumed, by the options            simulated
    text a second, cost a unit    nodes, cores, how often they fail  units over cores, one event each; what dies is
    cost and size of a receipt    how soon the store answers         done again. Then the driver reads the packs
    cost of provenance            tokens a document                  and commits what was not copied beside the work

A unit takes its measured time, times a factor drawn from a lognormal law: nodes and texts differ. A node that fails
loses what its cores had in hand, and is back after a while. The same costs and seed give the same table. With --costs,
the costs are read from the file, or measured and written there if it does not exist.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from joining import measure_joining
from measure import describe_machine, library_texts

import tokenmill
from tokenmill.build import workspace
from tokenmill.build.commit import PROVENANCE_AHEAD, PROVENANCE_AT_ONCE, SHARDS_AT_ONCE
from tokenmill.sizes import parse_size
from tokenmill.storage.local import Folder
from tokenmill.storage.object_folder import COPIES_AT_ONCE
from tokenmill.storage.object_store import PART_BYTES
from tokenmill.units.receipts import PACK_UNITS, RECEIPTS

SAMPLE_BYTES = 24_000_000
LARGE_BYTES = 400_000_000
DOCUMENT_CHARS = 3500
NODES = (10, 30, 100, 300, 1000)
HOUR, MINUTE = 3600.0, 60.0
# Requests, as a store counts those of a build of plain text whose tokens go in parts. A unit: is there a receipt?
# Tokens: looked for, begun, the parts, ended, looked at. Index and provenance: put, looked at. The receipt: put.
REQUESTS_A_UNIT = 1 + 4 + 2 * 2 + 1
READ_BYTES = 6_000_000
# A shard beside the work: its receipt is read; for two files: looked for, copied, looked at.
LOOKS_A_COPY = 3
REQUESTS_A_SHARD = 1 + 2 * LOOKS_A_COPY
# Then it is read once more for its pack, which is put. Before the commit the packs are read, one after the other.
REQUESTS_A_PACKED = 1 + 1 / PACK_UNITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one core of this machine needs, and what it leaves behind."""

    bytes_a_second: float
    unit_seconds: float
    receipt_seconds: float
    receipt_bytes: float
    manifest_bytes: float
    provenance_seconds: float
    provenance_serial: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is assumed of the machines, the texts and the store."""

    nodes: int
    cores: int
    mtbf_hours: float
    repair_seconds: float
    spread: float
    answer_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated build came to, in seconds."""

    ideal: float
    done: float
    median_done: float
    lost: float
    failures: int


def measure(folder: Path) -> Costs:
    """Two small builds, of few units and of many: what a unit costs is what tells them apart. A large one is for speed.

    A first one is not counted: whatever loads, loads there.
    """
    sizes = {"first": 8_000_000, "few": 8_000_000, "many": 80_000}
    source = _write(folder / "source.parquet", SAMPLE_BYTES, rows_a_group=20)
    _, few, many = (_build(folder / name, source, size) for name, size in sizes.items())
    large = _build(folder / "large", _write(folder / "large.parquet", LARGE_BYTES, rows_a_group=2000), 64_000_000)
    more = many["units"] - few["units"]
    made = Folder(str(folder / "many"))
    begin = time.process_time()
    receipts = workspace.dataset_receipts(made, workspace.load_plan(made))
    read = time.process_time() - begin
    joining = measure_joining(str(folder / "joining"))
    return Costs(
        bytes_a_second=LARGE_BYTES / large["work"],
        unit_seconds=max(0.0, many["work"] - few["work"]) / more,
        receipt_seconds=read / len(receipts),
        receipt_bytes=sum(made.sizes(RECEIPTS).values()) / len(receipts),
        manifest_bytes=(many["manifest"] - few["manifest"]) / more,
        provenance_seconds=joining.seconds,
        provenance_serial=joining.serial,
    )


def _write(path: Path, size: int, *, rows_a_group: int) -> Path:
    """A table of documents as long as those of the simulation."""
    text = "\n".join(library_texts())
    text = (text * (size // len(text) + 1))[:size]
    texts = [text[at : at + DOCUMENT_CHARS] for at in range(0, size, DOCUMENT_CHARS)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=rows_a_group)
    return path


def _build(output: Path, source: Path, unit_bytes: int) -> dict[str, Any]:
    """Seconds that a core needed for the units: one worker, in this process."""
    times: dict[str, float] = {}
    tokenmill.prepare(
        str(source),
        str(output),
        tokenizer="gpt2",
        unit_bytes=unit_bytes,
        workers=1,
        watch=lambda event: times.setdefault(event["kind"], time.process_time()),
    )
    return {
        "units": len(workspace.load_plan(Folder(str(output))).units),
        "work": times["commit"] - times["start"],
        "manifest": (output / "dataset.json").stat().st_size,
    }


def simulate(cluster: Cluster, units: int, unit_seconds: float, seed: int) -> Outcome:
    """Units over cores: the core that is free first takes the next one."""
    draw = random.Random(seed)
    mean = -(cluster.spread**2) / 2  # of the logarithm, so that the factor is 1 on average
    fails = [_failures(draw, cluster, units * unit_seconds) for _ in range(cluster.nodes)]
    free = [(0.0, core) for core in range(cluster.nodes * cluster.cores)]
    waiting = [(0.0, unit) for unit in range(units)]
    ends: list[float] = []
    lost = 0.0
    struck = set()
    while waiting:
        at, core = heapq.heappop(free)
        ready, unit = heapq.heappop(waiting)
        at = max(at, ready)
        takes = unit_seconds * draw.lognormvariate(mean, cluster.spread)
        node = core // cluster.cores
        following = bisect.bisect_right(fails[node], at)
        fail = fails[node][following] if following < len(fails[node]) else math.inf
        if fail < at + takes:
            struck.add((node, following))
            lost += fail - at
            heapq.heappush(waiting, (fail, unit))
            heapq.heappush(free, (fail + cluster.repair_seconds, core))
        else:
            ends.append(at + takes)
            heapq.heappush(free, (at + takes, core))
    ends.sort()
    ideal = units * unit_seconds / (cluster.nodes * cluster.cores)
    return Outcome(ideal=ideal, done=ends[-1], median_done=ends[len(ends) // 2], lost=lost, failures=len(struck))


def _failures(draw: random.Random, cluster: Cluster, work: float) -> list[float]:
    """When a node fails: at random, on average once in its time between failures."""
    horizon = 20 * (work / (cluster.nodes * cluster.cores) + cluster.repair_seconds)
    found = [draw.expovariate(1 / (cluster.mtbf_hours * HOUR))]
    while found[-1] < horizon:
        found.append(found[-1] + cluster.repair_seconds + draw.expovariate(1 / (cluster.mtbf_hours * HOUR)))
    return found


def rows(costs: Costs, given: argparse.Namespace) -> list[list[str]]:
    total = given.tokens * given.token_bytes
    units = math.ceil(total / given.unit_bytes)
    token_bytes = given.unit_bytes / given.token_bytes * 2
    work_seconds = given.unit_bytes / costs.bytes_a_second + costs.unit_seconds
    line_seconds = (given.unit_bytes + token_bytes) / (given.line_bytes / given.cores)
    unit_seconds = max(work_seconds, line_seconds)
    reads, parts = math.ceil(given.unit_bytes / READ_BYTES), math.ceil(token_bytes / PART_BYTES)
    requests = reads + parts + REQUESTS_A_UNIT + REQUESTS_A_SHARD + REQUESTS_A_PACKED
    documents = given.tokens / given.document_tokens
    gather = units * (given.answer_seconds / PACK_UNITS + costs.receipt_seconds)
    copy_seconds = LOOKS_A_COPY * given.answer_seconds + token_bytes / given.copy_bytes
    at_once = min(given.cores, PROVENANCE_AT_ONCE)
    alone = costs.provenance_serial + (1 - costs.provenance_serial) / at_once
    fetched = units * given.answer_seconds / PROVENANCE_AHEAD / at_once
    provenance = documents * costs.provenance_seconds * alone + fetched
    table = []
    for nodes in NODES:
        cluster = Cluster(
            nodes=nodes,
            cores=given.cores,
            mtbf_hours=given.mtbf_hours,
            repair_seconds=given.repair_minutes * 60,
            spread=given.spread,
            answer_seconds=given.answer_seconds,
        )
        found = simulate(cluster, units, unit_seconds, given.seed)
        left = max(0.0, units - found.done * SHARDS_AT_ONCE / copy_seconds)  # shards that are not copied when units end
        link = left * (copy_seconds + LOOKS_A_COPY * given.answer_seconds) / COPIES_AT_ONCE
        whole = max(found.done, units * given.driver_seconds) + gather + link + provenance
        cells = (
            f"{nodes:,}",
            f"{found.ideal / MINUTE:.1f}",
            f"{found.done / MINUTE:.1f}",
            f"{(found.done - found.ideal) / found.done:.0%}",
            f"{found.failures:,}",
            f"{found.lost / (units * unit_seconds):.2%}",
            f"{units * requests / found.done:,.0f}",
            f"{units * given.driver_seconds / found.done:.0%}",
            f"{left / units:.0%}",
            f"{gather / MINUTE:.1f}",
            f"{link / MINUTE:.1f}",
            f"{provenance / MINUTE:.1f}",
            f"{whole / MINUTE:.1f}",
        )
        table.append(list(cells))
    return table


HEADS = (
    "nodes",
    "ideal min",
    "units min",
    "idle",
    "failures",
    "lost",
    "requests/s",
    "driver",
    "left",
    "receipts min",
    "link min",
    "provenance min",
    "whole min",
)


def report(costs: Costs, given: argparse.Namespace) -> str:
    total = given.tokens * given.token_bytes
    units = math.ceil(total / given.unit_bytes)
    lines = [
        f"{given.tokens / 1e12:g} T tokens, {total / 1e12:.1f} TB of text, {units:,} units of "
        f"{given.unit_bytes / 1e6:.0f} MB; {given.cores} cores a node, one of which does "
        f"{costs.bytes_a_second / 1e6:.0f} MB/s, on a line of {given.line_bytes / 1e9:g} GB/s",
        f"a node fails once in {given.mtbf_hours:g} h and is away {given.repair_minutes:g} min; the store answers in "
        f"{given.answer_seconds * 1000:g} ms and copies {given.copy_bytes / 1e6:.0f} MB/s of an object; a document has "
        f"{given.document_tokens:g} tokens",
        f"receipts {units * costs.receipt_bytes / 1e6:,.0f} MB, manifest {units * costs.manifest_bytes / 1e6:,.0f} MB",
        "",
    ]
    return "\n".join([*lines, _aligned([list(HEADS), *rows(costs, given)])])


def _aligned(table: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[place]) for line in table) for place in range(len(table[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=parse_size, default=parse_size("15T"), help="tokens of the dataset")
    parser.add_argument("--unit-bytes", type=parse_size, default=parse_size("512MB"), help="text of a unit")
    parser.add_argument("--cores", type=int, default=64, help="workers of a node")
    parser.add_argument("--mtbf-hours", type=float, default=200, help="time between failures of a node")
    parser.add_argument("--repair-minutes", type=float, default=15, help="how long a node that failed is away")
    parser.add_argument("--spread", type=float, default=0.25, help="of the time of units: sigma of the lognormal law")
    parser.add_argument("--answer-seconds", type=float, default=0.03, help="how soon the store answers")
    parser.add_argument("--line-bytes", type=parse_size, default=parse_size("3GB"), help="of a node's line, a second")
    parser.add_argument("--copy-bytes", type=parse_size, default=parse_size("250MB"), help="what it copies in a second")
    parser.add_argument("--token-bytes", type=float, default=4.4, help="text of a token, as in English prose")
    parser.add_argument("--document-tokens", type=float, default=800, help="tokens of a document")
    parser.add_argument("--driver-seconds", type=float, default=0.0005, help="what a unit keeps the driver busy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", type=Path, help="where measured costs are kept")
    given = parser.parse_args()
    if given.costs and given.costs.exists():
        costs = Costs(**json.loads(given.costs.read_text())["costs"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            costs = measure(Path(folder))
        if given.costs:
            given.costs.write_text(json.dumps({"costs": asdict(costs), "machine": describe_machine()}, indent=1) + "\n")
    sys.stdout.write(f"{report(costs, given)}\n")


if __name__ == "__main__":
    main()
