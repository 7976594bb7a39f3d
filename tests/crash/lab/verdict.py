"""Is a crashed state good? What readers see of it, and what the same call makes of it.

reader    a manifest that can be read stands for a dataset that is whole; a receipt, for files that are
resume    the same call again ends with the right files and no others, and would so after another power cut
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
from collections.abc import Iterator
from types import FrameType

from lab.aftermath import Machine, identity, is_temp, plain
from lab.modelfs import Disk, ModelFileSystem, Operation
from lab.subject import MANIFEST, OUT, Contents, Subject, dataset_of, lasting
from tokenmill import records
from tokenmill.errors import DatasetError, TokenmillError
from tokenmill.storage.output import Digest
from tokenmill.units.receipts import Receipt

SECONDS_ALLOWED = 60.0
_RECEIPTS = f"{OUT}/.build/receipts/"


class Wrong(Exception):
    """A promise that was broken, in a sentence."""


class Hang(BaseException):
    """A run took longer than any run should. No handler for errors may stop it."""


class Judge:
    """Looks at crashed states of one subject. What it has seen before it does not look at again."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._right = dataset_of(subject.right)
        self._readers: dict[bytes, str] = {}
        self._receipts: dict[bytes, dict[str, Digest]] = {}
        self._digests: dict[bytes, Digest] = {}

    def look(self, disk: Disk) -> None:
        """As a reader of the dataset, and as one of the receipts. Raises `Wrong`."""
        contents = disk.contents()
        if MANIFEST in contents:
            key = identity(disk, leaving_out=f"{OUT}/.build/")
            if key not in self._readers:
                self._readers[key] = self._read(disk, dataset_of(contents))
            if self._readers[key]:
                raise Wrong(self._readers[key])
        elif not self._subject.hurt:
            self._read_receipts(contents)

    def resume(self, machine: Machine, disk: Disk) -> list[Operation]:
        """Run the same call on what a crash left; gives what it did. Raises `Wrong`. The machine is left alone."""
        fs = ModelFileSystem(disk, first_inode=machine.next_inode)
        try:
            run(self._subject, fs)
        except TokenmillError as error:
            raise Wrong(f"the same call was refused: {type(error).__name__}: {error.message}") from error
        except Exception as error:
            raise Wrong(f"the same call died of {type(error).__name__}: {error}") from error
        self._compare(lasting(fs.disk().contents()), "after the same call")
        after = machine.copy()
        after.run(fs.log)
        kept = lasting(after.durable().contents())
        # What was unlinked last may come back, but nothing that stands may go.
        self._compare({path: kept[path] for path in self._subject.right if path in kept}, "after a later power cut")
        return fs.log

    def _read(self, disk: Disk, dataset: Contents) -> str:
        fs = ModelFileSystem(disk)
        try:
            problems = self._subject.world.verify(OUT, fs).problems
        except DatasetError:
            return ""  # it does not pretend to be a dataset
        hurt = self._subject.hurt
        for problem in problems:
            path = f"{OUT}/{problem.file}"
            # A repair works among the shards, so there its temp files are no surprise.
            if path not in hurt and not (hurt and is_temp(path)):
                return f"a reader finds that {plain(problem.file)} {problem.what}"
        for path, data in self._right.items():
            if path not in hurt and dataset.get(path) != data:
                return f"a reader finds another {path}, and verify does not tell"
        return ""

    def _read_receipts(self, contents: Contents) -> None:
        for path, data in contents.items():
            if path.startswith(_RECEIPTS) and not is_temp(path):
                if data not in self._receipts:
                    try:
                        self._receipts[data] = records.unseal(Receipt, data, where=path).all_files()
                    except DatasetError as error:
                        raise Wrong(f"a receipt cannot be read: {error.message}") from error
                for name, digest in self._receipts[data].items():
                    if self._digest(contents.get(f"{OUT}/{name}", b"")) != digest:
                        raise Wrong(f"{path} stands, but {name} is not what it says")

    def _digest(self, data: bytes) -> Digest:
        if data not in self._digests:
            self._digests[data] = Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        return self._digests[data]

    def _compare(self, found: Contents, when: str) -> None:
        if what := difference(found, self._subject.right):
            raise Wrong(f"{when}: {what}")


def difference(found: Contents, right: Contents) -> str:
    """What makes some files other than they must be; nothing if they are the same."""
    if found == right:
        return ""
    more = sorted(plain(path) for path in found.keys() - right.keys())
    other = sorted(path for path in found.keys() & right.keys() if found[path] != right[path])
    return f"missing {sorted(right.keys() - found.keys())}, too many {more}, with other bytes {other}"


def run(subject: Subject, fs: ModelFileSystem) -> None:
    """Run a subject, or raise `Hang`."""
    with time_limit(SECONDS_ALLOWED):
        subject.run(fs)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Hang` in the block if it takes longer. In the main thread only, as alarms go."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
