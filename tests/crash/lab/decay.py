"""Damage to what a crashed build left, before the same call goes on.

A drive that lied about a fsync, a bad block, a file that somebody edited: fsync protects readers, digests protect
the resume. Whatever stands in a receipt must be found to be damaged, be put away, and be done again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from lab.aftermath import Machine, is_temp
from lab.modelfs import Disk, ModelFileSystem, Operation
from lab.subject import MANIFEST, OUT, Contents, Subject, altered, dataset_of, lasting
from lab.verdict import difference, run
from tokenmill.errors import DamagedPieceError, TokenmillError

CLEAN = f"{OUT}/.build/clean.json"
RECEIPTS, PACKS = f"{OUT}/.build/receipts/", f"{OUT}/.build/packs/"
# A lock says nothing of use when it is damaged, and the log is for people. Without its plan a folder is nobody's build:
# it is refused, in words, as anything else that is not ours. Without the times of its sources a build is as one of 0.1.
_SPARED = tuple(f"{OUT}/.build/{name}" for name in ("lock", "events.jsonl", "plan.json", "touched.json"))


def decays(subject: Subject, count: int, seed: int) -> Iterator[str | None]:
    """Damage one file after a crash anywhere in a build; for each time, None or what was wrong."""
    fs = ModelFileSystem(subject.start)
    subject.run(fs)
    chance = random.Random(seed)
    for _ in range(count):
        moment = chance.randint(0, len(fs.log))
        disk = _after(subject, fs.log[:moment])
        contents = disk.contents()
        files = [path for path in contents if not is_temp(path) and path not in _SPARED]
        if files and MANIFEST not in contents:
            path = chance.choice(files)
            kind, data = _damage(contents, path, chance)
            wrong = _resume(subject, altered(disk, {path: data}), _is_trusted(contents, path, data))
            yield wrong and f"{subject.name}: {kind} {path} after operation {moment} of {len(fs.log)}: {wrong}"


def _after(subject: Subject, log: list[Operation]) -> Disk:
    machine = Machine(subject.start)
    machine.run(log)
    return machine.killed()


def _damage(contents: Contents, path: str, chance: random.Random) -> tuple[str, bytes | None]:
    data = contents[path]
    kind = chance.choice(("flipped", "another digit in", "zeros in", "short", "empty", "gone", "swapped"))
    at = chance.randrange(len(data)) if data else 0
    if kind == "flipped":
        return kind, data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :] if data else b"x"
    if kind == "another digit in":
        digits = [i for i, byte in enumerate(data) if byte in b"0123456789"]
        at = chance.choice(digits) if digits else 0
        return kind, data[:at] + b"7" + data[at + 1 :] if data[at : at + 1] != b"7" else data[:at] + b"3" + data[
            at + 1 :
        ]
    if kind == "zeros in":
        return kind, data[:at] + bytes(len(data) - at)
    if kind == "short":
        return kind, data[:at]
    if kind == "empty":
        return kind, b""
    if kind == "gone":
        return kind, None
    folder, _, name = path.rpartition("/")
    ending = name[name.index(".") :] if "." in name else ""
    others = [other for other in contents if other != path and other.startswith(folder) and other.endswith(ending)]
    return (kind, contents[chance.choice(others)]) if others else ("empty", b"")


def _is_trusted(contents: Contents, path: str, data: bytes | None) -> bool:
    """Whether a resume does not look for such a damage.

    Units that were done at the last clean stop are trusted by their sizes, so that thousands of them cost no time. A
    piece that changed since then without growing or shrinking becomes a shard as it is, and `verify` has to name it.
    A receipt of such a unit is not opened if a copy of it is in a pack.
    """
    is_of_a_unit = path.endswith((".bin", ".idx", ".provenance.parquet", ".jsonl")) and not path.startswith(PACKS)
    is_packed = path.startswith(RECEIPTS) and any(other.startswith(PACKS) for other in contents)
    is_by_size = (is_of_a_unit or is_packed) and CLEAN in contents
    return is_by_size and data is not None and len(data) == len(contents[path])


def _resume(subject: Subject, disk: Disk, is_trusted: bool) -> str | None:
    fs = ModelFileSystem(disk)
    try:
        try:
            run(subject, fs)
        except DamagedPieceError:  # it says to run the same command again
            run(subject, fs)
        if not is_trusted:
            return difference(lasting(fs.disk().contents()), subject.right) or None
        right = dataset_of(subject.right)
        if dataset_of(fs.disk().contents()) == right:
            return None
        if not subject.world.verify(OUT, fs).problems:
            return "verify finds nothing in a dataset with other bytes"
        subject.world.repair(OUT, fs)
        return difference(dataset_of(fs.disk().contents()), right) or None
    except TokenmillError as error:
        return f"the same call was refused: {type(error).__name__}: {error.message}"
    except Exception as error:
        return f"the same call died of {type(error).__name__}: {error}"
