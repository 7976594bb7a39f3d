"""The foreman: a process that loads what every worker needs once, and then forks a worker whenever one is wanted.

    parent --- a socket and "hire" ---> foreman --- fork ---> worker, with that socket
           <-- what it died of --------                       (and no thread but its own)

To load takes longer than to fork by far, and memory that was loaded once is shared. Nothing runs in
the foreman but this, so it has a single thread, and forking is safe.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

# What is loaded stays: looking through it for garbage again and again makes loading slower.
_START = """
import gc; gc.disable()
from tokenmill.build import foreman, worker
foreman.serve({fd}, {tokenizer!r})
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
_HIRE = -1
LEAVE_SECONDS = 1.0
_waiting: list[Foreman] = []


class Foreman:
    """The parent's view: workers have the numbers 0, 1, 2, ... in the order in which they were hired."""

    def __init__(self, tokenizer: str = "") -> None:
        self._line, theirs = socket.socketpair()
        self._is_heard = True
        self._hired = 0
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START.format(fd=theirs.fileno(), tokenizer=tokenizer)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **WORKER_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        # A process that dies closes its line first, and is a dead one some time later.
        # Dead, it still keeps its number, which is that of its workers' group, until it leaves.
        return self._is_heard and os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def hire(self, link: socket.socket) -> int:
        """Have a worker that listens to `link`. If the foreman is dead, `link` is closed, as if the worker were."""
        try:
            socket.send_fds(self._line, [_MESSAGE.pack(_HIRE)], [link.fileno()])
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


def call_in(tokenizer: str = "") -> None:
    """Have a foreman load while this process does, too: for a command that will most likely want one.

    It opens the engine of `tokenizer` for all its workers, if that is given.
    """
    _waiting.append(Foreman(tokenizer))


def new_foreman() -> Foreman:
    """The one that was called in, if nobody has it yet."""
    return _waiting.pop() if _waiting else Foreman()


def send_home() -> None:
    """Nobody wanted the one that was called in."""
    while _waiting:
        _waiting.pop().leave()


def serve(fd: int, tokenizer: str) -> NoReturn:
    """The foreman's own life: ends when the parent does."""
    from tokenmill.build import worker

    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides: the line ends when it is time to go
        signal.signal(number, signal.SIG_IGN)
    ready = worker.get_ready(tokenizer) if tokenizer else None
    gc.freeze()
    line = socket.socket(fileno=fd)
    numbers: list[int] = []
    while True:
        message, links, *_ = socket.recv_fds(line, _MESSAGE.size, 1)
        if not message:
            _take_leave(numbers)
        wanted = _MESSAGE.unpack(message)[0]
        if wanted == _HIRE:
            numbers.append(_fork(partial(worker.main, links[0], ready), links[0], line))
        else:
            _, status = os.waitpid(numbers[wanted], 0)
            line.send(_MESSAGE.pack(os.waitstatus_to_exitcode(status)))


def _take_leave(workers: list[int]) -> NoReturn:
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

        from tokenmill.redaction import redact

        print(redact(traceback.format_exc()), file=sys.stderr, flush=True)  # noqa: T201 - there is nobody else to tell
    os._exit(1)
