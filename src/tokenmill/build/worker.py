"""A worker process. It talks JSON over one socket: first the briefing, then task after task.

A closed socket means that the parent is gone, and ends it. What it says is a hint; the receipts
on disk are the truth.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection

import pyarrow as pa

from tokenmill import errors, records
from tokenmill.build.check import check
from tokenmill.build.crew import receive, send
from tokenmill.build.executor import Request
from tokenmill.build.inline import EngineHolder, Reporter
from tokenmill.build.task import Task, Work
from tokenmill.build.unit import run_unit
from tokenmill.sources.startup import start_without_pandas
from tokenmill.storage import Folder
from tokenmill.tokenizer.engine import open_engine
from tokenmill.tokenizer.spec import from_dataset


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    start_without_pandas()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    link = Connection(socket.socket(fileno=fd).detach())
    code = 0
    try:
        _serve(link)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
    except SystemExit:
        code = 128 + signal.SIGTERM
    # Units have tidied up by now; the interpreter would take a quarter of a second to free what ends with it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(link: Connection) -> None:
    briefing = receive(link)
    sys.path[:] = briefing["path"]
    work = records.convert(Work, briefing["work"], where="work")
    folder = Folder(briefing["output"])
    name = briefing["tokenizer"]["file"]
    try:
        spec = from_dataset(briefing["tokenizer"], folder.read(name) if name else None)
        engine = EngineHolder(spec, open_engine(spec))
    except errors.TokenmillError as error:
        send(link, {"kind": "failed", "error": errors.to_record(error)})
        return
    send(link, {"kind": "ready"})
    report = Reporter(lambda message: send(link, message))
    while True:
        message = receive(link)
        try:
            if "tasks" in message:
                request = records.convert(Request, message, where="request")
                checked = check(request, work, spec, engine())
                send(link, {"kind": "checked", "checked": dataclasses.asdict(checked)})
                continue
            run_unit(folder, work, records.convert(Task, message, where="task"), engine, report)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # whatever a unit dies of, the parent must hear of it
            send(link, {"kind": "failed", "error": errors.to_record(error)})
        else:
            report.flush()
            send(link, {"kind": "done"})
