"""Excerpts of datasets: their pieces join to the text, and boundaries are where documents end."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import tokenmill as api
from conftest import Command, make_texts, write_jsonl
from tokenmill import DatasetError, RecipeError, peek

TEXTS = [
    "The mill turns 数千の文書 🙂 naïve\x1b[31m red",
    "second: a longer text, which takes two lines of a terminal",
    "third",
]


def prepare(folder: Path, **options: Any) -> str:
    write_jsonl(folder / "a.jsonl", TEXTS)
    return api.prepare(folder / "a.jsonl", folder / "out", workers=1, **options).output


@pytest.mark.parametrize("tokenizer", ["gpt2", "byte", "char"])
@pytest.mark.parametrize("eot", ["append", "prepend", "none"])
def test_the_pieces_of_a_document_are_its_ids_and_its_text(tmp_path: Path, tokenizer: str, eot: str) -> None:
    path = prepare(tmp_path, tokenizer=tokenizer, eot=eot)
    split = api.open(path)["train"]
    for number, excerpt in enumerate(peek(path, count=9)):
        assert (excerpt.document, excerpt.sample, excerpt.num_cut) == (number, None, 0)
        assert excerpt.text == TEXTS[number]
        assert excerpt.ids == split.document(number).tolist()
        assert [piece.ends_document for piece in excerpt.pieces] == [False] * (len(excerpt.pieces) - 1) + [True]
        assert "\ufffd" not in excerpt.text


def test_tokens_of_one_character_are_one_piece(tmp_path: Path) -> None:
    (excerpt,) = peek(prepare(tmp_path, tokenizer="byte"))
    smiley = next(piece for piece in excerpt.pieces if piece.text == "🙂")
    assert smiley.ids == tuple("🙂".encode())


def test_a_sample_has_the_tokens_that_a_loader_gives(tmp_path: Path) -> None:
    path = prepare(tmp_path, tokenizer="gpt2")
    rows = iter(api.DataLoader(path, seq_len=7, batch_size=1, order="sequential", epochs=1))
    split = api.open(path)["train"]
    ends = set(split.document_ends(0, split.num_tokens).tolist())
    for number, batch in enumerate(rows):
        (excerpt,) = peek(path, sample=number, seq_len=7)
        assert excerpt.ids == batch["input_ids"][0].tolist()
        assert excerpt.offset == 7 * number
        at, found = excerpt.offset, set()
        for piece in excerpt.pieces:
            at += len(piece.ids)
            found |= {at} if piece.ends_document else set()
        assert found == {end for end in ends if excerpt.offset < end <= excerpt.offset + 7}


def test_random_documents_depend_on_the_seed_alone(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(100, seed=1))
    path = api.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", workers=1).output
    first = [excerpt.document for excerpt in peek(path, random=True, count=5, seed=1)]
    assert first == [excerpt.document for excerpt in peek(path, random=True, count=5, seed=1)]
    assert first == sorted(random.Random(1).sample(range(105), 5))
    assert first != [excerpt.document for excerpt in peek(path, random=True, count=5, seed=2)]


def test_files_of_a_layout_can_be_shown(tmp_path: Path) -> None:
    path = prepare(tmp_path, tokenizer="gpt2")
    api.export(path, tmp_path / "megatron", to="megatron")
    found = api.open(tmp_path / "megatron")
    (excerpt,) = peek(found, document=1, max_tokens=3)
    assert excerpt.ids == api.open(path)["train"].document(1)[:3].tolist()
    assert excerpt.text == "", "the files do not say what their tokenizer is"
    (excerpt,) = peek(found, document=1, tokenizer="gpt2")
    assert excerpt.text.startswith(TEXTS[1])


def test_a_tokenizer_tells_where_the_documents_of_raw_tokens_end(tmp_path: Path) -> None:
    path = prepare(tmp_path, tokenizer="gpt2")
    split = api.open(path)["train"]
    (tmp_path / "raw").mkdir()
    split.tokens(0, split.num_tokens).tofile(tmp_path / "raw/train.bin")
    (tmp_path / "other").mkdir()
    split.tokens(0, 3).tofile(tmp_path / "other/train.bin")  # no end of text tells that they are GPT-2's
    with pytest.raises(DatasetError, match="does not record where its documents end") as caught:
        peek(tmp_path / "other/train.bin")
    assert caught.value.hint.startswith("name the `tokenizer` if you peek or import")
    found = peek(tmp_path / "raw/train.bin", tokenizer="gpt2", count=9)
    assert [excerpt.text for excerpt in found] == TEXTS


def test_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = prepare(tmp_path, tokenizer="byte")
    with pytest.raises(RecipeError, match="document 3 of 3 documents"):
        peek(path, document=3)
    with pytest.raises(RecipeError, match=r"sample 100 of \d+ samples"):
        peek(path, sample=100, seq_len=8)
    with pytest.raises(RecipeError, match="both"):
        peek(path, sample=0, document=0)
    with pytest.raises(api.UnknownSplitError):
        peek(path, split="valid")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_fit_the_terminal(tmp_path: Path, tokenmill: Command, columns: int) -> None:
    path = prepare(tmp_path, tokenizer="gpt2")
    shown = tokenmill("peek", path, "--count", 2, COLUMNS=str(columns)).stdout
    lines = shown.splitlines()
    assert max(len(line) for line in lines) <= columns
    assert lines[0] == "train document 0: 22 tokens from token 0"
    assert "  -- end of document 0 (50256)" in lines
    assert shown.count("-- end of document") == 2
    assert "\x1b" not in shown
    assert all(line == line.rstrip() for line in lines)


def test_ids_and_json(tmp_path: Path, tokenmill: Command) -> None:
    path = prepare(tmp_path, tokenizer="gpt2")
    lines = tokenmill("peek", path, "--document", 2, "--ids").stdout.splitlines()
    assert lines[1:] == ['     17089  "third"', "     50256  end of document 2"]
    cut = tokenmill("peek", path, "--max-tokens", 2).stdout.splitlines()
    assert cut[1:] == ["  The▏ mill", "  [20 more tokens: --max-tokens 22 shows all]"]
    (record,) = json.loads(tokenmill("peek", path, "--document", 1, "--json").stdout)["excerpts"]
    assert (record["text"], record["document"]) == (TEXTS[1], 1)
