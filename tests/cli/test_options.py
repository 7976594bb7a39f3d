"""Python and the shell are each told the names that they have."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import tokenmill as library
from conftest import Command, write_jsonl
from tokenmill.arguments import RecipeOptions
from tokenmill.cli.commands import measure
from tokenmill.cli.options import (
    BENCH_OPTIONS,
    CLUSTER_OPTIONS,
    EXPORT_OPTIONS,
    IMPORT_OPTIONS,
    OPTIONS,
    PREPARE_OPTIONS,
    PULL_OPTIONS,
    PUSH_OPTIONS,
    REPAIR_OPTIONS,
    SEVERAL,
    VERIFY_OPTIONS,
    Option,
    for_shell,
    library_arguments,
    shell_names,
    unescape,
)
from tokenmill.errors import RecipeError
from tokenmill.recipe import Recipe


@pytest.fixture(autouse=True)
def prepare_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenmill", "prepare"])


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("start over with `restart=True`", "start over with --restart"),
        ("use `eot='none'`", "use --eot none"),
        ("drop `val_sources`", "drop --val-source"),
        ("`unit_bytes=5` or more", "--unit-bytes 5 or more"),
        (r"`template='{a}\n\n{b}'`", r"--template '{a}\n\n{b}'"),
        (
            "`tokenmill.export('my data', 'out', to='mds', seq_len=8)`",
            "tokenmill export 'my data' out --to mds --seq-len 8",
        ),
        ("`tokenmill.import_('a', 'b', layout='mds')`", "tokenmill import a -o b --from mds"),
        ("the help of `tokenmill.prepare`", "the help of tokenmill prepare"),
    ],
)
def test_settings_are_shown_as_options(python: str, shell: str) -> None:
    assert for_shell(python) == shell


@pytest.mark.parametrize(
    "text",
    [
        "`ray start --head`",
        "`node1 16`",
        "`tokenizer: gpt2`",
        "`no_such_option=1`",
        "`os.remove('x')`",
        "`tokenmill.nothing` and `tokenmill.nothing(1)`",
        "`restart=print(1)`",
        "`tokenmill.export('a', no_such_option=1)`",
        "`tokenmill.export('a', restart=[)`",
        "`(" * 500,
        "`" + "(" * 3000 + "`",
        "`\0`",
    ],
)
def test_what_is_not_a_setting_stays_as_it_is(text: str) -> None:
    assert for_shell(text) == text


def test_the_running_command_decides_what_a_name_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert for_shell("`layout='mds'`") == "--layout mds"
    monkeypatch.setattr(sys, "argv", ["tokenmill", "import"])
    assert for_shell("`layout='mds'`") == "--from mds"


def test_the_field_that_is_refused_is_an_option() -> None:
    assert for_shell("max_tokens: 'x' is not a size", begins_with_field=True) == "--max-tokens: 'x' is not a size"
    assert for_shell("sources: x", begins_with_field=True) == "SOURCE: x"
    assert for_shell("seq_len is 0", begins_with_field=True) == "--seq-len is 0"
    assert for_shell("recipe.yaml: seed: x", begins_with_field=True) == "recipe.yaml: seed: x"


def test_the_same_error_in_a_notebook_and_in_a_shell(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(RecipeError) as caught:
        library.prepare(tmp_path / "a.jsonl", tmp_path / "out", eot="none", eot_token="x")
    assert caught.value.message == "`eot_token` needs `eot='append'` or `eot='prepend'`"
    assert caught.value.__notes__ == ["hint: drop one of the two"]
    said = tokenmill("prepare", "a.jsonl", "-o", "out", "--eot", "none", "--eot-token", "x", code=2).stderr
    assert said == "error: --eot-token needs --eot append or --eot prepend\nhint: drop one of the two\n"


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (library.prepare, PREPARE_OPTIONS),
        (library.plan, OPTIONS),
        (library.verify, VERIFY_OPTIONS),
        (library.repair, REPAIR_OPTIONS),
        (library.export, EXPORT_OPTIONS),
        (library.import_, IMPORT_OPTIONS),
        (library.push, PUSH_OPTIONS),
        (library.pull, PULL_OPTIONS),
        (library.cluster, CLUSTER_OPTIONS),
        (measure, BENCH_OPTIONS),
    ],
)
def test_options_are_the_keywords_of_the_library(call: Callable[..., Any], options: dict[str, Option]) -> None:
    keywords = set(inspect.signature(call).parameters)
    keywords |= {*get_type_hints(RecipeOptions)} if "recipe" in keywords else set()
    told = set(library_arguments(dict.fromkeys(options, "given")))
    assert told <= keywords
    assert keywords - told <= {"watch", "recipe", "expected", "timeout"}


def test_what_is_not_given_is_left_to_the_library() -> None:
    given = dict.fromkeys(EXPORT_OPTIONS) | {"seed": 0, "restart": False, "templar_compat": True}
    assert library_arguments(given) == {"seed": 0, "templar_compat": True}


def test_an_option_of_a_recipe_has_the_type_of_its_field() -> None:
    kinds = {name: option.kind for name, option in OPTIONS.items()}
    assert [kinds[name] for name in ("seed", "split", "val_sources", "max_tokens")] == [int, SEVERAL, SEVERAL, str]


def test_every_option_is_known_by_its_python_name() -> None:
    assert shell_names("export")["expected"] == "--expect"
    assert shell_names("prepare")["workers"] == "--workers"
    assert shell_names("consolidate")["seq_len"] == "--seq-len"


@pytest.mark.parametrize(
    ("given", "meant"),
    [(r"{a}\n{b}", "{a}\n{b}"), (r"a\tb\x1e", "a\tb\x1e"), (r"C:\dir", r"C:\dir"), ("\\\\n", "\\n")],
)
def test_escapes_of_a_shell_are_read(given: str, meant: str) -> None:
    assert unescape(given) == meant


def test_every_field_of_a_recipe_is_an_option() -> None:
    assert {field.name for field in dataclasses.fields(Recipe)} <= set(OPTIONS)


def test_help_is_in_groups_and_summaries_are_whole(tokenmill: Command) -> None:
    shown = tokenmill("prepare", "--help").stdout
    groups = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups == ["Arguments", "Dataset", "Text", "Tokenizer", "Run", "Output", "Options"]
    assert "..." not in tokenmill("--help").stdout.partition("Commands:")[2]
