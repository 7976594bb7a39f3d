"""Small builds whose right result is known, on any file system.

Every world has several sources of different kinds, splits, a quarantined document and pieces
that are joined; each adds one thing of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.build.api import open_executor
from tokenmill.build.join import PartNumber, build_part, join_folder
from tokenmill.build.pipeline import BuildOptions, build
from tokenmill.dataset.manifest import Manifest
from tokenmill.maintenance.repair import repair_folder
from tokenmill.maintenance.verify import Problem, VerifyReport, verify_folder
from tokenmill.recipe import make_recipe
from tokenmill.storage.filesystem import LOCAL, FileSystem
from tokenmill.storage.local import Folder
from tokenmill.units import receipts

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "budget": {"max_tokens": 1800},
    "scratch": {},
    "prepend": {"eot": "prepend", "split": {}},
    "packs": {},
}
_WORDS = ("mill", "turns", "text", "into", "数千の文書", "слова", "naïve", "🙂", "<|endoftext|>", "\t", "12345")

Tree = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Sources on the real disk, a recipe, and what the finished dataset must be."""

    sources: Path
    recipe: dict[str, Any]
    scratch: str | None
    right: Tree
    pack_units: int = receipts.PACK_UNITS
    update: bool = False

    def build(self, output: str, fs: FileSystem = LOCAL) -> Manifest:
        """Build, or go on with a build, in this process."""
        wanted = make_recipe({"sources": (str(self.sources),), **self.recipe}, config=None)
        folder = Folder(output, fs)
        start_executor = partial(open_executor, 1, None)
        with patch.object(receipts, "PACK_UNITS", self.pack_units):
            found, _ = build(
                wanted, folder, BuildOptions(start_executor=start_executor, scratch=self.scratch, update=self.update)
            )
        return found

    def build_in_parts(self, output: str, fs: FileSystem = LOCAL) -> Manifest:
        """The same in two parts, one after the other, and joined."""
        wanted = make_recipe({"sources": (str(self.sources),), **self.recipe}, config=None)
        folder = Folder(output, fs)
        options = BuildOptions(start_executor=partial(open_executor, 1, None), scratch=self.scratch)
        for number in (2, 1):
            build_part(wanted, folder, options, part=PartNumber(number, 2))
        return join_folder(folder, threads=1)[0]

    def verify(self, output: str, fs: FileSystem = LOCAL) -> VerifyReport:
        return verify_folder(Folder(output, fs), threads=1)

    def repair(self, output: str, fs: FileSystem = LOCAL) -> tuple[Problem, ...]:
        return repair_folder(Folder(output, fs), workers=1)


def make_world(path: Path, kind: str = "plain", *, documents: int = 24, **fields: Any) -> World:
    """The sources and the recipe of a world under `path`, and its result from a build that nothing disturbed.

    `fields` are further ones of the recipe.
    """
    sources = path / "sources"
    sources.mkdir(parents=True)
    _write_sources(sources, documents)
    recipe = {"tokenizer": "byte", "unit_bytes": 600, "split": {"val": 0.2}, **KINDS[kind], **fields}
    scratch = str(path / "scratch") if kind == "scratch" else None
    pack_units = 2 if kind == "packs" else receipts.PACK_UNITS
    world = World(sources=sources, recipe=recipe, scratch=scratch, right={}, pack_units=pack_units)
    world.build(str(path / "right"))
    return replace(world, right=tree(str(path / "right")))


def tree(output: str, fs: FileSystem = LOCAL) -> Tree:
    """SHA-256 of every file of a dataset, but for what is in .build."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files(Folder(output, fs)) if name[:6] != ".build"}


def files(folder: Folder, name: str = "") -> Iterator[tuple[str, bytes]]:
    """Every file under a folder, with its content."""
    for child in folder.names(name):
        path = f"{name}/{child}" if name else child
        found = folder.stat(path)
        if found is not None and found.is_folder:
            yield from files(folder, path)
        elif found is not None:
            with contextlib.closing(folder.blocks(path)) as blocks:
                yield path, b"".join(bytes(block) for block in blocks)


def _write_sources(path: Path, documents: int) -> None:
    chance = random.Random(7)
    texts = [f"{i} " + " ".join(chance.choices(_WORDS, k=chance.randint(0, 8))) for i in range(documents)]
    pq.write_table(pa.table({"text": texts}), path / "a.parquet", row_group_size=max(1, documents // 3))
    lines = [json.dumps({"text": text[::-1]}) for text in texts]
    lines.insert(documents // 2, "{not json")
    (path / "b.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (path / "c.txt").write_text("\n".join(text.replace("\n", " ") for text in texts), encoding="utf-8")
