"""The data module in Lightning's own Trainer: every sample once, also killed and resumed, on other numbers of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill
from conftest import make_texts, write_jsonl
from ranks import meeting_place
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import RecipeError

pytest.importorskip("lightning", reason="lightning is installed by the test group")

SEQ_LEN = 32
GLOBAL_BATCH = 12

# Each rank writes what its training and validation steps got, and what it lost, with its epoch.
PROGRAM = """
import json, os, signal, sys, warnings
warnings.filterwarnings("ignore")
import lightning, torch
import tokenmill.lightning
from lightning.pytorch.callbacks import ModelCheckpoint
path, log, checkpoints, options = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
world_size = int(os.environ.get("WORLD_SIZE", 1))

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260))

    def write(self, kind, batch, loss):
        line = [kind, self.current_epoch, batch["sample_index"].tolist(), batch["labels"].tolist(), loss.item()]
        with open(f"{log}.{self.global_rank}", "a") as file:
            print(json.dumps(line), file=file)

    def loss(self, batch):
        logits = self.layers(batch["input_ids"])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.write("train", batch, loss)
        self.batches = getattr(self, "batches", 0) + 1
        if self.batches == options.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.write("val", batch, self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0 if options.get("still") else 0.1)

torch.manual_seed(0)
model = Model()
if options.get("save_model"):
    torch.save(model.state_dict(), options["save_model"])
callbacks = [ModelCheckpoint(dirpath=checkpoints, filename="{step}", save_top_k=-1, **options["checkpoints"])]
trainer = lightning.Trainer(
    max_epochs=options["max_epochs"], accelerator="cpu", devices=world_size, logger=False, callbacks=callbacks,
    strategy="ddp" if world_size > 1 else "auto", enable_progress_bar=False, enable_model_summary=False,
)
batch_size = options.get("batch_size", 12 // world_size)
data = tokenmill.lightning.DataModule(path, 32, batch_size, fields=("sample_index",), **options.get("data", {}))
trainer.fit(model, datamodule=data, ckpt_path=options.get("resume"))
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("lightning")
    write_jsonl(path / "a.jsonl", make_texts(40, seed=3, words=20))
    tokenmill.prepare(
        str(path / "a.jsonl"), path / "out", tokenizer="byte", unit_bytes=1500, split={"val": 0.2}, workers=1
    )
    return tokenmill.open(path / "out")


def fit(dataset: Dataset, path: Path, name: str, *, ranks: int = 1, killed: bool = False, **options: Any) -> list[Any]:
    """What each step of a run got, over all ranks: (kind, epoch, samples, labels, losses of the ranks)."""
    options = {"max_epochs": 3, "checkpoints": {"every_n_train_steps": 1}, **options}
    arguments = [dataset.path, str(path / name), str(path / f"{name}.ckpt"), json.dumps(options)]
    store, group = meeting_place(ranks) if ranks > 1 else (None, {})
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments],
            env={**os.environ, **group, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if group else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    if killed:  # one kills itself, and the others wait for it for ever
        for process in processes[:1]:
            process.wait(timeout=300)
        for process in processes[1:]:
            process.send_signal(signal.SIGKILL)
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    codes = [-signal.SIGKILL if killed else 0] * ranks
    assert [process.returncode for process in processes] == codes, "\n".join(outputs)
    del store
    logs = [[json.loads(line) for line in (path / f"{name}.{rank}").read_text().splitlines()] for rank in range(ranks)]
    steps = []
    for parts in zip(*([line for line in log if line[0] == "train"] for log in logs), strict=not killed):
        epoch = parts[0][1]
        assert all(part[1] == epoch for part in parts)
        samples = [i for part in parts for i in part[2]]
        steps.append(("train", epoch, samples, parts, [part[4] for part in parts]))
    # A rank may have one batch of validation less.
    return steps + [(*line[:3], [line], [line[4]]) for log in logs for line in log if line[0] == "val"]


def trained(steps: list[Any]) -> list[tuple[int, list[int]]]:
    return [(epoch, samples) for kind, epoch, samples, *_ in steps if kind == "train"]


def undisturbed(dataset: Dataset, epochs: int = 3, batch_size: int = GLOBAL_BATCH) -> list[tuple[int, list[int]]]:
    loader = tokenmill.DataLoader(dataset, SEQ_LEN, batch_size, epochs=1, fields=("sample_index",))
    return [(epoch, batch["sample_index"].tolist()) for epoch in range(epochs) for batch in loader]


def test_an_epoch_of_the_trainer_is_one_of_the_data(dataset: Dataset, tmp_path: Path) -> None:
    """And its losses are the cross-entropies of the next tokens, computed by hand."""
    import torch

    model = tmp_path / "model"
    steps = fit(dataset, tmp_path, "run", still=True, save_model=str(model))
    assert trained(steps) == undisturbed(dataset)
    count = tokenmill.DataLoader(dataset, SEQ_LEN, 1, split="val").num_samples
    assert count % GLOBAL_BATCH
    for epoch in range(3):
        val = [i for kind, at, samples, *_ in steps if (kind, at) == ("val", epoch) for i in samples]
        assert val == list(range(count))
    weights = {name: value.double().numpy() for name, value in torch.load(model).items()}
    tokens = dataset["train"].tokens(0, dataset["train"].num_tokens).astype(np.int64)
    for kind, _, samples, parts, losses in steps:
        if kind == "train":
            windows = np.stack([tokens[i * SEQ_LEN : i * SEQ_LEN + SEQ_LEN + 1] for i in samples])
            assert parts[0][3] == windows[:, 1:].tolist()
            logits = weights["layers.0.weight"][windows[:, :-1]] @ weights["layers.1.weight"].T
            logits += weights["layers.1.bias"]
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            by_hand = -np.take_along_axis(logits, windows[:, 1:, None], -1).mean()
            assert losses[0] == pytest.approx(by_hand, rel=1e-6)


def test_a_run_is_resumed_behind_any_step(dataset: Dataset, tmp_path: Path) -> None:
    whole = undisturbed(dataset)
    per_epoch = len(whole) // 3
    fit(dataset, tmp_path, "run")
    for step in (1, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch):
        name = f"from-{step}"
        resumed = fit(dataset, tmp_path, name, resume=str(tmp_path / f"run.ckpt/step={step}.ckpt"))
        assert trained(resumed) == whole[step:], step


@pytest.mark.parametrize("ranks", [1, 3])
def test_two_ranks_are_killed_and_resumed_on_another_number(dataset: Dataset, tmp_path: Path, ranks: int) -> None:
    whole = undisturbed(dataset)
    per_epoch = len(whole) // 3
    kill_at = per_epoch + 3
    fit(dataset, tmp_path, "two", ranks=2, killed=True, kill_at=kill_at)
    resumed = fit(dataset, tmp_path, "resumed", ranks=ranks, resume=str(tmp_path / f"two.ckpt/step={kill_at - 1}.ckpt"))
    assert trained(resumed) == whole[kill_at - 1 :]
    val = [i for kind, epoch, samples, *_ in resumed if (kind, epoch) == ("val", 2) for i in samples]
    assert sorted(val) == list(range(tokenmill.DataLoader(dataset, SEQ_LEN, 1, split="val").num_samples))


def test_a_run_is_resumed_behind_the_last_step_of_an_epoch_with_other_steps(dataset: Dataset, tmp_path: Path) -> None:
    """What is left over for no step of the old ranks is left out, as in a run that is not interrupted."""
    batch_size = 8
    num_samples = tokenmill.DataLoader(dataset, SEQ_LEN, 1).num_samples
    last, left_over = divmod(num_samples, 2 * batch_size)
    assert left_over > 3, "a step of fewer ranks"
    data = {"val_split": None}
    fit(dataset, tmp_path, "two", ranks=2, batch_size=batch_size, max_epochs=1, data=data)
    for ranks, size in ((3, 8), (1, 3)):
        name = f"{ranks}-of-{size}"
        resume = str(tmp_path / f"two.ckpt/step={last}.ckpt")
        resumed = fit(dataset, tmp_path, name, ranks=ranks, batch_size=size, resume=resume, data=data)
        expected = [step for step in undisturbed(dataset, batch_size=ranks * size) if step[0] > 0]
        assert trained(resumed) == expected, name


def test_a_dataset_without_validation_needs_no_setting(dataset: Dataset, tmp_path: Path) -> None:
    import tokenmill.lightning

    write_jsonl(tmp_path / "a.jsonl", make_texts(20, seed=5, words=20))
    tokenmill.prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer="byte", workers=1)
    assert tokenmill.lightning.DataModule(tmp_path / "out", 32, 4).val_dataloader() == []
    assert tokenmill.lightning.DataModule(dataset, 32, 4, val_split=None).val_dataloader() == []
    few = tokenmill.lightning.DataModule(dataset, 32, 1000, rank=1, world_size=2)
    with pytest.raises(RecipeError, match=r"too few for 2 ranks and batches of 1000: some"):
        few.val_dataloader()
    validation = tokenmill.lightning.DataModule(dataset, 32, 4).val_dataloader()
    assert [len(list(validation)) for _ in range(2)] == [len(validation)] * 2


def test_without_a_length_the_batch_that_lightning_holds_is_not_counted(dataset: Dataset) -> None:
    import lightning

    import tokenmill.lightning

    class Model(lightning.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

    module = tokenmill.lightning.DataModule(dataset, 32, 4, epochs=None)
    module.trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    module.trainer.strategy._lightning_module = Model()
    loader = module.train_dataloader()
    with pytest.raises(TypeError, match="the number of batches is unknown"):
        len(loader)
    batches = iter(loader)
    for taken in range(3):  # the batch that was asked for last is the one that is held
        next(batches)
        assert loader.state_dict()["samples_seen"] == 4 * taken


def test_a_repr_tells_the_dataset_and_the_shape(dataset: Dataset) -> None:
    import tokenmill.lightning

    found = repr(tokenmill.lightning.DataModule(dataset.path, 32, 4))
    assert found == f"DataModule({dataset.path!r}, seq_len=32, batch_size=4)"
