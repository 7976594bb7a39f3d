"""Every command that takes a dataset, as a trial calls it, and what it must have done if it ends well.

    on a dataset, an unfinished build, an import, files of every layout, shards, sources, a bucket
    readers leave the folder as it is; writers leave the bytes of an undisturbed one

A command is that of the terminal with its arguments, or a call of the library.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import tokenmill
from differ.children import Ended, run_call, run_command
from differ.homes import LAYOUTS, SEQ_LEN, SIZES, Home, tree
from differ.oddities import Oddity

# What is wrong with what a command did, although it ended well; an empty text if nothing is.
Judge = Callable[[Home, "Case"], str]
Arguments = Callable[[Home], Sequence[object]]
Call = Callable[[Home], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is wrong, where, and with which kind of folder."""

    subject: str
    where: str
    oddity: Oddity

    def at(self, home: Home) -> Path:
        return (home.sources if self.subject == "sources" else home.dataset) / self.where

    def __str__(self) -> str:
        return f"{self.subject}: {self.oddity.name} at {self.where!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command by its arguments, or a call of the library; `before` is what happens to the folder before."""

    name: str
    arguments: Arguments | None = None
    call: Call | None = None
    judge: Judge = lambda home, case: ""
    before: Callable[[Home], None] = lambda home: None
    is_reader: bool = False  # whether it writes nothing to the dataset
    is_repeatable: bool = False  # whether it says what it read

    def run(self, home: Home, uid: int | None, *, patience: float) -> Ended:
        if self.arguments is not None:
            return run_command(self.arguments(home), patience=patience, uid=uid)
        assert self.call is not None, "it is one of the two"
        return run_call(functools.partial(self.call, home), patience=patience, uid=uid)


def is_as(subject: str) -> Judge:
    """Whether the files of the dataset are those of another one with which nothing is wrong."""

    def judge(home: Home, case: Case) -> str:
        return difference(tree(home.good(subject)), tree(home.dataset))

    return judge


def _is_intact(home: Home, case: Case) -> str:
    return is_as(case.subject)(home, case)


def gives(subject: str) -> Judge:
    """Whether the files that were written elsewhere are those that are written of the dataset as it should be."""

    def judge(home: Home, case: Case) -> str:
        return difference(tree(home.good(subject)), tree(home.out / "out"))

    return judge


def difference(wanted: dict[str, str], found: dict[str, str]) -> str:
    names = sorted(name for name in wanted if wanted[name] != found.get(name))
    return f"it ended well with other bytes: {', '.join(names[:3])}" if names else ""


def _prepare(*more: object) -> Arguments:
    fixed = ("--tokenizer", "char", "--split", "val=0.2", "--unit-bytes", 2000, "-j", 1, "-q")
    return lambda home: ["prepare", home.sources, "-o", home.dataset, *fixed, *more]


def _export(layout: str, *more: object, of: Callable[[Home], Path], to: Callable[[Home], Path]) -> Arguments:
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.get(layout, {}).items()]
    return lambda home: ["export", of(home), to(home), "--to", layout, "-j", 1, "-q", *sizes, *more]


def _import(layout: str, *more: object, of: Callable[[Home], Path], to: Callable[[Home], Path]) -> Arguments:
    dtype = ["--dtype", "uint16"] if layout == "olmo" else []
    eot = ["--eot-id", 0, "-j", 1, "-q"]
    return lambda home: ["import", of(home), "-o", to(home), "--from", layout, *eot, *dtype, *more]


def _here(home: Home) -> Path:
    return home.dataset


def _there(home: Home) -> Path:
    return home.out / "out"


def _good(subject: str) -> Callable[[Home], Path]:
    return lambda home: home.good(subject)


def _lose(name: str) -> Callable[[Home], None]:
    """Something to do for a repair, or for a build."""

    def lose(home: Home) -> None:
        with contextlib.suppress(OSError):
            os.unlink(home.dataset / name)

    return lose


def _damage(name: str) -> Callable[[Home], None]:
    """The same with something to move away."""

    def damage(home: Home) -> None:
        (home.dataset / name).write_bytes(b"damaged")

    return damage


def _change_source(home: Home) -> None:
    (home.sources / "2.jsonl").write_text('{"text": "another text by now"}\n')


def _read_documents(home: Home) -> None:
    sha = hashlib.sha256()
    dataset = tokenmill.open(home.dataset)
    for split in dataset:
        for document in dataset[split]:
            sha.update(document.tobytes())
    sys.stdout.write(f"{sha.hexdigest()}\n")


def _load(**options: Any) -> Call:
    def call(home: Home) -> None:
        _tell(tokenmill.DataLoader(home.dataset, SEQ_LEN, 2, epochs=1, drop_last=False, **options))

    return call


def _tell(batches: Iterable[Any]) -> None:
    """Print a digest of batches."""
    sha = hashlib.sha256()
    for batch in batches:
        for rows in batch.values():
            sha.update(np.ascontiguousarray(rows).tobytes())
    sys.stdout.write(f"{sha.hexdigest()}\n")


def _mix(home: Home) -> None:
    loader = tokenmill.DataLoader(tokenmill.Mixture({"a": (home.dataset, 1), "b": (home.dataset, 2)}), SEQ_LEN, 2)
    _tell(itertools.islice(loader, 20))


def _load_torch(home: Home) -> None:
    from tokenmill.torch import DataLoader

    _tell(DataLoader(home.dataset, SEQ_LEN, 2, rank=0, world_size=1, epochs=1))


def _stream(home: Home) -> None:
    stream = tokenmill.stream(home.sources, "byte", SEQ_LEN, 2, prefetch=0)
    for _, _ in zip(range(20), stream, strict=False):
        pass


def _read_url(url: str) -> None:
    for split in (dataset := tokenmill.open(url)):
        for document in dataset[split]:
            np.sum(document)


READERS = [
    Command(name="inspect", arguments=lambda home: ["inspect", home.dataset], is_reader=True, is_repeatable=True),
    Command(
        name="inspect --json",
        arguments=lambda home: ["inspect", home.dataset, "--json"],
        is_reader=True,
        is_repeatable=True,
    ),
    Command(
        name="bench",
        arguments=lambda home: ["bench", home.dataset, "--seconds", 0.01, "--seq-len", SEQ_LEN, "--batch-size", 2],
        is_reader=True,
    ),
    Command(name="verify", arguments=lambda home: ["verify", home.dataset], judge=_is_intact, is_reader=True),
    Command(name="documents", call=_read_documents, is_reader=True, is_repeatable=True),
    Command(name="loader", call=_load(), is_reader=True, is_repeatable=True),
    Command(name="loader, best_fit", call=_load(packing="best_fit"), is_repeatable=True),
    Command(name="loader, padded", call=_load(packing="padded"), is_repeatable=True),
    Command(name="mixture", call=_mix, is_reader=True, is_repeatable=True),
    Command(name="loader of torch", call=_load_torch, is_reader=True, is_repeatable=True),
]
DAMAGED = "repair of a damaged shard"
PREPARE = Command(name="prepare", arguments=_prepare(), judge=is_as("dataset"))
REPAIR = Command(name="repair", arguments=lambda home: ["repair", home.dataset, "-j", 1], judge=_is_intact)
VERIFY_SOURCE = Command(
    name="verify --source",
    arguments=lambda home: ["verify", home.dataset, "--source", "all", "-j", 1],
    judge=lambda home, case: is_as("dataset")(home, case),
    is_reader=True,
)
WRITERS = [
    PREPARE,
    Command(name="prepare --restart", arguments=_prepare("--restart"), judge=is_as("dataset")),
    Command(name="prepare --update", arguments=_prepare("--update"), before=_change_source),
    Command(name="prepare --layout", arguments=_prepare("--layout", "nanogpt"), judge=is_as("dataset")),
    Command(
        name="prepare --scratch",
        arguments=lambda home: [*_prepare()(home), "--scratch", home.out],
        judge=is_as("dataset"),
    ),
    Command(name="plan", arguments=lambda home: ["plan", *_prepare()(home)[1:-1]], is_reader=True),
    REPAIR,
]
COMMANDS: dict[str, list[Command]] = {
    "dataset": [
        *READERS,
        *WRITERS,
        Command(name="verify --quick", arguments=lambda home: ["verify", home.dataset, "--quick"], is_reader=True),
        VERIFY_SOURCE,
        replace(REPAIR, name="repair of a lost shard", before=_lose("train/00002.bin")),
        replace(REPAIR, name=DAMAGED, before=_damage("train/00002.bin")),
        replace(REPAIR, name="repair of lost provenance", before=_lose("provenance/00000.parquet")),
        replace(REPAIR, name="repair without a manifest", before=_lose("dataset.json"), judge=is_as("dataset")),
        replace(PREPARE, name="prepare without a manifest", before=_lose("dataset.json")),
        *(
            Command(
                name=f"export to {layout}",
                arguments=_export(layout, of=_here, to=_there),
                judge=gives(f"layout {layout}"),
                is_reader=True,
            )
            for layout in LAYOUTS
        ),
        Command(name="export over it", arguments=_export("nanogpt", of=_good("dataset"), to=_here)),
        Command(
            name="export over it, --restart", arguments=_export("nanogpt", "--restart", of=_good("dataset"), to=_here)
        ),
        Command(name="import over it", arguments=_import("megatron", of=_good("layout megatron"), to=_here)),
        Command(
            name="import over it, --restart",
            arguments=_import("megatron", "--restart", of=_good("layout megatron"), to=_here),
        ),
        Command(name="consolidate", arguments=lambda home: ["consolidate", "--data-root", home.dataset, "-q"]),
    ],
    "unfinished": [*READERS[:5], *WRITERS],
    "import": [
        *READERS,
        *WRITERS[:2],
        REPAIR,
        Command(
            name="import again",
            arguments=_import("megatron", of=_good("layout megatron"), to=_here),
            judge=is_as("import"),
        ),
        Command(
            name="import --restart",
            arguments=_import("megatron", "--restart", of=_good("layout megatron"), to=_here),
            judge=is_as("import"),
        ),
    ],
    **{
        f"layout {layout}": [
            *(replace(reader, judge=lambda home, case: "") for reader in READERS),
            Command(
                name="export again",
                arguments=_export(layout, of=_good("dataset"), to=_here),
                judge=is_as(f"layout {layout}"),
            ),
            Command(
                name="export --restart",
                arguments=_export(layout, "--restart", of=_good("dataset"), to=_here),
                judge=is_as(f"layout {layout}"),
            ),
            Command(name="import", arguments=_import(layout, of=_here, to=_there), is_reader=True),
            Command(name="export of it", arguments=_export("nanogpt", of=_here, to=_there), is_reader=True),
            PREPARE,
            replace(REPAIR, judge=lambda home, case: ""),
        ]
        for layout in LAYOUTS
    },
    **{
        subject: [
            Command(
                name="consolidate",
                arguments=lambda home: ["consolidate", "--data-root", home.dataset, "--seq-len", 16, "-j", 1, "-q"],
                judge=is_as("consolidated"),
            ),
            *READERS[:2],
        ]
        for subject in ("shards", "consolidated")
    },
    "sources": [
        Command(
            name="prepare",
            arguments=lambda home: [*_prepare("--restart")(home)[:3], _there(home), *_prepare()(home)[4:]],
            judge=lambda home, case: difference(tree(home.good("dataset")), tree(_there(home))),
        ),
        replace(PREPARE, name="prepare again"),
        Command(name="prepare --restart", arguments=_prepare("--restart"), judge=is_as("dataset")),
        replace(WRITERS[-2], name="plan"),
        VERIFY_SOURCE,
        replace(REPAIR, name="repair of a lost shard", before=_lose("train/00002.bin"), judge=is_as("dataset")),
        Command(name="stream", call=_stream, is_reader=True),
    ],
}
MOVES: list[Command] = [
    Command(
        name="push",
        arguments=lambda home: ["push", home.dataset, f"{home.bucket.url}/pushed", "-q"],
        judge=lambda home, case: difference(tree(home.good("dataset")), home.bucket.tree("pushed")),
        before=lambda home: [home.bucket.delete(key) for key in home.bucket.listed("pushed/")] and None,
        is_reader=True,
    ),
    Command(
        name="pull over it",
        arguments=lambda home: ["pull", f"{home.bucket.url}/good", home.dataset, "-q"],
        judge=is_as("dataset"),
    ),
    Command(
        name="pull of the rest",
        arguments=lambda home: ["pull", f"{home.bucket.url}/good", home.dataset, "-q"],
        before=_lose("train/00001.bin"),
        judge=is_as("dataset"),
    ),
    Command(
        name="pull without a manifest",
        arguments=lambda home: ["pull", f"{home.bucket.url}/good", home.dataset, "-q"],
        before=_lose("dataset.json"),
        judge=is_as("dataset"),
    ),
]
# What is forged lies in the bucket here.
BUCKET_READERS: list[Command] = [
    Command(name="pull", arguments=lambda home: ["pull", f"{home.bucket.url}/forged", _there(home), "-q"]),
    Command(name="verify of a URL", arguments=lambda home: ["verify", f"{home.bucket.url}/forged"]),
    Command(name="inspect of a URL", arguments=lambda home: ["inspect", f"{home.bucket.url}/forged"]),
    Command(name="loader of a URL", call=lambda home: _read_url(f"{home.bucket.url}/forged")),
]
