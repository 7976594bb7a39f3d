"""`tokenmill.prepare`: its arguments, its executor, its result."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import tokenmill
import tokenmill as library
from conftest import command
from tokenmill.build.api import open_executor
from tokenmill.build.resolve import make_config, resolve_build
from tokenmill.errors import RecipeError
from tokenmill.executors.in_process import InProcess
from tokenmill.executors.process_pool import ProcessPool
from tokenmill.recipe import make_recipe
from tokenmill.storage.local import Folder

LOCAL: dict[str, Any] = {"executor": "ray", "placement": "node-local"}


def test_arguments_that_make_no_sense_are_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'dask' is not an executor"):
        tokenmill.prepare(str(corpus), tmp_path / "out", executor="dask")
    with pytest.raises(RecipeError, match="without Ray"):
        tokenmill.prepare(str(corpus), tmp_path / "out", ray_address="auto")
    with pytest.raises(RecipeError, match="'far' is not a placement"):
        tokenmill.prepare(str(corpus), tmp_path / "out", placement="far")
    with pytest.raises(RecipeError, match="for the nodes of a cluster"):
        tokenmill.prepare(str(corpus), tmp_path / "out", placement="node-local")
    for extra in ({"layout": "nanogpt"}, {"scratch": tmp_path}, {"max_tokens": "1k"}, {"split": "nanogpt"}):
        with pytest.raises(RecipeError, match=f"`{next(iter(extra))}"):
            tokenmill.prepare(str(corpus), tmp_path / "out", **LOCAL, **extra)
    with pytest.raises(RecipeError, match="is not a place on this machine"):
        tokenmill.prepare(str(corpus), "s3://bucket/out", **LOCAL)
    assert not (tmp_path / "out").exists()


def test_waiting_and_starting_over_do_not_go_together(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(RecipeError, match="would start over"):
        tokenmill.prepare(str(corpus), tmp_path / "out", wait=True, restart=True)


def test_a_script_without_a_main_guard_may_use_several_workers(corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    call = f"tokenmill.prepare({str(corpus)!r}, {str(tmp_path / 'out')!r}, workers=2)"
    script.write_text(f"import tokenmill\nprint({call}.tokens)\n")
    done = subprocess.run([command()[0], script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == library.open(tmp_path / "out").manifest.tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"output": ""}, "no output is given"),
        ({"output": "out", "wait": "no"}, "wait is 'no'"),
        ({"output": "out", "workers": 1.5}, "workers is 1.5"),
        ({"output": "out", "watch": "me"}, "watch is 'me'"),
        ({"output": "out", "timeout": -1}, "timeout is -1"),
        ({"output": "out", "restart": True, "update": True}, "`restart` keeps nothing"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_an_error_that_names_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=said):
        tokenmill.prepare(corpus, **options)
    assert not (tmp_path / "out").exists()


def test_a_result_says_in_a_line_what_was_built_and_has_its_notes_once(tmp_path: Path) -> None:
    (tmp_path / "a.odd").write_text("one\ntwo\n")
    (tmp_path / "b.odd").write_text("three\n")
    sources = [tmp_path / "a.odd", tmp_path / "b.odd"]
    first = tokenmill.prepare(sources, tmp_path / "out", tokenizer="byte", workers=1)
    again = tokenmill.prepare(sources, tmp_path / "out", tokenizer="byte", workers=1)
    assert (first.already_complete, again.already_complete) == (False, True)
    assert repr(again) == f"PrepareResult({str(tmp_path / 'out')!r}: 14 tokens, 3 documents in train; complete already)"
    assert first.notes == ("2 files of unknown kind read as text, a document a line: 2 .odd",)


@pytest.mark.parametrize(("workers", "kind"), [(1, InProcess), (2, ProcessPool)])
def test_one_worker_is_this_process_and_more_are_processes(
    corpus: Path, tmp_path: Path, workers: int, kind: type
) -> None:
    resolved = resolve_build(make_recipe({"sources": str(corpus), "tokenizer": "byte"}), output=str(tmp_path / "out"))
    folder = Folder(str(tmp_path / "out"))
    folder.make(".build")
    executor = open_executor(workers, None, folder, make_config(resolved, scratch=None), resolved.spec)
    try:
        assert isinstance(executor, kind)
        assert executor.workers == workers
    finally:
        executor.stop()
