"""Units in this process, and what every process that does units needs: its tokenizer and its reports."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence

from tokenmill import errors
from tokenmill.build.crew import Message
from tokenmill.build.executor import MAX_TRIES, Failure, Listener, is_final, is_silent
from tokenmill.build.look import Look, look
from tokenmill.build.task import Task, Work
from tokenmill.build.unit import run_unit
from tokenmill.build.visits import Request
from tokenmill.cores import MEMORY_BUDGET
from tokenmill.storage import Folder
from tokenmill.tokenizer.encoded import Engine
from tokenmill.tokenizer.engine import open_engine
from tokenmill.tokenizer.parity import Trial, try_engine
from tokenmill.tokenizer.spec import TokenizerSpec

_RELOAD_ABOVE = MEMORY_BUDGET * 5 // 7
_REPORT_SECONDS = 0.2


class Inline:
    """An executor of one worker: this process itself."""

    workers = 1

    def __init__(self, folder: Folder, work: Work, spec: TokenizerSpec, engine: Engine) -> None:
        self._folder = folder
        self._work = work
        self._engine = EngineHolder(spec, engine)

    def look(self, request: Request) -> Look:
        return look(request, self._work)

    def encode(self, texts: Sequence[str]) -> Trial:
        return try_engine(self._engine(), texts)

    def run(self, tasks: Iterator[Task], listener: Listener) -> list[Failure]:
        """One unit after the other."""
        failures: list[Failure] = []
        for task in tasks:
            error = self._attempt(task, listener)
            if error is None:
                listener({"kind": "done", "unit": task.unit.index})
            else:
                failures.append(Failure(task, error))
                listener(_message("failed", task, error))
        return failures

    def _attempt(self, task: Task, listener: Listener) -> errors.TokenmillError | None:
        for attempt in range(1, MAX_TRIES + 1):
            try:
                with Reporter(listener, task.unit.index) as report:
                    run_unit(self._folder, self._work, task, self._engine, report)
                return None
            except Exception as error:  # whatever a unit dies of, the other units go on
                failure = errors.from_record(errors.to_record(error))
            if is_final(failure, attempt):
                break
            listener(_message("retry", task, failure))
        return failure

    def dismiss(self) -> None:
        """There is nobody but ourselves."""

    stop = dismiss


def _message(kind: str, task: Task, error: errors.TokenmillError) -> Message:
    return {"kind": kind, "unit": task.unit.index, "error": error.message, "silent": is_silent(error)}


class Reporter:
    """Gathers the progress of a unit, and passes it on a few times a second; the last of it where its `with` ends."""

    def __init__(self, say: Callable[[Message], None], unit: int) -> None:
        self._say = say
        self._unit = unit
        self._counts = (0, 0, 0)
        self._kept = False
        self._last = time.monotonic()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()

    def __call__(self, documents: int, tokens: int, planned_bytes: int, *, kept: bool = False) -> None:
        self._kept = kept
        now = (documents, tokens, planned_bytes)
        self._counts = tuple(a + b for a, b in zip(self._counts, now, strict=True))  # type: ignore[assignment]  # three
        if time.monotonic() - self._last >= _REPORT_SECONDS:
            self._flush()

    def _flush(self) -> None:
        documents, tokens, planned_bytes = self._counts
        counts = {"documents": documents, "tokens": tokens, "bytes": planned_bytes}
        self._say({"kind": "progress", "unit": self._unit, "kept": self._kept, **counts})
        self._counts, self._last = (0, 0, 0), time.monotonic()


class EngineHolder:
    """The worker's tokenizer. Its cache grows with the text; near the budget it is loaded anew."""

    def __init__(self, spec: TokenizerSpec, engine: Engine) -> None:
        self._spec = spec
        self._engine = engine
        self._before = resident_bytes()

    def __call__(self) -> Engine:
        # A program that holds much memory of its own would gain nothing by a reload.
        if resident_bytes() > max(_RELOAD_ABOVE, self._before + _RELOAD_ABOVE // 4):
            del self._engine
            gc.collect()
            _trim()
            self._engine = open_engine(self._spec)
            self._before = resident_bytes()
        return self._engine


def resident_bytes() -> int:
    """Memory that this process holds now; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _trim() -> None:
    """Give freed memory back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
