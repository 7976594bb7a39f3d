"""The process pool: units run in worker processes of this machine.

    tasks  ->  free worker  ->  done | failed | died
                   ^                      |
                   +---- up to 3 tries ---+--> failures, once all other units are done

A worker gets its next unit while the one before is still being written to disk. A worker that dies (kill -9, out of
memory, a crash in native code) costs its units a retry. Errors of a source are not retried, and an error that concerns
the whole build stops it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import msgspec

from tokenmill import errors, records
from tokenmill.executors.base import MAX_TRIES, Listener, UnitFailure, retry_or_fail
from tokenmill.executors.forkserver import Message, WorkerProcesses
from tokenmill.storage.base import Storage
from tokenmill.tokenizers.parity import Trial
from tokenmill.tokenizers.spec import TokenizerSpec
from tokenmill.units.probe import ProbeResult
from tokenmill.units.task import BuildConfig, ProbeRequest, UnitTask


class ProcessPool:
    """An executor of several processes."""

    def __init__(self, processes: WorkerProcesses, folder: Storage, config: BuildConfig, spec: TokenizerSpec) -> None:
        self.workers = processes.workers
        self._processes = processes
        self._idle: list[Connection] = []
        self._failed_starts = 0
        processes.configure(
            {
                "path": sys.path,
                "output": folder.to_record(),
                "work": dataclasses.asdict(config),
                "tokenizer": spec.describe(),
            }
        )

    def probe(self, request: ProbeRequest) -> ProbeResult:
        return records.convert(ProbeResult, self._ask({"request": dataclasses.asdict(request)}), where="probe")

    def encode(self, texts: Sequence[str]) -> Trial:
        return records.convert(Trial, self._ask({"texts": texts}), where="trial")

    def _ask(self, question: Message) -> Message:
        """Ask an idle worker, and another one if that dies of the question."""
        asked: Connection | None = None
        answer: Message | None = None
        while answer is None:
            if asked is None and self._idle:
                asked = self._idle.pop()
                self._processes.send(asked, question)
            for link, message in self._processes.receive():
                if link is not asked:
                    self._on_idle(link, message)
                elif message["kind"] == "answer":
                    self._idle.append(link)
                    answer = message["answer"]
                elif message["kind"] == "died":
                    asked = None
                    self._on_idle(link, message)
                else:
                    raise errors.from_record(message["error"])
        return answer

    def run(self, tasks: Iterator[UnitTask], listener: Listener) -> list[UnitFailure]:
        tries: Counter[int] = Counter()
        again: list[UnitTask] = []
        begun: dict[Connection, dict[int, UnitTask]] = {}
        failures: list[UnitFailure] = []
        exhausted = False
        while True:
            exhausted = self._assign_tasks(tasks, again, begun) or exhausted
            if exhausted and not again and not any(begun.values()):
                return failures
            for link, message in self._processes.receive():
                kind = message["kind"]
                if kind == "progress":
                    listener(message)
                elif kind == "done":
                    del begun[link][message["unit"]]
                    listener({"kind": "done", "unit": message["unit"]})
                elif kind == "free" or not begun.get(link):
                    self._on_idle(link, message)
                else:
                    # A worker has at most two units: one that it computes, and one that it writes to disk.
                    lost = begun.pop(link) if kind == "died" else {0: begun[link].pop(message["unit"])}
                    if link in self._idle and kind == "died":
                        self._idle.remove(link)
                    error = errors.from_record(message["error"])
                    for task in lost.values():
                        retry_or_fail(task, error, tries, again, failures, listener)

    def _assign_tasks(
        self, tasks: Iterator[UnitTask], again: list[UnitTask], begun: dict[Connection, dict[int, UnitTask]]
    ) -> bool:
        """Give a task to every idle worker. True if there were too few."""
        while self._idle:
            task = again.pop() if again else next(tasks, None)
            if task is None:
                return True
            link = self._idle.pop()
            begun.setdefault(link, {})[task.unit.index] = task
            self._processes.send(link, msgspec.to_builtins(task))
        return False

    def release(self) -> None:
        self._processes.release()

    def stop(self) -> None:
        self._processes.stop()

    def _on_idle(self, link: Connection, message: Message) -> None:
        """Note an idle worker. Raise if workers could not start, or keep dying before their first unit."""
        if message["kind"] == "free":
            self._idle.append(link)
            return
        if link in self._idle:
            self._idle.remove(link)
        error = errors.from_record(message["error"])
        self._failed_starts += 1
        if message["kind"] == "failed" or self._failed_starts > MAX_TRIES * self.workers:
            raise error
