"""The main loop of a worker process. It gets its configuration, then its tasks, as JSON over a socket.

    compute   unit 7 | unit 9 | unit 12 |          one thread encodes,
    publish          | unit 7 | unit 9  | unit 12  another waits for the disk

A closed socket means that the parent ended, and ends the worker. Its messages are hints; the receipts on disk are the
truth.

For a text stream a worker writes nothing: it hands over the tokens of its unit, piece by piece, as descriptors of
anonymous memory, and makes the next piece when it is told to.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

import numpy.typing as npt

from tokenmill import errors, records
from tokenmill.executors.forkserver import Message, receive, send, send_fd
from tokenmill.resources import start_arrow
from tokenmill.storage.base import Storage, from_record
from tokenmill.storage.memory_maps import write_anonymous
from tokenmill.tokenizers.base import Engine
from tokenmill.tokenizers.engine import EngineHolder, open_engine, stand_in
from tokenmill.tokenizers.parity import try_engine
from tokenmill.tokenizers.spec import TokenizerSpec, from_dataset, resolve
from tokenmill.units.encode import TokenPiece, encode_unit
from tokenmill.units.probe import probe
from tokenmill.units.receipts import Receipt
from tokenmill.units.run import Reporter, begin_unit
from tokenmill.units.task import BuildConfig, ProbeRequest, UnitTask

T = TypeVar("T")

_STOPPED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class PreparedTokenizer:
    """The default tokenizer, opened before the build has said which one it uses."""

    spec: TokenizerSpec
    engine: Engine


def prepare_tokenizer(tokenizer: str) -> PreparedTokenizer:
    spec = resolve(tokenizer)
    return PreparedTokenizer(spec, open_engine(spec))


def main(fd: int, prepared: PreparedTokenizer | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_STOPPED))  # there is nothing to clean up yet
    start_arrow()
    code = 0
    try:
        _serve(_ParentSocket(fd), prepared)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent ended
    except SystemExit:
        code = _STOPPED
    # Units have cleaned up by now. Without this, the interpreter takes a quarter of a second to free its memory.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


class _ParentSocket:
    """The socket to the parent, shared by two threads."""

    def __init__(self, fd: int) -> None:
        self._link = Connection(socket.socket(fileno=fd).detach())
        self._lock = threading.Lock()

    def receive(self) -> Message:
        return receive(self._link)

    def send(self, message: Message, arrays: Sequence[npt.NDArray[Any]] = ()) -> None:
        """Send a message, and behind it a descriptor of memory that holds the arrays, if there are any."""
        fd = write_anonymous(arrays) if arrays else None
        try:
            with self._lock:
                send(self._link, message)
                if fd is not None:
                    send_fd(self._link, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def attempt(self, unit: int | None, part: Callable[[], T]) -> T | None:
        """The result of a part of the work; an error of it is sent to the parent, and the result is None."""
        try:
            return part()
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:
            if not errors.is_failure(error):
                raise
            self.send({"kind": "failed", "unit": unit, "error": errors.to_record(error)})
            return None


def _serve(line: _ParentSocket, prepared: PreparedTokenizer | None) -> None:
    configuration = line.receive()
    sys.path[:] = configuration["path"]
    try:
        config = records.convert(BuildConfig, configuration["work"], where="work")
        folder = from_record(configuration["output"]) if "output" in configuration else None
        spec = _tokenizer(configuration, folder)
        if not config.filter:
            stand_in()
        engine = EngineHolder(spec, prepared.engine if prepared and prepared.spec == spec else open_engine(spec))
    except errors.TokenmillError as error:
        line.send({"kind": "failed", "unit": None, "error": errors.to_record(error)})
        return

    if folder is None:
        _serve_tokens(line, config, configuration["split"], engine)

    def begin(task: UnitTask) -> Callable[[], Receipt]:
        with Reporter(line.send, task.unit.index) as report:
            return begin_unit(folder, config, task, engine, report)

    with ThreadPoolExecutor(1) as disk:
        before = disk.submit(lambda: None)
        line.send({"kind": "free"})
        while True:
            message = line.receive()
            if "unit" not in message:
                answer = line.attempt(None, lambda: answer_to(message, config, engine()))  # noqa: B023 - called at once
                if answer is not None:
                    line.send({"kind": "answer", "answer": answer})
                continue
            task = records.convert(UnitTask, message, where="task")
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(_STOPPED))  # from here on there is
            finish = line.attempt(task.unit.index, lambda: begin(task))  # noqa: B023 - as above
            before.result()
            if finish is not None:
                before = disk.submit(_publish, line, task.unit.index, finish)
            line.send({"kind": "free"})


def _tokenizer(configuration: Message, folder: Storage | None) -> TokenizerSpec:
    """The tokenizer, whose file is in the output folder or, if nothing is written, in the configuration itself."""
    name = configuration["tokenizer"]["file"]
    if folder is not None:
        return from_dataset(configuration["tokenizer"], folder.read(name) if name else None)
    return from_dataset(configuration["tokenizer"], base64.b64decode(configuration["content"]) if name else None)


def _serve_tokens(line: _ParentSocket, config: BuildConfig, split: int, engine: Callable[[], Engine]) -> NoReturn:
    """Hand over the tokens of one split, unit after unit."""
    while True:
        line.send({"kind": "free"})
        message = line.receive()
        first = message.pop("first")
        task = records.convert(UnitTask, message, where="task")
        with contextlib.closing(encode_unit(config, task, engine, split, first=first)) as pieces:
            line.attempt(task.unit.index, lambda: _send_pieces(line, pieces))


def _send_pieces(line: _ParentSocket, pieces: Iterator[TokenPiece]) -> None:
    for piece in pieces:
        counts = {"documents": len(piece.lengths), "tokens": len(piece.tokens), "all_tokens": piece.all_tokens}
        message = {"kind": "piece", "begin": piece.begin, "end": piece.end, "dropped": piece.dropped, **counts}
        # The lengths come first: they need the alignment.
        line.send(message, [piece.lengths, piece.tokens] if len(piece.lengths) else [])
        if line.receive()["kind"] != "continue":
            return
    line.send({"kind": "end"})


def answer_to(question: Message, config: BuildConfig, engine: Engine) -> Message:
    """Answer a question of the preflight: probe the sources, or encode some texts."""
    if "texts" in question:
        return dataclasses.asdict(try_engine(engine, question["texts"]))
    return dataclasses.asdict(probe(records.convert(ProbeRequest, question["request"], where="request"), config))


def _publish(line: _ParentSocket, unit: int, finish: Callable[[], Receipt]) -> None:
    if line.attempt(unit, finish) is not None:
        line.send({"kind": "done", "unit": unit})
