"""Exports, imports and consolidations, killed with SIGKILL at their operations; then the same call goes on.

    every layout, out and in, in several files each; with a scratch disk as well; Templar's shards, consolidated

What is there in the end must be what an undisturbed call leaves: the same files, the same records, nothing more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from lab.cell import Point, explore
from lab.forks import PATIENCE_SECONDS
from lab.judge import difference, quick_folder
from lab.kills import Kill, until_killed
from lab.seam import operations
from lab.world import Tree, files
from lab_runner import Row
from tokenmill.formats import convert, templar
from tokenmill.storage.filesystem import LOCAL, FileSystem
from tokenmill.storage.local import Folder

EOT = 9
DOCUMENTS = {"train": ([1, 2, 3], [4], [5, 6, 7, 8], list(range(10, 30)), [1]), "val": ([2, 2], [3])}
# Sizes of files that give each layout several of them.
OPTIONS: dict[str, dict[str, Any]] = {
    "catid": {"shard_size": 12},
    "datatrove": {"shard_size": 12},
    "huggingface": {"shard_size": 12},
    "litdata": {"shard_size": 12},
    "llmc": {"shard_size": 12},
    "mds": {"shard_size": 100},
    "megatron": {"shard_size": 12},
    "nanogpt": {"order": "shuffled", "seed": 3},
    "olmo": {"shard_size": 12},
    "templar": {"shard_size": 12, "seq_len": 4},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A call that writes to an output, a folder as it is before, and what the call must leave there."""

    name: str
    call: Callable[[str], object]
    before: Path | None = None
    scratch: Path | None = None

    def begin(self, output: str) -> None:
        if self.before is not None:
            shutil.copytree(self.before, output)

    def run(self, output: str, fs: FileSystem = LOCAL) -> None:
        """The call, with every operation on its output through `fs`."""

        def tapped(path: str | os.PathLike[str], **_: str) -> Folder:
            return Folder(os.path.abspath(path), fs)

        with contextlib.ExitStack() as stack:
            for module in (convert, convert, templar):
                stack.enter_context(patch.object(module, "local_folder", tapped))
            self.call(output)


def transfer_kills(scale: int | None, *, seed: int = 0) -> Row:
    """A kill at every operation of every transfer, or at `scale` of them, drawn by the seed."""
    points = scale
    if points is None:
        with quick_folder() as place:
            points = sum(len(kills) for _, kills, _ in _undisturbed(place))
    found = explore(_setting, (scale, seed), points, patience=2 * PATIENCE_SECONDS)
    return found.row(f"SIGKILL at {'every operation' if scale is None else 'some operations'} of an export or import")


@contextlib.contextmanager
def _setting(scale: int | None, seed: int) -> Iterator[Point]:
    with quick_folder() as place:
        plan = [(transfer, kill, right) for transfer, kills, right in _undisturbed(place) for kill in kills]
        if scale is not None:
            plan = random.Random(seed).sample(plan, scale)
        yield lambda number: _point(*plan[number], str(place / f"out-{number}"))


def _point(transfer: Transfer, kill: Kill, right: Tree, output: str) -> str | None:
    transfer.begin(output)
    wrong = until_killed(partial(transfer.run, output), kill, may_end=False)
    if wrong is None:
        transfer.run(output)
        wrong = difference(_tree(output), right)
        if transfer.scratch and (left := os.listdir(transfer.scratch)):
            wrong = wrong or f"on the scratch disk: {left[0]}"
    shutil.rmtree(output)
    return wrong and f"{transfer.name}, killed {kill}: {wrong}"


def _undisturbed(place: Path) -> list[tuple[Transfer, list[Kill], Tree]]:
    """Every transfer with all kills that it can suffer, and what it leaves without one."""
    found = []
    for number, transfer in enumerate(_transfers(place)):
        output = str(place / f"right-{number}")
        transfer.begin(output)
        kills = [
            Kill(at, how)
            for at, name in enumerate(operations(partial(transfer.run, output)))
            for how in ("before", *(["half"] if name == "write" else []))
        ]
        found.append((transfer, kills, _tree(output)))
    return found


def _transfers(place: Path) -> list[Transfer]:
    """Exports of a small dataset to every layout, imports of what they wrote, and some others."""
    raw, dataset, scratch = place / "raw", place / "dataset", place / "scratch"
    raw.mkdir()
    scratch.mkdir()  # or the first export would make it, and have operations that no other one has
    for split, documents in DOCUMENTS.items():
        np.array([token for document in documents for token in (*document, EOT)], "<u2").tofile(raw / f"{split}.bin")
    convert.import_(raw, dataset, layout="nanogpt", eot_id=EOT, dtype="uint16", workers=1)
    found = []
    for layout, options in OPTIONS.items():
        call = partial(convert.export, dataset, to=layout, workers=1, **options)
        call(place / layout)
        back = partial(convert.import_, place / layout, layout=layout, eot_id=EOT, workers=1)
        found += [Transfer(name=f"export to {layout}", call=call), Transfer(name=f"import of {layout}", call=back)]
    scratched = partial(convert.export, dataset, to="nanogpt", workers=1, scratch=scratch)
    shards = place / "shards"
    shutil.copytree(place / "templar", shards, ignore=shutil.ignore_patterns(".build", "*.bin", "val"))
    joined = partial(templar.consolidate, seq_len=4, workers=1)
    return [
        *found,
        Transfer(name="export with scratch", call=scratched, scratch=scratch),
        Transfer(name="consolidate", call=joined, before=shards),
    ]


def _tree(output: str) -> Tree:
    """Every file that is there, the records as well."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files(Folder(output))}


EXPERIMENTS = [("kills, transfers", partial(transfer_kills, 2_000))]
