"""A worker process. It talks JSON over one socket: first the briefing, then task after task.

    compute   unit 7 | unit 9 | unit 12 |          one thread encodes,
    publish          | unit 7 | unit 9  | unit 12  another waits for the disk

A closed socket means that the parent is gone, and ends it. What it says is a hint; the receipts
on disk are the truth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

from tokenmill import errors, records
from tokenmill.executors.forkserver import Message, receive, send
from tokenmill.executors.in_process import Reporter
from tokenmill.resources import start_arrow
from tokenmill.storage.base import from_record
from tokenmill.tokenizers.base import Engine
from tokenmill.tokenizers.engine import EngineHolder, open_engine, stand_in
from tokenmill.tokenizers.parity import try_engine
from tokenmill.tokenizers.spec import TokenizerSpec, from_dataset, resolve
from tokenmill.units.probe import probe
from tokenmill.units.receipts import Receipt
from tokenmill.units.run import begin_unit
from tokenmill.units.task import BuildConfig, ProbeRequest, UnitTask

T = TypeVar("T")

_STOPPED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Ready:
    """A tokenizer that is opened before it is known whether it is the one."""

    spec: TokenizerSpec
    engine: Engine


def get_ready(tokenizer: str) -> Ready:
    spec = resolve(tokenizer)
    return Ready(spec, open_engine(spec))


def main(fd: int, ready: Ready | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_STOPPED))  # there is nothing to tidy up yet
    start_arrow()
    code = 0
    try:
        _serve(_Line(fd), ready)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
    except SystemExit:
        code = _STOPPED
    # Units have tidied up by now; the interpreter would take a quarter of a second to free what ends with it.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


class _Line:
    """The socket to the parent. Two threads speak on it, one at a time."""

    def __init__(self, fd: int) -> None:
        self._link = Connection(socket.socket(fileno=fd).detach())
        self._lock = threading.Lock()

    def hear(self) -> Message:
        return receive(self._link)

    def say(self, message: Message) -> None:
        with self._lock:
            send(self._link, message)

    def attempt(self, unit: int | None, part: Callable[[], T]) -> T | None:
        """What a part of the work gives; whatever it dies of, the parent hears of it, and the result is None."""
        try:
            return part()
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:
            if not errors.is_failure(error):
                raise
            self.say({"kind": "failed", "unit": unit, "error": errors.to_record(error)})
            return None


def _serve(line: _Line, ready: Ready | None) -> None:
    briefing = line.hear()
    sys.path[:] = briefing["path"]
    try:
        work = records.convert(BuildConfig, briefing["work"], where="work")
        folder = from_record(briefing["output"])
        name = briefing["tokenizer"]["file"]
        spec = from_dataset(briefing["tokenizer"], folder.read(name) if name else None)
        if not work.filter:
            stand_in()
        engine = EngineHolder(spec, ready.engine if ready and ready.spec == spec else open_engine(spec))
    except errors.TokenmillError as error:
        line.say({"kind": "failed", "unit": None, "error": errors.to_record(error)})
        return

    def begin(task: UnitTask) -> Callable[[], Receipt]:
        with Reporter(line.say, task.unit.index) as report:
            return begin_unit(folder, work, task, engine, report)

    with ThreadPoolExecutor(1) as disk:
        before = disk.submit(lambda: None)
        line.say({"kind": "free"})
        while True:
            message = line.hear()
            if "unit" not in message:
                answer = line.attempt(None, lambda: answer_to(message, work, engine()))  # noqa: B023 - called at once
                if answer is not None:
                    line.say({"kind": "answer", "answer": answer})
                continue
            task = records.convert(UnitTask, message, where="task")
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(_STOPPED))  # from here on there is
            finish = line.attempt(task.unit.index, lambda: begin(task))  # noqa: B023 - as above
            before.result()
            if finish is not None:
                before = disk.submit(_publish, line, task.unit.index, finish)
            line.say({"kind": "free"})


def answer_to(question: Message, work: BuildConfig, engine: Engine) -> Message:
    """What is asked before the work: to look at the sources, or to encode some texts."""
    if "texts" in question:
        return dataclasses.asdict(try_engine(engine, question["texts"]))
    return dataclasses.asdict(probe(records.convert(ProbeRequest, question["request"], where="request"), work))


def _publish(line: _Line, unit: int, finish: Callable[[], Receipt]) -> None:
    if line.attempt(unit, finish) is not None:
        line.say({"kind": "done", "unit": unit})
