"""nanoGPT's files, and `--split nanogpt` against nanoGPT's own script, run with datasets and tiktoken."""

from __future__ import annotations

import hashlib
import importlib.resources
import itertools
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made import DOCUMENTS, EOT, FEW, TOKENS, documents, file_names, make_dataset, write_tokens

import tokenmill
from conftest import make_texts, write_jsonl, write_parquet
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import BuildError
from tokenmill.formats.nanogpt import num_validation, original_permutation

pytestmark = pytest.mark.xdist_group("nanogpt")  # one process, so that the original is run once


RECIPE = Path(__file__).parents[2] / "benchmarks/nanogpt_recipe.py"


RANKS = importlib.resources.files("tokenmill") / "embedded/gpt2.tiktoken"


def sha256(path: Path) -> dict[str, str]:
    return {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in ("train.bin", "val.bin")}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Some are empty: the original keeps them, as an end of text alone."""
    found = make_texts(600, words=12)
    for place in (0, 7, 400, len(found) - 1):
        found[place] = ""
    return found


@pytest.fixture(scope="module")
def original(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("original")
    write_parquet(folder / "a.parquet", texts)
    command = [sys.executable, str(RECIPE), str(RANKS), str(folder / "out"), str(folder / "a.parquet")]
    subprocess.run(command, check=True, capture_output=True)
    return sha256(folder / "out")


TRAIN = [1, 2, 3, EOT, EOT, 4, EOT, 5, 6, 7, 8, EOT, 1, EOT]


VAL = [2, 2, EOT, 3, EOT]


@pytest.fixture
def few(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path, FEW)


def test_the_permutation_is_the_originals() -> None:
    order = [10, 12, 18, 3, 11, 13, 9, 19, 7, 5, 8, 0, 1, 15, 6, 16, 2, 4, 14, 17]
    assert original_permutation(20).tolist() == order
    assert num_validation(8_013_769) == 4007


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "many"])
def test_the_files_are_byte_for_byte_those_of_the_original(
    tmp_path: Path, texts: list[str], original: dict[str, str], kind: str
) -> None:
    if kind == "jsonl":
        sources = [write_jsonl(tmp_path / "a.jsonl", texts)]
    elif kind == "parquet":
        sources = [write_parquet(tmp_path / "a.parquet", texts)]
    else:
        cuts = [0, 10, 11, 400, len(texts)]
        sources = [
            write_parquet(tmp_path / f"{i}.parquet", texts[a:b]) for i, (a, b) in enumerate(itertools.pairwise(cuts))
        ]
    done = tokenmill.prepare(
        [str(source) for source in sources],
        tmp_path / "data",
        split="nanogpt",
        layout="nanogpt",
        workers=1,
        unit_bytes=12_000,
    )
    assert sha256(tmp_path / "data/nanogpt") == original
    assert done.manifest.splits["val"].documents == num_validation(len(texts))
    assert tokenmill.verify(tmp_path / "data", source="all").ok


def test_documents_that_are_dropped_leave_the_order_of_the_others(tmp_path: Path, texts: list[str]) -> None:
    write_parquet(tmp_path / "a.parquet", texts[:300])
    tokenmill.prepare(
        str(tmp_path / "a.parquet"), tmp_path / "data", split="nanogpt", layout="nanogpt", workers=1, min_chars=30
    )
    found = tokenmill.open(tmp_path / "data/nanogpt")
    order = [number for number in original_permutation(300).tolist() if len(texts[number]) >= 30]
    plain = tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "plain", workers=1, min_chars=30)
    assert plain.manifest.dropped["too_short"] > 0
    numbers = [number for number in range(300) if len(texts[number]) >= 30]
    in_turn = dict(zip(numbers, tokenmill.open(tmp_path / "plain")["train"], strict=True))
    documents = [document for name in ("val", "train") if name in found.splits for document in found[name]]
    assert all(np.array_equal(in_turn[number], one) for number, one in zip(order, documents, strict=True))


def test_empty_documents_are_dropped_in_every_other_mode(tmp_path: Path, texts: list[str]) -> None:
    write_parquet(tmp_path / "a.parquet", texts[:20])
    done = tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "data", workers=1)
    assert done.manifest.dropped == {"empty": 2}


def test_a_source_without_documents_is_told_as_in_every_other_mode(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    for split in ("nanogpt", "val=0.1"):
        with pytest.raises(BuildError, match="no document was kept; there was none"):
            tokenmill.prepare(str(tmp_path / "a.txt"), tmp_path / split, split=split, workers=1)


def test_the_order_of_the_sources_can_be_had_as_well(tmp_path: Path, texts: list[str]) -> None:
    write_parquet(tmp_path / "a.parquet", texts[:300])
    tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "data", split="nanogpt", workers=1)
    tokenmill.export(tmp_path / "data", tmp_path / "out", to="nanogpt", order="source")
    assert (tmp_path / "out/train.bin").read_bytes() == (tmp_path / "data/train/00000.bin").read_bytes()


def test_nanogpt_is_raw_tokens(few: Dataset, tmp_path: Path) -> None:
    tokenmill.export(few, tmp_path / "out", to="nanogpt")
    assert file_names(tmp_path / "out") == ["train.bin", "val.bin"]
    assert (tmp_path / "out/train.bin").read_bytes() == np.array(TRAIN, "<u2").tobytes()
    assert (tmp_path / "out/val.bin").read_bytes() == np.array(VAL, "<u2").tobytes()


def test_nanogpt_of_characters_has_its_alphabet_beside(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["abca", "b"])
    tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "data", tokenizer="char", workers=1, layout="nanogpt")
    meta = pickle.loads((tmp_path / "data/nanogpt/meta.pkl").read_bytes())
    assert meta["stoi"] == {"a": 0, "b": 1, "c": 2}
    assert meta["itos"] == {0: "a", 1: "b", 2: "c"}
    assert json.loads((tmp_path / "data/nanogpt/meta.json").read_bytes())["vocab_size"] == meta["vocab_size"] == 4


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


def test_a_file_of_nanogpt_tells_its_end_of_text_by_its_last_token(tmp_path: Path) -> None:
    found = tokenmill.open(write_tokens(tmp_path / "train.bin", TOKENS))
    assert found.splits == ["train"]
    assert found["train"].eot_id == 50256
    assert documents(found["train"]) == DOCUMENTS
    assert found["train"].num_tokens == 9


def test_a_folder_of_nanogpt_has_its_splits(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", TOKENS)
    write_tokens(tmp_path / "val.bin", [7, 50256])
    found = tokenmill.open(tmp_path)
    assert found.splits == ["train", "val"]
    assert documents(found["val"]) == [[7, 50256]]
