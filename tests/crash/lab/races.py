"""Builders that work on the same output at the same time: with the lock, without it, and past it.

    with the lock   one builds, the others hear that it does, or find it done
    held            one has the lock and does not go on before the others have tried
    stale           the lock of a dead builder is there, and all take it over at once
    without         all of them build: they sweep away each other's temp files, and clean up behind each other
    stopped         a builder stands still past its heartbeat, another one takes over; then it goes on

The lock saves work, it never carries correctness. So whoever comes to an end has the right bytes or an error of
ours; no reader is ever misled; and one call more gives the right result.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

from lab.cell import Point, explore
from lab.commands import FINISHED, make_bench
from lab.forks import End, Fork
from lab.judge import Case, finish, looks_finished_but_wrong
from lab.scenes import scene_operations, set_scenes
from lab.seam import Tapped
from lab_runner import Row
from tokenmill.build import pipeline
from tokenmill.storage import locks
from tokenmill.storage.filesystem import FileSystem

BUILDERS = 8
MODES = ("with the lock", "stale", "without", "held")
LOCKED = 5


def races(scale: int, *, seed: int = 0) -> Row:
    """`scale` races of eight builders."""
    found = explore(_racing, (seed,), scale, patience=180)
    return found.row("eight builders race for one output")


def stops(scale: int, *, seed: int = 0) -> Row:
    """`scale` builders that are stopped at an operation, and go on when another one has taken over."""
    found = explore(_stopping, (scale, seed), scale, patience=180)
    return found.row("a builder stopped past its heartbeat, and continued")


def command_races(scale: int) -> Row:
    """Eight real commands at a time: one builds, the others end with the exit code of a lock, or find it done."""
    wrong: list[str] = []
    with make_bench(200) as bench:
        for race in range(scale):
            output = str(bench.place / f"out-{race}")
            arguments = bench.prepare(output, "-j", 1)
            processes = [subprocess.Popen(arguments, stderr=subprocess.DEVNULL) for _ in range(BUILDERS)]
            codes = [process.wait(300) for process in processes]
            if FINISHED not in codes or set(codes) - {FINISHED, LOCKED}:
                wrong.append(f"race {race} of commands: exit codes {codes}")
            elif sentence := bench.wrong_with(output):
                wrong.append(f"race {race} of commands: {sentence}")
    return Row(fault="eight commands race for one output", tried=scale, wrong=tuple(wrong))


@contextlib.contextmanager
def _racing(seed: int) -> Iterator[Point]:
    with set_scenes(["build"]) as cases:
        case = cases["build"]
        size = len(scene_operations(case, "build"))
        yield lambda number: _race(case, size, number, random.Random(seed * 1_000_003 + number))


def _race(case: Case, size: int, number: int, chance: random.Random) -> str | None:
    mode, output = MODES[number % len(MODES)], case.output(number)
    if mode == "held":
        return _hold(case, output)
    if mode == "stale" or chance.random() < 0.5:
        _leave_behind(case, output, at=chance.randrange(size * 9 // 10))
        if mode == "with the lock":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(output, locks.LOCK))
    barrier, gate = os.pipe()
    seeds = [chance.random() for _ in range(BUILDERS)]

    def start(seed: float) -> None:
        os.close(gate)
        os.read(barrier, 1)  # all of them go on when the gate is closed
        with _without_lock() if mode == "without" else contextlib.nullcontext():
            case.world.build(output, Tapped(partial(_dawdle, random.Random(seed))))

    builders = [Fork(partial(start, seed)) for seed in seeds]
    os.close(gate)
    os.close(barrier)
    ends = [builder.wait() for builder in builders]
    wrong = _wrong_ends(mode, ends) or looks_finished_but_wrong(case, output) or finish(case, output)
    case.remove(output)
    return wrong and f"{mode}, race {number}: {wrong}"


def _hold(case: Case, output: str) -> str | None:
    """One builder stops when it has the lock; all others must hear of it, and it must finish undisturbed."""
    ready, go_on = os.pipe(), os.pipe()

    def act(number: int, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if name == "append":  # the log of events is opened right behind the lock
            os.write(ready[1], b"!")
            os.read(go_on[0], 1)
        return real(*arguments)

    holder = Fork(lambda: case.world.build(output, Tapped(act)))
    os.read(ready[0], 1)
    others = [Fork(lambda: case.world.build(output)) for _ in range(BUILDERS - 1)]
    ends = [other.wait() for other in others]
    os.write(go_on[1], b"!")
    end = holder.wait()
    for pipe in (*ready, *go_on):
        os.close(pipe)
    wrong = next((f"not the error of a lock: {end}" for end in ends if not end.error.startswith("LockedError")), None)
    wrong = wrong or (None if end.is_well else f"the holder: {end}") or finish(case, output)
    case.remove(output)
    return wrong and f"held: {wrong}"


def _wrong_ends(mode: str, ends: list[End]) -> str | None:
    for end in ends:
        if end.signal or not end.is_typed:
            return str(end)
    if mode == "with the lock":
        strangers = [end for end in ends if not end.is_well and not end.error.startswith("LockedError")]
        if strangers:
            return f"not the error of a lock: {strangers[0]}"
        if not any(end.is_well for end in ends):
            return "nobody built"
    return None


def _leave_behind(case: Case, output: str, at: int) -> None:
    """What a builder leaves that is killed at an operation: half a build, and its lock."""

    def act(number: int, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    Fork(lambda: case.world.build(output, Tapped(act))).wait()


def _dawdle(chance: random.Random, number: int, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Now and then another one goes first: no two races are the same."""
    if chance.random() < 0.1:
        time.sleep(chance.random() / 1000)
    return real(*arguments)


@contextlib.contextmanager
def _without_lock() -> Iterator[None]:
    with patch.object(pipeline, "locked", lambda folder, **_: contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """On another machine, and with little patience for a heartbeat that stands still."""
    with (
        patch.object(pipeline, "locked", partial(locks.locked, patience=0.01)),
        patch.object(locks, "_machine", lambda: "else.where.far"),
    ):
        yield


@contextlib.contextmanager
def _stopping(scale: int, seed: int) -> Iterator[Point]:
    with set_scenes(["build"]) as cases:
        case = cases["build"]
        size = len(scene_operations(case, "build"))
        chance = random.Random(seed)
        # Every operation in turn, from a random one on; `size` points are all of them.
        first = chance.randrange(size)
        plan = [((first + number * size // min(scale, size)) % size, chance.randrange(size)) for number in range(scale)]
        yield lambda number: _stop(case, *plan[number], number)


def _stop(case: Case, at: int, goes_on: int, number: int) -> str | None:
    """The first builder is stopped; it goes on when the second is done, or in the midst of it, or both end together."""
    output = case.output(number)
    in_the_midst = bool(number % 2)
    first = Fork(lambda: case.world.build(output, Tapped(partial(_stand_still, at))))
    if not first.wait_until_stopped():
        return f"stopped at operation {at}: it {first.wait()} before"

    def wake(operation: int, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if in_the_midst and operation == goes_on:
            os.kill(first.process, signal.SIGCONT)
        return real(*arguments)

    def take_over(fs: FileSystem) -> None:
        with _elsewhere():
            case.world.build(output, fs)

    second = Fork(lambda: take_over(Tapped(wake))).wait()
    wrong = None if second.is_typed and not second.signal else str(second)
    if not in_the_midst:
        # Nobody has disturbed the second, so nothing less than a finished dataset will do.
        wrong = wrong or (None if second.is_well else str(second)) or looks_finished_but_wrong(case, output)
    os.kill(first.process, signal.SIGCONT)
    end = first.wait()
    wrong = wrong or (None if end.is_typed and not end.signal else str(end))
    wrong = wrong or looks_finished_but_wrong(case, output) or finish(case, output)
    case.remove(output)
    when = f"at operation {goes_on} of another one" if in_the_midst else "when another one was done"
    return wrong and f"stopped at operation {at}, continued {when}: {wrong}"


def _stand_still(at: int, number: int, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if number == at:
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(*arguments)


EXPERIMENTS = [
    ("races", partial(races, 80, seed=1)),
    ("races, commands", partial(command_races, 1)),
    ("stopped and continued", partial(stops, 200, seed=1)),
]
