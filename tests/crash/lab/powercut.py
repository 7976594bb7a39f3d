"""Kills and power cuts after every operation of a run, one, two or three in a row, on a file system in memory.

Each state that a crash may leave is looked at as a reader would, and then the same call has to finish it. States
that differ only in the random part of a name, or in bytes that nobody reads, are one state: it is run and counted once.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path

from lab.aftermath import Machine, choices, identity, moments, random_cut
from lab.modelfs import ModelFileSystem, Operation
from lab.steady import Boots, steady
from lab.subject import KINDS, Subject, make_subject
from lab.verdict import Hang, Judge, Wrong
from lab_runner import Row

# A defect shows in thousands of states; a few of them tell what it is.
MAX_WRONG = 10
# How many second crashes follow from one resumed state, and how many third ones from each of those.
SECOND, THIRD = 12, 2

Log = Sequence[Operation]


@dataclass(slots=True)
class Findings:
    """What an exploration found. `states` are the identities of those that were run."""

    states: set[bytes] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    hangs: int = 0


class Enough(Exception):
    """There are as many wrong results as anyone wants to read."""


@dataclass(frozen=True, slots=True)
class Crash:
    """What a crash left, and how it came to it."""

    machine: Machine
    story: str


class Explorer:
    """Crashes one subject in many ways; `thinned`, it runs only one in so many of the states."""

    def __init__(self, subject: Subject, boots: Boots, *, thinned: int = 1, max_wrong: int = MAX_WRONG) -> None:
        self.findings = Findings()
        self._subject = subject
        self._boots = boots
        self._thinned = thinned
        self._max_wrong = max_wrong
        self._judge = Judge(subject)
        self._known: set[bytes] = set()
        fs = ModelFileSystem(subject.start)
        subject.run(fs)
        self._log: Log = fs.log

    def kills(self) -> None:
        """The process dies after each operation. What is not durable yet stays so while the next one works."""
        for count, machine in moments(Machine(self._subject.start), self._log):
            key = identity(machine.killed()) + identity(machine.durable())
            if self._is_new(key) and key[0] % self._thinned == 0:
                self._try(Crash(machine, f"killed after {_place(self._log, count)}"), key)

    def cuts(self, mixed: int, seed: int, *, run: bool = True) -> None:
        """The power fails after each operation: all plain cases and `mixed` others. Or only take them for known."""
        for count, machine in moments(Machine(self._subject.start), self._log):
            points = machine.points()
            for choice in choices(points, random.Random(f"{seed} {count}"), mixed):
                disk = machine.cut(points, choice)
                key = identity(disk)
                if self._is_new(key) and run and key[0] % self._thinned == 0:
                    self._boots.add()
                    self._try(Crash(Machine(disk), f"power cut after {_place(self._log, count)}, {choice}"), key)

    def rows(self, count: int, seed: int) -> None:
        """Two and three crashes in a row: some states are resumed, and each such run is crashed again and again."""
        for number in range(count):
            chance = random.Random(f"{seed} {number}")
            first = self._crash(Crash(Machine(self._subject.start), f"history {number}"), self._log, chance)
            log = self._try(first, None)
            for _ in range(SECOND if log else 0):
                second = self._crash(first, log, chance)
                key = identity(second.machine.killed())
                if not self._is_new(key):
                    continue
                again = self._try(second, key)
                for _ in range(THIRD if again else 0):
                    third = self._crash(second, again, chance)
                    key = identity(third.machine.killed())
                    if self._is_new(key):
                        self._try(third, key)

    def _crash(self, before: Crash, log: Log, chance: random.Random) -> Crash:
        """A kill or a power cut somewhere in a run that began with what another crash had left."""
        count = chance.randint(0, len(log))
        machine = before.machine.copy()
        machine.run(log[:count])
        if chance.random() < 0.3:
            return Crash(machine, f"{before.story}, killed after {_place(log, count)}")
        self._boots.add()
        return Crash(Machine(random_cut(machine, chance)), f"{before.story}, power cut after {_place(log, count)}")

    def _is_new(self, key: bytes) -> bool:
        if key in self._known:
            return False
        self._known.add(key)
        return True

    def _try(self, crash: Crash, key: bytes | None) -> Log:
        """Look at a state and resume it; gives what the resumed run did, or nothing if something was wrong."""
        if key is not None:
            self.findings.states.add(key)
        try:
            disk = crash.machine.killed()
            self._judge.look(disk)
            return self._judge.resume(crash.machine, disk)
        except Wrong as wrong:
            self.findings.wrong.append(f"{self._subject.name}: {crash.story}: {wrong}")
        except Hang as hang:
            self.findings.hangs += 1
            self.findings.wrong.append(f"{self._subject.name}: {crash.story}: {hang}")
        if len(self.findings.wrong) >= self._max_wrong:
            raise Enough
        return ()


def _place(log: Log, count: int) -> str:
    """Where in a run a crash was."""
    return f"operation {count} of {len(log)} ({f'{log[count - 1].call} {log[count - 1].path}' if count else 'none'})"


Exploration = Callable[[Explorer], None]


def kills(kinds: Sequence[str] = tuple(KINDS)) -> Row:
    """Every operation of every kind of run is the last one of its process."""
    return _row("kill, modelled", {kind: methodcaller("kills") for kind in kinds})


def power_cuts(mixed: Mapping[str, int], seed: int = 0, *, of: str = "", thinned: int = 1) -> Row:
    """The power fails after every operation; for each kind of run, all plain cases and so many mixed ones.

    `thinned` runs only one in so many of the states.
    """
    explorations = {kind: methodcaller("cuts", n, seed) for kind, n in mixed.items()}
    return _row(f"power cut, modelled{of and f': {of}'}", explorations, thinned)


def crashes_in_a_row(histories: Mapping[str, int], seed: int = 0, *, mixed: Mapping[str, int] | None = None) -> Row:
    """Two and three kills and power cuts; states that a single one leaves, too, are not among those counted."""
    known = mixed or {}
    explorations = {kind: partial(_in_a_row, n, known.get(kind, 0), seed) for kind, n in histories.items()}
    return _row("two and three crashes in a row, modelled", explorations)


def _in_a_row(histories: int, mixed: int, seed: int, explorer: Explorer) -> None:
    explorer.cuts(mixed, seed, run=False)
    explorer.rows(histories, seed)


def _row(fault: str, explorations: Mapping[str, Exploration], thinned: int = 1) -> Row:
    parts = [explore(kind, exploration, thinned) for kind, exploration in explorations.items()]
    return Row(
        fault=fault,
        tried=sum(len(part.states) for part in parts),
        wrong=tuple(wrong for part in parts for wrong in part.wrong),
        hangs=sum(part.hangs for part in parts),
    )


def explore(kind: str, exploration: Exploration, thinned: int = 1) -> Findings:
    """Make a subject and explore it, all in this process."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-lab-") as path, steady() as boots:
        explorer = Explorer(make_subject(Path(path), kind), boots, thinned=thinned)
        with contextlib.suppress(Enough):
            exploration(explorer)
        return explorer.findings


BUILD_CUTS = {"plain": 2000, "splits": 2500, "scratch": 50, "budget": 2000, "packs": 500}
OTHER_CUTS = {"join": 7500, "update": 1000, "repair": 2000, "remake": 2000}
FULL_HISTORIES = dict.fromkeys(KINDS, 100)
EXPERIMENTS = [
    ("modelled power cuts, builds", partial(power_cuts, BUILD_CUTS, of="builds")),
    ("modelled power cuts, others", partial(power_cuts, OTHER_CUTS, of="joins, updates and repairs")),
    ("modelled kills", kills),
    ("modelled crashes in a row", partial(crashes_in_a_row, FULL_HISTORIES, mixed=BUILD_CUTS | OTHER_CUTS)),
]
