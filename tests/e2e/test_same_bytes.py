"""The same bytes: for any number of workers, any hash seed, after any kill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conftest import Command, Gate, command, leftovers, make_texts, tree, wait_for_receipts, write_jsonl, write_parquet

OPTIONS = ("--split", "val=0.1", "--unit-bytes", "4KB", "-q")


def reference(tokenmill: Command, corpus: Path, tmp_path: Path) -> dict[str, str]:
    tokenmill("prepare", corpus, "-o", tmp_path / "reference", *OPTIONS, "-j", 1)
    return tree(tmp_path / "reference")


def test_any_number_of_workers_writes_the_same_bytes(tokenmill: Command, corpus: Path, tmp_path: Path) -> None:
    expected = reference(tokenmill, corpus, tmp_path)
    assert len(expected) > 10
    for workers in (2, 3, 5):
        out = tmp_path / f"out{workers}"
        tokenmill("prepare", corpus, "-o", out, *OPTIONS, "-j", workers)
        assert tree(out) == expected


def test_the_hash_seed_of_python_does_not_matter(tokenmill: Command, corpus: Path, tmp_path: Path) -> None:
    expected = reference(tokenmill, corpus, tmp_path)
    for workers, seed in ((1, "1"), (2, "77")):
        tokenmill("prepare", corpus, "-o", tmp_path / seed, *OPTIONS, "-j", workers, PYTHONHASHSEED=seed)
        assert tree(tmp_path / seed) == expected


def test_the_place_of_the_corpus_does_not_matter(tokenmill: Command, corpus: Path, tmp_path: Path) -> None:
    expected = reference(tokenmill, corpus, tmp_path)
    corpus.rename(tmp_path / "elsewhere")
    tokenmill("prepare", "elsewhere", "-o", tmp_path / "moved", *OPTIONS)
    assert tree(tmp_path / "moved") == expected


def test_scratch_and_batch_bounds_do_not_matter(tokenmill: Command, corpus: Path, tmp_path: Path) -> None:
    expected = reference(tokenmill, corpus, tmp_path)
    tokenmill(
        "prepare", corpus, "-o", tmp_path / "out", *OPTIONS, "--scratch", tmp_path / "fast", DATASET_BATCH_SIZE="7"
    )
    assert tree(tmp_path / "out") == expected
    assert not list((tmp_path / "fast").iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_ten_kills_at_random_moments_change_nothing(workers: int, tmp_path: Path, tokenmill: Command) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_parquet(corpus / "a.parquet", make_texts(900, seed=1))
    write_jsonl(corpus / "b.jsonl", make_texts(600, seed=2))
    expected = reference(tokenmill, corpus, tmp_path)
    num_units = len(list((tmp_path / "reference/.build/receipts").iterdir()))
    out = tmp_path / "out"
    build = command("prepare", corpus, "-o", out, *OPTIONS, "-j", workers)
    chance = random.Random(workers)
    for kill in range(1, 11):
        # Spread over the whole build by what is done, and random within that.
        process = subprocess.Popen(build, start_new_session=True)
        wait_for_receipts(process, out, kill * num_units // 11)
        time.sleep(chance.uniform(0, 0.03))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(build, check=True)
    assert tree(out) == expected
    tokenmill("verify", out)


def test_what_was_done_before_a_kill_is_not_done_again(corpus: Path, tmp_path: Path, gate: Gate) -> None:
    write_jsonl(corpus / "d.jsonl", [Gate.text])
    out = tmp_path / "out"
    build = command("prepare", corpus, "-o", out, *OPTIONS, *gate.options, "-j", 1)
    process = subprocess.Popen(build, env=gate.environment, start_new_session=True)
    wait_for_receipts(process, out, 5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    receipts = out / ".build/receipts"
    done = {file.name: file.stat().st_mtime_ns for file in receipts.glob("*.json")}
    gate.open()
    subprocess.run(build, env=gate.environment, check=True)
    assert {name: (receipts / name).stat().st_mtime_ns for name in done} == done
    assert leftovers(out) == []
