"""A seeded bug: a mend taken out while a short comparison runs, which must notice.

What counts is the verdict of the comparison, in its own words: an error that the bug leads to proves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from lab_runner import Row

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """What is taken out, how, and the quick comparison that has to find it; `says` is a part of its verdict.

    One whose trial takes longer is for the long form.
    """

    name: str
    plant: Plant
    trial: Callable[[], Row]
    says: str
    is_quick: bool = True


def replaced(target: Any, attribute: str, value: Any) -> Plant:
    """Put another value in the place of an attribute while the trial runs."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with mock.patch.object(target, attribute, value):
            yield

    return plant


def is_caught(bug: Bug) -> bool:
    """Whether the trial says with the bug planted what it should. A trial that breaks has compared nothing."""
    with bug.plant():
        try:
            row = bug.trial()
        except Exception:
            return False
    return any(bug.says in sentence for sentence in row.wrong)


def all_of(*plants: Plant) -> Plant:
    """Several at once."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for one in plants:
                stack.enter_context(one())
            yield

    return plant
