"""Skipped steps: samples that a run leaves out, for example after a loss spike.

    skip=[(2, 4)], 3 samples in a step:   0 1 2 | 3 4 5 | 12 13 14 | 15 ...        samples 6 to 11 are never given

Steps become samples of the global order when they are given, so a run skips the same samples on any number of ranks.
They count as seen: positions, epochs and the schedule of a mixture are those of the run without a skip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill import arguments
from tokenmill.arguments import MAX_INT
from tokenmill.errors import RecipeError, StateError

Numbers = npt.NDArray[np.int64]
Skip = Sequence[tuple[int, int]]

_PAIR = 2
_HINT = "write it like [(1000, 1100)]: the first step to skip, and the first one behind"


@dataclass(frozen=True, slots=True)
class SkippedSteps:
    """Steps from `first` up to `stop`, and the samples that they were when they were given: from `begin` to `end`."""

    first: int
    stop: int
    begin: int
    end: int


class SkippedSamples:
    """Ranges of the global order that are not given. They may overlap."""

    def __init__(self, ranges: Sequence[SkippedSteps] = ()) -> None:
        self.ranges = tuple(sorted(set(ranges), key=lambda one: (one.begin, one.end)))
        merged: list[list[int]] = []
        for one in self.ranges:
            if merged and one.begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], one.end)
            else:
                merged.append([one.begin, one.end])
        self._begins, self._ends = np.array(merged, np.int64).reshape(-1, 2).T
        self._lost = np.concatenate(([0], np.cumsum(self._ends - self._begins)))

    @property
    def num_skipped(self) -> int:
        return int(self._lost[-1])

    @property
    def end(self) -> int:
        """The position behind the last sample that is skipped; 0 if there is none."""
        return int(self._ends.max(initial=0))

    def num_given(self, stop: int) -> int:
        """Samples before position `stop` that are given."""
        return stop - int(np.clip(stop - self._begins, 0, self._ends - self._begins).sum())

    def positions(self, numbers: Numbers) -> Numbers:
        """The positions of the given samples with these numbers."""
        before = (self._begins - self._lost[:-1]).searchsorted(numbers, side="right")
        found: Numbers = numbers + self._lost[before]
        return found

    def end_of(self, count: int) -> int:
        """The position behind the first `count` given samples."""
        return int(self.positions(np.array([count - 1]))[0]) + 1 if count else 0

    def resumed_from(self, recorded: Any, seen: int, their_seq_len: int, seq_len: int) -> SkippedSamples:
        """These, as an argument of a new loader, and those of the state that it resumes from.

        Steps that the state has are the same skip, whatever samples they would be now. If rows have another `seq_len`
        now, all that contain a skipped token are skipped.
        """
        theirs = [
            replace(one, begin=one.begin * their_seq_len // seq_len, end=-(-one.end * their_seq_len // seq_len))
            for one in _read(recorded)
        ]
        if any(one.end >= MAX_INT for one in theirs):
            raise _damaged(recorded)
        known = {(one.first, one.stop) for one in theirs}
        mine = [one for one in self.ranges if (one.first, one.stop) not in known]
        for one in mine:
            if one.begin < seen:
                raise StateError(
                    f"skip of steps {one.first} to {one.stop} begins at sample {one.begin}, but the state is at sample "
                    f"{seen}: what was seen cannot be skipped any more",
                    hint="load a state from before these steps, or skip later ones",
                )
        return SkippedSamples([*theirs, *mine])

    def to_json(self) -> list[dict[str, list[int]]]:
        return [{"steps": [one.first, one.stop], "samples": [one.begin, one.end]} for one in self.ranges]


NO_SKIPS = SkippedSamples()


def check_skip(skip: Any, samples_per_step: int) -> SkippedSamples:
    """The samples of these steps. A `RecipeError` says what is wrong with them."""
    if not isinstance(skip, Sequence) or isinstance(skip, str | bytes):
        raise RecipeError(f"skip is {arguments.show(skip)}", hint=_HINT)
    found = []
    for steps in skip:
        if not isinstance(steps, tuple | list) or len(steps) != _PAIR:
            raise RecipeError(f"skip has {arguments.show(steps)}", hint=_HINT)
        most = (MAX_INT - 1) // samples_per_step
        first, stop = (arguments.whole("a step of skip", step, most=most, hint=_HINT) for step in steps)
        if first >= stop:
            raise RecipeError(f"skip has steps {first} to {stop}, which are none", hint=_HINT)
        found.append(SkippedSteps(first, stop, first * samples_per_step, stop * samples_per_step))
    return SkippedSamples(found)


def _damaged(recorded: Any) -> StateError:
    return StateError(f"skip is {arguments.show(recorded)}", hint="the state is damaged")


def _read(recorded: Any) -> list[SkippedSteps]:
    """What a state has recorded. A `StateError` if that makes no sense."""
    if not isinstance(recorded, list):
        raise _damaged(recorded)
    found = []
    for one in recorded:
        try:
            numbers = [arguments.as_int(number) for pair in (one["steps"], one["samples"]) for number in pair]
        except (TypeError, KeyError):
            raise _damaged(recorded) from None
        first, stop, begin, end = (*numbers, None, None, None, None)[:4]
        if len(numbers) != 2 * _PAIR or first is None or stop is None or begin is None or end is None:
            raise _damaged(recorded)
        if not (0 <= first < stop < MAX_INT and 0 <= begin < end < MAX_INT):
            raise _damaged(recorded)
        found.append(SkippedSteps(first, stop, begin, end))
    return found
