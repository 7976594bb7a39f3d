"""Megatron's pairs: their bytes, and pairs of other programs."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from made import DOCUMENTS, EOT, FEW, TOKENS, documents, file_names, make_dataset, write_tokens

import tokenmill
from tokenmill.errors import DatasetError

TRAIN = [1, 2, 3, EOT, EOT, 4, EOT, 5, 6, 7, 8, EOT, 1, EOT]


@pytest.mark.parametrize(("dtype", "code", "kind"), [("uint16", 8, "<u2"), ("uint32", 4, "<i4")])
def test_megatron_is_a_pair(tmp_path: Path, dtype: str, code: int, kind: str) -> None:
    tokenmill.export(make_dataset(tmp_path, FEW, dtype=dtype), tmp_path / "out", to="megatron", name="owt")
    assert file_names(tmp_path / "out") == [
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


def test_megatron_pairs_may_have_several_sequences_a_document(tmp_path: Path) -> None:
    from tokenmill.dataset.bin_idx import HEADER, MAGIC

    write_tokens(tmp_path / "x.bin", TOKENS)
    lengths, bounds = [3, 1, 1, 4], [0, 1, 3, 4]
    offsets = np.concatenate(([0], np.cumsum(lengths)[:-1])) * 2
    (tmp_path / "x.idx").write_bytes(
        HEADER.pack(MAGIC, 1, 8, 4, 4)
        + np.array(lengths, "<i4").tobytes()
        + offsets.astype("<i8").tobytes()
        + np.array(bounds, "<i8").tobytes()
    )
    for path in ("x", "x.bin", "x.idx", ""):
        assert documents(tokenmill.open(tmp_path / path)["train"]) == DOCUMENTS


def test_shards_are_numbered_and_cut_at_documents(tmp_path: Path) -> None:
    done = tokenmill.export(make_dataset(tmp_path, FEW), tmp_path / "out", to="megatron", shard_size=5)
    names = [f"train_{number:05d}_text_document" for number in range(3)]
    assert [name for name in file_names(tmp_path / "out") if name.startswith("train") and name.endswith(".bin")] == [
        f"{name}.bin" for name in names
    ]
    sizes = [len(tokenmill.open(tmp_path / "out" / name)["train"]) for name in names]
    assert sizes == [2, 2, 1] and not done.notes


@pytest.mark.parametrize(("offset", "told"), [(2, "magic"), (17, "dtype code 77"), (18, "its size does not match")])
def test_a_damaged_index_is_refused(tmp_path: Path, offset: int, told: str) -> None:
    tokenmill.export(make_dataset(tmp_path, {"train": FEW["train"]}), tmp_path / "out", to="megatron")
    path = tmp_path / "out/train_text_document.idx"
    data = bytearray(path.read_bytes())
    data[offset] = 77
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=told):
        tokenmill.open(tmp_path / "out")
