"""What this user may not read or write is said as that, and not as a damaged file or a broken drive."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tokenmill as library
from tokenmill.cli import commands
from tokenmill.errors import AccessError

NOBODY = 65_534
OPEN_TO_ALL = all(folder.stat().st_mode & 0o005 == 0o005 for folder in Path(library.__file__).parents)
pytestmark = pytest.mark.skipif(
    os.geteuid() == 0 and not OPEN_TO_ALL, reason="another user cannot enter the folder of this checkout"
)
Run = Callable[..., tuple[int, str]]


@contextlib.contextmanager
def as_stranger() -> Iterator[None]:
    """Be a user without rights. Who is none of root already has none to give up."""
    if os.geteuid():
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that others may enter: those of pytest are for their owner alone."""
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-rights-"))
    folder.chmod(0o755)
    (folder / "in").mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / "in" / name).write_text("a line of text\n" * 50)
    library.plan(folder / "in")  # what Python loads for it, a stranger may not be able to
    yield folder
    for found in [*folder.rglob("*"), folder]:
        if not found.is_symlink():
            with contextlib.suppress(OSError):
                found.chmod(0o755)
    shutil.rmtree(folder)


@pytest.fixture
def data(place: Path) -> Path:
    library.prepare(place / "in", place / "data", tokenizer="byte", workers=1)
    return place / "data"


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*line: object) -> tuple[int, str]:
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", ["tokenmill", *map(str, line)])
        capsys.readouterr()
        with as_stranger():
            code = commands.run()
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def forbid(path: Path, mode: int = 0) -> None:
    """Take the rights of a file or folder away from a stranger, and from its owner unless that is root."""
    path.chmod(mode)


def check(said: str, path: Path, reason: str = "Permission denied") -> None:
    assert f"{path}" in said
    assert reason.lower() in said.lower()
    assert "hint: give this user the rights to it" in said
    assert "drive" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "line",
    [
        ("prepare", "in", "-o", "closed/new", "--tokenizer", "byte", "-j", "1"),
        ("export", "data", "closed/new", "--to", "nanogpt"),
        ("import", "tokens", "-o", "closed/new", "--from", "nanogpt", "--eot-id", "256"),
        ("prepare", "in", "-o", "data", "--tokenizer", "byte", "--restart", "-j", "1"),
        ("prepare", "in", "-o", "open/new", "--scratch", "closed", "--tokenizer", "byte", "-j", "1"),
    ],
    ids=lambda line: f"{line[0]} {line[3] if line[0] == 'prepare' else ''}",
)
def test_an_output_that_may_not_be_written(place: Path, data: Path, run: Run, line: tuple[str, ...]) -> None:
    library.export(data, place / "tokens", to="nanogpt")
    (place / "closed").mkdir()
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    for folder in (place / "closed", *(path for path in [data, *data.rglob("*")] if path.is_dir())):
        forbid(folder, 0o555)
    code, said = run(*line)
    assert code == 1, said
    check(said, place / ("data" if "--restart" in line else "closed"))


def test_a_source_that_may_not_be_read(place: Path, run: Run) -> None:
    (place / "out").mkdir()
    (place / "out").chmod(0o777)
    forbid(place / "in/b.txt")
    for number, source in enumerate(("in", "in/b.txt")):
        code, said = run("prepare", source, "-o", f"out/{number}", "--tokenizer", "byte", "-j", "1")
        assert code == 1, said
        check(said, place / "in/b.txt")


@pytest.mark.parametrize("name", ["b.jsonl", "b.parquet", "b.arrow", "b.jsonl.gz"])
def test_a_source_of_any_kind_that_may_not_be_read(place: Path, run: Run, name: str) -> None:
    (place / "in" / name).write_bytes(b"anything")
    forbid(place / "in" / name)
    code, said = run("plan", f"in/{name}")
    assert code == 1, said
    check(said, place / "in" / name)


@pytest.mark.parametrize("mode", [0, 0o311, 0o644])
def test_a_folder_of_sources_that_may_not_be_looked_into(place: Path, run: Run, mode: int) -> None:
    """With a right to list and none to enter, its files are known and cannot be asked for."""
    (place / "in/sub").mkdir()
    (place / "in/sub/c.txt").write_text("hidden\n")
    forbid(place / "in/sub", mode)
    for source in ("in", "in/**/*.txt"):
        code, said = run("plan", source)
        assert code == 1, said
        check(said, place / "in/sub")


@pytest.mark.parametrize("name", ["", "dataset.json", "train", "train/00000.bin", "train/00000.idx"])
def test_a_dataset_that_may_not_be_read(place: Path, data: Path, run: Run, name: str) -> None:
    forbid(data / name)
    for line in (("verify", "data"), ("inspect", "data"), ("bench", "data", "--seconds", "0.01", "--seq-len", "8")):
        if not (line[0] == "bench" and name.endswith(".idx")):  # it needs none
            code, said = run(*line)
            assert code == 1, said
            check(said, data / name)
    with as_stranger(), pytest.raises(AccessError) as error:
        library.open(data)["train"].document(0)
    assert "give this user the rights" in error.value.hint


def test_token_files_that_may_not_be_read(place: Path, data: Path, run: Run) -> None:
    library.export(data, place / "tokens", to="nanogpt")
    forbid(place / "tokens/train.bin")
    code, said = run("inspect", "tokens")
    assert code != 0, said
    check(said, place / "tokens/train.bin")
    forbid(place / "tokens")
    code, said = run("inspect", "tokens")
    assert code != 0, said
    check(said, place / "tokens")


@pytest.mark.parametrize(
    ("name", "line", "wanted"),
    [
        ("recipe.yaml", ("plan", "--config", "recipe.yaml"), 2),
        ("hosts", ("cluster", "hosts"), 2),
        ("tokenizer.json", ("plan", "in", "--tokenizer", "tokenizer.json"), 2),
        ("sums.json", ("export", "data", "out", "--to", "templar", "--checksums", "sums.json"), 2),
    ],
)
def test_a_file_of_settings_that_may_not_be_read(
    place: Path, data: Path, run: Run, name: str, line: tuple[str, ...], wanted: int
) -> None:
    (place / name).write_text("{}")
    forbid(place / name)
    code, said = run(*line)
    assert code == wanted, said
    check(said, Path(name))


def test_a_stranger_repairs_nothing_and_moves_nothing(place: Path, data: Path, run: Run) -> None:
    before = sorted(map(str, data.rglob("*")))
    os.truncate(data / "train/00000.bin", 4)
    for folder in [data, *(path for path in data.rglob("*") if path.is_dir())]:
        forbid(folder, 0o555)
    code, said = run("repair", "data")
    assert code == 1, said
    check(said, data)
    assert sorted(map(str, data.rglob("*"))) == before
