"""Troubles that are no crashes, in the model: what each protective line that crashes do not need is there for.

short      a write takes only half of what it is given
garbled    a write puts other bytes on the disk than it was given, and does not tell
taken      the name for a temp file is in use already
disagree   another builder is past the lock, and its machine gives other tokens
lost       a document goes missing between reading and writing

Each gives, for each time that it was tried, None or what was wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from lab.aftermath import Machine, identity, is_temp, moments
from lab.modelfs import ModelFileSystem
from lab.subject import MANIFEST, OUT, Contents, Subject, dataset_of
from lab.verdict import difference, run
from tokenmill.errors import DatasetError, TokenmillError
from tokenmill.tokenizers import engine as tokenizers_engine
from tokenmill.tokenizers.base import Encoded, Engine
from tokenmill.units import encode as documents

LOCK = f"{OUT}/.build/lock"


def short(subject: Subject) -> Iterator[str | None]:
    """Each write of a run in turn is short, the last one first; then all of them are."""

    class Short(ModelFileSystem):
        which: Container[int] = ()
        count = 0

        def write(self, fd: int, data: memoryview) -> int:
            self.count += 1
            return super().write(fd, data[: (len(data) + 1) // 2] if self.count in self.which else data)

    total = _count(subject, "write")
    for which in [*(range(number, number + 1) for number in range(total, 0, -1)), range(1, 100 * total)]:
        fs = Short(subject.start)
        fs.which = which
        try:
            run(subject, fs)
        except TokenmillError as error:
            yield f"{subject.name}: writes {which} were short: {error.message}"
        else:
            wrong = difference(dataset_of(fs.disk().contents()), dataset_of(subject.right))
            yield f"{subject.name}: writes {which} were short: {wrong}" if wrong else None


def garbled(subject: Subject) -> Iterator[str | None]:
    """Each write of a run in turn is garbled: it is mended, or `verify` tells of it and `repair` mends it."""

    class Garbled(ModelFileSystem):
        countdown = 0

        def write(self, fd: int, data: memoryview) -> int:
            self.countdown -= 1
            return super().write(fd, data if self.countdown else memoryview(_garble(bytes(data))))

    for number in range(1, _count(subject, "write") + 1):
        fs = Garbled(subject.start)
        fs.countdown = number
        wrong = _mended(subject, fs)
        yield wrong and f"{subject.name}: write {number} was garbled: {wrong}"


def taken(subject: Subject) -> Iterator[str | None]:
    """Each new file of a run in turn finds that somebody's larger file has its name."""

    class Taken(ModelFileSystem):
        countdown = 0

        def create(self, path: str) -> int:
            self.countdown -= 1
            if not self.countdown:
                fd = super().create(path)
                super().write(fd, memoryview(b"somebody's " * 1000))
                super().close(fd)
            return super().create(path)

    for number in range(1, _count(subject, "create") + 1):
        fs = Taken(subject.start)
        fs.countdown = number
        wrong = _mended(subject, fs, verify=False)
        yield wrong and f"{subject.name}: the name of new file {number} was taken: {wrong}"


def disagree(subject: Subject, every: int = 1) -> Iterator[str | None]:
    """At some operations of a build, another one with other tokens goes past the lock and does all of its work."""
    for number in range(1, _count(subject) + 1, every):
        fs = _Crossed(subject, number)
        with contextlib.suppress(TokenmillError):
            run(subject, fs)
        wrong = _misled(subject, fs)
        yield wrong and f"{subject.name}: another builder came after operation {number}: {wrong}"


def lost(subject: Subject) -> Iterator[str | None]:
    """The last document of every selection is lost on its way."""

    def select(encoded: Encoded, chosen: Any) -> Encoded:
        part = real(encoded, chosen)
        return Encoded(part.ids[: part.lengths[:-1].sum()], part.lengths[:-1])

    real = documents.select
    fs = ModelFileSystem(subject.start)
    with patch.object(documents, "select", select):
        try:
            run(subject, fs)
        except TokenmillError:
            yield None
        else:
            yield "a build that lost documents has a manifest"


class _Crossed(ModelFileSystem):
    """After some operation of a build, another one runs from its beginning to its end."""

    def __init__(self, subject: Subject, number: int) -> None:
        super().__init__(subject.start)
        self._subject = subject
        self._number = number

    def _note(self, call: str, path: str, *changes: Any) -> None:
        super()._note(call, path, *changes)
        if len(self.log) == self._number:
            with contextlib.suppress(FileNotFoundError):
                self.unlink(LOCK)
            right = tokenizers_engine.open_engine
            with patch.object(tokenizers_engine, "open_engine", lambda spec: _Odd(right(spec))):
                with contextlib.suppress(TokenmillError):
                    self._subject.run(self)


class _Odd:
    """An engine that gives other tokens."""

    def __init__(self, right: Engine) -> None:
        self._right = right

    def encode(self, text: pa.Array) -> Encoded:
        found = self._right.encode(text)
        return Encoded(found.ids[::-1].copy(), found.lengths)

    def decode(self, ids: Any) -> str:
        return self._right.decode(ids)


def _count(subject: Subject, call: str = "") -> int:
    """How many operations an undisturbed run has, or how many of one kind."""
    fs = ModelFileSystem(subject.start)
    subject.run(fs)
    return sum(operation.call == call or not call for operation in fs.log)


def _garble(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _mended(subject: Subject, fs: ModelFileSystem, *, verify: bool = True) -> str | None:
    """Whether a run, or the same call after an error of ours, or a repair after a word of `verify`, ends right."""
    try:
        try:
            run(subject, fs)
        except TokenmillError:
            run(subject, fs)
        if _whole(fs) != dataset_of(subject.right) and verify:
            if not _is_told(subject, fs):
                return "verify finds nothing in a dataset with other bytes"
            subject.world.repair(OUT, fs)
    except Exception as error:
        return f"it died of {type(error).__name__}: {error}"
    return difference(_whole(fs), dataset_of(subject.right)) or None


def _whole(fs: ModelFileSystem) -> Contents:
    """The files of a dataset; temp files may be somebody else's here."""
    return {path: data for path, data in dataset_of(fs.disk().contents()).items() if not is_temp(path)}


def _is_told(subject: Subject, fs: ModelFileSystem) -> bool:
    try:
        return bool(subject.world.verify(OUT, fs).problems)
    except DatasetError:
        return True


def _misled(subject: Subject, fs: ModelFileSystem) -> str | None:
    """Whether a reader was misled at any moment of a run: by a manifest that stands over other files than it says."""
    seen: set[bytes] = set()
    for _, machine in moments(Machine(subject.start), fs.log):
        disk = machine.killed()
        key = identity(disk, leaving_out=f"{OUT}/.build/")
        if key not in seen and MANIFEST in disk.contents():
            seen.add(key)
            for problem in subject.world.verify(OUT, ModelFileSystem(disk)).problems:
                if not is_temp(problem.file):  # those of a builder at work mislead nobody
                    return f"a reader finds that {problem.file} {problem.what}"
    return None
