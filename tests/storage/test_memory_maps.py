"""Maps of plain files, digests from maps, and refusal of files that would block."""

from __future__ import annotations

import errno
import gc
import hashlib
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tokenmill.errors import StorageError
from tokenmill.storage import memory_maps
from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.storage.memory_maps import Map, fast_digest, find_maps, map_file, open_plain


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a pipe": lambda path: (os.mkfifo(f"{path}.pipe"), os.symlink(f"{path}.pipe", path)),
    "device": lambda path: os.symlink("/dev/zero", path),
    "folder": os.mkdir,
    "socket": _make_socket,
}


@pytest.fixture
def seconds() -> Iterator[None]:
    """Some seconds for a test that might wait for ever."""

    def end(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.usefixtures("seconds")
def test_what_is_no_plain_file_is_an_error_at_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ODD[kind](Path("odd"))
    for attempt in (lambda: map_file("odd", np.uint8), lambda: open_plain("odd")):
        with pytest.raises(OSError):
            attempt()


def test_a_file_that_a_link_leads_to_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"abc")
    os.symlink(tmp_path / "there", tmp_path / "here")
    assert map_file(str(tmp_path / "here"), np.uint8).tobytes() == b"abc"
    with open(tmp_path / "here", "rb", opener=open_plain) as file:
        assert file.read() == b"abc"


@pytest.mark.parametrize("size", [0, 1, 4096, (16 << 20) - 1, (16 << 20) + 5])
def test_a_digest_from_a_map_is_the_digest_of_the_bytes(tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    (tmp_path / "file").write_bytes(content)
    found = fast_digest(Folder(str(tmp_path)), "file")
    assert (found.bytes, found.sha256) == (size, hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("size", [0, 5000])
def test_the_caller_sees_the_bytes_that_were_hashed(tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(b"x" * size)
    seen: list[bytes] = []
    found = fast_digest(Folder(str(tmp_path)), "file", lambda view: seen.append(bytes(view)))
    assert (found.bytes, seen) == (size, [b"x" * size])


def test_a_file_system_without_maps_is_read(tmp_path: Path) -> None:
    class NoMaps(LocalFileSystem):
        def map(self, fd: int) -> mmap.mmap:
            raise OSError(errno.ENODEV, "it cannot be mapped")

    (tmp_path / "file").write_bytes(b"abc")
    assert fast_digest(Folder(str(tmp_path), NoMaps()), "file") == fast_digest(Folder(str(tmp_path)), "file")


def test_a_digest_of_a_file_that_does_not_exist_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="file"):
        fast_digest(Folder(str(tmp_path)), "file")


def test_any_number_of_items_from_any_byte_is_mapped(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    np.arange(5000, dtype=np.uint16).tofile(path)
    assert map_file(path, np.uint16).tolist() == list(range(5000))
    assert map_file(path, np.uint16, offset=9000, count=3).tolist() == [4500, 4501, 4502]
    assert map_file(path, np.uint16, offset=10_000).tolist() == []
    for given in ({"offset": 1}, {"offset": 10_001}, {"count": 5001}):
        with pytest.raises(ValueError, match="10000 bytes"):
            map_file(path, np.uint16, **given)


def test_a_map_is_read_only_and_ends_with_its_last_array(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    gc.collect()
    before = Map.num_live
    found = map_file(str(tmp_path / "file"), np.uint8)
    part = found[1:]
    assert not found.flags.writeable
    assert find_maps([found, part, np.zeros(1)]) == find_maps([found]) * 2
    del found
    assert (Map.num_live, part.tobytes()) == (before + 1, b"bc")
    del part
    assert Map.num_live == before


def test_a_map_that_is_left_until_the_interpreter_ends_says_nothing(tmp_path: Path) -> None:
    """It is unmapped when the names of the module are gone."""
    (tmp_path / "file").write_bytes(b"abc")
    code = (
        "from tokenmill.storage import memory_maps; memory_maps.kept = memory_maps, memory_maps.map_file('file', 'u1')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("", "")


def test_anonymous_memory_is_freed_with_its_last_descriptor_and_map() -> None:
    lengths, tokens = np.array([2, 1], np.int64), np.array([7, 8, 9], np.uint16)
    fd = memory_maps.write_anonymous([lengths, tokens, tokens[:0]])
    inode = os.fstat(fd).st_ino
    assert os.fstat(fd).st_nlink == 0
    data = memory_maps.map_anonymous(fd)
    os.close(fd)
    assert data[:16].view(np.int64).tolist() == [2, 1]
    assert data[16:].view(np.uint16).tolist() == [7, 8, 9]
    assert not data.flags.writeable
    maps = Path("/proc/self/maps")
    assert f" {inode} " in maps.read_text()
    del data
    assert f" {inode} " not in maps.read_text()
