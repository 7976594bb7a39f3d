"""Writes the files of `v0.1` beside this script. Run with the release whose files are wanted, never with a later one:

PYTHONPATH=CHECKOUT_OF_0.1/src python tests/compat/make_files.py tests/compat/v0.1
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
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
# A build that is killed when its second unit is done.
_KILLED = """
import os, signal, sys, tokenmill
sys.path.insert(0, "{here}")
import make_files
def watch(event):
    if event["kind"] == "done" and event["unit"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
tokenmill.prepare("{corpus}", "{output}", watch=watch, **make_files.PREPARE)
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
    code = _KILLED.format(here=Path(__file__).parent, corpus=target / "corpus", output=target / "unfinished")
    done = subprocess.run([sys.executable, "-c", code], check=False)
    if done.returncode != -signal.SIGKILL:
        sys.exit("the build was not killed")
    for name in ("lock", "events.jsonl"):  # of the machine that they were made on
        for build in ("finished", "unfinished"):
            (target / build / ".build" / name).unlink(missing_ok=True)
    record = {}
    for name, loader in loaders(target / "finished").items():
        steps(loader, STEPS_BEFORE)
        record[name] = {"state": loader.state_dict(), "steps": steps(loader, STEPS_AFTER)}
    (target / "loaders.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
