"""A cache that is too small for all who share it: several processes read a dataset of a real S3 server through it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import tokenmill
from conftest import make_texts, write_parquet
from s3 import Bucket
from tokenmill.errors import StorageError
from tokenmill.sizes import format_bytes
from tokenmill.storage import shard_cache

# Reads all of a split in some order; prints what it read, and how many of its maps have lost their files.
READ = """
import hashlib, sys, tokenmill
path, order = sys.argv[1:]
train = tokenmill.open(path)["train"]
found = hashlib.sha256()
if order in ("forward", "backward"):
    for start in range(0, train.num_tokens, 1000)[:: 1 if order == "forward" else -1]:
        found.update(train.tokens(start, min(start + 1000, train.num_tokens)).tobytes())
elif order == "documents":
    for tokens in train:
        found.update(tokens.tobytes())
        del tokens
elif order == "blocks":
    for tokens in train.blocks(0, train.num_tokens):
        found.update(tokens.tobytes())
        del tokens
else:
    loader = tokenmill.DataLoader(path, 64, 8, packing=order, epochs=1, fields=["document_ids"])
    for batch in loader:
        found.update(batch["input_ids"].tobytes() + batch["document_ids"].tobytes())
try:
    maps = open("/proc/self/maps").read()
except OSError:
    maps = ""
print(found.hexdigest(), sum("/datasets/" in line and "(deleted)" in line for line in maps.splitlines()))
"""
ORDERS = ("forward", "backward", "documents", "blocks", "concat", "best_fit")

# Reads a token of some shards, and then nothing until it is told to. Out of their order, none is fetched ahead.
HOLD = """
import sys, tokenmill
train = tokenmill.open(sys.argv[1])["train"]
firsts = [0, *train.token_ends]
wanted = [train.tokens(firsts[int(number)], firsts[int(number)] + 1)[0] for number in sys.argv[2:]]
print("holds", flush=True)
sys.stdin.readline()
print(*(int(train.tokens(firsts[int(number)], firsts[int(number)] + 1)[0]) for number in sys.argv[2:]))
assert wanted == [train.tokens(firsts[int(number)], firsts[int(number)] + 1)[0] for number in sys.argv[2:]]
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built")
    write_parquet(path / "a.parquet", make_texts(180, seed=5), rows=5)
    tokenmill.prepare(str(path / "a.parquet"), path / "local", tokenizer="byte", unit_bytes="3kB", workers=1)
    assert len(tokenmill.open(path / "local")["train"].token_ends) >= 10
    return path / "local"


@pytest.fixture
def url(local: Path, bucket: Bucket) -> str:
    for file in local.rglob("*"):
        if file.is_file() and ".build" not in file.parts:
            bucket.put(f"ds/{file.relative_to(local)}", file.read_bytes())
    return f"{bucket.url}/ds"


def largest_shard(local: Path) -> int:
    """The bytes of the largest shard, both of its files."""
    pairs = [(path, path.with_suffix(".idx")) for path in local.glob("train/*.bin")]
    return max(sum(path.stat().st_size for path in pair) for pair in pairs)


def limit_to(shards: float, local: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    limit = int(shards * largest_shard(local))
    monkeypatch.setenv(shard_cache.LIMIT, str(limit))
    return limit


def names(cached: Path) -> list[str]:
    return sorted(path.name for path in cached.rglob("train/*.bin"))


def size(cached: Path) -> int:
    """Bytes that copies, and what has come of others, take at the same time: they come and go while one looks."""

    def look() -> dict[int, int]:
        found = {}
        for path in cached.rglob("train/*"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found[stat.st_ino] = stat.st_size
        return found

    while (first := look()) != look():
        pass
    return sum(first.values())


def first_tokens(local: Path) -> list[int]:
    train = tokenmill.open(local)["train"]
    return [int(train.tokens(start, start + 1)[0]) for start in [0, *train.token_ends[:-1]]]


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def holder(url: str, shards: Sequence[int]) -> Iterator[subprocess.Popen[str]]:
    """A process that has mapped these shards, and does nothing."""
    with start(HOLD, url, *map(str, shards)) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("shards", [1, 2.5])
def test_more_processes_than_the_cache_has_room_for_read_the_right_tokens_in_any_order(
    url: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: float
) -> None:
    limit = limit_to(shards, local, monkeypatch)
    ranks = [start(READ, url, order) for order in ORDERS]
    here = [start(READ, str(local), order) for order in ORDERS]
    expected = [process.communicate(timeout=300)[0].split() for process in here]
    while any(rank.poll() is None for rank in ranks):
        assert size(tmp_path / "cache") <= limit
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks[0].wait(0.05)
            ranks[-1].wait(0.05)
    found = [rank.communicate(timeout=300)[0].split() for rank in ranks]
    assert found == expected
    assert size(tmp_path / "cache") <= limit
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_who_reads_nothing_lets_go_of_what_it_holds_and_has_it_again_later(
    url: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_to(3, local, monkeypatch)
    expected = first_tokens(local)
    with holder(url, [3, 5, 0]) as idle:
        assert names(tmp_path / "cache") == ["00000.bin", "00003.bin", "00005.bin"]
        here, there = tokenmill.open(local)["train"], tokenmill.open(url)["train"]
        np.testing.assert_array_equal(there.tokens(0, there.num_tokens), here.tokens(0, here.num_tokens))
        maps = Path(f"/proc/{idle.pid}/maps")
        assert not maps.exists() or "(deleted)" not in "".join(
            line for line in maps.read_text().splitlines() if "/datasets/" in line
        )
        assert idle.communicate("go on\n", timeout=300)[0].split() == [str(expected[number]) for number in (3, 5, 0)]
        assert idle.returncode == 0


def test_two_datasets_of_one_process_give_each_other_room(
    url: str, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_to(1, local, monkeypatch)
    expected = first_tokens(local)
    one, other = tokenmill.open(url)["train"], tokenmill.open(url)["train"]
    firsts = [0, *one.token_ends]
    for number in range(4):
        assert one.tokens(firsts[number], firsts[number] + 1)[0] == expected[number]
        assert other.tokens(firsts[-2 - number], firsts[-2 - number] + 1)[0] == expected[-1 - number]


@pytest.mark.filterwarnings("ignore:.*fork")  # newer Pythons warn of it, and trainers do it
def test_a_forked_process_and_its_parent_give_each_other_room(
    url: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = limit_to(1, local, monkeypatch)
    expected = first_tokens(local)
    train = tokenmill.open(url)["train"]
    firsts = [0, *train.token_ends]
    assert train.tokens(firsts[2], firsts[2] + 1)[0] == expected[2]
    pid = os.fork()
    if pid == 0:
        found = [int(train.tokens(firsts[number], firsts[number] + 1)[0]) for number in (2, 0, 4)]
        (tmp_path / "child").write_text(repr(found))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "child").read_text() == repr([expected[number] for number in (2, 0, 4)])
    assert train.tokens(firsts[2], firsts[2] + 1)[0] == expected[2]
    assert size(tmp_path / "cache") <= limit


def test_a_process_that_is_killed_blocks_nobody(url: str, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_to(2, local, monkeypatch)
    with holder(url, [1, 0]) as stopped:
        stopped.send_signal(signal.SIGSTOP)  # it would not answer
        waiting = start(READ, url, "backward")
        asked = lock_file(url, "wanted")
        while not is_locked(asked):
            assert waiting.poll() is None
        stopped.kill()
        expected = start(READ, str(local), "backward").communicate(timeout=300)[0]
        assert waiting.communicate(timeout=300)[0] == expected


def test_who_waits_for_a_process_that_never_answers_gives_up_and_says_what_is_needed(
    url: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_to(2, local, monkeypatch)
    with holder(url, [1, 0]) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        before = names(tmp_path / "cache")
        monkeypatch.setattr(shard_cache, "PATIENCE_SECONDS", 0.0)
        there = tokenmill.open(url)["train"]
        with pytest.raises(StorageError, match=r"has no room for .* are in use, 0 B cannot be downloaded") as caught:
            there.tokens(there.token_ends[4], there.token_ends[4] + 1)
        wanted = sum((local / "train" / f"00005{ending}").stat().st_size for ending in (".bin", ".idx"))
        at_least = format_bytes(size(tmp_path / "cache") + wanted)
        assert caught.value.hint.startswith(f"give it {at_least} or more with {shard_cache.LIMIT}")
        assert names(tmp_path / "cache") == before


def test_what_is_fetched_ahead_takes_no_room_from_anybody(
    url: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_to(2, local, monkeypatch)
    with holder(url, [5]):
        there = tokenmill.open(url)["train"]
        there.tokens(0, 1)
        for thread in threading.enumerate():
            if thread.name.endswith("(_bring_shard)"):
                thread.join()
        assert names(tmp_path / "cache") == ["00000.bin", "00005.bin"]
        assert is_locked(lock_file(url, "train/00005")), "nobody was asked to let go"
        there.tokens(there.token_ends[0], there.token_ends[0] + 1)
        assert "00001.bin" in names(tmp_path / "cache"), "it comes when it is needed"


def lock_file(url: str, name: str) -> Path:
    folder = Path(tokenmill.open(url).path)
    return (folder if "/" in name else folder.parent) / f"{name}.lock"


def is_locked(path: Path) -> bool:
    """Whether somebody has a lock in any way."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
