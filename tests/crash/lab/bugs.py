"""Protective lines of the code, and each of them taken out: the bugs that the lab must find.

A bug is a patch at run time, around the real function wherever that is possible: what is left is the code as it is but
for one line. `trial` and `kind` say in which experiment, and with which kind of run, the line is missed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from lab.modelfs import ModelFileSystem
from tokenmill import records
from tokenmill.build import commit, pipeline, update, workspace
from tokenmill.build.plan import Budget
from tokenmill.dataset.manifest import MANIFEST
from tokenmill.errors import DatasetError, LockedError
from tokenmill.storage import locks, output
from tokenmill.storage import scratch as storage_scratch
from tokenmill.storage.local import Folder
from tokenmill.storage.output import Digest, DirectOutput, Output
from tokenmill.storage.scratch import ScratchOutput
from tokenmill.units import receipts
from tokenmill.units import run as unit
from tokenmill.units.receipts import PIECES, RECEIPTS, REJECTS

Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Bug:
    """A line that is taken out, and the trial with a kind of run that has to notice."""

    name: str
    plant: Plant
    trial: str
    kind: str


def _nothing(*_: Any, **__: Any) -> None:
    """What is left of a line that is not there."""


def _as(owner: Any, name: str, other: Any) -> Plant:
    """Another function in the place of one."""
    return lambda: patch.object(owner, name, other)


def _without(owner: Any, name: str) -> Plant:
    """A call that does nothing any more."""
    return _as(owner, name, _nothing)


def _instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """A function that is another one, made from the real one."""
    return lambda: patch.object(owner, name, make(getattr(owner, name)))


def _inside(owner: Any, name: str, inner: Plant) -> Plant:
    """A patch that holds only while a function runs."""

    def make(real: Any) -> Any:
        def run(*given: Any, **more: Any) -> Any:
            with inner():
                return real(*given, **more)

        return run

    return _instead(owner, name, make)


def _all_of(*plants: Plant) -> Plant:
    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with ExitStack() as stack:
            for part in plants:
                stack.enter_context(part())
            yield

    return plant


def _unsynced(part: str) -> Plant:
    """No fsync of files whose path has this in it."""

    def make(real: Any) -> Any:
        def fsync(self: ModelFileSystem, fd: int) -> None:
            if part not in self._handles[fd].path:
                real(self, fd)

        return fsync

    return _instead(ModelFileSystem, "fsync", make)


def _no_sync_after_mkdir(real: Any) -> Any:
    def fsync_folder(self: ModelFileSystem, path: str) -> None:
        made = self.log and self.log[-1].call == "mkdir" and os.path.dirname(self.log[-1].path) == path
        if not made:
            real(self, path)

    return fsync_folder


def _no_sync_of(*names: str) -> Plant:
    def make(real: Any) -> Any:
        def sync(self: Folder, name: str) -> None:
            if name not in names:
                real(self, name)

        return sync

    return _instead(Folder, "sync", make)


def _shared_create(real: Any) -> Any:
    def create(self: ModelFileSystem, path: str) -> int:
        try:
            return int(real(self, path))
        except FileExistsError:  # as without O_EXCL: whatever has the name is opened and written over
            fd = self.append(path)
            self._handles[fd].appends = False
            return fd

    return create


def _rename_over(real: Any) -> Any:
    def take_name(self: Folder, temp: str, name: str, *_: Any, keep: bool = False) -> None:
        if keep:
            self.fs.link(temp, f"{temp}.2")
            temp = f"{temp}.2"
        self.fs.rename(temp, self.at(name))

    return take_name


def _believing(real: Any) -> Any:
    """`load_receipt` without a rehash."""

    def load(*given: Any, rehash: bool, **more: Any) -> Any:
        return real(*given, rehash=False, **more)

    return load


def _any_size(real: Any) -> Any:
    """`_damaged` without the sizes: what is there is believed, unless it is hashed."""

    def damaged(where: Folder, files: dict[str, Digest], size_of: Any, *, rehash: bool) -> Iterator[str]:
        if rehash:
            yield from real(where, files, size_of, rehash=True)
        else:
            yield from (name for name in files if not where.exists(name))

    return damaged


@contextlib.contextmanager
def _receipt_first() -> Iterator[None]:
    """The receipt gets its name before the files that it vouches for get theirs."""
    held: list[tuple[Folder, str, str, Digest]] = []
    publish, write = Folder.publish, Folder.write

    def publish_later(self: Folder, outputs: Sequence[Output], **claim: Any) -> dict[str, Digest]:
        if not outputs or not outputs[0].name.startswith(PIECES):
            return publish(self, outputs, **claim)
        digests = {}
        for written in outputs:
            temp, digests[written.name] = written.settle()
            held.append((self, temp, written.name, digests[written.name]))
        return digests

    def write_first(self: Folder, name: str, data: bytes, **claim: Any) -> Digest:
        found = write(self, name, data, **claim)
        if name.startswith(RECEIPTS):
            for where, temp, late, digest in held:
                where._take_name(temp, late, digest, lambda: False)
            for parent in (PIECES, REJECTS):
                self.sync(parent)
            held.clear()
        return found

    with patch.object(Folder, "publish", publish_later), patch.object(Folder, "write", write_first):
        yield


def _opened(data: bytes, *, where: str) -> bytes:
    """What was sealed, or is said to be."""
    if b',"seal"' not in data:
        raise DatasetError(f"{where}: not a sealed record")
    return data[: data.rindex(b',"seal"')] + b"}"


def _unsealed(kind: Any, data: bytes, *, where: str) -> Any:
    """Nothing of it is remembered: other bugs come behind this one."""
    return records.convert(kind, records.parse(_opened(data, where=where), where=where), where=where)


def _open_unsealed(data: bytes, *, where: str) -> Any:
    return _unsealed(receipts.Receipt, data, where=where)


def _one_write(real: Any) -> Any:
    def write_all(fs: Any, fd: int, view: memoryview, path: str) -> None:
        fs.write(fd, view)

    return write_all


def _read_back(real: Any) -> Any:
    def settle(self: DirectOutput) -> tuple[str, Digest]:
        temp, _ = real(self)
        return temp, Folder(os.path.dirname(temp), self._fs).digest(os.path.basename(temp))

    return settle


def _unread(real: Any) -> Any:
    def settle(self: ScratchOutput) -> tuple[str, Digest]:
        self._direct = self._direct or self._move()
        return self._direct.settle()

    return settle


def _clean_up_first(real: Any) -> Any:
    def write_parts(self: Folder, name: str, parts: Iterable[bytes], **claim: Any) -> Digest:
        if name == MANIFEST:
            workspace.clean_up(self, None)
        digest: Digest = real(self, name, parts, **claim)
        return digest

    return write_parts


def _gaps(real: Any) -> Any:
    def is_spent(self: Budget) -> bool:
        if self._max is None:
            return False
        self._tokens = sum(self._known.values())
        self._next = max(self._known, default=-1) + 1
        return self._tokens >= self._max

    return is_spent


def _locked_for_ever(where: Folder, patience: float | None) -> None:
    raise LockedError(f"{where.path} is locked")


def _load_receipt(make: Callable[[Any], Any]) -> Plant:
    return _all_of(*(_instead(module, "load_receipt", make) for module in (unit, pipeline)))


BUGS: tuple[Bug, ...] = (
    Bug("no fsync of pieces", _unsynced("/pieces/"), "cuts", "plain"),
    Bug("no fsync of receipts", _unsynced("/receipts/"), "cuts", "plain"),
    Bug("no fsync of joined shards", _unsynced("/val/"), "cuts", "plain"),
    Bug("no fsync of the manifest", _unsynced(f"/{MANIFEST}"), "cuts", "plain"),
    Bug("no fsync of job.json", _unsynced("/job.json"), "cuts", "plain"),
    Bug(
        "no fsync of the folder after publishing",
        _inside(Folder, "publish", _without(ModelFileSystem, "fsync_folder")),
        "cuts",
        "plain",
    ),
    Bug(
        "no fsync of the folder after replacing",
        _inside(Folder, "replace", _without(ModelFileSystem, "fsync_folder")),
        "cuts",
        "plain",
    ),
    Bug(
        "no fsync of the parent of a new folder",
        _instead(ModelFileSystem, "fsync_folder", _no_sync_after_mkdir),
        "cuts",
        "join",
    ),
    Bug("no fsync of the parent of a folder that stands", _without(Folder, "_sync_parent"), "kills", "plain"),
    Bug(
        "the manifest before the fsync of the shards' folder",
        _inside(commit, "_commit_split", _without(Folder, "sync")),
        "cuts",
        "splits",
    ),
    Bug("no fsync of receipts of a killed build", _no_sync_of(PIECES, REJECTS, RECEIPTS), "kills", "plain"),
    Bug(
        "no fsync of a killed build's manifest",
        _inside(workspace, "finish_clean_up", _without(Folder, "sync")),
        "kills",
        "plain",
    ),
    Bug("no fsync of what an update keeps", _inside(update, "_gather", _without(Folder, "sync")), "cuts", "update"),
    Bug(
        "no fsync of what an update names", _inside(update, "finish_update", _without(Folder, "sync")), "cuts", "update"
    ),
    Bug("no fsync of an update's end", _inside(workspace, "remove_kept", _without(Folder, "sync")), "cuts", "update"),
    Bug("the receipt before its pieces", _receipt_first, "kills", "plain"),
    Bug("the pieces removed before the manifest", _instead(Folder, "write_parts", _clean_up_first), "kills", "plain"),
    Bug("no sweep of temp files", _without(Folder, "sweep"), "kills", "plain"),
    Bug("no tidying behind the manifest", _without(workspace, "finish_clean_up"), "kills", "plain"),
    Bug("no look whether the lock's holder lives", _as(locks, "_break_if_dead", _locked_for_ever), "kills", "plain"),
    Bug(
        "cut pieces under the names of whole ones",
        _instead(unit, "unit_name", lambda real: lambda number, limit: real(number, -1)),
        "kills",
        "budget",
    ),
    Bug("a budget that counts units behind a gap", _instead(Budget, "is_spent", _gaps), "decays", "budget"),
    Bug("no rehash at resume", _load_receipt(_believing), "decays", "plain"),
    Bug("no size check at resume", _instead(receipts, "_damaged", _any_size), "decays", "plain"),
    Bug("damaged files trusted, not quarantined", _as(receipts, "_damaged", lambda *_, **__: ()), "decays", "plain"),
    Bug("no question whose receipt it is", _as(receipts, "_owned", lambda found, *_: found), "decays", "plain"),
    Bug("no digest check when joining", _without(commit, "_check_bytes"), "decays", "splits"),
    Bug("no new hashing after a damaged piece", _without(workspace, "forget_clean_stop"), "decays", "splits"),
    Bug(
        "no check of seals",
        _all_of(_as(records, "opened", _opened), _as(records, "unseal", _unsealed)),
        "decays",
        "join",
    ),
    Bug("no check of seals in packs", _as(receipts, "open_receipt", _open_unsealed), "decays", "packs"),
    Bug("any file with the name is the same file", _as(Folder, "_is_same", lambda *_: True), "decays", "plain"),
    Bug("no loop on short writes", _instead(output, "write_all", _one_write), "short", "plain"),
    Bug(
        "no loop on short writes to the scratch disk",
        _instead(storage_scratch, "write_all", _one_write),
        "short",
        "scratch",
    ),
    Bug("the hash of the file, not of the buffer", _instead(DirectOutput, "settle", _read_back), "garbled", "plain"),
    Bug("no reading back from the target", _instead(ScratchOutput, "settle", _unread), "garbled", "scratch"),
    Bug("no exclusive flag", _instead(ModelFileSystem, "create", _shared_create), "taken", "plain"),
    Bug("rename over, not link", _instead(Folder, "_take_name", _rename_over), "disagree", "plain"),
    Bug(
        "a receipt's claim is ignored",
        _instead(
            Folder, "_quarantine_conflict", lambda real: lambda self, name, committed: real(self, name, lambda: False)
        ),
        "disagree",
        "plain",
    ),
    Bug(
        "no check of the totals",
        _all_of(*(_without(module, "check_totals") for module in (unit, receipts, commit))),
        "lost",
        "plain",
    ),
)
