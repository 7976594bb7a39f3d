"""Damage to a finished dataset: bits that flip, files that are cut, swapped, lost, or turned into something else.

healthy -> some damage -> verify names exactly the files that were hit
                       -> repair gives the right bytes again, and touches no other file
.build  -> some damage -> verify does not mind; what needs .build gives the right bytes, or says what to do
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.cell import Point, explore
from lab.world import World, files, make_world, tree
from lab_runner import Row
from tokenmill.errors import DatasetError, TokenmillError
from tokenmill.storage.local import Folder

MANIFEST = "dataset.json"
# What differs between the worlds that are damaged: all of them have joined and single shards and a tokenizer file.
RECIPES: tuple[dict[str, Any], ...] = (
    {"unit_bytes": 2000, "split": {"val": 0.1, "test": 0.1}},
    {"unit_bytes": 2000, "split": {"val": 0.1}, "max_tokens": 2000},
    {"unit_bytes": 2000, "split": {}, "eot": "none"},
)
# A hint is one if it tells the user to do something.
_ACTION = re.compile(r"restart=True|repair|prepare|remove|put |check |choose|bring|wait|drop|free |run ")
_STRANGERS = ("00099.bin", "00099.idx", "x", "x\n", "00000.bin.bak", "00000.parquet", ".hidden", "é", "\udcff")
_SWEPT = "some.file.0123456789ab.tmp"

Identity = dict[str, tuple[int, int]]


class Scene:
    """A finished dataset that is damaged and mended again. All of its bytes are kept in memory."""

    def __init__(self, world: World, path: str) -> None:
        self.world, self.path = world, path
        world.build(path)
        whole = dict(files(Folder(path)))
        self.good = {name: data for name, data in whole.items() if not name.startswith(".build/")}
        self.state = {name: data for name, data in whole.items() if name.startswith(".build/")}
        assert tree(path) == world.right, "two builds of the same world differ"

    def at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def restore(self, *, state: bool = False) -> None:
        """Everything as it was; what is healthy is left alone, what does not belong is removed."""
        wanted = {**self.good, **self.state} if state else self.good
        parents = {os.path.dirname(name) for name in wanted} | {""}
        for parent in sorted(parents):
            _make_folder(self.at(parent))
            for child in os.listdir(self.at(parent)):
                name = f"{parent}/{child}" if parent else child
                if name not in wanted and name not in parents and (parent or name != ".build"):
                    _clear(self.at(name))
        for name, data in wanted.items():
            if not _holds(self.at(name), data):
                _clear(self.at(name))
                Path(self.at(name)).write_bytes(data)

    def strays(self) -> set[str]:
        """What lies among the files of the dataset and is none of them."""
        parents = {os.path.dirname(name) for name in self.good} - {""}
        there = (f"{parent}/{child}" for parent in parents for child in _children(self.at(parent)))
        return {name for name in there if name not in self.good}

    def identities(self, names: set[str]) -> Identity:
        """Inode and time of files: whoever touches one changes one of them."""
        stats = {name: os.lstat(self.at(name)) for name in sorted(names)}
        return {name: (found.st_ino, found.st_mtime_ns) for name, found in stats.items()}


# A damage does something to the file of that name, and says whether it did.
Damage = Callable[[Scene, str, random.Random], bool]


def flip(scene: Scene, name: str, chance: random.Random) -> bool:
    """Some bits of a file turn over."""
    data = bytearray(_content(scene, name))
    for place in chance.sample(range(8 * len(data)), min(8 * len(data), chance.choice((1, 1, 1, 2, 8)))):
        data[place // 8] ^= 1 << place % 8
    return _rot(scene, name, bytes(data))


def overwrite(scene: Scene, name: str, chance: random.Random) -> bool:
    """A range becomes noise, zeros, or what a neighbouring range holds."""
    data = _content(scene, name)
    start, stop = sorted(chance.choices(range(len(data) + 1), k=2))
    other = chance.randrange(len(data))
    filling = (chance.randbytes(stop - start), bytes(stop - start), data[other : other + stop - start])
    return _rot(scene, name, data[:start] + chance.choice(filling) + data[stop:])


def cut(scene: Scene, name: str, chance: random.Random) -> bool:
    data = _content(scene, name)
    return _rot(scene, name, data[: chance.choice((0, 1, len(data) // 2, len(data) - 1, chance.randrange(len(data))))])


def grow(scene: Scene, name: str, chance: random.Random) -> bool:
    more = chance.choice((b"\0", b"\n", b" ", b"\0" * 4096, chance.randbytes(chance.randint(1, 600))))
    data = _content(scene, name)
    return _rot(scene, name, chance.choice((data + more, more + data)))


def swap_blocks(scene: Scene, name: str, chance: random.Random) -> bool:
    data = _content(scene, name)
    size = chance.choice((1, 2, 4, 16, 64))
    blocks = [data[at : at + size] for at in range(0, len(data), size)]
    first, second = chance.choices(range(len(blocks)), k=2)
    blocks[first], blocks[second] = blocks[second], blocks[first]
    return _rot(scene, name, b"".join(blocks))


def swap_files(scene: Scene, name: str, chance: random.Random) -> bool:
    """Two files change places, as a confused copy leaves them."""
    other = chance.choice(sorted(_pool(scene, name) - {name}))
    if not _can_mix(scene, name, other):
        return False
    os.rename(scene.at(name), scene.at(_SWEPT))
    os.rename(scene.at(other), scene.at(name))
    os.rename(scene.at(_SWEPT), scene.at(other))
    return True


def copy_over(scene: Scene, name: str, chance: random.Random) -> bool:
    """A file holds what another one should; it may even be the same file under two names."""
    other = chance.choice(sorted(_pool(scene, name) - {name}))
    if not _can_mix(scene, name, other):
        return False
    _clear(scene.at(name))
    if chance.random() < 0.5:
        os.link(scene.at(other), scene.at(name))
    else:
        shutil.copy2(scene.at(other), scene.at(name))
    return True


def delete(scene: Scene, name: str, chance: random.Random) -> bool:
    _clear(scene.at(name))
    return True


def delete_folder(scene: Scene, name: str, chance: random.Random) -> bool:
    """All of the folder that a file is in; the file alone if that is the dataset's own."""
    parent = os.path.dirname(name)
    if not parent:
        return delete(scene, name, chance)
    _clear(scene.at(parent))
    return True


def turn_folder_into_file(scene: Scene, name: str, chance: random.Random) -> bool:
    """The folder that a file is in gives way to a file, a pipe, or a link to nowhere."""
    parent = os.path.dirname(name)
    if not parent:
        return False
    _clear(scene.at(parent))
    kind = chance.randrange(3)
    if kind == 0:
        os.mkfifo(scene.at(parent))
    elif kind == 1:
        os.symlink(scene.path + ".nothing", scene.at(parent))
    else:
        Path(scene.at(parent)).write_bytes(b"x")
    return True


def turn_into_folder(scene: Scene, name: str, chance: random.Random) -> bool:
    _clear(scene.at(name))
    os.mkdir(scene.at(name))
    if chance.random() < 0.5:
        Path(scene.at(name), "inside").write_bytes(b"x")
    return True


def turn_into_link(scene: Scene, name: str, chance: random.Random) -> bool:
    """A symbolic link to a good copy, to nothing, or to itself."""
    copy = scene.path + ".copy"
    Path(copy).write_bytes((scene.good | scene.state)[name])
    _clear(scene.at(name))
    os.symlink(chance.choice((copy, scene.path + ".nothing", os.path.basename(name), "/dev/zero")), scene.at(name))
    return True


def turn_into_pipe(scene: Scene, name: str, chance: random.Random) -> bool:
    """A pipe: whoever opens it without a look waits for ever."""
    _clear(scene.at(name))
    os.mkfifo(scene.at(name))
    return True


def stray(scene: Scene, name: str, chance: random.Random) -> bool:
    """Something that nobody wrote for this dataset, beside its files."""
    parent = os.path.dirname(name) or "train"
    stem = chance.choice(_STRANGERS)
    new = f"{parent}/{stem}"
    if os.path.lexists(scene.at(new)) or not os.path.isdir(scene.at(parent)):
        return False
    kind = chance.randrange(5)
    if kind == 0:
        os.mkdir(scene.at(new))
    elif kind == 1:
        os.symlink("/dev/zero", scene.at(new))
    elif kind == 2:
        os.mkfifo(scene.at(new))
    else:
        Path(scene.at(new)).write_bytes(chance.randbytes(chance.randint(0, 40)))
    return True


IN_PLACE: tuple[Damage, ...] = (flip, overwrite, cut, grow, swap_blocks)
DAMAGES: tuple[Damage, ...] = (
    *IN_PLACE,
    swap_files,
    copy_over,
    delete,
    delete_folder,
    turn_folder_into_file,
    turn_into_folder,
    turn_into_link,
    turn_into_pipe,
    stray,
)


def damages_of(number: int) -> int:
    """How many damages a point does at once."""
    return 1 if number % 4 else 2 + number // 4 % 4


def hit(scene: Scene, chance: random.Random, count: int, names: set[str]) -> tuple[set[str], list[str]]:
    """Do so many damages to some of these files; gives what is not as it should be, and what was done."""
    done: list[str] = []
    # After some damages there is nothing left that others could be done to.
    for _ in range(100 * count):
        if len(done) == count:
            break
        name, damage = chance.choice(sorted(names)), chance.choice(DAMAGES)
        is_there = _is_plain(scene.at(name)) if damage in IN_PLACE else os.path.lexists(scene.at(name))
        if (is_there or damage is stray) and damage(scene, name, chance):
            done.append(f"{damage.__name__} {name}")
    # One damage may undo or move another, so what counts is how things stand in the end.
    return {name for name in scene.good if not _holds(scene.at(name), scene.good[name])} | scene.strays(), done


def _pool(scene: Scene, name: str) -> set[str]:
    return set(scene.state if name.startswith(".build/") else scene.good)


def _content(scene: Scene, name: str) -> bytes:
    return Path(scene.at(name)).read_bytes() or b"\0"


def _rot(scene: Scene, name: str, data: bytes) -> bool:
    """Change a file as a bad disk does: in place, and without a trace in its times."""
    found = os.stat(scene.at(name))
    if Path(scene.at(name)).read_bytes() == data:
        return False
    Path(scene.at(name)).write_bytes(data)
    os.utime(scene.at(name), ns=(found.st_atime_ns, found.st_mtime_ns))
    return True


def _can_mix(scene: Scene, first: str, second: str) -> bool:
    """Whether two names stand for plain files with different content."""
    paths = [scene.at(name) for name in (first, second)]
    return all(map(_is_plain, paths)) and Path(paths[0]).read_bytes() != Path(paths[1]).read_bytes()


def _is_plain(path: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


def _holds(path: str, data: bytes | None) -> bool:
    return data is not None and _is_plain(path) and Path(path).read_bytes() == data


def _children(path: str) -> list[str]:
    return os.listdir(path) if os.path.isdir(path) and not os.path.islink(path) else []


def _clear(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _make_folder(path: str) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        _clear(path)
        os.mkdir(path)


def check_verify(scene: Scene, hurt: set[str]) -> str:
    """What verify says against what it should say; empty if they agree."""
    try:
        named = {problem.file for problem in scene.world.verify(scene.path).problems}
    except DatasetError as error:
        if MANIFEST not in hurt:
            return f"verify raised {error.message!r}, but the manifest is well"
        return "" if MANIFEST in error.message else f"verify does not name {MANIFEST}: {error.message!r}"
    except TokenmillError as error:
        return f"verify raised {type(error).__name__}: {error.message!r}"
    return "" if named == hurt else f"verify names {sorted(named)}, damaged are {sorted(hurt)}"


def check_repair(scene: Scene, hurt: set[str]) -> str:
    """Repair, and see what it did. It must succeed: what it needs is there."""
    healthy = set(scene.good) - hurt
    before = scene.identities(healthy)
    try:
        scene.world.repair(scene.path)
    except TokenmillError as error:
        return f"repair raised {type(error).__name__}: {error.message!r}"
    return _check_result(scene, before)


def _check_result(scene: Scene, before: Identity) -> str:
    touched = [name for name, found in scene.identities(set(before)).items() if found != before[name]]
    if touched:
        return f"{touched} were healthy and have been touched"
    wrong = {name for name, data in scene.good.items() if not _holds(scene.at(name), data)} | scene.strays()
    if wrong:
        return f"{sorted(wrong)} are not what they were"
    report = scene.world.verify(scene.path)
    return "" if report.ok else f"verify is not content with it: {report.problems}"


def check_needy(scene: Scene, hurt: set[str], *, again: bool) -> str:
    """What stands on a damaged .build: right bytes, or an error that says what to do."""
    before = scene.identities(set(scene.good) - hurt)
    try:
        if again:
            scene.world.build(scene.path)
        else:
            scene.world.repair(scene.path)
    except TokenmillError as error:
        if not _ACTION.search(error.hint):
            return f"{type(error).__name__} does not say what to do: {error.message!r}, {error.hint!r}"
        touched = [name for name, found in scene.identities(set(before)).items() if found != before[name]]
        return f"{touched} have been touched before it gave up" if touched else ""
    if again and hurt:
        # Without a size that is wrong, prepare has no reason to doubt a dataset, and must leave it as it is.
        touched = [name for name, found in scene.identities(set(before)).items() if found != before[name]]
        return f"{touched} have been touched" if touched else ""
    return _check_result(scene, before)


@contextlib.contextmanager
def scenes(seed: int, kind: str) -> Iterator[Point]:
    """Worlds in a temp folder, and points that damage them."""
    home = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="damage-", dir=home) as folder:
        made = []
        for index, recipe in enumerate(RECIPES):
            world = make_world(Path(folder, str(index)), documents=60, tokenizer="char", **recipe)
            made.append(Scene(world, os.path.join(folder, f"out{index}")))
        check = {"verify": _try_verify, "repair": _try_repair, "state": _try_state}[kind]

        def point(number: int) -> str | None:
            scene, chance = made[number % len(made)], random.Random(f"{seed} {kind} {number}")
            said, done = check(scene, chance, number)
            return f"recipe {number % len(made)}, {', '.join(done)}: {said}" if said else None

        yield point


def _try_verify(scene: Scene, chance: random.Random, number: int) -> tuple[str, list[str]]:
    hurt, done = hit(scene, chance, damages_of(number), set(scene.good))
    said = check_verify(scene, hurt)
    scene.restore()
    return said, done


def _try_repair(scene: Scene, chance: random.Random, number: int) -> tuple[str, list[str]]:
    hurt, done = hit(scene, chance, damages_of(number), set(scene.good))
    said = check_verify(scene, hurt) or check_repair(scene, hurt)
    # What repair leaves is the next point's ground; only its quarantine is emptied.
    _clear(scene.at(".build/quarantine"))
    if said:
        scene.restore(state=True)
    return said, done


def _try_state(scene: Scene, chance: random.Random, number: int) -> tuple[str, list[str]]:
    """Damage to .build, and to the dataset too in every other point."""
    _, done = hit(scene, chance, damages_of(number), set(scene.state))
    said = check_verify(scene, set())
    hurt: set[str] = set()
    if number % 2:
        hurt, more = hit(scene, chance, 1, set(scene.good))
        done += more
        said = said or check_verify(scene, hurt)
    said = said or check_needy(scene, hurt, again=number % 3 == 0)
    _clear(scene.at(".build"))
    scene.restore(state=True)
    return said, done


def run(kind: str, points: int, *, seed: int = 0) -> Row:
    """An experiment of so many points: `verify`, `repair` or `state`."""
    found = explore(scenes, (seed, kind), points)
    titles = {
        "verify": "damage to a dataset: verify names the file",
        "repair": "damage to a dataset: repair restores it",
        "state": "damage to .build",
    }
    row = found.row(titles[kind])
    # A .build that is gone leaves nothing for a second damage, so there a point counts once.
    tried = row.tried if kind == "state" else sum(damages_of(number) for number in range(row.tried))
    return dataclasses.replace(row, tried=tried)


EXPERIMENTS = [
    ("damage-verify", lambda: run("verify", 5800)),
    ("damage-repair", lambda: run("repair", 700)),
    ("damage-state", lambda: run("state", 400)),
]
