from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill.errors import DatasetError, DeterminismError, DiskFullError, StorageError
from tokenmill.storage.filesystem import FileStat, LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.storage.memory_maps import fast_digest
from tokenmill.storage.output import EARLY_BYTES, Digest

DATA = bytes(range(256)) * 5
PUBLISHING = ("create", "write", "fsync", "close", "link", "unlink", "fsync_folder")
NAME_IS_TAKEN_BEFORE = ("unlink", "fsync_folder")


class Failing(LocalFileSystem):
    """Raises an error at every call of one operation."""

    def __init__(self, operation: str, code: int) -> None:
        self.operation = operation
        self.code = code

    def __getattribute__(self, name: str) -> Any:
        if name != "close" and name == object.__getattribute__(self, "operation"):
            return object.__getattribute__(self, "fail")
        return object.__getattribute__(self, name)

    def fail(self, *_: Any) -> Any:
        raise OSError(self.code, os.strerror(self.code))

    def close(self, fd: int) -> None:
        super().close(fd)  # an error from close leaves the descriptor closed all the same
        if self.operation == "close":
            self.fail()


class Recording(LocalFileSystem):
    """Writes down what is done, and to which file."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.published: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in PUBLISHING:
            object.__getattribute__(self, "operations").append(name)
        return object.__getattribute__(self, name)

    def link(self, path: str, new: str) -> None:
        self.published.append(os.path.basename(new))
        super().link(path, new)


class ShortWrites(LocalFileSystem):
    def __init__(self) -> None:
        self.writes = 0

    def write(self, fd: int, data: memoryview) -> int:
        self.writes += 1
        return super().write(fd, data[:3])


class NoLinks(LocalFileSystem):
    def __init__(self, code: int = errno.EPERM) -> None:
        self.code = code

    def link(self, path: str, new: str) -> None:
        raise OSError(self.code, os.strerror(self.code))


class LostReplyOfLink(LocalFileSystem):
    def __init__(self, code: int) -> None:
        self.code = code

    def link(self, path: str, new: str) -> None:
        super().link(path, new)
        raise OSError(self.code, os.strerror(self.code))


class LostReplyOfUnlink(LocalFileSystem):
    """The server removed the name, the client asked again and heard that there is none."""

    def unlink(self, path: str) -> None:
        super().unlink(path)
        super().unlink(path)


def digest_of(data: bytes) -> Digest:
    return Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def plain_files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())


def quarantined(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((path / ".build/quarantine").glob("*"))]


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_a_published_file_has_its_bytes_and_the_digest_says_so(tmp_path: Path) -> None:
    assert Folder(str(tmp_path)).write("a.bin", DATA) == digest_of(DATA)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert plain_files(tmp_path) == ["a.bin"]


def test_an_empty_file_can_be_published(tmp_path: Path) -> None:
    assert Folder(str(tmp_path)).write("a.bin", b"") == digest_of(b"")
    assert (tmp_path / "a.bin").read_bytes() == b""


def test_many_writes_are_one_content(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    output = folder.create("a.bin")
    for start in range(0, len(DATA), 100):
        assert output.write(memoryview(DATA)[start : start + 100]) == len(DATA[start : start + 100])
    assert folder.publish([output]) == {"a.bin": digest_of(DATA)}
    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_there_is_nothing_under_the_final_name_before_it_is_published(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    output = folder.create("a.bin")
    output.write(DATA)
    assert not folder.exists("a.bin")
    temp, digest = output.settle()
    assert not folder.exists("a.bin")
    assert (Path(temp).read_bytes(), digest) == (DATA, digest_of(DATA))
    assert Path(temp).parent == tmp_path
    output.discard()


def test_a_discarded_file_leaves_nothing(tmp_path: Path) -> None:
    output = Folder(str(tmp_path)).create("a.bin")
    output.write(DATA)
    assert len(plain_files(tmp_path)) == 1
    output.discard()
    assert plain_files(tmp_path) == []


def test_a_published_file_survives_a_late_discard(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    output = folder.create("a.bin")
    output.write(DATA)
    folder.publish([output])
    output.discard()
    assert plain_files(tmp_path) == ["a.bin"]


def test_publishing_the_same_bytes_again_succeeds_and_leaves_the_file_alone(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write("a.bin", DATA)
    before = (tmp_path / "a.bin").stat()
    assert folder.write("a.bin", DATA, committed=lambda: True) == digest_of(DATA)
    assert (tmp_path / "a.bin").stat().st_ino == before.st_ino
    assert plain_files(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("old", [b"", b"torn", DATA[:-1], DATA[:-1] + b"\x00", DATA + b"\x00"])
def test_a_leftover_with_other_bytes_moves_to_quarantine(tmp_path: Path, old: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(old)
    Folder(str(tmp_path)).write("a.bin", DATA)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert quarantined(tmp_path) == [old]


def test_other_bytes_under_a_receipt_stop_the_build(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write("a.bin", b"first")
    with pytest.raises(DeterminismError, match=r"a\.bin"):
        folder.write("a.bin", b"second", committed=lambda: True)
    assert (tmp_path / "a.bin").read_bytes() == b"first"
    assert plain_files(tmp_path) == ["a.bin"]


def test_files_of_one_name_in_two_folders_do_not_meet_in_quarantine(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    for name in ("train", "val"):
        folder.make(name)
        (tmp_path / name / "00000.bin").write_bytes(name.encode())
        folder.write(f"{name}/00000.bin", DATA)
    assert sorted(quarantined(tmp_path)) == [b"train", b"val"]


def test_short_writes_are_looped(tmp_path: Path) -> None:
    fs = ShortWrites()
    assert Folder(str(tmp_path), fs).write("a.bin", DATA) == digest_of(DATA)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert fs.writes == -(-len(DATA) // 3)


def test_a_write_that_makes_no_progress_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    class Stuck(LocalFileSystem):
        def write(self, fd: int, data: memoryview) -> int:
            return 0

    with pytest.raises(StorageError, match="no progress"):
        Folder(str(tmp_path), Stuck()).write("a.bin", DATA)
    assert plain_files(tmp_path) == []


@pytest.mark.parametrize("operation", PUBLISHING)
@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EIO, StorageError)],
    ids=["ENOSPC", "EDQUOT", "EIO"],
)
def test_an_error_of_any_operation_is_typed_and_leaves_no_half_file(
    tmp_path: Path, operation: str, code: int, kind: type[StorageError]
) -> None:
    with pytest.raises(StorageError) as caught:
        Folder(str(tmp_path), Failing(operation, code)).write("a.bin", DATA)
    assert type(caught.value) is kind
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint
    if operation in NAME_IS_TAKEN_BEFORE:
        assert (tmp_path / "a.bin").read_bytes() == DATA
    else:
        assert not (tmp_path / "a.bin").exists()
    if operation != "unlink":  # nothing can be removed there
        assert [name for name in plain_files(tmp_path) if name != "a.bin"] == []


@pytest.mark.parametrize("operation", PUBLISHING)
def test_after_an_error_the_same_write_succeeds(tmp_path: Path, operation: str) -> None:
    with pytest.raises(StorageError):
        Folder(str(tmp_path), Failing(operation, errno.EIO)).write("a.bin", DATA)
    folder = Folder(str(tmp_path))
    assert folder.write("a.bin", DATA, committed=lambda: True) == digest_of(DATA)
    folder.sweep()
    assert plain_files(tmp_path) == ["a.bin"]


def test_a_failed_fsync_is_never_tried_again(tmp_path: Path) -> None:
    class CountingFsync(LocalFileSystem):
        calls = 0

        def fsync(self, fd: int) -> None:
            self.calls += 1
            raise OSError(errno.EIO, "lost")

    fs = CountingFsync()
    with pytest.raises(StorageError):
        Folder(str(tmp_path), fs).write("a.bin", DATA)
    assert fs.calls == 1


@pytest.mark.parametrize("operation", ["open", "read", "stat"])
def test_an_error_of_reading_is_typed(tmp_path: Path, operation: str) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    with pytest.raises(StorageError):
        Folder(str(tmp_path), Failing(operation, errno.EIO)).read("a.bin")


@pytest.mark.parametrize("operation", ["stat", "open", "read", "rename"])
def test_an_error_while_a_taken_name_is_looked_at_is_typed(tmp_path: Path, operation: str) -> None:
    torn = bytes(len(DATA))
    (tmp_path / "a.bin").write_bytes(torn)
    with pytest.raises(StorageError):
        Folder(str(tmp_path), Failing(operation, errno.EIO)).write("a.bin", DATA)
    assert (tmp_path / "a.bin").read_bytes() == torn


def test_a_name_that_a_file_of_another_size_has_is_taken_without_reading_that(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    os.truncate(tmp_path / "a.bin", 1 << 42)
    Folder(str(tmp_path), Failing("read", errno.EIO)).write("a.bin", DATA)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert [file.stat().st_size for file in (tmp_path / ".build/quarantine").iterdir()] == [1 << 42]


def test_a_file_is_synced_before_it_is_named_and_its_folder_after(tmp_path: Path) -> None:
    fs = Recording()
    output = Folder(str(tmp_path), fs).create("a.bin")
    output.write(DATA)
    output.write(DATA)
    Folder(str(tmp_path), fs).publish([output])
    assert fs.operations == ["create", "write", "write", "fsync", "close", "link", "unlink", "fsync_folder"]


def test_files_that_are_published_together_share_the_fsync_of_their_folder(tmp_path: Path) -> None:
    fs = Recording()
    folder = Folder(str(tmp_path), fs)
    outputs = [folder.create(name) for name in ("a.bin", "a.idx")]
    for output in outputs:
        output.write(DATA)
    folder.publish(outputs)
    one = ["fsync", "close", "link", "unlink"]
    assert fs.operations[4:] == [*one, *one, "fsync_folder"]
    assert fs.published == ["a.bin", "a.idx"]


def test_every_new_parent_folder_is_synced(tmp_path: Path) -> None:
    synced = []

    class Syncs(LocalFileSystem):
        def fsync_folder(self, path: str) -> None:
            synced.append(path)
            super().fsync_folder(path)

    Folder(str(tmp_path / "a/b"), Syncs()).make("c")
    assert (tmp_path / "a/b/c").is_dir()
    assert synced[-3:] == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")]


def test_a_folder_that_stands_is_synced_too_for_its_maker_may_have_been_killed(tmp_path: Path) -> None:
    synced = []

    class Syncs(LocalFileSystem):
        def fsync_folder(self, path: str) -> None:
            synced.append(path)
            if path == str(tmp_path):
                raise PermissionError(errno.EACCES, "not ours")
            super().fsync_folder(path)

    (tmp_path / "out/a").mkdir(parents=True)
    folder = Folder(str(tmp_path / "out"), Syncs())
    folder.make("a")
    assert synced == [folder.path]
    folder.make("a/b")
    assert synced[1:] == [folder.path, folder.at("a")]
    folder.make()
    assert synced[3:] == [str(tmp_path)]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_file_system_without_links_renames(tmp_path: Path, code: int) -> None:
    assert Folder(str(tmp_path), NoLinks(code)).write("a.bin", DATA) == digest_of(DATA)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert plain_files(tmp_path) == ["a.bin"]


def test_a_rename_asks_the_same_questions_as_a_link(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), NoLinks())
    (tmp_path / "a.bin").write_bytes(b"torn")
    with pytest.raises(DeterminismError):
        folder.write("a.bin", DATA, committed=lambda: True)
    folder.write("a.bin", DATA)
    folder.write("a.bin", DATA, committed=lambda: True)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert quarantined(tmp_path) == [b"torn"]
    assert [name for name in plain_files(tmp_path) if name.endswith(".tmp")] == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EEXIST])
def test_a_lost_reply_of_link_is_success(tmp_path: Path, code: int) -> None:
    assert Folder(str(tmp_path), LostReplyOfLink(code)).write("a.bin", DATA) == digest_of(DATA)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert plain_files(tmp_path) == ["a.bin"]


def test_a_temp_file_that_is_gone_already_is_success(tmp_path: Path) -> None:
    assert Folder(str(tmp_path), LostReplyOfUnlink()).write("a.bin", DATA) == digest_of(DATA)
    assert plain_files(tmp_path) == ["a.bin"]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux tells the umask")
def test_the_umask_is_not_touched_for_other_threads_have_it_too(
    tmp_path: Path, umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "umask", lambda mask: pytest.fail(f"it is set to {mask:o}"))
        Folder(str(tmp_path)).write("a.bin", b"x")
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == 0o640


def test_a_temp_file_is_private_and_a_published_file_follows_the_umask(tmp_path: Path, umask: None) -> None:
    folder = Folder(str(tmp_path))
    output = folder.create("a.bin")
    output.write(DATA)
    temp = tmp_path / plain_files(tmp_path)[0]
    assert stat.S_IMODE(temp.stat().st_mode) == 0o600
    folder.publish([output])
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == 0o640


def test_a_temp_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"theirs")
    os.symlink(tmp_path / "outside", tmp_path / "planted")
    with pytest.raises(FileExistsError):
        LocalFileSystem().create(str(tmp_path / "planted"))
    assert (tmp_path / "outside").read_bytes() == b"theirs"


def test_publishing_onto_a_link_writes_nothing_through_it(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"theirs")
    (tmp_path / "out").mkdir()
    os.symlink(tmp_path / "outside", tmp_path / "out/a.bin")
    with pytest.raises(DatasetError, match="not a plain file"):
        Folder(str(tmp_path / "out")).write("a.bin", DATA)
    assert (tmp_path / "outside").read_bytes() == b"theirs"


def test_a_replaced_file_has_its_new_bytes_and_no_temp_file(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.replace("clean.json", b"old")
    folder.replace("clean.json", b"new")
    assert (tmp_path / "clean.json").read_bytes() == b"new"
    assert plain_files(tmp_path) == ["clean.json"]


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "close", "rename"])
def test_a_failed_replacement_keeps_the_old_file(tmp_path: Path, operation: str) -> None:
    (tmp_path / "clean.json").write_bytes(b"old")
    with pytest.raises(DiskFullError):
        Folder(str(tmp_path), Failing(operation, errno.ENOSPC)).replace("clean.json", b"new")
    assert (tmp_path / "clean.json").read_bytes() == b"old"
    assert plain_files(tmp_path) == ["clean.json"]


def test_a_second_name_is_the_same_file(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write("piece.bin", DATA)
    folder.link("piece.bin", "shard.bin", digest_of(DATA))
    folder.link("piece.bin", "shard.bin", digest_of(DATA))
    assert (tmp_path / "shard.bin").stat().st_ino == (tmp_path / "piece.bin").stat().st_ino
    assert plain_files(tmp_path) == ["piece.bin", "shard.bin"]


def test_a_second_name_moves_a_torn_leftover_to_quarantine(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write("piece.bin", DATA)
    (tmp_path / "shard.bin").write_bytes(b"torn")
    folder.link("piece.bin", "shard.bin", digest_of(DATA))
    assert (tmp_path / "shard.bin").read_bytes() == DATA
    assert quarantined(tmp_path) == [b"torn"]


def test_reading_gives_all_bytes_of_a_file_of_many_blocks(tmp_path: Path) -> None:
    data = os.urandom((2 << 20) + 17)
    (tmp_path / "a.bin").write_bytes(data)
    folder = Folder(str(tmp_path))
    assert folder.read("a.bin") == data
    assert folder.digest("a.bin") == folder.digest("a.bin", cold=True) == digest_of(data)


def test_reading_refuses_a_link(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    os.symlink(tmp_path / "a.bin", tmp_path / "link.bin")
    with pytest.raises(DatasetError, match="not a plain file"):
        Folder(str(tmp_path)).read("link.bin")


def test_a_link_that_takes_the_place_of_a_file_after_the_look_at_it_is_not_followed(tmp_path: Path) -> None:
    class SeesAFile(LocalFileSystem):
        def stat(self, path: str) -> FileStat:
            return super().stat(os.path.realpath(path))

    (tmp_path / "a.bin").write_bytes(DATA)
    os.symlink(tmp_path / "a.bin", tmp_path / "link.bin")
    with pytest.raises(StorageError):
        Folder(str(tmp_path), SeesAFile()).read("link.bin")


@pytest.mark.parametrize("after", [b"", b"short", b"long" * 9, os.urandom(3 << 20)])
def test_a_file_that_is_replaced_after_the_look_at_it_is_read_whole(tmp_path: Path, after: bytes) -> None:
    class Replacing(LocalFileSystem):
        def open(self, path: str) -> int:
            Path(path).write_bytes(after)
            return super().open(path)

    (tmp_path / "a.bin").write_bytes(DATA)
    assert Folder(str(tmp_path), Replacing()).read("a.bin") == after


def test_a_read_that_gives_a_part_is_followed_by_another(tmp_path: Path) -> None:
    class Sparing(LocalFileSystem):
        def read(self, fd: int, buffer: memoryview) -> int:
            return super().read(fd, buffer[:3])

    (tmp_path / "a.bin").write_bytes(DATA)
    assert Folder(str(tmp_path), Sparing()).read("a.bin") == DATA


def test_reading_refuses_a_folder_and_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(DatasetError, match="not a plain file"):
            Folder(str(tmp_path)).read(name)


def test_reading_refuses_a_file_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    folder = Folder(str(tmp_path))
    assert folder.read("a.bin", max_bytes=len(DATA)) == DATA
    with pytest.raises(DatasetError, match=f"{len(DATA)} bytes"):
        folder.read("a.bin", max_bytes=len(DATA) - 1)


def test_reading_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="missing") as caught:
        Folder(str(tmp_path)).read("a.bin")
    assert "repair" in caught.value.hint


def test_removing_a_tree_removes_links_and_never_follows_them(tmp_path: Path) -> None:
    for name in ("theirs", "out/train/deep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "theirs/file").write_bytes(DATA)
    (tmp_path / "out/train/deep/00000.bin").write_bytes(DATA)
    os.symlink(tmp_path / "theirs", tmp_path / "out/train/folder")
    os.symlink(tmp_path / "theirs/file", tmp_path / "out/train/deep/file")
    os.symlink("nowhere", tmp_path / "out/train/broken")
    Folder(str(tmp_path / "out")).remove_tree("train")
    assert plain_files(tmp_path) == ["theirs/file"]
    assert not (tmp_path / "out/train").exists()


def test_removing_a_tree_that_is_itself_a_link_does_not_empty_what_it_points_to(tmp_path: Path) -> None:
    for name in ("theirs", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "theirs/file").write_bytes(DATA)
    os.symlink(tmp_path / "theirs", tmp_path / "out/train")
    Folder(str(tmp_path / "out")).remove_tree("train")
    assert (tmp_path / "theirs/file").read_bytes() == DATA
    assert not os.path.lexists(tmp_path / "out/train")


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.remove("a.bin")
    folder.remove_tree("train")
    assert plain_files(tmp_path) == []


def test_sweeping_removes_temp_files_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write("a.bin", DATA)
    folder.create("b.bin").settle()
    assert len(plain_files(tmp_path)) == 2
    folder.sweep()
    assert plain_files(tmp_path) == ["a.bin"]


def test_free_space_is_known_before_the_folder_is_there(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    free = Folder(str(tmp_path / "not/yet")).free_bytes()
    assert 0 < free <= found.f_blocks * found.f_frsize


def test_an_error_of_close_after_reading_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    folder = Folder(str(tmp_path), Failing("close", errno.EIO))
    assert folder.read("x") == DATA
    assert fast_digest(folder, "x") == digest_of(DATA)


def test_a_file_in_the_place_of_a_folder_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(b"x")
    for name in ("train", "train/deep"):
        with pytest.raises(StorageError, match="not a folder"):
            Folder(str(tmp_path)).make(name)


WRITERS: dict[str, Callable[[Folder], object]] = {
    "make": lambda folder: folder.make("train/deep"),
    "create": lambda folder: folder.create("train/new"),
    "write": lambda folder: folder.write("train/new", DATA),
    "replace": lambda folder: folder.replace("train/file", DATA),
    "claim": lambda folder: folder.claim("train/new", DATA),
    "link": lambda folder: folder.link("own", "train/own", Digest(bytes=0, sha256="")),
    "append": lambda folder: folder.append("train/file"),
    "touch": lambda folder: folder.touch("train/file"),
    "quarantine": lambda folder: folder.quarantine("train/file"),
    "remove": lambda folder: folder.remove("train/file"),
    "remove_tree": lambda folder: folder.remove_tree("train/deeper"),
    "remove_all": lambda folder: folder.remove_all(["train/file"]),
    "remove_empty": lambda folder: folder.remove_empty("train/empty"),
    "sweep": lambda folder: folder.sweep("train"),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_nothing_is_changed_through_a_link_to_another_folder(tmp_path: Path, write: Callable[[Folder], object]) -> None:
    for name in ("out", "theirs/empty", "theirs/deeper"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("theirs/file", f"theirs/x.{'0' * 12}.tmp", "theirs/deeper/file", "out/own"):
        (tmp_path / name).write_bytes(b"theirs")
    os.symlink(tmp_path / "theirs", tmp_path / "out/train")
    before = identities(tmp_path / "theirs")
    with pytest.raises(StorageError, match=r"out/train is a link"):
        write(Folder(str(tmp_path / "out")))
    assert identities(tmp_path / "theirs") == before


def identities(path: Path) -> dict[Path, tuple[int, int]]:
    return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in [path, *path.rglob("*")]}


def test_a_file_that_has_another_name_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(DATA)
    (tmp_path / "out").mkdir()
    os.link(tmp_path / "theirs", tmp_path / "out/log")
    fd = Folder(str(tmp_path / "out")).append("log")
    os.write(fd, b"ours")
    os.close(fd)
    assert ((tmp_path / "theirs").read_bytes(), (tmp_path / "out/log").read_bytes()) == (DATA, b"ours")


class Sweeping(LocalFileSystem):
    """Another builder sweeps the temp files away before one of the operations."""

    def __init__(self, operation: str) -> None:
        self.operation = operation

    def link(self, path: str, new: str) -> None:
        self._sweep("link", path)
        super().link(path, new)

    def rename(self, path: str, new: str) -> None:
        self._sweep("rename", path)
        super().rename(path, new)

    def stat(self, path: str) -> FileStat:
        self._sweep("stat", path)
        return super().stat(path)

    def _sweep(self, operation: str, path: str) -> None:
        if operation == self.operation and path.endswith(".tmp"):
            os.unlink(path)


@pytest.mark.parametrize(("operation", "act"), [("link", "write"), ("stat", "write"), ("rename", "replace")])
def test_a_temp_file_that_another_builder_swept_away_is_a_typed_error(tmp_path: Path, operation: str, act: str) -> None:
    (tmp_path / "a").write_bytes(b"torn")
    with pytest.raises(StorageError, match="is gone"):
        getattr(Folder(str(tmp_path), Sweeping(operation)), act)("b" if operation == "link" else "a", DATA)


def test_a_folder_that_another_process_removed_is_a_typed_error(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    with pytest.raises(StorageError, match="is gone"):
        folder.create("not/there")
    with pytest.raises(StorageError, match="is gone"):
        folder.sync("not")


def test_what_is_gone_already_needs_no_quarantine(tmp_path: Path) -> None:
    Folder(str(tmp_path)).quarantine("not there")
    assert quarantined(tmp_path) == []


def test_the_disk_begins_with_a_large_file_before_it_is_whole_and_an_error_of_that_harms_nobody(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    class Watched(LocalFileSystem):
        def begin_sync(self, fd: int, start: int, size: int) -> None:
            asked.append((start, size))
            if start:
                raise OSError(errno.EINVAL, "no such advice")
            super().begin_sync(fd, start, size)

    folder = Folder(str(tmp_path), Watched())
    block, output = bytes(EARLY_BYTES // 4), folder.create("large")
    for _ in range(9):
        output.write(block)
    found = folder.publish([output])["large"]
    assert asked == [(0, EARLY_BYTES), (EARLY_BYTES, EARLY_BYTES)]
    assert found == folder.digest("large")
    assert found.bytes == 9 * len(block)


def test_the_disk_is_asked_for_announced_files_before_their_turn_and_what_is_wrong_with_one_is_left_to_its_reader(
    tmp_path: Path,
) -> None:
    asked: list[str] = []

    class Watched(LocalFileSystem):
        def expect(self, path: str) -> None:
            asked.append(os.path.basename(path))
            super().expect(path)

    (tmp_path / "0").write_bytes(DATA)
    os.mkfifo(tmp_path / "1")
    (tmp_path / "2").symlink_to("0")
    announced = Folder(str(tmp_path), Watched()).announce(range(5), str, ahead=2)
    assert next(announced) == 0
    assert asked == ["0", "1", "2"]
    assert list(announced) == [1, 2, 3, 4]
    assert asked == ["0", "1", "2", "3", "4"]
