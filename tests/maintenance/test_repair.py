from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_verify import EACH, change_token, dataset_files, make_dataset

import tokenmill
from tokenmill.dataset import manifest
from tokenmill.dataset.manifest import Split
from tokenmill.errors import BuildError, DatasetError, SourceChangedError, StorageError, TokenmillError
from tokenmill.storage.local import Folder

Identity = dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("repairing"))


@pytest.fixture(scope="module")
def budgeted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("budgeted"), max_tokens=1111)


@pytest.fixture
def dataset(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "out"))


def identities(path: Path, *, but: set[str]) -> Identity:
    """Inode and time of every file that is healthy: whoever touches it changes one of them."""
    stats = {name: (path / name).stat() for name in dataset_files(path) if name not in but}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def assert_restored(path: Path, original: Path) -> None:
    assert dataset_files(path) == dataset_files(original)
    assert not any((path / name).is_symlink() for name in dataset_files(path))
    assert tokenmill.verify(path, workers=1).ok
    assert list(path.rglob("*.tmp")) == []


@EACH
def test_any_damage_is_repaired_and_what_is_healthy_is_left_alone(
    dataset: Path, original: Path, damage: Callable[[Path, random.Random], set[str]], seed: int
) -> None:
    damaged = damage(dataset, random.Random(seed))
    before = identities(dataset, but=damaged)
    problems = tokenmill.repair(dataset, workers=1)
    assert {problem.file for problem in problems} == damaged
    assert_restored(dataset, original)
    after = identities(dataset, but=damaged)
    assert after == before


def test_a_healthy_dataset_is_not_touched(dataset: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in dataset.rglob("*")}
    assert tokenmill.repair(dataset, workers=1) == ()
    assert {file: file.stat().st_mtime_ns for file in dataset.rglob("*")} == before


def test_what_was_damaged_is_kept_in_quarantine(dataset: Path) -> None:
    change_token(dataset, "train/00002.bin")
    damaged = (dataset / "train/00002.bin").read_bytes()
    tokenmill.repair(dataset, workers=1)
    assert damaged in [file.read_bytes() for file in (dataset / ".build/quarantine").iterdir()]


def test_a_dataset_that_lost_everything_but_its_manifest_is_made_again(dataset: Path, original: Path) -> None:
    for name in ("train", "val", "provenance"):
        shutil.rmtree(dataset / name)
    tokenmill.repair(dataset, workers=1)
    assert_restored(dataset, original)


def spoil(path: Path) -> None:
    change_token(path, manifest.MANIFEST)


def cut(path: Path) -> None:
    os.truncate(path / manifest.MANIFEST, 100)


def empty(path: Path) -> None:
    os.truncate(path / manifest.MANIFEST, 0)


def remove(path: Path) -> None:
    (path / manifest.MANIFEST).unlink()


@pytest.mark.parametrize("damage", [spoil, cut, empty, remove])
def test_a_damaged_manifest_is_restored_and_nothing_else_is_touched(
    dataset: Path, original: Path, damage: Callable[[Path], None]
) -> None:
    damage(dataset)
    before = identities(dataset, but={manifest.MANIFEST})
    (problem,) = tokenmill.repair(dataset, workers=1)
    assert problem.file == manifest.MANIFEST
    assert_restored(dataset, original)
    assert identities(dataset, but={manifest.MANIFEST}) == before


@pytest.mark.parametrize("name", ["train/00002.bin", "train/00002.idx", "val/00001.bin", "provenance/00000.parquet"])
def test_a_manifest_and_another_file_are_restored_together(dataset: Path, original: Path, name: str) -> None:
    spoil(dataset)
    change_token(dataset, name)
    tokenmill.repair(dataset, workers=1)
    assert_restored(dataset, original)


def test_a_damaged_manifest_does_not_hide_a_stray_file(dataset: Path, original: Path) -> None:
    spoil(dataset)
    (dataset / "train/00099.bin").write_bytes(b"stray")
    tokenmill.repair(dataset, workers=1)
    assert_restored(dataset, original)


def test_lost_receipts_are_made_again(dataset: Path, original: Path) -> None:
    change_token(dataset, "train/00002.bin")
    shutil.rmtree(dataset / ".build/receipts")
    tokenmill.repair(dataset, workers=1)
    assert_restored(dataset, original)


def test_a_damaged_receipt_is_made_again(dataset: Path, original: Path) -> None:
    change_token(dataset, "train/00002.bin")
    change_token(dataset, ".build/receipts/000002.json")
    tokenmill.repair(dataset, workers=1)
    assert_restored(dataset, original)


@pytest.mark.parametrize("recipe", [{}, {"max_tokens": 900}])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"torn")])
def test_receipts_alone_are_restored_for_those_who_need_them(
    tmp_path: Path, recipe: dict[str, Any], damage: Callable[[Path], object]
) -> None:
    path = make_dataset(tmp_path, **recipe)
    receipts = sorted((path / ".build/receipts").iterdir())
    before = {receipt.name: receipt.read_bytes() for receipt in receipts}
    assert any(".cut-" in name for name in before) == ("max_tokens" in recipe)
    for receipt in receipts:
        damage(receipt)
        assert tokenmill.verify(path, workers=1).ok
        (problem,) = tokenmill.repair(path, workers=1)
        assert problem.file == f".build/receipts/{receipt.name}"
        assert {name: (path / ".build/receipts" / name).read_bytes() for name in before} == before
        assert tokenmill.repair(path, workers=1) == ()
    assert tokenmill.verify(path, source="all", workers=1).ok


def test_a_lost_tokenizer_is_restored(tmp_path: Path) -> None:
    path = make_dataset(tmp_path, tokenizer="char")
    before = dataset_files(path)
    assert "characters.json" in before
    (path / "characters.json").write_bytes(b"[]")
    change_token(path, "train/00002.bin")
    tokenmill.repair(path, workers=1)
    assert dataset_files(path) == before
    assert tokenmill.verify(path, source="sample", workers=1).ok


@pytest.mark.parametrize("content", [b"[]", None])
def test_a_manifest_and_the_tokenizer_are_restored_together(tmp_path: Path, content: bytes | None) -> None:
    path = make_dataset(tmp_path, tokenizer="char")
    before = dataset_files(path)
    spoil(path)
    (path / "characters.json").unlink()
    if content is None:
        os.mkfifo(path / "characters.json")
    else:
        (path / "characters.json").write_bytes(content)
    tokenmill.repair(path, workers=1)
    assert dataset_files(path) == before


@pytest.mark.parametrize("name", ["train/00002.bin", "val/00001.idx", "provenance/00000.parquet"])
@pytest.mark.parametrize("turn", [os.mkfifo, os.mkdir])
def test_a_manifest_and_a_file_that_became_something_else_are_restored_together(
    dataset: Path, original: Path, name: str, turn: Callable[[Path], None]
) -> None:
    spoil(dataset)
    (dataset / name).unlink()
    turn(dataset / name)
    tokenmill.repair(dataset, workers=1)
    assert_restored(dataset, original)


def test_a_file_in_the_place_of_a_folder_makes_way(dataset: Path, original: Path) -> None:
    shutil.rmtree(dataset / "train")
    (dataset / "train").write_bytes(b"x")
    tokenmill.repair(dataset, workers=1)
    assert_restored(dataset, original)


@pytest.mark.parametrize("name", ["train", "provenance", ".build", ".build/pieces", ".build/receipts"])
def test_what_a_link_leads_to_is_not_repaired_and_nothing_is_touched(dataset: Path, tmp_path: Path, name: str) -> None:
    shutil.move(dataset / name, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", dataset / name)
    assert tokenmill.repair(dataset, workers=1) == (), "nothing is wrong with it"
    (tmp_path / "elsewhere/letter").write_bytes(b"a stranger's")
    change_token(dataset, "val/00001.bin")
    before = {file: file.lstat() for file in tmp_path.rglob("*")}
    with pytest.raises(StorageError, match=rf"{re.escape(name)} is a link") as caught:
        tokenmill.repair(dataset, workers=1)
    assert f"replace {Path(name).name} by the folder itself" in str(caught.value.hint)
    after = {file: file.lstat() for file in tmp_path.rglob("*")}
    assert [(f, s.st_ino, s.st_mtime_ns) for f, s in after.items()] == [
        (f, s.st_ino, s.st_mtime_ns) for f, s in before.items()
    ]


def test_a_split_on_another_disk_is_read_verified_and_repaired_once_it_is_no_link(
    dataset: Path, original: Path, tmp_path: Path
) -> None:
    shutil.move(dataset / "train", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", dataset / "train")
    assert tokenmill.verify(dataset, workers=1).ok
    assert tokenmill.repair(dataset, workers=1) == ()
    assert len(tokenmill.open(dataset)["train"].document(0))
    change_token(dataset, "train/00002.bin")
    (dataset / "train").unlink()
    shutil.move(tmp_path / "elsewhere", dataset / "train")
    tokenmill.repair(dataset, workers=1)
    assert_restored(dataset, original)


@pytest.mark.parametrize("name", ["plan.json", "job.json"])
def test_a_damaged_build_folder_is_an_error_with_a_hint(dataset: Path, name: str) -> None:
    change_token(dataset, "train/00002.bin")
    change_token(dataset, f".build/{name}")
    with pytest.raises(DatasetError, match=name) as caught:
        tokenmill.repair(dataset, workers=1)
    assert "prepare it again" in caught.value.hint


def test_something_strange_among_the_pieces_is_no_obstacle(dataset: Path, original: Path) -> None:
    change_token(dataset, "train/00002.bin")
    (dataset / ".build/pieces/strange").mkdir()
    tokenmill.repair(dataset, workers=1)
    assert_restored(dataset, original)


def test_the_dataset_of_a_token_budget_has_a_unit_that_was_cut(budgeted: Path) -> None:
    assert len(list((budgeted / ".build/receipts").glob("*.cut-*.json"))) == 1
    assert manifest.load_manifest(Folder(str(budgeted))).tokens == 1111


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_the_dataset_of_a_token_budget_is_repaired(budgeted: Path, tmp_path: Path, which: str, split: str) -> None:
    path = Path(shutil.copytree(budgeted, tmp_path / "out"))
    shards = manifest.load_manifest(Folder(str(path))).splits[split].shards
    name = f"{shards[0 if which == 'first' else -1].name}.bin"
    change_token(path, name)
    before = identities(path, but={name})
    tokenmill.repair(path, workers=1)
    assert_restored(path, budgeted)
    assert identities(path, but={name}) == before


def test_the_manifest_of_a_token_budget_is_restored(budgeted: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(budgeted, tmp_path / "out"))
    spoil(path)
    tokenmill.repair(path, workers=1)
    assert_restored(path, budgeted)


@pytest.mark.parametrize("receipts", ["*.cut-*.json", "000000.json", "*.json"])
def test_the_dataset_of_a_token_budget_is_repaired_without_its_receipts(
    budgeted: Path, tmp_path: Path, receipts: str
) -> None:
    path = Path(shutil.copytree(budgeted, tmp_path / "out"))
    change_token(path, "train/00000.bin")
    for file in list((path / ".build/receipts").glob(receipts)):
        file.unlink()
    tokenmill.repair(path, workers=1)
    assert_restored(path, budgeted)


def test_a_damaged_dataset_without_its_build_folder_is_an_error_with_a_hint(dataset: Path) -> None:
    shutil.rmtree(dataset / ".build")
    change_token(dataset, "train/00002.bin")
    before = dataset_files(dataset)
    with pytest.raises(DatasetError, match=r"\.build folder is missing") as caught:
        tokenmill.repair(dataset, workers=1)
    assert "tokenmill pull" in caught.value.hint
    assert "prepare it again" in caught.value.hint
    assert dataset_files(dataset) == before


@pytest.mark.parametrize("name", ["job.json", "plan.json"])
def test_what_is_gone_of_the_build_folder_is_named(dataset: Path, name: str) -> None:
    (dataset / ".build" / name).unlink()
    change_token(dataset, "train/00002.bin")
    with pytest.raises(DatasetError, match=rf": \.build/{name} is missing"):
        tokenmill.repair(dataset, workers=1)


def test_a_source_that_was_touched_since_is_an_error_with_a_hint_that_works(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path)
    os.utime(tmp_path / "a.txt", (0, 0))
    with pytest.raises(SourceChangedError, match="changed since") as verified:
        tokenmill.verify(dataset, source="all", workers=1)
    change_token(dataset, "train/00002.bin")
    with pytest.raises(BuildError, match="changed since") as repaired:
        tokenmill.repair(dataset, workers=1)
    for caught in (verified, repaired):
        assert "update=True" not in caught.value.hint
        assert "put the old file back" in caught.value.hint


def test_a_folder_that_is_no_dataset_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not a dataset"):
        tokenmill.repair(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_repair_that_cannot_read_its_source_is_run_again_once_it_is_back(tmp_path: Path) -> None:
    path = make_dataset(tmp_path)
    before = dataset_files(path)
    change_token(path, "train/00002.bin")
    (tmp_path / "a.txt").rename(tmp_path / "away.txt")
    with pytest.raises(TokenmillError, match=r"a\.txt"):
        tokenmill.repair(path, workers=1)
    gc.collect()  # writers that were given up must not speak up later
    (tmp_path / "away.txt").rename(tmp_path / "a.txt")
    tokenmill.repair(path, workers=1)
    assert dataset_files(path) == before


def test_a_source_that_changed_gives_no_other_dataset(tmp_path: Path) -> None:
    path = make_dataset(tmp_path)
    healthy = {name: data for name, data in dataset_files(path).items() if name != "train/00002.bin"}
    change_token(path, "train/00002.bin")
    stat = (tmp_path / "a.txt").stat()
    text = (tmp_path / "a.txt").read_text()
    (tmp_path / "a.txt").write_text(text.replace("miller", "killer"))
    os.utime(tmp_path / "a.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(TokenmillError, match=r"other bytes|changed"):
        tokenmill.repair(path, workers=1)
    assert {name: data for name, data in dataset_files(path).items() if name in healthy} == healthy
    assert not tokenmill.verify(path, workers=1).ok


def test_a_hostile_manifest_moves_no_file_outside_of_the_dataset(dataset: Path) -> None:
    (dataset.parent / "a-file-of-theirs.txt").write_text("not of this dataset")
    found = manifest.load_manifest(Folder(str(dataset)))
    hostile = replace(found, splits={**found.splits, "..": Split(tokens=0, documents=0, shards=())})
    (dataset / manifest.MANIFEST).write_bytes(manifest.seal_manifest(hostile))
    with contextlib.suppress(TokenmillError):
        tokenmill.repair(dataset, workers=1)
    assert (dataset.parent / "a-file-of-theirs.txt").read_text() == "not of this dataset"
