"""Calls in processes of their own, forked from one that has loaded everything: a process costs milliseconds."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from lab.judge import untyped
from tokenmill.errors import TokenmillError

# Whoever hangs is ended by an alarm, which no experiment expects.
PATIENCE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class End:
    """How a process came to its end: by a signal, with an error, or well."""

    signal: int = 0
    error: str = ""
    is_typed: bool = True

    @property
    def is_well(self) -> bool:
        return not self.signal and not self.error

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.signal).name}" if self.signal else self.error or "ended well"


class Fork:
    """A child that makes one call."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Newer Pythons warn of forks beside threads; those here are Arrow's, which stand idle and mind forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = os.fork()
        if not self.process:
            _run(call, writer)
        os.close(writer)

    def wait(self) -> End:
        """Its end, when it comes."""
        with open(self._reader, "rb") as said:
            error = said.read()
        _, status = os.waitpid(self.process, 0)
        if os.WIFSIGNALED(status):
            return End(signal=os.WTERMSIG(status))
        return End(**json.loads(error)) if error else End()

    def wait_until_stopped(self) -> bool:
        """Wait until it is stopped by a signal; False if it ended before."""
        found = os.waitid(os.P_PID, self.process, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return found is not None and found.si_code == os.CLD_STOPPED


def _run(call: Callable[[], object], writer: int) -> None:
    signal.alarm(PATIENCE_SECONDS)
    try:
        call()
    except BaseException as error:
        kind = type(error).__name__
        message = error.message if isinstance(error, TokenmillError) else str(error)
        os.write(writer, json.dumps({"error": f"{kind}: {message}", "is_typed": untyped(error) is None}).encode())
    finally:
        os._exit(0)
