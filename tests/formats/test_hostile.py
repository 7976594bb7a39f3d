"""Files that are cut off, mixed up, missing or nonsense: an import ends with a typed error and leaves nothing behind.

What no layout could notice (other ids in a raw file) may be imported; the dataset verifies then.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made import EOT, OPTIONS, make_dataset, quick_folder

import tokenmill
from tokenmill.errors import TokenmillError

DOCUMENTS = {"train": [[1, 2, 3], [4], [5, 6, 7, 8], list(range(10, 90)), [1]], "val": [[2, 2], [3]]}
TOKENS = (".bin", ".ds", ".mds", ".npy", ".parquet")
BESIDE = ("tokens.bin", "sample_ids.bin")  # of Templar's; its shards have the same tokens
SIZES = {
    **OPTIONS,
    "catid": {"shard_size": 9},
    "huggingface": {"shard_size": 9},
    "litdata": {"shard_size": 9},
    "mds": {"shard_size": 100},
}
# Layouts that say of themselves how many files there are, or in which a file tells of another.
TELLING = ("catid", "datatrove", "huggingface", "litdata", "llmc", "mds", "megatron", "olmo", "templar")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(len(data)).randrange(len(data))] ^= 64
    path.write_bytes(data)


def replace(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.fixture(scope="module")
def exports() -> Iterator[Path]:
    with quick_folder() as work:
        dataset = make_dataset(work, DOCUMENTS)
        for layout, options in SIZES.items():
            tokenmill.export(dataset, work / layout, to=layout, workers=1, **options)
            shutil.rmtree(work / layout / ".build")
        yield work


def files_of(folder: Path) -> list[Path]:
    """Two of every kind: the first of a kind, and the last one."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            kinds.setdefault(path.suffix, []).append(path.relative_to(folder))
    return [path for found in kinds.values() for path in {found[0], found[-1]}]


def try_import(path: Path, layout: str) -> bool:
    """Whether it is imported; if it is not, nothing may be left."""
    out = path.parent / "imported"
    try:
        tokenmill.import_(path, out, layout=layout, eot_id=EOT, workers=1)
    except TokenmillError as error:
        assert error.hint
        assert not out.exists()
        return False
    assert tokenmill.verify(out).ok
    shutil.rmtree(out)
    return True


@pytest.mark.parametrize("layout", sorted(SIZES))
def test_damaged_files_are_imported_as_they_are_or_refused_whole(exports: Path, layout: str) -> None:
    damages: tuple[Callable[[Path], None], ...] = (cut, halve, empty, garble, flip, replace)
    for name in files_of(exports / layout):
        for damage in damages:
            shutil.copytree(exports / layout, exports / "hurt")
            damage(exports / "hurt" / name)
            took = try_import(exports / "hurt", layout)
            shutil.rmtree(exports / "hurt")
            assert not took or damage is not empty or name.suffix not in TOKENS or name.name in BESIDE, str(name)


@contextlib.contextmanager
def in_time(seconds: int) -> Iterator[None]:
    """Whoever waits for a pipe waits for ever."""

    def give_up(*_: object) -> None:
        pytest.fail(f"nothing came of it in {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("layout", sorted(SIZES))
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(exports: Path, layout: str) -> None:
    for name in files_of(exports / layout):
        for linked in (False, True):
            shutil.copytree(exports / layout, exports / "hurt")
            (exports / "hurt" / name).unlink()
            os.mkfifo(exports / "pipe" if linked else exports / "hurt" / name)
            if linked:
                (exports / "hurt" / name).symlink_to(exports / "pipe")
            with in_time(60):
                took = try_import(exports / "hurt", layout)
                with contextlib.suppress(TokenmillError):
                    opened = tokenmill.open(exports / "hurt")
                    list(opened["train"].blocks(0, opened["train"].num_tokens))
            assert not took or name.suffix not in TOKENS or name.name in BESIDE, str(name)
            shutil.rmtree(exports / "hurt")
            if linked:
                (exports / "pipe").unlink()


@pytest.mark.parametrize("layout", TELLING)
def test_a_file_that_is_missing_is_missed(exports: Path, layout: str) -> None:
    shutil.copytree(exports / layout, exports / "hurt")
    found = [path for path in sorted((exports / "hurt").rglob("*")) if "train" in str(path) and path.is_file()]
    tokens = [path for path in found if path.suffix in TOKENS]
    (tokens[1] if layout in ("llmc", "templar") else tokens[0]).unlink()
    assert not try_import(exports / "hurt", layout)
    shutil.rmtree(exports / "hurt")


@pytest.mark.parametrize("layout", ["llmc", "templar"])
def test_a_short_shard_that_is_not_the_last_is_told(exports: Path, tmp_path: Path, layout: str) -> None:
    shutil.copytree(exports / layout, tmp_path / "swapped")
    first, *_, last = sorted((tmp_path / "swapped").glob("train_*"))
    assert not short_notes(tmp_path / "swapped", tmp_path / "right", layout)
    for old, new in ((first, tmp_path / "held"), (last, first), (tmp_path / "held", last)):
        old.rename(new)
    assert first.name in short_notes(tmp_path / "swapped", tmp_path / "wrong", layout)


def short_notes(path: Path, out: Path, layout: str) -> str:
    found = tokenmill.import_(path, out, layout=layout, eot_id=EOT, workers=1)
    return "".join(note for note in found.notes if "in order" in note)


@pytest.mark.parametrize("layout", ["catid", "litdata", "mds"])
def test_a_split_that_has_lost_its_index_is_missed(exports: Path, layout: str) -> None:
    shutil.copytree(exports / layout, exports / "hurt")
    next((exports / "hurt" / "val").glob("index.*")).unlink()
    assert not try_import(exports / "hurt", layout)
    shutil.rmtree(exports / "hurt")


def test_a_folder_that_was_there_stays(exports: Path, tmp_path: Path) -> None:
    shutil.copytree(exports / "mds", tmp_path / "hurt")
    flip(next((tmp_path / "hurt/train").glob("*.mds")))
    (tmp_path / "out").mkdir()
    with pytest.raises(tokenmill.TokenmillError, match="sha256"):
        tokenmill.import_(tmp_path / "hurt", tmp_path / "out", layout="mds", eot_id=EOT)
    assert list((tmp_path / "out").iterdir()) == []
