"""The build lock of an output folder, with a heartbeat; and file locks of the operating system.

The build lock saves work. Correctness never depends on it: two builds that race past it would write the same bytes. It
is a small file that its holder touches every few seconds. We have our own because file locks do not work across the
machines of a network drive or in an object store.

    holder on this machine     dead if its process has ended, or the machine has booted since
    holder on another machine  dead if the heartbeat has stopped for PATIENCE_SECONDS

Parts of a build (`--part 2/4`) have a lock each, `.build/parts/2-of-4.lock`. They do not exclude each other; the build
lock excludes all of them:

    a build   takes its lock, then refuses if a part is held      a part   takes its lock, then refuses if the build is

`FileLocks` protect the copies in a shard cache: the system releases them when a process dies.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tokenmill import records
from tokenmill.errors import DatasetError, LockedError, StorageError
from tokenmill.records import Int
from tokenmill.storage.base import Storage
from tokenmill.storage.filesystem import explained
from tokenmill.storage.local import check_parents
from tokenmill.storage.output import TEMP_SUFFIX

LOCK = ".build/lock"
# What the parts of a build note about themselves.
PARTS = ".build/parts"
LOCK_SUFFIX = ".lock"
HEARTBEAT_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
_CHECKS = 50
_LOCKS_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that has a lock. Its start time distinguishes it from a later process with the same id."""

    machine: str
    process: Int
    started: str
    token: str
    host: str = ""


@contextlib.contextmanager
def locked(
    folder: Storage,
    *,
    lock: str = LOCK,
    patience: float | None = PATIENCE_SECONDS,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[None]:
    """Hold the folder's lock during a `with` block. Raises `LockedError` if a running build has it.

    `lock` may be that of a part. `patience` is how many seconds the heartbeat of another machine may stop before its
    lock is taken over; None never takes it over. `tell` receives a message before a wait.
    """
    me = Holder(
        machine=_machine(),
        process=os.getpid(),
        started=_started(os.getpid()),
        token=secrets.token_hex(8),
        host=platform.node(),
    )
    held, stop = threading.Event(), threading.Event()
    # It starts before the lock exists, so that no other thread takes a lock without a heartbeat for a dead one.
    beat = threading.Thread(target=_beat, args=(folder, lock, held, stop), daemon=True, name=_heart(me))
    beat.start()
    try:
        while not _acquire(folder, lock, me):
            _break_if_dead(folder, lock, patience, tell)
        held.set()
        _refuse_others(folder, lock, patience, tell)
        yield
    finally:
        stop.set()
        held.set()
        beat.join()
        with contextlib.suppress(DatasetError, StorageError):
            if _holder(folder, lock) == me:
                folder.remove(lock)


def telling(watch: Callable[[dict[str, Any]], None] | None) -> Callable[[str], None]:
    """A function for `tell` that passes messages on as events."""
    return lambda message: None if watch is None else watch({"kind": "waiting", "message": message})


def is_held(folder: Storage, lock: str = LOCK, *, patience: float | None = PATIENCE_SECONDS) -> bool:
    """Whether a running build has the lock. The lock of a dead one is removed."""
    if not folder.exists(lock):
        return False
    try:
        _break_if_dead(folder, lock, patience)
    except LockedError:
        return True
    return False


def part_lock(number: int, into: int) -> str:
    """The lock of part `number` of `into`."""
    return f"{PARTS}/{number}-of-{into}{LOCK_SUFFIX}"


def _acquire(folder: Storage, lock: str, me: Holder) -> bool:
    return not folder.exists(lock) and folder.claim(lock, records.seal(me)) and _holder(folder, lock) == me


def _refuse_others(folder: Storage, lock: str, patience: float | None, tell: Callable[[str], None]) -> None:
    """Raise `LockedError` if a part has its lock while this is a build, or a build while this is a part."""
    if lock != LOCK:
        if folder.exists(LOCK):
            _break_if_dead(folder, LOCK, patience, tell)
        return
    found = [f"{PARTS}/{name}" for name in folder.names(PARTS) if name.endswith(LOCK_SUFFIX)]
    if found:  # at the same time: parts may have died on many machines
        with ThreadPoolExecutor(min(len(found), _LOCKS_AT_ONCE)) as pool:
            list(pool.map(lambda name: _break_if_dead(folder, name, patience, tell), found))


def _break_if_dead(
    folder: Storage, lock: str, patience: float | None, tell: Callable[[str], None] = lambda _: None
) -> None:
    """Remove the lock of a dead holder; that of a live one is a `LockedError`. Returns if the lock has disappeared."""
    holder = _holder(folder, lock)
    if holder is not None and holder.machine == _machine():
        if _is_alive(holder):
            raise LockedError(
                f"{_what(folder, lock)} is being built by process {holder.process} on this machine",
                hint="wait for it, or stop it and run the same command again",
            )
        _remove(folder, lock, holder)
        return
    if holder is not None and _booted_since(holder):
        _remove(folder, lock, holder)
        return
    first, waited = folder.stat(lock), 0.0
    if first is None:
        return
    elsewhere = LockedError(
        f"{_what(folder, lock)} is being built {_location(holder)}",
        hint="wait for it, or stop it and run the same command again",
    )
    if patience is None:
        raise elsewhere
    age = max(0.0, time.time() - first.modified / 1e9)
    tell(
        f"waiting for the lock of {_what(folder, lock)}, held {_location(holder)}, last heartbeat {age:.0f} s ago; "
        f"taken over after {patience:g} s without a heartbeat"
    )
    while waited < patience:
        time.sleep(min(0.5, patience))
        waited += 0.5
        now = folder.stat(lock)
        if now is None:
            return
        if now.modified != first.modified:
            raise elsewhere
    _remove(folder, lock, holder)


def _what(folder: Storage, lock: str) -> str:
    """What a lock is of: an output folder, or a part of it."""
    if lock == LOCK:
        return folder.path
    part = lock.removeprefix(f"{PARTS}/").removesuffix(LOCK_SUFFIX).replace("-of-", "/")
    return f"part {part} of {folder.path}"


def _location(holder: Holder | None) -> str:
    """Where a holder is that is not a process of this machine."""
    return "on another machine" if holder is None or not holder.host else f"on {holder.host} (process {holder.process})"


def _remove(folder: Storage, lock: str, holder: Holder | None) -> None:
    """Remove the lock of a dead holder, unless another process has taken it over already.

    The lock must not change between the comparison and the removal, so one process at a time claims the right to both.
    """
    right = f"{lock}.{records.digest(holder)[:12]}{TEMP_SUFFIX}"
    if not folder.claim(right, secrets.token_bytes(8)):
        _wait_until_used(folder, right)
        return
    try:
        if _holder(folder, lock) == holder:
            folder.remove(lock)
    finally:
        folder.remove(right)


def _wait_until_used(folder: Storage, right: str) -> None:
    """Wait for the process with the right, which uses it at once; if it has died, remove the right."""
    for _ in range(_CHECKS):
        if not folder.exists(right):
            return
        time.sleep(HEARTBEAT_SECONDS / _CHECKS)
    folder.remove(right)


def _holder(folder: Storage, lock: str) -> Holder | None:
    """The holder of the lock; None if there is no lock, or its file is damaged."""
    try:
        return records.unseal(Holder, folder.read(lock, max_bytes=4096), where=lock)
    except DatasetError:
        return None


def _is_alive(holder: Holder) -> bool:
    """Whether a holder on this machine is running. In this process, only a heartbeat proves it: a lock can be left."""
    if holder.process == os.getpid():
        return any(thread.name == _heart(holder) for thread in threading.enumerate())
    return holder.started == _started(holder.process)


def _heart(holder: Holder) -> str:
    return f"tokenmill-heartbeat-{holder.token}"


def _beat(folder: Storage, lock: str, held: threading.Event, stop: threading.Event) -> None:
    held.wait()
    while not stop.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(StorageError):
            folder.touch(lock)


def _machine() -> str:
    """An id of this machine, boot and process namespace: HOST.BOOT.NAMESPACE. A container counts as a machine."""
    boot = _line_of("/proc/sys/kernel/random/boot_id")
    # Without an id of its own, a machine is indistinguishable from others with its host name: each boot is another one.
    host = [platform.node(), _line_of("/etc/machine-id") or boot]
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return ".".join(records.digest(part)[:12] for part in (host, boot, namespace))


def _booted_since(holder: Holder) -> bool:
    """Whether this machine has booted since a holder took its lock, which ended all processes of that time."""
    then, now = holder.machine.split("."), _machine().split(".")
    return then[0] == now[0] and then[1:2] != now[1:2]


def _line_of(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(200).strip()
    except OSError:
        return ""


def _started(process: int) -> str:
    """When a process started, in ticks of the kernel; empty if it has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):  # it has ended, possibly between opening and reading
        if os.path.isdir("/proc/self"):
            return ""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass  # it exists and belongs to another user
    return "alive"


class FileLocks:
    """The file locks of this process, on NAME.lock next to each locked file. Locks are shared or exclusive."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def acquire(self, folder: Storage, name: str, *, exclusive: bool) -> int:
        """Wait for a lock. Returns its descriptor, for `release`."""
        found = self._flock(folder, name, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        assert found is not None, "it was waited for"
        return found

    def try_acquire(self, folder: Storage, name: str, *, exclusive: bool) -> int | None:
        """The same without waiting: None if another process has it."""
        return self._flock(folder, name, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)

    @contextlib.contextmanager
    def exclusive(self, folder: Storage, name: str) -> Iterator[None]:
        """Hold an exclusive lock during a `with` block."""
        fd = self.acquire(folder, name, exclusive=True)
        try:
            yield
        finally:
            self.release(fd)

    def is_free(self, folder: Storage, name: str) -> bool:
        """Whether no process holds the exclusive lock."""
        fd = self.try_acquire(folder, name, exclusive=False)
        if fd is not None:
            self.release(fd)
        return fd is not None

    def share(self, fd: int) -> None:
        """Turn a lock into a shared one. Another process may have had the exclusive lock in between."""
        fcntl.flock(fd, fcntl.LOCK_SH)

    def release(self, fd: int) -> None:
        """Release a lock, also for processes that were forked since."""
        self._open.discard(fd)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def release_all(self, process: int) -> None:
        """Release all locks if this process took them. A forked process has only inherited them."""
        while self._open and process == os.getpid():
            self.release(next(iter(self._open)))

    def close_inherited(self) -> None:
        """Close the locks that a fork inherited, which would otherwise be held after the parent has died."""
        while self._open:
            with contextlib.suppress(OSError):
                os.close(self._open.pop())

    def _flock(self, folder: Storage, name: str, how: int) -> int | None:
        path = folder.at(f"{name}.lock")
        check_parents(folder.fs, folder.path, name)
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
                self.release(fd)
                return None
            except BaseException:
                self.release(fd)
                raise
        return fd
