"""A crew of worker processes: hired, briefed, heard, replaced when they die.

Light on purpose: it is the first thing that a build loads, so that the workers load their heavy
libraries while the parent loads its own and makes the plan.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterable
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from typing import Any

from tokenmill.build.foreman import Foreman, new_foreman
from tokenmill.storage import Folder

Message = dict[str, Any]
STOP_SECONDS = 1.0


def send(link: Connection, message: Message) -> None:
    link.send_bytes(json.dumps(message).encode())


def receive(link: Connection) -> Message:
    return json.loads(link.recv_bytes())  # type: ignore[no-any-return]  # messages are objects


def needs_crew(workers: int, folder: Folder) -> bool:
    """Whether workers are processes of their own. For a store even one is: it loads while the store is asked, and
    computes a unit while the one before is put."""
    return workers > 1 or not folder.is_local


class Crew:
    """Worker processes and the sockets that lead to them."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._briefing: Message | None = None
        self._foremen = [new_foreman()]
        self._hired: dict[Connection, tuple[Foreman, int]] = {}
        for _ in range(workers):
            self._hire()

    def brief(self, briefing: Message) -> None:
        """Tell the workers, and those that will replace them, what they work on."""
        self._briefing = briefing
        for link in self._hired:
            self.tell(link, briefing)

    def tell(self, link: Connection, message: Message) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed when it is heard
            send(link, message)

    def hear(self) -> list[tuple[Connection, Message]]:
        """What workers say, as soon as one of them says something. The death of one is a message too."""
        return [(link, self._hear_one(link)) for link in _ready(self._hired)]

    def dismiss(self) -> None:
        """Tell all workers to go: to give its memory back takes each of them a moment."""
        for foreman in self._foremen:
            foreman.signal_all(signal.SIGTERM)

    def stop(self) -> None:
        """Stop all workers: politely, and a second later by force."""
        foremen, self._foremen = self._foremen, []
        for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, None)):
            if self._hired:
                for foreman in foremen:
                    foreman.signal_all(number)
                self._see_off(seconds)
        for foreman in foremen:
            foreman.leave()

    def _see_off(self, seconds: float | None) -> None:
        """Wait until all workers are gone, or for so long."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._hired:
            found = _ready(self._hired, None if deadline is None else max(0.0, deadline - time.monotonic()))
            for link in found:
                try:
                    link.recv_bytes()  # what it still had to say
                except (EOFError, OSError):
                    del self._hired[link]
                    link.close()
            if not found:
                return

    def _hear_one(self, link: Connection) -> Message:
        try:
            return receive(link)
        except (EOFError, OSError):
            foreman, worker = self._hired.pop(link)
            link.close()
            code = foreman.exit_code(worker)
            self._hire()
            error = {"kind": "BuildError", "message": f"a worker {_cause(code)}", "hint": _hint(code)}
            return {"kind": "died", "error": error}

    def _hire(self) -> None:
        if not self._foremen[-1].is_alive:
            self._foremen.append(new_foreman())
        foreman = self._foremen[-1]
        ours, theirs = socket.socketpair()
        with theirs:
            worker = foreman.hire(theirs)
        link = Connection(ours.detach())
        self._hired[link] = foreman, worker
        if self._briefing is not None:
            self.tell(link, self._briefing)


def _cause(code: int | None) -> str:
    if code is None:
        return "died"
    if code == -signal.SIGKILL:
        return "was killed by signal 9, probably because memory ran out"
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _hint(code: int | None) -> str:
    if code in (None, -signal.SIGKILL):
        return "use fewer workers with -j, give a lower --max-document-bytes, or allow more memory"
    return "the same command tries it again; if it ends like this each time, please report it, with the file"


def _ready(links: Iterable[Connection], seconds: float | None = None) -> list[Connection]:
    return [link for link in mp_connection.wait(list(links), seconds) if isinstance(link, Connection)]
