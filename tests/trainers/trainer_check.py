"""What a training run must have seen, computed from the token files with numpy alone.

    records of a run      one file for each step and rank: inputs, logits and loss, as the framework had them
    windows of a dataset  tokens [i * T, i * T + T] of the files; a row of inputs is found among them by its content

Nothing of tokenmill is used here: not its loaders, not its reader of shards.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# What happens at the end of an epoch whose samples are no multiple of a step: the step takes the first samples of the
# next epoch; or it takes some of this epoch again, as Accelerate does; or it is left out.
Tail = Literal["continues", "repeats", "drops"]
Steps = dict[int, list[int]]


class Windows:
    """The windows of a split, by number and by content."""

    def __init__(self, dataset: Path, seq_len: int, split: str = "train") -> None:
        manifest = json.loads((dataset / "dataset.json").read_text())
        shards = sorted((dataset / split).glob("*.bin"))
        self.tokens = np.concatenate([np.fromfile(shard, manifest["dtype"]) for shard in shards]).astype(np.int64)
        self.seq_len = seq_len
        self.count = (len(self.tokens) - 1) // seq_len
        rows = [self.tokens[number * seq_len :][:seq_len].tobytes() for number in range(self.count)]
        self._numbers = {row: number for number, row in enumerate(rows)}
        assert len(self._numbers) == self.count, "two windows have the same content: use other text"

    def find(self, row: npt.NDArray[Any]) -> int:
        number = self._numbers.get(row.astype(np.int64).tobytes())
        assert number is not None, f"this row is not a window of the dataset: {row[:8]}..."
        return number

    def targets(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.stack([self.tokens[number * self.seq_len + 1 :][: self.seq_len] for number in numbers])


@dataclass(frozen=True)
class Run:
    """One start of a training script: the windows of each step, all ranks together."""

    steps: Steps
    num_losses: int


def read_run(records: Path, windows: Windows, num_ranks: int) -> Run:
    """Read what the ranks wrote, and compare each loss with the cross-entropy of the next tokens."""
    steps: Steps = {}
    files = sorted(records.glob("*.npz"))
    assert files, f"{records} is empty"
    for file in files:
        step, rank = (int(part) for part in file.stem.split("-"))
        assert rank < num_ranks
        with np.load(file) as found:
            numbers = [windows.find(row) for row in found["inputs"]]
            if not numbers:
                continue  # this rank's share is in the record of another one
            # A model that shifts its labels itself has no target for the last input of a row.
            targets = windows.targets(numbers)[:, : int(found["num_targets"])]
            expected = cross_entropy(found["logits"][:, : targets.shape[1]], targets)
            loss = float(found["loss"])
        assert math.isclose(loss, expected, rel_tol=1e-6), f"{file.name}: loss {loss:.7f}, by hand {expected:.7f}"
        steps.setdefault(step, []).extend(numbers)
    assert sorted(steps) == list(range(min(steps), max(steps) + 1)), "a step is missing"
    return Run(steps, len(files))


def cross_entropy(logits: npt.NDArray[Any], targets: npt.NDArray[np.int64]) -> float:
    """The mean of -log softmax(logits)[target], in double precision."""
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    log_sums = np.log(np.exp(logits).sum(-1))
    return float((log_sums - np.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean())


def join(first: Run, second: Run) -> Steps:
    """The steps that count: what was done after the checkpoint, before the kill, was done again by the second run."""
    begin = min(second.steps)
    assert 0 < begin <= max(first.steps) + 1, f"resumed at step {begin}, after {max(first.steps) + 1} steps"
    return {step: rows for step, rows in first.steps.items() if step < begin} | second.steps


def check_once(steps: Steps, windows: Windows, *, batch_size: int, epochs: int, tail: Tail) -> None:
    """Every sample exactly once in each epoch."""
    count = windows.count
    if tail == "continues":
        seen: Counter[int] = Counter()
        assert len(steps) == epochs * count // batch_size, f"{len(steps)} steps"
        for step in sorted(steps):
            seen.update(steps[step])
            total = (step + 1) * batch_size
            assert seen.total() == total, f"step {step}: {seen.total()} samples, not {total}"
            assert max(seen.values()) <= -(-total // count), f"step {step}: a sample came too early again"
            assert min(seen[number] for number in range(count)) >= total // count, f"step {step}: a sample is missing"
        return
    per_epoch = count // batch_size if tail == "drops" else -(-count // batch_size)
    assert len(steps) == epochs * per_epoch, f"{len(steps)} steps, not {epochs} x {per_epoch}"
    for epoch in range(epochs):
        whole = [steps[epoch * per_epoch + number] for number in range(count // batch_size)]
        found = Counter(number for rows in whole for number in rows)
        assert all(len(rows) == batch_size for rows in whole)
        assert max(found.values()) == 1, f"epoch {epoch}: a sample came twice"
        if tail == "repeats":
            last = set(steps[(epoch + 1) * per_epoch - 1])
            assert last >= set(range(count)) - set(found), f"epoch {epoch}: a sample is missing"


def check_same(one: Steps, other: Steps, *, epochs: int, tail: Tail) -> None:
    """Two runs had the same samples in each step, whichever rank had them. With what a step is filled up may differ."""
    assert sorted(one) == sorted(other), "different numbers of steps"
    for step in sorted(one):
        is_filled = tail == "repeats" and (step + 1) % (len(one) // epochs) == 0
        assert is_filled or sorted(one[step]) == sorted(other[step]), f"step {step} differs"
