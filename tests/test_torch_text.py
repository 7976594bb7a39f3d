"""Straight from text through torch: the same batches, in the same order, whoever makes them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import data as torch_data

import tokenmill
import tokenmill.torch as adapters
from conftest import make_texts, write_jsonl, write_parquet
from tokenmill.errors import StateError

FIELDS = ("sample_index",)
# torch warns of more workers than cores, which is what these tests want; torchdata calls what is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("torch-text")
    write_jsonl(path / "a.jsonl", make_texts(60, seed=3, words=20))
    write_parquet(path / "b.parquet", make_texts(60, seed=4, words=20), rows=9)
    return str(path)


def make(sources: str, **options: Any) -> adapters.TextDataset:
    sizes = {"seq_len": 100, "batch_size": 7, "rank": 0, "world_size": 1, "unit_bytes": 1500, "fields": FIELDS}
    return adapters.TextDataset(sources, "byte", **{**sizes, **options})


def take(batches: Any, steps: int | None = None) -> list[dict[str, list[Any]]]:
    return [{name: rows.tolist() for name, rows in batch.items()} for batch in itertools.islice(iter(batches), steps)]


def through(dataset: adapters.TextDataset, workers: int, **options: Any) -> torch_data.DataLoader:
    return torch_data.DataLoader(dataset, batch_size=None, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("drop_last", [True, False])
def test_workers_make_the_batches_of_the_plain_stream(sources: str, workers: int, drop_last: bool) -> None:
    everyone: list[int] = []
    for rank in range(2):
        options: dict[str, Any] = {"rank": rank, "world_size": 2, "epochs": 2, "drop_last": drop_last}
        found = take(through(make(sources, **options), workers))
        plain = tokenmill.stream(sources, "byte", 100, 7, unit_bytes=1500, fields=FIELDS, **options)
        assert found == take(plain)
        everyone += [index for batch in found for index in batch["sample_index"]]
    count = max(everyone) + 1
    assert 2 * count % 14, "the last step is a partial one, or this shows nothing"
    assert len(everyone) == (2 * count // 14 * 14 if drop_last else 2 * count)
    assert max(everyone.count(index) for index in range(count)) == 2


def test_batches_are_tensors(sources: str) -> None:
    batch = next(iter(make(sources)))
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_state_is_behind_what_the_trainer_took(sources: str, workers: int) -> None:
    whole = take(make(sources), 20)
    first = make(sources)
    assert take(through(first, workers), 5) == whole[:5]
    state = json.loads(json.dumps(first.state_dict()))
    assert state["samples_seen"] == 35
    assert take(through(first, 3), 2) == whole[5:7], "the next iteration continues"
    second = make(sources)
    second.load_state_dict(state)
    assert take(through(second, workers), 8) == whole[5:13]
    stream = tokenmill.stream(sources, "byte", 100, 7, unit_bytes=1500, fields=FIELDS)
    stream.load_state_dict(second.state_dict())
    assert state["cursor"]["mark"]["unit"] > 0, "text before it is not read again"
    assert take(stream, 7) == whole[13:]


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"multiprocessing_context": "spawn"}])
@pytest.mark.parametrize("drop_last", [True, False])
def test_epochs_follow_each_other(sources: str, drop_last: bool, options: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"epochs": 1, "drop_last": drop_last, "shuffle": 20}
    alone, dataset = make(sources, **sizes), make(sources, **sizes)
    loader = through(dataset, 2, **options)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert take(loader) == take(alone)
        assert dataset.state_dict() == alone.state_dict()
    assert alone.state_dict()["cursor"]["epoch"] == 3


def test_workers_may_be_as_far_ahead_as_the_trainer_wants(sources: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "STEPS", 2)
    dataset = make(sources, batch_size=1)
    loader = iter(through(dataset, 2, prefetch_factor=9))
    whole = take(make(sources, batch_size=1), 40)
    for number in range(1, 31):
        assert take([next(loader)]) == [whole[number - 1]]
        assert dataset.state_dict()["samples_seen"] == number
    again = make(sources, batch_size=1)
    again.load_state_dict(dataset.state_dict())
    assert take(again, 10) == whole[30:]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_a_worker_that_resumes_at_the_end_of_its_pass_does_not_begin_the_next(
    sources: str, workers: int, batch_size: int
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is installed by the test group")
    options: dict[str, Any] = {"epochs": 1, "drop_last": False, "batch_size": batch_size}
    alone = make(sources, **options)
    passes = [take(alone), take(alone)]
    first = stateful.StatefulDataLoader(make(sources, **options), batch_size=None, num_workers=workers)
    assert take(first, len(passes[0])) == passes[0]
    second = stateful.StatefulDataLoader(make(sources, **options), batch_size=None, num_workers=workers)
    second.load_state_dict(first.state_dict())
    assert [take(second), take(second)] == [[], passes[1]]


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loaders_save_and_load_the_position(sources: str, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is installed by the test group")
    whole = take(make(sources), 20)
    first = stateful.StatefulDataLoader(make(sources), batch_size=None, num_workers=workers)
    assert take(first, 5) == whole[:5]
    second = stateful.StatefulDataLoader(make(sources), batch_size=None, num_workers=workers)
    second.load_state_dict(first.state_dict())
    assert take(second, 7) == whole[5:12]
    assert second.dataset.state_dict()["samples_seen"] == 12 * 7


class Around(torch_data.IterableDataset):
    def __init__(self, inner: adapters.TextDataset) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


@pytest.mark.parametrize("around", [True, False])
def test_a_state_is_refused_if_nothing_tells_what_was_taken(sources: str, around: bool) -> None:
    dataset = make(sources)
    loader = torch_data.DataLoader(Around(dataset) if around else dataset, batch_size=None, num_workers=1)
    batches = iter(loader)
    take(batches, 2)
    if not around:
        del vars(batches)["_rcvd_idx"]  # as in a torch that has another name for it
    with pytest.raises(StateError, match="the number of batches taken is unknown"):
        dataset.state_dict()


def test_workers_that_repeat_their_text_unnoticed_warn(sources: str) -> None:
    loader = torch_data.DataLoader(Around(make(sources)), batch_size=None, num_workers=1)
    take(loader, 2)
    with pytest.raises(UserWarning, match="the same samples in the same order"):
        take(loader, 2)


def test_batches_in_the_order_of_the_workers_are_refused(sources: str) -> None:
    with pytest.raises(StateError, match="in_order=False"):
        take(torch_data.DataLoader(make(sources), batch_size=None, num_workers=2, in_order=False), 1)


def test_workers_that_are_spawned_read_the_sources_themselves(sources: str) -> None:
    dataset = make(sources)
    start = dataset.state_dict()
    before = take(dataset, 3)  # the engine is loaded here
    dataset.load_state_dict(start)
    assert take(through(dataset, 1, multiprocessing_context="spawn"), 3) == before


def test_rank_and_world_size_come_from_the_environment(sources: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    found = take(make(sources, rank=None, world_size=None), 2)
    assert found == take(make(sources, rank=1, world_size=3), 2)
    assert found != take(make(sources, rank=0, world_size=3), 2)


def test_a_repr_tells_the_stream(sources: str) -> None:
    found = repr(make(sources))
    assert found.startswith("TextDataset(TextStream(2 sources, 'byte', 'train', seq_len=")
    assert found.endswith(", 0 samples seen))")


def test_torch_workers_tokenize_the_text_once(sources: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"with open({str(tmp_path / 'log')!r}, 'a') as log:\n        log.write('x')\n    return True\n"
    noting = f"def keep(text):\n    {body}"
    (tmp_path / "noting_filter.py").write_text(noting)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = take(through(make(sources, filter="noting_filter:keep", epochs=1), 3))
    noted = (tmp_path / "log").stat().st_size
    (tmp_path / "log").unlink()
    assert found == take(make(sources, filter="noting_filter:keep", epochs=1))
    assert noted == (tmp_path / "log").stat().st_size
