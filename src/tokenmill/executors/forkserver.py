"""Worker processes, and the fork server that starts them and replaces those that died.

    parent --- a socket, "start a worker" ---> fork server --- fork ---> worker, with that socket
           <-- its exit code -----------------                           (and no thread but its own)

The fork server loads what every worker needs once: loading takes far longer than forking, and memory that was loaded
once is shared. It runs a single thread and nothing else, so that forking is safe. Not the fork
server of `multiprocessing`: that one pickles, imports the caller's main module again, and reports no exit codes.

Light on purpose: a build loads this module first, so that the workers load their heavy libraries while the parent loads
its own and makes the plan. `WorkerProcesses` starts the workers, configures them, receives their messages, and replaces
those that die.
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
from tokenmill.storage.base import Storage

# Collecting garbage while loading finds none and makes loading slower.
_PROGRAM = """
import gc; gc.disable()
from tokenmill.executors import forkserver, worker
forkserver.serve({fd}, {tokenizer!r})
"""
# The environment in which a process that runs units starts, here and on a cluster.
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
    """The fork server as its parent sees it. Workers are numbered 0, 1, 2, ... in the order of their start."""

    def __init__(self, tokenizer: str = "", *, alone: str = "workers=1") -> None:
        self._line, theirs = socket.socketpair()
        self._is_heard = True
        self._workers = 0
        with theirs:
            try:
                program = _PROGRAM.format(fd=theirs.fileno(), tokenizer=tokenizer)
                self._process = start_python(program, theirs.fileno(), alone=alone)
            except BaseException:
                self._line.close()
                raise

    @property
    def is_alive(self) -> bool:
        # A dying process closes its socket first and can be waited for only later. Until `close`, it keeps its process
        # id, which is the id of its workers' process group as well.
        return self._is_heard and os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def start_worker(self, link: socket.socket) -> int:
        """Start a worker that listens to `link`. A dead fork server closes `link`, as a dead worker would."""
        try:
            socket.send_fds(self._line, [_MESSAGE.pack(_START_WORKER)], [link.fileno()])
        except OSError:
            self._is_heard = False
        self._workers += 1
        return self._workers - 1

    def exit_code(self, worker: int) -> int | None:
        """The exit code of a worker that ended, negative for a signal; None if it is unknown."""
        try:
            self._line.send(_MESSAGE.pack(worker))
            code: int = _MESSAGE.unpack(self._line.recv(_MESSAGE.size))[0]
        except (OSError, struct.error):
            self._is_heard = False
            return None
        return code

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the workers and to the fork server itself."""
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End the fork server after its workers. It waits for them, so that their resource usage counts as ours."""
        self._line.close()
        self._process.terminate()  # one that still loads
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_python(program: str, *fds: int, alone: str = "workers=1") -> subprocess.Popen[bytes]:
    """Start a program of ours in a process and a session of its own, with these descriptors.

    An error tells the option with which the caller works `alone`.
    """
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            pass_fds=fds,
            env={**os.environ, **WORKER_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        hint = hint_for(error, "raise the limits of processes and memory (ulimit -u, ulimit -v)")
        raise BuildError(f"workers cannot be started: {error}", hint=f"{hint}; `{alone}` needs none") from None


def start_early(tokenizer: str = "") -> None:
    """Start a fork server that loads while this process does, for a command that will most likely need one.

    It opens the engine of `tokenizer` for all its workers, if that is given.
    """
    with contextlib.suppress(BuildError):  # raised again when one is needed
        _unused.append(ForkServer(tokenizer))


def take_fork_server(*, alone: str = "workers=1") -> ForkServer:
    """The fork server that was started early, if it is still unused, or a new one."""
    return _unused.pop() if _unused else ForkServer(alone=alone)


def stop_unused() -> None:
    """Stop a fork server that was started early and not needed."""
    while _unused:
        _unused.pop().close()


def serve(fd: int, tokenizer: str) -> NoReturn:
    """The main loop of the fork server. It ends when the parent does."""
    from tokenmill.executors import worker as executors_worker

    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides: it closes the socket
        signal.signal(number, signal.SIG_IGN)
    prepared = None
    with contextlib.suppress(TokenmillError):  # a worker will get the same error, and can report it
        prepared = executors_worker.prepare_tokenizer(tokenizer) if tokenizer else None
    gc.freeze()
    line = socket.socket(fileno=fd)
    numbers: list[int] = []
    while True:
        message, links, *_ = socket.recv_fds(line, _MESSAGE.size, 1)
        if not message:
            _reap(numbers)
        wanted = _MESSAGE.unpack(message)[0]
        if wanted == _START_WORKER:
            numbers.append(_fork(partial(executors_worker.main, links[0], prepared), links[0], line))
        else:
            _, status = os.waitpid(numbers[wanted], 0)
            line.send(_MESSAGE.pack(os.waitstatus_to_exitcode(status)))


def _reap(workers: list[int]) -> NoReturn:
    for worker in workers:
        with contextlib.suppress(ChildProcessError):  # its exit code was asked for before
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
    except BaseException:  # a bug of ours, which must not end up in the loop of the fork server
        import traceback

        from tokenmill.errors import redact

        print(redact(traceback.format_exc()), file=sys.stderr, flush=True)  # noqa: T201 - there is no other way to report it
    os._exit(1)


Message = dict[str, Any]
STOP_SECONDS = 1.0


def send(link: Connection, message: Message) -> None:
    link.send_bytes(json.dumps(message).encode())


def receive(link: Connection) -> Message:
    return json.loads(link.recv_bytes())  # type: ignore[no-any-return]  # messages are objects


def send_fd(link: Connection, fd: int) -> None:
    """Send an open file, behind a message that announces it."""
    with socket.fromfd(link.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
        socket.send_fds(line, [b"."], [fd])


def receive_fd(link: Connection) -> int:
    """An open file that was sent with `send_fd`; `EOFError` if its sender has died."""
    with socket.fromfd(link.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
        _, fds, *_ = socket.recv_fds(line, 1, 1)
    if not fds:
        raise EOFError
    os.set_inheritable(fds[0], False)
    return fds[0]


def needs_processes(workers: int, folder: Storage) -> bool:
    """Whether units run in processes of their own. With an object store even a single worker does: it encodes a unit
    while the one before is uploaded."""
    return workers > 1 or not folder.writes_are_fast


class WorkerProcesses:
    """The worker processes of a build, each at the other end of a socket."""

    def __init__(self, workers: int, *, alone: str = "workers=1") -> None:
        self.workers = workers
        self._alone = alone
        self._configuration: Message | None = None
        self._servers = [take_fork_server(alone=alone)]
        self._workers: dict[Connection, tuple[ForkServer, int]] = {}
        for _ in range(workers):
            self._start_worker()

    def configure(self, configuration: Message) -> None:
        """Send the workers, and those that will replace them, what they need for their units."""
        self._configuration = configuration
        for link in self._workers:
            self.send(link, configuration)

    def send(self, link: Connection, message: Message) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed when it is heard
            send(link, message)

    def receive(self) -> list[tuple[Connection, Message]]:
        """Wait for messages of the workers. The death of a worker is a message, too."""
        return [(link, self.receive_from(link)) for link in _ready(self._workers)]

    def links(self) -> list[Connection]:
        """The sockets of all workers, for a caller that waits for others as well."""
        return list(self._workers)

    def release(self) -> None:
        """Tell all workers to end, without waiting: each needs a moment to free its memory."""
        for server in self._servers:
            server.signal_all(signal.SIGTERM)

    def stop(self, patience: float = STOP_SECONDS) -> None:
        """Stop all workers with SIGTERM, and after `patience` seconds with SIGKILL."""
        servers, self._servers = self._servers, []
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, None)):
            if self._workers:
                for server in servers:
                    server.signal_all(number)
                self._wait_for_end(seconds)
        for server in servers:
            server.close()

    def _wait_for_end(self, seconds: float | None) -> None:
        """Wait until all workers ended, for at most so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._workers:
            found = _ready(self._workers, None if deadline is None else max(0.0, deadline - time.monotonic()))
            for link in found:
                try:
                    link.recv_bytes()  # a last message
                except (EOFError, OSError):
                    del self._workers[link]
                    link.close()
            if not found:
                return

    def receive_from(self, link: Connection) -> Message:
        """A message of this worker, which has one or is dead."""
        try:
            return receive(link)
        except (EOFError, OSError):
            server, worker = self._workers.pop(link)
            link.close()
            code = server.exit_code(worker)
            self._start_worker()
            error = {"kind": "BuildError", "message": f"a worker {_cause(code)}", "hint": _hint(code)}
            return {"kind": "died", "error": error}

    def _start_worker(self) -> None:
        if not self._servers[-1].is_alive:
            self._servers.append(take_fork_server(alone=self._alone))
        server = self._servers[-1]
        ours, theirs = socket.socketpair()
        with theirs:
            worker = server.start_worker(theirs)
        link = Connection(ours.detach())
        self._workers[link] = server, worker
        if self._configuration is not None:
            self.send(link, self._configuration)


def _cause(code: int | None) -> str:
    if code is None:
        return "died"
    if code == -signal.SIGKILL:
        return "was killed by signal 9, probably because memory ran out"
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _hint(code: int | None) -> str:
    if code in (None, -signal.SIGKILL):
        return "use fewer `workers`, give a lower `max_document_bytes`, or allow more memory"
    return "the same command tries it again; if it ends like this each time, please report it, with the file"


def _ready(links: Iterable[Connection], seconds: float | None = None) -> list[Connection]:
    return [link for link in mp_connection.wait(list(links), seconds) if isinstance(link, Connection)]
