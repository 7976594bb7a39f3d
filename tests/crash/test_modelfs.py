"""The model answers as the real file system does, and its power cuts take what they may and nothing else."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.aftermath import Machine, choices, identity, random_cut
from lab.modelfs import Disk, ModelFileSystem

from tokenmill.storage.filesystem import LOCAL, FileSystem
from tokenmill.storage.local import Folder

NAMES = st.sampled_from(("a", "b", "a/a", "a/b", "a/b/a", "b/a", "./b", "a/missing/x"))
FDS = st.integers(0, 5)
CLOSED = 987_654
STEPS = st.one_of(
    st.tuples(st.sampled_from(("create", "open", "append", "unlink", "touch", "mkdir", "rmdir")), NAMES),
    st.tuples(st.sampled_from(("fsync_folder", "stat", "names", "expect")), NAMES | st.just("a/")),
    st.tuples(st.sampled_from(("link", "rename")), NAMES, NAMES),
    st.tuples(st.sampled_from(("read", "map", "fsync", "forget", "close", "allow")), FDS),
    st.tuples(st.just("write"), FDS, st.binary(max_size=40)),
)
BEGINNINGS = (
    [],
    [("mkdir", "a"), ("mkdir", "a/b"), ("create", "a/b/a"), ("create", "b")],
    [("mkdir", "a"), ("create", "a/a"), ("write", 0, b"some bytes"), ("link", "a/a", "b")],
    [("create", "a"), ("write", 0, b"some bytes"), ("open", "a"), ("mkdir", "b")],
)


class Player:
    """Does steps on a file system and writes down what came of each: a result, or an error by its number."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._root = root
        self._fds: list[int] = []

    def play(self, step: tuple[Any, ...]) -> Any:
        try:
            return self._do(*step)
        except OSError as error:
            # Why a folder cannot be mapped, each real file system says otherwise.
            return "error", error.errno if step[0] != "map" else 0
        except ValueError as error:
            return "error", str(error)

    def close(self) -> None:
        for number in range(len(self._fds)):
            self.play(("close", number))

    def everything(self) -> list[Any]:
        paths = ("", "a", "b", "a/a", "a/b", "a/b/a", "b/a", "b/b")
        return [self.play((call, path)) for path in paths for call in ("stat", "names", "content")]

    def _do(self, call: str, *arguments: Any) -> Any:
        if call in ("read", "map", "fsync", "forget", "close", "allow", "write"):
            return self._with_fd(call, *arguments)
        paths = [f"{self._root}/{name}" for name in arguments]
        if call in ("create", "open", "append"):
            self._fds.append(getattr(self._fs, call)(*paths))
            return "opened"
        if call == "content":
            return self._content(*paths)
        if call == "stat":
            found = self._fs.stat(*paths)
            # How large a folder is, each real file system says otherwise.
            return (found.is_folder, found.is_file) + ((found.size,) if found.is_file else ())
        return getattr(self._fs, call)(*paths)

    def _content(self, path: str) -> bytes:
        fd = self._fs.open(path)
        try:
            buffer = memoryview(bytearray(4096))
            return bytes(buffer[: self._fs.read(fd, buffer)])
        finally:
            self._fs.close(fd)

    def _with_fd(self, call: str, number: int, *arguments: Any) -> Any:
        fd = self._fds[number] if number < len(self._fds) else CLOSED
        if call == "close" and number < len(self._fds):
            self._fds[number] = CLOSED  # its number may soon be another file's
        if call == "read":
            buffer = memoryview(bytearray(7))
            return bytes(buffer[: self._fs.read(fd, buffer)])
        if call == "map":
            with self._fs.map(fd) as mapped:
                return mapped[:]
        if call == "write":
            return self._fs.write(fd, memoryview(arguments[0]))
        return getattr(self._fs, call)(fd, *([0o644] if call == "allow" else []))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(BEGINNINGS), st.lists(STEPS, max_size=25))
def test_the_model_gives_the_results_and_errors_of_the_real_file_system(
    before: list[tuple[Any, ...]], steps: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as root:
        fs = ModelFileSystem()
        fs.mkdir("/out")
        real, model = Player(LOCAL, root), Player(fs, "/out")
        try:
            for step in [*before, *steps]:
                assert (step, model.play(step)) == (step, real.play(step))
            assert model.everything() == real.everything()
        finally:
            real.close()


def test_two_names_of_a_file_are_one_inode_and_a_copy_is_another() -> None:
    fs = ModelFileSystem()
    folder = Folder("/", fs)
    digest = folder.write("a", b"same")
    folder.link("a", "b", digest)
    folder.write("c", b"same")
    assert fs.stat("/a").inode == fs.stat("/b").inode != fs.stat("/c").inode


def test_a_touch_and_a_write_move_the_time() -> None:
    fs = ModelFileSystem()
    fd = fs.create("/a")
    times = [fs.stat("/a").modified]
    fs.write(fd, memoryview(b"x"))
    times.append(fs.stat("/a").modified)
    fs.touch("/a")
    times.append(fs.stat("/a").modified)
    assert times == sorted(set(times))


def test_a_run_leaves_the_disk_that_it_began_with_alone() -> None:
    before = ModelFileSystem()
    Folder("/", before).write("a", b"old")
    disk = before.disk()
    fs = ModelFileSystem(disk)
    fd = fs.append("/a")
    fs.write(fd, memoryview(b", new"))
    fs.mkdir("/b")
    assert fs.disk().contents() == {"/a": b"old, new"}
    assert disk.contents() == {"/a": b"old"}
    assert "b" not in before.names("/")


def states(work: Callable[[ModelFileSystem], object]) -> set[tuple[tuple[str, bytes], ...]]:
    """All that a power cut after some work may leave."""
    fs = ModelFileSystem()
    work(fs)
    machine = Machine(Disk())
    machine.run(fs.log)
    points = machine.points()
    every = itertools.product(*(range(point.options) for point in points))
    return {tuple(sorted(machine.cut(points, choice).contents().items())) for choice in every}


def written(fs: ModelFileSystem, path: str, *parts: bytes, sync: bool = False) -> None:
    fd = fs.create(path)
    for part in parts:
        fs.write(fd, memoryview(part))
    if sync:
        fs.fsync(fd)
    fs.close(fd)


def test_a_file_that_was_not_synced_may_be_gone_empty_short_zeros_or_garbage() -> None:
    found = states(lambda fs: written(fs, "/a", b"abcd"))
    contents = {dict(state).get("/a") for state in found}
    assert {None, b"", b"a", b"ab", b"abc", b"\0\0\0\0", b"abcd"} < contents
    assert any(data and len(data) == 4 and data not in (b"abcd", bytes(4)) for data in contents)


def test_a_lost_write_before_a_kept_one_leaves_a_hole() -> None:
    contents = {dict(state).get("/a") for state in states(lambda fs: written(fs, "/a", b"ab", b"cd"))}
    assert {b"\0\0cd", b"ab", b"abcd", b"ab\0\0"} < contents


def test_a_sync_of_a_file_keeps_its_bytes_and_not_its_name() -> None:
    assert states(lambda fs: written(fs, "/a", b"abcd", sync=True)) == {(), (("/a", b"abcd"),)}


def test_a_sync_of_its_folder_keeps_its_name_and_not_its_bytes() -> None:
    def work(fs: ModelFileSystem) -> None:
        written(fs, "/a", b"ab")
        fs.fsync_folder("/")

    found = states(work)
    assert () not in found
    assert {(("/a", b""),), (("/a", b"ab"),), (("/a", b"\0\0"),)} < found


def test_both_syncs_leave_no_doubt() -> None:
    def work(fs: ModelFileSystem) -> None:
        written(fs, "/a", b"ab", sync=True)
        fs.fsync_folder("/")

    assert states(work) == {(("/a", b"ab"),)}


def test_a_rename_may_leave_either_name_both_or_none_and_the_old_target() -> None:
    def work(fs: ModelFileSystem) -> None:
        written(fs, "/a", b"new", sync=True)
        written(fs, "/b", b"old", sync=True)
        fs.fsync_folder("/")
        fs.rename("/a", "/b")

    old, new = ("/b", b"old"), ("/b", b"new")
    assert states(work) == {(new,), (old,), (("/a", b"new"), old), (("/a", b"new"), new)}


def test_an_unlink_may_be_undone_with_all_bytes() -> None:
    def work(fs: ModelFileSystem) -> None:
        written(fs, "/a", b"ab", sync=True)
        fs.fsync_folder("/")
        fs.unlink("/a")

    assert states(work) == {(), (("/a", b"ab"),)}


def test_a_folder_that_is_lost_takes_all_that_is_in_it_along() -> None:
    def work(fs: ModelFileSystem) -> None:
        fs.mkdir("/d")
        written(fs, "/d/a", b"ab", sync=True)
        fs.fsync_folder("/d")

    assert states(work) == {(), (("/d/a", b"ab"),)}


def test_a_kill_takes_nothing_and_leaves_in_doubt_what_was_in_doubt() -> None:
    fs = ModelFileSystem()
    written(fs, "/a", b"ab")
    machine = Machine(Disk())
    machine.run(fs.log)
    assert machine.killed().contents() == {"/a": b"ab"}
    again = ModelFileSystem(machine.killed(), first_inode=machine.next_inode)
    written(again, "/b", b"cd", sync=True)
    again.fsync_folder("/")
    machine.run(again.log)
    assert machine.killed().contents() == {"/a": b"ab", "/b": b"cd"}
    assert machine.durable().contents() == {"/a": b"", "/b": b"cd"}


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, max_size=25), st.integers(0, 1 << 30))
def test_a_cut_invents_no_names_and_all_kept_is_what_was_seen(steps: list[tuple[Any, ...]], seed: int) -> None:
    fs = ModelFileSystem()
    fs.mkdir("/out")
    player = Player(fs, "/out")
    for step in steps:
        # A folder that moves could be in two places after a power cut, which the model leaves to others.
        if step[0] != "rename" or not fs.stat("/out").is_folder or not is_folder(fs, f"/out/{step[1]}"):
            player.play(step)
    machine = Machine(Disk())
    machine.run(fs.log)
    assert machine.killed().contents() == fs.disk().contents()
    named = {change.name for operation in fs.log for change in operation.changes if hasattr(change, "name")}
    for path, _ in random_cut(machine, random.Random(seed)).walk():
        assert os.path.basename(path) in named


def is_folder(fs: ModelFileSystem, path: str) -> bool:
    try:
        return fs.stat(path).is_folder
    except OSError:
        return False


def test_few_points_are_tried_in_every_combination_and_many_by_chance() -> None:
    fs = ModelFileSystem()
    for name in "abc":
        written(fs, f"/{name}", b"x", sync=True)
    machine = Machine(Disk())
    machine.run(fs.log)
    points = machine.points()
    assert {tuple(choice) for choice in choices(points, random.Random(1), 8)} == set(
        itertools.product((0, 1), repeat=3)
    )
    by_chance = {tuple(choice) for choice in choices(points * 10, random.Random(1), 50)}
    assert len(by_chance) > 50


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("a.0123456789ab.tmp", "a.ba9876543210.tmp", True),
        ("a.0123456789ab.tmp", "b.0123456789ab.tmp", False),
        ("a", "b", False),
    ],
)
def test_states_that_differ_only_in_random_names_are_one(one: str, other: str, is_same: bool) -> None:
    disks = []
    for name in (one, other):
        fs = ModelFileSystem()
        written(fs, f"/{name}", b"x")
        disks.append(fs.disk())
    assert (identity(disks[0]) == identity(disks[1])) is is_same


def test_what_is_in_a_file_tells_states_apart_but_not_in_a_temp_file() -> None:
    found = {}
    for name in ("a", "a.0123456789ab.tmp"):
        disks = []
        for content in (b"x", b"y"):
            fs = ModelFileSystem()
            written(fs, f"/{name}", content)
            disks.append(identity(fs.disk()))
        found[name] = len(set(disks))
    assert found == {"a": 2, "a.0123456789ab.tmp": 1}
