"""Exact shares: which of several parts a place of a stream belongs to, at any place at once.

    weights 0.5, 0.3, 0.2  ->  shares 5, 3, 2 of 10  ->  a turn of 10 places, over and over:  a b a c a b a c a b

Up to any place, the number of places of a part differs from its share by less than 1. This is
Tijdeman's solution of the chairman assignment problem: the m-th place of a part has a window
in which it must lie; of those whose window has begun, the one whose window ends first is next.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

# Weights without a smaller common denominator are taken to so many parts of a whole.
MAX_TURN = 1 << 16


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of places that repeats: `parts` at each, and how many of the same part stand `before` it in the turn."""

    shares: tuple[int, ...]
    parts: Numbers
    before: Numbers

    def at(self, places: Numbers) -> tuple[Numbers, Numbers]:
        """The parts at these places, and how many places of that part are before each."""
        turns, within = np.divmod(places, len(self.parts))
        parts = self.parts[within]
        return parts, turns * np.array(self.shares)[parts] + self.before[within]

    def count(self, part: int, stop: int) -> int:
        """Places of a part before `stop`."""
        turns, within = divmod(stop, len(self.parts))
        return turns * self.shares[part] + int(np.count_nonzero(self.parts[:within] == part))

    def find(self, part: int, number: int) -> int:
        """The place that is a part's `number`th, from 0. The part must have a share."""
        turns, within = divmod(number, self.shares[part])
        return turns * len(self.parts) + int(np.flatnonzero(self.parts == part)[within])


def make_turn(shares: Sequence[int]) -> Turn:
    """The turn in which each part has its share of places."""
    parts = np.array(_assign(shares), np.int64)
    before = np.empty(len(parts), np.int64)
    for part, share in enumerate(shares):
        before[parts == part] = np.arange(share)
    return Turn(tuple(shares), parts, before)


def to_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportion of these weights, which are not negative and not all 0.

    A float is taken as it is written, so 0.1 is a tenth. Where the sum would pass `MAX_TURN`,
    it is that, and each share is within one of the exact one.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [fraction / sum(exact) for fraction in exact]
    turn = math.lcm(*(fraction.denominator for fraction in whole))
    if turn <= MAX_TURN:
        return tuple(int(fraction * turn) for fraction in whole)
    shares = [int(fraction * MAX_TURN) for fraction in whole]
    rests = sorted(range(len(whole)), key=lambda part: shares[part] - whole[part] * MAX_TURN)
    for part in rests[: MAX_TURN - sum(shares)]:
        shares[part] += 1
    common = math.gcd(*shares)
    return tuple(share // common for share in shares)


def _assign(shares: Sequence[int]) -> list[int]:
    """The part at each place of a turn."""
    turn = sum(shares)
    active = [part for part, share in enumerate(shares) if share]
    # In parts of a place: windows are shorter by this on both sides than would keep the difference below 1.
    margin = max(2 * len(active) - 2, 2)
    begun: list[list[tuple[int, int]]] = [[] for _ in range(turn)]
    for part in active:
        unit = margin * shares[part]
        for number in range(shares[part]):
            begin = -(-(number * margin + 1) * turn // unit) - 1
            end = ((number + 1) * margin - 1) * turn // unit
            begun[begin].append((end, part))
    waiting: list[tuple[int, int]] = []
    parts = []
    for place in range(turn):
        for window in begun[place]:
            heapq.heappush(waiting, window)
        parts.append(heapq.heappop(waiting)[1])
    return parts
