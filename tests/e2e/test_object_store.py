"""From and to an object store: the same commands, the same bytes. Against a real server."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tokenmill as library
from conftest import Command, Gate, command, make_texts, tree, write_jsonl
from s3 import Bucket
from tokenmill.build import pipeline
from tokenmill.build.commit import commit
from tokenmill.build.workspace import check_ours
from tokenmill.dataset.manifest import Manifest
from tokenmill.errors import BuildError, OutputError, RecipeError, SourceChangedError, TokenmillError
from tokenmill.recipe import make_recipe
from tokenmill.sources.discover import list_sources
from tokenmill.storage.object_folder import ObjectFolder

RECIPE = {"tokenizer": "byte", "unit_bytes": "40kB", "split": "val=0.05"}


@pytest.fixture
def remote(corpus: Path, bucket: Bucket) -> Bucket:
    """The corpus, with a compressed file more, in a bucket."""
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in make_texts(40, seed=7))
    (corpus / "sub").mkdir()
    (corpus / "sub" / "d.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    for file in corpus.rglob("*"):
        if file.is_file():
            bucket.put(f"corpus/{file.relative_to(corpus)}", file.read_bytes())
    bucket.put("corpus/.hidden/x.jsonl", b"{}")
    bucket.put("corpus/picture.png", b"no text")
    return bucket


def test_a_bucket_gives_the_bytes_that_a_disk_gives(remote: Bucket, corpus: Path, tmp_path: Path) -> None:
    library.prepare(str(corpus), tmp_path / "out", workers=1, **RECIPE)
    result = library.prepare(f"{remote.url}/corpus", f"{remote.url}/out", workers=1, **RECIPE)
    assert remote.tree("out") == tree(tmp_path / "out")
    assert not result.already_complete
    assert library.verify(f"{remote.url}/out", source="all").ok
    assert library.prepare(f"{remote.url}/corpus/", f"{remote.url}/out", workers=1, **RECIPE).already_complete
    library.prepare(f"{remote.url}/corpus", tmp_path / "down", workers=1, **RECIPE)
    assert tree(tmp_path / "down") == tree(tmp_path / "out")
    assert not [key for key in remote.listed() if key.endswith(".tmp")]


def test_the_commands_take_urls_and_tell_no_secret(remote: Bucket, tokenmill: Command, tmp_path: Path) -> None:
    out = f"{remote.url}/out"
    planned = tokenmill("plan", f"{remote.url}/corpus", "-o", out, "--json", "--tokenizer", "byte")
    assert json.loads(planned.stdout)["files"] == 4
    assert json.loads(planned.stdout)["disk_free"] is None
    built = tokenmill("prepare", f"{remote.url}/corpus/**/*.jsonl*", "-o", out, "--tokenizer", "byte", "-j", "2", "-v")
    before = remote.tree("out")
    remote.delete("out/train/00000.bin")
    remote.put("out/train/00000.idx", b"damaged")
    failed = tokenmill("verify", out, code=4)
    assert "train/00000.bin" in failed.stdout
    assert "tokenmill repair" in failed.stderr
    mended = tokenmill("repair", out)
    assert remote.tree("out") == before
    nowhere = tokenmill("prepare", f"{remote.url}/corpus", "-o", f"{remote.url}-x/out", "-v", code=1)
    printed = "".join(run.stdout + run.stderr for run in (planned, built, failed, mended, nowhere))
    stored = b"".join(remote.get(key) for key in remote.listed("out"))
    for secret in remote.secrets:
        assert secret not in printed
        assert secret.encode() not in stored
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_a_killed_build_goes_on_to_the_same_bytes(
    remote: Bucket, corpus: Path, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put("corpus/z.jsonl", write_jsonl(corpus / "z.jsonl", [Gate.text]).read_bytes())
    monkeypatch.syspath_prepend(gate.path)
    monkeypatch.setenv("GATE", gate.environment["GATE"])
    recipe = {**RECIPE, "filter": "gate:keep"}
    gate.open()
    library.prepare(str(corpus), tmp_path / "out", workers=1, **recipe)
    gate.close()
    done = len(list((tmp_path / "out/.build/receipts").iterdir())) - 1  # the last unit stands at the gate
    arguments = ["--tokenizer", "byte", "--unit-bytes", "40kB", "--split", "val=0.05", "-j", "1", *gate.options]
    build = command("prepare", f"{remote.url}/corpus", "-o", f"{remote.url}/out", *arguments)
    process = subprocess.Popen(build, env=gate.environment)
    while len(remote.listed("out/.build/receipts/")) < done:
        assert process.poll() is None, "it ended too early"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    gate.open()
    events: list[dict[str, object]] = []
    library.prepare(f"{remote.url}/corpus", f"{remote.url}/out", workers=1, watch=events.append, **recipe)
    assert [event["units"] for event in events if event["kind"] == "resume"] == [done]
    assert remote.tree("out") == tree(tmp_path / "out")
    assert not list((tmp_path / "cache").rglob("*.tmp")), "the next build sweeps the spool"


@pytest.mark.parametrize("ending", [".val.bin", ".provenance.parquet"])
def test_what_a_store_loses_before_the_commit_is_made_again_by_the_same_command(
    remote: Bucket, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    def losing(*arguments: Any, **options: Any) -> Manifest:
        lost = next(key for key in remote.listed("out/.build/pieces/") if key.endswith(ending))
        remote.delete(lost)
        return commit(*arguments, **options)

    library.prepare(str(corpus), tmp_path / "out", workers=1, **RECIPE)
    with monkeypatch.context() as patch, pytest.raises(TokenmillError, match="is missing"):
        patch.setattr(pipeline, "commit", losing)
        library.prepare(f"{remote.url}/corpus", f"{remote.url}/out", workers=1, **RECIPE)
    assert "dataset.json" not in remote.tree("out")
    library.prepare(f"{remote.url}/corpus", f"{remote.url}/out", workers=1, **RECIPE)
    assert remote.tree("out") == tree(tmp_path / "out")


def test_sources_that_change_under_a_build_cost_what_was_made_of_them_alone(
    remote: Bucket, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*arguments: Any, **options: Any) -> Manifest:
        raise BuildError("before the commit")

    sources, out = f"{remote.url}/corpus", f"{remote.url}/out"
    remote.put("corpus/0.txt", b"it will be gone\n" * 1000)
    with monkeypatch.context() as patch, pytest.raises(BuildError, match="before the commit"):
        patch.setattr(pipeline, "commit", lost)
        library.prepare(sources, out, workers=1, **RECIPE)
    remote.delete("corpus/0.txt")
    told: list[dict[str, Any]] = []
    library.prepare(sources, out, workers=1, update=True, watch=told.append, **RECIPE)
    assert not [event for event in told if event["kind"] == "done"]
    library.prepare(str(corpus), tmp_path / "out", workers=1, **RECIPE)
    assert remote.tree("out") == tree(tmp_path / "out")
    assert not remote.listed("out/.build/kept")


def test_a_build_can_be_started_over(remote: Bucket) -> None:
    out = f"{remote.url}/out"
    library.prepare(f"{remote.url}/corpus", out, workers=1, **RECIPE)
    with pytest.raises(OutputError, match="was built with different options"):
        library.prepare(f"{remote.url}/corpus/*.txt", out, workers=1, **RECIPE)
    library.prepare(f"{remote.url}/corpus/*.txt", out, workers=1, restart=True, **RECIPE)
    assert library.verify(out).ok
    remote.put("other/file", b"x")
    with pytest.raises(OutputError, match="other files: file"):
        library.prepare(f"{remote.url}/corpus", f"{remote.url}/other", workers=1, **RECIPE)


def test_prefixes_files_and_patterns_name_sources(remote: Bucket) -> None:
    def names(*sources: str) -> list[str]:
        return [source.name for source in list_sources(make_recipe({"sources": sources})).sources]

    url = f"{remote.url}/corpus"
    assert names(url) == names(f"{url}/") == ["a.parquet", "b.jsonl", "c.txt", "sub/d.jsonl.gz"]
    assert names(f"{url}/a.parquet") == ["a.parquet"]
    assert names(f"{url}/*.jsonl", f"{url}/c.txt") == ["b.jsonl", "c.txt"]
    assert names(f"{url}/**/*.jsonl*") == ["b.jsonl", "sub/d.jsonl.gz"]
    assert names(f"{url}/.hidden/*") == ["x.jsonl"]
    assert names(f"{url}/[ab].*") == ["a.parquet", "b.jsonl"]
    for wrong, said in [(f"{url}/nothing", "no source"), (f"{url}/*.csv", "no source"), (f"{url}/pic", "no source")]:
        with pytest.raises(RecipeError, match=said):
            names(wrong)
    with pytest.raises(RecipeError, match="local files, others URLs"):
        names(url, __file__)


def test_empty_objects_are_sources_as_empty_files_are_and_markers_of_folders_are_not(
    remote: Bucket, corpus: Path, tmp_path: Path
) -> None:
    (corpus / "sub/empty.txt").write_bytes(b"")
    remote.put("corpus/sub/empty.txt", b"")
    remote.put("corpus/sub", b"")
    there, here = (list_sources(make_recipe({"sources": (place,)})) for place in (f"{remote.url}/corpus", str(corpus)))
    assert [source.name for source in there.sources] == [source.name for source in here.sources]
    assert "sub/empty.txt" in [source.name for source in there.sources]


def test_a_dataset_below_a_prefix_is_no_source(remote: Bucket) -> None:
    library.prepare(f"{remote.url}/corpus", f"{remote.url}/corpus/first", workers=1, **RECIPE)
    second = library.prepare(f"{remote.url}/corpus", f"{remote.url}/corpus/second", workers=1, **RECIPE)
    assert remote.tree("corpus/second") == remote.tree("corpus/first")
    assert not second.already_complete


def test_an_unfinished_dataset_below_a_prefix_is_no_source(bucket: Bucket, tmp_path: Path) -> None:
    for name in ("corpus/a.txt", "corpus/x/data/.build/plan.json", "corpus/x/data/train/b.txt", "corpus/x/c.txt"):
        bucket.put(name, b"text\n")
    names = {
        "corpus": ["a.txt", "x/c.txt"],
        "corpus/**/*.txt": ["a.txt", "x/c.txt"],
        "corpus/x/data/**/*.txt": ["b.txt"],
    }
    for source, expected in names.items():
        found = list_sources(make_recipe({"sources": f"{bucket.url}/{source}"}))
        assert [file.name for file in found.sources] == expected


@pytest.mark.parametrize("name", ["a#b.jsonl", "a?x=1.jsonl", "a::b.jsonl", "x//a.jsonl", "x/../a.jsonl"])
def test_an_object_that_no_url_can_name_is_named_in_the_error(bucket: Bucket, name: str) -> None:
    if ".." in name and bucket.url.startswith("az:"):
        pytest.skip("Azure's own client signs such a name as another one, so that no blob has it")
    bucket.put(f"odd/{name}", b'{"text": "a"}\n')
    bucket.put("odd/good.jsonl", b'{"text": "a"}\n')
    with pytest.raises(TokenmillError, match=re.escape(name.partition("?")[0])) as caught:
        list_sources(make_recipe({"sources": (f"{bucket.url}/odd",)}))
    assert "rename" in caught.value.hint


def test_an_object_whose_name_looks_like_a_glob_is_that_object(bucket: Bucket) -> None:
    for name in ("a[1].jsonl", "a1.jsonl"):
        bucket.put(f"odd/{name}", b'{"text": "a"}\n')
    (source,) = list_sources(make_recipe({"sources": (f"{bucket.url}/odd/a[1].jsonl",)})).sources
    assert source.name == "a[1].jsonl"


def test_a_source_that_is_replaced_shows_both_etags(remote: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the plan and its reading: the replacement has the same size."""
    out, source = f"{remote.url}/out", f"{remote.url}/corpus/b.jsonl"
    data = remote.get("corpus/b.jsonl")
    made = ObjectFolder.make

    def make(self: ObjectFolder, name: str = "") -> None:
        if name == ".build":  # the plan is made, and nothing has been read
            remote.put("corpus/b.jsonl", data.replace(b"mill", b"till"))
        made(self, name)

    monkeypatch.setattr(ObjectFolder, "make", make)
    with pytest.raises((SourceChangedError, BuildError), match=r"etag .*, now .* etag ") as caught:
        library.prepare(source, out, workers=1, **RECIPE)
    assert f"{len(data)} bytes" in caught.value.message
    monkeypatch.undo()


def test_two_builders_at_once_make_one_dataset(remote: Bucket, corpus: Path, tmp_path: Path) -> None:
    library.prepare(str(corpus), tmp_path / "out", workers=1, **RECIPE)
    arguments = ["--tokenizer", "byte", "--unit-bytes", "40kB", "--split", "val=0.05", "-j", "1", "--wait", "-q"]
    line = command("prepare", f"{remote.url}/corpus", "-o", f"{remote.url}/out", *arguments)
    both = [subprocess.Popen(line, env={**os.environ, "PYTHONUNBUFFERED": "1"}) for _ in range(2)]
    assert [process.wait(300) for process in both] == [0, 0]
    assert remote.tree("out") == tree(tmp_path / "out")


def test_a_build_that_only_probes_its_store_is_no_stranger(bucket: Bucket, tmp_path: Path) -> None:
    folder = ObjectFolder(f"{bucket.url}/out", spool=str(tmp_path / "spool"))
    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(lambda: [folder.ready() for _ in range(40)])
        while not probing.done():
            check_ours(folder)
    assert probing.result() == [(folder, "")] * 40


def test_a_layout_beside_a_dataset_in_a_store_is_refused_before_any_work(remote: Bucket) -> None:
    with pytest.raises(RecipeError, match="`layout`"):
        library.prepare(f"{remote.url}/corpus", f"{remote.url}/out", workers=1, layout="nanogpt", **RECIPE)
    assert remote.listed("out") == []
