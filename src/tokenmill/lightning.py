"""The loader for Lightning: a data module whose position is part of every checkpoint.

    Trainer  --epoch-->  EpochLoader  one pass over the data, from the position of the checkpoint
             --val---->  EvaluationLoader  one split, in order, from its start each time

Lightning takes a batch ahead unless it knows the length, and saves the state of loaders in its own. So an `EpochLoader`
has a length, and where it cannot have one, its state leaves out the batch that Lightning holds.

Only this module imports lightning, or pytorch_lightning if that is what is installed.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Collection, Iterator
from typing import Any, Unpack

from tokenmill import torch as adapters
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import RecipeError
from tokenmill.formats.open import open as open_dataset
from tokenmill.loader.batches import Batch
from tokenmill.loader.loader import DatasetLike
from tokenmill.loader.mixture import Mixture
from tokenmill.torch import TorchOptions

try:
    # Both may be installed. Their trainers do not know each other's data modules.
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        raise ImportError
    from lightning.pytorch import LightningDataModule
except ImportError:
    from pytorch_lightning import LightningDataModule


class DataModule(LightningDataModule):  # type: ignore[misc]  # lightning is not type-checked here
    """A prepared dataset, or a mixture, for `Trainer.fit(model, datamodule=...)`.

    An epoch of the Trainer is one epoch of the data, or `epochs` of them; with `epochs=None` it has no end, and
    `max_steps` decides. A checkpoint resumes at the exact next sample, also on another number of ranks or with another
    batch size. Ranks are those of the Trainer.

    Validation takes every sample of `val_split` once, in order; without such a split there is none. If the last step
    does not reach all ranks, some have one batch less, so reduce metrics at the end of the epoch (`sync_dist=True`).
    `options` are those of `tokenmill.torch.DataLoader`.
    """

    def __init__(
        self,
        dataset: DatasetLike,
        seq_len: int,
        batch_size: int,
        *,
        val_split: str | None = "val",
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__()
        self._dataset, self._sizes, self._val_split = dataset, (seq_len, batch_size), val_split
        self._options: TorchOptions = {"epochs": 1, **options}
        self._train: EpochLoader | None = None
        self._loaded_step: int | None = None  # samples of a step in the checkpoint that is resumed

    def __repr__(self) -> str:
        seq_len, batch_size = self._sizes
        return f"DataModule({self._dataset!r}, seq_len={seq_len}, batch_size={batch_size})"

    def train_dataloader(self) -> EpochLoader:
        """Lightning calls this on every rank, when the process group has started."""
        self._train = EpochLoader(self._open(), *self._sizes, module=self, **self._options)
        # Lightning takes the length before it loads the state of the loader.
        if self._loaded_step is not None:
            self._train.forget_length(self._loaded_step)
            self._loaded_step = None
        return self._train

    def state_dict(self) -> dict[str, Any]:
        return {} if self._train is None else {"step_samples": self._train.state_dict()["step_samples"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded_step = state_dict.get("step_samples")

    def val_dataloader(self) -> EvaluationLoader | list[Any]:
        opened = self._open()
        components = opened.datasets.values() if isinstance(opened, Mixture) else [opened]
        if self._val_split is None or any(self._val_split not in component for component in components):
            return []
        options: TorchOptions = {**self._options, "split": self._val_split, "order": "sequential", "seed": 0}
        options |= {"epochs": 1, "drop_last": False, "skip": (), "max_seq_len": None}
        loader = EvaluationLoader(opened, *self._sizes, **options)
        if loader.num_samples <= loader.batch_size * (loader.world_size - 1):
            raise RecipeError(
                f"split {self._val_split!r} has {loader.num_samples:,} samples of {loader.seq_len:,} tokens, too few "
                f"for {loader.world_size} ranks and batches of {loader.batch_size}: some ranks would have none",
                hint="hold out more documents, use smaller batches, or give val_split=None for no validation",
            )
        return loader

    def _open(self) -> Dataset | Mixture:
        if not isinstance(self._dataset, Dataset | Mixture):
            self._dataset = open_dataset(self._dataset)
        return self._dataset


class EpochLoader(adapters.DataLoader):
    """The batches of an epoch of the Trainer. `state_dict` is the position behind the last one that it trained on."""

    def __init__(
        self,
        dataset: Dataset | Mixture,
        seq_len: int,
        batch_size: int,
        *,
        module: LightningDataModule,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(dataset, seq_len, batch_size, **options)
        self._module = module
        self._has_length = self.epochs is not None
        self._held: Any = None  # the position before the batch that Lightning holds
        self._mixed_end = -1  # of a pass that was begun with other ranks or another batch size

    def __len__(self) -> int:
        if not self._has_length:
            raise TypeError("the number of batches is unknown: the data is endless, or resumed with other ranks")
        return super().__len__()

    def __iter__(self) -> Iterator[Batch]:
        batches = super().__iter__()
        while True:
            before = self.samples_seen, self._open_end
            batch = next(batches, None)
            self._held = None if batch is None or self._has_length else before
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        position = copy.copy(self)
        if self._held is not None and not self._gives_iterator():
            position.samples_seen, position._open_end = self._held
        state = super(EpochLoader, position).state_dict()
        is_mixed = position.samples_seen <= self._mixed_end
        return {**state, "step_samples": 0 if is_mixed else self.batch_size * self.world_size}

    def load_state_dict(self, state: dict[str, Any], *, ignore: Collection[str] = ()) -> None:
        super().load_state_dict(state, ignore=ignore)
        self._loaded = self._held = None  # Lightning itself ends the epoch that the state was saved in
        end, step = self._pass_end(), state.get("step_samples")
        if step and end is not None and self.drop_last and self.num_given(self.samples_seen, end) < step:
            # Saved behind the last step of an epoch. Lightning does not return to it: what is left over stays dropped.
            self.samples_seen = self._open_end = end
        if step != self.batch_size * self.world_size:
            self.forget_length(step)
            self._mixed_end = (self.samples_seen // self._pass_samples + 1) * self._pass_samples

    def forget_length(self, step: int | None) -> None:
        """Have no length, if the state to load is of steps of so many samples, and those of this loader are others.

        Lightning adds the batches of the old ranks to those of the new ones, and would stop at a wrong number: behind
        the last step of an epoch, even in the next one.
        """
        if step != self.batch_size * self.world_size:
            self._has_length = False

    def _gives_iterator(self) -> bool:
        """Whether the model takes batches itself, so that Lightning holds none."""
        model = self._module.trainer.lightning_module
        return "dataloader_iter" in inspect.signature(model.training_step).parameters


class EvaluationLoader(adapters.DataLoader):
    """The batches of one split, from its start in every iteration."""

    def __iter__(self) -> Iterator[Batch]:
        return adapters.DataLoader.__iter__(copy.copy(self))
