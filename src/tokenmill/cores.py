"""How many workers there are: as asked for, as the environment says, or as the machine has cores."""

from __future__ import annotations

import os

from tokenmill.errors import RecipeError


def resolve_workers(workers: int | None) -> int:
    """How many workers: as asked; three quarters of the cores for 0 or less; all of them by default."""
    if workers is None:
        workers = positive_from_environment("DATASET_NUM_PROC") or num_cores()
    return workers if workers > 0 else max(1, num_cores() * 3 // 4)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def positive_from_environment(name: str) -> int | None:
    """A positive number from the environment; None if it is not set."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise RecipeError(f"{name}={text!r} is not a positive number", hint="unset it or correct it")
    return int(text)
