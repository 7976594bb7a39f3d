"""Mosaic's shards: the bytes of its own writer, and shards of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made import SOME, digests, imported, make_dataset, put

import tokenmill
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import DatasetError

# Of what Mosaic's own writer makes of SOME with hashes=["sha256"], size_limit=400; variable, and packed in fours.
MDS = {
    "index.json": "8b29492ff6a1d9a5ae38e727361b8775724d2e06628085b3060131327ff879f6",
    "shard.00000.mds": "f78ecb967cdafc1ff8974cb9169ceb408f7fc7f88f9916b940da335571064f0a",
    "shard.00001.mds": "0324861d834186d90becfbc667dc5711ebab2d668ac81e81230d9ec05cf25e8c",
}


MDS_PACKED = {
    "index.json": "aebb6de6e7d5ad869a165e8ec8fe623f35a947a3b8392fcbfafeaef386de4873",
    "shard.00000.mds": "b550830b5064f1f600e73d7b08c53754571918a93c75fc07c8e86996d791f07b",
    "shard.00007.mds": "b2cb07b8110d7df7b0a120da54822103f39b527fb32b2bef0fb004ef0fd71303",
}


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("some"), SOME)


def test_tokens_that_fill_no_row_are_told(some: Dataset, tmp_path: Path) -> None:
    done = tokenmill.export(some, tmp_path / "out", to="mds", seq_len=4, shard_size=100)
    assert done.notes[0] == "the last 3 tokens of train do not fill a row of 4, and are left out"
    assert digests(tmp_path / "out" / "train", MDS_PACKED) == MDS_PACKED


def test_mosaics_writer_gives_the_same_bytes(some: Dataset, tmp_path: Path) -> None:
    tokenmill.export(some, tmp_path / "out", to="mds", shard_size=100)
    assert digests(tmp_path / "out" / "train", MDS) == MDS


def test_compressed_shards_are_refused_with_the_reason(some: Dataset, tmp_path: Path) -> None:
    tokenmill.export(some, tmp_path / "out", to="mds")
    index = json.loads((tmp_path / "out" / "train" / "index.json").read_bytes())
    index["shards"][0].update(compression="zstd", raw_data={"basename": "gone.mds", "bytes": 1, "hashes": {}})
    path = put(tmp_path / "zipped", {"index.json": json.dumps(index).encode()})
    with pytest.raises(DatasetError, match="compressed with zstd"):
        imported(path, "mds")
