"""Sources that change under an unfinished build."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tokenmill
from conftest import make_texts, tree, write_jsonl, write_parquet
from tokenmill.errors import BuildError, OutputError, RecipeError, SourceChangedError, SourceError, TokenmillError
from tokenmill.sources import files as streams
from tokenmill.sources import jsonl, small_files
from tokenmill.sources.base import Source
from tokenmill.sources.parquet import ParquetFormat

OPTIONS: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": 20_000, "workers": 1, "split": "val=0.1"}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Three files, of which the middle one is cut off."""
    folder = tmp_path / "sources"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", make_texts(200))
    write_parquet(folder / "b.parquet", make_texts(300, seed=1))
    write_jsonl(folder / "c.jsonl", make_texts(200, seed=2))
    whole = (folder / "b.parquet").read_bytes()
    (tmp_path / "whole").write_bytes(whole)
    (folder / "b.parquet").write_bytes(whole[: len(whole) // 2])
    return folder


def mend(sources: Path) -> None:
    (sources / "b.parquet").write_bytes((sources.parent / "whole").read_bytes())


def remove(sources: Path) -> None:
    (sources / "b.parquet").unlink()


def add(sources: Path) -> None:
    mend(sources)
    write_jsonl(sources / "0.jsonl", make_texts(100, seed=3))


def fail(sources: Path, out: Path) -> None:
    with pytest.raises(BuildError, match=r"1 of .* units failed, the others are done") as caught:
        tokenmill.prepare(sources, out, **OPTIONS)
    assert "update=True" in caught.value.hint


def resumed(sources: Path, out: Path, **options: Any) -> tuple[int, int]:
    """Go on; gives how many units were trusted at once, and how many were done then."""
    told: list[dict[str, Any]] = []
    tokenmill.prepare(sources, out, watch=told.append, **OPTIONS, **options)
    kept = [event["trusted"] for event in told if event["kind"] == "resume"]
    return (kept or [0])[0], sum(event["kind"] == "done" for event in told)


@pytest.mark.parametrize("change", [mend, remove, add])
def test_an_update_keeps_what_was_made_of_the_others_and_gives_the_bytes_of_a_build(
    sources: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    out = tmp_path / "out"
    fail(sources, out)
    done = len(list((out / ".build/receipts").glob("*.json")))
    assert done > 4
    change(sources)
    with pytest.raises(TokenmillError) as caught:
        tokenmill.prepare(sources, out, **OPTIONS)
    assert "update=True" in caught.value.hint
    before = tokenmill.plan(sources, out, update=True, **OPTIONS)
    assert before.units_done == done
    assert resumed(sources, out, update=True) == (done, before.units - done)
    assert not (out / ".build/kept").exists()
    tokenmill.prepare(sources, tmp_path / "right", **OPTIONS)
    assert tree(out) == tree(tmp_path / "right")
    assert tokenmill.verify(out, source="all").ok


def test_after_an_update_was_cut_off_the_plain_command_goes_on(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fail(sources, out)
    done = len(list((out / ".build/receipts").glob("*.json")))
    mend(sources)
    write_jsonl(sources / "c.jsonl", ["{"])

    class Stop(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "resume":
            raise Stop

    with pytest.raises(Stop):
        tokenmill.prepare(sources, out, watch=stop, update=True, **OPTIONS)
    trusted, _ = resumed(sources, out)
    assert 0 < trusted < done
    tokenmill.prepare(sources, tmp_path / "right", **OPTIONS)
    assert tree(out) == tree(tmp_path / "right")


def test_a_source_that_was_touched_is_done_again_and_no_other(tmp_path: Path) -> None:
    sources, out = tmp_path / "sources", tmp_path / "out"
    sources.mkdir()
    for name in "abc":
        write_jsonl(sources / f"{name}.jsonl", make_texts(100, seed=ord(name)))
    write_parquet(sources / "d.parquet", make_texts(10))
    (sources / "d.parquet").write_bytes(b"PAR1")
    with pytest.raises(BuildError):
        tokenmill.prepare(sources, out, **OPTIONS)
    (sources / "b.jsonl").touch()
    write_parquet(sources / "d.parquet", make_texts(10))
    with pytest.raises((OutputError, SourceChangedError)):
        tokenmill.prepare(sources, out, **OPTIONS)
    units = tokenmill.plan(sources / "b.jsonl", **OPTIONS).units + 1
    assert resumed(sources, out, update=True)[1] == units


def test_a_table_that_could_not_be_read_for_a_moment_fails_its_unit_and_makes_no_other_dataset(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, tries = tmp_path / "out", []

    def columns(format: ParquetFormat, path: str, source: Source) -> list[str]:
        tries.append(path)
        if len(tries) <= fails:
            raise SourceError("cannot read it: Input/output error")
        return read_columns(format, path, source)

    read_columns = ParquetFormat.columns
    mend(sources)
    tokenmill.prepare(sources, tmp_path / "right", **OPTIONS)
    monkeypatch.setattr(ParquetFormat, "columns", columns)
    fails = 2
    tokenmill.prepare(sources, tmp_path / "soon", **OPTIONS)
    assert tree(tmp_path / "soon") == tree(tmp_path / "right"), "it is tried again at once"
    tries.clear()
    fails = 3
    with pytest.raises(BuildError, match="could not be read when the plan was made, and can be now") as caught:
        tokenmill.prepare(sources, out, **OPTIONS)
    assert "update=True" in caught.value.hint
    with pytest.raises(OutputError):
        tokenmill.prepare(sources, out, **OPTIONS)
    tokenmill.prepare(sources, out, update=True, **OPTIONS)
    assert tree(out) == tree(tmp_path / "right")


def test_json_lines_that_could_not_be_read_for_a_moment_fail_their_unit_and_make_no_other_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, out, tries = tmp_path / "sources", tmp_path / "out", []
    sources.mkdir()
    write_jsonl(sources / "plain.jsonl", make_texts(100))
    turns = [{"messages": [{"role": "user", "content": text}]} for text in make_texts(100, seed=1)]
    (sources / "turns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))

    def open_flaky(path: str, *arguments: Any, **options: Any) -> pa.NativeFile:
        if path.endswith("turns.jsonl"):
            tries.append(path)
            if len(tries) <= fails:
                raise OSError(errno.EIO, "Input/output error")
        return open_file(path, *arguments, **options)

    open_file = streams.open_file
    tokenmill.prepare(sources, tmp_path / "right", **OPTIONS)
    monkeypatch.setattr(streams, "open_file", open_flaky)
    for reader in (jsonl, small_files):  # a shorter way to the bytes of small files
        monkeypatch.setattr(reader, "read_small", lambda *_: None)
    fails = 2
    tokenmill.prepare(sources, tmp_path / "soon", **OPTIONS)
    assert tree(tmp_path / "soon") == tree(tmp_path / "right"), "it is tried again at once"
    tries.clear()
    fails = 3
    with pytest.raises(
        BuildError, match=r"turns\.jsonl could not be read when the plan was made, and can be now"
    ) as caught:
        tokenmill.prepare(sources, out, **OPTIONS)
    assert "update=True" in caught.value.hint
    tokenmill.prepare(sources, out, update=True, **OPTIONS)
    assert tree(out) == tree(tmp_path / "right")


def test_an_update_of_nothing_is_refused_and_leaves_all_as_it_was(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fail(sources, out)
    receipts = tree(out / ".build/receipts")
    for name in ("a.jsonl", "b.parquet", "c.jsonl"):
        (sources / name).unlink()
    write_jsonl(sources / "d.jsonl", make_texts(10))
    with pytest.raises(OutputError, match=r"nothing in .* can be kept"):
        tokenmill.prepare(sources, out, update=True, **OPTIONS)
    assert tree(out / ".build/receipts") == receipts


def test_where_nothing_was_done_yet_there_is_nothing_to_lose(tmp_path: Path) -> None:
    source, out = tmp_path / "a.txt.gz", tmp_path / "out"
    whole = gzip.compress("\n".join(make_texts(100)).encode())
    source.write_bytes(whole[:-100])
    with pytest.raises(BuildError):
        tokenmill.prepare(source, out, **OPTIONS)
    assert (out / ".build/plan.json").exists()
    source.write_bytes(whole)
    tokenmill.prepare(source, out, update=True, **OPTIONS)
    assert tokenmill.verify(out).ok


def test_another_recipe_is_no_update(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fail(sources, out)
    mend(sources)
    with pytest.raises(OutputError, match="min_chars: was 0, now 5") as caught:
        tokenmill.prepare(sources, out, update=True, min_chars=5, **OPTIONS)
    assert "update=True" not in caught.value.hint


def test_what_an_update_cannot_go_with_is_refused(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="`restart` keeps nothing"):
        tokenmill.prepare(sources, tmp_path / "out", update=True, restart=True, **OPTIONS)
    options = {**OPTIONS, "split": "nanogpt"}
    with pytest.raises(SourceError):  # it reads all sources first
        tokenmill.prepare(sources, tmp_path / "out", **options)
    mend(sources)
    with pytest.raises(RecipeError, match="`split='nanogpt'`"):
        tokenmill.prepare(sources, tmp_path / "out", update=True, **options)


def test_an_update_where_nothing_changed_goes_on_as_ever(sources: Path, tmp_path: Path) -> None:
    mend(sources)
    tokenmill.prepare(sources, tmp_path / "out", update=True, **OPTIONS)
    assert tokenmill.prepare(sources, tmp_path / "out", update=True, **OPTIONS).already_complete


class Stopped(Exception):
    pass


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Two files of several units each."""
    folder = tmp_path / "lines"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", make_texts(600, seed=5))
    write_jsonl(folder / "b.jsonl", make_texts(600, seed=6))
    return folder


def swap_lines(path: Path) -> None:
    """The first line of a file last: its size and time are those that it had."""
    about, (first, rest) = path.stat(), path.read_bytes().split(b"\n", 1)
    path.write_bytes(rest + first + b"\n")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert path.stat().st_size == about.st_size


def after_units(count: int, do: Callable[[], None]) -> Callable[[dict[str, Any]], None]:
    """A watcher that does something once so many units are done."""
    done: list[int] = []

    def watch(event: dict[str, Any]) -> None:
        done.extend([event["unit"]] if event["kind"] == "done" else [])
        if len(done) == count:
            done.append(-1)
            do()

    return watch


def stop() -> None:
    raise Stopped


def test_a_change_that_left_size_and_time_is_refused_by_the_resumed_build(lines: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    for place in (out, again):
        with pytest.raises(Stopped):
            tokenmill.prepare(lines, place, watch=after_units(2, stop), **OPTIONS)
    swap_lines(lines / "a.jsonl")
    for _ in range(2):
        with pytest.raises(BuildError, match=r"a\.jsonl changed since unit 0 was built, with the same size and time"):
            tokenmill.prepare(lines, out, **OPTIONS)
    trusted, _ = resumed(lines, out, update=True)
    assert trusted > 0, "what was made of b.jsonl"
    tokenmill.prepare(lines, tmp_path / "right", **OPTIONS)
    assert tree(out) == tree(tmp_path / "right")
    with pytest.raises(OutputError, match=r"nothing in .* can be kept"):  # nothing of b.jsonl was done
        tokenmill.prepare(lines, again, update=True, **OPTIONS)


def test_a_change_while_the_build_runs_is_seen_before_the_commit(lines: Path, tmp_path: Path) -> None:
    change = after_units(2, lambda: swap_lines(lines / "a.jsonl"))
    with pytest.raises(BuildError, match=r"a\.jsonl changed since unit \d+ was built"):
        tokenmill.prepare(lines, tmp_path / "out", watch=change, **OPTIONS)
    assert not (tmp_path / "out/dataset.json").exists()
    resumed(lines, tmp_path / "out", update=True)
    tokenmill.prepare(lines, tmp_path / "right", **OPTIONS)
    assert tree(tmp_path / "out") == tree(tmp_path / "right")


def test_new_rights_of_a_source_are_no_change(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        tokenmill.prepare(lines, tmp_path / "out", watch=after_units(2, stop), **OPTIONS)
    (lines / "a.jsonl").chmod(0o600)
    touch_again = after_units(2, lambda: (lines / "b.jsonl").chmod(0o600))
    found = tokenmill.prepare(lines, tmp_path / "out", watch=touch_again, **OPTIONS)
    assert any(note.startswith("b.jsonl: touched during the build") for note in found.notes)
    tokenmill.prepare(lines, tmp_path / "right", **OPTIONS)
    assert tree(tmp_path / "out") == tree(tmp_path / "right")


def test_a_finished_dataset_is_compared_once_its_sources_were_touched(lines: Path, tmp_path: Path) -> None:
    def notes() -> list[str]:
        return [note for note in tokenmill.prepare(lines, tmp_path / "out", **OPTIONS).notes if "compar" in note]

    assert not notes()
    assert not notes()
    (lines / "a.jsonl").chmod(0o600)
    assert notes()[0] == "a.jsonl was touched since: comparing all sources of the dataset with it"
    assert not notes()
    swap_lines(lines / "b.jsonl")
    for _ in range(2):
        with pytest.raises(SourceChangedError, match=r"b\.jsonl changed since"):
            tokenmill.prepare(lines, tmp_path / "out", **OPTIONS)
