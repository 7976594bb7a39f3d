"""A worker process. It talks JSON over one socket: first the briefing, then task after task.

A closed socket means that the parent is gone, and ends it. What it says is a hint; the receipts
on disk are the truth.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pyarrow as pa

from tokenmill import errors, records
from tokenmill.build.crew import Message, receive, send
from tokenmill.build.unit import Task, Work, run_unit
from tokenmill.sources.startup import start_without_pandas
from tokenmill.storage import Folder
from tokenmill.tokenizer import Engine, TokenizerSpec, open_engine
from tokenmill.tokenizer.spec import from_dataset

MEMORY_BUDGET = 700_000_000
_RELOAD_ABOVE = 500_000_000
_REPORT_SECONDS = 0.2


class Reporter:
    """Gathers progress, and passes it on a few times a second."""

    def __init__(self, say: Callable[[Message], None]) -> None:
        self._say = say
        self._counts = (0, 0, 0)
        self._last = time.monotonic()

    def __call__(self, documents: int, tokens: int, text_bytes: int) -> None:
        now = (documents, tokens, text_bytes)
        self._counts = tuple(a + b for a, b in zip(self._counts, now, strict=True))  # type: ignore[assignment]  # three
        if time.monotonic() - self._last >= _REPORT_SECONDS:
            self.flush()

    def flush(self) -> None:
        documents, tokens, text_bytes = self._counts
        self._say({"kind": "progress", "documents": documents, "tokens": tokens, "bytes": text_bytes})
        self._counts, self._last = (0, 0, 0), time.monotonic()


class EngineHolder:
    """The worker's tokenizer. Its cache grows with the text; near the budget it is loaded anew."""

    def __init__(self, spec: TokenizerSpec, engine: Engine) -> None:
        self._spec = spec
        self._engine = engine

    def __call__(self) -> Engine:
        if resident_bytes() > _RELOAD_ABOVE:
            del self._engine
            gc.collect()
            _trim()
            self._engine = open_engine(self._spec)
        return self._engine


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    start_without_pandas()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    link = Connection(socket.socket(fileno=fd).detach())
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        _serve(link)


def _serve(link: Connection) -> None:
    briefing = receive(link)
    sys.path[:] = briefing["path"]
    work = records.convert(Work, briefing["work"], where="work")
    name = briefing["tokenizer"]["file"]
    spec = from_dataset(briefing["tokenizer"], Folder(work.output).read(name) if name else None)
    engine = EngineHolder(spec, open_engine(spec))
    send(link, {"kind": "ready"})
    report = Reporter(lambda message: send(link, message))
    while True:
        task = records.convert(Task, receive(link), where="task")
        try:
            run_unit(work, task, engine, report)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # whatever a unit dies of, the parent must hear of it
            send(link, {"kind": "failed", "error": errors.to_record(error)})
        else:
            report.flush()
            send(link, {"kind": "done"})


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
