"""Killed anywhere, an export or import goes on with the same command, and ends with the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made import EOT, FEW, OPTIONS, make_dataset, quick_folder

import tokenmill
from conftest import leftovers, tree
from tokenmill.errors import Interrupted
from tokenmill.storage.output import DirectOutput

KILLED = """
import os, sys
import tokenmill
from tokenmill.storage.filesystem import LocalFileSystem as fs
left = int(sys.argv[1])
def counted(function):
    def call(*arguments):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        return function(*arguments)
    return call
for name in ("create", "write", "fsync", "link", "unlink", "fsync_folder", "rename"):
    setattr(fs, name, counted(getattr(fs, name)))
exec(sys.argv[2])
"""


def run_killed(after: int, code: str) -> int:
    """Run it in a process that is killed at an operation on files; gives its exit code."""
    return subprocess.run([sys.executable, "-c", KILLED, str(after), code], check=False).returncode


@pytest.mark.parametrize("what", ["export", "import"])
def test_killed_at_any_operation_it_goes_on_to_the_same_bytes(what: str) -> None:
    with quick_folder() as work:
        make_dataset(work, FEW)
        tokenmill.export(work / "dataset", work / "olmo", to="olmo", **OPTIONS["olmo"])
        code = {
            "export": f"tokenmill.export({str(work / 'dataset')!r}, OUT, to='olmo', shard_size=7, workers=2)",
            "import": f"tokenmill.import_({str(work / 'olmo')!r}, OUT, layout='olmo', eot_id={EOT}, workers=2)",
        }[what]
        exec(code.replace("OUT", repr(str(work / "whole"))))
        for after in (1, 5, 12, 20, 31, 44, 60):
            out = str(work / f"killed-{after}")
            assert run_killed(after, code.replace("OUT", repr(out))) in (-signal.SIGKILL, 0)
            exec(code.replace("OUT", repr(out)))
            assert tree(out) == tree(work / "whole")
            assert not leftovers(out)


def test_what_is_done_is_kept_and_what_is_damaged_is_written_again(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, FEW)
    tokenmill.export(dataset, tmp_path / "out", to="llmc", shard_size=5)
    whole = tree(tmp_path / "out")
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in whole}
    damaged = tmp_path / "out/train_000001.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    (tmp_path / "out/train_000002.bin").unlink()
    again = tokenmill.export(dataset, tmp_path / "out", to="llmc", shard_size=5)
    assert not again.already_complete
    assert tree(tmp_path / "out") == whole
    kept = [name for name in whole if (tmp_path / "out" / name).stat().st_mtime_ns == times[name]]
    assert sorted(set(whole) - set(kept)) == ["train_000001.bin", "train_000002.bin"]
    assert tokenmill.export(dataset, tmp_path / "out", to="llmc", shard_size=5).already_complete


def test_an_imported_dataset_is_mended_by_the_same_command(tmp_path: Path) -> None:
    make_dataset(tmp_path, FEW)
    (tmp_path / "dataset/train/00000.bin").write_bytes(b"nonsense")
    assert not tokenmill.verify(tmp_path / "dataset").ok
    tokenmill.import_(tmp_path / "raw", tmp_path / "dataset", layout="nanogpt", dtype="uint16", eot_id=EOT)
    assert tokenmill.verify(tmp_path / "dataset").ok


def test_stopped_by_the_user_it_leaves_no_temp_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_dataset(tmp_path, FEW)
    write = DirectOutput.write

    def interrupt(self: DirectOutput, data: bytes | memoryview) -> int:
        if self.name == "train_000002.bin":
            os.kill(os.getpid(), signal.SIGINT)
        return write(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(DirectOutput, "write", interrupt)
        with pytest.raises((Interrupted, KeyboardInterrupt)):
            tokenmill.export(dataset, tmp_path / "out", to="llmc", shard_size=5, workers=1)
    assert not leftovers(tmp_path)
    assert not (tmp_path / "out/.build/lock").exists()
    tokenmill.export(dataset, tmp_path / "out", to="llmc", shard_size=5)
    tokenmill.export(dataset, tmp_path / "undisturbed", to="llmc", shard_size=5)
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_an_error_of_one_part_stops_the_others_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_dataset(tmp_path, FEW)

    def fail(self: DirectOutput, data: bytes | memoryview) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(DirectOutput, "write", fail)
        with pytest.raises((OSError, tokenmill.TokenmillError)):
            tokenmill.export(dataset, tmp_path / "out", to="llmc", shard_size=5)
    assert not leftovers(tmp_path)
    tokenmill.export(dataset, tmp_path / "out", to="llmc", shard_size=5)


def test_scratch_first_gives_the_same_bytes_and_is_left_empty(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, FEW)
    tokenmill.export(dataset, tmp_path / "out", to="nanogpt")
    tokenmill.export(dataset, tmp_path / "far", to="nanogpt", scratch=tmp_path / "scratch")
    assert tree(tmp_path / "far") == tree(tmp_path / "out")
    assert not list((tmp_path / "scratch").rglob("*"))
