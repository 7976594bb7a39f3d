"""The stream through torchdata's StatefulDataLoader, which saves and loads the positions of workers by itself."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

import tokenmill
import tokenmill.torch as adapters
from conftest import make_texts, write_jsonl
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import StateError

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is installed by the test group")

EPOCHS = 3


@pytest.fixture(autouse=True)
def few_cores() -> Any:
    """torch warns of more workers than cores, which is what these tests want; torchdata calls what is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create|'set_vital' is deprecated")
        warnings.filterwarnings("ignore", "epoch . has no batch left")
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("torchdata")
    write_jsonl(path / "a.jsonl", make_texts(60, seed=3, words=20))
    tokenmill.prepare(str(path / "a.jsonl"), path / "out", tokenizer="byte", unit_bytes=1500, workers=1)
    return tokenmill.open(path / "out")


def make(dataset: Dataset, workers: int, **options: Any) -> tuple[adapters.IterableDataset, Any]:
    stream = adapters.IterableDataset(dataset, 64, 7, epochs=1, fields=("sample_index",))
    return stream, stateful.StatefulDataLoader(stream, batch_size=None, num_workers=workers, **options)


def samples(batches: Any) -> list[list[int]]:
    return [batch["sample_index"].tolist() for batch in batches]


@pytest.fixture(scope="module")
def epochs(dataset: Dataset) -> list[list[list[int]]]:
    loader = tokenmill.DataLoader(dataset, 64, 7, epochs=1, fields=("sample_index",))
    return [samples(loader) for _ in range(EPOCHS)]


@pytest.mark.parametrize(("workers", "persist"), [(0, False), (1, False), (3, False), (2, True)])
def test_a_run_is_resumed_behind_any_batch(dataset: Dataset, epochs: Any, workers: int, persist: bool) -> None:
    """By torchdata's state, and by the dataset's own with another number of workers. Nothing sets the epoch."""
    per_epoch = len(epochs[0])
    whole = [batch for epoch in epochs for batch in epoch]
    for stop in (1, 2, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch):
        stream, batches = make(dataset, workers, persistent_workers=persist)
        begun: list[list[int]] = []
        states: dict[str, Any] = {}
        for epoch in range(EPOCHS):
            for batch in batches:
                begun.append(batch["sample_index"].tolist())
                if len(begun) == stop:
                    states = {"theirs": batches.state_dict(), "ours": stream.state_dict(), "epochs": EPOCHS - epoch}
                    break
            if states:
                break
        states = json.loads(json.dumps(states))
        _, batches = make(dataset, workers, persistent_workers=persist)
        batches.load_state_dict(states["theirs"])
        assert begun + [batch for _ in range(states["epochs"]) for batch in samples(batches)] == whole
        stream, batches = make(dataset, 2 if workers == 0 else 0)
        stream.load_state_dict(states["ours"])
        assert begun + [batch for _ in range(states["epochs"]) for batch in samples(batches)] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_a_finished_epoch_begins_the_next_one(dataset: Dataset, epochs: Any, workers: int) -> None:
    _, batches = make(dataset, workers)
    assert samples(batches) == epochs[0]
    state = json.loads(json.dumps(batches.state_dict()))
    _, batches = make(dataset, workers)
    batches.load_state_dict(state)
    assert [samples(batches), samples(batches)] == epochs[1:]


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_is_refused(dataset: Dataset, workers: int) -> None:
    _, batches = make(dataset, 2)
    next(iter(batches))
    _, others = make(dataset, workers)
    others.load_state_dict(batches.state_dict())
    with pytest.raises(StateError, match="the same number of workers and ranks"):
        next(iter(others))


def test_the_state_of_a_worker_is_not_that_of_the_dataset(dataset: Dataset) -> None:
    stream, batches = make(dataset, 1)
    next(iter(batches))
    state = batches.state_dict()["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
    with pytest.raises(StateError, match="the state is one worker's"):
        stream.load_state_dict(state)
