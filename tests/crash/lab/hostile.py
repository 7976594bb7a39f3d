"""Datasets whose records were written by somebody else: well formed, rightly sealed, and not true.

What reads a record believes the seal, so here every command meets values that no build of ours writes:
units that do not exist, sizes that cannot be, names that lead elsewhere. Each command does its work or
gives an error of ours; nothing outside of the dataset is touched.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from lab.cell import Point, explore
from lab.damage import Scene
from lab.mutate import body_of, reseal, same_kind_of, value_of
from lab.world import make_world
from lab_runner import Row
from tokenmill import records
from tokenmill.build.plan import Plan
from tokenmill.cli.output import describe, first_texts
from tokenmill.errors import TokenmillError
from tokenmill.formats.open import open as open_dataset
from tokenmill.maintenance.verify import verify_folder
from tokenmill.storage.local import Folder
from tokenmill.units.receipts import PLAN

GROWTH_BYTES = 300_000_000
ADDRESS_BYTES = 8_000_000_000


def _read_all(scene: Scene) -> None:
    found = open_dataset(scene.path)
    for split in found.splits:
        for document in found[split]:
            document.sum()


def _inspect(scene: Scene) -> None:
    path = Path(scene.path)
    describe(path)
    for split in ("train", "val"):
        first_texts(path, split, 3)


def _verify_source(scene: Scene) -> None:
    verify_folder(Folder(scene.path), threads=1, source="all")


def _repair(scene: Scene) -> None:
    """A repair that has something to do."""
    name = random.Random(scene.path).choice(["train/00000.bin", "provenance/00000.parquet"])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(scene.at(name))
    scene.world.repair(scene.path)


def _go_on(scene: Scene) -> None:
    """A build that was stopped before its manifest."""
    os.unlink(scene.at("dataset.json"))
    scene.world.build(scene.path)


COMMANDS: dict[str, Callable[[Scene], object]] = {
    "verify": lambda scene: scene.world.verify(scene.path),
    "verify --source": _verify_source,
    "repair": lambda scene: scene.world.repair(scene.path),
    "repair of a lost file": _repair,
    "prepare": lambda scene: scene.world.build(scene.path),
    "prepare of the rest": _go_on,
    "open": _read_all,
    "inspect": _inspect,
}


@contextlib.contextmanager
def strangers(seed: int) -> Iterator[Point]:
    home = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=home) as folder:
        world = make_world(Path(folder, "world"), "budget", tokenizer="char", documents=10)
        os.mkdir(os.path.join(folder, "home"))
        scene = Scene(world, os.path.join(folder, "home", "out"))
        sealed = [name for name in (*scene.good, *scene.state) if name.endswith(".json") and name != "characters.json"]
        # A receipt is one of many, and the others are read by all.
        weights = [1 if "receipts" in name else 8 for name in sealed]
        bodies = {name: body_of((scene.good | scene.state)[name]) for name in sealed}
        Path(folder, "home", "theirs").write_bytes(b"not of this dataset")
        outside = _around(folder)

        def point(number: int) -> str | None:
            chance = random.Random(f"{seed} {number}")
            (name,) = chance.choices(sealed, weights)
            command = chance.choice(list(COMMANDS))
            change = value_of if chance.random() < 0.4 else same_kind_of
            _plant(scene, bodies, name, change(bodies[name], chance))
            said = None
            try:
                COMMANDS[command](scene)
            except TokenmillError as error:
                said = None if error.message else "an error without a word"
            except BaseException as error:
                said = f"{type(error).__name__}: {str(error)[:200]} {_place(error)}"
            if _around(folder) != outside:
                said = "something outside of the dataset was touched"
            scene.restore(state=True)
            return f"{command} with another {name}: {said}" if said else None

        yield point


def _plant(scene: Scene, bodies: dict[str, bytes], name: str, text: bytes) -> None:
    """Put a record into the dataset; the others follow a plan that has another fingerprint now."""
    Path(scene.at(name)).write_bytes(reseal(text))
    if name != PLAN:
        return
    with contextlib.suppress(TokenmillError):
        before = records.unseal(Plan, reseal(bodies[PLAN]), where=PLAN).fingerprint
        after = records.unseal(Plan, reseal(text), where=PLAN).fingerprint
        for other in bodies.keys() - {PLAN}:
            Path(scene.at(other)).write_bytes(reseal(bodies[other].replace(before.encode(), after.encode())))


def _around(folder: str) -> dict[str, int]:
    """Whatever lies beside the dataset, and when it was last changed."""
    found = {}
    for parent in ("", "home"):
        for name in os.listdir(os.path.join(folder, parent)):
            path = os.path.join(folder, parent, name)
            found[path] = 0 if os.path.isdir(path) else os.stat(path).st_mtime_ns
    return found


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    places = []
    while trace is not None:
        places.append(f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(places[-4:]))


def run(points: int, *, seed: int = 0) -> Row:
    found = explore(strangers, (seed,), points, memory=ADDRESS_BYTES, is_quiet=True)
    if (grown := found.peak_bytes - found.base_bytes) > GROWTH_BYTES:
        found.wrong.append(f"memory grew by {grown} bytes")
    return found.row("records of a stranger, rightly sealed")


EXPERIMENTS = [("hostile", lambda: run(1200))]
