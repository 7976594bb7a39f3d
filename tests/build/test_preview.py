"""plan: what a build would do, and what stands in its way."""

from __future__ import annotations

import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import tokenmill as library
from conftest import Command, make_texts, write_jsonl
from tokenmill.build.preview import START_SECONDS, PlanResult, elapsed, plan, run_trial
from tokenmill.build.resolve import make_config, resolve_build
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats.base import FORMATS
from tokenmill.recipe import make_recipe
from tokenmill.sizes import format_time
from tokenmill.tokenizers.engine import open_engine

BYTES: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": "3KB", "workers": 1}


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    return [write_jsonl(tmp_path / f"{name}.jsonl", make_texts(50, seed=1)) for name in "abc"]


def begin(sources: list[Path], out: Path) -> None:
    """A build that is stopped when its first unit is done."""

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "done":
            raise KeyboardInterrupt

    with pytest.raises(library.TokenmillError, match="are saved"):
        library.prepare(sources, out, watch=stop, **BYTES)


def preview(sources: list[Path], out: Path, **options: Any) -> PlanResult:
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
    assert "was built with different options" in told
    assert "eot: was 'append', now 'none'" in told


def test_a_finished_dataset_that_is_damaged_is_told(sources: list[Path], tmp_path: Path) -> None:
    library.prepare(sources, tmp_path / "out", **BYTES)
    (tmp_path / "out/train/00000.bin").unlink()
    with pytest.raises(DatasetError):
        library.prepare(sources, tmp_path / "out", **BYTES)
    (told,) = preview(sources, tmp_path / "out").conflict
    assert "00000.bin" in told


def test_a_rehearsal_measures_the_work_of_some_units_and_leaves_nothing(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    setup = resolve_build(make_recipe({"sources": sources, "tokenizer": "byte", "unit_bytes": "1MB", "on_bad": "fail"}))
    ticks = itertools.count()
    work = make_config(setup, scratch=None, only_look=True)
    cost = run_trial(setup.plan, work, open_engine(setup.spec), clock=lambda: float(next(ticks)))
    text_bytes = sum(len(text.encode()) for text in make_texts(50, seed=1)) * len(sources)
    # The one unit is one batch: a tick before it, one after it, one in the end.
    assert cost == pytest.approx(2 / text_bytes, rel=0.1)
    assert os.listdir(tmp_path / "temporary") == []


def test_a_rehearsal_encodes_the_beginning_of_a_large_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é" * 5_000_000)
    setup = resolve_build(make_recipe({"sources": tmp_path / "a.txt", "tokenizer": "byte", "documents": "files"}))
    engine = open_engine(setup.spec)
    sizes: list[int] = []

    class Watched:
        memory = engine.memory

        def encode(self, text: Any) -> Any:
            sizes.append(len(text[0].as_py().encode()))
            return engine.encode(text)

        decode = engine.decode

    assert run_trial(setup.plan, make_config(setup, scratch=None), Watched())
    assert sizes == [1_000_000]


def test_a_rehearsal_writes_nothing(sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = resolve_build(make_recipe({"sources": sources, "tokenizer": "byte"}))
    work, engine = make_config(setup, scratch=None, only_look=True), open_engine(setup.spec)

    def refuse(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and watched and given[2] & (os.O_WRONLY | os.O_RDWR) and given[0] != os.devnull:
            raise AssertionError(f"{given[0]} is written to")

    sys.addaudithook(refuse)  # there is no taking it back
    watched = True
    try:
        assert run_trial(setup.plan, work, engine)
    finally:
        watched = False


def test_what_cannot_be_read_is_not_rehearsed(sources: list[Path]) -> None:
    setup = resolve_build(make_recipe({"sources": sources, "tokenizer": "byte"}))
    work, engine = make_config(setup, scratch=None, only_look=True), open_engine(setup.spec)
    for source in sources:
        source.unlink()
    assert run_trial(setup.plan, work, engine) is None


def test_workers_share_the_time_but_not_that_of_the_longest_unit() -> None:
    assert elapsed(80.0, 10.0, 1) == START_SECONDS + 80.0
    assert elapsed(80.0, 10.0, 4) == START_SECONDS + 20.0
    assert elapsed(80.0, 10.0, 16) == START_SECONDS + 10.0
    assert elapsed(0.0, 10.0, 4) == 0.0


def test_only_what_is_left_to_do_takes_time(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.build.preview.run_trial", lambda *_: 1.0)
    whole = preview(sources, tmp_path / "out")
    assert whole.seconds_alone == START_SECONDS + whole.estimate.text_bytes
    begin(sources, tmp_path / "out")
    begun = preview(sources, tmp_path / "out")
    assert begun.seconds_alone == pytest.approx(START_SECONDS + whole.estimate.text_bytes * (1 - 1 / whole.units))
    library.prepare(sources, tmp_path / "out", **BYTES)
    assert preview(sources, tmp_path / "out").seconds == 0


def test_the_time_is_told_for_all_workers_and_for_one(tokenmill: Command, sources: list[Path]) -> None:
    told = tokenmill("plan", *sources, "--tokenizer", "byte", "-j", 2).stdout
    assert re.search(r"time +about \d+s with 2 workers, \d+s with one: an estimate from a short trial\n", told)
    assert "for 2 workers" in told
    alone = tokenmill("plan", *sources, "--tokenizer", "byte", "-j", 1).stdout
    assert re.search(r"time +about \d+s with 1 worker: an estimate", alone)
    assert "for 1 worker, " in alone


def test_the_uncertainty_of_the_tokens_is_an_interval_of_95_percent(tokenmill: Command, sources: list[Path]) -> None:
    told = tokenmill("plan", *sources, "--tokenizer", "byte").stdout
    assert re.search(r"tokens +about \S+ \u00b1 \S+ \(95 %\)\n", told)


def test_a_layout_is_checked_before_the_work(tokenmill: Command, sources: list[Path]) -> None:
    asked = ("plan", *sources, "-o", "out", "--tokenizer", "byte", "--layout")
    told = tokenmill(*asked, "nanogpt").stdout
    assert re.search(r"disk +about \S+ KB needed for the dataset, \S+ KB for the layout, .* free\n", told)
    assert "note: the time is that of the dataset, without the export to nanogpt" in told
    refused = [tokenmill(command, *asked[1:], "nowhere", code=2).stderr for command in ("plan", "prepare")]
    assert refused[0] == refused[1]


def test_workers_of_a_cluster_are_not_bound_by_the_cores_of_this_machine(sources: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="too many"):
        preview(sources, tmp_path / "out", workers=5000)
    found = preview(sources, tmp_path / "out", workers=5000, executor="ray")
    assert found.workers == 5000
    assert found.notes == ()
    (note,) = preview(sources, tmp_path / "out", workers=None, executor="ray").notes
    assert "the cluster was not contacted" in note
    with pytest.raises(RecipeError, match="'slurm' is not an executor"):
        preview(sources, tmp_path / "out", executor="slurm")


@pytest.mark.parametrize("layout", FORMATS)
def test_the_disk_of_a_layout_counts_documents_however_small(tmp_path: Path, layout: str) -> None:
    words = ("yes", "no", "maybe so", "ok then", "1")
    (tmp_path / "a.txt").write_text("".join(f"{words[number * 7 % 5]}\n" for number in range(20_000)))
    options: dict[str, Any] = {"split": "val=0.2", "layout": layout, "workers": 1}
    planned = plan([tmp_path / "a.txt"], tmp_path / "out", **options).disk_layout
    files = library.prepare([tmp_path / "a.txt"], tmp_path / "out", **options).export
    assert files is not None
    assert 0.96 * files.num_bytes < planned < 2 * files.num_bytes
