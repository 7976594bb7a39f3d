from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill import arguments
from tokenmill.errors import RecipeError


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_what_stands_for_a_whole_number_is_that_int(value: Any) -> None:
    assert type(arguments.whole("n", value)) is int
    assert arguments.whole("n", value) == 3


@pytest.mark.parametrize("value", [True, np.True_, 3.0, "3", None, [3], np.array([3, 4]), np.float64(3), 2**62, -1])
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RecipeError, match=r"^n is "):
        arguments.whole("n", value)


@pytest.mark.parametrize("value", [None, b"a", "", " ", "\t\n", "\u3000", 3, "a\0b", ["a"]])
def test_a_place_is_a_path_or_a_url(value: Any) -> None:
    assert arguments.place("output", Path("a")) == "a"
    with pytest.raises(RecipeError, match=r"^output is "):
        arguments.place("output", value)


@pytest.mark.parametrize(("value", "means"), [(True, True), (np.False_, False), (1, True), (0, False)])
def test_a_flag_is_true_or_false(value: Any, means: bool) -> None:
    assert arguments.flag("restart", value) is means
    with pytest.raises(RecipeError, match="restart is 'no'"):
        arguments.flag("restart", "no")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, -0.5, True, "1", None])
def test_a_number_is_finite_and_from_0_on(value: Any) -> None:
    assert arguments.number("weight", np.float64(0.5), hint="") == 0.5
    with pytest.raises(RecipeError, match="weight is"):
        arguments.number("weight", value, hint="give one")


def test_progress_counts_rates_of_what_this_run_has_moved() -> None:
    event = arguments.progress_event(70, 100, moved_bytes=20, seconds=2.0, units=3)
    assert event == {
        "kind": "progress", "bytes": 70, "total_bytes": 100, "bytes_per_second": 10, "seconds_left": 3.0, "units": 3
    }  # fmt: skip
    assert arguments.progress_event(70, 100, moved_bytes=0, seconds=2.0)["seconds_left"] is None
    assert arguments.progress_event(120, 100, moved_bytes=0, seconds=0.0)["bytes"] == 100
    assert arguments.progress_event(120, 100, moved_bytes=0, seconds=0.0)["seconds_left"] == 0.0
