"""Each system call once: what it does, what it refuses, and its errors as ours."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tokenmill.errors import AccessError, DiskFullError, FileLimitError, StorageError
from tokenmill.storage.filesystem import LOCAL, LocalFileSystem, explained, storage_error, write_all


@pytest.mark.parametrize("how", ["open", "append"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, how: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    held = os.open(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(OSError, match="not a plain file"):
        getattr(LocalFileSystem(), how)(str(tmp_path / "pipe"))
    os.close(held)
    with pytest.raises(OSError):
        getattr(LocalFileSystem(), how)(str(tmp_path / "pipe"))
    os.symlink(tmp_path / "pipe", tmp_path / "link")
    with pytest.raises(OSError, match="symbolic links"):
        getattr(LocalFileSystem(), how)(str(tmp_path / "link"))


@pytest.mark.parametrize(
    ("number", "kind", "hint"),
    [
        (errno.EACCES, AccessError, "rights"),
        (errno.EPERM, AccessError, "rights"),
        (errno.EROFS, AccessError, "mounted read-only"),
        (errno.EFBIG, FileLimitError, "ulimit -f"),
        (errno.ENOSPC, DiskFullError, "free some space"),
        (errno.EMFILE, StorageError, "ulimit -n"),
        (errno.EIO, StorageError, "check the drive"),
    ],
)
def test_each_error_of_the_system_has_a_hint_of_its_own(number: int, kind: type[StorageError], hint: str) -> None:
    error = storage_error(OSError(number, os.strerror(number)), "/some/file")
    assert type(error) is kind
    assert "/some/file" in error.message
    assert hint in error.hint
    assert ("drive" in error.hint) == (number == errno.EIO)


def test_errors_that_the_caller_handles_pass_unchanged() -> None:
    with pytest.raises(FileExistsError), explained("file", but=(FileExistsError,)):
        raise FileExistsError(errno.EEXIST, "it exists")
    with pytest.raises(StorageError, match="file: it exists"), explained("file"):
        raise FileExistsError(errno.EEXIST, "it exists")


class FewBytes(LocalFileSystem):
    """Writes a few bytes of what it is given."""

    def __init__(self, count: int) -> None:
        self.count = count

    def write(self, fd: int, data: memoryview) -> int:
        return super().write(fd, data[: self.count])


def test_every_byte_is_written_however_short_the_writes_are(tmp_path: Path) -> None:
    fs = FewBytes(3)
    fd = fs.create(str(tmp_path / "file"))
    write_all(fs, fd, memoryview(b"some bytes"), "file")
    fs.close(fd)
    assert (tmp_path / "file").read_bytes() == b"some bytes"


def test_a_write_without_progress_is_an_error(tmp_path: Path) -> None:
    fs = FewBytes(0)
    fd = fs.create(str(tmp_path / "file"))
    with pytest.raises(StorageError, match="file: a write made no progress at byte 0"):
        write_all(fs, fd, memoryview(b"some bytes"), "file")
    fs.close(fd)


def test_a_new_file_is_private_and_never_replaces_another(tmp_path: Path) -> None:
    LOCAL.close(LOCAL.create(str(tmp_path / "file")))
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            LOCAL.create(str(tmp_path / name))


def test_a_file_with_a_second_name_is_not_opened_for_appending(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(b"x")
    os.link(tmp_path / "theirs", tmp_path / "log")
    with pytest.raises(OSError) as caught:
        LOCAL.append(str(tmp_path / "log"))
    assert caught.value.errno == errno.EMLINK


def test_a_link_is_described_and_renewed_itself_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    before = (tmp_path / "file").stat().st_mtime_ns
    os.utime(tmp_path / "link", ns=(1, 1), follow_symlinks=False)
    found = LOCAL.stat(str(tmp_path / "link"))
    assert (found.is_file, found.is_folder, found.modified) == (False, False, 1)
    LOCAL.touch(str(tmp_path / "link"))
    assert LOCAL.stat(str(tmp_path / "link")).modified > 1
    assert (tmp_path / "file").stat().st_mtime_ns == before
