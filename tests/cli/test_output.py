"""What is printed: nothing in a record can act on a terminal, and rates are those of this run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tokenmill as library
from conftest import Command, make_texts, write_jsonl, write_parquet
from tokenmill.build.progress import Tally
from tokenmill.dataset import manifest
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import locked

HOSTILE = "a\x1b]0;pwned\x07\x9b31mb"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A dataset whose manifest was written by somebody who means harm."""
    write_parquet(tmp_path / "a.parquet", ["some text", ""])
    library.prepare(str(tmp_path / "a.parquet"), tmp_path / "out", tokenizer="byte", workers=1)
    found = manifest.load_manifest(Folder(str(tmp_path / "out")))
    forged = replace(found, tokenizer={**found.tokenizer, "name": HOSTILE}, dropped={HOSTILE: 1})
    (tmp_path / "out/dataset.json").write_bytes(manifest.seal_manifest(forged))
    return tmp_path / "out"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_no_text_of_a_manifest_acts_on_a_terminal(hostile: Path, tokenmill: Command, options: list[str]) -> None:
    shown = tokenmill("inspect", hostile, *options).stdout
    assert "pwned" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)
    if options:
        assert json.loads(shown)["tokenizer"]["name"] == HOSTILE


def test_a_rate_counts_what_this_run_did() -> None:
    tally = Tally(total_bytes=100, total_units=4, workers=1, done_bytes=50, done_tokens=10**12, tokens=0)
    assert tally.snapshot()["tokens_per_second"] == 0
    assert tally.snapshot()["tokens"] == 10**12


@pytest.fixture
def naive(tmp_path: Path) -> Path:
    """Files and a text that plain ASCII cannot hold."""
    return write_jsonl(tmp_path / "na\u00efve.jsonl", ["caf\u00e9 \U0001f642", "th\u00e9"])


ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}


def test_where_the_output_is_ascii_other_characters_are_escaped(terminal: Command, naive: Path, tmp_path: Path) -> None:
    done = terminal("prepare", naive, "-o", "caf\u00e9", "--tokenizer", "byte", "-j", 1, **ASCII)
    assert f"{tmp_path}/caf\\xe9 is done" in done.stdout
    assert "| caf\\xe9 \\U0001f642" in terminal("inspect", "caf\u00e9", **ASCII).stdout
    refused = terminal("prepare", naive, "-o", "caf\u00e9", "--tokenizer", "byte", "--eot", "none", code=2, **ASCII)
    assert "caf\\xe9 was built with different options" in refused.stderr


def test_json_is_json_where_the_output_is_ascii(terminal: Command, naive: Path, tmp_path: Path) -> None:
    done = terminal("prepare", naive, "-o", "caf\u00e9", "--tokenizer", "byte", "-j", 1, "--json", **ASCII)
    assert json.loads(done.stdout)["output"] == f"{tmp_path}/caf\u00e9"
    shown = json.loads(terminal("inspect", "caf\u00e9", "--json", **ASCII).stdout)
    assert shown["texts"] == ["caf\u00e9 \U0001f642", "th\u00e9"]


def test_a_name_that_is_no_text_is_printed_all_the_same(terminal: Command, naive: Path, tmp_path: Path) -> None:
    broken = os.fsdecode(b"br\xffken")
    done = terminal("prepare", naive, "-o", broken, "--tokenizer", "byte", "-j", 1, "--json")
    assert json.loads(done.stdout)["output"] == f"{tmp_path}/{broken}"
    assert "ken is complete already" in terminal("prepare", naive, "-o", broken, "--tokenizer", "byte").stdout


def test_one_of_something_is_not_many(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    done = tokenmill("prepare", "a.jsonl", "-o", "out", "--tokenizer", "byte", "--eot", "none")
    assert re.search(r"train +1 token  +1 document  +1 shard\n", done.stdout)
    inspected = tokenmill("inspect", "out").stdout
    assert "1 token  1 document  1 shard\n" in inspected
    assert "1, 1 document read" in inspected
    assert "1 unit tokenised again" in tokenmill("verify", "out", "--source", "all").stdout
    (tmp_path / "b.txt.gz").write_bytes(b"no gzip")
    assert "1 of 1 unit failed" in tokenmill("prepare", "b.txt.gz", "-o", "bad", code=1).stderr


def test_train_comes_first(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(100))
    build = ("prepare", "a.jsonl", "-o", "out", "--tokenizer", "byte", "--split", "dev=20%,val=20%")
    for command in (build, build, ("inspect", "out", "--documents", 0)):
        shown = tokenmill(*command).stdout
        assert re.findall(r"^  (train|dev|val) ", shown, re.MULTILINE) == ["train", "dev", "val"]


def test_a_build_tells_how_many_tokens_a_second_it_made(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(100))
    build = ("prepare", "a.jsonl", "-o", "out", "--tokenizer", "byte")
    assert re.search(r"out is done in \d+s, \S+ tokens/s\n", tokenmill(*build).stdout)
    assert "tokens/s" not in tokenmill(*build).stdout
    assert json.loads(tokenmill(*build, "--restart", "--json").stdout)["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--unit-bytes", "5x"),
        ("--max-tokens", "many"),
        ("--max-document-bytes", "-1"),
        ("--sample", "2"),
        ("--split", "val=2"),
        ("--eot", "maybe"),
        ("--on-bad", "ignore"),
        ("--min-chars", "-1"),
        ("--documents", "pages"),
        ("--template", "{"),
    ],
)
def test_what_is_wrong_with_an_option_names_the_option(tokenmill: Command, option: str, value: str) -> None:
    for command in ("prepare", "plan"):
        refused = tokenmill(command, "a.jsonl", "-o", "out", option, value, code=2).stderr
        assert refused.startswith(f"error: {option}: ")


def test_what_is_wrong_with_a_recipe_names_the_file_and_the_field(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("sources: a.jsonl\nunit_bytes: 5x\n")
    refused = tokenmill("prepare", "--config", "recipe.yaml", "-o", "out", code=2).stderr
    assert refused.startswith("error: recipe.yaml: unit_bytes: ")


def test_who_finds_another_build_is_told_of_wait(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    folder = Folder(str(tmp_path / "out"))
    folder.make(".build")
    with locked(folder):
        refused = tokenmill("prepare", "a.jsonl", "-o", "out", "--tokenizer", "byte", code=5).stderr
    assert "is being built by process" in refused
    assert "hint: wait for it with --wait, or stop it and run the same command again" in refused


def test_a_current_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    move = "import os, sys; os.chdir('here'); os.rmdir('../here')"
    script = f"{move}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", script, "-P", "-m", "tokenmill", "verify", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the current folder does not exist any more" in done.stderr


def test_a_file_that_the_system_refuses_is_named_and_not_taken_for_the_output(
    tokenmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/elsewhere/a.txt")

    monkeypatch.setattr("tokenmill.maintenance.verify.verify", refuse)
    said = tokenmill("verify", "out", code=1).stderr
    assert said.startswith("error: /elsewhere/a.txt: Permission denied\nhint: ")
