"""Parts of a build on one output, in any order, together and killed; and join, which has the bytes of one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tokenmill as library
from conftest import Command, leftovers, make_texts, tree, write_jsonl
from s3 import Bucket
from tokenmill import records
from tokenmill.build import workspace
from tokenmill.build.join import parse_part
from tokenmill.errors import BuildError, DatasetError, LockedError, OutputError, RecipeError
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import PATIENCE_SECONDS, Holder, locked, part_lock

RECIPE: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": "15kB", "split": "val=0.1"}


def part(corpus: Path, out: Path | str, number: int, into: int = 3, **options: Any) -> library.PrepareResult:
    return library.prepare(str(corpus), out, workers=1, part=f"{number}/{into}", **RECIPE, **options)


def whole(corpus: Path, out: Path | str, **options: Any) -> library.PrepareResult:
    return library.prepare(str(corpus), out, workers=1, **RECIPE, **options)


def test_parts_in_any_order_and_one_of_them_twice_are_joined_to_the_bytes_of_one_machine(
    corpus: Path, tmp_path: Path
) -> None:
    plain, out = whole(corpus, tmp_path / "right"), tmp_path / "out"
    found = [part(corpus, out, number) for number in (3, 1, 3, 2)]
    done = [result.part for result in found]
    assert [status.units for status in done[:2]] == [done[2].units, done[1].units]
    assert [result.already_complete for result in found] == [False, False, True, False]
    assert [status.missing_units for status in done] == sorted((s.missing_units for s in done), reverse=True)
    assert done[-1].missing_units == 0
    once = [found[0], found[1], found[3]]
    assert sum(result.tokens for result in once) == plain.tokens
    assert sum(result.manifest.documents_read for result in once) == plain.manifest.documents_read
    assert not (out / "dataset.json").exists(), "a part does not commit"
    joined = library.join(out)
    assert (joined.manifest, joined.already_complete) == (plain.manifest, False)
    assert tree(out) == tree(tmp_path / "right")
    assert set(os.listdir(out / ".build")) == set(os.listdir(tmp_path / "right/.build"))
    assert library.join(out).already_complete
    again = part(corpus, out, 2)
    assert (again.already_complete, again.part.is_joined, again.manifest) == (True, True, plain.manifest)
    assert library.verify(out, source="all").ok


def test_join_says_which_parts_miss_what_and_a_whole_build_takes_over(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    units = [part(corpus, out, 2).part.units]
    with pytest.raises(
        BuildError, match=r"units are missing in .*\n  part 1/3 misses \d+ of \d+ units\n  part 3/3"
    ) as no:
        library.join(out)
    assert "part='1/3'` and so on (1, 3), then run `tokenmill.join` again" in no.value.hint
    assert "part 2/3" not in no.value.message
    receipts = {file.name: file.stat().st_mtime_ns for file in (out / ".build/receipts").iterdir()}
    assert len(receipts) == units[0]
    assert whole(corpus, out).manifest == whole(corpus, tmp_path / "right").manifest
    assert {name: (out / ".build/receipts" / name).stat().st_mtime_ns for name in receipts} == receipts
    assert tree(out) == tree(tmp_path / "right")


def test_other_numbers_of_parts_work_on_the_same_units(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number, into in ((1, 2), (4, 5), (2, 3), (1, 100), (2, 2)):
        part(corpus, out, number, into)
    library.join(out)
    whole(corpus, tmp_path / "right")
    assert tree(out) == tree(tmp_path / "right")


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "1/0", "a/b", "-1/3", "1.5/3", "1/3/5", "1/99999999"])
def test_a_part_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_part(text)
    assert "count from 1" in caught.value.hint


@pytest.mark.parametrize(
    "option",
    [
        {"restart": True},
        {"wait": True},
        {"update": True},
        {"layout": "nanogpt"},
        {"max_tokens": 900},
        {"executor": "ray"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_does_not_go_with_a_part_is_refused_before_anything_is_written(
    corpus: Path, tmp_path: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(RecipeError, match=f"`{next(iter(option))}`"):
        part(corpus, tmp_path / "out", 1, **option)
    assert not (tmp_path / "out").exists()


def test_parts_of_other_options_or_of_changed_sources_are_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    part(corpus, out, 1)
    with pytest.raises(OutputError, match="eot: was 'append', now 'prepend'"):
        library.prepare(str(corpus), out, workers=1, part="2/3", eot="prepend", **RECIPE)
    os.utime(corpus / "b.jsonl", (1, 1))
    with pytest.raises(library.SourceChangedError, match=r"b\.jsonl changed"):
        part(corpus, out, 2)


def test_parts_leave_a_full_build_out_and_a_full_build_leaves_them_out(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    part(corpus, out, 1)
    folder = Folder(str(out))
    with locked(folder, lock=part_lock(2, 3)):
        with pytest.raises(LockedError, match=r"part 2/3 of .* is being built by process"):
            whole(corpus, out)
        with pytest.raises(LockedError, match="part 2/3"):
            part(corpus, out, 2)
        assert part(corpus, out, 3).part.missing_units, "another part is not locked out"
        with pytest.raises(BuildError, match=r"part 2/3 misses .*, and is running or was cut off"):
            library.join(out)
    with locked(folder), pytest.raises(LockedError):
        part(corpus, out, 2)
    part(corpus, out, 2)
    with locked(folder, lock=part_lock(1, 3)), pytest.raises(LockedError, match="part 1/3"):
        library.join(out)
    library.join(out)


def test_the_lock_of_a_part_whose_machine_was_lost_is_taken_over(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for number in (1, 2, 3):
        part(corpus, out, number)
        lost = Holder(machine="elsewhere", process=1, started="1", token=f"t{number}")
        Folder(str(out)).write(part_lock(number, 3), records.seal(lost))
    begin, events = time.monotonic(), list[dict[str, Any]]()
    monkeypatch.setattr(time, "sleep", lambda seconds, real=time.sleep: real(seconds / 50))
    library.join(out, watch=events.append)
    assert sum(event["kind"] == "waiting" for event in events) == 3
    assert time.monotonic() - begin < PATIENCE_SECONDS, "they are waited for together"
    assert library.verify(out).ok


def test_parts_that_start_at_the_same_moment_share_one_plan(corpus: Path, tmp_path: Path) -> None:
    out, errors = tmp_path / "out", list[BaseException]()

    def run(number: int) -> None:
        try:
            part(corpus, out, number, 6)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    library.join(out)
    whole(corpus, tmp_path / "right")
    assert tree(out) == tree(tmp_path / "right")


def test_what_a_killed_part_left_is_hashed_by_join_and_a_damaged_piece_is_named(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in (1, 2):
        part(corpus, out, number, 2)
    for clean in out.glob(".build/parts/*.clean.json"):  # as if they had been killed behind their last units
        clean.unlink()
    piece = next(out.glob(".build/pieces/000000*.bin"))
    data = piece.read_bytes()
    piece.unlink()
    piece.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(BuildError, match=r"1 of .* units are missing"):
        library.join(out)
    for number in (1, 2):
        part(corpus, out, number, 2)
    events: list[dict[str, Any]] = []
    library.join(out, watch=events.append)
    whole(corpus, tmp_path / "right")
    assert tree(out) == tree(tmp_path / "right")


def test_a_part_keeps_its_hands_off_the_temp_files_of_others(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    part(corpus, out, 1)
    temps = [out / f".build/pieces/{unit:06}.train.bin.0123456789ab.tmp" for unit in range(8)]
    for temp in temps:
        temp.touch()
    part(corpus, out, 1)
    left = [temp for temp in temps if temp.exists()]
    assert left
    assert len(left) < len(temps)
    part(corpus, out, 2)
    part(corpus, out, 3)
    library.join(out)
    assert leftovers(out) == []


def test_a_comparison_that_a_source_cut_short_is_not_committed(corpus: Path, tmp_path: Path) -> None:
    """A part that cannot read all sources leaves the comparison to another one."""
    out, source = tmp_path / "out", corpus / "a.parquet"
    stat, data = source.stat(), source.read_bytes()
    source.write_bytes(data[: len(data) // 8] + bytes(len(data) // 2 - len(data) // 8) + data[len(data) // 2 :])
    os.utime(source, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    with pytest.raises(BuildError):
        part(corpus, out, 1, 2)
    source.write_bytes(data)
    os.utime(source, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    assert workspace.load_build_record(Folder(str(out))).parity == {}
    with pytest.raises(BuildError, match="are missing"):
        library.join(out)
    for number in (1, 2):
        part(corpus, out, number, 2)
    folder = Folder(str(out))
    record = workspace.load_build_record(folder)
    workspace.save_build_record(folder, replace(record, parity={}))
    with pytest.raises(BuildError, match="a source could not be read") as caught:
        library.join(out)
    assert "run one of the parts again" in caught.value.hint
    part(corpus, out, 2, 2)
    library.join(out)
    whole(corpus, tmp_path / "right")
    assert tree(out) == tree(tmp_path / "right")


def test_join_of_something_else_is_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DatasetError, match="has no part of a dataset"):
        library.join(tmp_path)
    library.prepare(str(corpus), tmp_path / "out", workers=1, **RECIPE)
    assert library.join(tmp_path / "out").already_complete


def test_parts_work_on_a_bucket(corpus: Path, tmp_path: Path, bucket: Bucket) -> None:
    out = f"{bucket.url}/parts"
    for number in (2, 1):
        part(corpus, out, number, 2)
    library.join(out)
    library.pull(out, tmp_path / "here")
    whole(corpus, tmp_path / "right")
    assert tree(tmp_path / "here") == tree(tmp_path / "right")


def test_the_commands_say_what_to_do_next(corpus: Path, tmp_path: Path, tokenmill: Command) -> None:
    out = tmp_path / "out"
    options = ["-o", out, "--tokenizer", "byte", "--unit-bytes", "15kB", "-j", "1"]
    first = tokenmill("prepare", corpus, *options, "--part", "1/2")
    assert "part 1/2 of" in first.stdout
    assert "units of other parts are missing" in first.stdout
    early = tokenmill("join", out, code=1)
    assert "with --part 2/2, then run tokenmill join again" in early.stderr
    second = tokenmill("prepare", corpus, *options, "--part", "2/2", "--json")
    assert json.loads(second.stdout)["part"]["missing_units"] == 0
    again = tokenmill("prepare", corpus, *options, "--part", "2/2")
    assert f"all parts are complete: run `tokenmill join {out}`" in again.stdout
    assert "is done in" in tokenmill("join", out).stdout
    tokenmill("prepare", corpus, *options, "--part", "3/2", code=2)


def test_a_part_that_is_interrupted_keeps_its_units(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl", make_texts(2000)), tmp_path / "out"
    command = [sys.executable, "-m", "tokenmill", "prepare", source, "-o", out, "--tokenizer", "byte"]
    command += ["--unit-bytes", "4kB", "-j", "1", "--part", "1/2"]
    receipts = out / ".build/receipts"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and (not receipts.exists() or len(list(receipts.glob("*"))) < 2):
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "units of part 1/2 are saved; run the same command to resume" in said
    done = len(list(receipts.glob("*.json")))
    events: list[dict[str, Any]] = []
    options: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": "4kB", "watch": events.append}
    library.prepare(source, out, workers=1, part="1/2", **options)
    (resumed,) = (event for event in events if event["kind"] == "resume")
    assert (resumed["units"], resumed["trusted"]) == (done, done)
