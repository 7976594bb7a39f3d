"""Files of other formats, opened in place."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from made import DOCUMENTS, TOKENS, documents, write_tokens

import tokenmill
from tokenmill.errors import DatasetError, RecipeError


def llmc_head(count: int, magic: int = 20240520, version: int = 1) -> bytes:
    numbers = np.zeros(256, "<i4")
    numbers[:3] = magic, version, count
    return numbers.tobytes()


def test_unknown_document_ends_are_an_error_and_tokens_are_not(tmp_path: Path) -> None:
    found = tokenmill.open(write_tokens(tmp_path / "train.bin", [1, 2, 3, 4, 5]))["train"]
    assert found.tokens(1, 4).tolist() == [2, 3, 4]
    with pytest.raises(DatasetError, match="documents end"):
        found.document(0)
    assert documents(tokenmill.open(tmp_path / "train.bin", eot_id=3)["train"]) == [[1, 2, 3], [4, 5]]


def test_a_dtype_that_is_given_is_taken(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "train.bin", [1, 100_000, 2], "<u4")
    assert tokenmill.open(path, dtype="uint32", eot_id=2)["train"].tokens(0, 3).tolist() == [1, 100_000, 2]
    with pytest.raises(RecipeError, match="float"):
        tokenmill.open(path, dtype="float32")


def test_a_layout_that_is_given_is_the_only_one_detected(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "train.bin", TOKENS)
    assert tokenmill.open(path, layout="nanogpt").manifest.identity["layout"] == "nanogpt"
    with pytest.raises(DatasetError, match="no files of layout llmc"):
        tokenmill.open(path, layout="llmc")
    with pytest.raises(RecipeError, match="not read in place"):
        tokenmill.open(path, layout="catid")


def test_the_loader_takes_files_as_they_are_and_its_state_knows_them_again(tmp_path: Path) -> None:
    tokens = (np.arange(4001) % 1000).tolist()
    path = write_tokens(tmp_path / "train.bin", tokens)
    loader = tokenmill.DataLoader(path, 8, 4)
    batches = [next(iter(loader))["input_ids"] for _ in range(3)]
    state = loader.state_dict()
    same = tokenmill.DataLoader(path, 8, 4)
    same.load_state_dict(state)
    assert np.array_equal(next(iter(same))["input_ids"], next(iter(loader))["input_ids"])
    assert {tuple(row) for row in batches[0].tolist()} <= {tuple(tokens[i : i + 8]) for i in range(0, 4000, 8)}
    write_tokens(tmp_path / "train.bin", [*tokens[:-1], 5])
    with pytest.raises(tokenmill.TokenmillError, match="fingerprint"):
        tokenmill.DataLoader(path, 8, 4).load_state_dict(state)


def test_a_dataset_in_place_goes_to_another_process(tmp_path: Path) -> None:
    found = tokenmill.open(write_tokens(tmp_path / "train.bin", TOKENS))
    assert documents(found["train"]) == DOCUMENTS
    assert documents(pickle.loads(pickle.dumps(found))["train"]) == DOCUMENTS


def test_samples_of_a_fixed_length_are_at_hand(tmp_path: Path) -> None:
    samples = tokenmill.open(write_tokens(tmp_path / "train.bin", TOKENS))["train"].samples(4)
    assert len(samples) == 2
    assert samples[1].tolist() == TOKENS[4:9]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.bin", b"abc"),
        ("x.bin", b""),
        ("x.bin", llmc_head(5) + b"12"),
        ("x.bin", llmc_head(-5)),
        ("x.npy", b"\x93NUMPY\x01\x00\xff\xff"),
        ("x.npy", b"\x93NUMPY\x09\x00"),
        ("x.ds", b"1234"),
        ("x.idx", b"MMIDIDX"),
        ("x.idx", b"MMIDIDX\x00\x00" + b"\xff" * 40),
        ("x.txt", b"text"),
    ],
)
def test_what_is_damaged_or_no_layout_at_all_is_a_typed_error(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DatasetError):
        tokenmill.open(tmp_path / name)
    with pytest.raises(DatasetError):
        tokenmill.open(tmp_path)
