from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from tokenmill.errors import DiskFullError, StorageError
from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.storage.output import Digest
from tokenmill.storage.scratch import _FULL, RESERVE_BYTES, Fallback, ScratchOutput, make_scratch_folder

DATA = os.urandom(1000)


class FullAfter(LocalFileSystem):
    """A disk with room for so many bytes; a write that crosses the end is a short one first."""

    def __init__(self, room: int, code: int = errno.ENOSPC) -> None:
        self.room = room
        self.code = code

    def write(self, fd: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(self.code, os.strerror(self.code))
        count = super().write(fd, data[: self.room])
        self.room -= count
        return count


class FlipsAByteOnRead(LocalFileSystem):
    def read(self, fd: int, buffer: memoryview) -> int:
        count = super().read(fd, buffer)
        if count:
            buffer[count // 2] ^= 1
        return count


class LosesTheEnd(LocalFileSystem):
    def write(self, fd: int, data: memoryview) -> int:
        super().write(fd, data[:-1])
        return len(data)


def folders(tmp_path: Path, **fs: LocalFileSystem) -> tuple[Folder, Folder]:
    for name in ("scratch", "target"):
        (tmp_path / name).mkdir()
    return tuple(Folder(str(tmp_path / name), fs.get(name, LocalFileSystem())) for name in ("scratch", "target"))


def fill(output: ScratchOutput, *, step: int = 100) -> None:
    for start in range(0, len(DATA), step):
        assert output.write(memoryview(DATA)[start : start + step]) == len(DATA[start : start + step])


def names(tmp_path: Path) -> dict[str, list[str]]:
    """The files that are there, but for the note that the scratch disk was full."""
    found = {name: sorted(os.listdir(tmp_path / name)) for name in ("scratch", "target")}
    return {name: [file for file in files if file != _FULL] for name, files in found.items()}


def test_the_bytes_arrive_and_the_scratch_is_empty(tmp_path: Path) -> None:
    scratch, target = folders(tmp_path)
    output = ScratchOutput(scratch, target, "a.bin")
    fill(output)
    digest = Digest(bytes=len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
    assert target.publish([output]) == {"a.bin": digest}
    assert (tmp_path / "target/a.bin").read_bytes() == DATA
    assert names(tmp_path) == {"scratch": [], "target": ["a.bin"]}


def test_nothing_is_on_the_target_while_the_file_grows(tmp_path: Path) -> None:
    scratch, target = folders(tmp_path)
    output = ScratchOutput(scratch, target, "a.bin")
    fill(output)
    assert names(tmp_path)["target"] == []
    assert len(names(tmp_path)["scratch"]) == 1
    output.discard()


def test_an_empty_file_arrives(tmp_path: Path) -> None:
    scratch, target = folders(tmp_path)
    target.publish([ScratchOutput(scratch, target, "a.bin")])
    assert (tmp_path / "target/a.bin").read_bytes() == b""
    assert names(tmp_path) == {"scratch": [], "target": ["a.bin"]}


@pytest.mark.parametrize("room", [0, 1, 99, 100, 101, 450, 999])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
def test_a_scratch_that_is_full_half_way_gives_the_same_bytes(tmp_path: Path, room: int, code: int) -> None:
    scratch, target = folders(tmp_path, scratch=FullAfter(room, code))
    output = ScratchOutput(scratch, target, "a.bin")
    fill(output)
    assert names(tmp_path)["scratch"] == []
    assert target.publish([output])["a.bin"].sha256 == hashlib.sha256(DATA).hexdigest()
    assert (tmp_path / "target/a.bin").read_bytes() == DATA
    assert names(tmp_path) == {"scratch": [], "target": ["a.bin"]}


def test_a_scratch_of_just_the_right_size_is_enough(tmp_path: Path) -> None:
    scratch, target = folders(tmp_path, scratch=FullAfter(len(DATA)))
    output = ScratchOutput(scratch, target, "a.bin")
    fill(output)
    assert names(tmp_path)["target"] == []
    target.publish([output])
    assert (tmp_path / "target/a.bin").read_bytes() == DATA


@pytest.mark.parametrize("room", [0, 450])
def test_a_target_that_is_full_is_a_typed_error_and_leaves_nothing(tmp_path: Path, room: int) -> None:
    scratch, target = folders(tmp_path, target=FullAfter(room))
    output = ScratchOutput(scratch, target, "a.bin")
    fill(output)
    with pytest.raises(DiskFullError):
        target.publish([output])
    output.discard()
    assert names(tmp_path) == {"scratch": [], "target": []}


@pytest.mark.parametrize("fs", [FlipsAByteOnRead(), LosesTheEnd()], ids=["flips a byte", "loses the end"])
def test_a_target_that_gives_back_other_bytes_publishes_nothing(tmp_path: Path, fs: LocalFileSystem) -> None:
    scratch, target = folders(tmp_path, target=fs)
    output = ScratchOutput(scratch, target, "a.bin")
    fill(output)
    with pytest.raises(StorageError, match="other bytes"):
        target.publish([output])
    assert not (tmp_path / "target/a.bin").exists()
    output.discard()
    assert names(tmp_path) == {"scratch": [], "target": []}


@pytest.mark.parametrize("fs", [FlipsAByteOnRead(), LosesTheEnd()], ids=["flips a byte", "loses the end"])
def test_a_scratch_that_gives_back_other_bytes_publishes_nothing(tmp_path: Path, fs: LocalFileSystem) -> None:
    scratch, target = folders(tmp_path, scratch=fs)
    output = ScratchOutput(scratch, target, "a.bin")
    fill(output)
    with pytest.raises(StorageError):
        target.publish([output])
    output.discard()
    assert names(tmp_path) == {"scratch": [], "target": []}


@pytest.mark.parametrize("room", [450, 10_000], ids=["after the switch", "before it"])
def test_a_discarded_file_leaves_nothing_on_either_disk(tmp_path: Path, room: int) -> None:
    scratch, target = folders(tmp_path, scratch=FullAfter(room))
    output = ScratchOutput(scratch, target, "a.bin")
    fill(output)
    output.discard()
    assert names(tmp_path) == {"scratch": [], "target": []}


class Small(LocalFileSystem):
    """A disk that tells of so much free space, and has none behind it."""

    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self, path: str) -> int:
        return self.free

    def write(self, fd: int, data: memoryview) -> int:
        count = super().write(fd, data)
        self.free -= count
        return count


def test_a_scratch_disk_keeps_its_reserve_and_it_is_said_once(tmp_path: Path) -> None:
    disk = Small(RESERVE_BYTES + (5 << 20))
    scratch, target = folders(tmp_path, scratch=disk)
    said: list[str] = []
    fallback = Fallback(scratch, said.append)
    output = ScratchOutput(scratch, target, "a.bin")
    block = os.urandom(1 << 20)
    for count in range(9):
        output.write(block)
        fallback.check()
        assert bool(said) == (count >= 5)
    assert disk.free >= RESERVE_BYTES
    target.publish([output])
    assert (tmp_path / "target/a.bin").read_bytes() == 9 * block
    assert len(said) == 1
    assert "straight to the output" in said[0]
    assert "full" not in said[0]  # some of it is free, and kept in reserve
    assert "kept in reserve" in said[0]
    make_scratch_folder(scratch)
    assert os.listdir(tmp_path / "scratch") == []
