"""What the training scripts of the lab share: a tiny model, and a record of all that it was given and gave.

RECORDS   the folder for the records
STATE     the folder for the script's checkpoints; there is one already if the run resumes
DATASET   the prepared dataset
EPOCHS    how often the dataset is read
STOP_AT   a step: after its record the rank waits, to be killed
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RECORDS, STATE, DATASET = (Path(os.environ[name]) for name in ("RECORDS", "STATE", "DATASET"))
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STOP_AT = int(os.environ.get("STOP_AT", "-1"))
# Over all ranks, so that it is the same on one, two and three.
BATCH_SIZE, SEQ_LEN, SAVE_EVERY = 6, 16, 4
EPOCHS = int(os.environ["EPOCHS"])
VOCABULARY = 257
SHARE = BATCH_SIZE // WORLD_SIZE


def record(step: int, inputs: Any, logits: Any, loss: Any, *, num_targets: int = SEQ_LEN) -> None:
    """Write what a step had on this rank. Steps count from 0 in the first run and go on in a resumed one."""
    path = RECORDS / f"{step:05d}-{RANK}.npz"
    arrays = {name: np.asarray(values) for name, values in (("inputs", inputs), ("logits", logits), ("loss", loss))}
    with open(path.with_suffix(".tmp"), "wb") as file:
        np.savez(file, **arrays, num_targets=num_targets)
    path.with_suffix(".tmp").rename(path)
    while step == STOP_AT:
        time.sleep(1)


def make_model() -> Any:
    """Logits for the next token from the last one. The same on all ranks."""
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY))


def save(state: dict[str, Any]) -> None:
    """Rank 0 writes the checkpoint: our state is the same on all ranks."""
    import torch

    if RANK == 0:
        torch.save(state, STATE / "checkpoint.tmp")
        (STATE / "checkpoint.tmp").rename(STATE / "checkpoint.pt")


def train(
    batches: Any, loader: Any, model: Any, *, first_step: int, save: Callable[[dict[str, Any]], None] = save
) -> None:
    """The loop of a trainer: forward, record, backward, average over the ranks, step, checkpoint."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, batch in enumerate(batches, first_step):
        logits = model(batch["input_ids"])
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        record(step, batch["input_ids"], logits.detach(), loss.detach())
        optimizer.zero_grad()
        loss.backward()
        for weights in model.parameters():
            dist.all_reduce(weights.grad)
            weights.grad /= WORLD_SIZE
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            save({"model": model.state_dict(), "loader": loader.state_dict(), "step": step + 1})


def load() -> dict[str, Any] | None:
    import torch

    path = STATE / "checkpoint.pt"
    return torch.load(path, weights_only=True) if path.exists() else None


def finish() -> None:
    """End well. When an interpreter ends as usual, gloo's threads abort it now and then."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
    os._exit(0)
