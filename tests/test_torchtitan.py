"""The stream through torchtitan, which is not in the test group: `pip install torchtitan` brings it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import RecipeError, StateError

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
from tokenmill.torchtitan import DataLoader


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("torchtitan")
    write_jsonl(path / "a.jsonl", make_texts(120, seed=3, words=20))
    tokenmill.prepare(str(path / "a.jsonl"), path / "out", tokenizer="byte", split={"val": 0.2}, workers=1)
    return tokenmill.open(path / "out")


def build(config: Any, rank: int = 0, size: int = 1, batch_size: int = 4) -> Any:
    """As torchtitan's trainer builds it."""
    return config.build(
        dp_world_size=size,
        dp_rank=rank,
        tokenizer=None,
        seq_len=32,
        local_batch_size=batch_size,
        snapshot_every_n_steps=None,
    )


def test_batches_are_those_of_the_loader_as_torchtitan_has_them(dataset: Dataset) -> None:
    config = DataLoader.Config(dataset=str(dataset.path), seed=5)
    for rank in range(2):
        loader = tokenmill.DataLoader(
            dataset, 32, 4, rank=rank, world_size=2, seed=5, mask_boundaries=True, fields=("positions",)
        )
        for (inputs, labels), expected in itertools.islice(zip(build(config, rank, 2), loader, strict=True), 20):
            assert sorted(inputs) == ["input", "positions"]
            assert inputs["input"].tolist() == expected["input_ids"].tolist()
            assert inputs["positions"].tolist() == expected["positions"].tolist()
            assert labels.tolist() == expected["labels"].tolist()


def test_the_validator_reads_its_split_once(dataset: Dataset) -> None:
    """It makes its own config of ours, with `infinite` replaced."""
    config = replace(DataLoader.Config(dataset=str(dataset.path), split="val", order="sequential"), infinite=False)
    assert len(list(build(config))) == tokenmill.DataLoader(dataset, 32, 4, split="val", epochs=1).num_steps


def test_a_state_loads_on_another_data_parallel_degree(dataset: Dataset) -> None:
    config = DataLoader.Config(dataset=str(dataset.path))
    whole = [inputs["input"].tolist() for inputs, _ in itertools.islice(build(config, batch_size=6), 8)]
    two = [build(config, rank, 2, 3) for rank in range(2)]
    for loader in two:
        list(itertools.islice(loader, 5))
    (state,) = {json.dumps(loader.state_dict()) for loader in two}
    three = [build(config, rank, 3, 2) for rank in range(3)]
    for loader in three:
        loader.load_state_dict({})
        loader.load_state_dict(json.loads(state))
    parts = zip(*(itertools.islice(loader, 3) for loader in three), strict=True)
    assert [[row for inputs, _ in part for row in inputs["input"].tolist()] for part in parts] == whole[5:]


def test_the_state_of_another_dataloader_is_refused(dataset: Dataset) -> None:
    with pytest.raises(StateError, match="another dataloader"):
        build(DataLoader.Config(dataset=str(dataset.path))).load_state_dict({"dp_rank_0": b"", "world_size": 1})


def test_the_main_branch_gets_the_same_rows_end_to_end(dataset: Dataset) -> None:
    config = DataLoader.Config(dataset=str(dataset.path), seed=1)
    asked = {"dp_world_size": 2, "dp_rank": 1, "tokenizer": None}
    flat = config.build(**asked, max_context_length=32, num_tokens_per_batch=4 * 32)
    rows = build(config, 1, 2)
    for (ours, labels), (others, expected) in itertools.islice(zip(flat, rows, strict=True), 3):
        assert labels.tolist() == expected.flatten().tolist()
        assert {name: values.tolist() for name, values in ours.items()} == {
            name: values.flatten().tolist() for name, values in others.items()
        }
    rows.load_state_dict(flat.state_dict())
    once = replace(config, repeat=False).build(**asked, max_context_length=32, num_tokens_per_batch=4 * 32)
    assert sum(1 for _ in once) == len(once._loader)
    with pytest.raises(RecipeError, match="100 tokens per batch are not whole rows of 32"):
        config.build(**asked, max_context_length=32, num_tokens_per_batch=100)
