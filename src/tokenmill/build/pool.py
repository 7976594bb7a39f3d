"""Executors: where units run. In this process, or shared out over a crew of workers.

    tasks  ->  idle worker  ->  done | failed | died
                   ^                      |
                   +---- up to 3 tries ---+--> failures, once all other units are through

A worker that dies (kill -9, out of memory, a crash in native code) costs its unit a retry. An
error that no retry can mend is not retried; an error that concerns the whole build stops it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from tokenmill import errors
from tokenmill.build.crew import Crew, Message
from tokenmill.build.unit import Task, Work, run_unit
from tokenmill.build.worker import EngineHolder, Reporter
from tokenmill.tokenizer import Engine, TokenizerSpec

MAX_TRIES = 3
FATAL = (errors.DiskFullError, errors.DeterminismError, errors.BadDocumentError, errors.RecipeError)

# Hears messages like {"kind": "progress" | "done" | "retry" | "failed", ...}.
Listener = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A unit that could not be done, and why."""

    task: Task
    error: errors.TokenmillError


class Executor(Protocol):
    workers: int

    def run(self, tasks: Iterator[Task], listener: Listener) -> list[Failure]:
        """Do the tasks, more or less in order; gives those that failed for good."""

    def stop(self) -> None:
        """Stop at once; nothing that was published is touched."""


class Inline:
    """One worker: this process itself."""

    workers = 1

    def __init__(self, work: Work, spec: TokenizerSpec, engine: Engine) -> None:
        self._work = work
        self._engine = EngineHolder(spec, engine)

    def run(self, tasks: Iterator[Task], listener: Listener) -> list[Failure]:
        failures = []
        report = Reporter(listener)
        for task in tasks:
            error = self._attempt(task, report, listener)
            report.flush()
            if error is None:
                listener({"kind": "done", "unit": task.unit.index})
            else:
                failures.append(Failure(task, error))
                listener({"kind": "failed", "unit": task.unit.index, "error": error.message})
        return failures

    def _attempt(self, task: Task, report: Reporter, listener: Listener) -> errors.TokenmillError | None:
        for attempt in range(1, MAX_TRIES + 1):
            try:
                run_unit(self._work, task, self._engine, report)
                return None
            except Exception as error:  # whatever a unit dies of, the other units go on
                failure = errors.from_record(errors.to_record(error))
            if _is_final(failure, attempt):
                break
            listener({"kind": "retry", "unit": task.unit.index, "error": failure.message})
        return failure

    def stop(self) -> None:
        """Nothing runs but ourselves."""


class Pool:
    """Units shared out over a crew."""

    def __init__(self, crew: Crew, work: Work, spec: TokenizerSpec) -> None:
        self.workers = crew.workers
        self._crew = crew
        self._idle: list[Connection] = []
        self._deaths_at_start = 0
        crew.brief({"path": sys.path, "work": asdict(work), "tokenizer": spec.describe()})

    def run(self, tasks: Iterator[Task], listener: Listener) -> list[Failure]:
        tries: Counter[int] = Counter()
        again: list[Task] = []
        busy: dict[Connection, Task] = {}
        failures: list[Failure] = []
        exhausted = False
        while True:
            while self._idle and (again or not exhausted):
                task = again.pop() if again else next(tasks, None)
                if task is None:
                    exhausted = True
                    break
                link = self._idle.pop()
                busy[link] = task
                self._crew.tell(link, asdict(task))
            if exhausted and not busy and not again:
                return failures
            for link, message in self._crew.hear():
                kind = message["kind"]
                if kind == "progress":
                    listener(message)
                    continue
                task = busy.pop(link, None)
                if kind != "died":
                    self._idle.append(link)
                elif link in self._idle:
                    self._idle.remove(link)
                if task is None:
                    self._note_start(message)
                elif kind == "done":
                    listener({"kind": "done", "unit": task.unit.index})
                else:
                    tries[task.unit.index] += 1
                    failure = errors.from_record(message["error"])
                    if _is_final(failure, tries[task.unit.index]):
                        failures.append(Failure(task, failure))
                        listener({"kind": "failed", "unit": task.unit.index, "error": failure.message})
                    else:
                        again.append(task)
                        listener({"kind": "retry", "unit": task.unit.index, "error": failure.message})

    def stop(self) -> None:
        self._crew.stop()

    def _note_start(self, message: Message) -> None:
        """Workers that cannot even start will not do better the next time."""
        if message["kind"] in ("died", "failed"):
            self._deaths_at_start += 1
        if self._deaths_at_start > MAX_TRIES * self.workers:
            raise errors.BuildError(
                f"workers do not start: {message['error']['message']}", hint="see the messages above, or use -j 1"
            )


def _is_final(error: errors.TokenmillError, tries: int) -> bool:
    """Whether a unit has failed for good. An error of the whole build is raised."""
    if isinstance(error, FATAL):
        raise error
    return isinstance(error, errors.SourceError) or tries >= MAX_TRIES
