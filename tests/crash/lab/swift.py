"""Builds without what is the same every time: a lab that builds ten thousand times reads its sources once.

Only what never touches the output is remembered: the setting up, the look before the work, the
documents of a unit. All that goes through the seam is done for real each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest.mock import patch

from tokenmill.build import pipeline, preflight, progress, resolve
from tokenmill.sources.reader import read_unit
from tokenmill.units import encode


@contextlib.contextmanager
def swift() -> Iterator[None]:
    """Until the end of the block, builds in this process remember what does not depend on the output."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            patch.object(
                pipeline, "resolve_build", _remembered(resolve.resolve_build, lambda recipe, **_: repr(recipe))
            )
        )
        stack.enter_context(
            patch.object(
                pipeline,
                "check_parity_of_plan",
                _remembered(preflight.check_parity_of_plan, lambda *given: repr(given[:2])),
            )
        )
        real = read_unit
        read = _remembered(lambda *given, **more: list(real(*given, **more)), lambda *given, **_: repr(given[:2]))
        stack.enter_context(patch.object(encode, "read_unit", read))
        # A line of progress now and then would make the number of operations depend on the clock.
        stack.enter_context(patch.object(progress, "LOG_SECONDS", float("inf")))
        yield


def _remembered(function: Callable[..., Any], key: Callable[..., Hashable]) -> Callable[..., Any]:
    found: dict[Hashable, Any] = {}

    def remembered(*given: Any, **more: Any) -> Any:
        asked = key(*given, **more)
        if asked not in found:
            found[asked] = function(*given, **more)
        return found[asked]

    return remembered
