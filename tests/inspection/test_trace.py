"""Questions to trace: which are refused, and how the answers look on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tokenmill as api
from conftest import Command, make_texts, write_parquet
from tokenmill import RecipeError, trace


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    write_parquet(folder / "a.parquet", make_texts(60, seed=1, words=9))
    (folder / "c.txt").write_text("short\nlong enough\n")
    api.prepare(folder, folder / "out", tokenizer="byte", min_chars=8, workers=1)
    return folder


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "nothing to trace"),
        ({"document": 1, "sample": 1}, "sample and document are given"),
        ({"step": 1, "seq_len": 8}, "batch_size is missing"),
        ({"sample": 1}, "seq_len is missing"),
        ({"rank": 1, "document": 1}, "rank without a step"),
        ({"step": 1, "epoch": 1, "seq_len": 8, "batch_size": 1}, "epoch with a step"),
        ({"step": 1, "rank": 2, "world_size": 2, "seq_len": 8, "batch_size": 1}, "rank is 2"),
        ({"document": 10**9}, r"document 1,000,000,000 of \d+ documents"),
        ({"document": -1}, "document is -1"),
        ({"sample": 10**9, "seq_len": 8}, "sample 1,000,000,000 of"),
        ({"source": "a.parquet"}, "source is 'a.parquet'"),
        ({"source": "z.parquet:1"}, "is not a source of"),
        ({"source": "a.parquet:1000"}, "no document at row 1000"),
        ({"component": "web", "document": 1}, "component 'web' of a single dataset"),
    ],
    ids=str,
)
def test_what_cannot_be_traced_is_refused(root: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        trace(root / "out", **asked)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_fit_the_terminal(root: Path, tokenmill: Command, columns: int) -> None:
    known = ("--seq-len", 64, "--batch-size", 2, "--world-size", 2)
    shown = tokenmill("trace", root / "out", "--step", 2, "--rank", 1, *known, COLUMNS=str(columns)).stdout
    found = api.trace(root / "out", step=2, rank=1, seq_len=64, batch_size=2, world_size=2)
    first, second = found.samples
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0] == f"step 2, rank 1, row 0: sample {first.sample}, position 10 of the stream"
    assert lines[1] == "  tokens  of document  from token  source"
    part = first.parts[0]
    numbers = f"{part.num_tokens:8}{part.document.document:13}{part.offset:12}"
    assert lines[2] == f"{numbers}  {part.document.source}"
    assert len(lines) == 5 + len(first.parts) + len(second.parts)


def test_a_document_on_the_terminal_and_as_json(root: Path, tokenmill: Command) -> None:
    document = ("trace", root / "out", "--document", 3, "--seq-len", 16, "--order", "sequential")
    lines = tokenmill(*document).stdout.splitlines()
    (found,) = trace(root / "out", document=3).documents
    assert lines[0] == f"train document 3: {found.num_tokens} tokens from token {found.first_token}"
    assert lines[1:3] == [f"  source  {found.source}", f"  file    {found.file}, token {found.file_token}"]
    assert lines[3] == "  sample  position  step  rank  row  column  tokens"
    assert sum(int(line.split()[-1]) for line in lines[4:]) == found.num_tokens
    assert lines[4].split()[2:5] == ["-", "-", "-"]
    record = json.loads(tokenmill(*document, "--json").stdout)
    assert record["documents"][0]["source"]["unit"] == "row"
    assert [part["document"] for sample in record["samples"] for part in sample["parts"]] == [3] * len(lines[4:])
    shown = tokenmill("trace", root / "out", "--source", "c.txt:0").stdout
    assert shown.endswith("c.txt, byte 0: dropped, too short\n")
