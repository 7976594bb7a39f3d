"""What is disturbed: a build, a repair, a verify; where each begins and how its end is judged."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from lab.judge import Case, finish, finish_in_parts, make_case, mend, wrong_tree
from lab.seam import operations
from lab.swift import swift
from tokenmill.storage.filesystem import FileSystem

# Small, and yet with pieces that are linked, pieces that are joined, and a document that is rejected.
DOCUMENTS = 6
# A budget that so few documents go beyond.
_FIELDS = {"budget": {"max_tokens": 400}}


@dataclass(frozen=True, slots=True)
class Scene:
    """What is disturbed: how an output is laid out for it, what is called, and how its end is judged."""

    world: str
    prepare: Callable[[Case, str], None]
    call: Callable[[Case, str, FileSystem], object]
    judge: Callable[[Case, str, object], str | None]
    afterwards: Callable[[Case, str], str | None]

    @property
    def begins_whole(self) -> bool:
        """Whether a manifest may stand only over right files; where the lab itself broke some, it may not."""
        return self.prepare not in (damage, _beheaded)


def _nothing(case: Case, output: str) -> None:
    """A build begins without a folder."""


def _finished(case: Case, output: str) -> None:
    shutil.copytree(case.place / "right", output)


def damage(case: Case, output: str) -> None:
    """A shard that was a piece, an index that was joined, a stranger among them."""
    _finished(case, output)
    out = Path(output)
    data = (out / "train/00000.bin").read_bytes()
    (out / "train/00000.bin").unlink()
    (out / "train/00000.bin").write_bytes(data[:-2])
    data = (out / "val/00000.idx").read_bytes()
    (out / "val/00000.idx").write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    (out / "val/00009.bin").write_bytes(b"stray")


def _beheaded(case: Case, output: str) -> None:
    """Without a manifest, and with a shard and a receipt less."""
    _finished(case, output)
    for name in ("dataset.json", "train/00001.idx", ".build/receipts/000000.json"):
        (Path(output) / name).unlink()


def _is_right(case: Case, output: str, result: object) -> str | None:
    """What could not be removed may still be in .build; the next call sees to it."""
    return wrong_tree(case, output)


def _is_not_ok(case: Case, output: str, result: Any) -> str | None:
    return "verify finds nothing wrong in a damaged dataset" if result.ok else None


def _is_a_report(case: Case, output: str, result: Any) -> str | None:
    return None  # a file that cannot be read may be called bad, whatever its bytes are


def _build(case: Case, output: str, fs: FileSystem) -> object:
    return case.world.build(output, fs)


def _build_in_parts(case: Case, output: str, fs: FileSystem) -> object:
    return case.world.build_in_parts(output, fs)


def _repair(case: Case, output: str, fs: FileSystem) -> object:
    return case.world.repair(output, fs)


def _verify(case: Case, output: str, fs: FileSystem) -> object:
    return case.world.verify(output, fs)


SCENES = {
    "build": Scene("plain", _nothing, _build, _is_right, finish),
    "build with scratch": Scene("scratch", _nothing, _build, _is_right, finish),
    "build with budget": Scene("budget", _nothing, _build, _is_right, finish),
    "build with prepend": Scene("prepend", _nothing, _build, _is_right, finish),
    "parts": Scene("plain", _nothing, _build_in_parts, _is_right, finish_in_parts),
    "parts with scratch": Scene("scratch", _nothing, _build_in_parts, _is_right, finish_in_parts),
    "build when finished": Scene("plain", _finished, _build, _is_right, finish),
    "repair": Scene("plain", damage, _repair, _is_right, mend),
    "repair without manifest": Scene("plain", _beheaded, _repair, _is_right, mend),
    "verify": Scene("plain", _finished, _verify, _is_a_report, finish),
    "verify of damage": Scene("plain", damage, _verify, _is_not_ok, mend),
}


@contextlib.contextmanager
def set_scenes(names: Iterable[str]) -> Iterator[dict[str, Case]]:
    """The cases of some scenes, one for each world, in a process that does this and nothing else."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(swift())
        worlds = sorted({SCENES[name].world for name in names})
        cases = {
            world: stack.enter_context(make_case(world, documents=DOCUMENTS, **_FIELDS.get(world, {})))
            for world in worlds
        }
        yield {name: cases[SCENES[name].world] for name in names}


def scene_operations(case: Case, name: str) -> list[str]:
    """The names of all operations of a scene that nothing disturbs."""
    scene, output = SCENES[name], case.output("counted")
    scene.prepare(case, output)
    names = operations(lambda fs: scene.call(case, output, fs))
    case.remove(output)
    return names
