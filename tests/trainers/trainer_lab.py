"""Runs of a training script on several ranks: undisturbed, or killed at a step and resumed on other numbers of ranks.

    undisturbed   2 ranks ---------------------------------->
    disturbed     2 ranks ------- KILL
                            `---- 1 rank -------------------->   from the last checkpoint
                            `---- 3 ranks ------------------->

All of them must have seen the samples of the undisturbed run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_check import Tail, Windows, check_once, check_same, join, read_run

import tokenmill
from ranks import meeting_place

HERE = Path(__file__).parent
BATCH_SIZE, SEQ_LEN = 6, 16  # as in recorder.py
TIMEOUT = 600.0


@dataclass(frozen=True)
class Outcome:
    """What was compared."""

    samples: int
    losses: int
    tail: Tail


def make_dataset(folder: Path, *, documents: int = 48) -> Path:
    """About a hundred windows, all different; an epoch is not a multiple of a step."""
    chance = random.Random(19)
    mean, letters = 1470 // documents, "abcdefghijklmnopqrstuvwxyz "
    texts = ["".join(chance.choices(letters, k=chance.randint(mean - 25, mean + 25))) for _ in range(documents)]
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text("\n".join(texts))
    tokenmill.prepare(folder / "a.txt", folder / "dataset", tokenizer="byte", workers=1)
    windows = Windows(folder / "dataset", SEQ_LEN)
    assert windows.count % BATCH_SIZE, "an epoch is a multiple of a step: use other text"
    return folder / "dataset"


def run_script(
    script: str,
    python: str,
    dataset: Path,
    records: Path,
    state: Path,
    ranks: int,
    *,
    epochs: int,
    stop_at: int | None = None,
) -> None:
    """Run it on so many ranks, to its end or until all ranks are at `stop_at`, where they are killed."""
    records.mkdir(parents=True)
    state.mkdir(parents=True, exist_ok=True)
    store, environment = meeting_place(ranks)
    given: dict[str, object] = {"RECORDS": records, "STATE": state, "DATASET": dataset, "EPOCHS": epochs}
    given["LOCAL_WORLD_SIZE"] = ranks
    if stop_at is not None:
        given["STOP_AT"] = stop_at
    with socket.socket() as free:  # jax has a meeting place of its own, and takes no other's
        free.bind(("127.0.0.1", 0))
        environment["JAX_COORDINATOR"] = f"127.0.0.1:{free.getsockname()[1]}"
    environment |= {"OMP_NUM_THREADS": "1", **{name: str(value) for name, value in given.items()}}
    log = records.with_suffix(".log")
    with log.open("wb") as output:
        started = [
            subprocess.Popen(
                [python, "-W", "ignore", str(HERE / script)],
                env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]
    try:
        wait(started, [] if stop_at is None else [records / f"{stop_at:05d}-{rank}.npz" for rank in range(ranks)])
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text(errors='replace')[-3000:]}") from None
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    del store


def wait(started: Sequence[subprocess.Popen[bytes]], stop_files: Sequence[Path]) -> None:
    """Until all have ended well, or all have written their stop file."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        codes = [process.poll() for process in started]
        assert not any(codes), f"a rank ended with {[code for code in codes if code]}"
        if stop_files and all(file.exists() for file in stop_files):
            return
        if all(code == 0 for code in codes):
            assert not stop_files, "the script ended before the step at which it was to be killed"
            return
        time.sleep(0.05)
    raise AssertionError(f"no end after {TIMEOUT:.0f} s")


def prove(
    script: str,
    dataset: Path,
    work: Path,
    *,
    python: str = sys.executable,
    tail: Tail = "continues",
    epochs: int = 2,
    stop_at: int = 25,
    resume_on: Sequence[int] = (1, 3),
) -> Outcome:
    """An undisturbed run, a killed one, and its resumed ones. `AssertionError` says what was not as it should be."""
    windows = Windows(dataset, SEQ_LEN)
    run_script(script, python, dataset, work / "whole", work / "whole-state", 2, epochs=epochs)
    whole = read_run(work / "whole", windows, 2)
    check_once(whole.steps, windows, batch_size=BATCH_SIZE, epochs=epochs, tail=tail)
    run_script(script, python, dataset, work / "killed", work / "state", 2, epochs=epochs, stop_at=stop_at)
    killed = read_run(work / "killed", windows, 2)
    losses = whole.num_losses + killed.num_losses
    for ranks in resume_on:
        shutil.copytree(work / "state", work / f"state-{ranks}")
        run_script(script, python, dataset, work / f"resumed-{ranks}", work / f"state-{ranks}", ranks, epochs=epochs)
        resumed = read_run(work / f"resumed-{ranks}", windows, ranks)
        steps = join(killed, resumed)
        check_once(steps, windows, batch_size=BATCH_SIZE, epochs=epochs, tail=tail)
        check_same(whole.steps, steps, epochs=epochs, tail=tail)
        losses += resumed.num_losses
    return Outcome(windows.count, losses, tail)
