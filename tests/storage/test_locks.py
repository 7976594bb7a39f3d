from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill import records
from tokenmill.errors import LockedError, StorageError
from tokenmill.storage import locks
from tokenmill.storage.filesystem import FileStat, LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import LOCK, PATIENCE_SECONDS, Holder, is_held, locked

HOLD = """
import sys
from tokenmill.storage.local import Folder
from tokenmill.storage.filesystem import FileStat; from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.locks import locked
with locked(Folder(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(str(tmp_path / "out"))
    found.make(".build")
    return found


@contextlib.contextmanager
def holder(folder: Folder) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def lock_of_another_machine(folder: Folder) -> None:
    folder.write(LOCK, records.seal(Holder(machine="elsewhere", process=1, started="1", token="t")))


def test_the_lock_is_there_inside_the_block_and_gone_after_it(folder: Folder) -> None:
    with locked(folder):
        assert folder.names(".build") == ["lock"]
    assert folder.names(".build") == []


def test_the_lock_is_gone_after_an_exception(folder: Folder) -> None:
    with pytest.raises(ZeroDivisionError), locked(folder):
        raise ZeroDivisionError
    assert folder.names(".build") == []


def test_a_living_holder_is_named(folder: Folder) -> None:
    with holder(folder) as process:
        with pytest.raises(LockedError, match=f"process {process.pid} ") as caught, locked(folder):
            pytest.fail("two hold the lock")
        assert caught.value.hint
        assert folder.names(".build") == ["lock"]


def test_a_holder_that_ended_leaves_no_lock(folder: Folder) -> None:
    with holder(folder) as process:
        process.communicate("")
        assert process.returncode == 0
    assert folder.names(".build") == []


def test_a_folder_that_another_one_takes_away_with_its_lock_is_made_again(folder: Folder) -> None:
    class TakesAway(LocalFileSystem):
        left = 2

        def create(self, path: str) -> int:
            if self.left:
                self.left -= 1
                folder.remove_empty(".build")
            return super().create(path)

    with locked(Folder(folder.path, TakesAway())):
        assert folder.names(".build") == ["lock"]


def test_a_lock_that_is_held_in_this_process_is_not_taken_twice(folder: Folder) -> None:
    with locked(folder):
        with pytest.raises(LockedError), locked(folder):
            pytest.fail("two hold the lock")
        assert folder.exists(LOCK)


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "not yet reaped"])
def test_the_lock_of_a_killed_holder_is_taken_over_at_once(folder: Folder, reaped: bool) -> None:
    with holder(folder) as process:
        process.send_signal(signal.SIGKILL)
        if reaped:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert folder.exists(LOCK)
        begin = time.monotonic()
        with locked(folder):
            assert time.monotonic() - begin < PATIENCE_SECONDS
    assert folder.names(".build") == []


def test_a_lock_is_held_as_long_as_its_holder_lives(folder: Folder) -> None:
    assert not is_held(folder)
    with holder(folder) as process:
        assert is_held(folder)
        process.kill()
        process.wait()
        assert not is_held(folder)
    assert folder.names(".build") == []


def test_the_number_of_a_dead_holder_may_belong_to_another_process_now(folder: Folder) -> None:
    with locked(folder):
        mine = records.unseal(Holder, folder.read(LOCK), where=LOCK)
    folder.write(LOCK, records.seal(Holder(machine=mine.machine, process=mine.process, started="1", token="t")))
    with locked(folder):
        assert records.unseal(Holder, folder.read(LOCK), where=LOCK).started == mine.started


def test_a_lock_of_an_earlier_boot_of_this_machine_is_taken_over_at_once(folder: Folder) -> None:
    with locked(folder):
        mine = records.unseal(Holder, folder.read(LOCK), where=LOCK)
    host, _, numbers = mine.machine.split(".")
    folder.write(LOCK, records.seal(replace(mine, machine=f"{host}.before.{numbers}")))
    with locked(folder, patience=None):
        assert records.unseal(Holder, folder.read(LOCK), where=LOCK).process == os.getpid()
    assert folder.names(".build") == []


def test_a_boot_of_another_machine_says_nothing(folder: Folder) -> None:
    with locked(folder):
        mine = records.unseal(Holder, folder.read(LOCK), where=LOCK)
    _, boot, numbers = mine.machine.split(".")
    for machine in (f"elsewhere.{boot}.{numbers}", f"elsewhere.before.{numbers}", f"{mine.machine}x", "", "."):
        folder.write(LOCK, records.seal(replace(mine, machine=machine)))
        with pytest.raises(LockedError, match="is being built on"), locked(folder, patience=None):
            pytest.fail("two hold the lock")
        folder.remove(LOCK)


def test_a_lock_of_another_machine_that_stands_still_is_taken_over(folder: Folder) -> None:
    lock_of_another_machine(folder)
    with locked(folder, patience=0.1):
        assert records.unseal(Holder, folder.read(LOCK), where=LOCK).process == os.getpid()
    assert folder.names(".build") == []


def test_a_lock_of_another_machine_whose_heartbeat_moves_is_respected(folder: Folder) -> None:
    lock_of_another_machine(folder)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.01):
            os.utime(folder.at(LOCK))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(LockedError, match="is being built on"), locked(folder):
            pytest.fail("two hold the lock")
    finally:
        stop.set()
        thread.join()
    assert records.unseal(Holder, folder.read(LOCK), where=LOCK).machine == "elsewhere"


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 5000], ids=["empty", "no record", "too large"])
def test_a_lock_that_says_nothing_sensible_is_taken_over_after_patience(folder: Folder, content: bytes) -> None:
    Path(folder.at(LOCK)).write_bytes(content)
    with locked(folder, patience=0.1):
        assert records.unseal(Holder, folder.read(LOCK), where=LOCK).process == os.getpid()


def test_a_holder_that_lost_its_lock_does_not_remove_the_new_one(folder: Folder) -> None:
    with locked(folder):
        folder.remove(LOCK)
        lock_of_another_machine(folder)
    assert records.unseal(Holder, folder.read(LOCK), where=LOCK).machine == "elsewhere"


def test_a_lock_that_this_process_could_not_remove_does_not_lock_it_out(folder: Folder) -> None:
    with locked(folder):
        left = folder.read(LOCK)
    folder.write(LOCK, left)
    with locked(folder):
        assert folder.read(LOCK) != left
    assert folder.names(".build") == []


def test_a_lock_that_cannot_be_read_back_is_not_left_behind(folder: Folder) -> None:
    class FailsOnce(LocalFileSystem):
        failed = False

        def read(self, fd: int, buffer: memoryview) -> int:
            if not self.failed:
                self.failed = True
                raise OSError(errno.EIO, "input/output error")
            return super().read(fd, buffer)

    with pytest.raises(StorageError), locked(Folder(folder.path, FailsOnce())):
        pytest.fail("the lock was not read back")
    assert folder.names(".build") == []


def test_who_does_not_wait_takes_a_holder_elsewhere_for_alive(folder: Folder) -> None:
    lock_of_another_machine(folder)
    with pytest.raises(LockedError, match="is being built on"), locked(folder, patience=None):
        pytest.fail("two hold the lock")
    assert folder.exists(LOCK)


def test_a_lock_that_goes_away_while_it_is_watched_is_waited_for_no_longer(folder: Folder) -> None:
    class Leaves(LocalFileSystem):
        looks = 0

        def stat(self, path: str) -> FileStat:
            if path.endswith("/lock"):
                self.looks += 1
                if self.looks == 4:  # is it there, may it be read, when was its heartbeat: and then it is gone
                    os.unlink(path)
            return super().stat(path)

    lock_of_another_machine(folder)
    begin = time.monotonic()
    with locked(Folder(folder.path, Leaves())):
        assert time.monotonic() - begin < PATIENCE_SECONDS


def test_a_dead_lock_that_another_one_took_over_meanwhile_is_left_to_it(folder: Folder) -> None:
    class AnotherIsQuicker(LocalFileSystem):
        looks = 0

        def open(self, path: str) -> int:
            self.looks += path.endswith("/lock")
            if self.looks == 2:
                os.unlink(path)
                lock_of_another_machine(folder)
            return super().open(path)

    with locked(folder):
        mine = records.unseal(Holder, folder.read(LOCK), where=LOCK)
    folder.write(LOCK, records.seal(Holder(machine=mine.machine, process=mine.process, started="1", token="t")))
    with pytest.raises(LockedError), locked(Folder(folder.path, AnotherIsQuicker()), patience=None):
        pytest.fail("two hold the lock")
    assert records.unseal(Holder, folder.read(LOCK), where=LOCK).machine == "elsewhere"


def test_one_at_a_time_takes_a_dead_lock_over(folder: Folder) -> None:
    held: list[str] = []
    tried = threading.Event()

    def rival() -> None:
        with contextlib.suppress(LockedError), locked(folder):
            held.append("by the other one")
            tried.wait()

    thread = threading.Thread(target=rival)

    class AnotherComes(LocalFileSystem):
        def unlink(self, path: str) -> None:
            if path.endswith("/lock") and thread.ident is None:  # it has been looked at, and is to be removed
                thread.start()
                thread.join(0.3)
            super().unlink(path)

    with locked(folder):
        mine = records.unseal(Holder, folder.read(LOCK), where=LOCK)
    folder.write(LOCK, records.seal(replace(mine, started="1")))
    with contextlib.suppress(LockedError), locked(Folder(folder.path, AnotherComes())):
        held.append("by this one")
        tried.set()
        thread.join()
    tried.set()
    thread.join()
    assert len(held) == 1, held
    assert folder.names(".build") == []


def test_who_died_while_it_removed_a_dead_lock_is_not_waited_for(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dies(LocalFileSystem):
        def unlink(self, path: str) -> None:
            if path.count(".tmp") < 2:  # the lock or the right to remove it; what it was written to may go
                raise KeyboardInterrupt
            super().unlink(path)

    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.1)
    lock_of_another_machine(folder)
    with pytest.raises(KeyboardInterrupt), locked(Folder(folder.path, Dies()), patience=0.1):
        pytest.fail("it has died")
    assert len(folder.names(".build")) == 2
    with locked(folder, patience=0.1):
        assert records.unseal(Holder, folder.read(LOCK), where=LOCK).process == os.getpid()
    assert folder.names(".build") == []


def test_what_is_waited_for_is_told_before_it_is(folder: Folder) -> None:
    folder.write(LOCK, records.seal(Holder(machine="far", process=7, started="1", token="t", host="node-3")))
    os.utime(folder.at(LOCK), (time.time() - 100, time.time() - 100))
    told: list[tuple[str, bool]] = []
    with locked(folder, patience=0.5, tell=lambda message: told.append((message, folder.exists(LOCK)))):
        pass
    ((message, was_there),) = told
    assert was_there
    assert message.startswith(
        f"waiting for the lock of {folder.path}, held on node-3 (process 7), last heartbeat 100 s"
    )
    assert message.endswith("taken over after 0.5 s without a heartbeat")


def test_the_lock_of_a_dead_process_of_this_machine_is_not_waited_for(folder: Folder) -> None:
    with holder(folder) as process:
        process.kill()
        process.wait()
    told: list[str] = []
    with locked(folder, tell=told.append):
        assert records.unseal(Holder, folder.read(LOCK), where=LOCK).host == os.uname().nodename
    assert told == []


def test_a_lock_that_does_not_name_its_host_is_read(folder: Folder) -> None:
    about = {"machine": "far", "process": 7, "started": "1", "token": "t"}
    folder.write(LOCK, records.seal(about))
    with pytest.raises(LockedError, match="on another machine"), locked(folder, patience=None):
        pass
