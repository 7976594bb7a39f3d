"""Stages of a run with other seq_len: the same tokens in the same order, cut into other rows."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import RecipeError, StateError
from tokenmill.loader.loader import DataLoader
from tokenmill.loader.mixture import Mixture

LONGEST = 48


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("stages")
    write_jsonl(path / "a.jsonl", make_texts(60, seed=8, words=20))
    tokenmill.prepare(str(path / "a.jsonl"), path / "out", tokenizer="byte", unit_bytes=1500, workers=1)
    return tokenmill.open(path / "out")


def source_of(dataset: Dataset, kind: str, **options: Any) -> Any:
    if kind == "dataset":
        return dataset
    schedule = {20: {"one": 1, "other": 3}}
    return Mixture({"one": (dataset, 0.7), "other": (dataset, 0.3)}, schedule=schedule, **options)


def open_stage(source: Any, seq_len: int, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(source, seq_len, batch_size, **{"max_seq_len": LONGEST, "prefetch": 0, **options})


def joined(steps: Iterable[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return list(itertools.chain.from_iterable(steps))


def pairs_of(loader: DataLoader, steps: int) -> list[list[tuple[int, int]]]:
    """Input and label of each token, step by step."""
    found = []
    for batch in itertools.islice(iter(loader), steps):
        found.append(list(zip(batch["input_ids"].ravel().tolist(), batch["labels"].ravel().tolist(), strict=True)))
    return found


@pytest.mark.parametrize("kind", ["dataset", "mixture"])
@pytest.mark.parametrize("order", ["sequential", "shuffled"])
@pytest.mark.parametrize("seq_len", [1, 6, 16, 48])
def test_rows_are_cut_from_the_rows_of_the_longest(dataset: Dataset, kind: str, order: Any, seq_len: int) -> None:
    source = source_of(dataset, kind)
    whole = DataLoader(source, LONGEST, 1, order=order, prefetch=0)
    cut = open_stage(source, seq_len, 1, order=order)
    assert cut.num_samples == whole.num_samples * (LONGEST // seq_len)
    rows = whole.num_samples + 5  # into the second epoch
    one = joined(pairs_of(whole, rows))
    other = joined(pairs_of(cut, rows * (LONGEST // seq_len)))
    assert one == other


@pytest.mark.parametrize("kind", ["dataset", "mixture"])
def test_one_hundred_runs_of_several_seq_len_are_one_stream_of_tokens(dataset: Dataset, kind: str) -> None:
    chance = random.Random(9)
    source = source_of(dataset, kind)
    plain = DataLoader(source, LONGEST, 1, prefetch=0)
    whole = joined(pairs_of(plain, 600))
    assert plain.num_samples < 300
    for _ in range(100):
        found: list[tuple[int, int]] = []
        state: dict[str, Any] | None = None
        for _ in range(chance.randint(1, 4)):
            ranks, batch_size, steps = chance.randint(1, 3), chance.randint(1, 4), chance.randint(0, 6)
            seq_len = chance.choice([6, 12, 16, 24, 48])
            if len(found) % seq_len:
                continue
            by_rank = []
            for rank in range(ranks):
                loader = open_stage(source, seq_len, batch_size, rank=rank, world_size=ranks)
                if state is not None:
                    loader.load_state_dict(state)
                by_rank.append(pairs_of(loader, steps))
            state = json.loads(json.dumps(loader.state_dict()))
            for step in range(steps):
                found += joined(one[step] for one in by_rank)
        assert found == whole[: len(found)]


def test_a_run_without_it_continues_with_rows_that_divide_its_own(dataset: Dataset) -> None:
    before = DataLoader(dataset, LONGEST, 4, prefetch=0)
    begun = pairs_of(before, 3)
    after = open_stage(dataset, 12, 8)
    after.load_state_dict(before.state_dict())
    assert after.samples_seen == 12 * 4
    assert joined(begun + pairs_of(after, 6)) == joined(pairs_of(DataLoader(dataset, LONGEST, 4, prefetch=0), 6))


def test_the_longest_rows_are_those_of_a_loader_without_it(dataset: Dataset) -> None:
    with_it, without = open_stage(dataset, LONGEST, 4), DataLoader(dataset, LONGEST, 4)
    assert with_it.state_dict() == without.state_dict()
    assert open_stage(dataset, 12, 4).state_dict()["stream"]["max_seq_len"] == LONGEST


def test_a_state_inside_a_row_is_refused(dataset: Dataset) -> None:
    loader = open_stage(dataset, 16, 1)
    pairs_of(loader, 4)
    with pytest.raises(StateError, match="4 samples of seq_len 16 are 1 of seq_len 48, and 16 tokens") as caught:
        open_stage(dataset, 48, 1).load_state_dict(loader.state_dict())
    assert "at a multiple of 3 samples" in str(caught.value.hint)
    pairs_of(loader, 2)
    open_stage(dataset, 48, 1).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"seq_len": 16, "max_seq_len": None}, {"seq_len": 48, "max_seq_len": None}),
        ({"seq_len": 16, "max_seq_len": None}, {"seq_len": 16}),
        ({"seq_len": 16, "max_seq_len": 32}, {"seq_len": 16}),
    ],
)
def test_rows_of_another_order_are_refused_with_what_to_do(
    dataset: Dataset, theirs: dict[str, Any], mine: dict[str, Any]
) -> None:
    state = open_stage(dataset, batch_size=1, **theirs).state_dict()
    with pytest.raises(StateError, match="seq_len: the state has") as caught:
        open_stage(dataset, batch_size=1, **mine).load_state_dict(state)
    assert "max_seq_len, which each `seq_len` divides" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_seq_len": 20}, "max_seq_len 20 is not a multiple of seq_len 12"),
        ({"max_seq_len": 6}, "max_seq_len is 6"),
        ({"max_seq_len": 24.0}, r"max_seq_len is 24\.0"),
        ({"packing": "best_fit"}, "max_seq_len with packing 'best_fit'"),
        ({"order": "random"}, "max_seq_len with order 'random'"),
        ({"max_seq_len": 12_000_000}, "make no sample of seq_len 12000000"),
    ],
)
def test_what_makes_no_sense_is_refused(dataset: Dataset, options: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        open_stage(dataset, 12, 1, **options)


@pytest.mark.parametrize(
    "change", [{"seq_len": 7}, {"seq_len": 0}, {"seq_len": "12"}, {"max_seq_len": -48}, {"seq_len": 96}]
)
def test_a_hostile_state_is_refused(dataset: Dataset, change: dict[str, Any]) -> None:
    loader = open_stage(dataset, 12, 1)
    state = loader.state_dict()
    with pytest.raises(StateError, match="seq_len: the state has"):
        loader.load_state_dict({**state, "stream": {**state["stream"], **change}})


@pytest.mark.parametrize("seq_len", [6, 48])
def test_a_component_is_exhausted_at_the_same_token(dataset: Dataset, seq_len: int) -> None:
    source = source_of(dataset, "mixture", max_repeats={"other": 1})
    tokens = 0
    with pytest.raises(RecipeError, match="component 'other'"):
        for batch in open_stage(source, seq_len, 1):
            tokens += batch["input_ids"].size
    whole = DataLoader(source, LONGEST, 1).stream.limit
    assert whole is not None and tokens == whole * LONGEST


def test_weights_in_the_past_are_refused_in_rows_of_the_schedule(dataset: Dataset) -> None:
    loader = open_stage(source_of(dataset, "mixture"), 12, 1)
    pairs_of(loader, 5)  # the second row has begun
    for begin in (1, 2):
        other = Mixture({"one": (dataset, 0.7), "other": (dataset, 0.3)}, schedule={begin: {"one": 1, "other": 1}})
        if begin < 2:
            with pytest.raises(StateError, match="weights from sample 1 on") as caught:
                open_stage(other, 12, 1).load_state_dict(loader.state_dict())
            assert "weights before sample 2" in str(caught.value.hint)
        else:
            open_stage(other, 12, 1).load_state_dict(loader.state_dict())


def test_skipped_rows_are_those_that_contain_skipped_tokens(dataset: Dataset) -> None:
    rows = pairs_of(DataLoader(dataset, LONGEST, 1, prefetch=0), 20)
    loader = open_stage(dataset, 16, 1, skip=[(1, 3), (13, 14)])
    found = joined(pairs_of(loader, 4))
    state = loader.state_dict()
    assert state["samples_seen"] == 6
    after = open_stage(dataset, LONGEST, 1)
    after.load_state_dict(state)
    found += joined(pairs_of(after, 4))
    assert found == [*rows[0][:16], *joined(rows[1:4]), *joined(rows[5:7])]


def test_budgets_are_an_epoch_of_the_same_tokens(dataset: Dataset) -> None:
    source = Mixture({"one": (dataset, "1.2K"), "other": (dataset, "725")})
    assert {open_stage(source, seq_len, 1).num_samples * seq_len for seq_len in (6, 12, 48)} == {41 * 48}


def test_rows_may_have_other_lengths_in_numpy(dataset: Dataset) -> None:
    loader = open_stage(dataset, np.int32(12), 1, max_seq_len=np.int64(48))
    assert json.loads(json.dumps(loader.state_dict())) == open_stage(dataset, 12, 1).state_dict()


@pytest.mark.parametrize(
    "change",
    [{"samples_seen": 1 << 61}, {"skip": [{"steps": [1, 2], "samples": [0, 1 << 61]}]}],
    ids=str,
)
def test_numbers_that_are_too_large_for_shorter_rows_are_refused(dataset: Dataset, change: dict[str, Any]) -> None:
    state = open_stage(dataset, 48, 1).state_dict()
    with pytest.raises(StateError, match="is "):
        open_stage(dataset, 12, 1).load_state_dict({**state, **change})
