"""Datasets for transformers: its `Trainer`, its models, and Accelerate.

    Dataset   samples by their index; labels are the inputs, which the models of transformers shift themselves

The Trainer and Accelerate decide the order and the shards, from the index alone: every sample once in an epoch, on any
number of processes. Nothing here imports transformers or Accelerate; `tokenmill.torch` refuses what they would shift
or shard a second time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill import arguments
from tokenmill import torch as adapters
from tokenmill.errors import RecipeError
from tokenmill.loader.batches import Numbers
from tokenmill.loader.loader import DatasetLike, PackingKind
from tokenmill.permutation import Order


class Dataset(adapters.Dataset):
    """Samples for `transformers.Trainer(train_dataset=...)`, or for a torch DataLoader that Accelerate prepares.

    Labels are the inputs: models of transformers shift them, so the loss is that of token t + 1. The first token of a
    row is not a target. The Trainer's default collator takes the samples as they are, with no tokenizer.

    The Trainer shuffles with its own seed, by a list of all indices. With `order="shuffled"`, the samples themselves
    are in the order of `tokenmill.DataLoader`, and `TrainingArguments(train_sampling_strategy="sequential")` takes
    them as they come: no list in memory, and the proportions of a `Mixture` hold at every step. `set_epoch`, which
    the Trainer and Accelerate call, makes the order of each epoch its own.

    `fields=("position_ids",)` keeps the documents of a row apart: transformers derives its attention from them, if it
    gets no attention mask.
    """

    def __init__(
        self,
        dataset: DatasetLike,
        seq_len: int,
        *,
        split: str = "train",
        packing: PackingKind = "concat",
        order: Order = "sequential",
        seed: int = 0,
        fields: tuple[str, ...] = (),
        mask_boundaries: bool = False,
    ) -> None:
        if {"position_ids", "attention_mask"} <= set(fields):
            raise RecipeError(
                "with an attention mask, transformers does not keep the documents of a row apart by their position_ids",
                hint="leave attention_mask out: padding is at the end of rows, where nothing attends to it",
            )
        super().__init__(
            dataset,
            seq_len,
            split=split,
            packing=packing,
            order=order,
            seed=seed,
            labels="aligned",
            fields=fields,
            mask_boundaries=mask_boundaries,
        )
        # In shared memory, so that worker processes that are already running see the next epoch, too.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Give the samples in the order of this epoch, which counts from 0. Indices stay within one epoch."""
        self._epoch.fill_(arguments.whole("epoch", epoch, hint="epochs count from 0"))

    def _positions(self, indices: Sequence[int]) -> Numbers:
        return super()._positions(indices) + int(self._epoch) * len(self)
