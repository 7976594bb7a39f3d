"""llm.c's shards: their header, and how they are detected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made import EOT, FEW, documents, file_names, make_dataset, write_tokens

import tokenmill

TRAIN = [1, 2, 3, EOT, EOT, 4, EOT, 5, 6, 7, 8, EOT, 1, EOT]


def llmc_head(count: int, magic: int = 20240520, version: int = 1) -> bytes:
    numbers = np.zeros(256, "<i4")
    numbers[:3] = magic, version, count
    return numbers.tobytes()


@pytest.mark.parametrize(
    ("dtype", "magic", "version", "kind"), [("uint16", 20240520, 1, "<u2"), ("uint32", 20240801, 7, "<u4")]
)
def test_llmc_has_a_header_and_the_end_of_text_first(
    tmp_path: Path, dtype: str, magic: int, version: int, kind: str
) -> None:
    dataset = make_dataset(tmp_path, FEW, dtype=dtype)
    tokenmill.export(dataset, tmp_path / "out", to="llmc", name="fw", shard_size=8)
    assert file_names(tmp_path / "out") == ["fw_train_000001.bin", "fw_train_000002.bin", "fw_val_000000.bin"]
    train = np.array([EOT, *TRAIN[:-1]], kind)
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, 8
    assert (tmp_path / "out/fw_train_000001.bin").read_bytes() == head.tobytes() + train[:8].tobytes()
    head[2] = 6
    assert (tmp_path / "out/fw_train_000002.bin").read_bytes() == head.tobytes() + train[8:].tobytes()


def test_llmc_without_validation_takes_the_first_shard_and_says_so(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, {"train": FEW["train"]})
    done = tokenmill.export(dataset, tmp_path / "out", to="llmc", shard_size=6)
    assert file_names(tmp_path / "out") == ["train_000001.bin", "train_000002.bin", "val_000000.bin"]
    assert "first 6 tokens" in done.notes[0]


def test_llmc_is_known_by_its_header(tmp_path: Path) -> None:
    tokens = [50256, 1, 2, 50256, 3]
    write_tokens(tmp_path / "fw_train_000001.bin", tokens[:2], head=llmc_head(2))
    write_tokens(tmp_path / "fw_train_000002.bin", tokens[2:], head=llmc_head(3))
    write_tokens(tmp_path / "fw_val_000000.bin", [50256, 9], head=llmc_head(2))
    found = tokenmill.open(tmp_path)
    assert (found["train"].eot, found["train"].eot_id) == ("prepend", 50256)
    assert documents(found["train"]) == [[50256, 1, 2], [50256, 3]]
    assert documents(found["val"]) == [[50256, 9]]


def test_llama_3_is_known_by_its_magic(tmp_path: Path) -> None:
    tokens = [128000, 100_000, 128000]
    path = write_tokens(tmp_path / "x.bin", tokens, "<u4", llmc_head(3, 20240801, 7))
    assert documents(tokenmill.open(path)["train"]) == [[128000, 100_000], [128000]]
