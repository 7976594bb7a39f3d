from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill.errors import StateError
from tokenmill.loader.loader import DataLoader
from tokenmill.loader.mixture import Mixture
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


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside of another one."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 1 << 61, 1 << 62, 1 << 80, -(1 << 80), 0.5, float("nan"), float("inf")),
    *("", "web", "0", "\0", "x" * 100_000, [], {}, [[]], [0], [[0]], [[0, 1]], {"": 0}, [None], [[None, None]]),
]


def test_a_state_with_any_value_in_any_place_is_refused_or_fits(tmp_path: Path) -> None:
    """A state that is taken gives a position from which the loader can go on, or which its limit refuses."""
    write_jsonl(tmp_path / "a.jsonl", make_texts(60, seed=2, words=20))
    tokenmill.prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer="byte", workers=1)
    dataset = tokenmill.open(tmp_path / "out")
    mixture = Mixture({"web": (dataset, 0.6), "code": (dataset, 0.4)}, schedule={5: {"web": 1, "code": 1}})
    loader = DataLoader(mixture, 12, 4, max_seq_len=48, skip=[(3, 4), (9, 12)], prefetch=0)
    for _, _ in zip(range(5), loader, strict=False):
        pass
    good = json.loads(json.dumps(loader.state_dict()))
    chance, refused = random.Random(1), 0
    for path in places_in(good):
        for new in chance.sample(HOSTILE, 12):
            try:
                loader.load_state_dict(replaced(good, path, new))
            except StateError:
                refused += 1
            else:
                assert 0 <= loader.samples_seen < 1 << 62
                assert json.dumps(loader.state_dict())
    assert refused > 300
    loader.load_state_dict(good)
    assert loader.state_dict() == good
