"""Token files of other layouts, opened as they are."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill
from tokenmill.errors import DatasetError, RecipeError

TOKENS = [1, 2, 50256, 3, 50256, 4, 5, 6, 50256]
DOCUMENTS = [[1, 2, 50256], [3, 50256], [4, 5, 6, 50256]]


def write(path: Path, tokens: list[int], dtype: str = "<u2", head: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + np.array(tokens, dtype).tobytes())
    return path


def llmc_head(count: int, magic: int = 20240520, version: int = 1) -> bytes:
    numbers = np.zeros(256, "<i4")
    numbers[:3] = magic, version, count
    return numbers.tobytes()


def documents(split: Any) -> list[list[int]]:
    return [document.tolist() for document in split]


def test_a_bare_file_of_nanogpt_tells_its_end_of_text_by_its_last_token(tmp_path: Path) -> None:
    found = tokenmill.open(write(tmp_path / "train.bin", TOKENS))
    assert found.splits == ["train"]
    assert found["train"].eot_id == 50256
    assert documents(found["train"]) == DOCUMENTS
    assert found["train"].num_tokens == 9


def test_a_folder_of_nanogpt_has_its_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.bin", TOKENS)
    write(tmp_path / "val.bin", [7, 50256])
    found = tokenmill.open(tmp_path)
    assert found.splits == ["train", "val"]
    assert documents(found["val"]) == [[7, 50256]]


def test_documents_that_nobody_can_tell_are_an_error_and_tokens_are_not(tmp_path: Path) -> None:
    found = tokenmill.open(write(tmp_path / "train.bin", [1, 2, 3, 4, 5]))["train"]
    assert found.tokens(1, 4).tolist() == [2, 3, 4]
    with pytest.raises(DatasetError, match="documents end"):
        found.document(0)
    assert documents(tokenmill.open(tmp_path / "train.bin", eot_id=3)["train"]) == [[1, 2, 3], [4, 5]]


def test_a_dtype_that_is_given_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "train.bin", [1, 100_000, 2], "<u4")
    assert tokenmill.open(path, dtype="uint32", eot_id=2)["train"].tokens(0, 3).tolist() == [1, 100_000, 2]
    with pytest.raises(RecipeError, match="float"):
        tokenmill.open(path, dtype="float32")


def test_llmc_is_known_by_its_header(tmp_path: Path) -> None:
    tokens = [50256, 1, 2, 50256, 3]
    write(tmp_path / "fw_train_000001.bin", tokens[:2], head=llmc_head(2))
    write(tmp_path / "fw_train_000002.bin", tokens[2:], head=llmc_head(3))
    write(tmp_path / "fw_val_000000.bin", [50256, 9], head=llmc_head(2))
    found = tokenmill.open(tmp_path)
    assert (found["train"].eot, found["train"].eot_id) == ("prepend", 50256)
    assert documents(found["train"]) == [[50256, 1, 2], [50256, 3]]
    assert documents(found["val"]) == [[50256, 9]]


def test_llama_3_is_known_by_its_magic(tmp_path: Path) -> None:
    tokens = [128000, 100_000, 128000]
    path = write(tmp_path / "x.bin", tokens, "<u4", llmc_head(3, 20240801, 7))
    assert documents(tokenmill.open(path)["train"]) == [[128000, 100_000], [128000]]


def test_templars_shards_run_on(tmp_path: Path) -> None:
    for number, part in enumerate((TOKENS[:4], TOKENS[4:])):
        np.save(tmp_path / f"train_{number:06d}.npy", np.array(part, np.uint16))
    found = tokenmill.open(tmp_path, eot_id=50256)["train"]
    assert documents(found) == DOCUMENTS
    assert found.document_at(np.array([0, 3, 4, 8])).tolist() == [0, 1, 1, 2]
    assert found.document_starts(np.array([2, 0])).tolist() == [5, 0]
    with pytest.raises(DatasetError, match="next file"):
        list(found.document_lengths())
    write(tmp_path / "other/tokens.bin", TOKENS)
    assert documents(tokenmill.open(tmp_path / "other", eot_id=50256)["train"]) == DOCUMENTS


def test_datatrove_has_its_ends_beside(tmp_path: Path) -> None:
    write(tmp_path / "00000_x.ds", [1, 2, 3])
    (tmp_path / "00000_x.ds.index").write_bytes(np.array([1, 3], "<u8").tobytes())
    assert documents(tokenmill.open(tmp_path)["train"]) == [[1], [2, 3]]
    assert documents(tokenmill.open(tmp_path / "00000_x.ds")["train"]) == [[1], [2, 3]]


def test_olmo_finds_its_dtype_by_its_table_or_is_told(tmp_path: Path) -> None:
    write(tmp_path / "part-0-00000.npy", TOKENS, "<u4")
    with pytest.raises(DatasetError, match="dtype"):
        tokenmill.open(tmp_path)
    assert documents(tokenmill.open(tmp_path, dtype="uint32", eot_id=50256)["train"]) == DOCUMENTS
    (tmp_path / "part-0-00000.csv.gz").write_bytes(gzip.compress(b"0,3,a,b,0\n3,5,a,b,1\n5,9,a,b,2\n"))
    assert documents(tokenmill.open(tmp_path)["train"]) == DOCUMENTS


def test_megatron_pairs_may_have_several_sequences_a_document(tmp_path: Path) -> None:
    from tokenmill.dataset.bin_idx import HEADER, MAGIC

    write(tmp_path / "x.bin", TOKENS)
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


def test_a_layout_that_is_named_is_the_only_one_looked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "train.bin", TOKENS)
    assert tokenmill.open(path, layout="nanogpt").manifest.identity["layout"] == "nanogpt"
    with pytest.raises(DatasetError, match="nothing of layout llmc"):
        tokenmill.open(path, layout="llmc")
    with pytest.raises(RecipeError, match="not read in place"):
        tokenmill.open(path, layout="catid")


def test_the_loader_takes_files_as_they_are_and_its_state_knows_them_again(tmp_path: Path) -> None:
    tokens = (np.arange(4001) % 1000).tolist()
    path = write(tmp_path / "train.bin", tokens)
    loader = tokenmill.DataLoader(path, 8, 4)
    batches = [next(iter(loader))["input_ids"] for _ in range(3)]
    state = loader.state_dict()
    same = tokenmill.DataLoader(path, 8, 4)
    same.load_state_dict(state)
    assert np.array_equal(next(iter(same))["input_ids"], next(iter(loader))["input_ids"])
    assert {tuple(row) for row in batches[0].tolist()} <= {tuple(tokens[i : i + 8]) for i in range(0, 4000, 8)}
    write(tmp_path / "train.bin", [*tokens[:-1], 5])
    with pytest.raises(tokenmill.TokenmillError, match="fingerprint"):
        tokenmill.DataLoader(path, 8, 4).load_state_dict(state)


def test_a_bare_dataset_goes_to_another_process(tmp_path: Path) -> None:
    found = tokenmill.open(write(tmp_path / "train.bin", TOKENS))
    assert documents(found["train"]) == DOCUMENTS
    assert documents(pickle.loads(pickle.dumps(found))["train"]) == DOCUMENTS


def test_samples_of_a_fixed_length_are_at_hand(tmp_path: Path) -> None:
    samples = tokenmill.open(write(tmp_path / "train.bin", TOKENS))["train"].samples(4)
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


def test_no_object_of_an_npy_file_is_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "train_000000.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(DatasetError, match="no tokens"):
        tokenmill.open(tmp_path)
