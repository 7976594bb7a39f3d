"""A lock on an output folder: it saves work, it never carries correctness.

The lock is a small file that its holder touches every few seconds. A holder that died on
this machine is seen at once, by its process or by a boot since; one elsewhere, by a heartbeat
that stands still. Two builders that race past the lock would write the same bytes.

Locks of the operating system: whoever dies lets go of them, so no claim is left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenmill import records
from tokenmill.errors import DatasetError, LockedError, StorageError
from tokenmill.storage.base import Storage
from tokenmill.storage.filesystem import explained
from tokenmill.storage.local import check_way
from tokenmill.storage.output import TEMP_SUFFIX

LOCK = ".build/lock"
HEARTBEAT_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
_LOOKS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lock: a process on a machine, told apart from a later one with the same number."""

    machine: str
    process: int
    started: str
    token: str
    host: str = ""


@contextlib.contextmanager
def locked(
    folder: Storage, *, patience: float | None = PATIENCE_SECONDS, tell: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Hold the folder's lock, or raise `LockedError` if a living build has it.

    `patience` is how long the heartbeat of another machine may stand still; None takes it for alive. `tell` hears what
    is waited for before it is.
    """
    me = Holder(
        machine=_machine(),
        process=os.getpid(),
        started=_started(os.getpid()),
        token=secrets.token_hex(8),
        host=platform.node(),
    )
    held, stop = threading.Event(), threading.Event()
    # It runs before the lock is there, so that no other thread takes a lock without a heart for a dead one.
    beat = threading.Thread(target=_beat, args=(folder, held, stop), daemon=True, name=_heart(me))
    beat.start()
    try:
        while not _acquire(folder, me):
            _break_if_dead(folder, patience, tell)
        held.set()
        yield
    finally:
        stop.set()
        held.set()
        beat.join()
        with contextlib.suppress(DatasetError, StorageError):
            if _holder(folder) == me:
                folder.remove(LOCK)


def telling(watch: Callable[[dict[str, Any]], None] | None) -> Callable[[str], None]:
    """What `locked` tells, as an event for whoever watches."""
    return lambda message: None if watch is None else watch({"kind": "waiting", "message": message})


def is_held(folder: Storage) -> bool:
    """Whether a living build has the lock. That of a dead one is removed, as by whoever would take it."""
    if not folder.exists(LOCK):
        return False
    try:
        _break_if_dead(folder, PATIENCE_SECONDS)
    except LockedError:
        return True
    return False


def _acquire(folder: Storage, me: Holder) -> bool:
    return not folder.exists(LOCK) and folder.claim(LOCK, records.seal(me)) and _holder(folder) == me


def _break_if_dead(folder: Storage, patience: float | None, tell: Callable[[str], None] = lambda _: None) -> None:
    """Remove a dead holder's lock; a living one is a `LockedError`. A lock that went away meanwhile is for no one."""
    holder = _holder(folder)
    if holder is not None and holder.machine == _machine():
        if _is_alive(holder):
            raise LockedError(
                f"{folder.path} is being built by process {holder.process} on this machine",
                hint="wait for it, or stop it and run the same command again",
            )
        _remove(folder, holder)
        return
    if holder is not None and _booted_since(holder):
        _remove(folder, holder)
        return
    first, waited = folder.stat(LOCK), 0.0
    if first is None:
        return
    elsewhere = LockedError(
        f"{folder.path} is being built {_place(holder)}",
        hint="wait for it, or stop it and run the same command again",
    )
    if patience is None:
        raise elsewhere
    age = max(0.0, time.time() - first.modified / 1e9)
    tell(
        f"waiting for the lock of {folder.path}, held {_place(holder)}, last heartbeat {age:.0f} s ago; "
        f"taken over after {patience:g} s without a heartbeat"
    )
    while waited < patience:
        time.sleep(min(0.5, patience))
        waited += 0.5
        now = folder.stat(LOCK)
        if now is None:
            return
        if now.modified != first.modified:
            raise elsewhere
    _remove(folder, holder)


def _place(holder: Holder | None) -> str:
    """Where a holder is that is not a process of this machine."""
    return "on another machine" if holder is None or not holder.host else f"on {holder.host} (process {holder.process})"


def _remove(folder: Storage, holder: Holder | None) -> None:
    """Remove a dead holder's lock, unless another one was quicker and the lock is its own by now.

    Between the look and the removal it must not become another one's: so one at a time has the right to both.
    """
    right = f"{LOCK}.{records.digest(holder)[:12]}{TEMP_SUFFIX}"
    if not folder.claim(right, secrets.token_bytes(8)):
        _wait_until_used(folder, right)
        return
    try:
        if _holder(folder) == holder:
            folder.remove(LOCK)
    finally:
        folder.remove(right)


def _wait_until_used(folder: Storage, right: str) -> None:
    """Whoever has the right uses it at once; one who died with it is not waited for."""
    for _ in range(_LOOKS):
        if not folder.exists(right):
            return
        time.sleep(HEARTBEAT_SECONDS / _LOOKS)
    folder.remove(right)


def _holder(folder: Storage) -> Holder | None:
    """Who has the lock; None if nobody, or if the file says nothing sensible."""
    try:
        return records.unseal(Holder, folder.read(LOCK, max_bytes=4096), where=LOCK)
    except DatasetError:
        return None


def _is_alive(holder: Holder) -> bool:
    """Whether a holder on this machine still holds its lock; this process may have failed to remove an earlier one."""
    if holder.process == os.getpid():
        return any(thread.name == _heart(holder) for thread in threading.enumerate())
    return holder.started == _started(holder.process)


def _heart(holder: Holder) -> str:
    return f"tokenmill-heartbeat-{holder.token}"


def _beat(folder: Storage, held: threading.Event, stop: threading.Event) -> None:
    held.wait()
    while not stop.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(StorageError):
            folder.touch(LOCK)


def _machine() -> str:
    """A name for this boot of this machine and its process numbers, HOST.BOOT.NUMBERS: containers count as machines."""
    boot = _line_of("/proc/sys/kernel/random/boot_id")
    # Without a name of its own, a machine cannot be told from one that has the same host name: each boot is another.
    host = [platform.node(), _line_of("/etc/machine-id") or boot]
    numbers = ""
    with contextlib.suppress(OSError):
        numbers = os.readlink("/proc/self/ns/pid")
    return ".".join(records.digest(part)[:12] for part in (host, boot, numbers))


def _booted_since(holder: Holder) -> bool:
    """Whether this machine was started anew since a holder got its lock: then nothing of that time runs any more."""
    then, now = holder.machine.split("."), _machine().split(".")
    return then[0] == now[0] and then[1:2] != now[1:2]


def _line_of(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(200).strip()
    except OSError:
        return ""


def _started(process: int) -> str:
    """When a process began, in the kernel's own ticks; empty if it is not there."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):  # it is gone, maybe between the opening and the reading
        if os.path.isdir("/proc/self"):
            return ""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass  # it is there, and somebody else's
    return "alive"


class Locks:
    """The locks that this process holds or waits for: files beside what they are for."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def take(self, folder: Storage, name: str, *, alone: bool) -> int:
        """Wait for a lock; it is to be given back."""
        found = self._take(folder, name, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        assert found is not None, "it was waited for"
        return found

    def try_to_take(self, folder: Storage, name: str, *, alone: bool) -> int | None:
        """The same without the wait: None if somebody has it."""
        return self._take(folder, name, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)

    @contextlib.contextmanager
    def alone(self, folder: Storage, name: str) -> Iterator[None]:
        """Have a lock that nobody else has."""
        fd = self.take(folder, name, alone=True)
        try:
            yield
        finally:
            self.give_back(fd)

    def is_free(self, folder: Storage, name: str) -> bool:
        """Whether nobody has a lock alone."""
        fd = self.try_to_take(folder, name, alone=False)
        if fd is not None:
            self.give_back(fd)
        return fd is not None

    def share(self, fd: int) -> None:
        """Have a lock with others from now on. Somebody else may have had it alone in between."""
        fcntl.flock(fd, fcntl.LOCK_SH)

    def give_back(self, fd: int) -> None:
        """Let go of a lock, for processes that were forked meanwhile as well."""
        self._open.discard(fd)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def give_all_back(self, process: int) -> None:
        """Let go of everything if this is the process that took it: another one has only inherited it."""
        while self._open and process == os.getpid():
            self.give_back(next(iter(self._open)))

    def forget(self) -> None:
        """Close what came along with a fork: it would still be held when the parent has died."""
        while self._open:
            with contextlib.suppress(OSError):
                os.close(self._open.pop())

    def _take(self, folder: Storage, name: str, how: int) -> int | None:
        path = folder.at(f"{name}.lock")
        check_way(folder.fs, folder.path, name)
        with explained(path):
            try:
                fd = folder.fs.append(path)
            except FileNotFoundError:
                folder.make(os.path.dirname(name))
                fd = folder.fs.append(path)
            self._open.add(fd)
            try:
                fcntl.flock(fd, how)
            except BlockingIOError:
                self.give_back(fd)
                return None
            except BaseException:
                self.give_back(fd)
                raise
        return fd
