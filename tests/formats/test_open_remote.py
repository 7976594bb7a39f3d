"""Datasets in an object store: opened and read through copies on this machine. Against a real S3 server."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill
from conftest import make_texts, write_parquet
from s3 import Bucket
from tokenmill.errors import DatasetError, RecipeError, StorageError
from tokenmill.storage import shard_cache

READ = """
import sys, tokenmill
train = tokenmill.open(sys.argv[1])["train"]
print(int(train.tokens(0, train.num_tokens).sum()))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built")
    write_parquet(path / "a.parquet", make_texts(600, seed=5), rows=40)
    tokenmill.prepare(str(path / "a.parquet"), path / "local", tokenizer="byte", unit_bytes="40kB", workers=1)
    return path / "local"


@pytest.fixture
def local(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path / "local")
    return tmp_path / "local"


@pytest.fixture
def remote(local: Path, bucket: Bucket) -> Bucket:
    for file in local.rglob("*"):
        if file.is_file() and ".build" not in file.parts:
            bucket.put(f"ds/{file.relative_to(local)}", file.read_bytes())
    return bucket


def copies(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*.bin") if path.parent.name == "train")


def held(cache: Path) -> dict[Path, int]:
    """The copies that are there at the same time, and their sizes: others come and go while one looks."""

    def look() -> dict[Path, int]:
        found = {}
        for path in cache.rglob("train/*.[bi][id][nx]"):
            with contextlib.suppress(FileNotFoundError):
                found[path] = path.stat().st_size
        return found

    while (first := look()) != look():
        pass
    return first


def shard_bytes(local: Path) -> int:
    return sum(path.stat().st_size for path in (local / "train").iterdir()) // len(copies(local.parent / "local"))


def test_a_remote_dataset_reads_like_a_local_one(remote: Bucket, local: Path, tmp_path: Path) -> None:
    here, there = tokenmill.open(local)["train"], tokenmill.open(f"{remote.url}/ds")["train"]
    assert there.num_tokens == here.num_tokens
    assert copies(tmp_path / "cache") == [], "nothing is copied before it is read"
    np.testing.assert_array_equal(there.tokens(5, here.num_tokens), here.tokens(5, here.num_tokens))
    np.testing.assert_array_equal(there.document(600), here.document(600))
    assert copies(tmp_path / "cache") == copies(tmp_path / "local")


def test_loaders_give_the_same_batches(remote: Bucket, local: Path) -> None:
    for packing in ("concat", "best_fit"):
        pair = [
            tokenmill.DataLoader(place, 64, 8, packing=packing, epochs=1) for place in (str(local), f"{remote.url}/ds")
        ]
        for one, other in zip(*pair, strict=True):
            np.testing.assert_array_equal(one["input_ids"], other["input_ids"])


def test_the_next_shards_arrive_while_one_is_read(remote: Bucket, tmp_path: Path) -> None:
    tokenmill.open(f"{remote.url}/ds")["train"].tokens(0, 1)
    deadline = time.monotonic() + 120
    while "00002.bin" not in copies(tmp_path / "cache"):
        assert time.monotonic() < deadline, copies(tmp_path / "cache")
        time.sleep(0.01)


def test_shards_that_are_fetched_ahead_when_the_program_ends_are_left_without_a_word(
    remote: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    fetch = shard_cache.fetch

    def ending(*arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)  # as it is at the end of a program
        fetch(*arguments)

    monkeypatch.setattr(shard_cache, "fetch", ending)
    before = set(threading.enumerate())
    tokenmill.open(f"{remote.url}/ds")["train"].tokens(0, 1)
    for thread in set(threading.enumerate()) - before:
        if thread.name.endswith("(_bring_shard)"):
            thread.join()
    assert copies(tmp_path / "cache") == ["00000.bin"]
    assert died == []


def test_a_small_cache_holds_what_is_read_now(remote: Bucket, local: Path, tmp_path: Path) -> None:
    limit = 3 * shard_bytes(local)
    here = tokenmill.open(local)["train"]
    there = tokenmill.open(f"{remote.url}/ds", cache_bytes=limit)["train"]
    for start in range(0, here.num_tokens - 100, 5_000):
        np.testing.assert_array_equal(there.tokens(start, start + 100), here.tokens(start, start + 100))
        assert sum(held(tmp_path / "cache").values()) <= limit
    del there  # what one dataset uses, another one must not remove
    shuffled = tokenmill.DataLoader(tokenmill.open(f"{remote.url}/ds", cache_bytes=limit), 64, 8, epochs=1)
    for one, other in zip(shuffled, tokenmill.DataLoader(local, 64, 8, epochs=1), strict=True):
        np.testing.assert_array_equal(one["input_ids"], other["input_ids"])


def test_a_cache_that_is_too_small_for_a_shard_says_so(remote: Bucket) -> None:
    with pytest.raises(StorageError, match=r"and the cache is limited to 1\.00 KB"):
        tokenmill.open(f"{remote.url}/ds", cache_bytes="1kB")["train"].tokens(0, 1)
    with pytest.raises(RecipeError, match="not a size"):
        tokenmill.open(f"{remote.url}/ds", cache_bytes="much")


def test_what_cannot_be_had_again_stays(remote: Bucket, local: Path, tmp_path: Path) -> None:
    """An older dataset is gone from its store; its copies are the last ones."""
    limit = 2 * shard_bytes(local)
    for name in remote.listed("ds/"):
        remote.put(name.replace("ds/", "old/"), remote.get(name))
    tokenmill.open(f"{remote.url}/old", cache_bytes=limit)["train"].tokens(0, 1)
    assert copies(tmp_path / "cache") == ["00000.bin"], "there is no room for another one"
    for name in remote.listed("old/"):
        remote.delete(name)
    there = tokenmill.open(f"{remote.url}/ds", cache_bytes=limit)["train"]
    with pytest.raises(StorageError, match="cannot be downloaded again"):
        there.tokens(0, there.num_tokens)
    assert copies(tmp_path / "cache") == ["00000.bin"]


def test_wrong_bytes_are_never_taken(remote: Bucket, tmp_path: Path) -> None:
    data = remote.get("ds/train/00000.bin")
    remote.put("ds/train/00000.bin", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DatasetError, match="has the sha256"):
        tokenmill.open(f"{remote.url}/ds")["train"].tokens(0, 1)
    assert "00000.bin" not in copies(tmp_path / "cache")


def test_what_a_killed_process_left_is_gone_on_with(remote: Bucket, local: Path, tmp_path: Path) -> None:
    tokenmill.open(f"{remote.url}/ds")
    (entry,) = (tmp_path / "cache" / "datasets").glob("*/origin.json")
    (entry.parent / "train").mkdir()
    data = (local / "train" / "00000.bin").read_bytes()
    (entry.parent / "train" / "00000.bin.part").write_bytes(data[:1000])
    (entry.parent / "train" / "00001.bin.part").write_bytes(b"torn" * 10)
    here, there = tokenmill.open(local)["train"], tokenmill.open(f"{remote.url}/ds")["train"]
    np.testing.assert_array_equal(there.tokens(0, there.num_tokens), here.tokens(0, here.num_tokens))
    assert not list(entry.parent.rglob("*.part"))


def test_the_ranks_of_a_node_share_one_cache_and_outlive_each_other(remote: Bucket, local: Path) -> None:
    line = [sys.executable, "-c", READ, f"{remote.url}/ds"]
    ranks = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    ranks[0].send_signal(signal.SIGKILL)
    train = tokenmill.open(local)["train"]
    wanted = str(int(train.tokens(0, train.num_tokens).sum()))
    outputs = [rank.communicate(timeout=300)[0].strip() for rank in ranks]
    assert outputs[1:] == [wanted] * 3


@pytest.mark.filterwarnings("ignore:.*fork")  # newer Pythons warn of it, and trainers do it
def test_a_remote_split_goes_to_spawned_and_forked_processes(remote: Bucket, local: Path, tmp_path: Path) -> None:
    opened = tokenmill.open(f"{remote.url}/ds")
    again = pickle.loads(pickle.dumps(opened))["train"]
    here = tokenmill.open(local)["train"]
    np.testing.assert_array_equal(again.tokens(0, 100), here.tokens(0, 100))
    pid = os.fork()
    if pid == 0:  # connections do not survive a fork: a process of its own fetches
        train = opened["train"]
        found = [int(train.tokens(0, train.num_tokens).sum()), train.num_tokens]
        (tmp_path / "child.json").write_text(json.dumps(found))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert json.loads((tmp_path / "child.json").read_text()) == [
        int(here.tokens(0, here.num_tokens).sum()),
        here.num_tokens,
    ]


def test_a_local_dataset_needs_no_object_stores(local: Path) -> None:
    code = f"import tokenmill, sys; tokenmill.open({str(local)!r})['train'].tokens(0, 5); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not {"obstore", "pyarrow"} & loaded


def test_what_is_no_dataset_is_told_with_its_url(bucket: Bucket) -> None:
    with pytest.raises(DatasetError, match=f"there is no dataset {bucket.url}/nothing"):
        tokenmill.open(f"{bucket.url}/nothing")


def test_more_shards_than_locks_are_let_go_of_and_taken_again(
    built: Path, remote: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "_MAX_LOCKS", 2)
    before = len(os.listdir("/proc/self/fd"))
    opened = [tokenmill.open(f"{remote.url}/ds", cache=tmp_path / name) for name in "ab"]
    expected = [batch["input_ids"].tolist() for batch in tokenmill.DataLoader(built, 32, 4, epochs=2, prefetch=0)]
    for part in opened:
        loader = tokenmill.DataLoader(part, 32, 4, epochs=2, prefetch=0)
        open_files = []
        for batch, rows in zip(loader, expected, strict=True):
            assert batch["input_ids"].tolist() == rows
            open_files.append(len(os.listdir("/proc/self/fd")))
        assert len(copies(tmp_path)) >= 3
        # Files of downloads and connections come and go.
        assert max(open_files[len(open_files) // 2 :]) <= before + 12
