from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill
from conftest import write_jsonl
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.errors import DatasetError

EOT = 256
LINES = [f"line {i} " + "grain " * (i % 5) for i in range(30)]
HEAVY = ("gigatoken", "awkward", "pyarrow", "msgspec", "typer", "rich", "yaml", "tiktoken", "tokenizers")


def expected_documents() -> list[list[int]]:
    return [[*line.encode(), EOT] for line in LINES]


def expected_tokens() -> list[int]:
    return [token for document in expected_documents() for token in document]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    (folder / "a.txt").write_text("".join(line + "\n" for line in LINES))
    tokenmill.prepare(str(folder / "a.txt"), folder / "out", tokenizer="byte", unit_bytes=64, workers=1)
    return folder / "out"


@pytest.fixture(scope="module")
def train(path: Path) -> TokenSplit:
    return tokenmill.open(path)["train"]


@pytest.fixture
def copy(path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(path, tmp_path / "copy"))


def test_the_dataset_of_these_tests_has_several_shards(path: Path) -> None:
    assert len(tokenmill.open(path).manifest.splits["train"].shards) > 5


def test_the_documents_are_those_of_the_source_in_order(train: TokenSplit) -> None:
    assert [document.tolist() for document in train] == expected_documents()
    assert len(train) == train.num_documents == len(LINES)


def test_a_document_is_found_by_its_number_in_any_order(train: TokenSplit) -> None:
    for index in reversed(range(len(LINES))):
        assert train.document(index).tolist() == expected_documents()[index]


def test_all_tokens_are_the_documents_end_to_end(train: TokenSplit) -> None:
    assert train.tokens(0, train.num_tokens).tolist() == expected_tokens()
    assert train.num_tokens == len(expected_tokens())


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_range_of_tokens_crosses_shard_borders(path: Path, data: st.DataObject) -> None:
    flat = expected_tokens()
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    found = tokenmill.open(path)["train"].tokens(start, stop)
    assert found.tolist() == flat[start:stop]
    assert found.dtype == np.uint16


def test_ranges_that_begin_and_end_at_a_shard_border_are_whole(path: Path, train: TokenSplit) -> None:
    flat = expected_tokens()
    border = 0
    for shard in tokenmill.open(path).manifest.splits["train"].shards:
        border += shard.tokens
        for start in (border - shard.tokens, border - 1, border):
            for stop in (border, min(border + 1, len(flat))):
                assert train.tokens(start, stop).tolist() == flat[start:stop]


def test_what_is_read_cannot_be_written(train: TokenSplit) -> None:
    with pytest.raises(ValueError, match="read-only"):
        train.document(0)[0] = 1


@pytest.mark.parametrize("index", [-1, 30, 10**12])
def test_a_document_that_is_not_there_is_an_index_error_with_the_number_there_are(
    train: TokenSplit, index: int
) -> None:
    with pytest.raises(IndexError, match=rf"^document {index} of 30$"):
        train.document(index)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 10**9), (10**9, 10**9)])
def test_tokens_that_are_not_there_are_an_index_error_with_the_number_there_are(
    train: TokenSplit, start: int, stop: int
) -> None:
    with pytest.raises(IndexError, match=rf"^tokens {start} to {stop} of {len(expected_tokens())}$"):
        train.tokens(start, stop)


def test_a_split_that_is_not_there_is_a_key_error_with_those_that_are(path: Path) -> None:
    with pytest.raises(KeyError, match="no split 'test'; there are train"):
        tokenmill.open(path)["test"]


def test_a_dataset_names_its_splits(path: Path) -> None:
    found = tokenmill.open(path)
    assert isinstance(found, Dataset)
    assert found.splits == ["train"]
    assert found.path == str(path)


def test_a_path_may_be_a_string_and_relative(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    dataset = tokenmill.open("out")
    monkeypatch.chdir("/")
    assert dataset["train"].document(0).tolist() == expected_documents()[0]


def test_a_dataset_that_was_moved_is_read_where_it_is(copy: Path) -> None:
    assert [document.tolist() for document in tokenmill.open(copy)["train"]] == expected_documents()


def test_an_empty_split_has_no_documents_and_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the only line\n")
    tokenmill.prepare(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer="byte", split="val=0.000001", workers=1)
    val = tokenmill.open(tmp_path / "out")["val"]
    assert (len(val), val.num_tokens, list(val), val.tokens(0, 0).tolist()) == (0, 0, [], [])
    with pytest.raises(IndexError, match=r"^document 0 of 0$"):
        val.document(0)


def test_a_folder_that_is_no_dataset_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DatasetError, match="is not a dataset") as caught:
            tokenmill.open(path)
        assert "prepare" in caught.value.hint


def test_a_file_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DatasetError):
        tokenmill.open(tmp_path / "file")


@pytest.mark.parametrize("name", ["train/00001.bin", "train/00001.idx"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "extended", "linked"])
def test_a_damaged_shard_is_an_error_that_names_it(copy: Path, name: str, damage: str) -> None:
    file = copy / name
    size = file.stat().st_size
    if damage in ("truncated", "extended"):
        os.truncate(file, size - 1 if damage == "truncated" else size + 1)
    else:
        os.rename(file, copy / "moved")
    if damage == "linked":
        os.symlink(copy / "moved", file)
    train = tokenmill.open(copy)["train"]
    assert train.document(0).tolist() == expected_documents()[0]
    with pytest.raises(DatasetError, match=name) as caught:
        list(train)
    assert "repair" in caught.value.hint


@pytest.mark.parametrize("module", ["tokenmill", "tokenmill.dataset.dataset", "tokenmill.dataset.manifest"])
def test_reading_loads_numpy_and_the_standard_library_only(path: Path, module: str) -> None:
    script = f"""
import sys, {module}, tokenmill
assert tokenmill.open(sys.argv[1])["train"].document(0)[-1] == {EOT}
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({HEAVY!r})))
"""
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_a_dataset_is_a_mapping_of_splits(path: Path) -> None:
    found = tokenmill.open(path)
    assert list(found) == ["train"] and len(found) == 1 and found
    assert "train" in found and "test" not in found and 0 not in found
    assert "train: " in repr(found)


def test_other_text_of_the_same_size_is_other_content(tmp_path: Path) -> None:
    contents, fingerprints = set(), set()
    for text in ("abc def", "def abc"):
        write_jsonl(tmp_path / "a.jsonl", [text])
        tokenmill.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", workers=1, restart=True)
        found = tokenmill.open(tmp_path / "out")
        contents.add(found.content("train"))
        fingerprints.add(found.manifest.fingerprint)
    assert len(contents) == 2 and len(fingerprints) == 1
