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
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from lab.cell import Point, explore
from lab.judge import Case, finish, looks_finished_but_wrong, make_case, mend, untyped, wrong_tree
from lab.report import Row
from lab.seam import Tapped, operations
from lab.swift import swift
from tokenmill.storage.fs import FileSystem

ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EINTR", "ESTALE")
SPANS = ("once", "for ever")
KINDS = (*((error, span) for error in ERRORS for span in SPANS), ("lost", "once"))
SHORT = tuple(("short", span) for span in SPANS)
STUCK = tuple(("stuck", span) for span in SPANS)
_NEED_SPACE = ("create", "append", "write", "mkdir", "link", "rename", "fsync")
_OPENERS = ("create", "open", "append")
# Small, and yet with pieces that are linked, pieces that are joined, and a document that is rejected.
DOCUMENTS = 6


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, from which operation on."""

    kind: str
    span: str
    at: int

    def __str__(self) -> str:
        return f"{self.kind} {self.span} at operation {self.at}"

    def act(self, number: int, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self._strikes(number, name):
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

    def _strikes(self, number: int, name: str) -> bool:
        if number == self.at:
            return True
        if self.span == "once" or number < self.at:
            return False
        if self.kind in ("short", "stuck"):
            return name == "write" or (name, self.kind) == ("read", "short")
        return self.kind not in ("ENOSPC", "EDQUOT") or name in _NEED_SPACE


@dataclass(frozen=True, slots=True)
class Scene:
    """What is disturbed: how an output is laid out for it, what is called, and how its end is judged."""

    world: str
    prepare: Callable[[Case, str], None]
    call: Callable[[Case, str, FileSystem], object]
    judge: Callable[[Case, str, object], str | None]
    afterwards: Callable[[Case, str], str | None]


def _nothing(case: Case, output: str) -> None:
    """A build begins without a folder."""


def _finished(case: Case, output: str) -> None:
    shutil.copytree(case.place / "right", output)


def _damaged(case: Case, output: str) -> None:
    """A shard that was a piece, an index that was joined, a stranger among them."""
    _finished(case, output)
    out = Path(output)
    data = (out / "train/00000.bin").read_bytes()
    (out / "train/00000.bin").unlink()
    (out / "train/00000.bin").write_bytes(data[:-2])
    data = (out / "val/00000.idx").read_bytes()
    (out / "val/00000.idx").write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    (out / "val/00009.bin").write_bytes(b"stray")


def _beheaded(case: Case, output: str) -> None:
    """Without a manifest, and with a shard and a receipt less."""
    _finished(case, output)
    for name in ("dataset.json", "train/00001.idx", ".build/receipts/000000.json"):
        (Path(output) / name).unlink()


def _is_right(case: Case, output: str, result: object) -> str | None:
    """What could not be removed may still be in .build; the next call sees to it."""
    return wrong_tree(case, output)


def _is_not_ok(case: Case, output: str, result: Any) -> str | None:
    return "verify finds nothing wrong in a damaged dataset" if result.ok else None


def _is_a_report(case: Case, output: str, result: Any) -> str | None:
    return None  # a file that cannot be read may be called bad, whatever its bytes are


SCENES = {
    "build": Scene("plain", _nothing, lambda c, o, fs: c.world.build(o, fs), _is_right, finish),
    "build with scratch": Scene("scratch", _nothing, lambda c, o, fs: c.world.build(o, fs), _is_right, finish),
    "build when finished": Scene("plain", _finished, lambda c, o, fs: c.world.build(o, fs), _is_right, finish),
    "repair": Scene("plain", _damaged, lambda c, o, fs: c.world.repair(o, fs), _is_right, mend),
    "repair without manifest": Scene("plain", _beheaded, lambda c, o, fs: c.world.repair(o, fs), _is_right, mend),
    "verify": Scene("plain", _finished, lambda c, o, fs: c.world.verify(o, fs), _is_a_report, finish),
    "verify of damage": Scene("plain", _damaged, lambda c, o, fs: c.world.verify(o, fs), _is_not_ok, mend),
}


def faults(scales: Mapping[str, int | None], *, seed: int = 0, cells: int = 1) -> Row:
    """As many errors as `scales` says in each scene, drawn by the seed; None is every error at every operation."""
    begin = time.monotonic()
    points = 0
    for name, scale in scales.items():
        if scale is None:
            with swift(), make_case(SCENES[name].world, documents=DOCUMENTS) as case:
                scale = len(_plan(case, name, None, seed))
        points += scale
    found = explore(_setting, (dict(scales), seed), points, cells=cells, patience=60)
    every = all(scale is None for scale in scales.values())
    return Row(
        fault=f"errors {'at every operation' if every else 'here and there'}: {', '.join(scales)}",
        tried=found.tried,
        wrong=(*found.wrong, *found.deaths),
        hangs=found.hangs,
        seconds=time.monotonic() - begin,
    )


def _plan(case: Case, scene: str, scale: int | None, seed: int) -> list[Fault]:
    what = SCENES[scene]
    output = case.output("counted")
    what.prepare(case, output)
    names = operations(lambda fs: what.call(case, output, fs))
    case.remove(output)
    moves = {"write": SHORT + STUCK, "read": SHORT}
    whole = [Fault(kind, span, at) for at, name in enumerate(names) for kind, span in KINDS + moves.get(name, ())]
    return whole if scale is None else random.Random(seed).sample(whole, scale)


@contextlib.contextmanager
def _setting(scales: dict[str, int | None], seed: int) -> Iterator[Point]:
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(swift())
        worlds = sorted({SCENES[name].world for name in scales})
        cases = {world: stack.enter_context(make_case(world, documents=DOCUMENTS)) for world in worlds}
        plan = [
            (cases[SCENES[name].world], name, fault)
            for name, scale in scales.items()
            for fault in _plan(cases[SCENES[name].world], name, scale, seed)
        ]
        yield lambda number: _point(*plan[number], number)


def _point(case: Case, name: str, fault: Fault, number: int) -> str | None:
    scene, output = SCENES[name], case.output(number)
    scene.prepare(case, output)
    before = _open_files()
    tapped = Tapped(fault.act)
    try:
        result = scene.call(case, output, tapped)
    except Exception as error:
        wrong = untyped(error) or looks_finished_but_wrong(case, output) if _whole(scene) else untyped(error)
    else:
        wrong = scene.judge(case, output, result)
    if tapped.count <= fault.at:
        wrong = wrong or "the fault was never met"
    if wrong is None and (_open_files() != before or threading.active_count() > 1):
        wrong = f"files or threads stay open: {before}, then {_open_files()}; {threading.active_count()} threads"
    wrong = wrong or scene.afterwards(case, output)
    case.remove(output)
    return wrong and f"{name}: {fault}: {wrong}"


def _whole(scene: Scene) -> bool:
    """Whether a manifest may stand only over right files: where the lab itself broke some, it may not."""
    return scene.prepare not in (_damaged, _beheaded)


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


# The two that are not whole share their operations with those that are.
_FULL = {**dict.fromkeys(SCENES), "build with scratch": 2000, "repair without manifest": 1500}
EXPERIMENTS = [(f"errors, {name}", partial(faults, {name: scale}, seed=1, cells=2)) for name, scale in _FULL.items()]
