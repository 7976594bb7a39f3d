"""What is derived from a dataset, after its content changed and no size did: fresh again or refused, never the old.

    text -> dataset -> packing plan, export, import, state, ...
    the same lines in another order, or with words masked -> dataset again -> the same derivation in the same place

Expected is what the same calls give in folders that never saw the old text; labels are also compared with the bytes of
the text itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenmill
from differ.seeding import Bug, replaced
from lab_runner import Row
from tokenmill.build import check_sources, workspace
from tokenmill.dataset.dataset import Dataset
from tokenmill.dataset.manifest import Manifest
from tokenmill.errors import OutputError, StateError, TokenmillError
from tokenmill.formats.templar import consolidate
from tokenmill.loader import loader as loaders
from tokenmill.loader import packing

LAYOUTS = ("catid", "datatrove", "huggingface", "litdata", "llmc", "mds", "megatron", "nanogpt", "olmo", "templar")
EOT = 256
SEQ_LEN = 96
OPTIONS: dict[str, dict[str, Any]] = {
    "llmc": {"shard_size": 1024},
    "templar": {"seq_len": 16, "shard_size": 1024},
}
Derive = Callable[[Path, Path], Any]
Change = Callable[[list[str], random.Random], list[str]]


def make_lines(seed: int, count: int = 120) -> list[str]:
    """Lines of many lengths, none longer than a row."""
    chance = random.Random(seed)
    return ["".join(chance.choices("abcdefgh ", k=chance.randint(1, SEQ_LEN - 8))).strip() or "x" for _ in range(count)]


def shuffled(lines: list[str], chance: random.Random) -> list[str]:
    return chance.sample(lines, len(lines))


def masked(lines: list[str], chance: random.Random) -> list[str]:
    """As many characters, but no e any more in some lines: no length changes."""
    return [line.replace("e", "#") if chance.random() < 0.5 else line for line in lines]


def swapped(lines: list[str], _: random.Random) -> list[str]:
    """Two lines of the same length in each other's place: every position stays as well."""
    for first, line in enumerate(lines):
        for second in range(first + 1, len(lines)):
            if len(lines[second]) == len(line) and lines[second] != line:
                return [*lines[:first], lines[second], *lines[first + 1 : second], line, *lines[second + 1 :]]
    raise AssertionError("there are lines of equal length")


CHANGES: dict[str, Change] = {"shuffled": shuffled, "masked": masked, "swapped": swapped}


class Place:
    """A source and the dataset that is made of it, in a folder of their own."""

    def __init__(self, root: Path, lines: list[str]) -> None:
        self.root, self.source, self.dataset = root, root / "text.jsonl", root / "dataset"
        root.mkdir(parents=True, exist_ok=True)
        self.write(lines)

    def write(self, lines: list[str], *, restart: bool = False) -> None:
        before = self.source.stat().st_mtime_ns if self.source.exists() else 0
        self.source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        if self.source.stat().st_mtime_ns <= before:  # a coarse clock would hide the change
            os.utime(self.source, ns=(before + 10**9, before + 10**9))
        tokenmill.prepare(self.source, self.dataset, tokenizer="byte", workers=1, restart=restart)


@contextmanager
def places(seed: int, change: Change) -> Iterator[tuple[Place, Place, Callable[[], None]]]:
    """A place with the old text, a fresh one with the new text, and what changes the first one to it."""
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-derived-"))
    try:
        lines = make_lines(seed)
        new = change(lines, random.Random(seed + 1))
        old = Place(folder / "old", lines)
        yield old, Place(folder / "fresh", new), lambda: old.write(new, restart=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".build" not in path.parts
    }


def batches(loader: Any) -> list[Any]:
    return [{name: rows.tolist() for name, rows in batch.items()} for batch in loader]


def packed(kind: Any) -> Derive:
    def derive(dataset: Path, _: Path) -> Any:
        return batches(tokenmill.DataLoader(dataset, SEQ_LEN, 2, packing=kind, epochs=1, drop_last=False))

    return derive


def exported(layout: str) -> Derive:
    def derive(dataset: Path, work: Path) -> Any:
        tokenmill.export(dataset, work / "out", to=layout, **OPTIONS.get(layout, {}))
        return files(work / "out")

    return derive


def imported(layout: str) -> Derive:
    """The files of the layout are made again in the same place when the dataset has changed; the import stays."""

    def derive(dataset: Path, work: Path) -> Any:
        _export_again(dataset, work / "layout", layout)
        options: dict[str, Any] = {"dtype": "uint16"} if layout == "olmo" else {}
        tokenmill.import_(work / "layout", work / "out", layout=layout, eot_id=EOT, **options)
        return files(work / "out")

    return derive


def _export_again(dataset: Path, output: Path, layout: str) -> None:
    options = OPTIONS.get(layout, {})
    try:
        tokenmill.export(dataset, output, to=layout, **options)
    except OutputError:
        tokenmill.export(dataset, output, to=layout, restart=True, **options)


def consolidated(dataset: Path, work: Path) -> Any:
    _export_again(dataset, work / "shards", "templar")
    (work / "flat").mkdir(exist_ok=True)
    for shard in (work / "shards").glob("train_*.npy"):
        shutil.copy2(shard, work / "flat")
    consolidate(work / "flat", 16)
    return files(work / "flat")


def again(what: str, derive: Derive, changes: tuple[str, ...], seeds: range) -> Row:
    """Derive, derive again, change, derive once more."""
    tried, wrong = 0, []
    for change in changes:
        for seed in seeds:
            tried += 1
            with places(seed, CHANGES[change]) as (old, fresh, change_text):
                work = old.root / "work"
                first = derive(old.dataset, work)
                if derive(old.dataset, work) != first:
                    wrong.append(f"{what}, seed {seed}: not the same again although nothing changed")
                expected = derive(fresh.dataset, fresh.root / "work")
                if expected == first:
                    wrong.append(f"{what}, {change}, seed {seed}: the change changed nothing, so this tried nothing")
                change_text()
                try:
                    found = derive(old.dataset, work)
                except TokenmillError as error:
                    if not error.hint:
                        wrong.append(f"{what}, {change}, seed {seed}: refused without a hint: {error}")
                    continue
                if found != expected:
                    of = "the old" if found == first else "neither the old nor the new"
                    wrong.append(f"{what}, {change}, seed {seed}: the result is {of}")
    return Row(fault=what, tried=tried, wrong=tuple(wrong))


def labels_of(kind: Any, changes: tuple[str, ...], seeds: range) -> Row:
    """Labels after the change against the bytes of the text: all but the first of each document, each once."""
    tried, wrong = 0, []
    for change in changes:
        for seed in seeds:
            tried += 1
            with places(seed, CHANGES[change]) as (old, _, change_text):
                packed(kind)(old.dataset, old.root)
                change_text()
                lines = [json.loads(line)["text"] for line in old.source.read_text().splitlines()]
                wanted = Counter(
                    pair for line in lines for pair in zip(line.encode(), [*line.encode()[1:], EOT], strict=True)
                )
                found: Counter[tuple[int, int]] = Counter()
                for batch in tokenmill.DataLoader(old.dataset, SEQ_LEN, 1, packing=kind, epochs=1, prefetch=0):
                    rows = zip(batch["input_ids"].ravel().tolist(), batch["labels"].ravel().tolist(), strict=True)
                    found.update(pair for pair in rows if pair[1] != -100)
                if found != wanted:
                    number = (found - wanted).total()
                    wrong.append(f"{kind}, {change}, seed {seed}: {number} labels are not of their document")
    return Row(fault=f"labels of {kind}", tried=tried, wrong=tuple(wrong))


def _loader(place: Place) -> Any:
    return tokenmill.DataLoader(place.dataset, 16, 4)


def _packed_loader(place: Place) -> Any:
    return tokenmill.DataLoader(place.dataset, SEQ_LEN, 4, packing="padded")


def _mixture(place: Place) -> Any:
    return tokenmill.DataLoader(tokenmill.Mixture({"a": (place.dataset, 1), "b": (place.dataset, 2)}), 16, 4)


def _stream(place: Place) -> Any:
    return tokenmill.stream(place.source, "byte", 16, 4, prefetch=0)


def _torch(place: Place) -> Any:
    from tokenmill.torch import DataLoader

    return DataLoader(place.dataset, 16, 4, rank=0, world_size=1)


READERS = {"loader": _loader, "packed": _packed_loader, "mixture": _mixture, "stream": _stream, "torch": _torch}
# What states did not have before.
NEW_FIELDS = ("content", "sources")


def states(names: tuple[str, ...], changes: tuple[str, ...], seeds: range) -> Row:
    """A state is taken while nothing changed, as of old too, and refused once it did."""
    tried, wrong = 0, []
    for name in names:
        for change in changes:
            for seed in seeds:
                tried += 1
                about = f"{name}, {change}, seed {seed}"
                with places(seed, CHANGES[change]) as (old, _, change_text):
                    reader = READERS[name](old)
                    steps = iter(reader)
                    for _ in range(3):
                        next(steps)
                    state = json.loads(json.dumps(reader.state_dict()))
                    expected = {key: rows.tolist() for key, rows in next(steps).items()}
                    of_old = {key: value for key, value in state.items() if key not in NEW_FIELDS}
                    for one in (state, of_old):
                        same = READERS[name](old)
                        same.load_state_dict(one)
                        if {key: rows.tolist() for key, rows in next(iter(same)).items()} != expected:
                            wrong.append(f"{about}: a state of the same text leads to other samples")
                    change_text()
                    try:
                        READERS[name](old).load_state_dict(state)
                        wrong.append(f"{about}: a state of the old text was taken")
                    except StateError:
                        pass
    return Row(fault="states", tried=tried, wrong=tuple(wrong))


def without_build(changes: tuple[str, ...], seeds: range) -> Row:
    """prepare over a finished dataset whose .build is gone: taken if nothing changed, else an error."""
    tried, wrong = 0, []
    for change in changes:
        for seed in seeds:
            tried += 1
            with places(seed, CHANGES[change]) as (old, fresh, _):
                shutil.rmtree(old.dataset / ".build")
                before = old.source.stat().st_mtime_ns
                os.utime(old.source, ns=(before, before + 10**9))
                same = tokenmill.prepare(old.source, old.dataset, tokenizer="byte", workers=1)
                if not same.already_complete or not any("are unchanged" in note for note in same.notes):
                    wrong.append(f"{change}, seed {seed}: nothing says that the content was compared: {same.notes}")
                for time in (before - 10**9, before, before + 10**9):
                    shutil.rmtree(old.dataset / ".build", ignore_errors=True)
                    shutil.copy(fresh.source, old.source)
                    os.utime(old.source, ns=(time, time))
                    try:
                        tokenmill.prepare(old.source, old.dataset, tokenizer="byte", workers=1)
                        wrong.append(f"{change}, seed {seed}: the dataset of the old text is said to be complete")
                    except TokenmillError:
                        pass
    return Row(fault="prepare without .build", tried=tried, wrong=tuple(wrong))


_BOTH = ("shuffled", "masked")
EXPERIMENTS: list[tuple[str, Callable[[], Row]]] = [
    ("derived labels best_fit", lambda: labels_of("best_fit", ("shuffled",), range(12))),
    ("derived labels padded", lambda: labels_of("padded", ("shuffled",), range(12))),
    ("derived best_fit", lambda: again("best_fit", packed("best_fit"), _BOTH, range(8))),
    ("derived padded", lambda: again("padded", packed("padded"), _BOTH, range(8))),
    *(
        (f"derived export {one}", lambda one=one: again(f"export to {one}", exported(one), _BOTH, range(4)))
        for one in LAYOUTS
    ),
    *(
        (f"derived import {one}", lambda one=one: again(f"import of {one}", imported(one), _BOTH, range(4)))
        for one in LAYOUTS
    ),
    ("derived consolidate", lambda: again("consolidate", consolidated, _BOTH, range(4))),
    ("derived states", lambda: states(tuple(READERS), _BOTH, range(4))),
    ("derived without .build", lambda: without_build((*_BOTH, "swapped"), range(4))),
]


def _quick_states(*names: str) -> Callable[[], Row]:
    return lambda: states(names, ("shuffled",), range(1))


BUGS = [
    Bug(
        name="a packing plan is not bound to the content",
        plant=replaced(Dataset, "pins", lambda *_: {}),
        trial=lambda: labels_of("best_fit", ("shuffled",), range(1)),
        says="labels are not of their document",
    ),
    Bug(
        name="an export is not bound to the content",
        plant=replaced(Dataset, "pins", lambda *_: {}),
        trial=lambda: again("export", exported("nanogpt"), ("masked",), range(1)),
        says="the result is the old",
    ),
    Bug(
        name="a state is not compared with the content",
        plant=replaced(loaders, "check_content", lambda *_, **_options: None),
        trial=_quick_states("loader"),
        says="a state of the old text was taken",
    ),
    Bug(
        name="the content is that of the fingerprint",
        plant=replaced(Manifest, "content", lambda self, *_: self.fingerprint),
        trial=_quick_states("mixture"),
        says="a state of the old text was taken",
    ),
    Bug(
        name="a dataset without a plan is taken by names and sizes",
        plant=replaced(workspace, "why_to_compare", lambda *_: ""),
        trial=lambda: without_build(("masked",), range(1)),
        says="the dataset of the old text is said to be complete",
    ),
    Bug(
        name="an order of documents is taken by their hashes",
        plant=replaced(check_sources._SourceCheck, "_compare_tokens", lambda *_: None),
        trial=lambda: without_build(("swapped",), range(1)),
        says="the dataset of the old text is said to be complete",
    ),
    Bug(
        name="a packing plan of any content is loaded",
        plant=replaced(packing.PackingSpec, "__eq__", lambda self, other: self.name == other.name),
        trial=lambda: labels_of("padded", ("shuffled",), range(1)),
        says="labels are not of their document",
    ),
]
