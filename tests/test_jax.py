"""The stream through jax and Grain. They are no part of the test group: `pip install --group jax` brings them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import RecipeError
from tokenmill.jax import DataLoader, DataSource

FIELDS = ("sample_index",)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("jax")
    write_jsonl(path / "a.jsonl", make_texts(80, seed=4, words=20))
    tokenmill.prepare(str(path / "a.jsonl"), path / "out", tokenizer="byte", unit_bytes=1500, workers=1)
    return tokenmill.open(path / "out")


def test_a_source_has_samples_by_their_number(dataset: Dataset) -> None:
    source = DataSource(dataset, 50)
    tokens = dataset["train"].tokens(0, dataset["train"].num_tokens).tolist()
    assert len(source) == (len(tokens) - 1) // 50
    for index in range(len(source)):
        assert source[index]["input_ids"].tolist() == tokens[index * 50 : index * 50 + 50]
        assert source[index]["labels"].tolist() == tokens[index * 50 + 1 : index * 50 + 51]
    assert source[0]["input_ids"].dtype == np.int32
    assert source[-1]["labels"].tolist() == source[len(source) - 1]["labels"].tolist()
    for index in (len(source), -len(source) - 1):
        with pytest.raises(IndexError):
            source[index]


def test_a_source_is_named_by_its_data(dataset: Dataset) -> None:
    assert repr(DataSource(dataset, 50)) == repr(DataSource(dataset.path, 50))
    assert repr(DataSource(dataset, 50)) != repr(DataSource(dataset, 49))
    assert dataset.manifest.fingerprint in repr(DataSource(dataset, 50))


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[], str]:
    """A dataset that a source of the same size is made into anew with each call."""
    texts = make_texts(80, seed=4, words=20)

    def make() -> str:
        write_jsonl(tmp_path / "a.jsonl", texts)
        texts.append(texts.pop(0))
        tokenmill.prepare(
            str(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer="byte", workers=1, unit_bytes=1500, restart=True
        )
        return str(tmp_path / "out")

    return make


def test_a_source_of_other_content_has_another_name(changed: Callable[[], str]) -> None:
    first = tokenmill.open(changed())
    name = repr(DataSource(first, 50))
    mixed = repr(DataSource(tokenmill.Mixture({"a": (first, 1.0)}), 50))
    second = tokenmill.open(changed())
    assert second.manifest.fingerprint == first.manifest.fingerprint
    assert repr(DataSource(second, 50)) != name
    assert repr(DataSource(tokenmill.Mixture({"a": (second, 1.0)}), 50)) != mixed


def test_a_checkpoint_of_grain_is_refused_after_the_content_changed(changed: Callable[[], str]) -> None:
    grain = pytest.importorskip("grain.python", reason="grain is not installed")

    def start(path: str) -> Any:
        source = DataSource(path, 50)
        sampler = grain.IndexSampler(num_records=len(source), num_epochs=1, shuffle=True, seed=3)
        return iter(grain.DataLoader(data_source=source, sampler=sampler, worker_count=0))

    path = changed()
    running = start(path)
    next(running)
    state = running.get_state()
    start(path).set_state(state)
    changed()
    with pytest.raises(ValueError, match="DataSource"):
        start(path).set_state(state)


def test_fields_without_rows_are_refused(dataset: Dataset) -> None:
    with pytest.raises(RecipeError, match="cu_seqlens"):
        DataSource(dataset, 50, fields=("cu_seqlens",))


def test_grain_reads_every_sample_once(dataset: Dataset) -> None:
    grain = pytest.importorskip("grain.python", reason="grain is not installed")
    source = DataSource(dataset, 50, fields=FIELDS)
    seen = []
    for shard in range(2):
        sampler = grain.IndexSampler(
            num_records=len(source),
            num_epochs=1,
            shuffle=True,
            seed=3,
            shard_options=grain.ShardOptions(shard_index=shard, shard_count=2),
        )
        for batch in grain.DataLoader(
            data_source=source, sampler=sampler, worker_count=0, operations=[grain.Batch(batch_size=3)]
        ):
            assert batch["input_ids"].shape[1:] == (50,)
            assert (batch["input_ids"][:, 1:] == batch["labels"][:, :-1]).all()
            seen += batch["sample_index"].tolist()
    # Shards are even: what is left over is Grain's to drop.
    assert len(seen) == len(set(seen)) == len(source) // 2 * 2
    mapped = grain.MapDataset.source(source).shuffle(seed=1).map(lambda sample: int(sample["sample_index"]))
    assert sorted(mapped[index] for index in range(len(source))) == list(range(len(source)))


def test_this_process_gets_its_part(dataset: Dataset) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    loader = DataLoader(dataset, 32, 4, fields=FIELDS)
    assert (loader.rank, loader.world_size) == (jax.process_index(), jax.process_count()) == (0, 1)
    plain: Any = tokenmill.DataLoader(dataset, 32, 4, fields=FIELDS)
    for batch, expected in itertools.islice(zip(loader, plain, strict=False), 5):
        assert {name: rows.tolist() for name, rows in batch.items()} == {
            name: rows.tolist() for name, rows in expected.items()
        }
        assert batch["input_ids"].dtype == np.int32
    assert loader.state_dict() == plain.state_dict()


def test_a_sharding_makes_arrays_of_jax(dataset: Dataset) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    batch = next(iter(DataLoader(dataset, 32, 4, sharding=sharding)))
    expected = next(iter(tokenmill.DataLoader(dataset, 32, 4)))
    for name in ("input_ids", "labels"):
        assert isinstance(batch[name], jax.Array)
        assert np.asarray(batch[name]).tolist() == expected[name].tolist()
