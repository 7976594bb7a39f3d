"""A path that is empty, as a variable that is not set gives it, is a usage error and never the current folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from tokenizers.models import BPE

import tokenmill as tm
from conftest import Command
from tokenizers import Tokenizer
from tokenmill.cli import commands
from tokenmill.errors import RecipeError
from tokenmill.formats.templar import consolidate, read_expected
from tokenmill.storage.base import cache_path

BLANKS = ["", " ", "\t\n"]
# Each path that a command takes, in a call that would work in the folder `here` if it meant the current one.
COMMANDS = {
    "prepare sources": ["prepare", "BLANK", "-o", "new"],
    "prepare output": ["prepare", "../a.txt", "-o", "BLANK"],
    "prepare tokenizer": ["prepare", "../a.txt", "-o", "new", "--tokenizer", "BLANK"],
    "prepare val_sources": ["prepare", "../a.txt", "-o", "new", "--val-source", "BLANK"],
    "prepare scratch": ["prepare", "../a.txt", "-o", "new", "--scratch", "BLANK"],
    "prepare filter": ["prepare", "../a.txt", "-o", "new", "--filter", "BLANK"],
    "prepare config": ["prepare", "../a.txt", "-o", "new", "--config", "BLANK"],
    "prepare layout": ["prepare", "../a.txt", "-o", "new", "--layout", "BLANK"],
    "plan sources": ["plan", "BLANK", "-o", "new"],
    "plan output": ["plan", "../a.txt", "-o", "BLANK"],
    "plan tokenizer": ["plan", "../a.txt", "--tokenizer", "BLANK"],
    "plan val_sources": ["plan", "../a.txt", "--val-source", "BLANK"],
    "plan scratch": ["plan", "../a.txt", "-o", "new", "--scratch", "BLANK"],
    "plan filter": ["plan", "../a.txt", "--filter", "BLANK"],
    "plan config": ["plan", "../a.txt", "--config", "BLANK"],
    "plan layout": ["plan", "../a.txt", "-o", "new", "--layout", "BLANK"],
    "verify path": ["verify", "BLANK"],
    "verify filter": ["verify", ".", "--source", "all", "--filter", "BLANK"],
    "repair path": ["repair", "BLANK"],
    "repair filter": ["repair", ".", "--filter", "BLANK"],
    "inspect path": ["inspect", "BLANK"],
    "peek dataset": ["peek", "BLANK"],
    "peek tokenizer": ["peek", ".", "--tokenizer", "BLANK"],
    "trace dataset": ["trace", "BLANK", "--document", "0"],
    "trace source": ["trace", ".", "--source", "BLANK"],
    "view dataset": ["view", "BLANK"],
    "view beside": ["view", ".", "--beside", "BLANK"],
    "view tokenizer": ["view", ".", "--tokenizer", "BLANK"],
    "compare a": ["compare", "BLANK", "."],
    "compare b": ["compare", ".", "BLANK"],
    "tokenizers sources": ["tokenizers", "BLANK"],
    "tokenizers tokenizers": ["tokenizers", "../a.txt", "--tokenizer", "BLANK"],
    "doctor target": ["doctor", "BLANK"],
    "doctor output": ["doctor", "-o", "BLANK"],
    "doctor scratch": ["doctor", "--scratch", "BLANK"],
    "doctor tokenizer": ["doctor", "../a.txt", "--tokenizer", "BLANK"],
    "report dataset": ["report", "BLANK"],
    "report output": ["report", ".", "-o", "BLANK"],
    "join output": ["join", "BLANK"],
    "prepare hosts": ["prepare", "../a.txt", "-o", "new", "--hosts", "BLANK"],
    "prepare ssh_key": ["prepare", "../a.txt", "-o", "new", "--hosts", "../a.txt", "--ssh-key", "BLANK"],
    "bench path": ["bench", "BLANK", "--seq-len", "4", "--batch-size", "1", "--seconds", "0.01"],
    "export dataset": ["export", "BLANK", "new", "--to", "nanogpt"],
    "export output": ["export", ".", "BLANK", "--to", "nanogpt"],
    "export to": ["export", ".", "new", "--to", "BLANK"],
    "export scratch": ["export", ".", "new", "--to", "nanogpt", "--scratch", "BLANK"],
    "export checksums": ["export", ".", "new", "--to", "templar", "--checksums", "BLANK"],
    "import path": ["import", "BLANK", "-o", "new", "--from", "megatron"],
    "import layout": ["import", ".", "-o", "new", "--from", "BLANK"],
    "import output": ["import", "../tokens", "-o", "BLANK", "--from", "nanogpt", "--eot-id", "256"],
    "import tokenizer": ["import", "../tokens", "-o", "new", "--from", "nanogpt", "--tokenizer", "BLANK"],
    "import scratch": ["import", "../tokens", "-o", "new", "--from", "nanogpt", "--eot-id", "256",
                         "--scratch", "BLANK"],
    "consolidate data_root": ["consolidate", "--data_root", "BLANK"],
    "consolidate checksums": ["consolidate", "--data_root", ".", "--checksums", "BLANK"],
    "push dataset": ["push", "BLANK", "s3://bucket/owt"],
    "push url": ["push", ".", "BLANK"],
    "pull url": ["pull", "BLANK", "new"],
    "pull folder": ["pull", "s3://bucket/owt", "BLANK"],
    "cluster hosts": ["cluster", "BLANK"],
}  # fmt: skip
# Texts that name no place.
NO_PLACES = {
    *("text_column", "template", "documents", "eot", "eot_token", "split", "unit_bytes", "max_tokens", "sample"),
    *(
        "max_document_bytes",
        "on_bad",
        "executor",
        "ray_address",
        "placement",
        "shard_size",
        "seq_len",
        "name",
        "expect",
    ),
    *("shards", "user", "part", "env_setup", "license", "packing", "column"),
}


@pytest.fixture
def here(tmp_path: Path, tokenmill: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: each path could mean it, for it is a dataset with sources and a tokenizer in it."""
    folder = tmp_path / "here"
    (tmp_path / "a.txt").write_text("one\ntwo words\nand three words\n" * 20)
    tokenmill("prepare", "a.txt", "-o", folder, "--tokenizer", "byte", "-q")
    tokenmill("export", folder, "tokens", "--to", "nanogpt", "-q")
    vocab = {chr(code): code - 97 for code in range(97, 123)}
    Tokenizer(BPE(vocab, [])).save(str(folder / "tokenizer.json"))
    for name in (folder, "here/ ", "here/\t\n"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "b.jsonl").write_text('{"text": "a line"}\n')
    monkeypatch.chdir(folder)
    return folder


def everything(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("blank", BLANKS, ids=repr)
def test_a_blank_path_is_a_usage_error(
    blank: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(here.parent)
    for name, line in COMMANDS.items():
        monkeypatch.setattr("sys.argv", ["tokenmill", *(blank if word == "BLANK" else word for word in line)])
        code = commands.run()
        said = capsys.readouterr()
        assert code == 2, f"{name}: {said.out}{said.err}"
        assert "\nhint: " in said.err, name
        assert everything(here.parent) == before, name


def test_no_path_of_a_command_is_left_out() -> None:
    texts = {
        f"{command.name or command.callback.__name__} {name}"
        for command in commands.app.registered_commands
        if command.callback is not None
        for name, hint in get_type_hints(command.callback).items()
        if name != "return" and any(kind in (str, list[str], Path) for kind in (hint, *get_args(hint)))
    }
    assert {text for text in texts if text.split()[1] not in NO_PLACES} == set(COMMANDS)


@pytest.mark.parametrize("blank", BLANKS, ids=repr)
def test_a_function_refuses_a_blank_path(blank: str, here: Path) -> None:
    text = "../a.txt"
    calls: list[Callable[[], Any]] = [
        lambda: tm.prepare(blank, "new"),
        lambda: tm.prepare([text, blank], "new"),
        lambda: tm.prepare(text, blank),
        lambda: tm.prepare(text, "new", val_sources=blank),
        lambda: tm.prepare(text, "new", tokenizer=blank),
        lambda: tm.prepare(text, "new", tokenizer=f"tokenizers:{blank}"),
        lambda: tm.prepare(text, "new", scratch=blank),
        lambda: tm.prepare(text, "new", config=blank),
        lambda: tm.prepare(text, "new", filter=blank),
        lambda: tm.prepare(text, "new", layout=blank),
        lambda: tm.plan(blank),
        lambda: tm.plan(text, blank),
        lambda: tm.plan(text, scratch=blank),
        lambda: tm.plan(text, config=blank),
        lambda: tm.stream(blank, "byte", 4, 1),
        lambda: tm.stream(text, blank, 4, 1),
        lambda: tm.open(blank),
        lambda: tm.open(".", cache=blank),
        lambda: tm.DataLoader(blank, 4, 1),
        lambda: tm.Mixture({"a": (blank, 1)}),
        lambda: tm.verify(blank),
        lambda: tm.repair(blank),
        lambda: tm.export(blank, "new", to="nanogpt"),
        lambda: tm.export(".", blank, to="nanogpt"),
        lambda: tm.export(".", "new", to="nanogpt", scratch=blank),
        lambda: tm.import_(blank, "new", layout="megatron"),
        lambda: tm.import_("../tokens", blank, layout="nanogpt", eot_id=256),
        lambda: tm.import_("../tokens", "new", layout="nanogpt", tokenizer=blank),
        lambda: tm.import_("../tokens", "new", layout="nanogpt", eot_id=256, scratch=blank),
        lambda: tm.push(blank, "s3://bucket/owt"),
        lambda: tm.push(".", blank),
        lambda: tm.pull(blank, "new"),
        lambda: tm.pull("s3://bucket/owt", blank),
        lambda: tm.cluster(blank),
        lambda: consolidate(blank),
        lambda: read_expected((), blank),
    ]
    before = everything(here.parent)
    for number, call in enumerate(calls):
        with pytest.raises(RecipeError) as error:
            call()
            pytest.fail(f"call {number} was taken")
        assert error.value.hint, f"call {number}"
        assert everything(here.parent) == before, f"call {number}"


def test_a_blank_source_of_a_recipe_file_is_refused(here: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for fields in ('sources: ""', "sources: [../a.txt, ' ']", "sources: ../a.txt\ntokenizer: ''"):
        recipe.write_text(fields)
        with pytest.raises(RecipeError, match="names nothing"):
            tm.plan(config=recipe)


def test_a_blank_cache_in_the_environment_is_not_the_current_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", " ")
    with pytest.raises(RecipeError, match=r"^TOKENMILL_CACHE is ' '"):
        cache_path()
    monkeypatch.setenv("TOKENMILL_CACHE", "")
    assert cache_path().endswith("/.cache/tokenmill")
