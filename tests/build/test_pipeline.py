from __future__ import annotations

import errno
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import tree
from tokenmill.build.api import open_executor
from tokenmill.build.pipeline import BuildOptions, build
from tokenmill.errors import BuildError, Interrupted, SilentStoreError, SourceError
from tokenmill.executors.base import Executor, Listener, UnitFailure, retry_or_fail
from tokenmill.executors.in_process import InProcess
from tokenmill.recipe import make_recipe
from tokenmill.sources import reader as reading
from tokenmill.sources.base import Batch
from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.spec import TokenizerSpec
from tokenmill.units import probe
from tokenmill.units.task import BuildConfig, UnitTask


def test_a_scratch_disk_without_room_for_a_folder_is_done_without(corpus: Path, tmp_path: Path) -> None:
    class Full(LocalFileSystem):
        def mkdir(self, path: str) -> None:
            if path.startswith(str(tmp_path / "fast")):
                raise OSError(errno.ENOSPC, "no space left on device")
            super().mkdir(path)

    recipe = make_recipe({"sources": (str(corpus),), "tokenizer": "byte"}, config=None)
    for name, fs, scratch in (("out", Full(), str(tmp_path / "fast")), ("right", LocalFileSystem(), None)):
        folder = Folder(str(tmp_path / name), fs)
        build(recipe, folder, BuildOptions(start_executor=partial(open_executor, 1, None), scratch=scratch))
    assert tree(tmp_path / "out") == tree(tmp_path / "right")


def test_a_source_that_could_not_be_read_at_first_leaves_no_trace_in_the_manifest(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_bad = iter([True])

    def read_unit(*arguments: Any, **options: Any) -> Iterator[Batch]:
        if next(is_bad, False):
            raise SourceError("cannot read it: Input/output error", hint="")
        return reading.read_unit(*arguments, **options)

    right = tokenmill.prepare(str(corpus), tmp_path / "right", tokenizer="byte", workers=1)
    assert right.manifest.parity["documents"] > 0
    monkeypatch.setattr(probe, "read_unit", read_unit)
    told: list[dict[str, Any]] = []
    tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="byte", workers=1, watch=told.append)
    first = next(event for event in told if event["kind"] == "parity")
    assert first["documents"] < right.manifest.parity["documents"]
    assert tree(tmp_path / "out") == tree(tmp_path / "right")


def test_a_source_that_is_only_intermittently_readable_is_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_unit(*arguments: Any, **options: Any) -> Iterator[Batch]:
        raise SourceError("cannot read it: Input/output error", hint="")

    monkeypatch.setattr(probe, "read_unit", read_unit)
    with pytest.raises(BuildError, match="only intermittently readable"):
        tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="byte", workers=1)
    monkeypatch.undo()
    assert not tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="byte", workers=1).already_complete


def test_a_build_that_was_taken_over_while_it_stood_still_finds_the_dataset(corpus: Path, tmp_path: Path) -> None:
    tokenmill.prepare(str(corpus), tmp_path / "right", tokenizer="byte", workers=1)

    def stand_still(event: dict[str, Any]) -> None:
        """Another one took over, finished, and cleared up."""
        if event["kind"] == "commit":
            shutil.rmtree(tmp_path / "out")
            shutil.copytree(tmp_path / "right", tmp_path / "out")

    result = tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="byte", workers=1, watch=stand_still)
    assert result.already_complete
    assert tree(tmp_path / "out") == tree(tmp_path / "right")


@dataclass(frozen=True, slots=True)
class Store(Folder):
    """A folder that stops answering when it is told to."""

    silent: threading.Event = field(default_factory=threading.Event)
    backed_off: threading.Event = field(default_factory=threading.Event)

    def back_off(self) -> None:
        self.backed_off.set()

    def exists(self, name: str) -> bool:
        if self.silent.is_set():
            raise SilentStoreError("no answer: it takes too long")
        return Folder.exists(self, name)


class CutOff(InProcess):
    """An executor whose first try of each unit has no answer."""

    def run(self, tasks: Iterator[UnitTask], listener: Listener) -> list[UnitFailure]:
        def retried() -> Iterator[UnitTask]:
            for task in tasks:
                retry_or_fail(task, SilentStoreError("no answer"), Counter(), [], [], listener)
                yield task

        return super().run(retried(), listener)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_store_that_answers_nobody_ends_the_build_and_one_that_is_cut_off_from_a_node_does_not(
    corpus: Path, tmp_path: Path, is_silent: bool
) -> None:
    recipe = make_recipe({"sources": (str(corpus),), "tokenizer": "byte"}, config=None)
    folder = Store(str(tmp_path / "out"))

    def start_executor(where: Folder, work: BuildConfig, spec: TokenizerSpec) -> Executor:
        return CutOff(where, work, spec, open_engine(spec))

    def watch(event: dict[str, Any]) -> None:
        if event["kind"] == "start" and is_silent:
            folder.silent.set()

    if is_silent:
        with pytest.raises(SilentStoreError):
            build(recipe, folder, BuildOptions(start_executor=start_executor, watch=watch))
        assert folder.backed_off.is_set(), "whoever cleans up would wait for each answer"
    else:
        build(recipe, folder, BuildOptions(start_executor=start_executor, watch=watch))
        assert tokenmill.verify(tmp_path / "out").ok


def test_as_many_splits_with_names_as_long_as_a_recipe_takes_them_are_built(corpus: Path, tmp_path: Path) -> None:
    split = {f"s{number:063d}": 0.007 for number in range(127)}
    found = tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="byte", split=split, workers=1)
    assert len(found.manifest.splits) > 100
    assert tokenmill.verify(tmp_path / "out", source="all", workers=1).ok


@pytest.mark.parametrize(("ending", "documents"), [("txt", "files"), ("txt", "lines"), ("jsonl", "lines")])
def test_very_many_small_files_are_shared_out_and_resumed(tmp_path: Path, ending: str, documents: str) -> None:
    (tmp_path / "corpus").mkdir()
    for number in range(3_000):
        text = '{"text": "%d"}\n' if ending == "jsonl" else "%d\n"
        (tmp_path / f"corpus/{number:04d}.{ending}").write_text(text % number)
    options: dict[str, Any] = {"tokenizer": "byte", "documents": documents}
    told: list[dict[str, Any]] = []

    def watch(event: dict[str, Any]) -> None:
        told.append(event)
        if event["kind"] == "done" and sum(one["kind"] == "done" for one in told) == 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="1 of 3 units are saved"):
        tokenmill.prepare(tmp_path / "corpus", tmp_path / "out", watch=watch, workers=1, **options)
    tokenmill.prepare(tmp_path / "corpus", tmp_path / "out", watch=told.append, workers=1, **options)
    assert [event["trusted"] for event in told if event["kind"] == "resume"] == [1]
    assert sorted(event["unit"] for event in told if event["kind"] == "done") == [0, 1, 2]
    tokenmill.prepare(tmp_path / "corpus", tmp_path / "other", workers=2, **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "other")
    train = tokenmill.open(tmp_path / "out")["train"]
    end = b"\n" if documents == "files" else b""
    assert [bytes(train.document(n)[:-1].astype("u1")) for n in (0, 999, 2_999)] == [
        b"0" + end,
        b"999" + end,
        b"2999" + end,
    ]
