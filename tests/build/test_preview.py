"""plan: what a build would do, and what stands in its way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import tokenmill as library
from conftest import Command, make_texts, write_jsonl
from tokenmill.build.preview import Preview, plan
from tokenmill.errors import DatasetError
from tokenmill.sizes import format_time

BYTES: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": "3KB", "workers": 1}


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    return [write_jsonl(tmp_path / f"{name}.jsonl", make_texts(50, seed=1)) for name in "abc"]


def begin(sources: list[Path], out: Path) -> None:
    """A build that is stopped when its first unit is done."""

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "done":
            raise KeyboardInterrupt

    with pytest.raises(library.TokenmillError, match="are done and kept"):
        library.prepare(sources, out, watch=stop, **BYTES)


def preview(sources: list[Path], out: Path, **options: Any) -> Preview:
    return plan(sources, out, **{**BYTES, **options})


def test_the_same_sources_give_the_same_estimate(sources: list[Path], tmp_path: Path) -> None:
    first, again = (preview(sources, tmp_path / "out").estimate for _ in range(2))
    assert (first.tokens, first.error, first.documents) == (again.tokens, again.error, again.documents)


def test_an_unfinished_build_of_the_same_sources_is_gone_on_with(sources: list[Path], tmp_path: Path) -> None:
    begin(sources, tmp_path / "out")
    found = preview(sources, tmp_path / "out")
    assert found.units_done == 1
    assert found.conflict == ()


def test_sources_that_were_written_again_are_named_with_both_times(sources: list[Path], tmp_path: Path) -> None:
    begin(sources, tmp_path / "out")
    before = os.stat(sources[0]).st_mtime_ns
    for source in sources[:2]:
        os.utime(source, ns=(0, 10**18))
    (told,) = preview(sources, tmp_path / "out").conflict
    assert "a.jsonl changed since the plan was made" in told
    assert "b.jsonl changed since the plan was made" in told
    assert "c.jsonl" not in told
    assert format_time(before) in told
    assert "2001-09-09 01:46:40 UTC" in told
    assert preview(sources, tmp_path / "out", restart=True).conflict == ()


def test_sources_that_came_or_grew_are_named(sources: list[Path], tmp_path: Path) -> None:
    begin(sources, tmp_path / "out")
    write_jsonl(sources[0], make_texts(60, seed=1))
    (tmp_path / "d.txt").write_text("more\n")
    (told,) = preview([*sources, tmp_path / "d.txt"], tmp_path / "out").conflict
    assert "an unfinished build of other sources" in told
    assert "source a.jsonl: was " in told
    assert "source d.txt: was not there" in told
    assert "b.jsonl" not in told


def test_the_command_tells_of_them_as_prepare_does(tokenmill: Command, sources: list[Path], tmp_path: Path) -> None:
    begin(sources, tmp_path / "out")
    os.utime(sources[1], ns=(0, 10**18))
    given = (*sources, "-o", "out", "--tokenizer", "byte", "--unit-bytes", "3KB")
    refused = tokenmill("prepare", *given, code=1).stderr.splitlines()[0].removeprefix("error: ")
    assert f"note: {refused}" in tokenmill("plan", *given, code=2).stdout


def test_another_recipe_is_told_with_both_values(sources: list[Path], tmp_path: Path) -> None:
    library.prepare(sources, tmp_path / "out", **BYTES)
    assert preview(sources, tmp_path / "out").finished
    (told,) = preview(sources, tmp_path / "out", eot="none").conflict
    assert "a dataset of another recipe" in told
    assert "eot: was 'append', now 'none'" in told


def test_a_finished_dataset_that_is_damaged_is_told(sources: list[Path], tmp_path: Path) -> None:
    library.prepare(sources, tmp_path / "out", **BYTES)
    (tmp_path / "out/train/00000.bin").unlink()
    with pytest.raises(DatasetError):
        library.prepare(sources, tmp_path / "out", **BYTES)
    (told,) = preview(sources, tmp_path / "out").conflict
    assert "00000.bin" in told
