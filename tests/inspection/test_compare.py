"""Comparisons name what differs, and the first document with other tokens, found by reading everything."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import tokenmill as api
from conftest import Command, make_texts, write_jsonl
from tokenmill import compare


def prepare(folder: Path, texts: list[str], **options: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "a.jsonl", texts)
    return api.prepare(folder / "a.jsonl", folder / "out", workers=1, **{"tokenizer": "byte", **options}).output


def first_other_document(a: str, b: str, split: str) -> tuple[int, int] | None:
    """The first document that differs, and its first token that does, one by one."""
    ours, theirs = api.open(a)[split], api.open(b)[split]
    for number in range(max(len(ours), len(theirs))):
        one, other = (side.document(number).tolist() if number < len(side) else [] for side in (ours, theirs))
        if one != other:
            pairs = zip(one, other, strict=False)
            return number, next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(one), len(other)))
    return None


def test_the_first_difference_is_the_one_that_reading_everything_finds(tmp_path: Path) -> None:
    chance = random.Random(3)
    texts = make_texts(60, words=20)
    before = prepare(tmp_path / "before", texts, unit_bytes=2000)
    assert compare(before, before).equal
    for change in range(3):
        changed = list(texts)
        at = chance.randrange(len(texts))
        if change % 3 == 0:
            changed[at] = changed[at][:3] + "?" + changed[at][4:]
        elif change % 3 == 1:
            del changed[at]
        else:
            changed = changed[: at + 1]
        after = prepare(tmp_path / str(change), changed, unit_bytes=[2000, 100_000][change % 2])
        for a, b in ((before, after), (after, before)):
            found = compare(a, b)
            assert not found.equal
            (document,) = found.documents
            assert (document.document, document.offset) == first_other_document(a, b, "train")


def test_what_differs_is_named_with_both_values(tmp_path: Path) -> None:
    texts = make_texts(40)
    a = prepare(tmp_path / "a", texts, split="val=0.2")
    b = prepare(tmp_path / "b", [*texts[:7], "quite another text", *texts[8:]], split="val=0.2", min_chars=4, seed=0)
    found = compare(a, b)
    assert {value.what: (value.a, value.b) for value in found.settings} == {"min_chars": (0, 4)}
    assert [value.what for value in found.sources] == ["a.jsonl"]
    splits = {document.split: document for document in found.documents}
    document = splits[api.open(b).find("a.jsonl", api.open(b)["train"].source(0).position).split or ""]
    assert document.a is not None
    assert document.a.source is not None
    assert document.a.source.source == "a.jsonl"
    for one in found.documents:
        side = one.b or one.a
        assert side is not None
        assert (one.document, one.offset) == first_other_document(a, b, one.split)


def test_a_missing_split_and_dropped_documents_are_counts(tmp_path: Path) -> None:
    texts = [*make_texts(40), "x"]
    found = compare(prepare(tmp_path / "a", texts, split="val=0.2"), prepare(tmp_path / "b", texts, min_chars=3))
    counts = {value.what: (value.a, value.b) for value in found.counts}
    assert counts["val documents"][1] is None
    assert counts["dropped, too short"] == (None, 1)


def test_files_of_a_layout_equal_the_dataset_that_was_exported(tmp_path: Path) -> None:
    path = prepare(tmp_path / "a", make_texts(40))
    api.export(path, tmp_path / "megatron", to="megatron")
    found = compare(path, tmp_path / "megatron")
    assert found.documents == ()
    tokens = api.open(path).manifest.tokens
    assert found.compared == (f"train: all {tokens:,} tokens are the same",)


def test_other_tokenizers_are_compared_by_text(tmp_path: Path) -> None:
    texts = make_texts(30)
    a, b = prepare(tmp_path / "a", texts), prepare(tmp_path / "b", texts, tokenizer="gpt2")
    found = compare(a, b)
    assert "tokenizer" in {value.what for value in found.settings}
    assert found.documents == ()
    assert "the texts of the first 31 documents are the same" in found.compared[0]
    c = prepare(tmp_path / "c", [*texts[:5], f"{texts[5]}!", *texts[6:]], tokenizer="gpt2")
    (document,) = compare(a, c).documents
    assert (document.document, document.offset) == (5, None)


def test_recipes_are_compared_by_their_fields(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("sources: [corpus]\nmin_chars: 10\nsplit: {val: 0.1}\n")
    (tmp_path / "b.yaml").write_text("sources: [corpus]\nmin_chars: 20\nsplit: {val: 0.1}\n")
    found = compare(tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert found.settings == (api.ComparedValue(what="min_chars", a=10, b=20),)
    assert compare(tmp_path / "a.yaml", tmp_path / "a.yaml").equal
    path = prepare(tmp_path / "data", make_texts(30), split="val=0.1", min_chars=10)
    names = {value.what for value in compare(path, tmp_path / "b.yaml").settings}
    assert "min_chars" in names
    assert not names & {"split", "eot", "documents", "max_tokens"}


def test_the_command_shows_both_and_its_exit_code_says_it(tmp_path: Path, tokenmill: Command) -> None:
    a = prepare(tmp_path / "a", ["the same text", "the old text"])
    b = prepare(tmp_path / "b", ["the same text", "the new text"])
    assert "are equal" in tokenmill("compare", a, a).stdout
    shown = tokenmill("compare", a, b, code=1, COLUMNS="80").stdout
    assert shown.endswith("""
first difference in train: document 1, from token 4
    A  "the old text"
       13 tokens, a.jsonl, byte 26
    B  "the new text"
       13 tokens, a.jsonl, byte 26
""")
    record = json.loads(tokenmill("compare", a, b, "--json", code=1).stdout)
    assert record["equal"] is False
    assert record["documents"][0]["a"]["source"]["position"] == 26
    assert "none" in tokenmill("compare", a, tmp_path / "none", code=2).stderr


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_fit_the_terminal(tmp_path: Path, tokenmill: Command, columns: int) -> None:
    prepare(tmp_path / "a", make_texts(30))
    prepare(tmp_path / "b", make_texts(30, seed=1), min_chars=5)
    shown = tokenmill("compare", "a/out", "b/out", code=1, COLUMNS=str(columns)).stdout
    assert max(map(len, shown.splitlines())) <= columns
    assert shown.splitlines()[:2] == ["A  a/out", "B  b/out"]
