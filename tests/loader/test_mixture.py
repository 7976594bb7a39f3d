from __future__ import annotations

import itertools
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import RecipeError, StateError
from tokenmill.loader.batches import IGNORED
from tokenmill.loader.loader import DataLoader
from tokenmill.loader.mixture import MAX_PERIOD, Mixture, MixtureStream, make_schedule, to_shares

SIZES = {"web": 120, "code": 50, "books": 20}

shares_lists = st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    path = tmp_path_factory.mktemp("mixture")
    for seed, (name, count) in enumerate(SIZES.items()):
        write_jsonl(path / f"{name}.jsonl", make_texts(count, seed=seed, words=20))
        tokenmill.prepare(str(path / f"{name}.jsonl"), path / name, tokenizer="byte", unit_bytes=1500, workers=1)
    return {name: tokenmill.open(path / name) for name in SIZES}


def mix(datasets: dict[str, Dataset], weights: dict[str, float] | None = None, **options: Any) -> Mixture:
    weights = weights or {"web": 0.5, "code": 0.3, "books": 0.2}
    return Mixture({name: (datasets[name], weight) for name, weight in weights.items()}, **options)


def samples(loader: DataLoader, steps: int) -> list[tuple[int, int]]:
    """Component and number of each sample of so many steps."""
    found = []
    for batch in itertools.islice(iter(loader), steps):
        found += list(zip(batch["component"].tolist(), batch["sample_index"].tolist(), strict=True))
    return found


def open_samples(mixture: Mixture, steps: int, batch_size: int = 1, **options: Any) -> list[tuple[int, int]]:
    loader = DataLoader(mixture, 40, batch_size, fields=("component", "sample_index"), prefetch=0, **options)
    return samples(loader, steps)


def spread(components: Any, component: int, share: Fraction) -> Fraction:
    """The largest difference of a component's count from its share, over all windows."""
    ahead = [Fraction(0)]
    for found in components:
        ahead.append(ahead[-1] + (found == component) - share)
    return max(ahead) - min(ahead)


@given(shares_lists)
@settings(max_examples=200, deadline=None)
def test_every_window_of_a_schedule_has_its_shares(shares: list[int]) -> None:
    period = make_schedule(shares).components
    for component, share in enumerate(shares):
        assert period.tolist().count(component) == share
        assert spread([*period.tolist()] * 2, component, Fraction(share, sum(shares))) < 2
        counts = np.cumsum(period == component)
        exact = np.arange(1, len(counts) + 1) * share
        assert (np.abs(counts * sum(shares) - exact) < sum(shares)).all()  # from the start on, by less than 1


@given(shares_lists, st.integers(0, 10**12))
@settings(max_examples=100, deadline=None)
def test_any_position_of_a_schedule_is_computed_without_those_before(shares: list[int], start: int) -> None:
    schedule = make_schedule(shares)
    begin = start % sum(shares)
    walked = list(itertools.islice(itertools.cycle(schedule.components.tolist()), begin, begin + 100))
    components, before = schedule.at(start + np.arange(100))
    assert components.tolist() == walked
    for position, component, number in zip(
        range(start, start + 100), components.tolist(), before.tolist(), strict=True
    ):
        assert schedule.count(component, position) == number
        assert schedule.count(component, position + 1) == number + 1
        assert schedule.find(component, number) == position


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((0.7, 0.3), (7, 3)),
        ((0.1, 0.2, 0.3), (1, 2, 3)),
        ((1, 1, 1), (1, 1, 1)),
        ((2, 0, 4), (1, 0, 2)),
        ((0.333, 0.667), (333, 667)),
        ((5,), (1,)),
        ((1e-3, 1), (1, 1000)),
    ],
)
def test_weights_are_taken_as_they_are_written(weights: tuple[float, ...], shares: tuple[int, ...]) -> None:
    assert to_shares(weights) == shares


@given(st.lists(st.floats(0, 1e6).filter(lambda weight: weight == 0 or weight > 1e-6), min_size=1, max_size=10))
@settings(max_examples=200, deadline=None)
def test_weights_of_any_kind_are_within_a_fraction_of_the_longest_period(weights: list[float]) -> None:
    if not any(weights):
        return
    shares = to_shares(weights)
    assert sum(shares) <= MAX_PERIOD
    for share, weight in zip(shares, weights, strict=True):
        exact = Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights)
        assert abs(Fraction(share, sum(shares)) - exact) < Fraction(1, MAX_PERIOD)


@pytest.mark.parametrize(
    "weights",
    [
        {"web": 0.7, "code": 0.3},
        {"web": 0.5, "code": 0.3, "books": 0.2},
        {"web": 97, "code": 2, "books": 1},
        {"web": 0.123456789, "code": 0.2, "books": 0.3},
    ],
)
def test_every_window_of_the_stream_has_its_proportions(
    datasets: dict[str, Dataset], weights: dict[str, float]
) -> None:
    found = open_samples(mix(datasets, weights), 1500)
    for component, weight in enumerate(weights.values()):
        share = Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights.values())
        assert spread([component for component, _ in found], component, share) < 2 + Fraction(1500, MAX_PERIOD)


def test_the_proportions_hold_far_out_in_the_stream(datasets: dict[str, Dataset]) -> None:
    loader = DataLoader(mix(datasets), 40, 1)
    start = 10**14 + 7
    components = loader.stream.locate(np.arange(start, start + 2000))[:, 0].tolist()
    for component, share in enumerate((Fraction(5, 10), Fraction(3, 10), Fraction(2, 10))):
        assert spread(components, component, share) < 2


def test_no_sample_of_a_component_comes_twice_within_its_epoch(datasets: dict[str, Dataset]) -> None:
    loader = DataLoader(mix(datasets), 40, 1, fields=("component", "sample_index"), prefetch=0)
    assert isinstance(loader.stream, MixtureStream)
    found = samples(loader, 1500)
    for component, stream in enumerate(loader.stream.streams):
        mine = [number for owner, number in found if owner == component]
        count = stream.num_samples
        epochs = [mine[begin : begin + count] for begin in range(0, len(mine) - count + 1, count)]
        assert epochs, "the stream is long enough for an epoch of every component"
        for epoch in epochs:
            assert sorted(epoch) == list(range(count))
        for one, other in itertools.pairwise(epochs):
            assert one != other


@pytest.mark.parametrize("labels", ["shifted", "aligned"])
@pytest.mark.parametrize("packing", ["concat", "best_fit", "padded", "truncated", "document_start"])
def test_rows_are_those_of_the_components(datasets: dict[str, Dataset], packing: Any, labels: Any) -> None:
    """Each row of a mixture, with all its fields, is the row that the component's own stream has there."""
    token_fields = ("positions", "position_ids", "document_ids", "attention_mask")
    fields = (*token_fields, "cu_seqlens", "sample_index")
    options: dict[str, Any] = {"packing": packing, "labels": labels, "prefetch": 0, "mask_boundaries": True}
    loader = DataLoader(mix(datasets), 40, 7, fields=("component", *fields), **options)
    single = [
        {
            int(number): {
                "cu_seqlens": batch["cu_seqlens"].tolist(),
                **{name: batch[name][0].tolist() for name in ("input_ids", "labels", *token_fields)},
            }
            for batch in DataLoader(dataset, 40, 1, fields=fields, epochs=1, **options)
            for number in batch["sample_index"]
        }
        for dataset in datasets.values()
    ]
    masked = 0
    for batch in itertools.islice(iter(loader), 60):
        edges = [0]
        for row, (component, number) in enumerate(zip(batch["component"], batch["sample_index"], strict=True)):
            expected = single[int(component)][int(number)]
            for name in ("input_ids", "labels", *token_fields):
                assert batch[name][row].tolist() == expected[name]
            edges += [40 * row + edge for edge in expected["cu_seqlens"][1:]]
        assert batch["cu_seqlens"].tolist() == edges
        assert batch["cu_seqlens"].dtype == np.int32
        assert batch["component"].dtype == np.int8
        masked += int((batch["labels"] == IGNORED).sum())
    assert masked


def test_components_of_the_same_dataset_have_orders_of_their_own(datasets: dict[str, Dataset]) -> None:
    mixture = Mixture({"one": (datasets["code"], 1), "other": (datasets["code"], 1)})
    found = open_samples(mixture, 60)
    one, other = ([number for component, number in found if component == wanted] for wanted in (0, 1))
    assert one != other


@pytest.mark.parametrize("order", ["sequential", "shuffled", "random"])
def test_every_order_has_its_seed(datasets: dict[str, Dataset], order: Any) -> None:
    one, same, other = (open_samples(mix(datasets), 50, order=order, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert (one == other) == (order == "sequential")


def global_stream(mixture: Mixture, history: list[tuple[int, int, int, int]], packing: Any) -> list[tuple[int, int]]:
    """The samples of all ranks, over runs of (ranks, batch size, steps, prefetch), each resumed from the one before."""
    stream: list[tuple[int, int]] = []
    state: dict[str, Any] | None = None
    for ranks, batch_size, steps, prefetch in history:
        by_rank = []
        for rank in range(ranks):
            loader = DataLoader(
                mixture, 40, batch_size, rank=rank, world_size=ranks, packing=packing,
                fields=("component", "sample_index"), prefetch=prefetch,
            )  # fmt: skip
            if state is not None:
                loader.load_state_dict(state)
            by_rank.append(samples(loader, steps))
        state = json.loads(json.dumps(loader.state_dict()))
        for step in range(steps):
            for found in by_rank:
                stream += found[step * batch_size : (step + 1) * batch_size]
    return stream


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_two_hundred_histories_of_ranks_and_batch_sizes_are_one_stream(
    datasets: dict[str, Dataset], packing: Any
) -> None:
    chance = random.Random(11)
    mixture = mix(datasets, schedule={100: {"web": 1, "code": 0, "books": 3}, 250: {"web": 1, "code": 1, "books": 0}})
    whole = global_stream(mixture, [(1, 1, 500, 0)], packing)
    for _ in range(200):
        history = [
            (chance.randint(1, 4), chance.randint(1, 6), chance.randint(0, 5), chance.choice([0, 0, 0, 1, 3]))
            for _ in range(chance.randint(1, 4))
        ]
        stream = global_stream(mixture, history, packing)
        assert stream == whole[: len(stream)], history


def test_weights_change_at_the_sample_that_is_named(datasets: dict[str, Dataset]) -> None:
    schedule = {101: {"web": 0, "code": 1, "books": 0}, 333: {"web": 1, "code": 1, "books": 2}}
    found = open_samples(mix(datasets, schedule=schedule), 700)
    plain = open_samples(mix(datasets), 700)
    assert found[:101] == plain[:101]
    assert {component for component, _ in found[101:333]} == {1}
    for component, share in enumerate((Fraction(1, 4), Fraction(1, 4), Fraction(1, 2))):
        assert spread([component for component, _ in found[333:]], component, share) < 2


def test_a_component_continues_where_it_was_when_weights_change(datasets: dict[str, Dataset]) -> None:
    changed = open_samples(mix(datasets, schedule={101: {"web": 3, "code": 2, "books": 1}}), 600)
    plain = open_samples(mix(datasets), 600)
    for component in range(3):
        one, other = ([number for owner, number in found if owner == component] for found in (changed, plain))
        assert all(a == b for a, b in zip(one, other, strict=False))


def test_an_epoch_has_as_many_samples_as_all_components_together(datasets: dict[str, Dataset]) -> None:
    loader = DataLoader(mix(datasets), 40, 3, epochs=1, drop_last=False, fields=("component",))
    alone = [DataLoader(dataset, 40, 3).num_samples for dataset in datasets.values()]
    assert loader.num_samples == sum(alone) == sum(len(batch["component"]) for batch in loader)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_component_that_is_exhausted_ends_the_stream_at_the_exact_step(
    datasets: dict[str, Dataset], prefetch: int, world_size: int
) -> None:
    mixture = mix(datasets, {"web": 0.5, "books": 0.5}, max_repeats={"books": 2})
    books = DataLoader(datasets["books"], 40, 1).num_samples
    for rank in range(world_size):
        loader = DataLoader(
            mixture, 40, 4, rank=rank, world_size=world_size, fields=("component",), prefetch=prefetch
        )  # fmt: skip
        assert isinstance(loader.stream, MixtureStream)
        assert loader.stream.limit in (4 * books, 4 * books + 1)
        steps = 0
        with pytest.raises(RecipeError, match=f"component 'books', of weight 0.5 and {books} samples, is exhausted"):
            for _ in loader:
                steps += 1
        assert steps == loader.stream.limit // (4 * world_size)


def test_a_limit_is_the_first_position_at_which_a_component_would_come_too_often(datasets: dict[str, Dataset]) -> None:
    schedule = {50: {"web": 1, "code": 5, "books": 0}, 120: {"web": 1, "code": 1, "books": 3}}
    for repeats in (1, 2):
        stream = DataLoader(mix(datasets, schedule=schedule, max_repeats=repeats), 40, 1).stream
        free = DataLoader(mix(datasets, schedule=schedule), 40, 1).stream
        assert isinstance(stream, MixtureStream) and stream.limit is not None
        assert isinstance(free, MixtureStream) and free.limit is None
        components = free.locate(np.arange(stream.limit + 1))[:, 0]
        allowed = np.array([repeats * component.num_samples for component in stream.streams])
        assert (np.bincount(components[:-1], minlength=3) <= allowed).all()
        assert np.bincount(components, minlength=3)[components[-1]] == allowed[components[-1]] + 1
        assert (stream.locate(np.arange(stream.limit)) == free.locate(np.arange(stream.limit))).all()
        with pytest.raises(RecipeError, match=f"at sample {stream.limit} of the mixture"):
            stream.locate(np.array([stream.limit]))


def test_a_component_that_gets_no_more_weight_is_never_exhausted(datasets: dict[str, Dataset]) -> None:
    mixture = mix(
        datasets, schedule={20: {"web": 1, "code": 1, "books": 0}}, max_repeats={"books": 1}
    )  # fmt: skip
    stream = DataLoader(mixture, 40, 1).stream
    assert isinstance(stream, MixtureStream) and stream.limit is None


def test_epochs_that_a_component_does_not_last_for_are_refused_at_once(datasets: dict[str, Dataset]) -> None:
    mixture = mix(datasets, {"web": 0.2, "books": 0.8}, max_repeats=1)
    with pytest.raises(RecipeError, match="component 'books'"):
        DataLoader(mixture, 40, 4, epochs=1)
    assert next(iter(DataLoader(mixture, 40, 4)))["input_ids"].shape == (4, 40)


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"web": -0.1, "code": 1}, "the weight of component 'web' is -0.1"),
        ({"web": float("nan"), "code": 1}, "the weight of component 'web' is nan"),
        ({"web": float("inf"), "code": 1}, "the weight of component 'web' is inf"),
        ({"web": [1], "code": 1}, r"the weight of component 'web' is \[1\]"),
        ({"web": True, "code": 1}, "the weight of component 'web' is True"),
        ({"web": 0, "code": 0}, "every weight is 0"),
        ({"web": 1e-9, "code": 1}, "component 'web' has weight 1e-09 of"),
    ],
)
def test_bad_weights_are_refused(datasets: dict[str, Dataset], weights: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        mix(datasets, weights)
    with pytest.raises(RecipeError, match=told):
        mix(datasets, {"web": 1, "code": 1}, schedule={10: weights})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"schedule": {0: {"web": 1, "code": 1, "books": 1}}}, "a key of schedule is 0"),
        ({"schedule": {1.5: {"web": 1, "code": 1, "books": 1}}}, "a key of schedule is 1.5"),
        ({"schedule": {9: {"web": 1}}}, "weights for web, but the components are books, code, web"),
        ({"max_repeats": 0}, "max_repeats of component 'web' is 0"),
        ({"max_repeats": {"web": 1.5}}, "max_repeats of component 'web' is 1.5"),
        ({"max_repeats": {"poems": 1}}, "max_repeats of poems"),
    ],
)
def test_what_makes_no_sense_is_refused(datasets: dict[str, Dataset], options: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        mix(datasets, **options)


def test_a_mixture_of_nothing_is_refused() -> None:
    with pytest.raises(RecipeError, match="a mixture of 0 components"):
        Mixture({})


def test_a_component_without_a_weight_is_refused() -> None:
    with pytest.raises(RecipeError, match="component 'web' is 'data/web'"):
        Mixture({"web": "data/web"})  # type: ignore[dict-item]  # that is the point


def test_components_must_have_the_same_tokenizer(datasets: dict[str, Dataset], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(20, seed=1))
    tokenmill.prepare(str(tmp_path / "a.jsonl"), tmp_path / "char", tokenizer="char", workers=1)
    with pytest.raises(RecipeError, match=r"component 'web' has tokenizer byte .* component 'odd' char"):
        Mixture({"web": (datasets["web"], 1), "odd": (tmp_path / "char", 1)})


def test_paths_do_as_well_as_datasets(datasets: dict[str, Dataset]) -> None:
    paths = Mixture({name: (dataset.path, 1) for name, dataset in datasets.items()})
    opened = Mixture({name: (dataset, 1) for name, dataset in datasets.items()})
    assert open_samples(paths, 50) == open_samples(opened, 50)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {"weights": {"web": 0.5, "code": 0.2, "books": 0.3}},
            r"weights from sample 0 on: the state has {'web': 5, 'code': 2, 'books': 3}, this loader {'web': 5",
        ),
        (
            {"schedule": {2: {"web": 1, "code": 1, "books": 1}}},
            r"weights from sample 2 on: the state has {'web': 1, 'code': 1, 'books': 1}, this loader None",
        ),
        ({"weights": {"books": 0.2, "code": 0.3, "web": 0.5}}, r"components: the state has \['books', 'code', 'web'\]"),
        ({"weights": {"code": 0.5, "books": 0.5}}, r"components: the state has \['code', 'books'\]"),
    ],
)
def test_a_state_of_another_mixture_is_refused(datasets: dict[str, Dataset], other: dict[str, Any], told: str) -> None:
    loader = DataLoader(mix(datasets, **other), 40, 4)
    next(iter(loader))
    with pytest.raises(StateError, match=told) as caught:
        DataLoader(mix(datasets), 40, 4).load_state_dict(loader.state_dict())
    kept = "keep the weights before sample 4" if "weights" in told else "keep the components of the state"
    assert kept in str(caught.value.hint)


def test_a_difference_of_one_component_is_named(datasets: dict[str, Dataset]) -> None:
    state = DataLoader(mix(datasets), 40, 4).state_dict()
    changed = json.loads(json.dumps(state))
    changed["stream"]["parts"][1]["seed"] = 7
    with pytest.raises(StateError, match="component 'code', seed: the state has 7, this loader 0"):
        DataLoader(mix(datasets), 40, 4).load_state_dict(changed)


def test_one_hundred_runs_with_weights_that_change_at_each_resume_are_one_stream(
    datasets: dict[str, Dataset],
) -> None:
    """Each resume adds weights from its state on. The samples are those of the last mixture from the start."""
    chance = random.Random(5)
    for _ in range(100):
        schedule: dict[int, dict[str, float]] = {}
        found: list[tuple[int, int]] = []
        state: dict[str, Any] | None = None
        for _ in range(chance.randint(2, 5)):
            if state is not None and chance.random() < 0.8:
                later = state["samples_seen"] + chance.choice([0, 0, 1, 17])
                schedule = {at: weights for at, weights in schedule.items() if at < state["samples_seen"]}
                web, code, books = chance.randint(1, 4), chance.randint(0, 4), chance.randint(0, 4)
                schedule[max(1, later)] = {"web": web, "code": code, "books": books}
            batch_size = chance.randint(1, 5)
            loader = DataLoader(
                mix(datasets, schedule=schedule), 40, batch_size, fields=("component", "sample_index"), prefetch=0
            )
            if state is not None:
                loader.load_state_dict(state)
            found += samples(loader, chance.randint(0, 20))
            state = json.loads(json.dumps(loader.state_dict()))
        assert found == open_samples(mix(datasets, schedule=schedule), len(found))


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_component_may_be_added_to_a_run(datasets: dict[str, Dataset], packing: Any) -> None:
    fields = ("component", "sample_index")
    before = DataLoader(mix(datasets, {"web": 2, "code": 1}), 40, 5, packing=packing, fields=fields)
    begun = samples(before, 7)
    state = json.loads(json.dumps(before.state_dict()))
    schedule = {35: {"web": 1, "code": 1, "books": 2}}
    larger = mix(datasets, {"web": 2, "code": 1, "books": 0}, schedule=schedule)
    after = DataLoader(larger, 40, 3, packing=packing, fields=fields)
    after.load_state_dict(state)
    assert begun + samples(after, 20) == samples(DataLoader(larger, 40, 5, packing=packing, fields=fields), 19)
    with pytest.raises(StateError, match="components: the state has"):  # what took part stays
        before.load_state_dict(after.state_dict())
    sooner = mix(datasets, {"web": 2, "code": 1, "books": 1})
    with pytest.raises(StateError, match="weights from sample 0 on"):
        DataLoader(sooner, 40, 3, packing=packing).load_state_dict(state)


def test_a_state_may_be_ignored_in_part(datasets: dict[str, Dataset]) -> None:
    loader, other = (DataLoader(mix(datasets), 40, 4, seed=seed) for seed in (1, 2))
    next(iter(loader))
    with pytest.raises(StateError, match="component 'web', seed: the state has 1, this loader 2") as caught:
        other.load_state_dict(loader.state_dict())
    assert "load_state_dict" in str(caught.value.hint) and "ignore={'seed'}" in str(caught.value.hint)
    other.load_state_dict(loader.state_dict(), ignore={"seed"})
    assert other.samples_seen == 4
    with pytest.raises(RecipeError, match="ignore: 'weights' of a state cannot be ignored"):
        other.load_state_dict(loader.state_dict(), ignore={"weights"})


HOSTILE: list[dict[str, Any]] = [
    {"parts": None},
    {"parts": []},
    {"parts": [1, 2, 3]},
    {"parts": [{}] * 200},
    {"parts": [{"part": {"part": []}}]},
    {"shares": None},
    {"shares": 5},
    {"shares": "shares"},
    {"shares": [0, [1]]},
    {"shares": [["0", [5, 3, 2]]]},
    {"shares": [[0, 5]]},
    {"shares": [[0, [5, 3, 2, 7, 7]]]},
    {"shares": [[0, ["5", "3", "2"]]]},
    {"shares": {"0": [5, 3, 2]}},
    {"shares": [[-1, [5, 3, 2]]]},
    {"shares": []},
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_a_hostile_state_of_a_mixture_is_refused(datasets: dict[str, Dataset], change: dict[str, Any]) -> None:
    loader = DataLoader(mix(datasets), 40, 4)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    state["stream"] |= change
    with pytest.raises(StateError):
        loader.load_state_dict(state)
    assert loader.samples_seen == 4


def test_a_state_of_a_mixture_goes_through_json_and_numpy(datasets: dict[str, Dataset]) -> None:
    loader, other = (DataLoader(mix(datasets), np.int32(40), np.int64(4), seed=np.uint8(3)) for _ in range(2))
    next(iter(loader))
    text = json.dumps(loader.state_dict())
    assert text == json.dumps(json.loads(text))
    other.load_state_dict({**json.loads(text), "samples_seen": np.int64(4), "version": np.int32(1)})
    assert json.dumps(other.state_dict()) == text
    assert (next(iter(loader))["input_ids"] == next(iter(other))["input_ids"]).all()


def test_budgets_of_tokens_are_weights_and_an_epoch(datasets: dict[str, Dataset]) -> None:
    budgets = {"web": "4K", "code": "1.2K", "books": "2,800"}
    mixture = Mixture({name: (datasets[name], budget) for name, budget in budgets.items()}, max_repeats=2)
    assert mixture.shares[0] == {"web": 10, "code": 3, "books": 7}
    assert mixture.num_tokens == 8000
    assert "web: 4,000 tokens of " in repr(mixture)
    loader = DataLoader(mixture, 40, 1, epochs=1, fields=("component",))
    counts = np.bincount([int(batch["component"][0]) for batch in loader], minlength=3)
    assert (counts * 40).tolist() == [4000, 1200, 2800]
    weighted = DataLoader(mix(datasets, {"web": 10, "code": 3, "books": 7}), 40, 1)
    weighted.load_state_dict(loader.state_dict())  # the same stream
    again = DataLoader(mixture, 30, 1, epochs=1, fields=("component",), drop_last=False)
    counts = np.bincount([int(batch["component"][0]) for batch in again], minlength=3)
    assert (np.abs(counts * 30 - np.array([4000, 1200, 2800])) < 2 * 30).all()


def test_a_budget_beyond_the_repeats_is_refused_at_once(datasets: dict[str, Dataset]) -> None:
    mixture = Mixture({"web": (datasets["web"], "4K"), "books": (datasets["books"], "4K")}, max_repeats={"books": 2})
    with pytest.raises(RecipeError, match="component 'books'"):
        DataLoader(mixture, 40, 1, epochs=1)


@pytest.mark.parametrize(
    ("weights", "options", "told"),
    [
        ({"web": "4K", "code": 0.5}, {}, "component 'web' has a budget of tokens, and 'code' a weight"),
        ({"web": "much", "code": "4K"}, {}, "the budget of component 'web': 'much' is not a size"),
        ({"web": "4GB", "code": "4K"}, {}, "is a size in bytes, not a number of tokens"),
        ({"web": "0", "code": "4K"}, {}, "the budget of component 'web': '0' is not a positive size"),
        ({"web": "4K", "code": "4K"}, {"schedule": {5: {"web": 1, "code": 1}}}, "a schedule of a mixture whose"),
    ],
)
def test_bad_budgets_are_refused(
    datasets: dict[str, Dataset], weights: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(RecipeError, match=told):
        mix(datasets, weights, **options)


def test_weights_in_the_same_proportion_are_the_same_stream(datasets: dict[str, Dataset]) -> None:
    state = DataLoader(mix(datasets, {"web": 5, "code": 3, "books": 2}), 40, 4).state_dict()
    DataLoader(mix(datasets), 40, 4).load_state_dict(state)


def test_ids_of_a_mixture_may_stay_as_they_are_stored(datasets: dict[str, Dataset]) -> None:
    for batch in itertools.islice(iter(DataLoader(mix(datasets), 40, 3, dtype=None)), 5):
        assert batch["input_ids"].dtype == np.uint16


def test_a_repr_tells_components_weights_and_changes(datasets: dict[str, Dataset]) -> None:
    paths = {name: repr(dataset.path) for name, dataset in datasets.items()}
    plain = f"web: 0.5 of {paths['web']}, code: 0.3 of {paths['code']}, books: 0.2 of {paths['books']}"
    assert repr(mix(datasets)) == f"Mixture({plain})"
    changed = mix(datasets, schedule={1000: {"web": 1, "code": 1, "books": 1}})
    assert repr(changed) == f"Mixture({plain}; weights change at sample 1,000)"
    assert repr(DataLoader(changed, 40, 4)).startswith("DataLoader(Mixture, seq_len=40, ")
