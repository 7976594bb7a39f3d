from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Command, make_texts, write_jsonl


@pytest.fixture
def dataset(tokenmill: Command, tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", make_texts(100))
    tokenmill("prepare", "a.jsonl", "-o", "out", "--tokenizer", "byte", "-q")
    return tmp_path / "out"


def test_bench_tells_the_rates_of_the_loader(tokenmill: Command, dataset: Path) -> None:
    options = ("--seq-len", 32, "--batch-size", 4, "--seconds", 0.05)
    record = json.loads(tokenmill("bench", dataset, *options, "--json").stdout)
    assert record["batches"] >= 1
    assert record["seconds"] >= 0.05
    assert record["tokens_per_second"] == pytest.approx(128 * record["batches_per_second"], rel=0.01)
    assert record["first_batch_ms"] > 0
    shown = tokenmill("bench", dataset, *options).stdout
    for word in ("tokens/s", "batches/s", "first batch", "4 x 32"):
        assert word in shown


def test_bench_refuses_what_the_dataset_cannot_give(tokenmill: Command, dataset: Path) -> None:
    assert "make no sample" in tokenmill("bench", dataset, "--seq-len", 10**9, code=2).stderr
    assert "samples of split train" in tokenmill("bench", dataset, "--batch-size", 99999999999, code=2).stderr
    assert "there is no split 'test'" in tokenmill("bench", dataset, "--split", "test", code=2).stderr
