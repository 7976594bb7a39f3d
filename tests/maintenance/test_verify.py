from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from tokenmill import records
from tokenmill.build import workspace
from tokenmill.dataset import manifest
from tokenmill.errors import DatasetError, TokenmillError
from tokenmill.maintenance.verify import VerifyReport
from tokenmill.storage.local import Folder
from tokenmill.storage.output import Digest
from tokenmill.units import receipts

FILLER = "the miller turns the same raw grain into the same white flour, day after day after day"


def make_dataset(folder: Path, **recipe: Any) -> Path:
    """A dataset of many units: the pieces of train become shards as they are, those of val are joined."""
    lines = []
    for i in range(24):
        lines += [FILLER, f"n{i}", f"document {i} of the corpus" if i % 4 == 0 else f"k{i}"]
    (folder / "a.txt").write_text("".join(line + "\n" for line in lines))
    fields = {"tokenizer": "byte", "unit_bytes": 256, "split": "val=0.3", **recipe}
    tokenmill.prepare(str(folder / "a.txt"), folder / "out", workers=1, **fields)
    return folder / "out"


def dataset_files(path: Path) -> dict[str, bytes]:
    """Every file of a dataset, but for .build."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if not file.is_dir() and ".build" not in file.parts
    }


def flip(path: Path, chance: random.Random) -> set[str]:
    name = choose(path, chance)
    data = bytearray((path / name).read_bytes())
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    (path / name).write_bytes(data)
    return {name}


def truncate(path: Path, chance: random.Random) -> set[str]:
    name = choose(path, chance)
    os.truncate(path / name, chance.randrange((path / name).stat().st_size))
    return {name}


def extend(path: Path, chance: random.Random) -> set[str]:
    name = choose(path, chance)
    with (path / name).open("ab") as file:
        file.write(chance.randbytes(chance.randint(1, 40)))
    return {name}


def delete(path: Path, chance: random.Random) -> set[str]:
    name = choose(path, chance)
    (path / name).unlink()
    return {name}


def swap(path: Path, chance: random.Random) -> set[str]:
    one, other = choose(path, chance), choose(path, chance)
    while (path / one).read_bytes() == (path / other).read_bytes():
        other = choose(path, chance)
    (path / one).rename(path / "between")
    (path / other).rename(path / one)
    (path / "between").rename(path / other)
    return {one, other}


def stray(path: Path, chance: random.Random) -> set[str]:
    name = chance.choice(["train/00099.bin", "val/00099.idx", "provenance/copy.parquet", "train/notes.txt"])
    (path / name).write_bytes(chance.randbytes(10))
    return {name}


def link(path: Path, chance: random.Random) -> set[str]:
    name = choose(path, chance)
    (path / name).rename(path.parent / "elsewhere")
    (path / name).symlink_to(path.parent / "elsewhere")
    return {name}


DAMAGES: list[Callable[[Path, random.Random], set[str]]] = [flip, truncate, extend, delete, swap, stray, link]
EACH = pytest.mark.parametrize(
    ("damage", "seed"),
    [(damage, seed) for damage in DAMAGES for seed in range(18 if damage is flip else 7)],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)


def choose(path: Path, chance: random.Random) -> str:
    """A file of the dataset; kinds are equally likely, as there are many shards and few others."""
    names = [name for name in dataset_files(path) if name != manifest.MANIFEST]
    kind = chance.choice(["train.bin", "train.idx", "val.bin", "val.idx", "provenance.parquet"])
    folder, _, ending = kind.partition(".")
    return chance.choice([name for name in names if name.startswith(folder) and name.endswith(ending)])


def problem_files(report: VerifyReport) -> set[str]:
    return {problem.file for problem in report.problems}


def change_token(path: Path, name: str) -> None:
    data = bytearray((path / name).read_bytes())
    data[0] ^= 1
    (path / name).write_bytes(data)


def forge(path: Path, split: str, number: int) -> str:
    """Change a shard together with what the manifest says of it."""
    found = manifest.load_manifest(Folder(str(path)))
    shards = list(found.splits[split].shards)
    name = f"{shards[number].name}.bin"
    change_token(path, name)
    shards[number] = replace(shards[number], bin=digest_of(path / name))
    splits = {**found.splits, split: replace(found.splits[split], shards=tuple(shards))}
    (path / manifest.MANIFEST).write_bytes(manifest.seal_manifest(replace(found, splits=splits)))
    return name


def digest_of(file: Path) -> Digest:
    data = file.read_bytes()
    return Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("verifying"))


@pytest.fixture
def dataset(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "out"))


def test_the_dataset_of_these_tests_has_linked_and_joined_shards(original: Path) -> None:
    splits = manifest.load_manifest(Folder(str(original))).splits
    units = len(list((original / ".build/receipts").iterdir()))
    assert len(splits["train"].shards) == units > 5
    assert 1 < len(splits["val"].shards) < units
    assert any(shard.documents > 2 for shard in splits["val"].shards)


def test_a_healthy_dataset_is_ok(original: Path) -> None:
    report = tokenmill.verify(original, workers=1)
    files = dataset_files(original)
    assert report.ok
    assert report.problems == ()
    assert report.files == len(files)
    assert report.bytes_hashed == sum(len(data) for name, data in files.items() if name != manifest.MANIFEST)
    assert (report.path, report.units_checked) == (str(original), 0)


def test_a_dataset_is_verified_without_its_build_folder(dataset: Path) -> None:
    shutil.rmtree(dataset / ".build")
    assert tokenmill.verify(dataset).ok


def test_verifying_writes_nothing(dataset: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in dataset.rglob("*")}
    tokenmill.verify(dataset, workers=1)
    assert {file: file.stat().st_mtime_ns for file in dataset.rglob("*")} == before


@EACH
def test_any_damage_is_found_and_named(
    dataset: Path, damage: Callable[[Path, random.Random], set[str]], seed: int
) -> None:
    damaged = damage(dataset, random.Random(seed))
    report = tokenmill.verify(dataset, workers=1)
    assert not report.ok
    assert problem_files(report) == damaged


def test_every_damaged_file_is_named_and_not_only_the_first(dataset: Path) -> None:
    names = ["train/00000.bin", "train/00003.bin", "val/00001.bin", "provenance/00000.parquet"]
    for name in names:
        change_token(dataset, name)
    assert problem_files(tokenmill.verify(dataset, workers=2)) == set(names)


def test_a_problem_says_what_was_found_and_what_was_expected(dataset: Path) -> None:
    size = (dataset / "train/00000.bin").stat().st_size
    os.truncate(dataset / "train/00000.bin", 3)
    (problem,) = tokenmill.verify(dataset).problems
    assert (problem.file, problem.what) == ("train/00000.bin", f"has 3 bytes, expected {size}")


def test_quick_finds_what_is_truncated_or_missing(dataset: Path) -> None:
    os.truncate(dataset / "train/00000.bin", 4)
    os.truncate(dataset / "val/00000.idx", 4)
    os.truncate(dataset / "provenance/00000.parquet", 4)
    (dataset / "train/00001.idx").unlink()
    report = tokenmill.verify(dataset, quick=True)
    assert problem_files(report) == {
        "train/00000.bin",
        "val/00000.idx",
        "provenance/00000.parquet",
        "train/00001.idx",
    }


def test_quick_does_not_read_tokens(dataset: Path) -> None:
    change_token(dataset, "train/00000.bin")
    report = tokenmill.verify(dataset, quick=True)
    assert report.ok
    assert report.bytes_hashed == 0
    assert problem_files(tokenmill.verify(dataset)) == {"train/00000.bin"}


def test_quick_finds_an_index_that_is_none(dataset: Path) -> None:
    change_token(dataset, "train/00000.idx")
    assert problem_files(tokenmill.verify(dataset, quick=True)) == {"train/00000.idx"}


def test_the_sources_give_the_tokens_of_a_healthy_dataset(original: Path) -> None:
    units = len(list((original / ".build/receipts").iterdir()))
    report = tokenmill.verify(original, source="all", workers=1)
    assert report.ok
    assert report.units_checked == units


@pytest.mark.parametrize("year", [1900, 2200, 4000])
def test_a_dataset_of_a_source_with_a_time_that_cannot_be_is_verified_against_it(tmp_path: Path, year: int) -> None:
    source, seconds = tmp_path / "a.txt", round((year - 1970) * 365.25 * 86400)
    source.write_text("a text\n")
    os.utime(source, (seconds, seconds))
    for workers in (1, 2):
        out = tmp_path / f"out-{workers}"
        tokenmill.prepare(source, out, tokenizer="byte", workers=workers)
        assert tokenmill.verify(out, source="all", workers=1).ok


def test_a_sample_of_the_sources_is_smaller_than_all(original: Path) -> None:
    report = tokenmill.verify(original, source="sample", workers=1)
    assert report.ok
    assert report.units_checked == 8 < len(list((original / ".build/receipts").iterdir()))


@pytest.mark.parametrize(("split", "number"), [("train", 3), ("val", 1)])
def test_a_shard_that_was_changed_together_with_its_digest_is_found_by_the_sources(
    dataset: Path, split: str, number: int
) -> None:
    name = forge(dataset, split, number)
    assert tokenmill.verify(dataset, workers=1).ok
    assert problem_files(tokenmill.verify(dataset, source="all", workers=1)) == {name}


def test_the_sources_of_a_dataset_without_its_build_folder_are_not_known(dataset: Path) -> None:
    shutil.rmtree(dataset / ".build")
    with pytest.raises(DatasetError, match="sources") as caught:
        tokenmill.verify(dataset, source="all")
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 10])
def test_a_damaged_manifest_is_an_error(dataset: Path, content: bytes) -> None:
    (dataset / manifest.MANIFEST).write_bytes(content)
    with pytest.raises(DatasetError, match=r"dataset\.json"):
        tokenmill.verify(dataset)


def test_a_folder_that_is_no_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not a dataset"):
        tokenmill.verify(tmp_path)


@pytest.mark.parametrize(("has_build", "says"), [(True, "tokenmill repair"), (False, "prepare the dataset again")])
def test_a_damaged_manifest_is_an_error_that_says_what_to_do(dataset: Path, has_build: bool, says: str) -> None:
    os.truncate(dataset / manifest.MANIFEST, 100)
    if not has_build:
        shutil.rmtree(dataset / ".build")
    with pytest.raises(DatasetError, match=r"dataset\.json") as caught:
        tokenmill.verify(dataset, workers=1)
    assert says in caught.value.hint


def test_a_plan_of_a_stranger_is_a_typed_error_for_the_check_of_the_sources(dataset: Path) -> None:
    plan = workspace.load_plan(Folder(str(dataset)))
    sources = tuple(replace(source, text={"column": "nope"}, kind="parquet") for source in plan.sources)
    (dataset / receipts.PLAN).write_bytes(records.seal(replace(plan, sources=sources)))
    with pytest.raises(TokenmillError):
        tokenmill.verify(dataset, source="all", workers=1)


def test_a_split_that_the_receipts_do_not_know_is_a_problem(dataset: Path) -> None:
    job = workspace.load_build_record(Folder(str(dataset)))
    other = replace(job.work, split={"test": 0.9}, split_names=("train", "test"))
    (dataset / workspace.JOB).write_bytes(records.seal(replace(job, work=other)))
    problems = tokenmill.verify(dataset, source="all", workers=1).problems
    assert "test" in {problem.file for problem in problems}
    assert not any(problem.file.startswith("test/") for problem in problems)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ('{"text":"the last one"}\n', '{"text":null          }\n'),
        ('{"text":"one"}\n{"text":"two"}\n', '{"text":"onetwo"            }\n'),
    ],
    ids=["fewer documents", "the same tokens in other documents"],
)
def test_a_source_that_gives_other_documents_now_is_a_problem_whatever_its_size_and_time_say(
    tmp_path: Path, before: str, now: str
) -> None:
    source, first = tmp_path / "a.jsonl", '{"text":"the first one"}\n'
    source.write_text(first + before)
    time = source.stat().st_mtime_ns
    tokenmill.prepare(source, tmp_path / "out", tokenizer="byte", eot="none", workers=1)
    assert tokenmill.verify(tmp_path / "out", source="all", workers=1).ok
    source.write_text(first + now)
    os.utime(source, ns=(time, time))
    report = tokenmill.verify(tmp_path / "out", source="all", workers=1)
    assert problem_files(report) == {"train/00000.bin"}
