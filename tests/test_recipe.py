from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenmill.errors import RecipeError
from tokenmill.recipe import Recipe, make_recipe, parse_split


def recipe(**fields: Any) -> Recipe:
    return make_recipe({"sources": ("a.txt",), **fields})


def test_a_recipe_needs_sources_and_nothing_else() -> None:
    found = recipe()
    assert (found.tokenizer, found.documents, found.eot, found.splits) == ("gpt2", "lines", "append", ("train",))
    with pytest.raises(RecipeError, match="sources"):
        make_recipe({})


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("unit_bytes", "64MB", 64_000_000),
        ("max_tokens", "150G", 150_000_000_000),
        ("max_document_bytes", "1MiB", 1 << 20),
        ("max_tokens", 7, 7),
        ("sample", "1%", 0.01),
        ("sample", 0.5, 0.5),
        ("split", "val=0.0005", {"val": 0.0005}),
        ("split", "val=1%, test=0.1", {"val": 0.01, "test": 0.1}),
        ("split", {"val": 0.1}, {"val": 0.1}),
        ("seed", 1234, 1234),
        ("documents", "separator:<|endoftext|>", "separator:<|endoftext|>"),
        ("documents", "files", "files"),
    ],
)
def test_fields_are_read_as_people_write_them(field: str, value: Any, found: Any) -> None:
    assert getattr(recipe(**{field: value}), field) == found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sources", ()),
        ("sources", (7,)),
        ("unit_bytes", "many"),
        ("unit_bytes", 0),
        ("unit_bytes", 1.5),
        ("max_tokens", "-1"),
        ("max_document_bytes", 0),
        ("sample", "2"),
        ("sample", 0.0),
        ("split", "val"),
        ("split", "val=2"),
        ("split", "val=0"),
        ("split", "val=0.1,val=0.2"),
        ("split", "train=0.5"),
        ("split", "../x=0.5"),
        ("split", "=0.5"),
        ("split", {"val": 0.5, "test": 0.5}),
        ("split", {"val": -0.5}),
        ("split", {"vål": 0.5}),
        ("documents", "pages"),
        ("documents", "separator:"),
        ("eot", "both"),
        ("seed", -1),
        ("seed", 1 << 62),
        ("seed", "x"),
        ("min_chars", -1),
        ("on_bad", "ignore"),
        ("template", "no braces"),
        ("template", "{a.b}"),
        ("filter", 7),
    ],
)
def test_a_field_that_makes_no_sense_is_an_error_with_a_hint(field: str, value: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        make_recipe({"sources": ("a.txt",), field: value})
    assert caught.value.message
    assert caught.value.hint


def test_an_unknown_field_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="tokeniser") as caught:
        recipe(tokeniser="gpt2")
    assert "tokenizer" in caught.value.hint


@pytest.mark.parametrize(
    "fields",
    [
        {"text_column": "a", "template": "{a}"},
        {"split": "val=0.1", "val_sources": ("v.txt",)},
        {"eot": "none", "eot_token": "</s>"},
    ],
)
def test_fields_that_exclude_each_other_are_an_error_with_a_hint(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(**fields)
    assert caught.value.hint


def test_splits_are_train_and_then_the_others_by_name() -> None:
    assert recipe(split="val=0.1,test=0.1").splits == ("train", "test", "val")
    assert recipe(val_sources=("v.txt",)).splits == ("train", "val")


def test_a_split_is_written_with_names_and_shares() -> None:
    assert parse_split("val=0.0005,test=1%") == {"val": 0.0005, "test": 0.01}


def test_a_recipe_file_gives_the_fields_and_flags_win_over_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"sources": ["a.txt", "b.txt"], "tokenizer": "byte", "unit_bytes": "1MB"}))
    found = make_recipe({"tokenizer": "char", "sources": (), "seed": None}, config=path)
    assert (found.sources, found.tokenizer, found.unit_bytes) == (("a.txt", "b.txt"), "char", 1_000_000)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"just text",
        b"- a\n- b\n",
        b"a: [",
        b"\xff\xfe",
        b"sources: !!python/object/apply:os.getcwd []",
        b"1: 2",
        b"sources: 7",
    ],
)
def test_a_recipe_file_that_is_none_is_an_error_with_a_hint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        make_recipe({}, config=tmp_path / "recipe.yaml")
    assert caught.value.hint


def test_a_recipe_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nope\.yaml"):
        make_recipe({}, config=tmp_path / "nope.yaml")


def test_the_identity_covers_what_changes_the_bytes_and_nothing_else() -> None:
    base = recipe().identity()
    for same in ({"on_bad": "fail"}, {"sources": ("b.txt",)}, {"tokenizer": "byte"}):
        assert recipe(**same).identity() == base
    for other in (
        {"seed": 1},
        {"eot": "prepend"},
        {"split": "val=0.1"},
        {"min_chars": 1},
        {"max_tokens": 5},
        {"sample": 0.5},
        {"documents": "files"},
        {"text_column": "a"},
        {"template": "{a}"},
        {"max_document_bytes": 5},
        {"unit_bytes": 5},
    ):
        assert recipe(**other).identity() != base


def test_the_identity_covers_the_code_of_a_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for code in ("True", "len(text) > 3"):
        (tmp_path / "recipe_test_filter.py").write_text(f"def keep(text):\n    return {code}\n")
        monkeypatch.delitem(sys.modules, "recipe_test_filter", raising=False)
        found.append(recipe(filter="recipe_test_filter:keep").identity()["filter"])
    assert found[0]["name"] == found[1]["name"] == "recipe_test_filter:keep"
    assert found[0]["code"] != found[1]["code"]


@pytest.mark.parametrize("name", ["nope_nope:keep", "json:nope", "json", "json:__doc__"])
def test_a_filter_that_cannot_be_found_is_an_error_with_a_hint(name: str) -> None:
    with pytest.raises(RecipeError, match="--filter") as caught:
        recipe(filter=name).identity()
    assert "mymodule:keep" in caught.value.hint


@pytest.mark.parametrize("text", ["seed: 2001-99-99", f"seed: {'9' * 6000}", f"sources: {'[' * 3000}"])
def test_what_the_yaml_reader_chokes_on_is_an_error_of_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*recipe\.yaml"):
        make_recipe({}, config=tmp_path / "recipe.yaml")
