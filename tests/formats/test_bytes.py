"""The bytes of each layout, by hand: what its readers rely on."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from made import EOT, FEW, LAYOUTS, OPTIONS, make_dataset

import tokenmill
from conftest import make_texts, tree, write_parquet
from tokenmill.dataset.dataset import Dataset

GOLDEN = Path(__file__).parent / "golden"
TRAIN = [1, 2, 3, EOT, EOT, 4, EOT, 5, 6, 7, 8, EOT, 1, EOT]
VAL = [2, 2, EOT, 3, EOT]


@pytest.fixture
def few(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path, FEW)


@pytest.fixture
def wide(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "wide", FEW, dtype="uint32")


def names(path: Path) -> list[str]:
    return sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and ".build" not in file.parts
    )


def test_nanogpt_is_raw_tokens(few: Dataset, tmp_path: Path) -> None:
    tokenmill.export(few, tmp_path / "out", to="nanogpt")
    assert names(tmp_path / "out") == ["train.bin", "val.bin"]
    assert (tmp_path / "out/train.bin").read_bytes() == np.array(TRAIN, "<u2").tobytes()
    assert (tmp_path / "out/val.bin").read_bytes() == np.array(VAL, "<u2").tobytes()


def test_nanogpt_of_characters_has_its_alphabet_beside(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["abca", "b"])
    tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "data", tokenizer="char", workers=1, layout="nanogpt")
    meta = pickle.loads((tmp_path / "data/nanogpt/meta.pkl").read_bytes())
    assert meta["stoi"] == {"a": 0, "b": 1, "c": 2}
    assert meta["itos"] == {0: "a", 1: "b", 2: "c"}
    assert json.loads((tmp_path / "data/nanogpt/meta.json").read_bytes())["vocab_size"] == meta["vocab_size"] == 4


@pytest.mark.parametrize(("dtype", "code", "kind"), [("uint16", 8, "<u2"), ("uint32", 4, "<i4")])
def test_megatron_is_a_pair(tmp_path: Path, dtype: str, code: int, kind: str) -> None:
    tokenmill.export(make_dataset(tmp_path, FEW, dtype=dtype), tmp_path / "out", to="megatron", name="owt")
    assert names(tmp_path / "out") == [
        f"owt_{split}_text_document.{ending}" for split in ("train", "val") for ending in ("bin", "idx")
    ]
    assert (tmp_path / "out/owt_train_text_document.bin").read_bytes() == np.array(TRAIN, kind).tobytes()
    lengths = np.array([4, 1, 2, 5, 2])
    size = np.dtype(kind).itemsize
    assert (tmp_path / "out/owt_train_text_document.idx").read_bytes() == (
        struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, 5, 6)
        + lengths.astype("<i4").tobytes()
        + (np.concatenate(([0], np.cumsum(lengths)[:-1])) * size).astype("<i8").tobytes()
        + np.arange(6, dtype="<i8").tobytes()
    )


@pytest.mark.parametrize(
    ("dtype", "magic", "version", "kind"), [("uint16", 20240520, 1, "<u2"), ("uint32", 20240801, 7, "<u4")]
)
def test_llmc_has_a_header_and_the_end_of_text_first(
    tmp_path: Path, dtype: str, magic: int, version: int, kind: str
) -> None:
    dataset = make_dataset(tmp_path, FEW, dtype=dtype)
    tokenmill.export(dataset, tmp_path / "out", to="llmc", name="fw", shard_size=8)
    assert names(tmp_path / "out") == ["fw_train_000001.bin", "fw_train_000002.bin", "fw_val_000000.bin"]
    train = np.array([EOT, *TRAIN[:-1]], kind)
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, 8
    assert (tmp_path / "out/fw_train_000001.bin").read_bytes() == head.tobytes() + train[:8].tobytes()
    head[2] = 6
    assert (tmp_path / "out/fw_train_000002.bin").read_bytes() == head.tobytes() + train[8:].tobytes()


def test_llmc_without_validation_takes_the_first_shard_and_says_so(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, {"train": FEW["train"]})
    done = tokenmill.export(dataset, tmp_path / "out", to="llmc", shard_size=6)
    assert names(tmp_path / "out") == ["train_000001.bin", "train_000002.bin", "val_000000.bin"]
    assert "first 6 tokens" in done.notes[0]


@pytest.mark.parametrize(("dtype", "kind"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_templar_has_shards_of_an_exact_size_tokens_and_ids(tmp_path: Path, dtype: str, kind: str) -> None:
    dataset = make_dataset(tmp_path, FEW, dtype=dtype)
    tokenmill.export(dataset, tmp_path / "out", to="templar", shard_size=6, seq_len=4)
    assert names(tmp_path / "out") == [
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


@pytest.mark.parametrize(("dtype", "kind"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_datatrove_has_tokens_ends_and_what_they_are(tmp_path: Path, dtype: str, kind: str) -> None:
    tokenmill.export(make_dataset(tmp_path, FEW, dtype=dtype), tmp_path / "out", to="datatrove")
    assert (tmp_path / "out/train/00000_tokens.ds").read_bytes() == np.array(TRAIN, kind).tobytes()
    assert np.fromfile(tmp_path / "out/train/00000_tokens.ds.index", "<u8").tolist() == [4, 5, 7, 12, 14]
    about = (tmp_path / "out/train/00000_tokens.ds.metadata").read_text().splitlines()
    assert about[:2] == [f"unknown|{np.dtype(kind).itemsize}", "14"]


@pytest.mark.parametrize(("dtype", "kind"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_olmo_has_raw_tokens_and_a_table(tmp_path: Path, dtype: str, kind: str) -> None:
    tokenmill.export(make_dataset(tmp_path, FEW, dtype=dtype), tmp_path / "out", to="olmo", shard_size=6)
    assert (tmp_path / "out/train/part-0-00000.npy").read_bytes() == np.array(TRAIN[:7], kind).tobytes()
    assert gzip.decompress((tmp_path / "out/train/part-0-00000.csv.gz").read_bytes()).decode() == (
        "0,4,train-0,train,0\n4,5,train-4,train,1\n5,7,train-5,train,2\n"
    )
    assert gzip.decompress((tmp_path / "out/train/part-0-00001.csv.gz").read_bytes()).decode() == (
        "0,5,train-7,train,0\n"
    )
    assert gzip.decompress((tmp_path / "out/train/part-0-00002.csv.gz").read_bytes()).decode() == (
        "0,2,train-12,train,0\n"
    )


def test_a_shuffled_nanogpt_has_every_document_once(tmp_path: Path) -> None:
    documents = {"train": [[token] * (token % 7) for token in range(10, 200)]}
    dataset = make_dataset(tmp_path, documents)
    orders = {}
    for seed in (0, 0, 1):
        out = tmp_path / f"{seed}-{len(orders)}"
        tokenmill.export(dataset, out, to="nanogpt", order="shuffled", seed=seed)
        found = tokenmill.open(out, eot_id=EOT)["train"]
        orders[out] = [tuple(document.tolist()) for document in found]
        assert sorted(orders[out]) == sorted((*document, EOT) for document in documents["train"])
    first, again, other = orders.values()
    assert first == again != other
    assert first != sorted(first)


def content(path: Path) -> bytes:
    """The bytes that count: how well a table is compressed is up to the library."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_golden_files_are_written_and_read_as_ever(tmp_path: Path, layout: str, dtype: str) -> None:
    if (layout, dtype) == ("nanogpt", "uint32"):
        return
    golden = GOLDEN / f"{layout}-{dtype}"
    dataset = make_dataset(tmp_path, FEW, dtype=dtype)
    tokenmill.export(dataset, tmp_path / "out", to=layout, **OPTIONS[layout])
    assert names(tmp_path / "out") == names(golden)
    for name in names(golden):
        assert content(tmp_path / "out" / name) == content(golden / name), name
    back = tokenmill.import_(golden, tmp_path / "back", layout=layout, eot_id=EOT)
    assert back.manifest.fingerprint == (GOLDEN / "fingerprint").read_text().strip()


def test_real_texts_come_out_of_every_number_of_threads_alike(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(200))
    tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "data", workers=1, split="val=0.1")
    for workers in (1, 3):
        tokenmill.export(
            tmp_path / "data", tmp_path / f"{workers}", to="templar", workers=workers, shard_size=999, seq_len=64
        )
    assert tree(tmp_path / "1") == tree(tmp_path / "3")
