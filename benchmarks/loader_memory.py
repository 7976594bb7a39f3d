"""A long shuffled run on a dataset that is larger than memory: does it stay small, and how quick is it? See loader.py.

python benchmarks/loader_memory.py ours|memmap FLAT SECONDS    a line of JSON: batches, and memory as it went

The file was just written, so that the system's cache is full of it, and what is read next drives something
out. Beside the loader, a plain memory map is read in the same way: what it has touched counts as its memory, and grows.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import measure
import numpy as np
from measure import Row

import tokenmill
from tokenmill.sizes import format_bytes, format_count

ROWS, WIDTH = 64, 1024
BLOCK_BYTES = 1 << 26
# Left for whoever else uses the disk.
MARGIN_BYTES = 8 << 30
SAMPLE_SECONDS = 0.25
WARM_UP = 0.25


def measure_long_run(folder: Path, num_bytes: int | None, seconds: float) -> list[Row]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_bytes = num_bytes or memory * 11 // 10
    free = shutil.disk_usage(folder).free
    if free < num_bytes + MARGIN_BYTES:
        raise SystemExit(
            f"{format_bytes(num_bytes)} are needed and {format_bytes(free)} are free: give --work or --bytes"
        )
    print(f"{format_bytes(num_bytes)} of tokens, {format_bytes(memory)} of memory, {seconds:g} s", flush=True)
    flat = folder / "flat.bin"
    write_tokens(flat, num_bytes)
    runs = {}
    for name, share in (("ours", 1.0), ("memmap", 0.25)):
        command = [sys.executable, __file__, name, str(flat), str(seconds * share)]
        runs[name] = measure.run(command).result()
    return list(rows(runs["ours"], runs["memmap"]))


def write_tokens(flat: Path, num_bytes: int) -> None:
    """Tokens that nobody reads, block after block."""
    block = np.random.default_rng(1).integers(0, 50_000, BLOCK_BYTES // 2, np.uint16)
    with flat.open("wb") as file:
        for _ in range(-(-num_bytes // BLOCK_BYTES)):
            block.tofile(file)
        os.fsync(file.fileno())


def rows(ours: dict[str, Any], memmap: dict[str, Any]) -> Iterator[Row]:
    yield Row(
        name="memory, larger dataset",
        what="MB of its own, last quarter less first",
        ours=f"{ours['own'][0]:.0f} to {ours['own'][1]:.0f} MB",
        peer=f"{memmap['own'][0]:.0f} to {memmap['own'][1]:.0f} MB",
        figure=ours["own"][1] - ours["own"][0],
        bar=5,
        raw={"ours": ours, "peer": memmap},
    )
    yield Row(
        name="memory, larger dataset",
        what="peak MB, with mapped pages",
        ours=f"{ours['peak']:.0f} MB",
        peer=f"memmap {memmap['peak']:.0f} MB in {memmap['batches']} batches",
        figure=ours["peak"],
        bar=1500,
    )
    yield Row(
        name="rate, larger dataset",
        what="last half / first half",
        ours=f"{format_count(ours['tokens_a_second'])} tokens/s of {format_bytes(ours['disk_bytes'])} read",
        peer=f"memmap {format_count(memmap['tokens_a_second'])} tokens/s",
        figure=ours["halves"][1] / ours["halves"][0],
        bar=0.8,
        at_least=True,
    )


def run(name: str, flat: str, seconds: float) -> None:
    source = ours(flat) if name == "ours" else memmap(flat)
    begin = now = time.perf_counter()
    due, samples = begin, []
    for batches in itertools.count():
        if now >= due:
            samples.append((now - begin, batches, *resident_megabytes()))
            due = now + SAMPLE_SECONDS
        if now >= begin + seconds:
            break
        next(source)
        now = time.perf_counter()
    quarters = np.array_split(np.array(samples)[int(WARM_UP * len(samples)) :], 4)
    half = samples[len(samples) // 2]
    print(json.dumps({
        "batches": batches,
        "tokens_a_second": int(batches * ROWS * WIDTH / (now - begin)),
        "halves": [half[1] / half[0], (batches - half[1]) / (now - begin - half[0])],
        "own": [median(quarters[0][:, 2]), median(quarters[3][:, 2])],
        "peak": max(own + mapped for _, _, own, mapped in samples),
        "disk_bytes": read_bytes(),
    }))  # fmt: skip


def ours(flat: str) -> Iterator[Any]:
    dataset = tokenmill.open(flat, layout="nanogpt", dtype="uint16", eot_id=50_256)
    return iter(tokenmill.DataLoader(dataset, WIDTH, ROWS, seed=1))


def memmap(flat: str) -> Iterator[Any]:
    """Windows of a map that is kept open."""
    tokens = np.memmap(flat, np.uint16, mode="r").view(np.ndarray)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, WIDTH + 1)
    chance = np.random.default_rng(1)
    while True:
        yield windows[chance.integers(0, len(windows), ROWS)].astype(np.int64)


def resident_megabytes() -> tuple[float, float]:
    """Memory of this process: its own, and pages of files that it has mapped."""
    status = Path("/proc/self/status").read_text()
    own, mapped = (int(status.partition(f"{name}:")[2].split()[0]) / 1000 for name in ("RssAnon", "RssFile"))
    return own, mapped


def read_bytes() -> int:
    """What this process had the disk read."""
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0])


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], float(sys.argv[3]))
