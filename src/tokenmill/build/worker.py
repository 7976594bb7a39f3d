"""A worker process: `python -m tokenmill.build.worker FD`.

It talks JSON over one socket: first the build's `Work` and tokenizer, then one task after the
other. A closed socket means that the parent is gone, and ends it. What it says is a hint; the
receipts on disk are the truth.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec

MEMORY_BUDGET = 700_000_000
_RELOAD_ABOVE = 500_000_000
_REPORT_SECONDS = 0.2


def send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(msgspec.json.encode(message))


def receive(connection: Connection) -> dict[str, Any]:
    return msgspec.json.decode(connection.recv_bytes())  # type: ignore[no-any-return]  # always an object


class Reporter:
    """Gathers progress, and passes it on a few times a second."""

    def __init__(self, say: Any) -> None:
        self._say = say
        self._counts = [0, 0, 0]
        self._last = time.monotonic()

    def __call__(self, documents: int, tokens: int, text_bytes: int) -> None:
        for i, count in enumerate((documents, tokens, text_bytes)):
            self._counts[i] += count
        if time.monotonic() - self._last >= _REPORT_SECONDS:
            self.flush()

    def flush(self) -> None:
        documents, tokens, text_bytes = self._counts
        self._say({"kind": "progress", "documents": documents, "tokens": tokens, "bytes": text_bytes})
        self._counts, self._last = [0, 0, 0], time.monotonic()


class EngineHolder:
    """The worker's tokenizer. Its cache grows with the text; past the budget it is loaded anew."""

    def __init__(self, spec: Any) -> None:
        from tokenmill.tokenizer import open_engine

        self._open = open_engine
        self._spec = spec
        self._engine = open_engine(spec)

    def __call__(self) -> Any:
        if _resident_bytes() > _RELOAD_ABOVE:
            del self._engine
            gc.collect()
            _trim()
            self._engine = self._open(self._spec)
        return self._engine


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    connection = Connection(socket.socket(fileno=fd).detach())
    # Everything heavy loads while the parent makes its plan.
    import pyarrow as pa

    from tokenmill import errors, records
    from tokenmill.build.unit import Task, Work, run_unit
    from tokenmill.storage.folder import Folder
    from tokenmill.tokenizer.spec import from_dataset

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    try:
        start = receive(connection)
        sys.path[:] = start["path"]
        work = records.convert(Work, start["work"], where="work")
        name = start["tokenizer"]["file"]
        content = Folder(work.output).read(name) if name else None
        engine = EngineHolder(from_dataset(start["tokenizer"], content))
        send(connection, {"kind": "ready"})
        report = Reporter(lambda message: send(connection, message))
        while True:
            task = records.convert(Task, receive(connection), where="task")
            try:
                run_unit(work, task, engine, report)
            except errors.TokenmillError as error:
                send(connection, {"kind": "failed", "error": errors.to_record(error)})
            except (MemoryError, OSError, RuntimeError, ValueError) as error:
                if isinstance(error, BrokenPipeError):
                    raise
                send(connection, {"kind": "failed", "error": errors.to_record(error)})
            else:
                report.flush()
                send(connection, {"kind": "done"})
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent is gone


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _trim() -> None:
    """Give freed memory back to the system, where the C library can."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
