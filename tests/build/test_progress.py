"""Progress is in planned bytes: it gets to all of them, whatever the sources are, and counts nothing twice."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import make_texts, write_jsonl, write_parquet
from tokenmill.build.progress import Progress, Tally
from tokenmill.build.workspace import CLEAN

TEXTS = make_texts(300, seed=4)


def write_fat(path: Path) -> None:
    """Lines of which a seventh is text."""
    path.write_text("".join(json.dumps({"text": text, "html": 6 * text}) + "\n" for text in TEXTS))


def write_compressed(path: Path, times: int) -> None:
    """Text that expands to far more or less than was planned for it."""
    line = json.dumps({"text": "a" * times + os.urandom(2000).hex()})
    path.write_bytes(gzip.compress(f"{line}\n".encode() * 20))


def write_corpus(folder: Path) -> None:
    write_parquet(folder / "a.parquet", TEXTS)
    write_jsonl(folder / "b.jsonl", TEXTS)
    write_fat(folder / "c.jsonl")
    write_compressed(folder / "d.jsonl.gz", 100_000)
    write_compressed(folder / "e.jsonl.gz", 0)
    (folder / "f.txt").write_text("\n".join(text.replace("\n", " ") for text in TEXTS))
    (folder / "g.jsonl").write_text('{"text": "good"}\n' + "bad\n" * 500)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("unit_bytes", ["3KB", "10MB"])
def test_a_build_ends_at_all_of_its_bytes(tmp_path: Path, workers: int, unit_bytes: str) -> None:
    (tmp_path / "in").mkdir()
    write_corpus(tmp_path / "in")
    told: list[dict[str, Any]] = []
    options: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": unit_bytes, "workers": workers}
    result = tokenmill.prepare(str(tmp_path / "in"), tmp_path / "out", watch=told.append, **options)
    last = [event for event in told if event["kind"] == "progress"][-1]
    assert last["bytes"] == last["total_bytes"] > 0
    assert last["seconds_left"] == 0
    assert (last["tokens"], last["documents"]) == (result.tokens, result.manifest.documents_read)


def test_what_is_tried_again_counts_once() -> None:
    progress = Progress(None)
    progress.start(Tally(total_bytes=100, total_units=2, workers=1))
    step = {"kind": "progress", "documents": 3, "tokens": 30, "bytes": 25}
    for unit, ends in ((0, "retry"), (1, "done"), (0, "failed"), (0, "done")):
        for _ in range(2):
            progress.handle({**step, "unit": unit})
        progress.handle({"kind": ends, "unit": unit, "error": "broken"})
    last = progress.tally.snapshot()
    assert (last["documents"], last["tokens"], last["bytes"], last["units"]) == (12, 120, 100, 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_unit_reported_before_it_failed_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("DATASET_BATCH_SIZE", "5")
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in/a.jsonl", TEXTS)
    whole = gzip.compress((tmp_path / "in/a.jsonl").read_bytes())
    (tmp_path / "in/b.jsonl.gz").write_bytes(whole[: len(whole) * 3 // 4])
    told: list[dict[str, Any]] = []
    with pytest.raises(tokenmill.TokenmillError, match="1 of 1 unit failed"):
        tokenmill.prepare(str(tmp_path / "in"), tmp_path / "out", tokenizer="byte", workers=workers, watch=told.append)
    found = [(event["documents"], event["bytes"]) for event in told if event["kind"] == "progress"]
    assert max(found) > (200, 10_000)
    assert found[-1] == (0, 0)


@pytest.mark.parametrize("budget", [1_000, 9_000, 10**9])
def test_a_build_with_a_budget_ends_at_all_of_what_it_takes(tmp_path: Path, budget: int) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    told: list[dict[str, Any]] = []
    options: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": "3KB", "workers": 1, "max_tokens": budget}
    tokenmill.prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", watch=told.append, **options)
    start = next(event for event in told if event["kind"] == "start")
    last = [event for event in told if event["kind"] == "progress"][-1]
    assert last["bytes"] == last["total_bytes"] > 0
    assert last["units"] == last["total_units"]
    assert last["seconds_left"] == 0
    # The budget is taken into account from the beginning on.
    assert start["total_bytes"] == pytest.approx(last["total_bytes"], rel=1, abs=6_000)


def test_rates_after_a_kill_are_those_of_new_work_alone(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    options: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": "3KB", "workers": 1}

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "done" and event["unit"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(tokenmill.TokenmillError):
        tokenmill.prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", watch=stop, **options)
    (tmp_path / "out" / CLEAN).unlink()  # as a kill leaves it: all units are hashed again
    told: list[dict[str, Any]] = []
    result = tokenmill.prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", watch=told.append, **options)
    found = [event for event in told if event["kind"] == "progress"]
    assert {event["tokens_per_second"] for event in found if event["units"] < 6} == {0}
    assert found[-1]["tokens"] == result.tokens
    assert found[-1]["tokens_per_second"] > 0
    assert found[-1]["seconds_left"] == 0


def test_the_clock_of_the_rates_begins_with_new_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tokenmill.build.progress.time.monotonic", lambda: now[0])
    progress = Progress(None)
    progress.start(Tally(total_bytes=1000, total_units=10, workers=1))
    for unit in range(8):
        now[0] += 50
        progress.handle({"kind": "progress", "unit": unit, "documents": 1, "tokens": 100, "bytes": 100, "kept": True})
        progress.handle({"kind": "done", "unit": unit})
    now[0] += 10
    progress.handle({"kind": "progress", "unit": 8, "documents": 1, "tokens": 100, "bytes": 100, "kept": False})
    last = progress.tally.snapshot()
    assert (last["tokens"], last["tokens_per_second"], last["bytes_per_second"]) == (900, 10, 10)
    assert last["seconds_left"] == 10


def test_units_are_counted_for_each_host_of_a_cluster() -> None:
    events: list[dict[str, Any]] = []
    progress = Progress(events.append)
    progress.start(Tally(total_bytes=300, total_units=3, workers=2))
    for unit, host in enumerate(("b", "a", "b")):
        counts = {"documents": 1, "tokens": 10, "bytes": 100}
        progress.handle({"kind": "progress", "unit": unit, "host": host, **counts})
        progress.handle({"kind": "done", "unit": unit})
    hosts = events[-1]["hosts"]
    assert {host: found["units"] for host, found in hosts.items()} == {"a": 1, "b": 2}
    assert list(hosts) == ["a", "b"]
    assert hosts["b"]["bytes_per_second"] > hosts["a"]["bytes_per_second"] > 0
    progress.start(Tally(total_bytes=1, total_units=1, workers=1))
    assert "hosts" not in events[-1], "this machine alone is no host"
