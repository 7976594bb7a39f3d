"""The stream through torch: the same samples, in the same order, whoever fetches them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

import tokenmill
import tokenmill.torch as adapters
from batches import FIELDS, samples, take
from conftest import make_texts, write_jsonl
from ranks import meeting_place
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import RecipeError, StateError
from tokenmill.storage.local import Folder


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


def test_tensors_hold_what_the_arrays_hold(dataset: Dataset) -> None:
    options: dict[str, Any] = {"fields": ("positions", "document_ids", "cu_seqlens", "sample_index")}
    arrays = take(tokenmill.DataLoader(dataset, 32, 4, mask_boundaries=True, **options), 20)
    assert take(adapters.DataLoader(dataset, 32, 4, mask_boundaries=True, **options), 20) == arrays
    batch = next(iter(adapters.DataLoader(dataset, 32, 4)))
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert next(iter(adapters.DataLoader(dataset, 32, 4, dtype=None)))["input_ids"].dtype == torch.uint16


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("labels", ["shifted", "aligned"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_tensors_can_be_viewed_and_written_each_for_itself(
    dataset: Dataset, masked: bool, labels: Any, batch_size: int
) -> None:
    """nanoGPT's model takes `targets.view(-1)`, which torch refuses for rows that do not lie end to end."""
    batch = next(iter(adapters.DataLoader(dataset, 32, batch_size, labels=labels, mask_boundaries=masked)))
    x, y = batch["input_ids"], batch["labels"]
    before = y.view(-1).tolist()
    x.view(-1).fill_(-1)
    assert y.view(-1).tolist() == before
    x, y = adapters.make_get_batch(dataset, 32, 4)("train")
    assert x.view(-1).shape == y.view(-1).shape == (128,)


def test_a_state_goes_back_and_forth_between_numpy_and_torch(dataset: Dataset) -> None:
    whole = take(tokenmill.DataLoader(dataset, 32, 4, fields=FIELDS), 9)
    first = adapters.DataLoader(dataset, 32, 4, fields=FIELDS)
    begun = take(first, 5)
    second = tokenmill.DataLoader(dataset, 32, 2, fields=FIELDS)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert samples(begun) + samples(take(second, 8)) == samples(whole)
    with pytest.raises(StateError, match="seed"):
        adapters.DataLoader(dataset, 32, 4, seed=1).load_state_dict(first.state_dict())


def test_rank_and_world_size_come_from_the_environment(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    loader = adapters.DataLoader(dataset, 32, 4)
    assert (loader.rank, loader.world_size) == (1, 3)
    assert take(loader, 3) == take(tokenmill.DataLoader(dataset, 32, 4, rank=1, world_size=3), 3)
    told = adapters.DataLoader(dataset, 32, 4, rank=0, world_size=1)
    assert (told.rank, told.world_size) == (0, 1)


def test_the_part_of_a_node_is_shared_by_the_ranks_of_the_node(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = {"part": {"number": 1, "into": 2, "whole": "w"}}
    mine = Dataset(Folder(dataset.path), replace(dataset.manifest, identity={**dataset.manifest.identity, **part}))
    alone = adapters.DataLoader(mine, 32, 4)
    assert (alone.rank, alone.world_size) == (0, 1)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(RecipeError, match="LOCAL_RANK=None"):
        adapters.DataLoader(mine, 32, 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    loader = adapters.DataLoader(mine, 32, 4)
    assert (loader.rank, loader.world_size) == (1, 4)


@pytest.mark.parametrize("given", [{"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "one", "WORLD_SIZE": "2"}])
def test_half_a_rank_is_refused(dataset: Dataset, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="RANK="):
        adapters.DataLoader(dataset, 32, 4)


RANK_PROGRAM = """
import itertools, json, sys, torch
import tokenmill.torch
torch.distributed.init_process_group("gloo")
loader = tokenmill.torch.DataLoader(sys.argv[1], 32, 4, fields=("sample_index",))
found = [batch["sample_index"] for batch in itertools.islice(loader, 6)]
mine = torch.stack(found)
everyone = [torch.empty_like(mine) for _ in range(loader.world_size)]
torch.distributed.all_gather(everyone, mine)
if torch.distributed.get_rank() == 0:
    # The ranks of the group decide, whatever the environment says by now.
    print(json.dumps([loader.rank, loader.world_size, torch.cat(everyone, 1).flatten().tolist()]))
torch.distributed.destroy_process_group()
"""


def test_ranks_of_a_real_process_group_share_the_stream(dataset: Dataset) -> None:
    _store, group = meeting_place(2)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK_PROGRAM, dataset.path],
            env={**os.environ, **group, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    alone = samples(take(tokenmill.DataLoader(dataset, 32, 8, fields=FIELDS), 6))
    assert json.loads(printed[0]) == [0, 2, alone]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_by_number_work_with_samplers(dataset: Dataset, workers: int) -> None:
    mapped = adapters.Dataset(dataset, 32, fields=FIELDS)
    plain_loader = tokenmill.DataLoader(dataset, 32, 1, order="sequential", epochs=1, fields=FIELDS)
    by_number = {batch["sample_index"][0]: batch for batch in take(plain_loader)}
    assert len(mapped) == len(by_number)
    seen = []
    for rank in range(2):
        sampler = torch_data.DistributedSampler(mapped, num_replicas=2, rank=rank, shuffle=True, drop_last=True)
        for batch in torch_data.DataLoader(mapped, batch_size=4, sampler=sampler, num_workers=workers):
            for row, index in enumerate(batch["sample_index"].tolist()):
                assert batch["input_ids"][row].tolist() == by_number[index]["input_ids"][0]
                assert batch["labels"][row].tolist() == by_number[index]["labels"][0]
                seen.append(index)
    assert len(seen) == len(set(seen)) == len(mapped) // 2 * 2


def test_a_sample_is_a_dict_of_tensors(dataset: Dataset) -> None:
    mapped = adapters.Dataset(dataset, 32, split="val")
    tokens = dataset["val"].tokens(0, dataset["val"].num_tokens).tolist()
    assert mapped[2]["input_ids"].tolist() == tokens[64:96]
    assert mapped[2]["labels"].tolist() == tokens[65:97]
    assert mapped[-1]["labels"].tolist() == mapped[len(mapped) - 1]["labels"].tolist()
    for index in (len(mapped), -len(mapped) - 1):
        with pytest.raises(IndexError):
            mapped[index]
    with pytest.raises(RecipeError, match="cu_seqlens"):
        adapters.Dataset(dataset, 32, fields=("cu_seqlens",))


def test_get_batch_gives_random_windows_and_the_same_ones_again(dataset: Dataset) -> None:
    get_batch, again, other = (adapters.make_get_batch(dataset.path, 48, 6, seed=seed) for seed in (1, 1, 2))
    tokens = {name: dataset[name].tokens(0, dataset[name].num_tokens) for name in ("train", "val")}
    for split in ("train", "val", "train"):
        x, y = get_batch(split)
        assert x.shape == y.shape == (6, 48)
        assert x.dtype == y.dtype == torch.int64
        windows = np.lib.stride_tricks.sliding_window_view(tokens[split], 49)
        for row in range(6):
            assert (windows == np.append(x[row].numpy(), y[row, -1])).all(axis=1).any()
        assert torch.equal(y[:, :-1], x[:, 1:])
        for one, same in zip((x, y), again(split), strict=True):
            assert torch.equal(one, same)
        assert not torch.equal(x, other(split)[0])


def test_reprs_tell_the_dataset_and_the_shape(dataset: Dataset) -> None:
    shape = "seq_len=32, batch_size=4, rank=0, world_size=1, endless, 0 samples seen"
    loader = f"DataLoader({dataset.path!r}, {shape})"
    assert repr(adapters.DataLoader(dataset, 32, 4)) == loader
    assert repr(adapters.IterableDataset(dataset, 32, 4)) == f"IterableDataset({loader})"
    samples = adapters.Dataset(dataset, 32)
    assert repr(samples) == f"Dataset({dataset.path!r}, {len(samples):,} samples)"


def test_a_batch_is_decoded(dataset: Dataset) -> None:
    batch = next(iter(adapters.DataLoader(dataset, 32, 2, order="sequential")))
    assert dataset.decode(batch["input_ids"][0]) == dataset.decode(dataset["train"].tokens(0, 32)) != ""


TRAIN_PROGRAM = """
import json, os, signal, sys, torch
import tokenmill.torch
from torch.nn.functional import cross_entropy
path, log, state_path, options = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
torch.distributed.init_process_group("gloo")
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = tokenmill.torch.DataLoader(path, 32, 12 // world_size, epochs=1, fields=("sample_index",))
first = 0
if os.path.exists(state_path):
    saved = torch.load(state_path)
    first, weights = saved["epoch"], saved["model"]
    layers.load_state_dict(weights)
    loader.load_state_dict(saved["data"])
with open(f"{log}.{rank}", "w") as file:
    for epoch in range(first, 3):
        loader.set_epoch(epoch)
        for step, batch in enumerate(loader):
            before = [value.tolist() for value in layers.state_dict().values()]
            loss = cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            optimizer.zero_grad()
            loss.backward()
            if rank == 0 and [epoch, step] == options.get("kill_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            line = [epoch, batch["sample_index"].tolist(), batch["labels"].tolist(), loss.item(), before]
            print(json.dumps(line), file=file, flush=True)
            if rank == 0:
                saved = {"epoch": epoch, "model": layers.state_dict(), "data": loader.state_dict()}
                torch.save(saved, state_path + ".new")
                os.replace(state_path + ".new", state_path)
            torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def train(dataset: Dataset, path: Path, name: str, ranks: int, **options: Any) -> list[list[Any]]:
    """A run of a tiny model in real ranks. The lines of each rank: epoch, samples, labels, loss, weights before."""
    store, group = meeting_place(ranks)
    arguments = [dataset.path, str(path / name), str(path / "state"), json.dumps(options)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", TRAIN_PROGRAM, *arguments],
            env={**os.environ, **group, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    if options:
        assert processes[0].wait(timeout=300) == -signal.SIGKILL
        for process in processes[1:]:
            process.kill()
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert options or [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)
    del store
    return [[json.loads(line) for line in (path / f"{name}.{rank}").read_text().splitlines()] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_training_is_killed_on_two_ranks_and_resumed_on_others(dataset: Dataset, tmp_path: Path, ranks: int) -> None:
    """Every sample once, the labels those behind the inputs, the losses as computed by hand."""
    plain_loader = tokenmill.DataLoader(dataset, 32, 12, epochs=1, fields=FIELDS)
    epochs = [[(epoch, batch["sample_index"]) for batch in take(plain_loader)] for epoch in range(3)]
    stop = len(epochs[0]) // 2
    begun = train(dataset, tmp_path, "begun", 2, kill_at=[1, stop])
    resumed = train(dataset, tmp_path, "resumed", ranks)
    done = len(epochs[0]) + stop
    steps = [*zip(*(lines[:done] for lines in begun), strict=True), *zip(*resumed, strict=True)]
    found = [(parts[0][0], [index for part in parts for index in part[1]]) for parts in steps]
    assert found == [step for epoch in epochs for step in epoch]
    tokens = dataset["train"].tokens(0, dataset["train"].num_tokens).astype(np.int64)
    for parts in steps[:: len(steps) // 6]:
        for _epoch, indices, labels, loss, weights in parts:
            windows = np.stack([tokens[index * 32 : index * 32 + 33] for index in indices])
            assert labels == windows[:, 1:].tolist()
            embedding, linear, bias = map(np.array, weights)
            logits = embedding[windows[:, :-1]] @ linear.T + bias
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            by_hand = -np.take_along_axis(logits, windows[:, 1:, None], -1).mean()
            assert loss == pytest.approx(by_hand, rel=1e-6)
