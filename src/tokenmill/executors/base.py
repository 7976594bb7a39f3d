"""The protocol of executors, which run units, and the retry rules that all of them share.

in_process     this process
process_pool   worker processes of this machine
ray            actors of a Ray cluster
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenmill import errors
from tokenmill.executors.forkserver import Message
from tokenmill.tokenizers.parity import Trial
from tokenmill.units.probe import ProbeResult
from tokenmill.units.task import ProbeRequest, UnitTask

MAX_TRIES = 3
# Errors that concern the whole build. Any other one concerns a unit.
FATAL = (
    errors.DiskFullError,
    errors.FileLimitError,
    errors.DeterminismError,
    errors.BadDocumentError,
    errors.RecipeError,
)

# Receives messages like {"kind": "progress" | "done" | "retry" | "failed", ...}.
Listener = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class UnitFailure:
    """A unit that failed, and why."""

    task: UnitTask
    error: errors.TokenmillError


class Prober(Protocol):
    """Answers the questions of the preflight, as a single worker does."""

    def probe(self, request: ProbeRequest) -> ProbeResult:
        """The texts at some positions of the sources."""

    def encode(self, texts: Sequence[str]) -> Trial:
        """The engine's ids of some texts."""


class Executor(Prober, Protocol):
    """Runs units, and answers the questions of the preflight as a single worker does."""

    @property
    def workers(self) -> int:
        """How many units run at once."""

    def run(self, tasks: Iterator[UnitTask], listener: Listener) -> list[UnitFailure]:
        """Run the tasks, roughly in order. Returns those that failed for good."""

    def release(self) -> None:
        """All units are done: let the workers end, without waiting for them."""

    def stop(self) -> None:
        """Stop at once. What units have published stays."""


def retry_or_fail(
    task: UnitTask,
    error: errors.TokenmillError,
    tries: Counter[int],
    again: list[UnitTask],
    failures: list[UnitFailure],
    listener: Listener,
) -> None:
    """Try a unit again, or count it as failed for good."""
    unit = task.unit.index
    tries[unit] += 1
    if is_final(error, tries[unit]):
        failures.append(UnitFailure(task, error))
        listener({"kind": "failed", "unit": unit, "error": error.message, "silent": is_silent(error)})
    else:
        again.append(task)
        listener({"kind": "retry", "unit": unit, "error": error.message, "silent": is_silent(error)})


def is_silent(error: errors.TokenmillError) -> bool:
    """Whether a unit failed because a store did not answer. Perhaps only its own node is cut off."""
    return isinstance(error, errors.SilentStoreError)


def is_final(error: errors.TokenmillError, tries: int) -> bool:
    """Whether a unit has failed for good. An error of the whole build is raised."""
    if isinstance(error, FATAL):
        raise error
    return isinstance(error, errors.SourceError) or tries >= MAX_TRIES
