"""What cannot be done is refused before anything is written, with the reason and the way out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import EOT, FEW, make_dataset

import tokenmill
from conftest import tree, write_parquet
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import DatasetError, DiskFullError, LockedError, OutputError, RecipeError
from tokenmill.formats.base import parse_format
from tokenmill.formats.resumable import start_over
from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import locked


@pytest.fixture
def few(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path, FEW)


def refused(kind: type[Exception], match: str, out: Path, *arguments: Any, **options: Any) -> None:
    with pytest.raises(kind, match=match):
        tokenmill.export(*arguments, out, **options)
    assert not out.exists()


def test_a_vocabulary_that_does_not_fit(tmp_path: Path) -> None:
    wide = make_dataset(tmp_path, {"train": [[70_000]]}, dtype="uint32")
    refused(RecipeError, "uint16", tmp_path / "out", wide, to="nanogpt")
    refused(RecipeError, "uint16", tmp_path / "out", wide, to="templar", seq_len=1, templar_compat=True)


@pytest.mark.parametrize("layout", ["nanogpt", "llmc", "templar", "olmo"])
def test_documents_without_an_end_of_text(tmp_path: Path, layout: str) -> None:
    write_parquet(tmp_path / "a.parquet", ["some text", "more"])
    tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "data", eot="none", workers=1)
    refused(RecipeError, "end of text", tmp_path / "out", tmp_path / "data", to=layout)


def test_shards_that_readers_cannot_seek_in(few: Dataset, tmp_path: Path) -> None:
    refused(RecipeError, "2 GiB", tmp_path / "out", few, to="llmc", shard_size=2**30)


def test_a_single_shard_has_no_room_for_training_and_validation(tmp_path: Path) -> None:
    alone = make_dataset(tmp_path, {"train": FEW["train"]})
    refused(RecipeError, "first shard", tmp_path / "out", alone, to="llmc")


def test_a_split_that_the_layout_has_no_place_for(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, {**FEW, "test": [[1]]})
    for layout in ("llmc", "templar"):
        refused(RecipeError, "'test'", tmp_path / "out", dataset, to=layout)


@pytest.mark.parametrize(
    ("layout", "options", "match"),
    [
        ("nanogpt", {"seq_len": 4}, "does not apply"),
        ("nanogpt", {"seed": 4}, "shuffled"),
        ("nanogpt", {"order": "random"}, "is unknown"),
        ("nanogpt", {"order": "shuffled", "seed": -1}, "seed is -1"),
        ("templar", {"seq_len": 0}, "positive"),
        ("templar", {"seq_len": 1000}, "no sample"),
        ("llmc", {"shard_size": "many"}, "not a size"),
        ("llmc", {"shard_size": "1B"}, "a size in bytes, not a number of tokens"),
        ("llmc", {"shard_size": "100MB"}, "a size in bytes, not a number of tokens"),
        ("llmc", {"shard_size": 7.5}, "not a whole number of tokens"),
        ("templar", {"shard_size": "1GiB"}, "a size in bytes, not a number of tokens"),
        ("templar", {"seq_len": "2kB"}, "a size in bytes, not a number of tokens"),
        ("llmc", {"name": "../x"}, "cannot begin the name of a file"),
        ("megatron", {"name": "ä"}, "cannot begin the name of a file"),
        ("llmc", {"name": ""}, "cannot begin the name of a file"),
        ("nope", {}, "no layout"),
    ],
)
def test_options_that_make_no_sense(
    few: Dataset, tmp_path: Path, layout: str, options: dict[str, Any], match: str
) -> None:
    with pytest.raises((RecipeError, DatasetError), match=match):
        tokenmill.export(few, tmp_path / "out", to=layout, **options)
    assert not list(tmp_path.glob("out/*.bin"))


@pytest.mark.parametrize("layout", ["catid", "datatrove", "huggingface", "litdata", "llmc", "mds", "olmo", "templar"])
def test_a_shard_size_that_makes_millions_of_files_is_refused_with_their_number(layout: str, tmp_path: Path) -> None:
    many = make_dataset(tmp_path, {"train": [[1] * 3_000_000], "val": [[1]]})
    with pytest.raises(RecipeError, match=r"about 1,500,002 files, more than 1,000,000") as caught:
        tokenmill.export(many, tmp_path / "out", to=layout, shard_size=2)
    assert "4 tokens or more" in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    [
        "templar:seq_len",
        "templar:x=1",
        "templar:seq_len=1,seq_len=2",
        "templar:seq_len=x",
        "templar:shard_size=1B",
        "templar:seq_len=2KiB",
        "llmc:shard_size=100MB",
        "templar:templar_compat=maybe",
        "megatron:name=../x",
        "megatron:name=",
        "nanogpt:seed=-1",
        "nanogpt:seed=²",
        f"nanogpt:seed={1 << 62}",
    ],
)
def test_a_layout_that_is_written_wrongly(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_format(text)


def test_another_request_into_the_same_folder_shows_what_differs(few: Dataset, tmp_path: Path) -> None:
    tokenmill.export(few, tmp_path / "out", to="llmc", shard_size=8)
    with pytest.raises(OutputError, match=r"'shard_size': 8.*'shard_size': 9"):
        tokenmill.export(few, tmp_path / "out", to="llmc", shard_size=9)
    tokenmill.export(few, tmp_path / "out", to="nanogpt", restart=True)
    assert sorted(os.listdir(tmp_path / "out")) == [".build", "train.bin", "val.bin"]


def test_a_transfer_that_still_runs_is_not_started_over_by_another(few: Dataset, tmp_path: Path) -> None:
    tokenmill.export(few, tmp_path / "out", to="nanogpt")
    before = tree(tmp_path / "out")
    with locked(Folder(str(tmp_path / "out"))), pytest.raises(LockedError):
        tokenmill.export(few, tmp_path / "out", to="llmc", restart=True)
    assert tree(tmp_path / "out") == before


def test_who_starts_an_import_over_takes_the_manifest_away_first_and_for_good(few: Dataset, tmp_path: Path) -> None:
    calls: list[str] = []

    class Watched(LocalFileSystem):
        def unlink(self, path: str) -> None:
            super().unlink(path)
            calls.append(os.path.relpath(path, tmp_path / "back"))

        def fsync_folder(self, path: str) -> None:
            super().fsync_folder(path)
            calls.append(f"sync {os.path.relpath(path, tmp_path / 'back')}")

    tokenmill.export(few, tmp_path / "out", to="olmo", shard_size=7)
    tokenmill.import_(tmp_path / "out", tmp_path / "back", layout="olmo", eot_id=EOT)
    start_over(Folder(str(tmp_path / "back"), Watched()))
    removed = [call for call in calls if not call.startswith(".build") and call != "sync .build"]
    manifest = removed.index("dataset.json")
    assert removed[manifest : manifest + 2] == ["dataset.json", "sync ."]
    assert all("/" not in call for call in removed[:manifest])
    assert any(call.startswith("train/") for call in removed[manifest:])
    assert os.listdir(tmp_path / "back") == []


def test_a_folder_that_holds_something_else(few: Dataset, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    for restart in (False, True):
        with pytest.raises(OutputError, match=r"thesis\.txt"):
            tokenmill.export(few, tmp_path / "out", to="nanogpt", restart=restart)
    assert os.listdir(tmp_path / "out") == ["thesis.txt"]


def test_a_disk_that_is_too_small(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFileSystem, "free_bytes", lambda *_: 1000)
    with pytest.raises(DiskFullError, match="missing"):
        tokenmill.export(few, tmp_path / "out", to="nanogpt")
    assert not list(tmp_path.glob("out/*.bin"))


def test_documents_are_not_guessed(few: Dataset, tmp_path: Path) -> None:
    """Neither the file nor the caller says what ends a text."""
    for layout in ("nanogpt", "templar", "llmc"):
        tokenmill.export(few, tmp_path / layout, to=layout, **({"seq_len": 2} if layout == "templar" else {}))
        with pytest.raises(DatasetError, match="where its documents end") as caught:
            tokenmill.import_(tmp_path / layout, tmp_path / "back", layout=layout)
        assert "`eot_id`" in caught.value.hint
        assert not (tmp_path / "back").exists()


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    np.array([3, 60_000, 50256], "<u2").tofile(tmp_path / "x/train.bin")
    with pytest.raises(DatasetError, match="60000"):
        tokenmill.import_(tmp_path / "x", tmp_path / "back", layout="nanogpt", tokenizer="gpt2")
    assert not (tmp_path / "back/dataset.json").exists()


def test_an_end_of_text_that_should_stand_first_and_does_not(tmp_path: Path) -> None:
    tokenmill.export(make_dataset(tmp_path, {"train": [[1, 2], [3]]}), tmp_path / "out", to="datatrove")
    with pytest.raises(DatasetError, match="does not begin every document"):
        tokenmill.import_(tmp_path / "out", tmp_path / "back", layout="datatrove", eot_id=1)


def test_a_nanogpt_split_cannot_go_with_a_budget(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["some text"])
    for options in ({"max_tokens": 5}, {"eot": "none"}, {"documents": "separator:x"}, {"eot": "prepend"}):
        with pytest.raises(RecipeError, match="nanogpt"):
            tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "o", split="nanogpt", workers=1, **options)


def test_an_export_of_other_content_is_refused(tmp_path: Path) -> None:
    source, dataset = tmp_path / "a.txt", tmp_path / "dataset"
    for text in ("ab\ncd\n", "cd\nab\n"):
        source.write_text(text)
        tokenmill.prepare(source, dataset, tokenizer="byte", workers=1, restart=True)
        if text.startswith("ab"):
            tokenmill.export(dataset, tmp_path / "out", to="nanogpt")
    with pytest.raises(OutputError, match="the export of other content"):
        tokenmill.export(dataset, tmp_path / "out", to="nanogpt")
    assert not tokenmill.export(dataset, tmp_path / "out", to="nanogpt", restart=True).already_complete


def test_an_import_of_files_that_changed_is_refused(tmp_path: Path) -> None:
    """Not at one of the few places that a fingerprint is taken from."""
    tokens = np.zeros(100_000, "<u2")
    tokens[999::1000] = 7
    file = tmp_path / "files" / "train.bin"
    file.parent.mkdir()
    tokens.tofile(file)
    options: dict[str, Any] = {"layout": "nanogpt", "eot_id": 7}
    tokenmill.import_(file.parent, tmp_path / "out", **options)
    assert tokenmill.import_(file.parent, tmp_path / "out", **options).already_complete
    before = file.stat().st_mtime_ns
    tokens[5000] = 1
    tokens.tofile(file)
    os.utime(file, ns=(before + 1000, before + 1000))
    with pytest.raises(OutputError, match=r"the import of other content:\n  files: train.bin: was '200000 bytes"):
        tokenmill.import_(file.parent, tmp_path / "out", **options)


def test_an_import_of_splits_that_differ_in_case_alone_is_refused(tmp_path: Path) -> None:
    for name in ("train", "Train"):
        np.array([1, 2, 7], "<u2").tofile(tmp_path / f"{name}.bin")
    if len(list(tmp_path.iterdir())) == 1:
        pytest.skip("this disk has no two names that differ in case alone")
    with pytest.raises(RecipeError, match="'Train' and 'train' differ only in case"):
        tokenmill.import_(tmp_path, tmp_path / "out", layout="nanogpt", eot_id=7)
