"""Every row of the table of what bad input gets."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

import tokenmill as library
from conftest import Command, command, leftovers, make_texts, tree, write_jsonl, write_parquet

GOOD = ['{"text": "good one"}', '{"text": "good two"}']
BAD_LINES = {
    "invalid_json": b'{"text": "cut',
    "missing_field": b'{"body": "x"}',
    "null_text": b'{"text": null}',
    "not_text": b'{"text": 7}',
    "lone_surrogate": b'{"text": "\\ud800"}',
    "invalid_utf8": b'{"text": "\xff"}',
}


def rejects(out: Path) -> list[dict[str, object]]:
    return [
        json.loads(line)
        for file in sorted((out / ".build/rejects").glob("*"))
        for line in file.read_text().splitlines()
    ]


@pytest.mark.parametrize("reason", BAD_LINES)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_line_is_quarantined_and_its_neighbours_are_kept(
    tokenmill: Command, tmp_path: Path, reason: str, place: int
) -> None:
    lines = [line.encode() + b"\n" for line in GOOD]
    lines.insert(place, BAD_LINES[reason] + b"\n")
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    done = tokenmill("prepare", "a.jsonl", "-o", "out", "--json", code=3)
    assert json.loads(done.stdout)["dropped"] == {reason: 1}
    assert json.loads(done.stdout)["documents"] == 2
    position = len(b"".join(lines[:place]))
    assert rejects(tmp_path / "out") == [{"source": "a.jsonl", "position": position, "reason": reason}]
    tokenmill("verify", "out", "--source", "all")


@pytest.mark.parametrize("reason", BAD_LINES)
def test_on_bad_fail_stops_at_the_first_bad_line(tokenmill: Command, tmp_path: Path, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD[0].encode() + b"\n" + BAD_LINES[reason] + b"\n")
    for workers in (1, 2):
        done = tokenmill("prepare", "a.jsonl", "-o", "out", "--on-bad", "fail", "-j", workers, code=1)
        assert reason.replace("_", " ") in done.stderr
        assert "a.jsonl at 21" in done.stderr
        assert not (tmp_path / "out/dataset.json").exists()


def test_a_field_that_the_first_line_lacks_is_in_the_text_of_those_that_have_it(
    tokenmill: Command, tmp_path: Path
) -> None:
    rows = [{"instruction": "A", "output": "O"}, {"instruction": "B", "input": "I", "output": "P"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenmill("prepare", "a.jsonl", "-o", "out", "--tokenizer", "byte")
    documents = [bytes(document[:-1].tolist()) for document in library.open(tmp_path / "out")["train"]]
    assert documents == [b"A\n\nO", b"B\n\nI\n\nP"]


def test_invalid_utf8_and_nulls_in_parquet_and_text_are_quarantined(tokenmill: Command, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["good", None, "also good"])
    (tmp_path / "b.txt").write_bytes(b"good\n\xff\xfe bad\nfine\n")
    done = tokenmill("prepare", "a.parquet", "b.txt", "-o", "out", "--json", code=3)
    assert json.loads(done.stdout)["dropped"] == {"invalid_utf8": 1, "null_text": 1}
    assert rejects(tmp_path / "out") == [
        {"source": "a.parquet", "position": 1, "reason": "null_text"},
        {"source": "b.txt", "position": 5, "reason": "invalid_utf8"},
    ]


def corrupt_sources(folder: Path) -> dict[str, Path]:
    """A good file beside each kind of broken one."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in make_texts(300)).encode()
    packed = {"cut.jsonl.gz": gzip.compress(lines), "cut.jsonl.zst": zstandard.compress(lines)}
    paths = {}
    for name, data in packed.items():
        (folder / name).write_bytes(data[:-20])
        paths[name] = folder / name
    write_parquet(folder / "page.parquet", make_texts(300))
    data = bytearray((folder / "page.parquet").read_bytes())
    for place in range(300, 1200, 7):
        data[place] ^= 0xFF
    (folder / "page.parquet").write_bytes(data)
    paths["page.parquet"] = folder / "page.parquet"
    return paths


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.jsonl.zst", "page.parquet"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_file_fails_its_unit_and_the_others_go_on(
    tokenmill: Command, tmp_path: Path, name: str, workers: int
) -> None:
    bad = corrupt_sources(tmp_path)[name]
    write_jsonl(tmp_path / "zz-good.jsonl", make_texts(100, seed=5))
    build = ("prepare", bad, "zz-good.jsonl", "-o", "out", "-j", workers, "--unit-bytes", "5KB")
    failed = tokenmill(*build, code=1)
    assert name in failed.stderr
    assert "1 of" in failed.stderr or "units failed" in failed.stderr
    out = tmp_path / "out"
    assert not (out / "dataset.json").exists()
    assert leftovers(out) == []
    assert list((out / ".build/receipts").glob("*.json")), "the good units are done"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_fails_every_unit_is_told_once(tokenmill: Command, tmp_path: Path, workers: int) -> None:
    swap = "def keep(text):\n    try:\n        os.rename('b.jsonl', 'a.jsonl')\n    finally:\n        return True\n"
    (tmp_path / "no.py").write_text(f"import os\n{swap}")
    for name, count in (("a.jsonl", 300), ("b.jsonl", 5)):
        write_jsonl(tmp_path / name, make_texts(count, seed=5))
    build = ("prepare", "a.jsonl", "-o", "out", "-j", workers, "--unit-bytes", "5KB", "--filter", "no:keep")
    failed = tokenmill(*build, code=1, PYTHONPATH=str(tmp_path))
    assert failed.stderr.count("changed since the plan was made") == 2, "when it happens, and in the end"


def test_a_mended_source_of_the_same_size_is_seen_as_changed_and_restart_takes_it(
    tokenmill: Command, tmp_path: Path
) -> None:
    texts = make_texts(3000)  # so many that what is wrong is not yet seen when it is planned
    source = tmp_path / "a.jsonl.gz"
    good = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    source.write_bytes(good[:-8] + b"\0" * 8)
    tokenmill("prepare", source, "-o", "out", code=1)
    source.write_bytes(good)
    refused = tokenmill("prepare", source, "-o", "out", code=1)
    assert "changed since the plan" in refused.stderr
    assert str(len(good)) in refused.stderr
    tokenmill("prepare", source, "-o", "out", "--restart")
    assert library.open(tmp_path / "out")["train"].num_documents == len(texts)


def test_a_source_that_grew_since_the_plan_is_an_error_with_both_sizes(tokenmill: Command, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    before = source.stat().st_size
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-8])
    tokenmill("prepare", source, "b.jsonl.gz", "-o", "out", code=1)
    with source.open("a") as file:
        file.write('{"text": "more"}\n')
    refused = tokenmill("prepare", source, "b.jsonl.gz", "-o", "out", code=2)
    assert str(before) in refused.stderr
    assert str(source.stat().st_size) in refused.stderr


# Limits itself, runs a command, and prints its peak memory. A process starts with the peak of the one that forked
# it, so the tests, which may have taken more, do not start the command themselves.
MEASURED = """
import json, os, resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_AS, (2_500_000_000, 2_500_000_000))
resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"code": done.returncode, "said": done.stdout, "errors": done.stderr, "peak": peak}))
"""


@pytest.mark.parametrize(("ending", "newline"), [("gz", True), ("zst", False)])
def test_a_bomb_is_streamed_and_what_is_too_large_is_dropped(tmp_path: Path, ending: str, newline: bool) -> None:
    big = b'{"text": "' + b"a" * 800_000_000
    after = b'"}\n{"text": "after"}\n' if newline else b""
    before = b'{"text": "before"}\n'
    source = tmp_path / f"bomb.jsonl.{ending}"
    data = before + big + after
    source.write_bytes(gzip.compress(data, 1) if ending == "gz" else zstandard.compress(data, 1))
    del data, big
    line = command("prepare", source, "-o", tmp_path / "out", "-j", 1, "--json", "-q")
    measured = subprocess.run([sys.executable, "-c", MEASURED, *line], capture_output=True, text=True, check=True)
    found = json.loads(measured.stdout)
    assert found["code"] == 0, found["errors"]
    result = json.loads(found["said"])
    assert result["dropped"] == {"too_large": 1}
    assert result["documents"] == (2 if newline else 1)
    assert found["peak"] < 700_000_000, "memory must not grow with the bomb"


def test_a_giant_document_is_dropped_and_counted(tokenmill: Command, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["small", "x" * 5000, "also small"])
    done = tokenmill("prepare", "a.parquet", "-o", "out", "--max-document-bytes", "1KB", "--json")
    assert json.loads(done.stdout)["dropped"] == {"too_large": 1}


def test_empty_documents_are_dropped_and_counted_and_blank_lines_are_no_documents(
    tokenmill: Command, tmp_path: Path
) -> None:
    write_parquet(tmp_path / "a.parquet", ["", "x", "", " "])
    (tmp_path / "b.txt").write_text("one\n\n   \n\u3000\ntwo\n")
    done = json.loads(tokenmill("prepare", "a.parquet", "b.txt", "-o", "out", "--json").stdout)
    assert done["dropped"] == {"empty": 2}
    assert done["documents_read"] == 6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tokenizer", "no-such.json"], "no tokenizer file"),
        (["--tokenizer", "ranks.tiktoken"], "scheme"),
        (["--eot", "sometimes"], "eot"),
        (["--split", "val"], "split"),
        (["--split", "val=1.5"], "share"),
        (["--max-tokens", "many"], "size"),
        (["--documents", "pages"], "lines, files or separator"),
        (["--text-column", "body"], "id, text"),
        (["--template", "{nope}"], "nope"),
        (["--template", "{text.__class__}"], "template"),
        (["--filter", "nowhere:f"], "nowhere"),
        (["--sample", "0"], "share"),
        (["--unit-bytes", "-5"], "size"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--val-source", "a.parquet"], "validation source"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(
    tokenmill: Command, tmp_path: Path, arguments: list[str], says: str
) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"])
    (tmp_path / "ranks.tiktoken").write_bytes(b"YQ== 0\n")
    done = tokenmill("prepare", "a.parquet", "-o", "out", *arguments, code=2)
    assert says in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_an_end_of_text_is_refused_with_the_fix(tokenmill: Command, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    bare = Tokenizer(models.BPE(vocab={chr(c): i for i, c in enumerate(range(33, 127))}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel()
    bare.save(str(tmp_path / "bare.json"))
    write_parquet(tmp_path / "a.parquet", ["abc"])
    refused = tokenmill("prepare", "a.parquet", "-o", "out", "--tokenizer", "bare.json", code=2)
    assert "--eot none" in refused.stderr
    assert "--eot-token" in refused.stderr


def test_an_output_that_holds_something_else_is_refused_and_untouched(tokenmill: Command, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("important")
    for extra in ([], ["--restart"]):
        refused = tokenmill("prepare", "a.parquet", "-o", "out", *extra, code=2)
        assert "thesis.tex" in refused.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_another_recipe_on_the_same_output_is_refused_with_what_differs(tokenmill: Command, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(20))
    tokenmill("prepare", "a.parquet", "-o", "out", "--tokenizer", "byte")
    before = tree(tmp_path / "out")
    refused = tokenmill("prepare", "a.parquet", "-o", "out", "--tokenizer", "byte", "--eot", "none", code=2)
    assert "eot: was 'append', now 'none'" in refused.stderr
    assert "--restart" in refused.stderr
    assert tree(tmp_path / "out") == before
    tokenmill("prepare", "a.parquet", "-o", "out", "--tokenizer", "byte", "--eot", "none", "--restart")
    assert tree(tmp_path / "out") != before


def test_a_hostile_manifest_is_a_typed_error(tokenmill: Command, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"])
    tokenmill("prepare", "a.parquet", "-o", "out")
    manifest = tmp_path / "out/dataset.json"
    good = manifest.read_bytes()
    for hostile in (
        b"",
        b"[" * 100_000,
        good[:-20],
        good.replace(b'"tokens":', b'"tokens":NaN,"x":', 1),
        b'{"seal": 1}',
    ):
        manifest.write_bytes(hostile)
        failed = tokenmill("verify", "out", code=4)
        assert "dataset.json" in failed.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A real file system of 3 MB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small disk needs rights that this user does not have")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_too_small_for_the_estimate_is_refused_before_the_work(
    tokenmill: Command, tmp_path: Path, small_disk: Path
) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(3000))
    refused = tokenmill("prepare", "a.parquet", "-o", small_disk / "out", code=1)
    assert "missing" in refused.stderr
    assert not (small_disk / "out/.build/receipts").exists() or not list((small_disk / "out/.build/receipts").iterdir())


def test_a_plan_for_a_disk_that_is_too_small_fails_with_the_figures(
    tokenmill: Command, tmp_path: Path, small_disk: Path
) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(300))
    planned = tokenmill("plan", "a.parquet", "-o", small_disk / "out", code=1)
    assert re.search(r"disk +about [\d.]+ KB needed, 3\.1\d MB free: [\d.]+ MB are missing", planned.stdout)
    assert "are missing on the output's disk" in planned.stderr
    record = json.loads(tokenmill("plan", "a.parquet", "-o", small_disk / "out", "--json", code=1).stdout)
    assert record["disk_missing"] == record["disk_needed"] + 64_000_000 - record["disk_free"]
    assert tokenmill("plan", "a.parquet", "-o", tmp_path / "out").returncode == 0


def test_a_layout_counts_before_the_work(tokenmill: Command, tmp_path: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=72m", str(small_disk)], check=True)
    (tmp_path / "a.txt").write_bytes(b"0123456789abcde\n" * 150_000)
    build = ("prepare", "a.txt", "--tokenizer", "byte", "-j", 1, "-o", small_disk / "out")
    refused = tokenmill(*build, "--layout", "templar", code=1)
    assert re.search(r"[\d.]+ MB of it for the dataset and 9\.60 MB for the layout", refused.stderr), refused.stderr
    assert not list((small_disk / "out/.build/receipts").iterdir())
    assert "missing" in tokenmill("plan", *build[1:], "--layout", "templar", code=1).stdout
    tokenmill(*build)


def test_an_export_that_fails_after_the_build_says_that_the_dataset_is_done(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{number:07d}\n" for number in range(2000)))
    build = ("prepare", "a.txt", "--tokenizer", "byte", "-j", 1, "-o", "out", "--split", "val=0.1")
    tokenmill(*build)
    (tmp_path / "out/llmc").mkdir()
    (tmp_path / "out/llmc/stranger").touch()
    failed = tokenmill(*build, "--layout", "llmc:shard_size=5000,name=some_thing", code=2)
    assert f"the dataset at {tmp_path}/out is finished and complete, but its export to llmc is not" in failed.stderr
    tokenmill("verify", "out")
    (tmp_path / "out/llmc/stranger").unlink()
    line = failed.stderr.partition("resume the export alone: tokenmill ")[2].strip()
    assert "--shard-size 5000" in line
    tokenmill(*shlex.split(line))
    assert list((tmp_path / "out/llmc").glob("some_thing*"))


def test_a_disk_that_fills_up_stops_the_build_and_freed_space_lets_it_go_on(tmp_path: Path, small_disk: Path) -> None:
    source = write_parquet(tmp_path / "a.parquet", make_texts(8000))
    out = small_disk / "out"
    # The preflight would refuse this disk, rightly; here the disk fills up after it.
    script = (
        "import sys, tokenmill.build.pipeline as build\n"
        "build.check_space = lambda folder, need: None\n"
        "from tokenmill.cli.main import main\nmain()\n"
    )
    arguments = ["prepare", str(source), "-o", str(out), "--unit-bytes", "50KB", "-j", "1"]
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * 2_400_000)
    full = subprocess.run([command()[0], "-c", script, *arguments], capture_output=True, text=True, timeout=300)
    assert full.returncode == 1, full.stderr
    assert re.search(r"no space left while .* about [\d.]+ [kM]B of [\d.]+ [kM]B are still", full.stderr), full.stderr
    assert leftovers(out) == []
    done_before = {file.name for file in (out / ".build/receipts").glob("*.json")}
    ballast.unlink()
    gone_on = subprocess.run([command()[0], "-c", script, *arguments], capture_output=True, text=True, timeout=300)
    assert gone_on.returncode == 0, gone_on.stderr
    assert done_before <= {file.name for file in (out / ".build/receipts").glob("*.json")}
    subprocess.run(command("prepare", source, "-o", tmp_path / "reference", "--unit-bytes", "50KB", "-q"), check=True)
    assert tree(out) == tree(tmp_path / "reference")


def test_three_failures_of_a_unit_fail_the_build_after_all_others_are_done(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "poison.py").write_text(
        "import os, signal\n"
        "def keep(text):\n"
        "    if 'poison' in text:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return True\n"
    )
    write_jsonl(tmp_path / "a.jsonl", [*make_texts(300), "poison", *make_texts(300, seed=1)])
    build = ("prepare", "a.jsonl", "-o", "out", "--filter", "poison:keep", "--unit-bytes", "4KB", "-j", 2)
    failed = tokenmill(*build, code=1, PYTHONPATH=str(tmp_path))
    assert "1 of" in failed.stderr
    assert "a.jsonl" in failed.stderr
    assert "signal 9" in failed.stderr
    plan = json.loads((tmp_path / "out/.build/plan.json").read_bytes())
    assert len(list((tmp_path / "out/.build/receipts").glob("*.json"))) == len(plan["units"]) - 1


def test_no_document_at_all_is_an_error_not_an_empty_dataset(terminal: Command, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x", "y"])
    failed = terminal("prepare", "a.parquet", "-o", "out", "--min-chars", 5, code=1)
    assert "no document was kept" in failed.stderr
    assert not (tmp_path / "out/dataset.json").exists()


def test_secrets_in_urls_are_not_repeated(tokenmill: Command) -> None:
    refused = tokenmill("prepare", "s3://user:hunter2@bucket/key?token=hunter3", "-o", "out", code=2)
    assert "hunter" not in refused.stderr + refused.stdout


def test_ids_are_checked_before_they_are_narrowed(tmp_path: Path) -> None:
    from tokenmill.errors import BuildError
    from tokenmill.tokenizers.base import Encoded
    from tokenmill.units.encode import place_eot

    wide = Encoded(np.array([1, 70_000], np.uint32), np.array([2]))
    with pytest.raises(BuildError, match="70000"):
        place_eot(wide, eot="append", eot_id=0, vocab_size=65_536, dtype="uint16")


def test_an_unreadable_file_is_named(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"this is not parquet at all")
    failed = tokenmill("prepare", "a.parquet", "-o", "out", code=1)
    assert "a.parquet" in failed.stderr
    assert os.listdir(tmp_path) == ["a.parquet"]


def test_a_pipe_is_refused_and_not_waited_for(tokenmill: Command, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    assert "not a plain file" in tokenmill("prepare", "a.jsonl", "-o", "out", code=1).stderr


def test_a_damaged_dataset_without_its_build_folder_is_told_the_way_out(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    tokenmill("prepare", "a.jsonl", "-o", "out")
    shutil.rmtree(tmp_path / "out/.build")
    os.truncate(tmp_path / "out/train/00000.bin", 2)
    for arguments in (("verify", "out"), ("prepare", "a.jsonl", "-o", "out")):
        assert "--restart" in tokenmill(*arguments, code=4).stderr
    tokenmill("prepare", "a.jsonl", "-o", "out", "--restart")
    tokenmill("verify", "out")


def test_a_build_whose_output_is_linked_from_its_sources_goes_on_as_it_began(
    tokenmill: Command, corpus: Path, tmp_path: Path
) -> None:
    """What it had written would be a source else, and the plan another one."""
    (corpus / "link").symlink_to(tmp_path / "out")
    (corpus / "broken.parquet").write_bytes(b"PAR1")
    line = ("prepare", "corpus", "-o", "out", "--tokenizer", "byte", "--unit-bytes", "20KB", "-j", "1")
    for _ in range(2):
        assert "broken.parquet" in tokenmill(*line, code=1).stderr
    shutil.copytree(tmp_path / "out", tmp_path / "other", symlinks=True)
    (tmp_path / "other/provenance").mkdir(exist_ok=True)
    write_parquet(tmp_path / "other/provenance/00000.parquet", ["not a source"])
    (corpus / "other").symlink_to(tmp_path / "other")
    (corpus / "broken.parquet").unlink()
    done = tokenmill(*line, "--update")
    assert f"the dataset {corpus / 'other'} among the sources is passed over" in done.stderr
    assert "complete" in tokenmill(*line).stdout
    (corpus / "link").unlink()
    (corpus / "other").unlink()
    tokenmill("prepare", "corpus", "-o", "right", *line[4:])
    assert tree(tmp_path / "out") == tree(tmp_path / "right")
