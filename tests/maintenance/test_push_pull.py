"""push and pull: against a real S3 server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

import tokenmill as library
from conftest import Command, command, leftovers, make_texts, tree, write_parquet
from proxy import fault_proxy
from s3 import Bucket
from tokenmill.errors import DatasetError, OutputError, RecipeError
from tokenmill.storage.local import Folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built")
    write_parquet(path / "a.parquet", make_texts(600, seed=5), rows=40)
    recipe: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": "40kB", "split": "val=0.1"}
    library.prepare(str(path / "a.parquet"), path / "ds", workers=1, **recipe)
    return path


@pytest.fixture
def dataset(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built / "ds", tmp_path / "ds")
    shutil.copy(built / "a.parquet", tmp_path)
    return tmp_path / "ds"


@pytest.fixture
def pushed(dataset: Path, bucket: Bucket) -> str:
    library.push(dataset, f"{bucket.url}/ds")
    return f"{bucket.url}/ds"


def times(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}


def test_a_dataset_goes_there_and_back(dataset: Path, bucket: Bucket, tmp_path: Path) -> None:
    there = library.push(dataset, f"{bucket.url}/ds")
    assert bucket.tree("ds") == tree(dataset)
    assert there.moved_files == there.files == len(tree(dataset)) - 1
    assert library.verify(f"{bucket.url}/ds").ok
    back = library.pull(f"{bucket.url}/ds", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(dataset)
    assert (back.moved_files, back.moved_bytes) == (there.files, there.num_bytes)
    assert not (tmp_path / "back" / ".build").exists()
    assert not [key for key in bucket.listed("ds/") if ".build" in key]


def test_only_what_is_missing_or_wrong_is_moved(pushed: str, bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    assert library.push(dataset, pushed).moved_files == 0
    bucket.delete("ds/train/00001.bin")
    bucket.put("ds/val/00000.idx", b"other bytes")
    assert library.push(dataset, pushed).moved_files == 2
    assert bucket.tree("ds") == tree(dataset)

    library.pull(pushed, tmp_path / "back")
    before = times(tmp_path / "back")
    assert library.pull(pushed, tmp_path / "back").moved_files == 0
    assert times(tmp_path / "back") == before
    (tmp_path / "back/train/00001.bin").unlink()
    damaged = bytearray((tmp_path / "back/train/00000.bin").read_bytes())
    damaged[7] ^= 1
    (tmp_path / "back/train/00000.bin").write_bytes(damaged)
    assert library.pull(pushed, tmp_path / "back").moved_files == 2
    assert tree(tmp_path / "back") == tree(dataset)
    (kept,) = (tmp_path / "back/.build/quarantine").iterdir()
    assert kept.read_bytes() == damaged, "what was wrong is kept"


def test_a_part_is_a_dataset_of_its_own(pushed: str, dataset: Path, tmp_path: Path) -> None:
    library.pull(pushed, tmp_path / "part", split="train", shards="0-1")
    assert library.verify(tmp_path / "part").ok
    whole, part = library.open(dataset), library.open(tmp_path / "part")
    assert part.splits == ["train"]
    count = part["train"].num_tokens
    assert 0 < count < whole["train"].num_tokens
    np.testing.assert_array_equal(part["train"].tokens(0, count), whole["train"].tokens(0, count))
    assert part.manifest.fingerprint != whole.manifest.fingerprint
    assert part.manifest.dropped["left_behind"] == whole.manifest.documents - part.manifest.documents
    assert library.pull(pushed, tmp_path / "part").moved_files > 0, "the rest of it"
    assert tree(tmp_path / "part") == tree(dataset)


def test_a_part_joins_what_is_there_of_the_same_dataset(
    pushed: str, bucket: Bucket, dataset: Path, tmp_path: Path
) -> None:
    whole = tree(dataset)
    library.push(dataset, pushed, split="val")
    assert bucket.tree("ds") == whole, "what was whole stays whole"
    library.pull(pushed, tmp_path / "back", split="val")
    library.pull(pushed, tmp_path / "back", split="train", shards="1")
    assert set(library.open(tmp_path / "back").splits) == {"train", "val"}
    assert library.verify(tmp_path / "back").ok
    library.push(tmp_path / "back", pushed)
    assert bucket.tree("ds") == whole, "what has more keeps it"
    library.pull(pushed, tmp_path / "back")
    assert tree(tmp_path / "back") == whole


def test_parts_that_only_a_third_place_could_join_are_refused(pushed: str, bucket: Bucket, tmp_path: Path) -> None:
    library.pull(pushed, tmp_path / "first", split="train", shards="0")
    library.pull(pushed, tmp_path / "second", split="train", shards="1")
    library.push(tmp_path / "first", f"{bucket.url}/other")
    with pytest.raises(OutputError, match="the source does not have"):
        library.push(tmp_path / "second", f"{bucket.url}/other")
    assert library.verify(f"{bucket.url}/other").ok


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"split": "test"}, "no split 'test'"),
        ({"shards": "100-101"}, "no shards 100-101"),
        ({"shards": "3-1"}, "does not name shards"),
        ({"shards": "x"}, "does not name shards"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_nonsense_is_refused(pushed: str, tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        library.pull(pushed, tmp_path / "part", **arguments)
    assert not (tmp_path / "part").exists()


def test_directions_and_foreign_places_are_refused(pushed: str, bucket: Bucket, dataset: Path, tmp_path: Path) -> None:
    wrong_ways: list[Callable[[], object]] = [
        lambda: library.push(pushed, pushed),
        lambda: library.push(dataset, str(tmp_path / "x")),
        lambda: library.pull(str(dataset), tmp_path / "x"),
        lambda: library.pull(pushed, pushed),
    ]
    for call in wrong_ways:
        with pytest.raises(RecipeError, match="goes from a"):
            call()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(OutputError, match=r"other files: thesis\.txt"):
        library.pull(pushed, tmp_path / "mine")
    bucket.put("other/thesis.txt", b"x")
    with pytest.raises(OutputError, match=r"other files: thesis\.txt"):
        library.push(dataset, f"{bucket.url}/other")
    library.prepare(str(tmp_path / "a.parquet"), tmp_path / "ds2", tokenizer="byte", min_chars=50, workers=1)
    with pytest.raises(OutputError, match="another dataset"):
        library.push(tmp_path / "ds2", pushed)


def test_what_is_damaged_is_not_passed_on(dataset: Path, bucket: Bucket, pushed: str, tmp_path: Path) -> None:
    bucket.put("ds/train/00000.bin", b"x" * len(bucket.get("ds/train/00000.bin")))
    with pytest.raises(DatasetError, match=r"train/00000\.bin has the sha256"):
        library.pull(pushed, tmp_path / "back")
    assert not (tmp_path / "back/dataset.json").exists()
    bucket.put("ds/train/00000.bin", b"short")
    with pytest.raises(DatasetError, match=r"train/00000\.bin has 5 bytes, not \d+"):
        library.pull(pushed, tmp_path / "short")
    bucket.delete("ds/train/00000.bin")
    with pytest.raises(DatasetError, match=r"train/00000\.bin is missing"):
        library.pull(pushed, tmp_path / "gone")
    (dataset / "val/00000.bin").write_bytes(b"x")
    with pytest.raises(DatasetError, match=r"val/00000\.bin is not what the manifest says"):
        library.push(dataset, f"{bucket.url}/new")
    assert "new/dataset.json" not in bucket.listed("new/")


def test_each_file_of_a_pull_and_each_range_of_a_source_is_asked_for_once_and_nothing_is_looked_for_first(
    dataset: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def note(method: str, path: str) -> str:
        asked.append((method, unquote(path.partition("?")[0]).partition(f"/{bucket.name}/")[2]))
        return ""

    with fault_proxy(bucket.endpoint) as proxy:
        proxy.choose = note
        for name, value in bucket.through(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        library.push(dataset, f"{bucket.url}/ds")
        asked.clear()
        library.pull(f"{bucket.url}/ds", tmp_path / "back")
        names = [name for name in tree(dataset) if name != "dataset.json"]
        of_files = sorted(ask for ask in asked if ask[1] != "ds/dataset.json")
        assert of_files == sorted(("GET", f"ds/{name}") for name in names)

        bucket.put("a.parquet", (tmp_path / "a.parquet").read_bytes())
        library.prepare(f"{bucket.url}/a.parquet", tmp_path / "out", tokenizer="byte", unit_bytes="1GB", workers=1)
        assert asked.count(("HEAD", "a.parquet")) == 1, "when it is named"
        assert asked.count(("GET", "a.parquet")) == 2, "what is in it, and its rows, for a look and for all of them"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_pull_that_was_stopped_in_a_file_goes_on_in_it(
    bucket: Bucket, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "big.txt").write_bytes(b"".join(os.urandom(30).hex().encode() + b"\n" for _ in range(450_000)))
    library.prepare(str(tmp_path / "big.txt"), tmp_path / "big", tokenizer="byte", unit_bytes="1GB", workers=1)
    url = f"{bucket.url}/big"
    library.push(tmp_path / "big", url)
    part = tmp_path / "back/train/00000.bin.part"
    killed = threading.Event()

    def hold(path: str, wanted: str) -> None:
        if unquote(path).endswith("train/00000.bin") and wanted and not wanted.startswith("bytes=0-"):
            killed.wait(120)  # nobody answers for what is behind the first range while it asks

    with fault_proxy(bucket.endpoint) as proxy:
        proxy.hold = hold
        environment = {**os.environ, **bucket.through(proxy.endpoint)}
        process = subprocess.Popen(command("pull", url, tmp_path / "back", "-q"), env=environment)
        while process.poll() is None and not (part.exists() and part.stat().st_size):
            time.sleep(0.005)
        process.send_signal(number)
        assert process.wait(60) == code, "a line that has gone silent is not waited for"
        killed.set()
    there = part.stat().st_size
    assert 0 < there < (tmp_path / "big/train/00000.bin").stat().st_size
    assert not (tmp_path / "back/dataset.json").exists()
    events: list[dict[str, Any]] = []
    library.pull(url, tmp_path / "back", watch=events.append)
    assert tree(tmp_path / "back") == tree(tmp_path / "big")
    assert not part.exists()
    assert not leftovers(tmp_path / "back")
    assert events[-1]["bytes"] == events[-1]["total_bytes"]


@pytest.mark.parametrize("left", ["dataset.json.0123456789ab.tmp", "characters.json.part"])
def test_what_a_killed_pull_left_beside_the_manifest_is_gone_on_with(
    dataset: Path, bucket: Bucket, tmp_path: Path, left: str
) -> None:
    library.prepare(str(tmp_path / "a.parquet"), tmp_path / "char", tokenizer="char", workers=1)
    library.push(tmp_path / "char", f"{bucket.url}/ds")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / left).write_bytes(b"torn")
    library.pull(f"{bucket.url}/ds", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(tmp_path / "char")


def test_a_pull_that_ends_while_another_one_begins_is_no_stranger(
    pushed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.pull(pushed, tmp_path / "back")
    (tmp_path / "back/dataset.json").rename(tmp_path / "dataset.json")

    def then_it_ends(look: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            found = look(*arguments)
            with contextlib.suppress(FileNotFoundError):
                (tmp_path / "dataset.json").rename(tmp_path / "back/dataset.json")
            return found

        return wrapped

    for name in ("exists", "names"):
        monkeypatch.setattr(Folder, name, then_it_ends(getattr(Folder, name)))
    assert library.pull(pushed, tmp_path / "back").moved_files == 0


def test_the_commands_tell_what_they_did(dataset: Path, bucket: Bucket, tokenmill: Command) -> None:
    url = f"{bucket.url}/ds"
    done = json.loads(tokenmill("push", dataset, url, "--json", "--split", "val").stdout)
    assert done["moved_files"] == done["files"]
    assert "all there" in tokenmill("push", dataset, url, "--split", "val").stdout
    assert "is complete" in tokenmill("pull", url, "back", "--split", "val", "--shards", "0").stdout
    assert "ok: " in tokenmill("verify", "back").stdout
    assert "there is no dataset" in tokenmill("pull", f"{bucket.url}/nothing", "x", code=2).stderr
