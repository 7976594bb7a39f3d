"""What runs units: the questions it is asked and the answers it gives.

Inline   this process        Pool   a crew of worker processes        Ray   tasks of a cluster
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tokenmill import errors
from tokenmill.build.crew import Message
from tokenmill.build.task import Task, make_task
from tokenmill.planning import Plan

MAX_TRIES = 3
# Units that are looked at before the work, and text of them all together.
PLACES = 8
SURVEY_BYTES = 256_000
# Errors of the whole build; any other one concerns a unit.
FATAL = (errors.DiskFullError, errors.DeterminismError, errors.BadDocumentError, errors.RecipeError)

# Hears messages like {"kind": "progress" | "done" | "retry" | "failed", ...}.
Listener = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A unit that could not be done, and why."""

    task: Task
    error: errors.TokenmillError


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Where to look before the work: so many bytes of each of these units, out of `total_bytes` of text."""

    tasks: tuple[Task, ...]
    bytes_each: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the whole dataset will come to, give or take `error` (a 95 % interval) of the tokens.

    `seconds` are those of one worker.
    """

    tokens: int
    error: int
    documents: int
    output_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was compared with the reference, what to expect of the whole, and the units that could not be read."""

    parity: dict[str, Any]
    estimate: Estimate
    unread: tuple[int, ...]


def make_request(plan: Plan, places: int = PLACES) -> Request:
    """Evenly spread units of a plan."""
    last, count = len(plan.units) - 1, min(places, len(plan.units))
    wanted = sorted({last * place // max(1, count - 1) for place in range(count)})
    return Request(
        tasks=tuple(make_task(plan, unit) for unit in wanted),
        bytes_each=SURVEY_BYTES // max(1, len(wanted)),
        total_bytes=plan.text_bytes(),
    )


def divided(request: Request, parts: int) -> list[Request]:
    """A request for each of several workers. Every one of them estimates the whole."""
    count = min(parts, len(request.tasks))
    return [replace(request, tasks=request.tasks[part::count]) for part in range(count)]


def joined(found: Sequence[Checked]) -> Checked:
    """What several workers have compared, and the mean of what those expect that saw any text."""
    parity = {name: sum(one.parity[name] for one in found) for name in ("documents", "bytes", "tokens")}
    expected = [one.estimate for one in found if one.estimate.documents] or [found[0].estimate]
    count = len(expected)
    return Checked(
        parity={"reference": found[0].parity["reference"], **parity},
        estimate=Estimate(
            tokens=sum(one.tokens for one in expected) // count,
            error=round(math.hypot(*(one.error for one in expected)) / count),
            documents=sum(one.documents for one in expected) // count,
            output_bytes=sum(one.output_bytes for one in expected) // count,
            seconds=sum(one.seconds for one in expected) / count,
        ),
        unread=tuple(sorted(unit for one in found for unit in one.unread)),
    )


class Executor(Protocol):
    @property
    def workers(self) -> int:
        """How many units run at once."""

    def check(self, request: Request) -> Checked:
        """Before the work: the engine against its reference, and an estimate of the whole."""

    def run(self, tasks: Iterator[Task], listener: Listener) -> list[Failure]:
        """Do the tasks, more or less in order; gives those that failed for good."""

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
        listener({"kind": "failed", "unit": unit, "error": error.message})
    else:
        again.append(task)
        listener({"kind": "retry", "unit": unit, "error": error.message})


def is_final(error: errors.TokenmillError, tries: int) -> bool:
    """Whether a unit has failed for good. An error of the whole build is raised."""
    if isinstance(error, FATAL):
        raise error
    return isinstance(error, errors.SourceError) or tries >= MAX_TRIES
