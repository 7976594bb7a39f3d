"""Writes the files of `v0.1` beside this script. Run with the release whose files are wanted, never with a later one:

PYTHONPATH=CHECKOUT_OF_0.1/src python tests/compat/make_files.py tests/compat/v0.1

With a last argument `many`, only what was made of very many small files is written.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tokenmill

MODIFIED = 1_700_000_000
SEQ_LEN, BATCH_SIZE, STEPS_BEFORE, STEPS_AFTER = 32, 3, 5, 40
WORDS = (
    *("mill", "grain", "naïve", "数千の文書", "слово", "🙂", "don't", "12345"),
    *("<|endoftext|>", "\n  indented", "x = f(y)"),
)
PREPARE: dict[str, Any] = {"tokenizer": "gpt2", "split": "val=0.1", "unit_bytes": 20_000, "workers": 1}
# Files so small that 0.1 put 2,100 of them into each of two units.
MANY: dict[str, Any] = {"tokenizer": "byte", "documents": "files", "unit_bytes": 12_600, "workers": 1}
NUM_MANY = 4_200
# A build that is killed when a unit is done.
_KILLED = """
import os, signal, sys, tokenmill
sys.path.insert(0, "{here}")
import make_files
def watch(event):
    if event["kind"] == "done" and event["unit"] == {last}:
        os.kill(os.getpid(), signal.SIGKILL)
tokenmill.prepare("{corpus}", "{output}", watch=watch, **make_files.{options})
"""


def texts() -> Iterator[str]:
    chance = np.random.default_rng(17)
    for number in range(240):
        yield f"{number} " + " ".join(chance.choice(WORDS, int(chance.integers(1, 60))))


def write_sources(folder: Path) -> None:
    """The corpus. A copy needs the same times: a plan pins them."""
    folder.mkdir(parents=True)
    lines = list(texts())
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines[:120]))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines[120:]))
    set_times(folder)


def write_many_sources(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(NUM_MANY):
        (folder / f"{number:04d}.txt").write_text(f"file {number % 7}")
    set_times(folder)


def set_times(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, ns=(MODIFIED * 10**9, MODIFIED * 10**9))


def loaders(dataset: Path) -> dict[str, Any]:
    """A loader for every kind of stream; `sample_index` tells the order."""
    common: dict[str, Any] = {"fields": ("sample_index",), "prefetch": 0, "rank": 1, "world_size": 2}
    mixture = tokenmill.Mixture({"a": (dataset, 0.7), "b": (dataset, 0.3)})
    plain = {"shuffled": {"seed": 5}, "random": {"order": "random"}, "sequential": {"order": "sequential"}}
    packed = {"best_fit": {"packing": "best_fit"}, "padded": {"packing": "padded", "seed": 3}}
    found: dict[str, Any] = {
        name: tokenmill.DataLoader(dataset, SEQ_LEN, BATCH_SIZE, **common, **options)
        for name, options in {**plain, **packed}.items()
    }
    return {**found, "mixture": tokenmill.DataLoader(mixture, SEQ_LEN, BATCH_SIZE, **common)}


def steps(loader: Any, count: int) -> list[Any]:
    """Of the next batches: the samples, and a sum that any other token would change."""
    batches = iter(loader)
    found = (next(batches) for _ in range(count))
    return [
        [batch["sample_index"].tolist(), weighted_sum(batch["input_ids"]), weighted_sum(batch["labels"])]
        for batch in found
    ]


def weighted_sum(tokens: Any) -> int:
    return int((tokens.astype(np.int64).ravel() * np.arange(1, tokens.size + 1)).sum())


def main(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    write_sources(target / "corpus")
    tokenmill.prepare(target / "corpus", target / "finished", **PREPARE)
    kill(target / "corpus", target / "unfinished", "PREPARE", last=1)
    for build in ("finished", "unfinished"):
        forget_machine(target / build)
    record = {}
    for name, loader in loaders(target / "finished").items():
        steps(loader, STEPS_BEFORE)
        record[name] = {"state": loader.state_dict(), "steps": steps(loader, STEPS_AFTER)}
    (target / "loaders.json").write_text(json.dumps(record) + "\n")
    main_many(target)


def main_many(target: Path) -> None:
    """Packed: plans of so many files are long, and all alike."""
    with tempfile.TemporaryDirectory() as place:
        corpus = Path(place, "corpus")
        write_many_sources(corpus)
        tokenmill.prepare(corpus, Path(place, "finished"), **MANY)
        kill(corpus, Path(place, "unfinished"), "MANY", last=0)
        with zipfile.ZipFile(target / "many.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
            for build in ("finished", "unfinished"):
                forget_machine(Path(place, build))
                for path in sorted(path for path in Path(place, build).rglob("*") if path.is_file()):
                    # Without a time, so that the archive is always the same.
                    info = zipfile.ZipInfo(str(path.relative_to(place)))
                    packed.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)


def kill(corpus: Path, output: Path, options: str, *, last: int) -> None:
    """Kill a build when its unit `last` is done."""
    code = _KILLED.format(here=Path(__file__).parent, corpus=corpus, output=output, options=options, last=last)
    done = subprocess.run([sys.executable, "-c", code], check=False)
    if done.returncode != -signal.SIGKILL:
        sys.exit("the build was not killed")


def forget_machine(build: Path) -> None:
    """Remove what tells of the machine that it was made on."""
    for name in ("lock", "events.jsonl"):
        (build / ".build" / name).unlink(missing_ok=True)


if __name__ == "__main__":
    (main_many if sys.argv[2:] == ["many"] else main)(Path(sys.argv[1]))
