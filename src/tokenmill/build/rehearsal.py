"""A rehearsal: the beginnings of some units, done as a build does them and thrown away. It tells how long all takes.

    read -> documents and their tokens -> hash -> write, to nowhere

What it cannot tell is how long the disk of the output takes, and how busy a machine will be.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import numpy as np

from tokenmill.arrow_text import text_array, text_buffers
from tokenmill.build.documents import read_batches
from tokenmill.build.task import Task, Work, make_task
from tokenmill.build.unit import Run
from tokenmill.errors import TokenmillError
from tokenmill.planning import Plan
from tokenmill.sources.batch import Batch
from tokenmill.storage import Folder
from tokenmill.storage.fs import LocalFileSystem
from tokenmill.tokenizer.encoded import Engine

UNITS = 4
# Of each unit, whatever is less.
TEXT_BYTES = 32_000_000
SECONDS = 0.4
# A document of more than this is cut to its beginning.
_LONG_BYTES = 4_000_000
_HEAD_BYTES = 1_000_000
# What a build takes whatever its size is: processes start, libraries load, the manifest is written.
START_SECONDS = 1.0

Clock = Callable[[], float]


def rehearse(plan: Plan, work: Work, engine: Engine, *, clock: Clock = time.perf_counter) -> float | None:
    """Seconds that one worker takes for a byte of text; None if no unit can be read."""
    last = len(plan.units) - 1
    chosen = sorted({last * (2 * place + 1) // (2 * UNITS) for place in range(UNITS)})
    calm = replace(work, on_bad="quarantine")  # of bad documents a build will tell
    costs: list[float] = []
    for unit in chosen if plan.units else ():
        with contextlib.suppress(TokenmillError):  # the unit itself will say what is wrong
            costs += _cost(Folder(os.devnull, _Nowhere()), calm, make_task(plan, unit), engine, clock)
    return fmean(costs) if costs else None


class _Nowhere(LocalFileSystem):
    """Takes what is written, and keeps nothing of it."""

    def create(self, path: str) -> int:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def unlink(self, path: str) -> None:
        """There is nothing."""


def _cost(folder: Folder, work: Work, task: Task, engine: Engine, clock: Clock) -> list[float]:
    """Seconds for a byte of text of the beginning of a unit; nothing if it has no text."""
    begin, text_bytes = clock(), 0
    run = Run(work, task, folder)
    try:
        for batch in read_batches(work, task):
            sample = _sample(batch)
            run.add(sample, engine)
            text_bytes += sample.text.nbytes
            if text_bytes >= TEXT_BYTES or clock() - begin >= SECONDS:
                break
    finally:
        run.discard()
    return [(clock() - begin) / text_bytes] if text_bytes else []


def _sample(batch: Batch) -> Batch:
    """A batch without what is long in it: a document of 60 MB tells no more than its beginning, and takes minutes."""
    offsets, data = text_buffers(batch.text)
    if not len(batch.text) or int(np.diff(offsets).max()) <= _LONG_BYTES:
        return batch
    heads = [data[a : min(b, a + _HEAD_BYTES)] for a, b in itertools.pairwise(offsets.tolist())]
    texts = [head.tobytes().decode(errors="ignore") for head in heads]
    return replace(batch, text=text_array(texts))


def elapsed(seconds: float, longest: float, workers: int) -> float:
    """How long so many workers take for so much of one: the longest unit is not shared, whoever does the others."""
    return START_SECONDS + max(seconds / workers, min(seconds, longest)) if seconds > 0 else 0.0
