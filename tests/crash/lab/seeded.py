"""The lab tests itself: each protective line is taken out in turn, and an experiment has to notice.

The same experiments on the code as it is must find nothing: those of crashes are in `powercut`, the others are here.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from lab import trouble
from lab.bugs import BUGS, Bug
from lab.decay import decays
from lab.powercut import Enough, Explorer
from lab.steady import Boots, steady
from lab.subject import Subject, make_subject
from lab.verdict import Hang
from lab_runner import Row
from tokenmill.errors import TokenmillError

Trial = Callable[[Subject], Iterator[str | None]]


def seeded_bugs(bugs: Sequence[Bug] = BUGS) -> Row:
    """Each bug alone; those that no experiment notices are what is wrong."""
    missed = tuple(f"nothing notices: {bug.name}" for bug, found in catches(bugs) if found is None)
    return Row(fault="seeded bugs caught", tried=len(bugs), wrong=missed)


def troubles(kinds: Sequence[str], decayed: Mapping[str, int], *, every: int) -> Row:
    """All troubles with some kinds of runs, and damage after so many crashes; `every` thins out the racing builders."""
    trials = [(kind, partial(decays, count=count, seed=0)) for kind, count in decayed.items()]
    for kind in kinds:
        plain = (trouble.short, trouble.garbled, trouble.taken, trouble.lost)
        trials += [(kind, trial) for trial in (*plain, partial(trouble.disagree, every=every))]
    tried, wrong, hangs = 0, [], 0
    with _subjects() as (subject, _):
        for kind, trial in trials:
            try:
                for found in trial(subject(kind)):
                    tried += 1
                    wrong += [found] if found else []
            except Hang as hang:
                hangs += 1
                wrong.append(f"{kind}: {hang}")
    return Row(
        fault="damage after crashes, garbled and short writes, disagreeing builders, modelled",
        tried=tried,
        wrong=tuple(wrong),
        hangs=hangs,
    )


def catches(bugs: Sequence[Bug]) -> Iterator[tuple[Bug, str | None]]:
    """Each bug with the first wrong result that it led to."""
    with _subjects() as (subject, boots):
        trials: dict[str, Trial] = {
            "kills": partial(_crashes, boots, Explorer.kills),
            "cuts": partial(_crashes, boots, partial(Explorer.cuts, mixed=8, seed=0)),
            "decays": partial(decays, count=1500, seed=0),
            "short": trouble.short,
            "garbled": trouble.garbled,
            "taken": trouble.taken,
            "disagree": partial(trouble.disagree, every=5),
            "lost": trouble.lost,
        }
        for bug in bugs:
            kind = subject(bug.kind)
            with bug.plant():
                yield bug, _first_wrong(trials[bug.trial](kind))


def _first_wrong(verdicts: Iterator[str | None]) -> str | None:
    try:
        return next((wrong for wrong in verdicts if wrong), None)
    except Hang as hang:
        return str(hang)


def _crashes(boots: Boots, exploration: Callable[[Explorer], None], subject: Subject) -> Iterator[str | None]:
    try:
        explorer = Explorer(subject, boots, max_wrong=1)
    except TokenmillError as error:
        yield f"{subject.name}, not disturbed: {type(error).__name__}: {error.message}"
        return
    with contextlib.suppress(Enough):
        exploration(explorer)
    yield from explorer.findings.wrong


@contextlib.contextmanager
def _subjects() -> Iterator[tuple[Callable[[str], Subject], Boots]]:
    """A maker of subjects, each of which is made once, on the code as it is."""
    made: dict[str, Subject] = {}
    with tempfile.TemporaryDirectory(prefix="tokenmill-lab-") as path, steady() as boots:

        def subject(kind: str) -> Subject:
            if kind not in made:
                made[kind] = make_subject(Path(path, kind), kind)
            return made[kind]

        yield subject, boots


FULL_DECAYS = {"plain": 700, "splits": 700, "scratch": 700, "budget": 700, "packs": 700}
EXPERIMENTS = [
    ("modelled troubles", partial(troubles, ("plain", "scratch"), FULL_DECAYS, every=5)),
    ("seeded bugs", seeded_bugs),
]
