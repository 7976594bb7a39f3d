"""From a recipe to a plan against the real sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill
from conftest import write_jsonl
from tokenmill.build import resolve
from tokenmill.build.resolve import held_out, resolve_build
from tokenmill.errors import RecipeError
from tokenmill.recipe import make_recipe


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ["some text"])
    (folder / "b.txt").write_text("some text\n")
    return folder


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("b.txt", {"text_column": "text"}),
        ("b.txt", {"template": "{text}"}),
        ("a.jsonl", {"documents": "files"}),
        ("a.jsonl", {"documents": "separator:x"}),
    ],
)
def test_a_field_that_no_source_is_the_right_kind_for_is_refused_and_named(
    sources: Path, name: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(RecipeError, match=f"^{next(iter(fields))}: none of the sources") as caught:
        resolve_build(make_recipe({"sources": sources / name, "tokenizer": "byte", **fields}))
    assert caught.value.hint
    resolve_build(make_recipe({"sources": sources, "tokenizer": "byte", **fields}))


def test_the_default_goes_with_any_source_even_if_it_is_named(sources: Path) -> None:
    resolve_build(make_recipe({"sources": sources / "a.jsonl", "tokenizer": "byte", "documents": "lines"}))


def test_another_seed_where_nothing_is_drawn_is_the_same_dataset(sources: Path, tmp_path: Path) -> None:
    for seed in (0, 5):
        found = tokenmill.prepare(sources, tmp_path / "out", tokenizer="byte", seed=seed, workers=1)
    assert found.already_complete


def test_what_nanogpt_holds_out_is_known_from_the_number_of_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"text": [f"text {number}" if number % 7 else None for number in range(5000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1500)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1500)
    write_jsonl(tmp_path / "a.jsonl", ["x"] * 5000)
    plans = {
        name: resolve_build(make_recipe({"sources": tmp_path / name, "tokenizer": "byte"})).plan
        for name in ("a.parquet", "a.arrow", "a.jsonl")
    }
    line_bytes = (tmp_path / "a.jsonl").stat().st_size // 5000
    (lines,) = held_out(plans["a.jsonl"], str(tmp_path), documents="lines", limit=1000).values()
    monkeypatch.setattr(resolve, "read_unit", None)
    for name in ("a.parquet", "a.arrow"):
        (rows,) = held_out(plans[name], str(tmp_path), documents="lines", limit=1000).values()
        assert rows == tuple(position // line_bytes for position in lines)
