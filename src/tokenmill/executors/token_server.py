"""The token server: encodes units once for all processes of a node that stream the same text.

    rank 0 ---+                    +--- worker: unit 7, piece by piece
    rank 1 ---+--- token server ---+--- worker: unit 8
    rank 2 ---+                    +--- worker: unit 9

A client (`token_client.py`) announces the units that it will need, and requests the pieces of one unit after the other.
Each unit is encoded once for all clients. Units that are needed soonest come first, so a client that is behind catches
up. Pieces travel as descriptors of anonymous memory. So the server holds only descriptors, and nothing has to be
removed, whichever process is killed.

Memory is bounded. Pieces that every client has passed are evicted when space is short. If that is not enough, workers
pause before their next piece, unless a client waits for it. A paused worker may be moved to a unit that a client waits
for; the rest of its own unit is encoded later.

The server ends with its last client. It imports little: its workers load the heavy libraries.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tokenmill import errors
from tokenmill.executors.forkserver import Message, WorkerProcesses, receive, receive_fd, send, send_fd

# Tokens that are kept for each worker, and once more.
_BYTES_PER_WORKER = 64 << 20
# Each piece takes a descriptor, so small ones count as this many bytes: that limits their number.
_LEAST_BYTES = 1 << 20
_MAX_TRIES = 3
# The option with which a stream needs no other process.
ALONE = "workers=0"


@dataclass(eq=False, slots=True)
class _Piece:
    """The tokens of some documents of a unit. `fd` is None if there are none."""

    message: Message
    fd: int | None
    size: int


@dataclass(eq=False, slots=True)
class _Run:
    """A unit from document `first` on: the kept pieces, by their first document, and the worker of the rest."""

    key: tuple[int, int, int]
    task: Message
    first: int
    end: int
    pieces: dict[int, _Piece] = field(default_factory=dict)
    is_whole: bool = True
    is_over: bool = False
    error: dict[str, str] | None = None
    tries: int = 0
    link: Connection | None = None
    is_paused: bool = False

    @property
    def can_serve(self) -> bool:
        """Whether a new client can get all of it."""
        return self.is_whole and self.error is None


@dataclass(eq=False, slots=True)
class _Client:
    """The units that a client wants, by their position in the stream, and the piece that it waits for."""

    link: Connection
    wanted: dict[int, _Run] = field(default_factory=dict)
    position: int = -1
    begin: int = 0
    is_waiting: bool = False


@dataclass(slots=True)
class _Need:
    """The soonest position at which any client wants a unit, and the first document of it that is still needed."""

    position: int
    begin: int
    is_waited_for: bool = False


class TokenServer:
    """The clients, the workers, and the pieces between them."""

    def __init__(self, workers: int, configuration: Message) -> None:
        self._processes = WorkerProcesses(workers, alone=ALONE)
        self._processes.configure(configuration)
        self._workers = workers
        self._room = _BYTES_PER_WORKER * (workers + 1)
        self._idle: list[Connection] = []
        self._at_work: dict[Connection, _Run] = {}
        self._clients: dict[Connection, _Client] = {}
        self._latest: dict[tuple[int, int, int], _Run] = {}
        self._runs: list[_Run] = []  # the least recently wanted first
        self._held = 0
        self._failed_starts = 0
        self._error: dict[str, str] | None = None

    def serve(self, first: Connection, listener: socket.socket | None) -> None:
        """Serve clients until the last one has left."""
        self._clients[first] = _Client(first)
        while True:
            waited: list[Any] = [*self._clients, *self._processes.links()]
            if listener is not None:
                waited.append(listener)
                listener.setblocking(False)
            for ready in mp_connection.wait(waited):
                if ready is listener:
                    self._accept(listener)
                elif isinstance(ready, Connection) and ready in self._clients:
                    self._receive_from_client(self._clients[ready])
                elif isinstance(ready, Connection):
                    self._receive_from_worker(ready)
            if not self._clients and (listener is None or not self._accept(listener)):
                if listener is not None:
                    listener.close()  # a client that comes too late starts a server of its own
                return
            self._schedule()

    def fail(self, error: errors.TokenmillError) -> None:
        """Tell the clients why the server ends."""
        for link in self._clients:
            _tell(link, {"kind": "failed", "error": errors.to_record(error)})

    def stop(self) -> None:
        self._processes.stop(patience=0)

    def _accept(self, listener: socket.socket | None) -> bool:
        assert listener is not None
        try:
            client, _ = listener.accept()
        except OSError:  # it gave up
            return False
        client.setblocking(True)
        if peer_user(client) != os.getuid():
            client.close()
            return False
        link = Connection(client.detach())
        self._clients[link] = _Client(link)
        return True

    def _receive_from_client(self, client: _Client) -> None:
        try:
            message = receive(client.link)
        except (EOFError, OSError):
            self._remove(client)
            return
        position = message["position"]
        if message["kind"] == "want":
            client.wanted[position] = self._run_for(message)
            return
        client.position, client.begin, client.is_waiting = position, message["begin"], True
        client.wanted = {one: run for one, run in client.wanted.items() if one >= position}

    def _remove(self, client: _Client) -> None:
        del self._clients[client.link]
        if self._clients:
            _tell(client.link, {"kind": "others"})
            client.link.close()
        else:  # it waits for the end of the server
            _tell(client.link, {"kind": "last", "server": os.getpid()})

    def _run_for(self, message: Message) -> _Run:
        task, first = message["task"], message["first"]
        key = (task["unit"]["index"], task["token_limit"], first)
        run = self._latest.get(key)
        if run is None or not run.can_serve:
            run = self._latest[key] = _Run(key, task, first, first)
        else:
            self._runs.remove(run)
        self._runs.append(run)
        return run

    def _receive_from_worker(self, link: Connection) -> None:
        message = self._processes.receive_from(link)
        kind, run = message["kind"], self._at_work.get(link)
        if kind == "free":
            self._at_work.pop(link, None)
            if run is not None and run.link is link:
                run.link, run.is_paused = None, False
            self._idle.append(link)
        elif kind == "piece" and run is not None:
            self._keep(run, link, message)
        elif kind == "end" and run is not None:
            run.is_over = True
        else:
            self._note_failure(link, run, message)

    def _keep(self, run: _Run, link: Connection, message: Message) -> None:
        fd = None
        if message["documents"]:
            try:
                fd = receive_fd(link)
            except (EOFError, OSError):
                return  # the end of its connection is noticed next
        size = _LEAST_BYTES if fd is None else max(_LEAST_BYTES, os.fstat(fd).st_size)
        run.pieces[message["begin"]] = _Piece(message, fd, size)
        run.end, run.is_paused, run.tries = message["end"], True, 0
        self._held += size
        self._failed_starts = 0

    def _note_failure(self, link: Connection, run: _Run | None, message: Message) -> None:
        """A worker died, or reported an error. A unit is tried a few times; a pool that cannot start has failed."""
        record = message["error"]
        if message["kind"] == "died":
            self._at_work.pop(link, None)
            if link in self._idle:
                self._idle.remove(link)
        if run is not None:
            if message["kind"] == "died":
                run.link, run.is_paused = None, False
            run.tries += 1
            if _is_final(errors.from_record(record), run.tries):
                run.error, run.is_over = record, True
            return
        self._failed_starts += 1
        if message["kind"] == "failed" or self._failed_starts > _MAX_TRIES * self._workers:
            self._error = record

    def _schedule(self) -> None:
        for client in self._clients.values():
            self._answer(client)
        needs = self._find_needs()
        self._evict_pieces(needs)
        self._resume_paused(needs)
        self._start(needs)

    def _answer(self, client: _Client) -> None:
        """Send the piece that a client waits for, if it is ready."""
        run = client.wanted.get(client.position)
        if not client.is_waiting or run is None:
            return
        piece = run.pieces.get(client.begin)
        if piece is not None:
            client.begin = piece.message["end"]
            answered = _tell(client.link, piece.message, piece.fd)
        elif self._error or run.error:
            answered = _tell(client.link, {"kind": "failed", "error": self._error or run.error})
        elif run.is_over:
            answered = _tell(client.link, {"kind": "end"})
        else:
            return
        client.is_waiting = not answered

    def _find_needs(self) -> dict[_Run, _Need]:
        """The units that clients need, each with its most urgent need."""
        needs: dict[_Run, _Need] = {}
        for client in self._clients.values():
            for position, run in client.wanted.items():
                need = needs.setdefault(run, _Need(position, run.end))
                need.position = min(need.position, position)
                need.begin = min(need.begin, client.begin if position == client.position else run.first)
                need.is_waited_for |= client.is_waiting and position == client.position
        return needs

    def _evict_pieces(self, needs: dict[_Run, _Need]) -> None:
        """Forget failed units and, once the memory is full, tokens that no client needs."""
        for run in list(self._runs):
            over, need = self._held > self._room, needs.get(run)
            if need is None and run.link is None and (over or not run.can_serve or not run.pieces):
                self._forget(run)
            elif need is not None and over:
                for begin in [begin for begin, piece in run.pieces.items() if piece.message["end"] <= need.begin]:
                    self._drop(run, begin)

    def _forget(self, run: _Run) -> None:
        for begin in list(run.pieces):
            self._drop(run, begin)
        self._runs.remove(run)
        if self._latest.get(run.key) is run:
            del self._latest[run.key]

    def _drop(self, run: _Run, begin: int) -> None:
        piece = run.pieces.pop(begin)
        run.is_whole = False
        self._held -= piece.size
        if piece.fd is not None:
            os.close(piece.fd)

    def _resume_paused(self, needs: dict[_Run, _Need]) -> None:
        """Resume workers, unless no client needs their unit, or memory is full and no client waits for it."""
        for link, run in list(self._at_work.items()):
            need = needs.get(run)
            if not run.is_paused:
                continue
            if need is None:
                self._leave(run, link)
            elif self._held < self._room or need.is_waited_for:
                run.is_paused = False
                self._processes.send(link, {"kind": "continue"})

    def _leave(self, run: _Run, link: Connection) -> None:
        """Take a paused worker off its unit. It will report that it is free."""
        run.is_paused, run.link = False, None
        del self._at_work[link]
        self._processes.send(link, {"kind": "leave"})

    def _start(self, needs: dict[_Run, _Need]) -> None:
        """Give units to idle workers: first those that a client waits for, then those that are wanted soonest."""
        missing = [(need, run) for run, need in needs.items() if run.link is None and not run.is_over]
        for need, run in sorted(missing, key=lambda pair: (not pair[0].is_waited_for, pair[0].position)):
            if self._held >= self._room and not need.is_waited_for:
                return
            if not self._idle:
                if need.is_waited_for:
                    self._preempt_worker(needs)
                return
            link = self._idle.pop()
            run.link = link
            self._at_work[link] = run
            self._processes.send(link, {**run.task, "first": run.end})

    def _preempt_worker(self, needs: dict[_Run, _Need]) -> None:
        """Take the paused worker of the unit that is needed last, unless a worker is about to be free anyway."""
        paused = [(needs[run].position, link) for link, run in self._at_work.items() if run.is_paused]
        if paused and len(self._at_work) == self._workers:
            link = max(paused, key=lambda pair: pair[0])[1]
            self._leave(self._at_work[link], link)


def _tell(link: Connection, message: Message, fd: int | None = None) -> bool:
    """Whether the message could be sent. The end of a dead client is noticed elsewhere."""
    try:
        send(link, message)
        if fd is not None:
            send_fd(link, fd)
    except OSError:
        return False
    return True


def _is_final(error: errors.TokenmillError, tries: int) -> bool:
    """Whether a unit has failed for good, by the rules of all executors."""
    from tokenmill.executors.base import is_final  # loads much, and is rarely needed

    try:
        return is_final(error, tries)
    except errors.TokenmillError:  # one that concerns all units
        return True


def peer_user(line: socket.socket) -> int:
    """The user at the other end of a Unix socket, on Linux."""
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(found[4:8], "little", signed=True)


def main(client: int, listener: int | None) -> NoReturn:
    """Serve the process at the other end of a socket, and those that connect to a listening one."""
    link = Connection(client)
    try:
        started = receive(link)
        server = TokenServer(started["workers"], started["configuration"])
    except (EOFError, OSError):
        os._exit(0)
    except errors.TokenmillError as error:
        _tell(link, {"kind": "failed", "error": errors.to_record(error)})
        os._exit(1)
    try:
        server.serve(link, None if listener is None else socket.socket(fileno=listener))
    except errors.TokenmillError as error:
        server.fail(error)
    finally:
        server.stop()
    os._exit(0)
