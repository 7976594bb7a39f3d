"""The client of the token server: reads the tokens of units, which the ranks of a node share.

    TokenClient.read(unit 7)  ->  pieces of tokens
                   units 8, 9, ... are being made meanwhile

The first client starts the server (`token_server.py`), and others find it by name: a Unix socket in Linux's abstract
namespace, which is not a file and vanishes with its server. If the server dies, its clients notice; one of them starts
another one, and each continues at the piece that it needs next. On other systems every client has a server of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill import errors
from tokenmill.dataset.bin_idx import numpy_dtype
from tokenmill.errors import BuildError, StateError
from tokenmill.executors.forkserver import Message, receive, receive_fd, send, start_python
from tokenmill.executors.token_server import ALONE, peer_user
from tokenmill.storage.memory_maps import map_anonymous
from tokenmill.units.encode import TokenPiece
from tokenmill.units.receipts import NO_LIMIT
from tokenmill.units.task import UnitTask

_PROGRAM = """
import gc; gc.disable()
from tokenmill.executors import token_server
gc.enable(); token_server.main(*{fds})
"""
_MAX_TRIES = 3
_BACKLOG = 4096
_RETRY_SECONDS = 0.02
_CONNECT_SECONDS = 10.0
# How long to wait for the server and its workers to end, if no other client needs them.
_END_SECONDS = 1.5
_Data = npt.NDArray[np.uint8]


class TokenClient:
    """A client of a token server.

    `configuration` is what workers need, `name` is equal for clients that share a server, and `upcoming`, called
    with the current position and a later one, gives the task at the later one, or None if it will not be wanted.
    """

    def __init__(
        self, workers: int, configuration: Message, name: str, upcoming: Callable[[int, int], UnitTask | None]
    ) -> None:
        self._workers = workers
        self._configuration = configuration
        self._name = f"\0tokenmill-{os.getuid()}-{name}" if sys.platform == "linux" else ""
        self._upcoming = upcoming
        self._dtype = numpy_dtype(configuration["work"]["dtype"])
        self._link: Connection | None = None
        self._process = os.getpid()
        self._announced: dict[int, int] = {}  # the token limits of units, by position
        self._awake, self._waker = socket.socketpair()

    def read(self, position: int, task: UnitTask, first: int) -> Generator[TokenPiece]:
        """The pieces of a unit, from document `first` on. The units behind it are made meanwhile."""
        losses, rest = 0, task
        while True:
            try:
                self._announce(position, task.token_limit, rest, first)
                message, data = self._ask(position, first)
            except (EOFError, OSError):
                losses += 1
                self._on_server_death(losses)
                continue
            if message["kind"] == "failed":
                raise errors.from_record(message["error"])
            if message["kind"] == "end":
                return
            piece = self._piece(message, data)
            first, losses = piece.end, 0
            if task.token_limit != NO_LIMIT:
                rest = replace(rest, token_limit=rest.token_limit - piece.all_tokens)
            yield piece

    def abort(self) -> None:
        """Make a `read` in another thread raise."""
        self._waker.send(b".")

    def close(self) -> None:
        """Leave the server. If no other client uses it, wait until it and its workers have ended."""
        try:
            if self._link is not None and self._process == os.getpid():
                deadline = time.monotonic() + _END_SECONDS
                server = _leave(self._link, deadline)
                # Its socket is closed a moment before it can be waited for.
                while server in _started and time.monotonic() < deadline:
                    _reap()
                    time.sleep(0.001)
        finally:
            self._drop_link()
            self._awake.close()
            self._waker.close()

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        _reap()

    def _announce(self, position: int, limit: int, task: UnitTask, first: int) -> None:
        """Tell the server which units will be wanted, as far as it does not know."""
        if self._process != os.getpid():
            raise StateError(
                "this iterator was started in another process, which still uses its connection",
                hint="call iter() again in this process: it continues where the other one was at the fork",
            )
        if self._link is None:
            self._link, self._announced = self._connect(), {}
        if self._announced.get(position) != limit:
            self._want(position, task, first)
            self._announced[position] = limit
        for later in range(position + 1, position + 1 + self._workers):
            upcoming = None if later in self._announced else self._upcoming(position, later)
            if upcoming is not None:
                self._want(later, upcoming, 0)
                self._announced[later] = upcoming.token_limit
        self._announced.pop(position - 1, None)

    def _want(self, position: int, task: UnitTask, first: int) -> None:
        assert self._link is not None
        send(self._link, {"kind": "want", "position": position, "first": first, "task": msgspec.to_builtins(task)})

    def _ask(self, position: int, begin: int) -> tuple[Message, _Data]:
        """Wait for the piece of a unit that begins with a document, or for the end of the unit."""
        assert self._link is not None
        send(self._link, {"kind": "next", "position": position, "begin": begin})
        if self._awake in mp_connection.wait([self._link, self._awake]):
            raise StateError("this iterator was closed", hint="call iter() again: it continues where this one was")
        return _receive_piece(self._link)

    def _piece(self, message: Message, data: _Data) -> TokenPiece:
        lengths_end = message["documents"] * 8
        return TokenPiece(
            begin=message["begin"],
            end=message["end"],
            tokens=data[lengths_end:].view(self._dtype),
            lengths=data[:lengths_end].view(np.int64),
            all_tokens=message["all_tokens"],
            dropped=message["dropped"],
        )

    def _on_server_death(self, losses: int) -> None:
        """The server has died, or it ended just now because all other clients had left."""
        self._drop_link()
        if losses >= _MAX_TRIES:
            raise BuildError(
                f"the processes that tokenize ended {losses} times before the next piece of text was done",
                hint="use fewer `workers`, give a lower `max_document_bytes`, or allow more memory",
            )

    def _connect(self) -> Connection:
        """A connection to the server of this name, which is started if there is none."""
        deadline = time.monotonic() + _CONNECT_SECONDS
        while self._name and time.monotonic() < deadline:
            with contextlib.suppress(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as line:
                line.connect(self._name)
                if peer_user(line) != os.getuid():
                    break  # another user has taken the name
                return Connection(line.detach())
            listener = _listen(self._name)
            if listener is not None:
                with listener:
                    return self._start_server(listener)
            time.sleep(_RETRY_SECONDS)  # another client has taken the name, and listens in a moment
        return self._start_server(None)

    def _start_server(self, listener: socket.socket | None) -> Connection:
        ours, theirs = socket.socketpair()
        link = Connection(ours.detach())
        fds = [theirs.fileno()] if listener is None else [theirs.fileno(), listener.fileno()]
        with theirs:
            process = start_python(_PROGRAM.format(fds=fds), *fds, alone=ALONE)
        # It may serve others when this process has ended, which is not worth the warning that Popen would give.
        process.returncode = 0
        _started.add(process.pid)
        send(link, {"workers": self._workers, "configuration": self._configuration})
        return link


# Servers that this process has started, until their exit codes are collected.
_started: set[int] = set()


def _reap() -> None:
    """Collect the exit codes of servers that have ended."""
    for process in list(_started):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(process, os.WNOHANG) == (0, 0):
                continue
        _started.discard(process)


def _listen(name: str) -> socket.socket | None:
    """A socket that listens by this name; None if the name is taken."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return listener


def _receive_piece(link: Connection) -> tuple[Message, _Data]:
    """A message, and the memory behind it if it announces documents."""
    message = receive(link)
    if not message.get("documents"):
        return message, np.zeros(0, np.uint8)
    fd = receive_fd(link)
    try:
        return message, map_anonymous(fd)
    finally:
        os.close(fd)


def _leave(link: Connection, deadline: float) -> int:
    """Send nothing any more, and wait for the answer: the process of the server, if it has ended; else 0."""
    server = 0
    with contextlib.suppress(EOFError, OSError):
        with socket.fromfd(link.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.shutdown(socket.SHUT_WR)  # heard even if a forked process has this socket open
        while link.poll(max(0.0, deadline - time.monotonic())):
            message, _ = _receive_piece(link)
            if message["kind"] == "others":
                return 0
            server = message.get("server", 0)
    return server
