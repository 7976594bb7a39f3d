"""What a kill or a power cut leaves, derived from the log of a run on a `ModelFileSystem`.

A killed process leaves all that it did: the machine goes on, with what is durable and what is not yet.
A power cut leaves what was durable, and of everything younger any part, each on its own:

    a write since the last fsync of the file      kept, lost, zeros, garbage, or torn after some bytes
    an entry since the last fsync of the folder   the durable one, or any of those that it had since then

A rename is two entries, so either name, both or none may stand. An inode that no entry leads to is gone. Real
file systems leave less than that, each in its own way; what survives this survives all of them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lab.modelfs import ROOT, Born, Disk, Named, Operation, Synced, Written

# What may become of a write. The last one is that nothing happened to it.
LOST, ZEROS, GARBAGE, TORN_EARLY, TORN_HALF, TORN_LATE, KEPT = range(7)
_SCRAMBLED = bytes(byte ^ 0xA5 for byte in range(256))
_TEMP = re.compile(r"(.+\.)[0-9a-f]{12}(\.tmp)")
_QUARANTINED = re.compile(r"(.+\.)[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Point:
    """Something that a power cut decides: one of `options`, of which the first is to lose it, the last to keep it.

    It is an entry (`name` of the folder `inode`), or a write (number `index` of the file `inode`). A silent one
    changes only bytes that nobody reads: those of temp files and of the event log.
    """

    inode: int
    options: int
    name: str = ""
    index: int = 0
    is_silent: bool = False


class Machine:
    """A computer that runs: its disk, and what has not reached the disk yet."""

    def __init__(self, disk: Disk) -> None:
        # Entries and contents are never changed in place, so that disks can share them.
        self._files = dict(disk.files)
        self._folders = dict(disk.folders)
        self._writes: dict[int, list[Written]] = {}
        self._entries: dict[tuple[int, str], list[int | None]] = {}
        self.next_inode = max((*disk.files, *disk.folders)) + 1

    def copy(self) -> Machine:
        twin = Machine(Disk(self._files, self._folders))
        twin._writes = {inode: list(writes) for inode, writes in self._writes.items()}
        twin._entries = {place: list(values) for place, values in self._entries.items()}
        twin.next_inode = self.next_inode
        return twin

    def run(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            for change in operation.changes:
                if isinstance(change, Written):
                    self._writes.setdefault(change.inode, []).append(change)
                elif isinstance(change, Named):
                    self._entries.setdefault((change.folder, change.name), []).append(change.inode)
                elif isinstance(change, Born):
                    self.next_inode = max(self.next_inode, change.inode + 1)
                    if change.is_folder:
                        self._folders[change.inode] = {}
                    else:
                        self._files[change.inode] = b""
                else:
                    self._sync(change)

    def killed(self) -> Disk:
        """What the next process finds: all that was done."""
        points = self.points()
        return self.cut(points, [point.options - 1 for point in points])

    def durable(self) -> Disk:
        """What is there after a power cut that took all it could."""
        return self.cut((), ())

    def points(self) -> list[Point]:
        """All that a power cut would decide now."""
        found = [Point(folder, len(values) + 1, name=name) for (folder, name), values in self._entries.items()]
        read = self._read_inodes()
        for inode, writes in self._writes.items():
            found += [Point(inode, KEPT + 1, index=i, is_silent=inode not in read) for i in range(len(writes))]
        return found

    def cut(self, points: Sequence[Point], choice: Sequence[int]) -> Disk:
        """The disk after a power cut that chose one option for every point; what is not among them is lost."""
        folders, files = dict(self._folders), dict(self._files)
        fates: dict[int, list[int]] = {}
        for point, option in zip(points, choice, strict=True):
            if not point.name:
                fates.setdefault(point.inode, []).append(option)
            elif option:
                if folders[point.inode] is self._folders[point.inode]:
                    folders[point.inode] = dict(folders[point.inode])
                value = self._entries[point.inode, point.name][option - 1]
                if value is None:
                    folders[point.inode].pop(point.name, None)
                else:
                    folders[point.inode][point.name] = value
        for inode, options in fates.items():
            files[inode] = _blend(files[inode], self._writes[inode], options)
        return _reachable(files, folders)

    def _sync(self, change: Synced) -> None:
        inode = change.inode
        if inode in self._folders:
            entries = self._folders[inode] = dict(self._folders[inode])
            for place in [place for place in self._entries if place[0] == inode]:
                value = self._entries.pop(place)[-1]
                if value is None:
                    entries.pop(place[1], None)
                else:
                    entries[place[1]] = value
        elif inode in self._writes:
            writes = self._writes.pop(inode)
            self._files[inode] = _blend(self._files[inode], writes, [KEPT] * len(writes))

    def _read_inodes(self) -> set[int]:
        """Inodes that have, or may turn out to have, a name under which somebody reads them."""
        found = {
            inode
            for entries in self._folders.values()
            for name, inode in entries.items()
            if inode in self._writes and not _is_unread(name)
        }
        for (_, name), values in self._entries.items():
            if not _is_unread(name):
                found.update(inode for inode in values if inode is not None)
        return found


def moments(machine: Machine, log: Sequence[Operation]) -> Iterator[tuple[int, Machine]]:
    """The machine after each operation of a run; it is one and the same, and moves on."""
    yield 0, machine
    for index, operation in enumerate(log, start=1):
        machine.run((operation,))
        yield index, machine


def choices(points: Sequence[Point], chance: random.Random, count: int) -> Iterator[list[int]]:
    """What a power cut may choose: the plain cases first, then `count` mixed ones, or all where they are few.

    The plain ones: all kept, all lost, each single point in each of its ways with all others kept, or all lost.
    """
    telling = [i for i, point in enumerate(points) if not point.is_silent]
    kept, lost = [point.options - 1 for point in points], [0] * len(points)
    yield kept
    yield lost
    for base in (kept, lost):
        for i in telling:
            for option in range(points[i].options):
                if option != base[i]:
                    yield [*base[:i], option, *base[i + 1 :]]
    total = 1
    for i in telling:
        total = min(total * points[i].options, count + 1)
    if total <= count:
        for mixed in itertools.product(*(range(points[i].options) for i in telling)):
            choice = _random_choice(points, chance)
            for i, option in zip(telling, mixed, strict=True):
                choice[i] = option
            yield choice
    else:
        for _ in range(count):
            yield _random_choice(points, chance)


def random_cut(machine: Machine, chance: random.Random) -> Disk:
    """One disk that a power cut may leave."""
    points = machine.points()
    return machine.cut(points, _random_choice(points, chance))


def _random_choice(points: Sequence[Point], chance: random.Random) -> list[int]:
    share = chance.choice((0.1, 0.3, 0.5, 0.7, 0.9))
    draw = chance.random
    return [point.options - 1 if draw() < share else int(draw() * (point.options - 1)) for point in points]


def identity(disk: Disk, *, leaving_out: str = "\0") -> bytes:
    """Equal for disks that are the same but for the names of temp files and for bytes that nobody reads."""
    lines = []
    for path, data in disk.walk():
        if not path.startswith(leaving_out):
            name, is_read = _plain_path(path)
            lines.append(name + (b"/" if data is None else _content_digest(data) if is_read else b""))
    return hashlib.blake2b(b"\n".join(sorted(lines)), digest_size=16).digest()


def plain(path: str) -> str:
    """A path without what chance put into its names."""
    return _plain_path(path)[0].decode()


def is_temp(path: str) -> bool:
    return path.endswith(".tmp")


def _is_unread(name: str) -> bool:
    return name.endswith(".tmp") or name == "events.jsonl"


@functools.lru_cache(1 << 16)
def _plain_path(path: str) -> tuple[bytes, bool]:
    folder, _, name = path.rpartition("/")
    if found := _TEMP.fullmatch(name):
        name = "".join(found.groups())
    elif folder.endswith("/quarantine") and (found := _QUARANTINED.fullmatch(name)):
        name = found.group(1)
    # A lock holds a random token; whether its bytes are whole, its size tells.
    return f"{folder}/{name}".encode(), not _is_unread(name) and name != "lock"


@functools.lru_cache(1 << 16)
def _content_digest(data: bytes) -> bytes:
    return b" " + hashlib.blake2b(data, digest_size=16).digest()


def _blend(base: bytes, writes: Sequence[Written], options: Sequence[int]) -> bytes:
    content = bytearray(base)
    for (_, offset, data), option in zip(writes, options, strict=True):
        if option == LOST:
            continue
        if option == ZEROS:
            left = bytes(len(data))
        elif option == GARBAGE:
            left = data.translate(_SCRAMBLED)
        elif option == KEPT:
            left = data
        else:
            left = data[: {TORN_EARLY: 1, TORN_HALF: len(data) // 2, TORN_LATE: len(data) - 1}[option]]
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(left)] = left
    return bytes(content)


def _reachable(files: dict[int, bytes], folders: dict[int, dict[str, int]]) -> Disk:
    found = Disk({}, {ROOT: folders[ROOT]})
    waiting = list(folders[ROOT].values())
    for inode in waiting:
        if inode in folders:
            found.folders[inode] = folders[inode]
            waiting += folders[inode].values()
        else:
            found.files[inode] = files[inode]
    return found
