"""Datasets of a stranger under every command: links, pipes, devices, odd names, permissions, sizes, records.

    one oddity at one path of a dataset, of an unfinished build, of an import, of files of a layout, or of shards
    one command, or one call of the library, in a process of its own

It ends within seconds; with an exit code of its own, a sentence and a hint, or with the result that it has where
nothing is odd; and whatever is beside the dataset is as it was: names, content, permissions, times, inodes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from differ.children import NOBODY, Ended
from differ.commands import BUCKET_READERS, COMMANDS, DAMAGED, MOVES, Case, Command
from differ.forgeries import forgeries
from differ.homes import About, Home, environment, is_root, make_home, tree
from differ.oddities import NEW_NAMES, ODD_NAMES, ODDITIES, Oddity, odd_name
from differ.seeding import Bug, all_of, replaced
from lab_runner import Row
from stores import bucket_server
from tokenmill.formats import files as listing
from tokenmill.storage import local
from tokenmill.storage.filesystem import LocalFileSystem

PATIENCE_SECONDS = 10.0
BYTES_OF_TERMINALS = re.compile("[\x00-\x08\x0b-\x1f\x7f]")


def cases(home: Home, subject: str) -> Iterator[Case]:
    """Every oddity at every path of a subject, and at those that are not there."""
    root = home.good(subject)
    paths = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    for where in paths:
        of = "folder" if (root / where).is_dir() else "file"
        for oddity in ODDITIES:
            # To read as much is right, and takes its time.
            if oddity.of == of and (oddity.name != "a huge file" or subject != "sources"):
                yield Case(subject=subject, where=where, oddity=oddity)
    for where in NEW_NAMES:
        if where not in paths and (root / where).parent.is_dir():
            for oddity in ODDITIES:
                if oddity.of == "new":
                    yield Case(subject=subject, where=where, oddity=oddity)
    for where in ["", *(path for path in paths if (root / path).is_dir())]:
        for name in ODD_NAMES:
            oddity = Oddity(name=f"a file named {name!r}", plant=odd_name(name), of="name")
            yield Case(subject=subject, where=where, oddity=oddity)
    for where in ("",):  # the dataset itself
        for oddity in ODDITIES:
            if oddity.of == "folder" and "device" not in oddity.name and "/dev" not in oddity.name:
                yield Case(subject=subject, where=where, oddity=oddity)
    yield from (Case(subject=subject, where=where, oddity=oddity) for where, oddity in forgeries(home, subject))


def try_one(home: Home, case: Case, command: Command) -> str:
    """What is wrong with one command on one folder; an empty text if nothing is."""
    uid = NOBODY if case.oddity.needs_user and is_root() else None
    home.begin(case.subject, uid)
    command.before(home)
    try:
        case.oddity.plant(home, case.at(home))
    except OSError:  # it was lost, or has this name already
        return ""
    return look_at(home, case, command, uid)


def look_at(home: Home, case: Case, command: Command, uid: int | None) -> str:
    """The same, once all is as it should be before."""
    before, inside = _around(home, case), tree(home.dataset)
    ended = command.run(home, uid, patience=PATIENCE_SECONDS)
    about = f"{command.name}, {case}"
    if ended.code is None:
        return f"{about}: no end after {PATIENCE_SECONDS:.0f} s: {ended.said[-200:]}"
    if not ended.is_typed:
        return f"{about}: it ended with {ended.code}: {ended.said[-700:]}"
    if found := BYTES_OF_TERMINALS.search(ended.said):
        return f"{about}: it printed {found[0]!r} as it is: {ended.said[-300:]!r}"
    after = _around(home, case)
    if after != before:
        names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        return f"{about}: it changed what is not the dataset's: {', '.join(map(repr, names[:4]))} ({ended.said[-300:]})"
    is_refused = ended.code not in (0, 3)
    if (command.is_reader or (is_refused and " is a link" in ended.said)) and tree(home.dataset) != inside:
        return f"{about}: it changed the dataset, which it only read or refused: {ended.said[-300:]}"
    if is_refused:
        return _wrongly_refused(case, command, ended, about)
    may_differ = case.oddity.is_forged or (case.subject == "sources" and not case.oddity.is_benign)
    what = "" if may_differ else command.judge(home, case)
    if command.is_repeatable and not may_differ and not what and case.subject in ("dataset", "import"):
        what = "" if ended.said == _undisturbed(home, case, command) else f"it read something else: {ended.said[:300]}"
    return f"{about}: {what}" if what else ""


_said: dict[tuple[Path, str, str], str] = {}


def _undisturbed(home: Home, case: Case, command: Command) -> str:
    """What a command says where nothing is odd."""
    key = home.root, case.subject, command.name
    if key not in _said:
        home.begin(case.subject)
        _said[key] = command.run(home, None, patience=PATIENCE_SECONDS).said
    return _said[key]


def _around(home: Home, case: Case) -> dict[str, About]:
    """What may not change. If the dataset itself is a link, the user has named what it leads to."""
    found = home.around()
    return found if case.where else {name: about for name, about in found.items() if not name.startswith("home/theirs")}


def _wrongly_refused(case: Case, command: Command, ended: Ended, about: str) -> str:
    """A folder on another disk may be read wherever it is, as long as it has what it should have."""
    is_well = case.oddity.is_benign and case.oddity.of == "folder" and "link" in case.oddity.name
    if is_well and command.is_reader and case.subject in ("dataset", "import") and ".build" not in case.where:
        return f"{about}: it was refused although all is there: {ended.said[-300:]}"
    return ""


def hostile(
    subject: str,
    scale: int | None,
    *,
    seed: int = 0,
    only: Callable[[Case], bool] = lambda case: True,
    commands: Sequence[Command] = (),
    make: Callable[[], contextlib.AbstractContextManager[Home]] = make_home,
) -> Row:
    """Commands on all oddities of a subject, or on `scale` of those, as many of each kind, drawn by the seed."""
    wrong: list[str] = []
    hangs = tried = 0
    with make() as home:
        points = [(case, one) for case in cases(home, subject) if only(case) for one in commands or COMMANDS[subject]]
        good = tree(home.root / "good")
        for case, command in _drawn(points, scale, random.Random(f"{subject} {seed}")):
            what = try_one(home, case, command)
            tried += 1
            hangs += ": no end after " in what
            wrong += [what] if what else []
        if tree(home.root / "good") != good:
            wrong.append(f"{subject}: a command changed the folder that it only read")
    return Row(fault=f"a stranger's {subject}", tried=tried, wrong=tuple(wrong), hangs=hangs)


def _drawn(points: list[tuple[Case, Command]], scale: int | None, chance: random.Random) -> list[tuple[Case, Command]]:
    """Some of the points, in turn of each kind: there are many more names than links."""
    if scale is None or scale >= len(points):
        return points
    kinds: dict[str, list[tuple[Case, Command]]] = {}
    for point in chance.sample(points, len(points)):
        kinds.setdefault(point[0].oddity.of, []).append(point)
    drawn: list[tuple[Case, Command]] = []
    while len(drawn) < scale:
        drawn += [kind.pop() for kind in kinds.values() if kind]
    return drawn[:scale]


@contextlib.contextmanager
def make_home_with_bucket() -> Iterator[Home]:
    """A home whose dataset is in a bucket as well."""
    with make_home() as home, bucket_server("s3") as make_bucket:
        bucket = make_bucket(f"b-{uuid.uuid4().hex[:12]}")
        good = home.good("dataset")
        for file in good.rglob("*"):
            if file.is_file() and ".build" not in file.parts:
                bucket.put(f"good/{file.relative_to(good)}", file.read_bytes())
        with environment(**bucket.environment):
            yield replace(home, bucket=bucket)


def forged_objects(scale: int, *, seed: int = 0) -> Row:
    """Manifests of a stranger in a bucket: names that lead out of the folder, and numbers that cannot be."""
    wrong: list[str] = []
    hangs = tried = 0
    with make_home_with_bucket() as home:
        good = home.good("dataset")
        for file in good.rglob("*"):
            if file.is_file() and ".build" not in file.parts:
                home.bucket.put(f"forged/{file.relative_to(good)}", file.read_bytes())
        points = [
            (Case(subject="dataset", where=where, oddity=oddity), command)
            for where, oddity in forgeries(home, "dataset")
            if where == "dataset.json"
            for command in BUCKET_READERS
        ]
        for case, command in random.Random(seed).sample(points, scale):
            home.begin("dataset")
            case.oddity.plant(home, case.at(home))
            home.bucket.put("forged/dataset.json", case.at(home).read_bytes())
            what = look_at(home, case, command, None)
            tried += 1
            hangs += ": no end after " in what
            wrong += [what] if what else []
    return Row(fault="a stranger's bucket", tried=tried, wrong=tuple(wrong), hangs=hangs)


SCALES = {"dataset": 2000, "unfinished": 1000, "import": 500, "sources": 500}
EXPERIMENTS: list[tuple[str, Callable[[], Row]]] = [
    *((f"hostile {one}", functools.partial(hostile, one, SCALES.get(one, 250))) for one in COMMANDS),
    (
        "hostile moves",
        functools.partial(hostile, "dataset", 400, commands=MOVES, make=make_home_with_bucket),
    ),
    ("hostile bucket", functools.partial(forged_objects, 200)),
]


def points(*named: tuple[str, str, str, str], patience: float = PATIENCE_SECONDS) -> Row:
    """Some points alone: what is wrong, where, with which kind of folder, and the command."""
    wrong = []
    with make_home() as home, replaced(sys.modules[__name__], "PATIENCE_SECONDS", patience)():
        for subject, oddity, where, command in named:
            (case,) = (one for one in cases(home, subject) if (one.oddity.name, one.where) == (oddity, where))
            (tried,) = (one for one in COMMANDS[subject] if one.name == command)
            what = try_one(home, case, tried)
            wrong += [what] if what else []
    return Row(fault="a stranger's datasets", tried=len(named), wrong=tuple(wrong))


def _append_to_anything(_: Any, path: str) -> int:
    """Opening a log as it was done once: by whatever name."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


_NO_CHECKS = all_of(
    replaced(local, "check_parents", lambda *_: None), replaced(local, "check_folders", lambda *_: None)
)
_TOUCHED = "it changed what is not the dataset's"
BUGS: list[Bug] = [
    Bug(
        name="repair goes through a linked folder",
        plant=_NO_CHECKS,
        trial=lambda: points(("dataset", "a link to a stranger's folder", "train", "repair")),
        says=_TOUCHED,
    ),
    Bug(
        name="what is moved away goes through a link",
        plant=_NO_CHECKS,
        trial=lambda: points(("dataset", "a link to an empty folder", ".build/quarantine", DAMAGED)),
        says=_TOUCHED,
    ),
    Bug(
        name="temp files are swept through a link",
        plant=_NO_CHECKS,
        trial=lambda: points(("unfinished", "a link to a stranger's folder", "provenance", "prepare")),
        says=_TOUCHED,
    ),
    Bug(
        name="a log is written under whatever name",
        plant=replaced(LocalFileSystem, "append", _append_to_anything),
        trial=lambda: points(("unfinished", "a name of a stranger's file", ".build/events.jsonl", "prepare")),
        says=_TOUCHED,
    ),
    Bug(
        name="a pipe is waited for",
        plant=replaced(listing, "open_plain", os.open),
        trial=lambda: points(("layout templar", "a pipe", "tokens.bin", "inspect"), patience=2.0),
        says="no end after 2 s",
    ),
]
