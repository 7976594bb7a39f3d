"""tokenmill side by side with its peers, every figure beside its bar.

python benchmarks/prepare.py [--corpus FILES...] [--size 1.8GB] [--repeats 3] [--only NAME]

Ours and the peer take turns within each repeat, so that the noise of the machine hits both; every
measurement is a fresh process; the table shows medians. The default corpus is the source of
Python's own standard library, which every machine has, repeated up to the size: some gigabytes, as jobs have
at least. A start takes about a second whatever the size, so a smaller one shows more of that and less of the
work. Bars are printed, never enforced: a slow machine is not a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

import measure
import safety
from measure import COMMAND, RANKS, Bench, Row, read_events, run, seconds_between, start

from tokenmill.sizes import parse_size

HERE = Path(__file__).parent
RECIPE_BYTES = 125_000_000


def against_engine(bench: Bench, kind: str) -> Iterator[Row]:
    """The whole of prepare against the engine's own reading and encoding of the same files."""
    files = bench.corpus.files(kind)
    peer_command = [sys.executable, str(HERE / "peer.py"), kind, RANKS, *files]
    cores = {"RAYON_NUM_THREADS": str(bench.workers)}
    ours, builds, peers, calls = [], [], [], []
    for _ in range(bench.repeats):
        ours.append(bench.prepare(files).seconds)
        events = read_events(bench.output)
        builds.append(seconds_between(events, "start", "finished"))
        peer = run(peer_command, environment=cores)
        result = peer.result()
        peers.append(peer.seconds)
        calls.append(result["seconds"])
        if events[-1]["tokens"] != result["tokens"] + result["documents"]:
            raise SystemExit(f"{events[-1]} and {result} do not agree: the two did different work")
    yield _compare(kind, "whole process, prepare / gigatoken", ours, peers, bar=1.1)
    yield _compare(kind, "build start to finish / the call alone", builds, calls, bar=1.1, judged=False)


def against_recipe(bench: Bench) -> Iterator[Row]:
    """nanoGPT's way, once, on as many files as fit 125 MB; beyond that its time is scaled by the size."""
    files = bench.corpus.parquet
    part = bench.corpus.take(RECIPE_BYTES)
    caches = {"HF_HOME": str(bench.work / "hf"), "HF_DATASETS_CACHE": str(bench.work / "hf" / "datasets")}
    command = [sys.executable, str(HERE / "nanogpt_recipe.py"), RANKS, str(bench.work / "recipe"), *part.parquet]
    recipe = run(command, environment={**caches, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    shutil.rmtree(bench.work / "recipe")
    shutil.rmtree(bench.work / "hf", ignore_errors=True)
    small, whole = [], []
    for _ in range(bench.repeats):
        small.append(bench.prepare(part.parquet).seconds)
        whole.append(bench.prepare(files).seconds)
        tokens = read_events(bench.output)[-1]["tokens"]
    found = recipe.result()
    for corpus, seconds in ((part, small), (bench.corpus, whole)):
        scaled = recipe.seconds * corpus.text_bytes / part.text_bytes
        note = "run once" if corpus is part else f"recipe scaled from {_mb(part.text_bytes)}"
        yield Row(
            name="recipe",
            what=f"{_mb(corpus.text_bytes)}, nanoGPT recipe / prepare ({note})",
            ours=f"{median(seconds):.2f} s",
            peer=f"{scaled:.1f} s",
            figure=scaled / median(seconds),
            bar=25,
            at_least=True,
            judged=corpus is bench.corpus,
            raw={"ours": seconds, "recipe": recipe.seconds, "recipe_tokens": found["tokens"], "our_tokens": tokens},
        )


def memory(bench: Bench) -> Iterator[Row]:
    """Peak resident memory of the hungriest worker, at the size and at four times the size."""
    larger = bench.corpus.times(4, bench.work / "larger")
    peaks: dict[int, list[int]] = {}
    for corpus in (bench.corpus, larger):
        for _ in range(bench.repeats if corpus is bench.corpus else 1):
            found = bench.prepare(corpus.parquet, watch=True)
            peak = found.children_bytes or found.own_bytes
            peaks.setdefault(corpus.text_bytes, []).append(peak)
        yield Row(
            name="memory",
            what=f"MB of a worker, {_mb(corpus.text_bytes)}",
            ours=_mb(max(peaks[corpus.text_bytes])),
            peer=f"parent {_mb(found.own_bytes)}",
            figure=max(peaks[corpus.text_bytes]) / 1e6,
            bar=700,
            raw={"workers": peaks[corpus.text_bytes], "parent": found.own_bytes},
        )
    small, large = max(peaks[bench.corpus.text_bytes]), max(peaks[larger.text_bytes])
    yield Row(name="memory", what="four times the text / once", figure=large / small, bar=1.15)


def scaling(bench: Bench) -> Iterator[Row]:
    """Two workers against one; and two builds of one worker each at once, which share nothing but the machine."""
    wholes: dict[int, list[float]] = {1: [], 2: []}
    builds: dict[int, list[float]] = {1: [], 2: []}
    pairs = []
    for _ in range(bench.repeats):
        for workers in (1, 2):
            wholes[workers].append(bench.prepare(bench.corpus.parquet, workers=workers).seconds)
            builds[workers].append(seconds_between(read_events(bench.output), "start", "commit"))
        pairs.append(_two_at_once(bench))
    for what, seconds in (("whole process", wholes), ("start to commit", builds)):
        yield Row(
            name="scaling",
            what=f"{what}, -j 1 / -j 2",
            ours=f"{median(seconds[2]):.2f} s",
            peer=f"{median(seconds[1]):.2f} s",
            figure=median(seconds[1]) / median(seconds[2]),
            bar=1.8,
            at_least=True,
            raw={"seconds": seconds},
        )
    yield Row(
        name="scaling",
        what="the machine's own limit: one build / half of two at once, -j 1 each",
        ours=f"{median(pairs):.2f} s",
        peer=f"{median(wholes[1]):.2f} s",
        figure=2 * median(wholes[1]) / median(pairs),
        bar=1.8,
        at_least=True,
        judged=False,
        raw={"seconds": pairs},
    )


def _two_at_once(bench: Bench) -> float:
    """Seconds of two builds of the corpus with one worker each, side by side."""
    bench.clear()
    places = [bench.work / f"pair{number}" for number in range(2)]
    os.sync()
    begin = time.perf_counter()
    processes = [start(bench.prepare_command(bench.corpus.parquet, workers=1, output=place)) for place in places]
    for process in processes:
        process.communicate()
    seconds = time.perf_counter() - begin
    for place in places:
        shutil.rmtree(place)
    return seconds


def resume(bench: Bench) -> Iterator[Row]:
    """kill -9 of everything at half time, then the same command: what the crash cost, in work and in time."""
    files = bench.corpus.parquet
    uninterrupted, lost, extras, start_ups = [], [], [], []
    for _ in range(bench.repeats):
        began = time.time()
        uninterrupted.append(bench.prepare(files).seconds)
        events = read_events(bench.output)
        start_ups.append(next(event["time"] for event in events if event["kind"] == "start") - began)
        manifest = (bench.output / "dataset.json").read_bytes()
        spent = _kill_at(bench, median(uninterrupted) / 2)
        lost.append(_lost_units(bench))
        spent += run(bench.prepare_command(files)).seconds
        if (bench.output / "dataset.json").read_bytes() != manifest:
            raise SystemExit("the resumed dataset is not the uninterrupted one")
        extras.append(spent - uninterrupted[-1])
    yield Row(
        name="resume",
        what="units a worker that a kill -9 at half time threw away",
        figure=median(lost) / bench.workers,
        bar=1.0,
        raw={"lost": lost},
    )
    yield Row(
        name="resume",
        what="extra s of the crash, with a second start-up / a start-up",
        ours=f"{median(extras):.2f} s",
        peer=f"{median(start_ups):.2f} s",
        figure=median(extras) / median(start_ups),
        bar=1.0,
        judged=False,
        raw={"uninterrupted": uninterrupted, "extra": extras, "start_up": start_ups},
    )


def _lost_units(bench: Bench) -> float:
    """What lies in the output without a receipt, in units."""
    done = {path.name.partition(".")[0] for path in (bench.output / ".build/receipts").iterdir()}
    kept = thrown_away = 0
    for path in (bench.output / ".build/pieces").iterdir():
        if path.name.partition(".")[0] in done:
            kept += path.stat().st_size
        else:
            thrown_away += path.stat().st_size
    return thrown_away * len(done) / kept


def _kill_at(bench: Bench, seconds: float) -> float:
    """Start a fresh build and kill it then; gives the time that it had."""
    shutil.rmtree(bench.output)
    begin = time.perf_counter()
    process = measure.start(bench.prepare_command(bench.corpus.parquet))
    time.sleep(seconds)
    measure.kill_tree(process)
    return time.perf_counter() - begin


HASH = """
import hashlib, json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
threads, size = int(sys.argv[1]), int(sys.argv[2]) // int(sys.argv[1])
parts = [os.urandom(size) for _ in range(threads)]
begin = time.perf_counter()
with ThreadPoolExecutor(threads) as pool:
    list(pool.map(lambda part: hashlib.sha256(part).digest(), parts))
print(json.dumps({"seconds": time.perf_counter() - begin, "bytes": size * threads}))
"""
FILES = """
import hashlib, json, sys, time
from concurrent.futures import ThreadPoolExecutor
threads, names = int(sys.argv[1]), sys.argv[2:]
def digest(name):
    with open(name, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
begin = time.perf_counter()
with ThreadPoolExecutor(threads) as pool:
    list(pool.map(digest, names))
print(json.dumps({"seconds": time.perf_counter() - begin}))
"""
VERIFY = """
import json, sys, time
from tokenmill.maintenance.verify import verify
begin = time.perf_counter()
report = verify(sys.argv[1])
assert report.ok, report.problems
print(json.dumps({"seconds": time.perf_counter() - begin}))
"""


def verify(bench: Bench) -> Iterator[Row]:
    """Checking a dataset against hashing its files and nothing else; and against bytes that lie in memory."""
    bench.prepare(bench.corpus.parquet)
    parts = [path for path in bench.output.rglob("*") if path.is_file() and ".build" not in path.parts]
    largest_first = sorted(parts, key=lambda path: -path.stat().st_size)
    size = sum(path.stat().st_size for path in parts)
    ours, files, memory = [], [], []
    for _ in range(bench.repeats):
        ours.append(size / run([sys.executable, "-c", VERIFY, str(bench.output)]).result()["seconds"])
        peer = run([sys.executable, "-c", FILES, str(bench.workers), *map(str, largest_first)]).result()
        files.append(size / peer["seconds"])
        peer = run([sys.executable, "-c", HASH, str(bench.workers), str(size)]).result()
        memory.append(peer["bytes"] / peer["seconds"])
    for what, peers in (("hashlib.file_digest of the same files", files), ("sha256 in memory", memory)):
        yield Row(
            name="verify",
            what=f"bytes/s of {_mb(size)}, verify / {what}",
            ours=f"{median(ours) / 1e6:.0f} MB/s",
            peer=f"{median(peers) / 1e6:.0f} MB/s",
            figure=median(ours) / median(peers),
            bar=0.9,
            at_least=True,
            judged=peers is files,
            raw={"ours": ours, "peer": peers},
        )


def start_up(bench: Bench) -> Iterator[Row]:
    """What nothing costs."""
    python = [sys.executable, "-c"]
    nothing, imports, versions = [], [], []
    for _ in range(10):
        nothing.append(run([*python, "pass"]).seconds)
        imports.append(run([*python, "import tokenmill"]).seconds)
        versions.append(run([COMMAND, "--version"]).seconds)
    yield Row(
        name="start-up",
        what="s of import tokenmill beyond Python's own",
        ours=f"{median(imports):.3f} s",
        peer=f"{median(nothing):.3f} s",
        figure=median(imports) - median(nothing),
        bar=0.1,
        raw={"import": imports, "nothing": nothing},
    )
    yield Row(
        name="start-up",
        what="s of tokenmill --version",
        ours=f"{median(versions):.3f} s",
        figure=median(versions),
        bar=0.3,
        raw={"version": versions},
    )


BENCHMARKS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "parquet": lambda bench: against_engine(bench, "parquet"),
    "jsonl": lambda bench: against_engine(bench, "jsonl"),
    "recipe": against_recipe,
    "memory": memory,
    "scaling": scaling,
    "resume": resume,
    "verify": verify,
    "start-up": start_up,
    "safety": safety.cost,
    "receipts": safety.receipts,
}


def _compare(name: str, what: str, ours: list[float], peer: list[float], *, bar: float, judged: bool = True) -> Row:
    return Row(
        name=name,
        what=what,
        ours=f"{median(ours):.2f} s",
        peer=f"{median(peer):.2f} s",
        figure=median(ours) / median(peer),
        bar=bar,
        judged=judged,
        raw={"ours": ours, "peer": peer},
    )


def _mb(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


def main() -> None:
    parser = measure.corpus_parser(__doc__)
    parser.set_defaults(size=parse_size("1.8GB"))
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--work", help="where corpus and datasets go for the while; a temporary folder if not given")
    parser.add_argument("--json", type=Path, help="write machine, rows and all single figures here")
    arguments = parser.parse_args()
    machine = measure.describe_machine()
    print(measure.machine_line(), flush=True)
    if arguments.work:
        Path(arguments.work).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.work, prefix="tokenmill-bench-") as folder:
        corpus = measure.make_corpus(Path(folder), arguments.size, arguments.corpus)
        origin = "the given corpus" if arguments.corpus else "Python's standard library"
        print(f"{_mb(corpus.text_bytes)} of text in {len(corpus.parquet)} files: {origin}, repeated", flush=True)
        bench = Bench(corpus, Path(folder), measure.num_cores(), arguments.repeats)
        rows: list[Row] = []
        for name in arguments.only:
            for row in BENCHMARKS[name](bench):
                rows.append(row)
                print("  ".join(cell for cell in row.cells() if cell), file=sys.stderr, flush=True)
    print(f"{bench.workers} workers, medians of {bench.repeats}\n\n{measure.format_table(rows)}")
    print(f"\nothers took {measure.OTHER_LOAD.cores:.2f} of the {bench.workers} cores while this ran")
    if arguments.json:
        listed = [{**asdict(row), "passed": row.passed} for row in rows]
        arguments.json.write_text(
            json.dumps({"machine": machine, "other_cores": measure.OTHER_LOAD.cores, "rows": listed}, indent=1)
        )


if __name__ == "__main__":
    main()
