"""The loader side by side with what people use, every figure beside its bar.

python benchmarks/loader.py [--dataset OUT] [--tokens 300M] [--repeats 7] [--peers .venv-peers/bin/python]
python benchmarks/loader.py --only larger-than-memory [--work DIR]

Rows of 64 x 1024 inputs and targets as int64, shuffled, from a warm page cache. Contenders take turns
of about half a second within each repeat, so that the noise of the machine hits all; the table shows
medians. The default dataset is made of pieces of Python's own standard library, one token a byte.
litData and Mosaic streaming run in an environment of their own: `make bench-loader` makes it. They
are slow to write, so they and a loader of ours get the first tokens alone (--peer-tokens). The modules
for trainers, beside what is used in their place, are in loader_frameworks.py. Bars
are printed, never enforced: a slow machine is not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import loader_memory
import measure
import numpy as np
import torch
from loader_frameworks import ROWS, SEED, WIDTH, Batches, Framework, Tokens, find_frameworks
from measure import Row

import tokenmill
from tokenmill.sizes import format_count, parse_size

HERE = Path(__file__).parent
PEERS = ("litdata", "mosaic")
BESIDE_PEERS = "ours, tokens of the peers"
PATIENCE_SECONDS = 60.0
Turn = Callable[[float], float | None]
# Of the modules for trainers beside what is used in their place.
TRAINER_BAR = 5.0


def ours(dataset: tokenmill.Dataset, **options: Any) -> Batches:
    return iter(tokenmill.DataLoader(dataset, WIDTH, ROWS, seed=SEED, **options))


def bare_gather(flat: Path, dtype: str) -> Batches:
    """The least that there is to do: take the windows of one flat file, and widen them."""
    tokens = np.memmap(flat, dtype, mode="r")
    windows = np.lib.stride_tricks.sliding_window_view(tokens, WIDTH + 1)
    count = (len(tokens) - 1) // WIDTH
    while True:
        order = np.random.default_rng(SEED).permutation(count) * WIDTH
        for begin in range(0, count - ROWS + 1, ROWS):
            rows = windows[order[begin : begin + ROWS]].astype(np.int64)
            yield rows[:, :-1], rows[:, 1:]


def nanogpt(flat: Path, dtype: str) -> Batches:
    """get_batch of nanoGPT's train.py; it maps the file anew each time, against a leak of memory."""
    while True:
        data = np.memmap(flat, dtype, mode="r")
        ix = torch.randint(len(data) - WIDTH, (ROWS,))
        x = torch.stack([torch.from_numpy(data[i : i + WIDTH].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + WIDTH].astype(np.int64)) for i in ix])
        yield x, y


class Peer:
    """litData or Mosaic streaming in a process of another environment, which measures a turn when it is told to.

    Between its turns it stands still with all its workers, which would else go on while others are measured.
    """

    def __init__(self, python: Path, name: str, workers: int, folder: Path) -> None:
        command = [str(python), str(HERE / "loader_peers.py"), "read", name, str(folder), str(workers)]
        self._name = f"{name}, {workers} workers"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def turn(self, seconds: float) -> float | None:
        """Batches a second; None if it ended or hangs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.poll() is not None:
            return None
        self._signal(signal.SIGCONT)
        print(seconds, file=self._process.stdin, flush=True)
        ready = select.select([self._process.stdout], [], [], PATIENCE_SECONDS)[0]
        line = self._process.stdout.readline() if ready else ""
        if not line:
            print(f"{self._name} is left out: it {'ended' if ready else 'hangs'}", flush=True)
            self.end()
            return None
        self._signal(signal.SIGSTOP)
        return float(line)

    def _signal(self, number: int) -> None:
        for pid in (self._process.pid, *measure.descendants(self._process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        measure.kill_tree(self._process)


def turn(batches: Batches, seconds: float) -> float:
    """Batches a second, over so many seconds."""
    begin = now = time.perf_counter()
    count = 0
    while now < begin + seconds:
        next(batches)
        count += 1
        now = time.perf_counter()
    return count / (now - begin)


FIRST_BATCH = """
import sys, time
from tokenmill.loader.loader import DataLoader
begin = time.perf_counter()
batch = next(iter(DataLoader(sys.argv[1], 1024, 64, seed=1)))
print(f'{{"seconds": {time.perf_counter() - begin}}}')
"""


def first_batch(dataset: str, repeats: int) -> Row:
    seconds = [measure.run([sys.executable, "-c", FIRST_BATCH, dataset]).result()["seconds"] for _ in range(repeats)]
    return Row(
        name="first batch",
        what="ms from opening, fresh process, imports apart",
        ours=f"{1000 * median(seconds):.1f} ms",
        figure=1000 * median(seconds),
        bar=50,
        raw={"seconds": seconds},
    )


def rows(rates: dict[str, list[float]]) -> Iterator[Row]:
    """Ours against each contender."""
    best = max(("ours, prefetch 0", "ours, prefetch 2"), key=lambda name: median(rates[name]))
    bars = {
        "bare gather": 0.7,
        "nanoGPT get_batch": 25.0,
        "torch DataLoader, 0 workers": TRAINER_BAR,
        "torch DataLoader, 2 workers": TRAINER_BAR,
    }
    for peer, bar in bars.items():
        if peer in rates:
            for name in ("ours, prefetch 0", "ours, prefetch 2"):
                yield _compare(name, peer, rates, bar, judged=name == best)
    for name in ("ours, masked", "ours, best fit"):
        if name in rates:
            yield _compare(name, "bare gather", rates, 0.35)
    for peer in (f"{name}, {workers} workers" for name in PEERS for workers in (0, 2)):
        if peer in rates:
            yield _compare(BESIDE_PEERS, peer, rates, 1.0)


def framework_rows(frameworks: dict[str, Framework], rates: dict[str, list[float]]) -> Iterator[Row]:
    """Each of our loaders for a trainer against each of those that it replaces; the better one of ours is judged."""
    for framework in frameworks.values():
        ours = [name for name in framework.ours if name in rates]
        best = max(ours, key=lambda name: median(rates[name]), default=None)
        for name, peer in itertools.product(ours, framework.theirs):
            if peer in rates:
                yield _compare(name, peer, rates, TRAINER_BAR, judged=name == best)


def _compare(name: str, peer: str, rates: dict[str, list[float]], bar: float, *, judged: bool = True) -> Row:
    shown = {which: f"{format_count(median(rates[which]) * ROWS * WIDTH)} tokens/s" for which in (name, peer)}
    return Row(
        name=name,
        what=f"rate / {peer}",
        ours=shown[name],
        peer=shown[peer],
        figure=median(rates[name]) / median(rates[peer]),
        bar=bar,
        at_least=True,
        judged=judged,
        raw={"ours": rates[name], "peer": rates[peer]},
    )


def make_dataset(folder: Path, num_tokens: int) -> Path:
    """Documents of a few hundred to a few thousand tokens, as web text has them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = "".join(measure.library_texts()).encode("ascii", "replace")
    chance = np.random.default_rng(SEED)
    lengths = np.clip(chance.lognormal(6.3, 0.9, num_tokens // 400), 20, 20_000).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths + 1), num_tokens)) + 1]
    starts = chance.integers(0, len(text) - 20_000, len(lengths))
    files = 8
    for number in range(files):
        mine = slice(number, None, files)
        texts = [text[a : a + n] for a, n in zip(starts[mine].tolist(), lengths[mine].tolist(), strict=True)]
        pq.write_table(pa.table({"text": pa.array(texts, pa.binary()).cast(pa.string())}), folder / f"{number}.parquet")
    sources = [str(folder / f"{number}.parquet") for number in range(files)]
    tokenmill.prepare(sources, folder / "dataset", tokenizer="byte", unit_bytes="64MB")
    return folder / "dataset"


def measure_all(
    dataset: tokenmill.Dataset, work: Path, options: argparse.Namespace
) -> tuple[dict[str, Framework], dict[str, list[float]]]:
    """The frameworks that are installed, and batches a second of every contender, one figure a repeat."""
    split = dataset["train"]
    flat, dtype = work / "flat.bin", split.dtype
    split.tokens(0, split.num_tokens).tofile(flat)
    read_afresh([flat, *(Path(split.shard_location(number)[0]) for number in range(len(split.token_ends)))])
    contenders: dict[str, Batches] = {
        "ours, prefetch 0": ours(dataset, prefetch=0),
        "ours, prefetch 2": ours(dataset, prefetch=2),
        "ours, masked": ours(dataset, prefetch=0, mask_boundaries=True),
        "ours, best fit": ours(dataset, prefetch=0, packing="best_fit"),
        "bare gather": bare_gather(flat, dtype),
        "nanoGPT get_batch": nanogpt(flat, dtype),
    }
    frameworks = find_frameworks(Tokens(dataset, flat, dtype, options.peer_tokens, work))
    for framework in frameworks.values():
        contenders |= framework.make()
    turns = {name: partial(turn, batches) for name, batches in contenders.items()}
    peers = start_peers(flat, dtype, work, options)
    if peers:
        few = ours(tokenmill.open(work / "few.bin", layout="nanogpt", dtype=dtype, eot_id=split.eot_id))
        turns[BESIDE_PEERS] = partial(turn, few)
        turns |= {name: peer.turn for name, peer in peers.items()}
    rates = take_turns(turns, options.seconds, options.repeats)
    for peer in peers.values():
        peer.end()
    return frameworks, rates


def take_turns(turns: dict[str, Turn], seconds: float, repeats: int) -> dict[str, list[float]]:
    """Batches a second of those that do not fail, one figure a repeat."""
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for repeat in range(-1, repeats):
        # The first time is for the page tables; a single pass over all the tokens takes some of them longer.
        for name, take in turns.items():
            rate = take(seconds if repeat >= 0 else 10 * seconds)
            if repeat >= 0 and rate is not None:
                rates[name].append(rate)
    return {name: found for name, found in rates.items() if len(found) == repeats}


def read_afresh(files: Iterable[Path]) -> None:
    """Have the system's copies of files made by reading, for all alike.

    Those made by writing lie in few large pieces of memory or in many small ones, as the writer went about
    it, which shows in the rate; and nobody trains on what was written a minute ago.
    """
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        while os.read(descriptor, 1 << 20):
            pass
        os.close(descriptor)


def start_peers(flat: Path, dtype: str, work: Path, options: argparse.Namespace) -> dict[str, Peer]:
    """Those of the peers that are installed and can write the first tokens, with 0 and with 2 workers."""
    few = work / "few.bin"
    np.memmap(flat, dtype, mode="r")[: options.peer_tokens].tofile(few)
    started: dict[str, Peer] = {}
    for name in PEERS:
        command = [str(options.peers), str(HERE / "loader_peers.py"), "write", name, str(work / name), str(few), dtype]
        if not options.peers.exists():
            print(f"{name} is left out: there is no {options.peers}; make bench-loader installs it", flush=True)
        elif (written := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
            print(f"{name} is left out: {written.stderr.strip().splitlines()[-1:]}", flush=True)
        else:
            for workers in (0, 2):
                # Mosaic's processes share memory by the folder that they read: one each.
                copied = shutil.copytree(work / name, work / f"{name}-{workers}", copy_function=os.link)
                started[f"{name}, {workers} workers"] = Peer(options.peers, name, workers, copied)
    return started


def compare(options: argparse.Namespace, folder: Path) -> list[Row]:
    path = options.dataset or make_dataset(folder, options.tokens)
    dataset = tokenmill.open(path)
    split = dataset["train"]
    print(
        f"{split.num_tokens:,} tokens of {split.dtype}, {split.num_documents:,} documents, "
        f"{len(split.token_ends)} shards; {options.peer_tokens:,} tokens for the peers\n"
        f"{ROWS} x {WIDTH}, medians of {options.repeats}",
        flush=True,
    )
    before = measure.OtherLoad.now()
    frameworks, rates = measure_all(dataset, folder, options)
    measure.OTHER_LOAD.add(before, measure.OtherLoad.now())
    return [*rows(rates), *framework_rows(frameworks, rates), first_batch(str(path), options.repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", type=Path, help="a dataset of yours in place of the one that is made")
    parser.add_argument("--tokens", type=parse_size, default=parse_size("300M"), help="of the dataset that is made")
    parser.add_argument("--peer-tokens", type=parse_size, default=parse_size("30M"), help="for litData and Mosaic")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--seconds", type=float, help="of a turn (0.2), or of the long run (120)")
    parser.add_argument("--peers", type=Path, default=HERE.parent / ".venv-peers/bin/python", help="their Python")
    parser.add_argument("--only", choices=["larger-than-memory"], help="a long run on more tokens than memory holds")
    parser.add_argument("--bytes", type=parse_size, help="of that dataset; a tenth more than the memory if not given")
    parser.add_argument("--work", help="where datasets go for the while; a temporary folder if not given")
    parser.add_argument("--json", type=Path, help="write machine, rows and all single figures here")
    options = parser.parse_args()
    options.seconds = options.seconds or (120 if options.only else 0.2)
    machine = {**measure.describe_machine(), "numpy": np.__version__, "torch": torch.__version__}
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    with tempfile.TemporaryDirectory(dir=options.work, prefix="tokenmill-bench-") as folder:
        if options.only:
            listed = loader_memory.measure_long_run(Path(folder), options.bytes, options.seconds)
        else:
            listed = compare(options, Path(folder))
    print(f"\n{measure.format_table(listed)}")
    print(f"\nothers took {measure.OTHER_LOAD.cores:.2f} of the {measure.num_cores()} cores while this ran")
    if options.json:
        found = [{**asdict(row), "passed": row.passed} for row in listed]
        options.json.write_text(json.dumps({"machine": machine, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
