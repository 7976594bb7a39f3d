"""Batches through torch's worker processes: none is lost, and a state counts what the trainer took."""

from __future__ import annotations

import gc
import inspect
import json
import re
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils import data as torch_data

import tokenmill
import tokenmill.torch as adapters
from batches import FEW_CORES, FIELDS, plain, samples, take
from conftest import make_texts, write_jsonl
from tokenmill import torch_workers
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import StateError
from tokenmill.loader.loader import DataLoader
from tokenmill.text_stream import START_CURSOR


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("torch")
    write_jsonl(path / "a.jsonl", make_texts(120, seed=3, words=20))
    tokenmill.prepare(
        str(path / "a.jsonl"), path / "out", tokenizer="byte", unit_bytes=1500, split={"val": 0.2}, workers=1
    )
    return tokenmill.open(path / "out")


@pytest.fixture(autouse=True)
def no_ranks_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@FEW_CORES
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("drop_last", [True, False])
def test_workers_make_the_stream_of_the_plain_loader(dataset: Dataset, workers: int, drop_last: bool) -> None:
    everyone = []
    for rank in range(2):
        options: dict[str, Any] = {"rank": rank, "world_size": 2, "epochs": 2, "drop_last": drop_last, "fields": FIELDS}
        found = take(
            torch_data.DataLoader(
                adapters.IterableDataset(dataset, 100, 7, **options), batch_size=None, num_workers=workers
            )
        )
        assert found == take(tokenmill.DataLoader(dataset, 100, 7, **options))
        everyone += samples(found)
    count = tokenmill.DataLoader(dataset, 100, 7).num_samples
    assert len(everyone) == (2 * count // 14 * 14 if drop_last else 2 * count)
    assert 2 * count % 14, "the last step is a partial one, or this shows nothing"
    assert max(everyone.count(index) for index in range(count)) == 2


@FEW_CORES
@pytest.mark.filterwarnings("ignore:epoch 0 has no batch left")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_step_is_lost_when_the_workers_cannot_share_them_evenly(dataset: Dataset, workers: int) -> None:
    for steps in (0, 1, 4, 5):
        loader = tokenmill.DataLoader(dataset, 32, 3, epochs=1, rank=1, world_size=2, fields=FIELDS)
        state = {**loader.state_dict(), "samples_seen": loader.num_samples - 6 * steps - 5}
        loader.load_state_dict(state)
        stream = adapters.IterableDataset(dataset, 32, 3, epochs=1, rank=1, world_size=2, fields=FIELDS)
        stream.load_state_dict(state)
        found = take(torch_data.DataLoader(stream, batch_size=None, num_workers=workers))
        assert len(found) == steps
        assert found == take(loader)


@FEW_CORES
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_skip_what_the_plain_loader_skips(dataset: Dataset, workers: int) -> None:
    options: dict[str, Any] = {"skip": [(2, 5), (6, 7)], "epochs": 1, "max_seq_len": 64, "fields": FIELDS}
    loader = tokenmill.DataLoader(dataset, 16, 3, **options)
    stream = adapters.IterableDataset(dataset, 16, 3, **options)
    batches = torch_data.DataLoader(stream, batch_size=None, num_workers=workers)
    assert take(batches, 4) == take(loader, 4)
    state = json.loads(json.dumps(stream.state_dict()))
    assert state == loader.state_dict()
    rest = take(loader)
    assert take(batches) == rest
    assert take(batches) == take(loader)
    stream.load_state_dict(state)
    assert take(batches) == rest


@FEW_CORES
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_state_counts_what_was_taken_although_workers_run_ahead(
    dataset: Dataset, workers: int, drop_last: bool
) -> None:
    """Asked behind every batch, behind the last one, and when the loop has ended and torch's iterator is gone."""
    options: dict[str, Any] = {"epochs": 1, "drop_last": drop_last, "fields": FIELDS}
    stream, plain_loader = (make(dataset, 100, 7, **options) for make in (adapters.IterableDataset, DataLoader))
    batches = torch_data.DataLoader(stream, batch_size=None, num_workers=workers)
    assert len(batches) == len(stream) == len(plain_loader)
    for _epoch in range(3):
        for one, other in zip(batches, plain_loader, strict=True):
            assert plain(one) == plain(other)
            state = stream.state_dict()
            assert state == plain_loader.state_dict() or state["samples_seen"] % plain_loader.num_samples == 0
        assert stream.state_dict() == plain_loader.state_dict()
    assert stream.state_dict()["samples_seen"] == 3 * plain_loader.num_samples


@FEW_CORES
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_iteration_continues_where_the_last_one_was_left(dataset: Dataset, workers: int) -> None:
    whole = take(DataLoader(dataset, 32, 4, fields=FIELDS), 12)
    stream = adapters.IterableDataset(dataset, 32, 4, fields=FIELDS)
    batches = torch_data.DataLoader(stream, batch_size=None, num_workers=workers)
    assert take(batches, 3) + take(batches, 2) == whole[:5]
    state = json.loads(json.dumps(stream.state_dict()))
    assert state["samples_seen"] == 20
    other = adapters.IterableDataset(dataset, 32, 4, fields=FIELDS)
    other.load_state_dict(state)
    assert take(torch_data.DataLoader(other, batch_size=None, num_workers=2), 7) == whole[5:]
    loader = DataLoader(dataset, 32, 6, fields=FIELDS)
    loader.load_state_dict(other.state_dict())
    assert loader.samples_seen == 48


@FEW_CORES
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_resume_a_loop_over_epochs_behind_any_batch(dataset: Dataset, workers: int) -> None:
    options: dict[str, Any] = {"split": "val", "epochs": 1, "fields": FIELDS}
    plain_loader = DataLoader(dataset, 32, 4, **options)
    whole = [take(plain_loader) for _ in range(3)]
    for stop in range(1, 2 * len(plain_loader) + 2):
        begun, epoch, state = [], 0, {}
        stream = adapters.IterableDataset(dataset, 32, 4, **options)
        batches = torch_data.DataLoader(stream, batch_size=None, num_workers=workers)
        for epoch in range(3):
            stream.set_epoch(epoch)
            for batch in batches:
                begun.append(plain(batch))
                if len(begun) == stop:
                    state = json.loads(json.dumps(stream.state_dict()))
                    break
            if state:
                break
        stream = adapters.IterableDataset(dataset, 32, 4, **options)
        stream.load_state_dict(state)
        batches = torch_data.DataLoader(stream, batch_size=None, num_workers=workers)
        rest = []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "epoch . has no batch left")
            for resumed in range(epoch, 3):
                stream.set_epoch(resumed)
                rest += take(batches)
        assert begun + rest == [batch for batches in whole for batch in batches]


@FEW_CORES
def test_workers_that_persist_take_epoch_after_epoch(dataset: Dataset) -> None:
    options: dict[str, Any] = {"epochs": 1, "fields": FIELDS}
    stream, plain_loader = (make(dataset, 100, 7, **options) for make in (adapters.IterableDataset, DataLoader))
    batches = torch_data.DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in range(3):
        stream.set_epoch(epoch)
        for one, other in zip(batches, plain_loader, strict=True):
            assert plain(one) == plain(other)
            assert stream.state_dict()["samples_seen"] == plain_loader.samples_seen
    assert stream.state_dict() == plain_loader.state_dict()


@FEW_CORES
@pytest.mark.parametrize("moves", ["break", "set_epoch", "load_state_dict", "endless"])
def test_workers_that_persist_cannot_be_moved_and_say_so(dataset: Dataset, moves: str) -> None:
    stream = adapters.IterableDataset(dataset, 100, 7, epochs=None if moves == "endless" else 1)
    start = stream.state_dict()
    batches = torch_data.DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
    take(batches, 2 if moves in ("break", "endless") else None)
    if moves == "set_epoch":
        stream.set_epoch(5)
    elif moves == "load_state_dict":
        stream.load_state_dict(start)
    with pytest.raises(StateError, match="workers that persist") as caught:
        take(batches, 1)
    assert "persistent_workers=False" in caught.value.hint


class Around(torch_data.IterableDataset):  # type: ignore[misc]  # torch is not type-checked here
    """Another dataset around ours, as users write them: what it gives need not be one batch for each of ours."""

    def __init__(self, inner: adapters.IterableDataset) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


@FEW_CORES
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_state_is_refused_if_nothing_tells_what_was_taken(dataset: Dataset, context: str) -> None:
    stream = adapters.IterableDataset(dataset, 32, 4, epochs=1)
    batches = torch_data.DataLoader(Around(stream), batch_size=None, num_workers=1, multiprocessing_context=context)
    take(batches, 2)
    with pytest.raises(StateError, match="the number of batches taken is unknown"):
        stream.state_dict()
    stream.set_epoch(1)
    assert stream.state_dict()["samples_seen"] == DataLoader(dataset, 32, 4).num_samples


@FEW_CORES
def test_workers_that_repeat_an_epoch_unnoticed_warn(dataset: Dataset) -> None:
    stream = adapters.IterableDataset(dataset, 32, 4, epochs=1)
    batches = torch_data.DataLoader(Around(stream), batch_size=None, num_workers=2)
    first = take(batches)
    stream.set_epoch(1)
    assert take(batches) != first
    with pytest.raises(UserWarning, match=r"the same samples in the same order.*Call set_epoch"):
        take(batches)
    sequential = adapters.IterableDataset(dataset, 32, 4, epochs=1, order="sequential")
    batches = torch_data.DataLoader(Around(sequential), batch_size=None, num_workers=1)
    assert take(batches) == take(batches), "epochs of this order are equal"


@FEW_CORES
def test_batches_in_the_order_of_the_workers_are_refused(dataset: Dataset) -> None:
    stream = adapters.IterableDataset(dataset, 32, 4, epochs=1)
    with pytest.raises(StateError, match="in_order=False") as caught:
        take(torch_data.DataLoader(stream, batch_size=None, num_workers=2, in_order=False), 1)
    assert "leave in_order=False out" in str(caught.value)
    assert len(take(torch_data.DataLoader(stream, batch_size=None, num_workers=1, in_order=False))) == len(stream)


def torch_without(name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """torch's own module of the DataLoader, as another version might have it: with another name."""
    source, others = re.subn(rf"\b{name}\b", f"{name}_of_later", inspect.getsource(torch_data.dataloader))
    assert others
    module = types.ModuleType("torch_without")
    exec(source, vars(module))
    monkeypatch.setattr(torch_workers, "BaseDataLoaderIter", module._BaseDataLoaderIter)
    return module


PRIVATE = ("_num_yielded", "_rcvd_idx", "_send_idx", "_reset", "_persistent_workers", "_dataset")


@FEW_CORES
@pytest.mark.parametrize("name", PRIVATE)
def test_a_torch_without_a_private_name_is_refused_a_state(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    without = torch_without(name, monkeypatch)
    stream = adapters.IterableDataset(dataset, 32, 4, epochs=1, fields=FIELDS)
    persist = name == "_reset"
    loader = without.DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=persist)
    whole = take(adapters.DataLoader(dataset, 32, 4, epochs=1, fields=FIELDS))
    batches = iter(loader)
    assert take(batches, 3) == whole[:3], "an epoch needs none of the names"
    said = "the number of batches taken is unknown" if name == "_dataset" else f"has no {name}, so"
    with pytest.raises(StateError, match=said):
        stream.state_dict()
    if name not in ("_reset", "_dataset"):
        with pytest.raises(StateError, match=said):
            next(iter(loader))


def test_the_iterator_of_torch_ends_with_its_loop(dataset: Dataset) -> None:
    """Its workers would stay otherwise, until the garbage is collected."""
    stream = adapters.IterableDataset(dataset, 100, 7, epochs=1)
    gc.disable()
    try:
        iterator = iter(torch_data.DataLoader(stream, batch_size=None, num_workers=1))
        next(iterator)
        is_alive = weakref.ref(iterator)
        del iterator
        assert is_alive() is None
    finally:
        gc.enable()
    assert stream.state_dict()["samples_seen"] == 7


def test_workers_that_are_spawned_map_the_files_themselves(dataset: Dataset) -> None:
    take(tokenmill.DataLoader(dataset, 32, 4), 3)  # maps are open here
    stream = adapters.IterableDataset(dataset, 32, 4, fields=FIELDS)
    spawned = torch_data.DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    whole = take(tokenmill.DataLoader(dataset, 32, 4, fields=FIELDS), 8)
    assert take(spawned, 4) + take(stream, 4) == whole


def test_a_position_that_workers_wrote_over_is_not_taken_for_another() -> None:
    positions, cursor = torch_workers.Positions(3), START_CURSOR
    for step in range(4):
        positions.note(step, step + 1, cursor)
    assert [positions.read(step)[0] for step in (1, 2, 3)] == [2, 3, 4]
    for missing in (0, 4, None):
        with pytest.raises(StateError, match="workers have not noted how far they are"):
            positions.read(missing)
