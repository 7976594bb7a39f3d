from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenmill.cli.options import PREPARE_OPTIONS
from tokenmill.errors import RecipeError
from tokenmill.recipe import NOT_IN_A_RECIPE, Recipe, make_recipe, parse_split


def recipe(**fields: Any) -> Recipe:
    return make_recipe({"sources": ("a.txt",), **fields})


@pytest.mark.parametrize(
    "sources", [Path("a.txt"), [Path("a.txt")], ("a.txt",), "a.txt", iter(["a.txt"]), [Path("a.txt"), "b.txt"]]
)
def test_sources_may_be_paths_and_texts_one_or_many(sources: Any) -> None:
    assert make_recipe({"sources": sources}).sources in (("a.txt",), ("a.txt", "b.txt"))


def test_a_recipe_needs_sources_and_nothing_else() -> None:
    found = recipe()
    assert (found.tokenizer, found.documents, found.eot, found.splits) == ("gpt2", "auto", "append", ("train",))
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
        ("split", {"val": "1%", "test": 0.1}, {"val": 0.01, "test": 0.1}),
        ("split", ["val=1%", "test=2%"], {"val": 0.01, "test": 0.02}),
        ("split", ("val=1%", "test=2%,more=3%"), {"val": 0.01, "test": 0.02, "more": 0.03}),
        ("split", ("nanogpt",), "nanogpt"),
        ("sources", "corpus/*.parquet", ("corpus/*.parquet",)),
        ("val_sources", "v.txt", ("v.txt",)),
        ("max_tokens", "1e6", 1_000_000),
        ("max_tokens", 1e6, 1_000_000),
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
        ("split", ("val=0.1", "val=0.2")),
        ("split", ("nanogpt", "val=0.1")),
        ("split", ["val"]),
        ("split", [7]),
        ("split", 0.01),
        ("split", {"val": None}),
        ("split", {7: 0.1}),
        ("max_tokens", "1000000.5"),
        ("max_tokens", True),
        ("sample", True),
        ("eot", False),
        ("documents", 7),
        ("template", {"title": None}),
        ("split", "train=0.5"),
        ("split", "../x=0.5"),
        ("split", {"v" * 65: 0.5}),
        ("split", {f"s{number}": 0.001 for number in range(128)}),
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
        ("min_chars", 1 << 62),
        ("min_chars", 10**23),
        ("max_document_bytes", "5e18"),
        ("on_bad", "ignore"),
        ("template", "no braces"),
        ("template", "{a.b}"),
        ("template", "\udcff{text}"),
        ("documents", "separator:\udcff"),
        ("text_column", "\ud800"),
        ("eot_token", "\udcff"),
        ("tokenizer", "\udcff.json"),
        ("filter", 7),
    ],
)
def test_a_field_that_makes_no_sense_is_an_error_with_a_hint(field: str, value: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        make_recipe({"sources": ("a.txt",), field: value})
    assert caught.value.message.startswith(f"{field}: ") or (field, value) == ("sources", ())
    assert caught.value.hint


@pytest.mark.parametrize(
    ("field", "says", "hint"),
    [
        ("max_tokens", "max_tokens: 'x' is not a size", "150G"),
        ("unit_bytes", "unit_bytes: 'x' is not a size", "64MB"),
        ("sample", "sample: 'x' is not a share of the whole", "1%"),
        ("eot", "eot: 'x' is not known", "append, prepend, none"),
        ("on_bad", "on_bad: 'x' is not known", "quarantine, fail"),
        ("documents", "documents: 'x' is not known", "lines, files or separator:TEXT"),
    ],
)
def test_an_error_names_the_field_and_what_it_takes(field: str, says: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(**{field: "x"})
    assert caught.value.message == says
    assert hint in caught.value.hint


def test_an_unknown_field_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="tokeniser") as caught:
        recipe(tokeniser="gpt2")
    assert "did you mean tokenizer?" in caught.value.hint
    assert "text_column" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "right"),
    [("max-tokens", "max_tokens"), ("val-source", "val_sources"), ("val_source", "val_sources"), ("Seed", "seed")],
)
def test_a_field_that_is_written_like_an_option_gets_the_hint_of_its_name(name: str, right: str) -> None:
    with pytest.raises(RecipeError, match=f"^{name}: unknown option") as caught:
        recipe(**{name: 1})
    assert caught.value.hint.startswith(f"did you mean {right}?")


def test_an_option_that_is_no_field_is_sent_to_the_command_line() -> None:
    with pytest.raises(RecipeError, match="not part of a recipe") as caught:
        recipe(**{"ray-address": "auto"})
    assert "`ray_address`" in caught.value.hint
    fields = {field.name for field in dataclasses.fields(Recipe)}
    assert set(PREPARE_OPTIONS) - fields == set(NOT_IN_A_RECIPE)


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


def told(path: Path, text: str, **given: Any) -> Recipe:
    (path / "recipe.yaml").write_text(text)
    return make_recipe(given, config=path / "recipe.yaml")


def test_a_recipe_file_is_read_as_people_write_it(tmp_path: Path) -> None:
    for split in ("{val: 1%, test: 2%}", "[val=1%, test=2%]", "val=1%,test=2%", "\n  val: 0.01\n  test: 2%"):
        found = told(tmp_path, f"sources: a/*.parquet\nsplit: {split}\nmax_tokens: 1,000,000\nseed: null\ntemplate:\n")
        assert (found.sources, found.split) == (("a/*.parquet",), {"val": 0.01, "test": 0.02})
        assert (found.max_tokens, found.seed, found.template) == (1_000_000, 0, None)


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("max_tokens: many", "recipe.yaml: max_tokens: 'many' is not a size", "150G"),
        ("workers: 4", "recipe.yaml: workers: it is not part of a recipe", "`workers`"),
        ("eot: no", "recipe.yaml: eot: false makes no sense here", "put it in quotes"),
        ("eot: no", "eot", "append, prepend, none"),
        ("text_column: 7", "recipe.yaml: text_column: ", "put a text in quotes"),
        ("7: x", "recipe.yaml: the name of a field must be a text", "YAML mapping"),
        ("seed: 1\nseed: 2", "recipe.yaml, line 2: 'seed' is given twice", "keep one"),
        ("split: {val: 1%, val: 2%}", "recipe.yaml, line 1: 'val' is given twice", "keep one"),
        ("sources: [", "recipe.yaml: line 1: ", "YAML mapping"),
        ("seed: 1", "with RECIPE: no sources are given", "name files"),
        ("sources: a\nsplit: val=1%\nval_sources: b", "with RECIPE: `split` and `val_sources` exclude each other", ""),
    ],
)
def test_an_error_of_a_recipe_file_names_it(tmp_path: Path, text: str, says: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        told(tmp_path, text)
    assert says.replace("RECIPE", str(tmp_path / "recipe.yaml")) in caught.value.message
    assert hint in caught.value.hint


def test_an_error_of_a_flag_does_not_name_the_recipe_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^max_tokens: 'many'"):
        told(tmp_path, "sources: a", max_tokens="many")


def test_a_key_may_stand_in_what_is_merged_as_well(tmp_path: Path) -> None:
    assert told(tmp_path, "sources: a\n<<: {seed: 1, min_chars: 2}\nseed: 3\n").seed == 3


def test_the_recipe_of_the_how_to_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs/how-to/write-a-recipe.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert {told(tmp_path, block).splits for block in blocks} == {("train", "test", "val")}


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
    with pytest.raises(RecipeError, match=r"there is no recipe file .*nope\.yaml"):
        make_recipe({}, config=tmp_path / "nope.yaml")


def test_the_identity_covers_what_changes_the_bytes_and_nothing_else() -> None:
    base = recipe().identity()
    for same in ({"on_bad": "fail"}, {"sources": ("b.txt",)}, {"tokenizer": "byte"}):
        assert recipe(**same).identity() == base
    for other in (
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


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({}, False),
        ({"split": "nanogpt"}, False),
        ({"val_sources": "v.txt"}, False),
        ({"split": "val=0.1"}, True),
        ({"sample": 0.5}, True),
    ],
)
def test_the_seed_belongs_to_the_identity_if_something_is_drawn_with_it(fields: dict[str, Any], counts: bool) -> None:
    assert (recipe(seed=1, **fields).identity() != recipe(**fields).identity()) == counts
    assert recipe(**fields).identity()["seed"] == 0


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
    with pytest.raises(RecipeError, match="`filter=") as caught:
        recipe(filter=name).identity()
    assert "mymodule:keep" in caught.value.hint


@pytest.mark.parametrize("text", ["seed: 2001-99-99", f"seed: {'9' * 6000}", f"sources: {'[' * 3000}"])
def test_what_the_yaml_reader_chokes_on_is_an_error_of_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*recipe\.yaml"):
        make_recipe({}, config=tmp_path / "recipe.yaml")


@pytest.mark.parametrize("split", ["Val=0.1,val=0.2", "Train=0.1", {"A": 0.1, "a": 0.1}])
def test_splits_that_differ_in_case_alone_are_refused(split: object) -> None:
    with pytest.raises(RecipeError, match="differ only in case"):
        make_recipe({"sources": "a.txt", "split": split})
