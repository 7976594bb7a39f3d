"""The foreman: a process that loads what every worker needs once, and then forks a worker whenever one is wanted.

    parent --- a socket and "hire" ---> foreman --- fork ---> worker, with that socket
           <-- what it died of --------                       (and no thread but its own)

To load takes longer than to fork by far, and memory that was loaded once is shared. Nothing runs in
the foreman but this, so it has a single thread, and forking is safe.

A crew of worker processes: hired, briefed, heard, replaced when they die.

Light on purpose: it is the first thing that a build loads, so that the workers load their heavy
libraries while the parent loads its own and makes the plan.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tokenmill.errors import BuildError, TokenmillError, hint_for
from tokenmill.storage.local import Folder

# What is loaded stays: looking through it for garbage again and again makes loading slower.
_PROGRAM = """
import gc; gc.disable()
from tokenmill.executors import forkserver, worker
forkserver.serve({fd}, {tokenizer!r})
"""
# What a process that does units has in its environment when it starts, here and on a cluster.
WORKER_ENVIRONMENT = {
    # numpy would start a thread for each core as it loads, and take a tenth of a second; Arrow's allocator starts one.
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # Every batch takes as much as the one before: what was given back to the system in between would be faulted in
    # again. glibc can be told to keep it, in one heap for all threads, and Arrow to ask glibc.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
_MESSAGE = struct.Struct("<i")
_START_WORKER = -1
LEAVE_SECONDS = 1.0
_unused: list[ForkServer] = []


class ForkServer:
    """The parent's view: workers have the numbers 0, 1, 2, ... in the order in which they were hired."""

    def __init__(self, tokenizer: str = "") -> None:
        self._line, theirs = socket.socketpair()
        self._is_heard = True
        self._hired = 0
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM.format(fd=theirs.fileno(), tokenizer=tokenizer)],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **WORKER_ENVIRONMENT},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                self._line.close()
                hint = hint_for(error, "raise the limits of processes and memory (ulimit -u, ulimit -v)")
                raise BuildError(f"workers cannot be started: {error}", hint=f"{hint}; -j 1 does without") from None

    @property
    def is_alive(self) -> bool:
        # A process that dies closes its line first, and is a dead one some time later.
        # Dead, it still keeps its number, which is that of its workers' group, until it leaves.
        return self._is_heard and os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def hire(self, link: socket.socket) -> int:
        """Have a worker that listens to `link`. If the foreman is dead, `link` is closed, as if the worker were."""
        try:
            socket.send_fds(self._line, [_MESSAGE.pack(_START_WORKER)], [link.fileno()])
        except OSError:
            self._is_heard = False
        self._hired += 1
        return self._hired - 1

    def exit_code(self, worker: int) -> int | None:
        """What a worker that is gone ended with, negative for a signal; None if nobody knows."""
        try:
            self._line.send(_MESSAGE.pack(worker))
            code: int = _MESSAGE.unpack(self._line.recv(_MESSAGE.size))[0]
        except (OSError, struct.error):
            self._is_heard = False
            return None
        return code

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the workers and to the foreman itself."""
        os.killpg(self._process.pid, number)

    def leave(self) -> None:
        """Once the workers are gone. It takes leave of them, so that what they used is counted as ours."""
        self._line.close()
        self._process.terminate()  # one that still loads
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_early(tokenizer: str = "") -> None:
    """Have a foreman load while this process does, too: for a command that will most likely want one.

    It opens the engine of `tokenizer` for all its workers, if that is given.
    """
    with contextlib.suppress(BuildError):  # whoever wants one is told
        _unused.append(ForkServer(tokenizer))


def take_fork_server() -> ForkServer:
    """The one that was called in, if nobody has it yet."""
    return _unused.pop() if _unused else ForkServer()


def stop_unused() -> None:
    """Nobody wanted the one that was called in."""
    while _unused:
        _unused.pop().leave()


def serve(fd: int, tokenizer: str) -> NoReturn:
    """The foreman's own life: ends when the parent does."""
    from tokenmill.executors import worker as executors_worker

    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides: the line ends when it is time to go
        signal.signal(number, signal.SIG_IGN)
    ready = None
    with contextlib.suppress(TokenmillError):  # a worker will meet it again, and can tell
        ready = executors_worker.get_ready(tokenizer) if tokenizer else None
    gc.freeze()
    line = socket.socket(fileno=fd)
    numbers: list[int] = []
    while True:
        message, links, *_ = socket.recv_fds(line, _MESSAGE.size, 1)
        if not message:
            _reap(numbers)
        wanted = _MESSAGE.unpack(message)[0]
        if wanted == _START_WORKER:
            numbers.append(_fork(partial(executors_worker.main, links[0], ready), links[0], line))
        else:
            _, status = os.waitpid(numbers[wanted], 0)
            line.send(_MESSAGE.pack(os.waitstatus_to_exitcode(status)))


def _reap(workers: list[int]) -> NoReturn:
    for worker in workers:
        with contextlib.suppress(ChildProcessError):  # somebody has asked what it died of
            os.waitpid(worker, 0)
    os._exit(0)


def _fork(main: Callable[[], None], link: int, line: socket.socket) -> int:
    process = os.fork()
    if process:
        os.close(link)
        return process
    try:
        gc.enable()
        line.close()
        main()
    except BaseException:  # a bug of ours; the foreman's loop is no place for it
        import traceback

        from tokenmill.errors import redact

        print(redact(traceback.format_exc()), file=sys.stderr, flush=True)  # noqa: T201 - there is nobody else to tell
    os._exit(1)


Message = dict[str, Any]
STOP_SECONDS = 1.0


def send(link: Connection, message: Message) -> None:
    link.send_bytes(json.dumps(message).encode())


def receive(link: Connection) -> Message:
    return json.loads(link.recv_bytes())  # type: ignore[no-any-return]  # messages are objects


def needs_processes(workers: int, folder: Folder) -> bool:
    """Whether workers are processes of their own. For a store even one is: it loads while the store is asked, and
    computes a unit while the one before is put."""
    return workers > 1 or not folder.is_local


class WorkerProcesses:
    """Worker processes and the sockets that lead to them."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._briefing: Message | None = None
        self._foremen = [take_fork_server()]
        self._hired: dict[Connection, tuple[ForkServer, int]] = {}
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
            self._foremen.append(take_fork_server())
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
