from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import RecipeError, StateError
from tokenmill.loader.loader import DataLoader
from tokenmill.loader.mixture import Mixture
from tokenmill.loader.skip import SkippedSamples, SkippedSteps, check_skip

pairs = st.tuples(st.integers(0, 40), st.integers(1, 15)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("skip")
    write_jsonl(path / "a.jsonl", make_texts(80, seed=4, words=20))
    tokenmill.prepare(str(path / "a.jsonl"), path / "out", tokenizer="byte", unit_bytes=1500, workers=1)
    return tokenmill.open(path / "out")


def mixed(dataset: Dataset) -> Mixture:
    schedule = {90: {"one": 1, "other": 3}}
    return Mixture({"one": (dataset, 0.7), "other": (dataset, 0.3)}, schedule=schedule)


@given(st.lists(pairs, max_size=5), st.integers(1, 4))
def test_positions_are_those_that_are_left(ranges: list[tuple[int, int]], step: int) -> None:
    skips = check_skip(ranges, step)
    gone = {sample for first, stop in ranges for sample in range(first * step, stop * step)}
    left = [position for position in range(400) if position not in gone]
    assert skips.positions(np.arange(len(left))).tolist() == left
    assert [skips.num_given(stop) for stop in range(400)] == [
        sum(position < stop for position in left) for stop in range(400)
    ]
    assert [skips.end_of(count) for count in range(len(left))] == [0, *(position + 1 for position in left[:-1])]


def steps_of(loader: DataLoader, steps: int) -> list[list[tuple[int, int]]]:
    """Component and number of each sample, step by step."""
    found = []
    for batch in itertools.islice(iter(loader), steps):
        numbers = batch["sample_index"].tolist()
        found.append(list(zip(batch.get("component", np.zeros(len(numbers), int)).tolist(), numbers, strict=True)))
    return found


def open_loader(source: Dataset | Mixture, batch_size: int, **options: Any) -> DataLoader:
    fields: tuple[str, ...] = ("sample_index", "component") if isinstance(source, Mixture) else ("sample_index",)
    return DataLoader(source, 40, batch_size, fields=fields, **{"prefetch": 0, **options})


@pytest.mark.parametrize("kind", ["concat", "best_fit", "mixture"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_skipped_steps_are_left_out(dataset: Dataset, kind: str, prefetch: int) -> None:
    source: Any = mixed(dataset) if kind == "mixture" else dataset
    packing: Any = "best_fit" if kind == "best_fit" else "concat"
    plain = steps_of(open_loader(source, 3, packing=packing), 80)
    loader = open_loader(source, 3, packing=packing, skip=[(5, 9), (20, 21)], prefetch=prefetch)
    assert steps_of(loader, 60) == [*plain[:5], *plain[9:20], *plain[21:65]]
    assert loader.samples_seen == 3 * 65  # what is skipped counts


def test_one_hundred_histories_with_skips_leave_out_the_same_samples(dataset: Dataset) -> None:
    """Runs on other ranks and batch sizes, each resumed from the one before, which may add a skip of coming steps."""
    chance = random.Random(3)
    source = mixed(dataset)
    plain = [sample for (sample,) in steps_of(open_loader(source, 1), 1500)]
    for _ in range(100):
        found: list[tuple[int, int]] = []
        gone: set[int] = set()
        state: dict[str, Any] | None = None
        for _ in range(chance.randint(1, 4)):
            ranks, batch_size = chance.randint(1, 3), chance.randint(1, 4)
            step, seen = ranks * batch_size, 0 if state is None else state["samples_seen"]
            skip = []
            if chance.random() < 0.7:
                first = -(-seen // step) + chance.randint(0, 5)
                skip = [(first, first + chance.randint(1, 4))]
                known = [] if state is None else [tuple(one["steps"]) for one in state.get("skip", [])]
                if skip[0] not in known:
                    gone |= set(range(skip[0][0] * step, skip[0][1] * step))
            steps, by_rank = chance.randint(0, 6), []
            for rank in range(ranks):
                loader = open_loader(source, batch_size, rank=rank, world_size=ranks, skip=skip)
                if state is not None:
                    loader.load_state_dict(state)
                by_rank.append(steps_of(loader, steps))
            state = json.loads(json.dumps(loader.state_dict()))
            for number in range(steps):
                found += [sample for one in by_rank for sample in one[number]]
        left = [sample for position, sample in enumerate(plain) if position not in gone]
        assert found == left[: len(found)]


def test_the_state_tells_what_was_skipped(dataset: Dataset) -> None:
    loader = open_loader(dataset, 4, skip=[(2, 5)])
    assert open_loader(dataset, 4).state_dict().keys() == {"version", "stream", "content", "samples_seen"}
    steps_of(loader, 3)
    assert loader.state_dict()["skip"] == [{"steps": [2, 5], "samples": [8, 20]}]
    assert "skips 12 samples" in repr(loader)
    for batch_size, skip in ((6, []), (6, [(2, 5)]), (4, [(2, 5)])):  # the same steps are the same skip
        resumed = open_loader(dataset, batch_size, skip=skip)
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert resumed.state_dict() == loader.state_dict()


def test_what_was_seen_cannot_be_skipped(dataset: Dataset) -> None:
    loader = open_loader(dataset, 4)
    steps_of(loader, 3)
    for skip in ([(0, 1)], [(2, 9)]):
        with pytest.raises(StateError, match="what was seen cannot be skipped any more"):
            open_loader(dataset, 4, skip=skip).load_state_dict(loader.state_dict())
    open_loader(dataset, 4, skip=[(3, 9)]).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_is_shorter_by_what_is_skipped(dataset: Dataset, drop_last: bool, world_size: int) -> None:
    count = open_loader(dataset, 1).num_samples
    found = []
    for rank in range(world_size):
        loader = open_loader(dataset, 7, rank=rank, world_size=world_size, skip=[(1, 3)], epochs=1, drop_last=drop_last)
        num_steps = loader.num_steps
        batches = steps_of(loader, 10**6)
        assert num_steps == len(batches)
        assert loader.num_steps == len(steps_of(loader, 10**6)) > num_steps  # the next epoch has no skip
        found += [sample for batch in batches for sample in batch]
    left, step = count - 2 * 7 * world_size, 7 * world_size
    assert len(found) == len(set(found)) == (left // step * step if drop_last else left)


@pytest.mark.parametrize(
    "skip", [5, "ab", [(1,)], [(1, 2, 3)], [1], [(2, 2)], [(3, 1)], [(-1, 3)], [(0.5, 3)], [(0, 1 << 62)], {(1, 2): 3}]
)
def test_a_skip_that_makes_no_sense_is_refused(dataset: Dataset, skip: Any) -> None:
    with pytest.raises(RecipeError, match="skip"):
        open_loader(dataset, 4, skip=skip)


def test_seen_after_some_steps_is_what_is_seen_then(dataset: Dataset) -> None:
    loader = open_loader(dataset, 3, skip=[(2, 4), (5, 6)])
    for _ in range(8):
        expected = loader.seen_after(loader.samples_seen, 1)
        steps_of(loader, 1)
        assert loader.samples_seen == expected


def test_numpy_integers_are_integers(dataset: Dataset) -> None:
    state = open_loader(dataset, 4, skip=[(np.int64(2), np.int32(5))]).state_dict()
    assert json.loads(json.dumps(state))["skip"] == [{"steps": [2, 5], "samples": [8, 20]}]


@pytest.mark.parametrize(
    "skip",
    [
        5,
        "skip",
        {},
        [5],
        [{}],
        [{"steps": [1, 2]}],
        [{"steps": [1, 2], "samples": [1]}],
        [{"steps": [1, 2], "samples": [2, 1]}],
        [{"steps": [1, 2], "samples": [-1, 1]}],
        [{"steps": ["1", 2], "samples": [1, 2]}],
        [{"steps": [1, 2], "samples": [1.5, 2]}],
        [{"steps": [1, 2], "samples": [0, 1 << 62]}],
        [{"steps": [1, 2], "samples": [0, 1, 2]}],
        [{"steps": 1, "samples": 2}],
        [None],
    ],
    ids=str,
)
def test_a_hostile_state_is_refused(dataset: Dataset, skip: Any) -> None:
    loader = open_loader(dataset, 4)
    before = loader.state_dict()
    with pytest.raises(StateError, match="skip is"):
        loader.load_state_dict({**before, "skip": skip})
    assert loader.state_dict() == before


def test_overlapping_ranges_count_once() -> None:
    skips = SkippedSamples([SkippedSteps(0, 4, 0, 4), SkippedSteps(2, 6, 2, 6), SkippedSteps(9, 10, 9, 10)])
    assert skips.positions(np.arange(5)).tolist() == [6, 7, 8, 10, 11]
    assert skips.num_given(20) == 13
