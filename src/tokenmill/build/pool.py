"""Executors: where units run. In this process, or in a pool of worker processes.

    tasks  ->  idle worker  ->  done | failed | died
                   ^                      |
                   +---- up to 3 tries ---+--> failures, once all other units are through

A worker that dies (kill -9, out of memory, a crash in native code) costs its unit a retry. An
error that no retry can mend is not retried; an error that concerns the whole build stops it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from typing import Any, Protocol

from tokenmill import errors
from tokenmill.build.unit import Task, Work, run_unit
from tokenmill.build.worker import EngineHolder, Reporter, receive, send
from tokenmill.tokenizer import TokenizerSpec

MAX_TRIES = 3
_STOP_SECONDS = 1.0
FATAL = (errors.DiskFullError, errors.DeterminismError, errors.BadDocumentError, errors.RecipeError)

# What an executor tells: {"kind": "progress" | "done" | "retry" | "failed", ...}
Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A unit that could not be done, and why."""

    task: Task
    error: errors.TokenmillError


class Executor(Protocol):
    workers: int

    def run(self, tasks: Iterator[Task], listener: Listener) -> list[Failure]:
        """Do the tasks in order, more or less; gives those that failed for good."""

    def stop(self) -> None:
        """Stop at once; nothing that was published is touched."""


class Inline:
    """One worker: this process itself."""

    workers = 1

    def __init__(self, work: Work, spec: TokenizerSpec) -> None:
        self._work = work
        self._engine = EngineHolder(spec)

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
            except FATAL:
                raise
            except errors.TokenmillError as error:
                failure = error
            except (MemoryError, OSError, RuntimeError, ValueError) as error:
                failure = errors.from_record(errors.to_record(error))
            if isinstance(failure, errors.SourceError) or attempt == MAX_TRIES:
                break
            listener({"kind": "retry", "unit": task.unit.index, "error": failure.message})
        return failure

    def stop(self) -> None:
        """Nothing runs but ourselves."""


class Pool:
    """Worker processes. They start before the plan is made, and load while it is."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._start_message: dict[str, Any] | None = None
        self._deaths = 0
        self._crew: dict[Connection, subprocess.Popen[bytes]] = {}
        for _ in range(workers):
            self._hire()

    def begin(self, work: Work, spec: TokenizerSpec) -> None:
        """Tell the workers what they work on."""
        self._start_message = {"path": sys.path, "work": asdict(work), "tokenizer": spec.describe()}
        for link in list(self._crew):
            self._brief(link)

    def run(self, tasks: Iterator[Task], listener: Listener) -> list[Failure]:
        assert self._start_message is not None, "begin the work first"
        tries: Counter[int] = Counter()
        again: list[Task] = []
        busy: dict[Connection, Task] = {}
        idle: list[Connection] = []
        failures: list[Failure] = []
        exhausted = False
        while True:
            while idle and (again or not exhausted):
                task = again.pop() if again else next(tasks, None)
                if task is None:
                    exhausted = True
                    break
                link = idle.pop()
                busy[link] = task
                with contextlib.suppress(OSError):  # a dead worker is noticed below
                    send(link, asdict(task))
            if exhausted and not busy and not again:
                return failures
            for link in mp_connection.wait(list(self._crew)):
                assert isinstance(link, Connection)
                message = self._hear(link)
                task = busy.get(link)
                if message["kind"] == "progress":
                    listener(message)
                elif message["kind"] == "ready":
                    idle.append(link)
                elif message["kind"] == "done":
                    assert task is not None
                    del busy[link]
                    idle.append(link)
                    listener({"kind": "done", "unit": task.unit.index})
                else:
                    busy.pop(link, None)
                    if link in self._crew:
                        idle.append(link)
                    elif link in idle:
                        idle.remove(link)
                    if task is None:
                        self._check_start(message)
                        continue
                    tries[task.unit.index] += 1
                    failure = self._judge(task, message, tries[task.unit.index])
                    if failure is None:
                        again.append(task)
                        listener({"kind": "retry", "unit": task.unit.index, "error": message["error"]["message"]})
                    else:
                        failures.append(failure)
                        listener({"kind": "failed", "unit": task.unit.index, "error": failure.error.message})

    def stop(self) -> None:
        crew, self._crew = self._crew, {}
        for process in crew.values():
            process.terminate()
        for link, process in crew.items():
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            link.close()

    def _hire(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            process = subprocess.Popen(
                [sys.executable, "-c", f"from tokenmill.build.worker import main; main({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        link = Connection(ours.detach())
        self._crew[link] = process
        if self._start_message is not None:
            self._brief(link)

    def _brief(self, link: Connection) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed when it is listened to
            send(link, self._start_message or {})

    def _hear(self, link: Connection) -> dict[str, Any]:
        """What a worker says; one that died is replaced, and its death is what it says."""
        try:
            return receive(link)
        except (EOFError, OSError):
            process = self._crew.pop(link)
            code = process.wait()
            link.close()
            self._hire()
            cause = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            error = {"kind": "BuildError", "message": f"a worker {cause}", "hint": "is there enough memory?"}
            return {"kind": "died", "error": error}

    def _judge(self, task: Task, message: dict[str, Any], tries: int) -> Failure | None:
        """A failure that is final, or None for another try."""
        error = errors.from_record(message["error"])
        if isinstance(error, FATAL):
            raise error
        if isinstance(error, errors.SourceError) or tries >= MAX_TRIES:
            return Failure(task, error)
        return None

    def _check_start(self, message: dict[str, Any]) -> None:
        """Workers that die before their first task will not do better the next time."""
        self._deaths += 1
        if self._deaths > MAX_TRIES * self.workers:
            raise errors.BuildError(
                f"workers do not start: {message['error']['message']}", hint="see the messages above, or use -j 1"
            )
