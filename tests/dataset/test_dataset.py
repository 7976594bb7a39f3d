from __future__ import annotations

import os
import pickle
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
from tokenmill.errors import DatasetError, RecipeError

EOT = 256
LINES = [f"line {i} " + "grain " * (i % 5) for i in range(30)]
HEAVY = ("gigatoken", "awkward", "pyarrow", "obstore", "typer", "rich", "yaml", "tiktoken", "tokenizers")


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
def test_a_range_of_tokens_crosses_shard_boundaries(path: Path, data: st.DataObject) -> None:
    flat = expected_tokens()
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    found = tokenmill.open(path)["train"].tokens(start, stop)
    assert found.tolist() == flat[start:stop]
    assert found.dtype == np.uint16


def test_ranges_that_begin_and_end_at_a_shard_boundary_are_whole(path: Path, train: TokenSplit) -> None:
    flat = expected_tokens()
    boundary = 0
    for shard in tokenmill.open(path).manifest.splits["train"].shards:
        boundary += shard.tokens
        for start in (boundary - shard.tokens, boundary - 1, boundary):
            for stop in (boundary, min(boundary + 1, len(flat))):
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
        with pytest.raises(DatasetError, match=r"is not a dataset|there is no folder") as caught:
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
def test_reading_loads_numpy_and_msgspec_only(path: Path, module: str) -> None:
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


def test_ids_and_documents_are_decoded(path: Path) -> None:
    found = tokenmill.open(path)
    assert [found["train"].text(index) for index in range(len(LINES))] == LINES
    assert found.decode(found["train"].tokens(0, found["train"].num_tokens)) == "".join(LINES)
    assert found.decode([*b"abc", EOT, *b"d"]) == "abcd"
    assert found.decode(np.array([104, 105], np.int64)) == "hi"
    assert found.decode([]) == ""
    batch = next(iter(tokenmill.DataLoader(found, 16, 1, order="sequential")))
    assert found.decode(batch["input_ids"][0]) == (LINES[0] + LINES[1])[:15]


@pytest.mark.parametrize("name", ["gpt2", "char"])
def test_a_tokenizer_of_any_kind_decodes_its_own_dataset(tmp_path: Path, name: str) -> None:
    texts = ["Grüße, 世界 🌍", "a b\n\nc", "<|endoftext|> is text here"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    tokenmill.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=name, workers=1)
    found = tokenmill.open(tmp_path / "out")
    assert [found["train"].text(index) for index in range(3)] == texts


@pytest.mark.parametrize("ids", [[-100, 65], [65, 257], [[65], [66]], [1.5], ["a"], 65, [True]])
def test_what_is_not_a_sequence_of_ids_is_refused(path: Path, ids: object) -> None:
    with pytest.raises(RecipeError):
        tokenmill.open(path).decode(ids)  # type: ignore[arg-type]  # that is the point


def test_the_hint_for_masked_labels_names_the_inputs(path: Path) -> None:
    with pytest.raises(RecipeError, match="ids from -100 to 65, but the vocabulary has 0 to 256") as caught:
        tokenmill.open(path).decode([65, -100])
    assert "input_ids" in caught.value.hint


def test_tokens_without_a_known_tokenizer_cannot_be_decoded(tmp_path: Path) -> None:
    np.array([5, 6, 9], "<u2").tofile(tmp_path / "train.bin")
    for found in (tokenmill.open(tmp_path, eot_id=9), imported(tmp_path)):
        with pytest.raises(DatasetError, match="the tokenizer of") as caught:
            found["train"].text(0)
        assert "import_" in caught.value.hint
        with pytest.raises(DatasetError, match="is unknown"):
            found.decode([5])


def imported(path: Path) -> Dataset:
    tokenmill.import_(path, path / "imported", layout="nanogpt", eot_id=9, workers=1)
    return tokenmill.open(path / "imported")


def test_no_tokenizer_is_loaded_before_something_is_decoded(path: Path) -> None:
    script = f"""
import sys, tokenmill
dataset = tokenmill.open(sys.argv[1])
list(dataset["train"]), repr(dataset), repr(dataset["train"])
early = {{name for name in sys.modules if name.startswith("tokenmill.tokenizers")}}
assert not early, early
assert dataset["train"].text(0) == {LINES[0]!r}
"""
    subprocess.run([sys.executable, "-c", script, path], check=True)


def test_a_split_decodes_in_another_process(path: Path) -> None:
    found = tokenmill.open(path)
    assert found["train"].text(0) == LINES[0]  # its engine cannot be pickled
    copied = pickle.loads(pickle.dumps(found))
    assert copied["train"].text(1) == LINES[1]
    assert copied.decode(found["train"].document(2)) == LINES[2]


def test_a_repr_tells_path_splits_tokens_and_documents(path: Path, tmp_path: Path) -> None:
    found = tokenmill.open(path)
    count = f"{len(expected_tokens()):,} tokens in {len(LINES)} documents"
    assert repr(found) == f"Dataset({str(path)!r}, train: {count})"
    assert repr(found["train"]) == f"TokenSplit({count}, uint16)"
    assert repr(found["train"].samples(16)) == f"Windows({(len(expected_tokens()) - 1) // 16} samples of 16 tokens)"
    np.array([5, 6, 9] * 1000, "<u2").tofile(tmp_path / "train.bin")
    in_place = tokenmill.open(tmp_path, eot_id=9)
    assert repr(in_place) == f"InPlaceDataset({str(tmp_path)!r}, train: 3,000 tokens)"
    assert repr(in_place["train"]) == "InPlaceSplit(3,000 tokens, uint16)"
