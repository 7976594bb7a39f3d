"""A seeded bug: a mend taken out while a short comparison runs, which must notice."""

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
    """What is taken out, how, and the quick comparison that has to find it."""

    name: str
    plant: Plant
    trial: Callable[[], Row]


def replaced(target: Any, attribute: str, value: Any) -> Plant:
    """Put another value in the place of an attribute while the trial runs."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with mock.patch.object(target, attribute, value):
            yield

    return plant


def is_caught(bug: Bug) -> bool:
    """Whether the trial finds something wrong with the bug planted. An error of any kind counts as found."""
    with bug.plant():
        try:
            row = bug.trial()
        except Exception:
            return True
    return bool(row.wrong or row.hangs)
