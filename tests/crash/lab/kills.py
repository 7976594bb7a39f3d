"""Real processes, killed with SIGKILL at every operation of a build or a repair; then the same call goes on.

    before   the operation is not done any more
    after    it is the last one that is done
    half     a write has moved half of its bytes

A process that has loaded everything forks a child for each kill, so that a point costs milliseconds. The child
dies of a real signal on the real file system; what it leaves is what a kill leaves.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lab.cell import Point, explore
from lab.commands import FINISHED, below, is_alive, make_bench, num_receipts, run, started, wait_until
from lab.forks import PATIENCE_SECONDS, Fork
from lab.judge import Case
from lab.scenes import SCENES, scene_operations, set_scenes
from lab.seam import Tapped
from lab_runner import Row
from tokenmill.storage.filesystem import FileSystem

BUILDS = ("build", "build with scratch", "build with budget", "build with prepend", "parts", "parts with scratch")
PARTS = BUILDS[4:]
REPAIRS = ("repair", "repair without manifest")
# Enough for a command to be killed in the midst of its work.
COMMAND_DOCUMENTS = 400


@dataclass(frozen=True, slots=True)
class Kill:
    """The operation at which a process ends itself, and how much of that operation is done."""

    at: int
    how: str

    def __str__(self) -> str:
        return f"{self.how} operation {self.at}"

    def act(self, number: int, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if number != self.at:
            return real(*arguments)
        if self.how == "after":
            with contextlib.suppress(OSError):  # that a file is not there is an answer as well
                real(*arguments)
        elif self.how == "half" and name == "write":
            fd, data = arguments
            real(fd, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes on")


@dataclass(frozen=True, slots=True)
class History:
    """A scene, and the kills that it goes through one after the other before it is left in peace."""

    scene: str
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        return f"{self.scene}, killed {', then '.join(map(str, self.kills))}"


def kills(scenes: Sequence[str], scale: int | None, *, seed: int = 0) -> Row:
    """A kill at every operation of the scenes, or `scale` of them, drawn by the seed."""
    if scale is None:
        with set_scenes(scenes) as cases:
            points = len(_every(cases))
    else:
        points = scale
    found = explore(_single, (tuple(scenes), scale, seed), points, patience=2 * PATIENCE_SECONDS)
    where = "every operation" if scale is None else "some operations"
    kinds = "a repair" if set(scenes) <= set(REPAIRS) else "a build" if set(scenes) <= set(BUILDS) else "anything"
    return found.row(f"SIGKILL at {where} of {kinds}")


def repeated_kills(scenes: Sequence[str], scale: int, *, seed: int = 0) -> Row:
    """Histories of two and three kills at random operations."""
    found = explore(_repeated, (tuple(scenes), scale, seed), scale, patience=4 * PATIENCE_SECONDS)
    return found.row("two and three SIGKILLs, one after the other")


def _every(cases: dict[str, Case]) -> list[History]:
    found = []
    for scene, case in cases.items():
        for at, name in enumerate(scene_operations(case, scene)):
            # What is after one operation is before the next, so one scene of each kind is enough for both.
            hows = ["before", *(["half"] if name == "write" else []), *(["after"] if scene == "build" else [])]
            found += [History(scene, (Kill(at, how),)) for how in hows]
    return found


@contextlib.contextmanager
def _single(scenes: tuple[str, ...], scale: int | None, seed: int) -> Iterator[Point]:
    with set_scenes(scenes) as cases:
        plan = _every(cases)
        if scale is not None:
            plan = random.Random(seed).sample(plan, scale)
        yield lambda number: _point(cases[plan[number].scene], plan[number], number)


@contextlib.contextmanager
def _repeated(scenes: tuple[str, ...], scale: int, seed: int) -> Iterator[Point]:
    chance = random.Random(seed)
    with set_scenes(scenes) as cases:
        sizes = {scene: len(scene_operations(case, scene)) for scene, case in cases.items()}
        plan = []
        for number in range(scale):
            scene = chance.choice(scenes)
            hows = ("before", "after", "half")
            # The later ones early: a run that goes on has less to do.
            spans = [sizes[scene], sizes[scene] // 2, sizes[scene] // 3][: 2 + number % 2]
            plan.append(History(scene, tuple(Kill(chance.randrange(span), chance.choice(hows)) for span in spans)))
        yield lambda number: _point(cases[plan[number].scene], plan[number], number)


def _point(case: Case, history: History, number: int) -> str | None:
    scene, output = SCENES[history.scene], case.output(number)
    scene.prepare(case, output)
    wrong = None
    for turn, kill in enumerate(history.kills):
        wrong = until_killed(partial(scene.call, case, output), kill, may_end=turn > 0)
        if wrong:
            break
    wrong = wrong or scene.afterwards(case, output)
    case.remove(output)
    return wrong and f"{history}: {wrong}"


def until_killed(call: Callable[[FileSystem], object], kill: Kill, *, may_end: bool) -> str | None:
    """Run the call in a child that is killed; a sentence if it ends in another way. A later run may end before."""
    end = Fork(lambda: call(Tapped(kill.act))).wait()
    if end.signal == signal.SIGKILL or (end.is_well and may_end):
        return None
    return f"it was not killed: {end}"


def command_kills(scale: int, *, seed: int = 0) -> Row:
    """`tokenmill prepare -j 2`, of which now a worker and now the parent is killed; at last it is left in peace.

    The moment is drawn by how much is done, and by chance within that. At least `scale` are killed.
    """
    chance = random.Random(seed)
    wrong: list[str] = []
    hangs = killed = 0
    with make_bench(COMMAND_DOCUMENTS) as bench:
        num_units = num_receipts(str(bench.place / "right"))
        while killed < scale:
            output = str(bench.place / f"out-{killed}")
            # Some to a history, each a little further on than the one before.
            moments = sorted(chance.randrange(num_units * 3 // 4) for _ in range(min(4, scale - killed)))
            try:
                victims, sentence = _disturb(bench.prepare(output, "-j", 2), output, moments, chance)
                ended = run(bench.prepare(output, "-j", 2))
            except subprocess.TimeoutExpired:
                hangs += 1
                break
            killed += len(victims)
            if ended.code != FINISHED:
                sentence = sentence or f"the command does not go on: {ended.code}: {ended.errors}"
            sentence = sentence or bench.wrong_with(output)
            if sentence:
                wrong.append(f"{', then '.join(victims)}: {sentence}")
    return Row(
        fault="SIGKILL of a command's parent or worker",
        tried=killed,
        wrong=tuple(wrong),
        hangs=hangs,
    )


def _disturb(
    arguments: list[str], output: str, moments: list[int], chance: random.Random
) -> tuple[list[str], str | None]:
    """Kill processes of a command, each when so many units are done, and start it again when the parent is dead.

    Gives who was killed, and a sentence if the others did not take it well.
    """
    killed: list[str] = []
    left = list(moments)
    while left:
        with started(arguments) as process:
            while left and wait_until(lambda: _is_at_work(process, output, left[0]), process):
                moment = left.pop(0)
                time.sleep(chance.uniform(0, 0.02))
                workers = below(process.pid)
                if chance.random() < 0.5 or not workers:
                    process.kill()
                    process.wait()
                    killed.append(f"parent killed at {moment} units")
                    if not _all_gone(workers):
                        return killed, "a worker outlives its parent"
                    break
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(workers), signal.SIGKILL)
                    killed.append(f"worker killed at {moment} units")
            process.wait(300)
            if process.returncode == FINISHED:
                break
            if process.returncode != -signal.SIGKILL:
                return killed, f"the command ended with {process.returncode} after a worker was killed"
    return killed, None


def _is_at_work(process: subprocess.Popen[bytes], output: str, moment: int) -> bool:
    return num_receipts(output) >= moment and bool(below(process.pid))


def _all_gone(processes: list[int]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(is_alive(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


EXPERIMENTS = [
    # The other scenes have the same operations; they are among those that are killed again and again.
    ("kills, builds", partial(kills, BUILDS[:2], None)),
    ("kills, parts", partial(kills, PARTS[:1], None)),
    ("kills, repairs", partial(kills, REPAIRS[:1], None)),
    ("kills, commands", partial(command_kills, 32, seed=1)),
    ("kills, repeated", partial(repeated_kills, (*BUILDS, *REPAIRS), 240, seed=1)),
]
