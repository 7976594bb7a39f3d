from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import tree
from tokenmill.build import drawing
from tokenmill.build.build import Manner, build, make_executor
from tokenmill.errors import BuildError, SourceError
from tokenmill.recipe import make_recipe
from tokenmill.sources import reading
from tokenmill.sources.batch import Batch
from tokenmill.storage import Folder
from tokenmill.storage.fs import LocalFileSystem


def test_a_scratch_disk_without_room_for_a_folder_is_done_without(corpus: Path, tmp_path: Path) -> None:
    class Full(LocalFileSystem):
        def mkdir(self, path: str) -> None:
            if path.startswith(str(tmp_path / "fast")):
                raise OSError(errno.ENOSPC, "no space left on device")
            super().mkdir(path)

    recipe = make_recipe({"sources": (str(corpus),), "tokenizer": "byte"}, config=None)
    for name, fs, scratch in (("out", Full(), str(tmp_path / "fast")), ("right", LocalFileSystem(), None)):
        folder = Folder(str(tmp_path / name), fs)
        build(recipe, folder, Manner(hire=partial(make_executor, 1, None), scratch=scratch))
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
    monkeypatch.setattr(drawing, "read_unit", read_unit)
    told: list[dict[str, Any]] = []
    tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="byte", workers=1, watch=told.append)
    first = next(event for event in told if event["kind"] == "parity")
    assert first["documents"] < right.manifest.parity["documents"]
    assert tree(tmp_path / "out") == tree(tmp_path / "right")


def test_a_source_that_can_be_read_now_and_then_only_is_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_unit(*arguments: Any, **options: Any) -> Iterator[Batch]:
        raise SourceError("cannot read it: Input/output error", hint="")

    monkeypatch.setattr(drawing, "read_unit", read_unit)
    with pytest.raises(BuildError, match="can be read now and then only"):
        tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="byte", workers=1)
    monkeypatch.undo()
    assert not tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="byte", workers=1).already_complete
