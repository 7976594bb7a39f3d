"""Templar's shards, sample ids and receipts."""

from __future__ import annotations

import hashlib
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from made import DOCUMENTS, EOT, FEW, TOKENS, documents, file_names, make_dataset, write_tokens

import tokenmill
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats.base import Expected
from tokenmill.formats.templar import draw_samples, make_receipt, num_samples, sample_ids


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> TokenSplit:
    path: Path = tmp_path_factory.mktemp("templar")
    (path / "a.txt").write_text("".join(f"line {i} of the text\n" for i in range(100)))
    tokenmill.prepare(str(path / "a.txt"), path / "out", tokenizer="byte", unit_bytes=300, workers=1)
    return tokenmill.open(path / "out")["train"]


TRAIN = [1, 2, 3, EOT, EOT, 4, EOT, 5, 6, 7, 8, EOT, 1, EOT]


@pytest.fixture
def few(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path, FEW)


def test_the_id_of_a_sample_hashes_its_own_tokens_alone(split: TokenSplit) -> None:
    tokens = [token for document in split for token in document.tolist()]
    assert num_samples(split, 40) == len(tokens) // 40
    for sample, found in enumerate(sample_ids(split, 40, range(num_samples(split, 40))).tolist()):
        data = struct.pack("<40H", *tokens[40 * sample : 40 * sample + 40])
        assert struct.pack("<Q", found) == hashlib.blake2b(data, digest_size=8).digest()


def test_the_draw_of_a_miner_is_numpys_own(split: TokenSplit) -> None:
    expected = np.random.default_rng((77 * 1000003 ^ 1234) & 0xFFFFFFFF).choice(500, 60, replace=False)
    assert draw_samples(77, 1234, 60, 500).tolist() == expected.tolist()
    parts = [draw_samples(77, 1234, 60, 500, rank=rank, world_size=4) for rank in range(4)]
    assert [part.tolist() for part in parts] == [expected[rank::4].tolist() for rank in range(4)]
    assert draw_samples(77, 1235, 60, 500).tolist() != expected.tolist()


def test_more_samples_than_there_are_cannot_be_drawn() -> None:
    with pytest.raises(RecipeError, match="6 samples of 5"):
        draw_samples(1, 1, 6, 5)


def test_a_receipt_does_not_depend_on_the_order(split: TokenSplit) -> None:
    ids = sample_ids(split, 40, [5, 1, 9]).tolist()
    receipt = make_receipt(ids)
    random.Random(0).shuffle(ids)
    assert make_receipt(np.array(ids, np.uint64)) == receipt
    packed = struct.pack("<3Q", *sorted(ids))
    assert receipt == (hashlib.blake2b(packed, digest_size=16).hexdigest(), 3)
    assert make_receipt(ids[:2]) != receipt


@pytest.mark.parametrize(("dtype", "kind"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_templar_has_shards_of_an_exact_size_tokens_and_ids(tmp_path: Path, dtype: str, kind: str) -> None:
    dataset = make_dataset(tmp_path, FEW, dtype=dtype)
    tokenmill.export(dataset, tmp_path / "out", to="templar", shard_size=6, seq_len=4)
    assert file_names(tmp_path / "out") == [
        "sample_ids.bin",
        "tokens.bin",
        *(f"train_00000{i}.npy" for i in range(3)),
        "val/train_000000.npy",
    ]
    shards = [np.load(tmp_path / f"out/train_{i:06d}.npy") for i in range(3)]
    assert [shard.dtype for shard in shards] == [np.dtype(kind)] * 3
    assert [shard.tolist() for shard in shards] == [TRAIN[:6], TRAIN[6:12], TRAIN[12:]]
    assert (tmp_path / "out/tokens.bin").read_bytes() == np.array(TRAIN, kind).tobytes()
    ids = [hashlib.blake2b(np.array(TRAIN[i : i + 4], kind).tobytes(), digest_size=8).digest() for i in (0, 4, 8)]
    assert (tmp_path / "out/sample_ids.bin").read_bytes() == b"".join(ids)


def test_templars_own_ids_are_of_two_samples_each_and_then_of_nothing(few: Dataset, tmp_path: Path) -> None:
    tokenmill.export(few, tmp_path / "out", to="templar", seq_len=2, templar_compat=True)
    wrong = np.array(TRAIN, "<u2").view(np.uint32)
    expected = [
        struct.unpack("<Q", hashlib.blake2b(wrong[i * 2 : i * 2 + 2].tobytes(), digest_size=8).digest())[0]
        for i in range(len(TRAIN) // 2)
    ]
    found = np.fromfile(tmp_path / "out/sample_ids.bin", "<u8").tolist()
    assert found == expected
    assert found[-3:] == [13020603013274838756] * 3


def test_templars_ids_are_those_that_the_loader_computes(few: Dataset, tmp_path: Path) -> None:
    from tokenmill.formats.templar import sample_ids

    tokenmill.export(few, tmp_path / "out", to="templar", seq_len=3)
    found = np.fromfile(tmp_path / "out/sample_ids.bin", "<u8")
    assert found.tolist() == sample_ids(few["train"], 3, range(4)).tolist()


def test_templars_shards_run_on(tmp_path: Path) -> None:
    for number, part in enumerate((TOKENS[:4], TOKENS[4:])):
        np.save(tmp_path / f"train_{number:06d}.npy", np.array(part, np.uint16))
    found = tokenmill.open(tmp_path, eot_id=50256)["train"]
    assert documents(found) == DOCUMENTS
    assert found.document_at(np.array([0, 3, 4, 8])).tolist() == [0, 1, 1, 2]
    assert found.document_starts(np.array([2, 0])).tolist() == [5, 0]
    with pytest.raises(DatasetError, match="next file"):
        list(found.document_lengths())
    write_tokens(tmp_path / "other/tokens.bin", TOKENS)
    assert documents(tokenmill.open(tmp_path / "other", eot_id=50256)["train"]) == DOCUMENTS


def test_no_object_of_an_npy_file_is_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "train_000000.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(DatasetError, match="is not a row of tokens"):
        tokenmill.open(tmp_path)


def test_checksums_of_a_file_that_is_not_exported_are_refused_before_writing(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, {"val": FEW["val"]})  # tokens.bin is that of the training split
    with pytest.raises(RecipeError, match="no file 'tokens' to compare"):
        tokenmill.export(dataset, tmp_path / "out", to="templar", expected={"tokens": Expected(sha256="0" * 64)})
    assert not (tmp_path / "out").exists()


def test_an_export_that_differs_from_its_checksums_is_refused_with_both(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, FEW)
    right = hashlib.sha256(np.array(TRAIN, "<u2").tobytes()).hexdigest()
    for expected in (Expected(sha256=right), Expected(sha256=right.upper(), elements=len(TRAIN))):
        tokenmill.export(dataset, tmp_path / "out", to="templar", seq_len=2, expected={"tokens": expected})
    with pytest.raises(DatasetError, match=f"FAIL  {len(TRAIN)} elements\n.*{right}\n.*expected {right}, 15 elements"):
        wrong = Expected(sha256=right, elements=15)
        tokenmill.export(dataset, tmp_path / "out", to="templar", seq_len=2, expected={"tokens": wrong})
