from __future__ import annotations

import itertools
import json
import operator
import os
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill.dataset import dataset as datasets_module
from tokenmill.dataset.dataset import Dataset
from tokenmill.dataset.windows import Windows
from tokenmill.errors import RecipeError, StateError
from tokenmill.loader.batches import IGNORED
from tokenmill.loader.loader import DataLoader, run_ahead
from tokenmill.storage.memory_maps import Map

EOTS = ("append", "prepend", "none")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """The same text with its end of text behind, before and nowhere; many small shards."""
    path = tmp_path_factory.mktemp("loader")
    write_jsonl(path / "a.jsonl", make_texts(120, seed=3, words=20))
    for eot in EOTS:
        tokenmill.prepare(
            str(path / "a.jsonl"), path / eot, tokenizer="byte", eot=eot, unit_bytes=1500, split={"val": 0.2}, workers=1
        )
    return {eot: tokenmill.open(path / eot) for eot in EOTS}


@pytest.fixture
def dataset(datasets: dict[str, Dataset]) -> Dataset:
    return datasets["append"]


def flat(dataset: Dataset, split: str = "train") -> list[int]:
    return [token for document in dataset[split] for token in document.tolist()]


def take(loader: DataLoader, steps: int | None = None) -> list[dict[str, Any]]:
    return list(itertools.islice(iter(loader), steps))


def test_windows_are_the_tokens_end_to_end_over_shard_boundaries(dataset: Dataset) -> None:
    tokens = flat(dataset)
    assert len(dataset["train"].token_ends) > 5
    windows = Windows(dataset["train"], 100)
    assert len(windows) == (len(tokens) - 1) // 100
    for index in range(len(windows)):
        assert windows[index].tolist() == tokens[index * 100 : index * 100 + 101]
    starts = np.arange(len(tokens) - 100)
    assert windows.gather(starts).tolist() == [tokens[start : start + 101] for start in starts.tolist()]


def test_a_window_may_span_many_shards(dataset: Dataset) -> None:
    tokens = flat(dataset)
    windows = Windows(dataset["train"], len(tokens) - 1)
    assert len(windows) == 1
    assert windows.gather(np.array([0])).tolist() == [tokens]


@pytest.mark.parametrize("index", [-1, -3])
def test_samples_count_from_the_end_as_lists_do(dataset: Dataset, index: int) -> None:
    windows = Windows(dataset["train"], 64)
    assert windows[index].tolist() == windows[len(windows) + index].tolist()
    with pytest.raises(IndexError):
        windows[len(windows)]


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_an_epoch_has_every_sample_once_and_epochs_differ(dataset: Dataset, order: Any) -> None:
    loader = DataLoader(dataset, 32, 4, order=order, epochs=2, drop_last=False, fields=("sample_index",), prefetch=0)
    seen = np.concatenate([batch["sample_index"] for batch in loader]).tolist()
    count = loader.num_samples
    assert sorted(seen[:count]) == sorted(seen[count:]) == list(range(count))
    assert (seen[:count] == list(range(count))) == (order == "sequential")
    assert (seen[:count] == seen[count:]) == (order == "sequential")


@pytest.mark.parametrize("order", ["sequential", "shuffled", "random"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_inputs_and_labels_are_the_tokens_and_the_ones_behind_them(dataset: Dataset, order: Any, prefetch: int) -> None:
    tokens = flat(dataset)
    loader = DataLoader(dataset, 50, 3, order=order, fields=("sample_index",), prefetch=prefetch)
    for batch in take(loader, 40):
        scale = 1 if order == "random" else 50
        for start, inputs, labels in zip(batch["sample_index"], batch["input_ids"], batch["labels"], strict=True):
            begin = int(start) * scale
            assert inputs.tolist() == tokens[begin : begin + 50]
            assert labels.tolist() == tokens[begin + 1 : begin + 51]
        assert batch["input_ids"].dtype == batch["labels"].dtype == np.int64


def test_random_windows_begin_anywhere_up_to_the_last_one(dataset: Dataset) -> None:
    length = len(flat(dataset)) - 3
    loader = DataLoader(dataset, length, 8, order="random", fields=("sample_index",), prefetch=0)
    starts = np.concatenate([batch["sample_index"] for batch in take(loader, 20)])
    assert set(starts.tolist()) == {0, 1, 2}


def test_ranks_take_the_blocks_of_a_step_in_their_order(dataset: Dataset) -> None:
    options: dict[str, Any] = {"fields": ("sample_index",), "prefetch": 0}
    alone = take(DataLoader(dataset, 32, 12, **options), 5)
    ranks = [take(DataLoader(dataset, 32, 4, rank=rank, world_size=3, **options), 5) for rank in range(3)]
    for step, whole in enumerate(alone):
        parts = [ranks[rank][step]["sample_index"] for rank in range(3)]
        assert np.concatenate(parts).tolist() == whole["sample_index"].tolist()


def global_stream(dataset: Dataset, history: list[tuple[int, int, int, int]], seed: int, order: Any) -> list[int]:
    """The samples of all ranks, over runs of (ranks, batch size, steps, prefetch), each resumed from the one before."""
    stream: list[int] = []
    state: dict[str, Any] | None = None
    for ranks, batch_size, steps, prefetch in history:
        parts, states = [], []
        for rank in range(ranks):
            loader = DataLoader(
                dataset, 40, batch_size, order=order, seed=seed, rank=rank, world_size=ranks,
                fields=("sample_index",), prefetch=prefetch,
            )  # fmt: skip
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            parts.append([batch["sample_index"].tolist() for batch in take(loader, steps)])
            states.append(loader.state_dict())
        assert all(found == states[0] for found in states)
        state = states[0]
        for step in range(steps):
            for part in parts:
                stream += part[step]
    return stream


def test_a_thousand_histories_of_ranks_and_batch_sizes_are_one_stream(dataset: Dataset) -> None:
    chance = random.Random(5)
    whole = {
        (seed, order): global_stream(dataset, [(1, 1, 700, 0)], seed, order)
        for seed in (0, 1)
        for order in ("sequential", "shuffled", "random")
    }
    assert DataLoader(dataset, 40, 1).num_samples < 350  # so that histories run over epochs
    for _ in range(1000):
        history = [
            (chance.randint(1, 4), chance.randint(1, 6), chance.randint(0, 6), chance.choice([0, 0, 0, 1, 3]))
            for _ in range(chance.randint(1, 4))
        ]
        seed, order = chance.choice(list(whole))
        stream = global_stream(dataset, history, seed, order)
        assert stream == whole[seed, order][: len(stream)], (history, seed, order)


def test_the_state_counts_what_was_handed_out_not_what_was_prepared(dataset: Dataset) -> None:
    loader = DataLoader(dataset, 32, 4, prefetch=8)
    batches = iter(loader)
    next(batches)
    next(batches)
    assert loader.state_dict()["samples_seen"] == 8


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 7}, "seed: the state has 7, this loader 0"),
        ({"order": "sequential"}, "order: the state has 'sequential', this loader 'shuffled'"),
        ({"seq_len": 8}, "seq_len: the state has 8, this loader 32"),
        ({"fingerprint": "x"}, "fingerprint: the state has 'x'"),
        ({"split": "val"}, "split: the state has 'val', this loader 'train'"),
        ({"packing": "padded"}, "packing: the state has 'padded', this loader 'concat'"),
    ],
)
def test_a_state_of_another_stream_is_refused_with_both_values(
    dataset: Dataset, change: dict[str, Any], told: str
) -> None:
    loader = DataLoader(dataset, 32, 4)
    state = loader.state_dict()
    with pytest.raises(StateError, match=told):
        loader.load_state_dict({**state, "stream": {**state["stream"], **change}})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 2}, "the state has version 2, this loader 1"),
        ({"stream": None}, "seed: the state has None, this loader 0"),
        ({"samples_seen": -1}, "samples_seen is -1"),
        ({"samples_seen": None}, "samples_seen is None"),
    ],
)
def test_a_damaged_state_is_refused(dataset: Dataset, change: dict[str, Any], told: str) -> None:
    loader = DataLoader(dataset, 32, 4)
    with pytest.raises(StateError, match=told):
        loader.load_state_dict({**loader.state_dict(), **change})


@pytest.mark.parametrize("eot", EOTS)
def test_boundaries_are_those_of_the_documents(datasets: dict[str, Dataset], eot: str) -> None:
    split = datasets[eot]["train"]
    owners = [number for number in range(len(split)) for _ in range(len(split.document(number)))]
    loader = DataLoader(
        datasets[eot], 45, 5, epochs=1, drop_last=False, mask_boundaries=True, prefetch=0,
        fields=("positions", "document_ids", "cu_seqlens", "sample_index"),
    )  # fmt: skip
    for batch in loader:
        lengths = []
        for row, sample in enumerate(batch["sample_index"].tolist()):
            window = owners[sample * 45 : sample * 45 + 46]
            assert batch["document_ids"][row].tolist() == window[:-1]
            runs = [len(list(run)) for _, run in itertools.groupby(window[:-1])]
            assert batch["positions"][row].tolist() == [place for run in runs for place in range(run)]
            lengths += runs
            masked = [a != b for a, b in itertools.pairwise(window)]
            assert (batch["labels"][row] == IGNORED).tolist() == masked
        assert batch["cu_seqlens"].tolist() == [0, *itertools.accumulate(lengths)]
        assert batch["cu_seqlens"].dtype == np.int32


def test_masked_labels_do_not_touch_the_inputs(dataset: Dataset) -> None:
    plain, masked = (take(DataLoader(dataset, 45, 5, mask_boundaries=mask), 10) for mask in (False, True))
    for one, other in zip(plain, masked, strict=True):
        assert (one["input_ids"] == other["input_ids"]).all()
        kept = other["labels"] != IGNORED
        assert (one["labels"][kept] == other["labels"][kept]).all()
    assert any((batch["labels"] == IGNORED).any() for batch in masked)


@pytest.mark.parametrize("masked", [False, True])
def test_labels_do_not_change_the_order_or_the_states(dataset: Dataset, masked: bool) -> None:
    options: dict[str, Any] = {"mask_boundaries": masked, "fields": ("sample_index", "positions")}
    shifted = DataLoader(dataset, 45, 5, **options)
    begun = take(shifted, 4)
    aligned = DataLoader(dataset, 45, 5, labels="aligned", **options)
    for one, other in zip(begun, take(aligned, 4), strict=True):
        assert one["sample_index"].tolist() == other["sample_index"].tolist()
        assert one["labels"][:, :-1].tolist() == other["labels"][:, 1:].tolist()
        kept = other["positions"] > 0 if masked else np.ones((5, 45), np.bool_)
        assert (other["labels"][kept] == other["input_ids"][kept]).all() and (other["labels"][~kept] == IGNORED).all()
    assert aligned.state_dict() == shifted.state_dict()


def test_ids_may_stay_as_they_are_stored(dataset: Dataset) -> None:
    assert next(iter(DataLoader(dataset, 32, 4, dtype=None)))["input_ids"].dtype == np.uint16
    with pytest.raises(RecipeError, match="masked"):
        DataLoader(dataset, 32, 4, dtype=None, mask_boundaries=True)


@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.float64])
def test_a_dtype_that_would_change_ids_is_refused(dataset: Dataset, dtype: Any) -> None:
    with pytest.raises(RecipeError, match="do not fit"):
        DataLoader(dataset, 32, 4, dtype=dtype)


def test_the_last_partial_step_is_dropped_or_shared_out(dataset: Dataset) -> None:
    count = Windows(dataset["val"], 16).__len__()
    batch = next(size for size in range(2, count) if count % (2 * size) > size)
    whole = [DataLoader(dataset, 16, batch, split="val", epochs=1, rank=rank, world_size=2) for rank in range(2)]
    assert [len(take(loader)) for loader in whole] == [count // (2 * batch)] * 2
    shared = [
        DataLoader(
            dataset,
            16,
            batch,
            split="val",
            epochs=1,
            rank=rank,
            world_size=2,
            drop_last=False,
            fields=("sample_index",),
        )
        for rank in range(2)
    ]
    seen = [index for loader in shared for found in loader for index in found["sample_index"].tolist()]
    assert sorted(seen) == list(range(count))
    assert [loader.samples_seen for loader in shared] == [count, count]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seq_len": 10**9}, "make no sample"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"order": "chaos"}, "chaos"),
        ({"fields": ("colour",)}, "colour"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"epochs": 0}, "epochs is 0"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(dataset: Dataset, options: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        DataLoader(dataset, **{"seq_len": 32, "batch_size": 4, **options})


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_more_is_made_ahead_than_was_asked_for(depth: int) -> None:
    made: list[int] = []
    found = run_ahead((made.append(item) or item for item in range(50)), depth)
    for taken in range(1, 51):
        assert next(found) == taken - 1
        assert len(made) <= taken + depth
    assert next(found, None) is None


def test_an_iterator_that_fails_ahead_fails_where_it_is_used() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    found = run_ahead(items(), 4)
    assert next(found) == 1
    with pytest.raises(OSError, match="gone"):
        next(found)


def test_a_consumer_that_leaves_ends_the_thread() -> None:
    before = set(threading.enumerate())
    found = run_ahead(itertools.count(), 2)
    assert next(found) == 0
    assert set(threading.enumerate()) - before
    found.close()
    assert not set(threading.enumerate()) - before


def test_a_loader_that_is_left_until_the_interpreter_ends_says_nothing(dataset: Dataset, tmp_path: Path) -> None:
    """It outlives the names of the modules that it needs."""
    import subprocess
    import sys

    code = f"""
import tokenmill
from tokenmill.loader import loader as loaders
from tokenmill.storage import memory_maps
loader = tokenmill.DataLoader({dataset.path!r}, 32, 4)
batches = iter(loader)
next(batches)
loaders.kept = loaders, batches
memory_maps.kept = memory_maps, tokenmill.DataLoader({dataset.path!r}, 32, 4, prefetch=0)
next(iter(memory_maps.kept[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=100
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_a_trainer_loads_numpy_and_nothing_heavier(dataset: Dataset, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = f"import sys, tokenmill; next(iter(tokenmill.DataLoader({dataset.path!r}, 32, 4))); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert not {"pyarrow", "gigatoken", "awkward", "torch", "typer"} & set(done.stdout.split())


def test_a_state_of_other_content_is_refused_and_one_that_does_not_say_is_taken(tmp_path: Path) -> None:
    source, output = tmp_path / "a.jsonl", tmp_path / "out"
    states = []
    for text in ("abc def", "def abc"):
        write_jsonl(source, [text])
        tokenmill.prepare(source, output, tokenizer="byte", workers=1, restart=True)
        loader = DataLoader(output, 2, 1)
        states.append(loader.state_dict())
    loader.load_state_dict(states[1])
    loader.load_state_dict({name: value for name, value in states[0].items() if name != "content"})
    with pytest.raises(StateError, match="before the content changed"):
        loader.load_state_dict(states[0])


@pytest.mark.parametrize("name", ["seed", "seq_len", "batch_size", "epochs"])
def test_a_number_gives_one_order_and_one_state_however_it_is_written(dataset: Dataset, name: str) -> None:
    plain: dict[str, Any] = {"seq_len": 50, "batch_size": 4, "seed": 2, "epochs": 1}
    first = DataLoader(dataset, **plain)
    other = DataLoader(dataset, **{**plain, name: np.int64(plain[name])})
    assert json.dumps(first.state_dict()) == json.dumps(other.state_dict())
    assert [b["input_ids"].tolist() for b in first] == [b["input_ids"].tolist() for b in other]
    for value in (True, float(plain[name]), str(plain[name])):
        with pytest.raises(RecipeError, match=f"{name} is"):
            DataLoader(dataset, **{**plain, name: value})


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_shards_that_are_mapped_hold_no_open_file(dataset: Dataset, packing: Any) -> None:
    mixture = tokenmill.Mixture({"a": (dataset, 1), "b": (dataset.path, 2)})
    before = len(os.listdir("/proc/self/fd"))
    for part in (dataset, mixture):
        loader = DataLoader(part, 8, 4, packing=packing, prefetch=0, fields=("document_ids",))
        assert len(take(loader, loader.num_samples // 4)) > 100
    assert len(list(dataset["train"].maps())) >= 10
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_more_shards_than_may_be_mapped_give_the_same_batches(
    dataset: Dataset, packing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> list[Any]:
        loader = DataLoader(dataset.path, 8, 4, epochs=2, packing=packing, fields=("positions", "document_ids"))
        return [{name: value.tolist() for name, value in batch.items()} for batch in loader]

    expected = rows()
    monkeypatch.setattr(datasets_module, "MAX_MAPS", Map.num_live + 6)
    assert rows() == expected
    assert Map.num_live <= datasets_module.MAX_MAPS + 4


@pytest.mark.parametrize("depth", [1, 3])
def test_an_iterator_of_another_process_is_refused_and_a_new_one_continues(dataset: Dataset, depth: int) -> None:
    loader = DataLoader(dataset, 8, 4, prefetch=depth)
    running = iter(loader)
    next(running)
    expected = take(DataLoader(dataset, 8, 4), 2)[1]["input_ids"].tolist()
    child = os.fork()
    if not child:
        signal.alarm(20)  # a child that waits for ever ends by this
        try:
            next(running)
        except StateError as error:
            again = next(iter(loader))["input_ids"].tolist()
            os._exit(0 if "another process" in str(error) and "iter()" in error.hint and again == expected else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert next(running)["input_ids"].tolist() == expected


def test_a_repr_tells_the_dataset_the_shape_and_the_progress(dataset: Dataset) -> None:
    loader = DataLoader(dataset, 32, 4, rank=1, world_size=3, epochs=2, prefetch=0)
    shape = "seq_len=32, batch_size=4, rank=1, world_size=3"
    steps = f"{2 * loader.num_samples // 12:,} steps"
    assert repr(loader) == f"DataLoader({dataset.path!r}, {shape}, {steps}, 0 samples seen)"
    next(iter(loader))
    assert repr(loader).endswith("12 samples seen)")
    assert ", endless, " in repr(DataLoader(dataset, 32, 4))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (7, 1), (5, 3), (100, 4), (10_000, 2)])
def test_the_number_of_steps_is_that_of_the_batches(
    dataset: Dataset, batch_size: int, world_size: int, drop_last: bool
) -> None:
    for rank in range(world_size):
        loader = DataLoader(
            dataset, 40, batch_size, rank=rank, world_size=world_size, epochs=2, drop_last=drop_last, prefetch=0
        )
        if drop_last and batch_size == 10_000:
            with pytest.warns(UserWarning, match="has no batch: a step of all ranks takes 20,000"):
                assert loader.num_steps == len(loader) == len(list(loader)) == 0
        else:
            assert loader.num_steps == len(loader) == len(list(loader)) == len(list(loader))
    assert DataLoader(dataset, 40, batch_size).num_steps is None


def test_an_endless_loader_behaves_as_if_it_had_no_length(dataset: Dataset) -> None:
    loader = DataLoader(dataset, 32, 4)
    with pytest.raises(TypeError, match="give it epochs=1"):
        len(loader)
    assert loader
    assert operator.length_hint(loader, 7) == 7  # what list() asks


def epochs_of(dataset: Dataset, numbers: range, **options: Any) -> list[list[int]]:
    """The samples of some epochs of one rank, from loaders of one epoch that know nothing of each other."""
    found = []
    for number in numbers:
        loader = DataLoader(dataset, 32, 4, epochs=1, fields=("sample_index",), prefetch=0, **options)
        loader.load_state_dict({**loader.state_dict(), "samples_seen": number * loader.num_samples})
        found.append(indices(loader))
    return found


def indices(loader: Any) -> list[int]:
    return [index for batch in loader for index in batch["sample_index"].tolist()]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("sets_epoch", [True, False])
def test_each_iteration_is_the_next_epoch_in_its_own_order(
    dataset: Dataset, prefetch: int, drop_last: bool, sets_epoch: bool
) -> None:
    expected = epochs_of(dataset, range(3), drop_last=drop_last)
    assert len({tuple(epoch) for epoch in expected}) == 3
    loader = DataLoader(dataset, 32, 4, epochs=1, drop_last=drop_last, fields=("sample_index",), prefetch=prefetch)
    assert loader.num_samples % 4, "no step is a partial one: this shows nothing of it"
    for number in range(3):
        if sets_epoch:
            loader.set_epoch(number)
        assert indices(loader) == expected[number]
        assert loader.samples_seen == (number + 1) * loader.num_samples


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("sets_epoch", [True, False])
def test_a_resumed_loop_over_epochs_gives_each_epoch_once(
    dataset: Dataset, world_size: int, batch_size: int, drop_last: bool, sets_epoch: bool
) -> None:
    """Stopped behind any batch: also behind the last of an epoch, before its loop has ended, and between epochs."""

    def run(loader: DataLoader, epochs: range, stop: int | None = None) -> tuple[list[list[int]], Any]:
        found = []
        for epoch in epochs:
            if sets_epoch:
                loader.set_epoch(epoch)
            for batch in loader:
                found.append(batch["sample_index"].tolist())
                if len(found) == stop:
                    return found, (epoch, json.loads(json.dumps(loader.state_dict())))
        return found, (epochs.stop, json.loads(json.dumps(loader.state_dict())))

    options: dict[str, Any] = {"epochs": 1, "drop_last": drop_last, "fields": ("sample_index",), "prefetch": 0}
    options |= {"split": "val", "rank": world_size - 1, "world_size": world_size}
    whole, at_end = run(DataLoader(dataset, 32, batch_size, **options), range(3))
    assert at_end[1]["samples_seen"] == 3 * DataLoader(dataset, 32, batch_size, **options).num_samples
    for stop in range(1, len(whole) + 1):
        begun, (epoch, state) = run(DataLoader(dataset, 32, batch_size, **options), range(3), stop)
        resumed = DataLoader(dataset, 32, batch_size, **options)
        resumed.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "epoch . has no batch left")
            rest, ended = run(resumed, range(epoch, 3))
        assert begun + rest == whole
        assert ended == at_end


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_iteration_that_has_nothing_left_says_so(dataset: Dataset, batch_size: int) -> None:
    loader = DataLoader(dataset, 32, batch_size, epochs=1, prefetch=0)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    resumed = DataLoader(dataset, 32, batch_size, epochs=1, prefetch=0)
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="epoch 0 has no batch left .* the next one is epoch 1"):
        assert list(resumed) == []
    assert resumed.samples_seen == resumed.num_samples
    assert len(list(resumed)) == len(resumed)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_loop_that_counts_its_batches_gets_the_next_epoch_as_well(dataset: Dataset, batch_size: int) -> None:
    """It never asks for more batches than there are, so no iteration ends by itself."""
    loader = DataLoader(dataset, 32, batch_size, epochs=1, fields=("sample_index",), prefetch=0)
    ended = DataLoader(dataset, 32, batch_size, epochs=1, fields=("sample_index",), prefetch=0)
    for _ in range(3):
        assert indices(itertools.islice(loader, len(loader))) == indices(ended)


def test_setting_the_epoch_moves_to_its_start_unless_it_has_begun(dataset: Dataset) -> None:
    loader = DataLoader(dataset, 32, 4, epochs=2, prefetch=0)
    size = 2 * loader.num_samples
    take(loader, 3)
    loader.set_epoch(0)
    assert loader.samples_seen == 12
    for epoch in (2, 0, 1):
        loader.set_epoch(epoch)
        assert loader.samples_seen == epoch * size
    endless = DataLoader(dataset, 32, 4, prefetch=0)
    take(endless, 3)
    endless.set_epoch(0)
    assert endless.samples_seen == 12
    endless.set_epoch(1)
    assert endless.samples_seen == endless.num_samples
    with pytest.raises(RecipeError, match="epoch is -1"):
        loader.set_epoch(-1)


def test_a_state_without_the_end_of_a_pass_is_the_start_of_the_next_one(dataset: Dataset) -> None:
    """States of 0.1 do not have it."""
    loader = DataLoader(dataset, 32, 1, epochs=1, fields=("sample_index",), prefetch=0)
    loader.load_state_dict({**loader.state_dict(), "samples_seen": loader.num_samples})
    assert sorted(indices(loader)) == list(range(loader.num_samples))


@pytest.mark.parametrize("name", ["mask_borders", "changes"])
def test_old_names_of_arguments_are_refused(dataset: Dataset, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        DataLoader(dataset, 32, 4, **{name: True})  # type: ignore[arg-type]  # that is the point
