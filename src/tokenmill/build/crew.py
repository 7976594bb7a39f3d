"""A crew of worker processes: hired, briefed, heard, replaced when they die.

Light on purpose: it is the first thing that a build loads, so that the workers load their heavy
libraries while the parent loads its own and makes the plan.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from typing import Any

Message = dict[str, Any]
STOP_SECONDS = 1.0
# What is loaded stays: looking through it for garbage again and again makes loading slower.
_START = "import gc; gc.disable(); from tokenmill.build.worker import main; gc.freeze(); gc.enable(); main({fd})"


def send(link: Connection, message: Message) -> None:
    link.send_bytes(json.dumps(message).encode())


def receive(link: Connection) -> Message:
    return json.loads(link.recv_bytes())  # type: ignore[no-any-return]  # messages are objects


class Crew:
    """Worker processes and the sockets that lead to them."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._briefing: Message | None = None
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        for _ in range(workers):
            self._hire()

    def brief(self, briefing: Message) -> None:
        """Tell the workers, and those that will replace them, what they work on."""
        self._briefing = briefing
        for link in self._processes:
            self.tell(link, briefing)

    def tell(self, link: Connection, message: Message) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed when it is heard
            send(link, message)

    def hear(self) -> list[tuple[Connection, Message]]:
        """What workers say, as soon as one of them says something. The death of one is a message too."""
        return [(link, self._hear_one(link)) for link in self._ready()]

    def stop(self) -> None:
        """Stop all workers: politely, and a second later by force."""
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for link, process in processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            link.close()

    def _ready(self) -> list[Connection]:
        return [link for link in mp_connection.wait(list(self._processes)) if isinstance(link, Connection)]

    def _hear_one(self, link: Connection) -> Message:
        try:
            return receive(link)
        except (EOFError, OSError):
            process = self._processes.pop(link)
            code = process.wait()
            link.close()
            self._hire()
            cause = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            error = {"kind": "BuildError", "message": f"a worker {cause}", "hint": "is there enough memory?"}
            return {"kind": "died", "error": error}

    def _hire(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START.format(fd=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # A worker is one thread; numpy would start one for each core, and take a tenth of a second for it.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        link = Connection(ours.detach())
        self._processes[link] = process
        if self._briefing is not None:
            self.tell(link, self._briefing)
