from __future__ import annotations

import json
from pathlib import Path

import pytest

import tokenmill as library
from conftest import Command, make_texts, write_jsonl
from s3 import Bucket
from tokenmill.loader.loader import DataLoader


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", make_texts(100))
    library.prepare(str(tmp_path / "a.jsonl"), tmp_path / "whole", tokenizer="byte", split={"val": 0.3}, workers=1)
    return tmp_path / "whole"


@pytest.fixture
def only_val(whole: Path, bucket: Bucket) -> str:
    """What somebody has pushed who needs no more."""
    library.push(whole, f"{bucket.url}/ds", split="val")
    return f"{bucket.url}/ds"


def test_inspect_shows_texts_of_train_or_of_what_there_is(tokenmill: Command, whole: Path, only_val: str) -> None:
    assert "train document 0:" in tokenmill("inspect", whole).stdout
    assert "val document 0:" in tokenmill("inspect", only_val).stdout
    lines = ([only_val], [whole, "--split", "val"])
    shown = [json.loads(tokenmill("inspect", *line, "--json").stdout) for line in lines]
    assert shown[0]["texts"] == shown[1]["texts"] != []


def test_inspect_refuses_a_split_that_is_not_there(tokenmill: Command, only_val: str) -> None:
    said = tokenmill("inspect", only_val, "--split", "train", code=2).stderr
    assert "there is no split 'train'" in said
    assert "there are val" in said


def test_a_dataset_without_train_opens_and_names_its_splits_to_who_asks_for_train(only_val: str) -> None:
    dataset = library.open(only_val)
    assert dataset["val"].num_documents > 0
    for ask in (lambda: dataset["train"], lambda: DataLoader(only_val, 32, 2)):
        with pytest.raises(KeyError, match="no split 'train'; there are val"):
            ask()


def test_inspect_shows_lengths_by_split_and_totals_by_source(tokenmill: Command, tmp_path: Path) -> None:
    for name, texts in (("a.jsonl", make_texts(60)), ("b.jsonl", make_texts(20, seed=1))):
        write_jsonl(tmp_path / name, texts)
    tokenmill("prepare", "a.jsonl", "b.jsonl", "-o", "out", "--tokenizer", "byte", "-q")
    split = library.open(tmp_path / "out")["train"]
    lengths = sorted(len(document) for document in split)
    record = json.loads(tokenmill("inspect", "out", "--json").stdout)["statistics"]
    found = record["lengths"]["train"]
    assert (found["shortest"], found["longest"]) == (lengths[0], lengths[-1])
    middle = lengths[(len(lengths) - 1) // 2]
    assert middle <= found["median"] <= middle * 1.25, "medians are known up to the bin of a length"
    by_source = {one["source"]: one for one in record["sources"]}
    for name in ("a.jsonl", "b.jsonl"):
        tokens = [len(split.document(i)) for i in range(len(split)) if split.source(i).source == name]
        assert (by_source[name]["documents"], by_source[name]["tokens"]) == (len(tokens), sum(tokens))
    shown = tokenmill("inspect", "out", COLUMNS="60").stdout
    assert f"  lengths    train: {lengths[0]} to {lengths[-1]:,} tokens" in shown
    assert "  source   documents  tokens  bytes/token" in shown
    assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= 60
