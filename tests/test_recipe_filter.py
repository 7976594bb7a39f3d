from __future__ import annotations

import csv
import importlib
import json
import os
import re
import signal
import subprocess
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


COLUMNS = """
import os, signal

def keep(text: str, url: str | None, score, factor: float = 0.5) -> bool | str:
    if "KILL_AT" in os.environ and text.startswith(os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    if not url or score is None:
        return "lacks_either"
    return float(score) > factor or url.endswith("7")

def misspelt(text: str, *, scor: float) -> bool:
    return scor > 0

def dated(text: str, day) -> bool:
    return day.year > 2000
"""


@pytest.fixture
def columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    name = f"columns_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(COLUMNS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module(name)


def annotated_rows(count: int = 300) -> list[dict[str, Any]]:
    """Some texts are empty or null, so that documents before a row are dropped for other reasons."""
    texts: list[str | None] = [*make_texts(count, words=6)]
    texts[3::17], texts[5::29] = [""] * len(texts[3::17]), [None] * len(texts[5::29])
    return [
        {
            "url": None if number % 11 == 0 else f"http://x/{number}",
            "text": text,
            "score": None if number % 13 == 0 else number * 37 % 100 / 100,
        }
        for number, text in enumerate(texts)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=60)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, pa.Table.from_pylist(rows).schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows), max_chunksize=60)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:  # of each second row, fields without a value are left out
        short = [
            {name: value for name, value in row.items() if value is not None or number % 2}
            for number, row in enumerate(rows)
        ]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in short))
    return path


def tokens_of(path: Path) -> bytes:
    return b"".join(shard.read_bytes() for shard in sorted(path.glob("train/*.bin")))


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl", "json", "csv"])
def test_a_filter_gets_the_columns_that_its_parameters_name(tmp_path: Path, columns: Any, ending: str) -> None:
    rows = annotated_rows()
    if ending == "csv":  # which has no nulls
        rows = [{**row, "score": row["score"] or 0, "text": row["text"] or ""} for row in rows]
    source = write_rows(tmp_path / f"a.{ending}", rows)
    made = tokenmill.prepare(
        source, tmp_path / "out", tokenizer="byte", workers=1, unit_bytes=3000, filter=columns.keep
    )
    texts = [row["text"] for row in rows if row["text"]]
    answers = [columns.keep(**row) for row in rows if row["text"]]
    kept = [text for text, answer in zip(texts, answers, strict=True) if answer is True]
    plain = write_jsonl(tmp_path / "plain.jsonl", kept)
    tokenmill.prepare(plain, tmp_path / "plain", tokenizer="byte", workers=1)
    assert tokens_of(tmp_path / "out") == tokens_of(tmp_path / "plain")
    assert made.manifest.dropped["filtered"] == answers.count(False) > 0
    assert made.manifest.dropped["lacks_either"] == answers.count("lacks_either") > 0
    tokenmill.verify(tmp_path / "out", source="all", filter=f"{columns.__name__}:keep")


def test_a_filter_of_columns_gives_the_same_with_several_workers_and_after_a_kill(
    tmp_path: Path, columns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = annotated_rows()
    source = write_rows(tmp_path / "a.jsonl", rows)
    options: Any = {"tokenizer": "byte", "unit_bytes": 6000, "filter": f"{columns.__name__}:keep"}
    whole = tokenmill.prepare(source, tmp_path / "one", workers=1, **options)
    tokenmill.prepare(source, tmp_path / "three", workers=3, **options)
    call = f"import tokenmill; tokenmill.prepare({str(source)!r}, {str(tmp_path / 'cut')!r}, workers=1, **{options!r})"
    late = next(row["text"] for row in rows[250:] if row["text"])
    environment = {**os.environ, "KILL_AT": late, "PYTHONPATH": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list((tmp_path / "cut/.build/receipts").iterdir()), "there are units to keep"
    tokenmill.prepare(source, tmp_path / "cut", workers=1, **options)
    assert (tmp_path / "one/dataset.json").read_bytes() == (tmp_path / "three/dataset.json").read_bytes()
    assert (tmp_path / "one/dataset.json").read_bytes() == (tmp_path / "cut/dataset.json").read_bytes()
    shard = next((tmp_path / "one/train").glob("*.bin"))
    before = shard.read_bytes()
    os.truncate(shard, 10)
    tokenmill.repair(tmp_path / "one", workers=1, filter=options["filter"])
    assert shard.read_bytes() == before
    batches = list(tokenmill.stream(source, "byte", 16, 4, epochs=1, filter=options["filter"]))
    loaded = list(tokenmill.DataLoader(tmp_path / "three", 16, 4, epochs=1, order="sequential"))
    assert whole.documents and len(batches) == len(loaded) > 0
    assert all((a["input_ids"] == b["input_ids"]).all() for a, b in zip(batches, loaded, strict=True))


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl", "json", "csv"])
def test_a_column_that_a_source_lacks_is_an_error_before_any_work(tmp_path: Path, columns: Any, ending: str) -> None:
    source = write_rows(tmp_path / f"a.{ending}", annotated_rows(10))
    with pytest.raises(RecipeError) as caught:
        tokenmill.prepare(source, tmp_path / "out", tokenizer="byte", filter=columns.misspelt)
    assert caught.value.message == (
        f"{source} has no column 'scor', which the filter asks for; its columns: score, text, url"
    )
    assert not (tmp_path / "out/train").exists()


def test_a_text_file_has_no_columns_for_a_filter(tmp_path: Path, columns: Any) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    with pytest.raises(RecipeError, match=r"a\.txt has no column 'url', which the filter asks for; all of the file is"):
        tokenmill.plan(tmp_path / "a.txt", filter=columns.keep)


def test_a_value_that_python_cannot_have_is_an_error_that_names_the_rows(tmp_path: Path, columns: Any) -> None:
    days = pa.array([0, 10**9], pa.date32())
    pq.write_table(pa.table({"text": ["a", "b"], "day": days}), tmp_path / "a.parquet")
    with pytest.raises(tokenmill.errors.TokenmillError, match="cannot be given to Python"):
        tokenmill.prepare(tmp_path / "a.parquet", tmp_path / "out", tokenizer="byte", workers=1, filter=columns.dated)


def test_the_filter_by_columns_of_the_how_to_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs/how-to/write-a-recipe.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n# by_column\.py\n(.*?)```", page, re.DOTALL)
    name = f"by_column_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"text": "a", "score": 0.9}, {"text": "b"}, {"text": "c", "score": 0.9, "url": "http://x.example"}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    made = tokenmill.prepare(source, tmp_path / "out", tokenizer="byte", workers=1, filter=f"{name}:keep")
    assert (made.documents, made.manifest.dropped) == (1, {"no_score": 1, "filtered": 1})
