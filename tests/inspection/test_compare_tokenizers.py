"""Ratios of tokenizers equal those of encoding the same texts by hand; samples follow their seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Command, make_texts, write_jsonl
from tokenmill import RecipeError, compare_tokenizers
from tokenmill.tokenizers.parity import open_reference
from tokenmill.tokenizers.spec import resolve


def test_ratios_are_those_of_the_texts(tmp_path: Path) -> None:
    texts = {"a.jsonl": make_texts(20), "b.jsonl": make_texts(30, seed=1)}
    for name, some in texts.items():
        write_jsonl(tmp_path / name, some)
    gpt2, byte, char = compare_tokenizers(tmp_path, ["gpt2", "byte", "char"])
    _, encode = open_reference(resolve("gpt2"))  # tiktoken
    for name, some in texts.items():  # small sources are sampled whole
        ratio = byte.sources[name]
        assert (ratio.documents, ratio.bytes) == (len(some), sum(len(text.encode()) for text in some))
        assert ratio.tokens == ratio.bytes
        assert ratio.words == sum(len(text.split()) for text in some)
        assert gpt2.sources[name].tokens == sum(len(encode(text)) for text in some)
        assert char.sources[name].tokens == sum(map(len, some))
    assert byte.total.bytes_per_token == 1
    assert gpt2.total.tokens == sum(one.tokens for one in gpt2.sources.values())
    assert gpt2.total.bytes_per_token > 1.5
    assert gpt2.vocab_size == 50257
    assert "of this sample" in char.note


def test_a_sample_follows_its_seed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [f"{number} " + "many words " * 3000 for number in range(900)])
    seeds = [0, 0, 1]
    found = [compare_tokenizers(tmp_path / "a.jsonl", ["byte"], seed=seed)[0].total for seed in seeds]
    assert found[0] == found[1] != found[2]
    assert found[0].bytes < 10_000_000


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(RecipeError, match="no document was found"):
        compare_tokenizers(tmp_path / "empty.txt", ["byte"])
    with pytest.raises(RecipeError, match="no tokenizers"):
        compare_tokenizers(tmp_path, [])
    with pytest.raises(RecipeError, match="tokenizers is 'gpt2'"):
        compare_tokenizers(tmp_path, "gpt2")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_fit_the_terminal(tmp_path: Path, tokenmill: Command, columns: int) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one two three"] * 9)
    write_jsonl(tmp_path / "b.jsonl", ["four"])
    names = ("--tokenizer", "byte", "--tokenizer", "char")
    shown = tokenmill("tokenizers", "a.jsonl", "b.jsonl", *names, COLUMNS=str(columns)).stdout
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0] == "a sample of 10 documents, 121 B from 2 sources"
    assert lines[1].split() == ["tokenizer", "vocabulary", "bytes/token", "tokens/word", "speed"]
    assert lines[2].split()[:4] == ["byte", "257", "1.00", "4.32"]
    assert lines[-2:] == ["  a.jsonl  1.00  1.00", "  b.jsonl  1.00  1.00"]
    record = json.loads(tokenmill("tokenizers", "a.jsonl", "--tokenizer", "byte", "--json").stdout)
    assert record["tokenizers"][0]["total"]["bytes_per_token"] == 1
