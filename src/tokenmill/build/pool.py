"""The pool: units shared out over a crew of workers.

    tasks  ->  idle worker  ->  done | failed | died
                   ^                      |
                   +---- up to 3 tries ---+--> failures, once all other units are through

A worker that dies (kill -9, out of memory, a crash in native code) costs its unit a retry. An
error that no retry can mend is not retried; an error that concerns the whole build stops it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection

from tokenmill import errors, records
from tokenmill.build.crew import Crew, Message
from tokenmill.build.executor import MAX_TRIES, Checked, Failure, Listener, Request, is_final
from tokenmill.build.task import Task, Work
from tokenmill.storage import Folder
from tokenmill.tokenizer.spec import TokenizerSpec


class Pool:
    """Units shared out over a crew."""

    def __init__(self, crew: Crew, folder: Folder, work: Work, spec: TokenizerSpec) -> None:
        self.workers = crew.workers
        self._crew = crew
        self._idle: list[Connection] = []
        self._failed_starts = 0
        crew.brief(
            {
                "path": sys.path,
                "output": folder.path,
                "work": dataclasses.asdict(work),
                "tokenizer": spec.describe(),
            }
        )

    def check(self, request: Request) -> Checked:
        """Have one worker look at the sources first, while the others still load."""
        asked: Connection | None = None
        checked: Checked | None = None
        while checked is None:
            if asked is None and self._idle:
                asked = self._idle.pop()
                self._crew.tell(asked, dataclasses.asdict(request))
            for link, message in self._crew.hear():
                if link is not asked:
                    self._welcome(link, message)
                    continue
                if message["kind"] == "checked":
                    self._idle.append(link)
                    checked = records.convert(Checked, message["checked"], where="checked")
                elif message["kind"] == "failed":
                    raise errors.from_record(message["error"])
                else:
                    asked = None
                    self._welcome(link, message)
        return checked

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
                self._crew.tell(link, dataclasses.asdict(task))
            if exhausted and not busy and not again:
                return failures
            for link, message in self._crew.hear():
                kind = message["kind"]
                if kind == "progress":
                    listener(message)
                    continue
                task = busy.pop(link, None)
                if task is None:
                    self._welcome(link, message)
                    continue
                if kind != "died":
                    self._idle.append(link)
                if kind == "done":
                    listener({"kind": "done", "unit": task.unit.index})
                else:
                    tries[task.unit.index] += 1
                    failure = errors.from_record(message["error"])
                    if is_final(failure, tries[task.unit.index]):
                        failures.append(Failure(task, failure))
                        listener({"kind": "failed", "unit": task.unit.index, "error": failure.message})
                    else:
                        again.append(task)
                        listener({"kind": "retry", "unit": task.unit.index, "error": failure.message})

    def stop(self) -> None:
        self._crew.stop()

    def _welcome(self, link: Connection, message: Message) -> None:
        """A worker is ready; or it is not, and will not do better the next time."""
        if message["kind"] == "ready":
            self._idle.append(link)
            return
        if link in self._idle:
            self._idle.remove(link)
        error = errors.from_record(message["error"])
        self._failed_starts += 1
        if message["kind"] == "failed" or self._failed_starts > MAX_TRIES * self.workers:
            raise error
