"""How many workers there are: as asked for, as the environment says, or as cores and memory allow."""

from __future__ import annotations

import math
import os

from tokenmill import arguments
from tokenmill.container import allowed_cores, allowed_memory
from tokenmill.errors import RecipeError

# What a worker holds at most.
MEMORY_BUDGET = 700_000_000
# Workers compute: more than one a core brings nothing, and each has its memory.
MANY_A_CORE = 4
ALWAYS_FEW = 16


def resolve_workers(workers: int | None) -> int:
    """How many workers of this machine: as asked; three quarters of the cores for 0 or less.

    By default as many as there are cores, and as have room in its memory.
    """
    cores = num_cores()
    workers = arguments.workers_or_none(workers)
    if workers is None:
        fitting = min(_memory(), allowed_memory()) / MEMORY_BUDGET
        workers = positive_from_environment("DATASET_NUM_PROC") or max(1, int(min(cores, fitting)))
    most = max(ALWAYS_FEW, MANY_A_CORE * cores)
    if workers > most:
        raise RecipeError(
            f"{workers} workers are too many for {cores} core{'s' if cores != 1 else ''}",
            hint=f"give up to {most} with -j or DATASET_NUM_PROC; one a core is enough",
        )
    return workers if workers > 0 else max(1, cores * 3 // 4)


def num_cores() -> int:
    """The cores that this process may use; part of one counts as one."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(there, allowed_cores()))


def _memory() -> float:
    """Bytes of memory that this machine has; infinite where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return math.inf


def positive_from_environment(name: str) -> int | None:
    """A positive number from the environment; None if it is not set."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise RecipeError(f"{name}={text!r} is not a positive number", hint="unset it or correct it")
    return int(text)
