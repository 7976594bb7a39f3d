"""A command, or a call of the library, in a forked child: what it says, how it ends, and that it ends in time.

A process that has loaded everything forks a child in milliseconds. A child has a group of its own, so that whatever it
starts is ended with it, and the uid of somebody who is not root, if that is asked for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.cli import commands
from tokenmill.cli import output as show
from tokenmill.errors import TokenmillError

# A user without any right of root's, as far as we are root.
NOBODY = 65534
UNTYPED = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended; no code if it did not, and had to be killed."""

    code: int | None
    said: str
    seconds: float

    @property
    def is_typed(self) -> bool:
        """Whether it did its work, or said in a sentence and a hint why not. `verify` and `plan` print reports."""
        if self.code in (0, 3):
            return "Traceback" not in self.said
        is_error = "error: " in self.said and "\nhint: " in self.said
        is_report = (self.code == 4 and "error: " not in self.said) or (self.code == 2 and "\n  note: " in self.said)
        untyped = "Traceback" in self.said or "unexpected " in self.said
        return self.code in (1, 2, 4, 5) and (is_error or is_report) and not untyped


def run_command(arguments: Sequence[object], *, patience: float, uid: int | None = None) -> Ended:
    """`tokenmill` with these arguments."""

    def call() -> int:
        sys.argv = ["tokenmill", *map(str, arguments)]
        return commands.run()

    return run_child(call, patience=patience, uid=uid)


def run_call(call: Callable[[], object], *, patience: float, uid: int | None = None) -> Ended:
    """A call of the library, whose errors are told as those of a command."""

    def typed() -> int:
        try:
            call()
        except TokenmillError as error:
            show.error(error.message, error.hint)
            return error.exit_code
        return 0

    return run_child(typed, patience=patience, uid=uid)


def run_child(call: Callable[[], int], *, patience: float, uid: int | None = None) -> Ended:
    """The exit code that the call gives, in a child."""
    with tempfile.TemporaryFile() as said:
        begin = time.monotonic()
        with warnings.catch_warnings():
            # Newer Pythons warn of forks beside threads; those here are Arrow's, which stand idle and mind forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            _become(call, said.fileno(), uid)
        code = _wait(child, begin + patience)
        seconds = time.monotonic() - begin
        said.seek(0)
        return Ended(code=code, said=said.read().decode(errors="surrogateescape"), seconds=seconds)


def _become(call: Callable[[], int], said: int, uid: int | None) -> None:
    code = UNTYPED
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
        if uid is not None and os.getuid() == 0:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        code = call()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int, deadline: float) -> int | None:
    """Its exit code, when it comes. Whatever it left running is ended."""
    fd = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(fd)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if ready else None
