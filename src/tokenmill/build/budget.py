"""A token budget that is met exactly.

Units count in the order of the plan. Once the finished ones from the beginning on reach the
budget, no more are started; the unit that crosses it is done once more, cut to what is left.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.build.task import Task, make_task
from tokenmill.planning import Plan


class Budget:
    """How many units a budget takes. `known`, the tokens of units, is shared with the build, and grows."""

    def __init__(self, max_tokens: int | None, known: Mapping[int, int]) -> None:
        self._max = max_tokens
        self._known = known
        self._next = 0
        self._tokens = 0

    def is_spent(self) -> bool:
        """Whether the units done so far, without a gap, reach the budget."""
        if self._max is None:
            return False
        while self._tokens < self._max and self._next in self._known:
            self._tokens += self._known[self._next]
            self._next += 1
        return self._tokens >= self._max

    def num_units(self, total: int) -> int:
        """How many whole units the dataset takes."""
        if not self.is_spent():
            return total
        return self._next if self._tokens == self._max else self._next - 1

    def cut(self, plan: Plan) -> Task | None:
        """The unit that crosses the budget, cut to what is left of it; None if none has to be cut."""
        if not self.is_spent() or self._max is None or self._tokens == self._max:
            return None
        unit = plan.units[self._next - 1]
        room = self._max - (self._tokens - self._known[unit.index])
        return make_task(plan, unit.index, room)
