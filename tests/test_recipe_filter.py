from __future__ import annotations

import importlib
import os
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill
from conftest import Command, make_texts, write_jsonl
from tokenmill.errors import RecipeError

Write = Callable[..., str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module with a filter of this body, and gives the name of the filter."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(*lines: str, on_path: bool = True) -> str:
        name = f"filter_of_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text("\n    ".join(["def keep(text):", *lines]) + "\n")
        sys.modules.pop(name, None)
        if on_path:
            monkeypatch.syspath_prepend(str(tmp_path))
        return f"{name}:keep"

    return write


def test_a_filter_that_raises_stops_the_build_at_once(tmp_path: Path, module: Write) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*make_texts(40), "bad", *make_texts(400)])
    position = source.read_bytes().index(b'{"text": "bad"')
    keep = module("if text == 'bad':", "    raise KeyError('oh')", "return True")
    heard: list[dict[str, Any]] = []
    with pytest.raises(RecipeError) as caught:
        tokenmill.prepare(
            str(source), tmp_path / "out", tokenizer="byte", unit_bytes="4KB", filter=keep, watch=heard.append
        )
    assert caught.value.message == f"a.jsonl at {position}: the filter {keep} raised KeyError: 'oh'"
    assert "restart=True" in caught.value.hint
    assert not [message for message in heard if message["kind"] in ("retry", "failed")]


def test_a_stream_names_the_document_at_which_its_filter_raised(tmp_path: Path, module: Write) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["good", "bad"])
    keep = module("return 1 // (text != 'bad')")
    with pytest.raises(RecipeError, match=r"a\.jsonl at 17: the filter .* raised ZeroDivisionError"):
        list(tokenmill.stream(str(source), "byte", 2, 1, filter=keep, epochs=1))


def test_a_filter_keeps_by_whatever_counts_as_true(tmp_path: Path, module: Write) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["no", "yes", "yes, yes"])
    keep = module("import re", "return re.search('yes', text)")
    made = tokenmill.prepare(str(source), tmp_path / "out", tokenizer="byte", filter=keep)
    assert made.manifest.dropped == {"filtered": 1}


def test_a_module_that_cannot_be_imported_is_an_error_that_says_why(tmp_path: Path, module: Write) -> None:
    keep = module("return True", "", "nonsense here")
    with pytest.raises(RecipeError, match="cannot be imported: SyntaxError"):
        tokenmill.plan(str(write_jsonl(tmp_path / "a.jsonl", ["x"])), filter=keep)


@pytest.mark.parametrize("how", ["option", "recipe"])
def test_the_command_finds_a_filter_in_the_current_folder(
    tokenmill: Command, tmp_path: Path, module: Write, how: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["good", "bad"])
    keep = module("return text != 'bad'", on_path=False)
    (tmp_path / "recipe.yaml").write_text(f"filter: {keep}\n")
    given = ("--filter", keep) if how == "option" else ("--config", "recipe.yaml")
    tokenmill("plan", "a.jsonl", "--tokenizer", "byte", *given)
    assert sys.path[-1] == str(tmp_path), "what is installed comes first"


def test_the_library_does_not_look_into_the_current_folder(
    tmp_path: Path, module: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep = module("return True", on_path=False)
    with pytest.raises(RecipeError, match="No module named"):
        tokenmill.plan(str(write_jsonl(tmp_path / "a.jsonl", ["x"])), filter=keep)


def test_what_was_made_with_a_filter_is_not_done_again_without_it(
    tokenmill: Command, tmp_path: Path, module: Write
) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    keep = module("return len(text) > 9")
    tokenmill("prepare", "a.jsonl", "-o", "out", "--tokenizer", "byte", "--filter", keep)
    verify = ("verify", "out", "--source", "all")
    assert f"add --filter {keep}" in tokenmill(*verify, code=2).stderr
    assert (
        f"made with the filter {keep}, and json:loads is named"
        in tokenmill(*verify, "--filter", "json:loads", code=2).stderr
    )
    tokenmill(*verify, "--filter", keep)
    module("return len(text) >= 9")
    assert "has changed since" in tokenmill(*verify, "--filter", keep, code=2).stderr
    os.truncate(tmp_path / "out/train/00000.bin", 10)
    assert f"add --filter {keep}" in tokenmill("repair", "out", code=2).stderr
    assert "has changed since" in tokenmill("repair", "out", "--filter", keep, code=2).stderr
    module("return len(text) > 9")
    tokenmill("repair", "out", "--filter", keep)


def test_a_filter_that_a_dataset_was_made_without_is_refused(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    tokenmill("prepare", "a.jsonl", "-o", "out", "--tokenizer", "byte")
    assert "drop --filter" in tokenmill("verify", "out", "--source", "all", "--filter", "json:loads", code=2).stderr


def test_a_filter_for_a_check_that_filters_nothing_is_refused(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    tokenmill("prepare", "a.jsonl", "-o", "out", "--tokenizer", "byte")
    assert "--filter is only used with --source" in tokenmill("verify", "out", "--filter", "json:loads", code=2).stderr


REASONS = """
import tokenmill

def keep(text: str) -> bool | str:
    if "turns" in text:
        return "has_turns"
    return "has_mill" if "mill" in text else "raw" not in text

def unannotated(text):
    return "has_turns" if "turns" in text else False

def odd(text: str) -> bool | str:
    return "Not a Name"

def taken(text: str) -> bool | str:
    return "too_short"

class Rules:
    def keep(self, text):
        return True
"""


@pytest.fixture
def reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    name = f"reasons_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(REASONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module(name)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_filter_may_give_a_reason_which_is_counted(tmp_path: Path, reasons: Any, workers: int) -> None:
    texts = make_texts(400, words=6)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    result = tokenmill.prepare(
        source, tmp_path / "out", tokenizer="byte", workers=workers, filter=f"{reasons.__name__}:keep", unit_bytes=9000
    )
    answers = [reasons.keep(text) for text in texts]
    expected = Counter("filtered" if answer is False else answer for answer in answers if answer is not True)
    assert len(expected) == 3
    assert result.manifest.dropped == expected
    table = pa.concat_tables(
        pq.read_table(path).select(["dropped"]) for path in sorted((tmp_path / "out/provenance").iterdir())
    )
    listed = table["dropped"].to_pylist()
    assert listed == [None if answer is True else answer or "filtered" for answer in answers]
    tokenmill.verify(tmp_path / "out", source="all", filter=f"{reasons.__name__}:keep")


def test_a_text_that_an_unannotated_filter_returns_is_true_or_false_as_ever(tmp_path: Path, reasons: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["it turns", "no"])
    result = tokenmill.prepare(
        source, tmp_path / "out", tokenizer="byte", workers=1, filter=f"{reasons.__name__}:unannotated"
    )
    assert (result.documents, result.manifest.dropped) == (1, {"filtered": 1})


@pytest.mark.parametrize("function", ["odd", "taken"])
def test_a_reason_that_cannot_be_counted_is_refused(tmp_path: Path, reasons: Any, function: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    with pytest.raises(RecipeError, match="gave the reason") as caught:
        tokenmill.prepare(
            source, tmp_path / "out", tokenizer="byte", workers=1, filter=f"{reasons.__name__}:{function}"
        )
    assert "letters from a to z" in caught.value.hint


def test_a_filter_may_be_the_function_itself_if_its_module_has_it(tmp_path: Path, reasons: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(50, words=6))
    given = tokenmill.prepare(source, tmp_path / "given", tokenizer="byte", workers=1, filter=reasons.keep)
    named = tokenmill.prepare(
        source, tmp_path / "named", tokenizer="byte", workers=1, filter=f"{reasons.__name__}:keep"
    )
    assert given.manifest == named.manifest


def test_a_filter_that_workers_cannot_import_is_refused(tmp_path: Path, reasons: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    script = types.FunctionType((lambda text: True).__code__, {"__name__": "__main__"}, "keep")
    for function, said in (
        (lambda text: True, "is not at the top of a module"),
        (reasons.Rules().keep, "is not at the top of a module"),
        (script, "is in the script itself"),
    ):
        with pytest.raises(RecipeError, match=said) as caught:
            tokenmill.prepare(source, tmp_path / "out", tokenizer="byte", workers=1, filter=function)
        assert "put the function in a module" in caught.value.hint
