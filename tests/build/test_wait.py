"""Many processes call prepare at the same time: one builds, the others wait."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill
from conftest import make_texts, tree, write_jsonl
from tokenmill.build import pipeline, wait
from tokenmill.build.resolve import ResolvedBuild
from tokenmill.build.resolve import resolve_build as setting_up
from tokenmill.build.workspace import FAILURE, recording_failure
from tokenmill.errors import BadDocumentError, LockedError
from tokenmill.recipe import Recipe
from tokenmill.storage import locks
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import locked

RANK = """
import sys, tokenmill
print("ready", flush=True)
sys.stdin.readline()
try:
    result = tokenmill.prepare(sys.argv[1], sys.argv[2], tokenizer="byte", unit_bytes=2000, workers=1, wait=True,
                               on_bad=sys.argv[3], watch=lambda event: print(event["kind"], flush=True))
    print("result", result.already_complete, result.manifest.fingerprint, flush=True)
except tokenmill.TokenmillError as error:
    print("error", type(error).__name__, error.message.replace("\\n", " "), flush=True)
"""


class Rank:
    """A process that prepares when it is told to."""

    def __init__(self, source: Path, output: Path, on_bad: str = "quarantine") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(source), str(output), on_bad],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def until(self, *words: str) -> str:
        """The first line that begins with one of these words."""
        while line := self.line():
            if line.startswith(words):
                return line
        return ""

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", make_texts(400, words=30))


def test_four_ranks_get_one_build(tmp_path: Path, source: Path) -> None:
    ranks = [Rank(source, tmp_path / "out") for _ in range(4)]
    for rank in ranks:
        rank.go()
    results = [rank.until("result", "error") for rank in ranks]
    for rank in ranks:
        rank.end()
    assert len({line.split()[2] for line in results}) == 1
    assert sorted(line.split()[1] for line in results) == ["False", "True", "True", "True"]
    assert tokenmill.verify(tmp_path / "out").ok


def test_a_rank_that_dies_is_replaced_by_one_that_waits(tmp_path: Path, source: Path) -> None:
    tokenmill.prepare(str(source), tmp_path / "right", tokenizer="byte", unit_bytes=2000, workers=1)
    first, *others = [Rank(source, tmp_path / "out") for _ in range(3)]
    first.go()
    assert first.until("start") == "start"
    os.kill(first.process.pid, signal.SIGSTOP)
    for rank in others:
        rank.go()
    first.end()
    results = [rank.until("result", "error") for rank in others]
    for rank in others:
        rank.end()
    assert sorted(line.split()[1] for line in results) == ["False", "True"]
    assert tree(tmp_path / "out") == tree(tmp_path / "right")


def test_those_who_wait_get_the_error_of_the_one_who_builds(tmp_path: Path, source: Path) -> None:
    with source.open("a") as file:
        file.write("{not json\n")
    builder, waiter = (Rank(source, tmp_path / "out", "fail") for _ in range(2))
    builder.go()
    assert builder.until("start") == "start"
    os.kill(builder.process.pid, signal.SIGSTOP)
    waiter.go()
    assert waiter.until("result", "error", "waiting") == "waiting"
    os.kill(builder.process.pid, signal.SIGCONT)
    failed, told = builder.until("result", "error"), waiter.until("start", "result", "error")
    for rank in (builder, waiter):
        rank.end()
    assert failed.startswith("error BadDocumentError")
    assert told == failed


def test_an_error_that_comes_while_one_who_waits_tries_again_reaches_it_too(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(str(tmp_path / "out"))
    folder.make(".build")
    tries: list[Recipe] = []

    def set_up(recipe: Recipe, *, output: str) -> ResolvedBuild:
        tries.append(recipe)
        return setting_up(recipe, output=output)

    def is_held(folder: Folder) -> bool:  # between two looks for a note
        with contextlib.suppress(BadDocumentError), recording_failure(folder):
            raise BadDocumentError("it is bad")
        other.close()
        return False

    monkeypatch.setattr(pipeline, "resolve_build", set_up)
    monkeypatch.setattr(wait, "is_held", is_held)
    with contextlib.ExitStack() as other:
        other.enter_context(locked(folder))
        with pytest.raises(BadDocumentError, match="it is bad"):
            tokenmill.prepare(str(source), tmp_path / "out", tokenizer="byte", workers=1, wait=True)
    assert len(tries) == 2
    assert not folder.exists(".build/plan.json")


def test_a_note_of_an_earlier_failure_stops_nobody(tmp_path: Path, source: Path) -> None:
    good = source.read_text()
    source.write_text(good + "{not json\n")
    with pytest.raises(BadDocumentError):
        tokenmill.prepare(str(source), tmp_path / "out", tokenizer="byte", workers=1, on_bad="fail")
    assert Folder(str(tmp_path / "out")).exists(FAILURE)
    found = tokenmill.prepare(str(source), tmp_path / "out", tokenizer="byte", workers=1, wait=True)
    assert found.manifest.quarantined == 1
    assert not Folder(str(tmp_path / "out")).exists(FAILURE)


def test_waiting_has_an_end_if_one_is_given(tmp_path: Path, source: Path) -> None:
    folder = Folder(str(tmp_path / "out"))
    folder.make(".build")
    with locked(folder), pytest.raises(LockedError, match=r"not finished within 0\.1 s"):
        tokenmill.prepare(str(source), tmp_path / "out", tokenizer="byte", workers=1, wait=True, timeout=0.1)


def test_who_waits_plans_once_before_it_and_once_after_it_however_long_that_takes(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(str(tmp_path / "out"))
    folder.make(".build")
    tries: list[Recipe] = []
    looks = iter(range(20))

    def set_up(recipe: Recipe, *, output: str) -> ResolvedBuild:
        tries.append(recipe)
        return setting_up(recipe, output=output)

    def is_held(folder: Folder) -> bool:
        if next(looks) == 19:
            other.close()
        return locks.is_held(folder)

    monkeypatch.setattr(pipeline, "resolve_build", set_up)
    monkeypatch.setattr(wait, "is_held", is_held)
    monkeypatch.setattr(wait, "POLL_SECONDS", 0.001)
    with contextlib.ExitStack() as other:
        other.enter_context(locked(folder))
        found = tokenmill.prepare(str(source), tmp_path / "out", tokenizer="byte", workers=1, wait=True)
    assert len(tries) == 2
    assert not found.already_complete
    assert list(looks) == []


def test_who_waits_uses_a_dataset_that_stands_before_its_builder_has_tidied_up(tmp_path: Path, source: Path) -> None:
    folder = Folder(str(tmp_path / "out"))
    folder.make(".build")
    with locked(folder):

        def finish(event: dict[str, object]) -> None:
            if event["kind"] == "waiting":
                tokenmill.prepare(str(source), tmp_path / "other", tokenizer="byte", workers=1)
                shutil.copytree(tmp_path / "other", tmp_path / "out", dirs_exist_ok=True)

        found = tokenmill.prepare(str(source), folder.path, tokenizer="byte", workers=1, wait=True, watch=finish)
    assert found.already_complete


class Clock:
    """A clock that stands still while somebody works; a sleep takes an hour, and ends what was waited for."""

    def __init__(self, wake: contextlib.ExitStack) -> None:
        self._now, self._wake = 0.0, wake

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += 3600.0
        self._wake.close()


def test_the_time_that_is_told_is_not_that_of_waiting(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(str(tmp_path / "out"))
    folder.make(".build")
    told = []
    with contextlib.ExitStack() as other:
        other.enter_context(locked(folder))
        clock = Clock(other)
        monkeypatch.setattr("tokenmill.build.api.time", clock)
        monkeypatch.setattr("tokenmill.build.wait.time", clock)
        result = tokenmill.prepare(source, folder.path, tokenizer="byte", workers=1, wait=True, watch=told.append)
    assert "waiting" in [event["kind"] for event in told]
    assert clock.monotonic() == 3600.0
    assert result.seconds == 0.0
