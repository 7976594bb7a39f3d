from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tokenmill.errors import StateError
from tokenmill.loader.state import check_content, check_state

STREAM = {"fingerprint": "a", "seed": 1}
STATE: dict[str, Any] = {"version": 1, "stream": STREAM, "samples_seen": 8}


def test_a_state_of_the_stream_gives_the_samples_seen() -> None:
    assert check_state(STATE, STREAM, hint="") == 8


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (None, "a state is a mapping, not of type NoneType"),
        ([STATE], "a state is a mapping, not of type list"),
        ({}, "the state has version None"),
        ({**STATE, "version": True}, "the state has version True"),
        ({**STATE, "version": 2}, "the state has version 2, this loader 1"),
        ({**STATE, "stream": {**STREAM, "seed": 2}}, "seed: the state has 2, this loader 1"),
        ({**STATE, "stream": []}, "fingerprint: the state has None, this loader 'a'"),
        ({**STATE, "samples_seen": -1}, "samples_seen is -1"),
        ({**STATE, "samples_seen": 1.0}, r"samples_seen is 1\.0"),
        ({**STATE, "samples_seen": True}, "samples_seen is True"),
        ({**STATE, "samples_seen": "8"}, "samples_seen is '8'"),
        ({**STATE, "samples_seen": 1 << 62}, "samples_seen is 4611686018427387904"),
    ],
)
def test_a_state_that_is_damaged_or_of_another_stream_is_refused(state: Any, told: str) -> None:
    with pytest.raises(StateError, match=told):
        check_state(state, STREAM, hint="")


def test_numpy_integers_count_as_integers() -> None:
    assert type(check_state({**STATE, "samples_seen": np.int64(8)}, STREAM, hint="")) is int


@pytest.mark.parametrize(
    ("theirs", "mine", "fits"),
    [("a", "a", True), (None, "a", True), ("a", "b", False), (["a"], "a", False), (["a", "c"], ["a", "b"], False)],
)
def test_a_state_of_other_content_is_refused(theirs: Any, mine: Any, fits: bool) -> None:
    state = {**STATE, "stream": {"parts": [{"part": "web"}, {"part": "code"}]}, "content": theirs}
    if fits:
        check_content(state, "content", mine)
    else:
        with pytest.raises(StateError, match="the state was written before the content"):
            check_content(state, "content", mine)
