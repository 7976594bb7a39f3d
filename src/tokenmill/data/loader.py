"""The loader: batches out of a dataset, in an order that every rank computes alone.

    samples of all epochs, one global order:   0 1 2 3 | 4 5 6 7 | 8 9 ...
    a step takes world_size * batch_size:      rank 0  | rank 1  | the next step

All state is how many samples were seen. So a run goes on at the exact next sample with any
other number of ranks, batch size or depth of prefetching.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.data import dataset as datasets
from tokenmill.data.ahead import ahead
from tokenmill.data.borders import as_fields, find_borders
from tokenmill.data.dataset import Dataset
from tokenmill.data.order import ORDERS, Order, draw, make_key, permute
from tokenmill.data.windows import Windows
from tokenmill.errors import RecipeError, StateError
from tokenmill.shards.layout import numpy_dtype

Batch = dict[str, npt.NDArray[Any]]
Samples = npt.NDArray[np.int64]

FIELDS = ("positions", "document_ids", "cu_seqlens", "sample_index")
IGNORED = -100
STATE_VERSION = 1
# Steps whose order is computed at once, at most: a permutation of many numbers takes little longer than one of few.
_STEPS = 256


class DataLoader:
    """Batches of `batch_size` samples of `seq_len` tokens, for one rank of `world_size`.

    for batch in DataLoader("data/owt", seq_len=1024, batch_size=64):
        batch["input_ids"], batch["labels"]

    It goes on for ever, epoch after epoch, unless `epochs` says how many; what is left then for no
    whole step is dropped, or with `drop_last=False` shared out as far as it goes. `fields` adds
    "positions", "document_ids", "cu_seqlens" or "sample_index" to the batches. With
    `mask_borders`, no label asks for the first token of the next document. `dtype` is that
    of ids; None leaves them as they are stored.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Dataset,
        seq_len: int,
        batch_size: int,
        *,
        split: str = "train",
        order: Order = "shuffled",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        drop_last: bool = True,
        fields: tuple[str, ...] = (),
        mask_borders: bool = False,
        dtype: npt.DTypeLike | None = np.int64,
        prefetch: int = 2,
    ) -> None:
        opened = dataset if isinstance(dataset, Dataset) else datasets.open(dataset)
        _check(batch_size=batch_size, rank=rank, world_size=world_size, order=order, fields=fields, prefetch=prefetch)
        self.windows = Windows(opened[split], seq_len)
        self.seq_len, self.batch_size = seq_len, batch_size
        self.rank, self.world_size = rank, world_size
        self.epochs, self.drop_last = epochs, drop_last
        self.fields, self.mask_borders = fields, mask_borders
        self._border_fields = set(fields) - {"sample_index"}
        self.dtype = numpy_dtype(opened.manifest.dtype) if dtype is None else np.dtype(dtype)
        if mask_borders and self.dtype.kind == "u":
            raise RecipeError(f"labels of {self.dtype} cannot be masked with {IGNORED}", hint="use a signed dtype")
        self.prefetch = prefetch
        self.samples_seen = 0
        self._identity = {
            "fingerprint": opened.manifest.fingerprint,
            "split": split,
            "seq_len": seq_len,
            "packing": "concat",
            "order": order,
            "seed": seed,
        }

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return len(self.windows)

    @property
    def epoch(self) -> int:
        return self.samples_seen // self.num_samples

    def __iter__(self) -> Iterator[Batch]:
        """Batches from where the loader stands; a second iterator goes on where the first was left."""
        for seen, batch in ahead(self._batches(self.samples_seen), self.prefetch):
            self.samples_seen = seen
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as plain JSON. It is the same on all ranks."""
        return {"version": STATE_VERSION, **self._identity, "samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader of the same stream stood, whatever its ranks and batch size were."""
        expected = {"version": STATE_VERSION, **self._identity}
        differing = [
            f"{name}: the state has {state.get(name)!r}, this loader {value!r}"
            for name, value in expected.items()
            if state.get(name) != value
        ]
        if differing:
            raise StateError(
                "the state belongs to another stream:\n  " + "\n  ".join(differing),
                hint="open the same dataset with the same seed, order and seq_len",
            )
        seen = state.get("samples_seen")
        if type(seen) is not int or seen < 0:
            raise StateError(f"samples_seen is {seen!r}", hint="the state is damaged")
        self.samples_seen = seen

    def _batches(self, seen: int) -> Iterator[tuple[int, Batch]]:
        """Batches from a sample on, each with the number of samples that all ranks will have seen by then."""
        step = self.batch_size * self.world_size
        last = None if self.epochs is None else self.epochs * self.num_samples
        for power in itertools.count():
            left = min(_STEPS, 1 << power)
            if last is not None:
                left = min(left, max(0, last - seen) // step)
            if not left:
                break
            firsts = seen + step * np.arange(left) + self.batch_size * self.rank
            starts = self._starts((firsts[:, None] + np.arange(self.batch_size)).ravel())
            for rows in starts.reshape(left, self.batch_size):
                seen += step
                yield seen, self._batch(rows)
        if not self.drop_last and last is not None and seen < last:
            mine = np.arange(seen, last)[self.batch_size * self.rank :][: self.batch_size]
            if len(mine):
                yield last, self._batch(self._starts(mine))

    def _starts(self, places: Samples) -> Samples:
        """The first tokens of the samples at these places of the global order."""
        count, order = self.num_samples, self._identity["order"]
        if order == "random":
            return draw(places, self.windows.split.num_tokens - self.seq_len, make_key(*self._identity.values()))
        epochs, within = np.divmod(places, count)
        if order == "shuffled":
            within = within.copy()
            for epoch in np.unique(epochs).tolist():
                mine = epochs == epoch
                within[mine] = permute(within[mine], count, make_key(*self._identity.values(), epoch))
        return within * self.seq_len

    def _batch(self, starts: Samples) -> Batch:
        stored = self.windows.gather(starts)
        rows = stored.astype(self.dtype, copy=False)
        batch: Batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
        if self.mask_borders or self._border_fields:
            borders = find_borders(self.windows.split, stored, starts)
            if self.mask_borders:
                batch["labels"] = batch["labels"].copy()
                batch["labels"][borders.rows, borders.columns - 1] = IGNORED
            batch |= as_fields(borders, self._border_fields, (len(starts), self.seq_len))
        if "document_ids" in self.fields:
            batch["document_ids"] += self.windows.split.document_at(starts)[:, None]
        if "sample_index" in self.fields:
            batch["sample_index"] = starts if self._identity["order"] == "random" else starts // self.seq_len
        return batch


def _check(*, batch_size: int, rank: int, world_size: int, order: str, fields: tuple[str, ...], prefetch: int) -> None:
    if batch_size < 1:
        raise RecipeError(f"batch_size is {batch_size}", hint="give a positive number of samples")
    if not 0 <= rank < world_size:
        raise RecipeError(f"rank {rank} of {world_size} ranks", hint="ranks count from 0")
    if order not in ORDERS:
        raise RecipeError(f"order {order!r} is unknown", hint=f"there are {', '.join(ORDERS)}")
    if unknown := sorted(set(fields) - set(FIELDS)):
        raise RecipeError(f"fields {unknown} are unknown", hint=f"there are {', '.join(FIELDS)}")
    if prefetch < 0:
        raise RecipeError(f"prefetch is {prefetch}", hint="give the number of batches to keep ready, or 0")
