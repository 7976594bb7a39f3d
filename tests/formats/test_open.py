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


GOLDEN = Path(__file__).parent / "golden"
# Of the golden files, by version 0.1. The order of samples is derived from them, and states record them.
FINGERPRINTS_OF_0_1 = {
    "catid": "45e0fecf6492ccf895754ca9088ccebcf2e2999322e3d45082d5439a7b2f43ff",
    "datatrove-uint16": "8ab7ec81960b8b3c87df49784322ea657b973fcf4d84b9be60c4ed523b3a0e7d",
    "datatrove-uint32": "402d2c0f05fe575b556365d744edc2907a6c85aaecc9eb50b79101df4342d855",
    "huggingface": "37d60a35c2b55ab0aa8a874ed4c36ed4729b4ac5f0b8f5b6982ae5bf90812a74",
    "litdata-uint16": "cf567ca03c1a3407cc8d5511b89f68767b128f8a26fe00c0a0f01e2ab6d63973",
    "litdata-uint32": "c9eeba2dec580929f281a795fcd68019796352becc0729bb51b5d6a97dda2441",
    "llmc-uint16": "8f237c4c9c5e1e2ca0f1e4f76c2768aa95b4008da412b5aa06c0ec694c7224e3",
    "llmc-uint32": "d93828c9b565de7f04810a2a210d109c3c43a8ab0a14889b48a9d033c12a43b1",
    "mds": "c29297ee8624457a1bd0452ae41bf85820c5dde6dc8609acade849e861fdb4af",
    "megatron-uint16": "9fa35c92e953c39c6ab037e978b0d04f64aa5f4ef66b92fa09e7a0b1aed71bea",
    "megatron-uint32": "3defad6f8113be873193ddb6d39426f05eab8401c65c66d177ef0b8777d175f2",
    "nanogpt-uint16": "865f981772925b0cf1a7e8bddb1f4bc2e4691141603daeb577c6f8d4d4cf53d3",
    "olmo-uint16": "60d2c0eecdbc9c5640ecb4bf2880edf25e25d32d451f80ea413bf0fb3053e352",
    "olmo-uint32": "273291fed2dee08dc12d5076733cb7c55df308d3f7f71af1772a6cab09c2b0e2",
    "templar-uint16": "9bb82b83850fdeb730ae140d75ee07b282e9c4905993999eb20dcb3188ff79b9",
    "templar-uint32": "62fd2033705c30570f1098033b4cebc730a2f43f87941676957303790b5f7026",
}


@pytest.mark.parametrize("name", FINGERPRINTS_OF_0_1)
def test_files_of_other_formats_have_the_fingerprints_of_0_1(name: str) -> None:
    from tokenmill.formats.base import Hints
    from tokenmill.formats.open import read_files

    found = read_files(str(GOLDEN / name), name.partition("-")[0], Hints(eot_id=9))
    assert found.manifest.fingerprint == FINGERPRINTS_OF_0_1[name]


def test_the_order_of_samples_in_place_is_that_of_0_1(tmp_path: Path) -> None:
    loader = tokenmill.DataLoader(write_tokens(tmp_path / "train.bin", TOKENS), 2, 2, prefetch=0)
    assert loader.stream.identity["fingerprint"].startswith("760494f2075978b3")
    expected = [[[50256, 4], [5, 6]], [[50256, 3], [1, 2]], [[5, 6], [50256, 3]]]
    assert [batch["input_ids"].tolist() for batch, _ in zip(loader, expected, strict=False)] == expected
