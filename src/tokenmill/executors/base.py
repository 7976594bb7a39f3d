"""What runs units: the questions it is asked and the answers it gives.

Inline   this process        Pool   a crew of worker processes        Ray   benches of a cluster
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenmill import errors
from tokenmill.executors.forkserver import Message, WorkerProcesses, needs_processes
from tokenmill.storage.local import Folder
from tokenmill.tokenizers.parity import Trial
from tokenmill.tokenizers.spec import TokenizerSpec
from tokenmill.units.probe import ProbeResult
from tokenmill.units.task import BuildConfig, ProbeRequest, UnitTask


def make_executor(
    workers: int, crew: WorkerProcesses | None, folder: Folder, work: BuildConfig, spec: TokenizerSpec
) -> Executor:
    """A pool, of a `crew` that loads already if there is one; this process where no crew is needed."""
    if needs_processes(workers, folder):
        from tokenmill.executors.process_pool import ProcessPool

        return ProcessPool(crew or WorkerProcesses(workers), folder, work, spec)
    # Only here: in a pool, the engine is the workers' business.
    from tokenmill.executors.in_process import InProcess
    from tokenmill.tokenizers.engine import open_engine

    return InProcess(folder, work, spec, open_engine(spec))


class Prober(Protocol):
    def look(self, request: ProbeRequest) -> ProbeResult:
        """The texts at some places of the sources."""

    def encode(self, texts: Sequence[str]) -> Trial:
        """What the engine makes of some texts."""


MAX_TRIES = 3
# Errors of the whole build; any other one concerns a unit.
FATAL = (
    errors.DiskFullError,
    errors.FileLimitError,
    errors.DeterminismError,
    errors.BadDocumentError,
    errors.RecipeError,
)

# Hears messages like {"kind": "progress" | "done" | "retry" | "failed", ...}.
Listener = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class UnitFailure:
    """A unit that could not be done, and why."""

    task: UnitTask
    error: errors.TokenmillError


class Executor(Prober, Protocol):
    """It is asked as a single worker is before the work, and has one answer."""

    @property
    def workers(self) -> int:
        """How many units run at once."""

    def run(self, tasks: Iterator[UnitTask], listener: Listener) -> list[UnitFailure]:
        """Do the tasks, more or less in order; gives those that failed for good."""

    def dismiss(self) -> None:
        """All is done: workers may go, and nobody waits for them."""

    def stop(self) -> None:
        """Stop at once; nothing that was published is touched."""


def judge(
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
    """Whether a unit failed for the want of any answer: if its node alone is cut off, others are not."""
    return isinstance(error, errors.SilentStoreError)


def is_final(error: errors.TokenmillError, tries: int) -> bool:
    """Whether a unit has failed for good. An error of the whole build is raised."""
    if isinstance(error, FATAL):
        raise error
    return isinstance(error, errors.SourceError) or tries >= MAX_TRIES
