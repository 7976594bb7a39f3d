"""What runs units: the questions it is asked and the answers it gives.

Inline   this process        Pool   a crew of worker processes        Ray   benches of a cluster
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tokenmill import errors
from tokenmill.build.check import Worker
from tokenmill.build.crew import Message
from tokenmill.build.task import Task

MAX_TRIES = 3
# Errors of the whole build; any other one concerns a unit.
FATAL = (errors.DiskFullError, errors.DeterminismError, errors.BadDocumentError, errors.RecipeError)

# Hears messages like {"kind": "progress" | "done" | "retry" | "failed", ...}.
Listener = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A unit that could not be done, and why."""

    task: Task
    error: errors.TokenmillError


class Executor(Worker, Protocol):
    """It is asked as a single worker is before the work, and has one answer."""

    @property
    def workers(self) -> int:
        """How many units run at once."""

    def run(self, tasks: Iterator[Task], listener: Listener) -> list[Failure]:
        """Do the tasks, more or less in order; gives those that failed for good."""

    def dismiss(self) -> None:
        """All is done: workers may go, and nobody waits for them."""

    def stop(self) -> None:
        """Stop at once; nothing that was published is touched."""


def judge(
    task: Task,
    error: errors.TokenmillError,
    tries: Counter[int],
    again: list[Task],
    failures: list[Failure],
    listener: Listener,
) -> None:
    """Try a unit again, or count it as failed for good."""
    unit = task.unit.index
    tries[unit] += 1
    if is_final(error, tries[unit]):
        failures.append(Failure(task, error))
        listener({"kind": "failed", "unit": unit, "error": error.message, "silent": is_silent(error)})
    else:
        again.append(task)
        listener({"kind": "retry", "unit": unit, "error": error.message, "silent": is_silent(error)})


def is_silent(error: errors.TokenmillError) -> bool:
    """Whether a unit failed for the want of any answer: if its node alone is cut off, others are not."""
    return isinstance(error, errors.SilentStoreError)


def is_final(error: errors.TokenmillError, tries: int) -> bool:
    """Whether a unit has failed for good. An error of the whole build is raised."""
    if isinstance(error, FATAL):
        raise error
    return isinstance(error, errors.SourceError) or tries >= MAX_TRIES
