"""A cell: a process of its own in which points are tried, so that none of them can take the lab down.

    parent   watches a number in shared memory     kills a cell that stands still, starts another behind it
    cell     tries point after point               says a sentence for each one that is wrong

A point that ends its process is a death, one that stands still is a hang; either way the points
behind it are tried. Memory may be limited, and its peak is told.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from lab_runner import Row

# Tries the point of a number; a sentence if its result is wrong.
Point = Callable[[int], str | None]
# Gives the points; it is called in the cell, and its end ends the setting. Must be a function of a module.
Setting = Callable[..., contextlib.AbstractContextManager[Point]]

_POLL_SECONDS = 0.5
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(slots=True)
class Findings:
    """What came of some points. A cell held `base_bytes` of memory before them, and `peak_bytes` at the most."""

    tried: int = 0
    wrong: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    hangs: int = 0
    base_bytes: int = 0
    peak_bytes: int = 0

    def row(self, fault: str) -> Row:
        return Row(fault=fault, tried=self.tried, wrong=(*self.wrong, *self.deaths), hangs=self.hangs)


def explore(
    setting: Setting,
    arguments: tuple[Any, ...],
    points: int,
    *,
    patience: float = 60.0,
    memory: int | None = None,
    is_quiet: bool = False,
) -> Findings:
    """Try points 0 to `points` in a cell. `patience` is how long one point may take.

    A cell that is quiet keeps to itself what libraries print while they break.
    """
    cell = _Cell(setting, arguments, range(points), patience, (memory, is_quiet))
    try:
        while not cell.is_done():
            connection.wait([cell.link], timeout=_POLL_SECONDS)
            cell.look()
    finally:
        cell.end()
    return cell.found


class _Cell:
    """The points of one process, and of those that take its place."""

    def __init__(
        self,
        setting: Setting,
        arguments: tuple[Any, ...],
        numbers: range,
        patience: float,
        limits: tuple[int | None, bool],
    ) -> None:
        self._setting, self._arguments, self._left = setting, arguments, numbers
        self._patience, self._limits = patience, limits
        self.found = Findings()
        self._process: Any = None
        self._at: Any = None
        self._seen, self._since = -1, 0.0
        self._start()

    def is_done(self) -> bool:
        return self._process is None

    def look(self) -> None:
        """Take in what the process says, and see whether it is well."""
        while self._process is not None and self.link.poll():
            try:
                kind, content = self.link.recv()
            except EOFError:
                self._bury("ended")
                return
            if kind == "wrong":
                self.found.wrong.append(content)
            else:
                self.found.base_bytes, self.found.peak_bytes = content
                self._count(self._left.stop)
                self.end()
        if self._process is None:
            return
        now = int(self._at.value)
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        # A setting may take its time, so the watch begins with the first point.
        elif now >= 0 and time.monotonic() - self._since > self._patience:
            os.kill(self._process.pid or 0, signal.SIGKILL)
            self._bury("stood still")

    def end(self) -> None:
        if self._process is not None:
            if self._process.is_alive() and not self._left:
                self._process.join(10)
            self._process.kill()
            self._process.join()
            self.link.close()
            self._process = None

    def _start(self) -> None:
        self.link, theirs = _SPAWN.Pipe(duplex=False)
        self._at = _SPAWN.Value("q", -1, lock=False)
        self._process = _SPAWN.Process(
            target=_serve, args=(theirs, self._at, self._setting, self._arguments, self._left, self._limits)
        )
        self._process.start()
        theirs.close()
        self._seen, self._since = -1, time.monotonic()

    def _count(self, stop: int) -> None:
        self.found.tried += stop - self._left.start
        self._left = range(stop, self._left.stop)

    def _bury(self, how: str) -> None:
        """A process that did not end well: note at which point, and go on behind it."""
        self._process.join()
        code, at = self._process.exitcode, int(self._at.value)
        self.end()
        if at < 0:
            self.found.wrong.append(f"a cell {how} with code {code} before its first point")
            return
        if how == "stood still":
            self.found.hangs += 1
            self.found.wrong.append(f"point {at}: no end after {self._patience:.0f} s")
        else:
            self.found.deaths.append(f"point {at}: the process ended with code {code}")
        self._count(at + 1)
        if self._left:
            self._start()


def _serve(
    link: connection.Connection,
    at: Any,
    setting: Setting,
    arguments: tuple[Any, ...],
    numbers: range,
    limits: tuple[int | None, bool],
) -> None:
    memory, is_quiet = limits
    if is_quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with setting(*arguments) as point:
        base = peak_bytes()
        for number in numbers:
            at.value = number
            try:
                wrong = point(number)
            except BaseException as error:  # whatever comes out that the point did not expect
                trace = traceback.extract_tb(error.__traceback__)[-1]
                wrong = f"{type(error).__name__}: {str(error)[:300]} in {trace.name}, line {trace.lineno}"
            if wrong:
                link.send(("wrong", f"point {number}: {wrong}"))
    link.send(("end", (base, peak_bytes())))


def peak_bytes() -> int:
    """The most memory that this process has held so far; the system's own count would begin with the parent's."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
