"""Errors from the operating system, at every operation of a build, a repair, a verify.

    once       the operation fails one time
    for ever   it and all that follow fail; of ENOSPC and EDQUOT, only those that need space
    lost       it is done, and an error is reported all the same, as a network drive may do
    short      a write or a read moves half of its bytes
    stuck      a write moves nothing

The answer must be the right bytes or an error of ours; and once the fault is gone, the same call
must come to the right bytes and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lab.cell import Point, explore
from lab.judge import Case, looks_finished_but_wrong, untyped
from lab.scenes import SCENES, scene_operations, set_scenes
from lab.seam import Tapped
from lab_runner import Row

ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EINTR", "ESTALE")
SPANS = ("once", "for ever")
KINDS = (*((error, span) for error in ERRORS for span in SPANS), ("lost", "once"))
SHORT = tuple(("short", span) for span in SPANS)
STUCK = tuple(("stuck", span) for span in SPANS)
_NEED_SPACE = ("create", "append", "write", "mkdir", "link", "rename", "fsync")
_OPENERS = ("create", "open", "append")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, from which operation on."""

    kind: str
    span: str
    at: int

    def __str__(self) -> str:
        return f"{self.kind} {self.span} at operation {self.at}"

    def act(self, number: int, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self.strikes(number, name):
            return real(*arguments)
        if self.kind == "short":
            fd, data = arguments
            return real(fd, data[: max(1, len(data) // 2)])
        if self.kind == "stuck":
            return 0
        # A descriptor is gone after a close, whatever the close says.
        if self.kind == "lost" or name == "close":
            done = real(*arguments)
            if name in _OPENERS:
                os.close(done)
        code = errno.EIO if self.kind == "lost" else getattr(errno, self.kind)
        raise OSError(code, os.strerror(code))

    def strikes(self, number: int, name: str) -> bool:
        if number == self.at:
            return True
        if self.span == "once" or number < self.at:
            return False
        if self.kind in ("short", "stuck"):
            return name == "write" or (name, self.kind) == ("read", "short")
        return self.kind not in ("ENOSPC", "EDQUOT") or name in _NEED_SPACE


class Drive:
    """A drive with a fault. It notes what is done to a file after its fsync failed: its pages are lost, not dirty.

    Such a file may be closed and removed. Whoever syncs it again is told that all is well, which it is not.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._paths: dict[int, str] = {}
        self._lost: set[str] = set()
        self.misuse = ""

    def act(self, number: int, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        path = arguments[0] if isinstance(arguments[0], str) else self._paths.get(arguments[0], "")
        if path in self._lost and name in ("fsync", "write", "link", "rename"):
            self.misuse = f"{name} of a file whose fsync had failed"
        if name == "fsync" and self._fault.strikes(number, name):
            self._lost.add(path)
        done = self._fault.act(number, name, real, arguments)
        if name == "create":
            self._paths[done] = path
        return done


def faults(scales: Mapping[str, int | None], *, seed: int = 0) -> Row:
    """As many errors as `scales` says in each scene, drawn by the seed; None is every error at every operation."""
    whole = [name for name, scale in scales.items() if scale is None]
    points = sum(scale or 0 for scale in scales.values())
    if whole:
        with set_scenes(whole) as cases:
            points += sum(len(_plan(cases[name], name, None, seed)) for name in whole)
    found = explore(_setting, (dict(scales), seed), points, patience=60)
    every = len(whole) == len(scales)
    return found.row(f"errors {'at every operation' if every else 'here and there'}: {', '.join(scales)}")


def _plan(case: Case, scene: str, scale: int | None, seed: int) -> list[Fault]:
    moves = {"write": SHORT + STUCK, "read": SHORT}
    whole = [
        Fault(kind, span, at)
        for at, name in enumerate(scene_operations(case, scene))
        for kind, span in KINDS + moves.get(name, ())
    ]
    return whole if scale is None else random.Random(seed).sample(whole, scale)


@contextlib.contextmanager
def _setting(scales: dict[str, int | None], seed: int) -> Iterator[Point]:
    with set_scenes(scales) as cases:
        plan = [
            (cases[name], name, fault)
            for name, scale in scales.items()
            for fault in _plan(cases[name], name, scale, seed)
        ]
        yield lambda number: _point(*plan[number], number)


def _point(case: Case, name: str, fault: Fault, number: int) -> str | None:
    scene, output = SCENES[name], case.output(number)
    scene.prepare(case, output)
    before = _open_files()
    drive = Drive(fault)
    tapped = Tapped(drive.act)
    try:
        result = scene.call(case, output, tapped)
    except Exception as error:
        wrong = untyped(error) or (looks_finished_but_wrong(case, output) if scene.begins_whole else None)
    else:
        wrong = scene.judge(case, output, result)
    if tapped.count <= fault.at:
        wrong = wrong or "the fault was never met"
    wrong = wrong or drive.misuse or None
    if wrong is None and (_open_files() != before or threading.active_count() > 1):
        wrong = f"files or threads stay open: {before}, then {_open_files()}; {threading.active_count()} threads"
    wrong = wrong or scene.afterwards(case, output)
    case.remove(output)
    return wrong and f"{name}: {fault}: {wrong}"


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


# The two that are not whole share their operations with those that are.
_FULL: dict[str, int | None] = {
    "build": None,
    "build with scratch": 700,
    "build when finished": None,
    "repair": None,
    "repair without manifest": 500,
    "verify": None,
    "verify of damage": None,
}
EXPERIMENTS = [(f"errors, {name}", partial(faults, {name: scale}, seed=1)) for name, scale in _FULL.items()]
