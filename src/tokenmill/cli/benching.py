"""What `tokenmill bench` measures: how quickly the loader feeds a trainer on this machine."""

from __future__ import annotations

import time
from typing import Any

from tokenmill.data.dataset import open as open_dataset
from tokenmill.data.loader import DataLoader
from tokenmill.errors import RecipeError


def measure(path: str, *, split: str, seq_len: int, batch_size: int, seconds: float) -> dict[str, Any]:
    """Rates of a shuffled loader over so many seconds, and how long its first batch took from opening on."""
    begin = time.perf_counter()
    dataset = open_dataset(path)
    if split not in dataset.splits:
        raise RecipeError(f"there is no split {split!r}", hint=f"there are {', '.join(dataset.splits)}")
    loader = DataLoader(dataset, seq_len, batch_size, split=split)
    batches = iter(loader)
    next(batches)
    first = now = time.perf_counter()
    count = 0
    while now < first + seconds:
        next(batches)
        count += 1
        now = time.perf_counter()
    rate = count / (now - first)
    return {
        "path": path,
        "split": split,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "samples": loader.num_samples,
        "seconds": round(now - first, 3),
        "batches": count,
        "batches_per_second": round(rate, 1),
        "tokens_per_second": round(rate * batch_size * seq_len),
        "first_batch_ms": round(1000 * (first - begin), 2),
    }
