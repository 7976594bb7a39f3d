"""The modules for trainers beside what their users have today: more contenders for loader.py.

Each framework has loaders of ours, and of theirs on the same tokens, in the form that it expects. One that is not
installed is left out. Streams from text are in text_stream.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

import tokenmill
import tokenmill.torch

ROWS, WIDTH = 64, 1024
SEED = 1

Batches = Iterator[Any]
Loaders = dict[str, Callable[[], Batches]]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The same tokens as a dataset and as a flat file, the first of them, and a folder to write to."""

    dataset: tokenmill.Dataset
    flat: Path
    dtype: str
    few: int
    work: Path

    def mapped(self) -> np.ndarray[Any, Any]:
        return np.memmap(self.flat, self.dtype, mode="r")


@dataclass(frozen=True, slots=True)
class Framework:
    """Loaders by name: ours, and those that they are compared with."""

    ours: Loaders
    theirs: Loaders

    def make(self) -> dict[str, Batches]:
        return {name: make() for name, make in (self.ours | self.theirs).items()}


def endless(loader: Iterable[Any]) -> Batches:
    return itertools.chain.from_iterable(itertools.repeat(loader))


class MappedWindows(torch_data.Dataset[Any]):
    """What most people write for torch's DataLoader. `form` makes a sample of seq_len + 1 tokens."""

    def __init__(self, tokens: Tokens, form: Callable[[torch.Tensor], Any]) -> None:
        self._tokens, self._form = tokens.mapped(), form

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // WIDTH

    def __getitem__(self, index: int) -> Any:
        row = self._tokens[index * WIDTH : index * WIDTH + WIDTH + 1].astype(np.int64)
        return self._form(torch.from_numpy(row))


class StreamedWindows(torch_data.IterableDataset[Any]):
    """The same for loaders that take iterables, in a new order each time."""

    def __init__(self, windows: MappedWindows) -> None:
        self._windows = windows

    def __iter__(self) -> Iterator[Any]:
        return map(self._windows.__getitem__, torch.randperm(len(self._windows)).tolist())


def pair(row: torch.Tensor) -> Any:
    return row[:-1], row[1:]


def aligned(row: torch.Tensor) -> Any:
    return {"input_ids": row[:-1], "labels": row[:-1]}


def titan(row: torch.Tensor) -> Any:
    return {"input": row[:-1], "positions": torch.arange(WIDTH)}, row[1:]


def torch_loader(dataset: torch_data.Dataset[Any], workers: int = 0, **options: Any) -> Batches:
    options = {"shuffle": True, "drop_last": True, **options}
    return endless(torch_data.DataLoader(dataset, batch_size=ROWS, num_workers=workers, **options))


def for_torch(tokens: Tokens) -> Framework:
    def ours(prefetch: int) -> Batches:
        return iter(tokenmill.torch.DataLoader(tokens.dataset, WIDTH, ROWS, seed=SEED, prefetch=prefetch))

    def theirs(workers: int) -> Batches:
        return torch_loader(MappedWindows(tokens, pair), workers)

    return Framework(
        {f"tokenmill.torch, prefetch {number}": partial(ours, number) for number in (0, 2)},
        {f"torch DataLoader, {number} workers": partial(theirs, number) for number in (0, 2)},
    )


def for_transformers(tokens: Tokens) -> Framework:
    from datasets import load_from_disk
    from transformers import default_data_collator

    import tokenmill.transformers

    loader = partial(torch_loader, collate_fn=default_data_collator)
    write_rows(tokens)

    def rows(form: str | None) -> Batches:
        return loader(load_from_disk(str(tokens.work / "rows")).with_format(form))

    return Framework(
        {"tokenmill.transformers": lambda: loader(tokenmill.transformers.Dataset(tokens.dataset, WIDTH))},
        {
            "memory map, the Trainer's collator": lambda: loader(MappedWindows(tokens, aligned)),
            "datasets of packed rows": lambda: rows(None),
            "datasets of packed rows, as tensors": lambda: rows("torch"),
        },
    )


def write_rows(tokens: Tokens) -> None:
    """The first tokens as the examples of transformers store them: lists of inputs and of labels."""
    import pyarrow as pa
    from datasets import Dataset
    from datasets.table import InMemoryTable

    count = tokens.few // WIDTH
    values = pa.array(tokens.mapped()[: count * WIDTH].astype(np.int64))
    lists = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * WIDTH), values)
    table = pa.table({"input_ids": lists, "labels": lists})
    Dataset(InMemoryTable(table)).save_to_disk(str(tokens.work / "rows"))


def for_lightning(tokens: Tokens) -> Framework:
    import tokenmill.lightning

    def ours(prefetch: int) -> Batches:
        module = tokenmill.lightning.DataModule(tokens.dataset, WIDTH, ROWS, seed=SEED, prefetch=prefetch)
        return endless(module.train_dataloader())

    return Framework(
        {f"tokenmill.lightning, prefetch {number}": partial(ours, number) for number in (0, 2)},
        for_torch(tokens).theirs,
    )


def for_torchtitan(tokens: Tokens) -> Framework:
    """Release 0.3 has no dataset of tokens, so its loader gets a memory map."""
    from torchtitan.components.dataloader import ParallelAwareDataloader

    import tokenmill.torchtitan

    def ours(*, mask_boundaries: bool) -> Batches:
        config = tokenmill.torchtitan.DataLoader.Config(
            dataset=str(tokens.dataset.path), seed=SEED, mask_boundaries=mask_boundaries
        )
        return iter(config.build(dp_world_size=1, dp_rank=0, seq_len=WIDTH, local_batch_size=ROWS))

    def theirs() -> Batches:
        windows = StreamedWindows(MappedWindows(tokens, titan))
        return endless(ParallelAwareDataloader(windows, dp_rank=0, dp_world_size=1, batch_size=ROWS, num_workers=0))

    return Framework(
        {
            "tokenmill.torchtitan": partial(ours, mask_boundaries=True),
            "tokenmill.torchtitan, not masked": partial(ours, mask_boundaries=False),
        },
        {"torchtitan's DataLoader on a memory map": theirs},
    )


def for_jax(tokens: Tokens) -> Framework:
    import grain.python as grain

    import tokenmill.jax

    class Windows:
        """What Grain calls an array source, of windows."""

        def __init__(self) -> None:
            self._tokens = tokens.mapped()

        def __len__(self) -> int:
            return (len(self._tokens) - 1) // WIDTH

        def __getitem__(self, index: int) -> Any:
            row = self._tokens[index * WIDTH : index * WIDTH + WIDTH + 1].astype(np.int32)
            return {"input_ids": row[:-1], "labels": row[1:]}

    def by_grain(source: Any) -> Batches:
        # By default Grain reads 500 samples ahead, which would go on during the turns of others.
        options = grain.ReadOptions(prefetch_buffer_size=2 * ROWS)
        samples = grain.MapDataset.source(source).shuffle(seed=SEED).repeat().to_iter_dataset(options)
        return iter(samples.batch(ROWS, drop_remainder=True))

    return Framework(
        {
            "tokenmill.jax.DataLoader": lambda: iter(tokenmill.jax.DataLoader(tokens.dataset, WIDTH, ROWS, seed=SEED)),
            "tokenmill.jax.DataSource, by Grain": lambda: by_grain(tokenmill.jax.DataSource(tokens.dataset, WIDTH)),
        },
        {"Grain on a memory map": lambda: by_grain(Windows())},
    )


FRAMEWORKS: dict[str, Callable[[Tokens], Framework]] = {
    "torch": for_torch,
    "transformers": for_transformers,
    "lightning": for_lightning,
    "torchtitan": for_torchtitan,
    "jax": for_jax,
}


def find_frameworks(tokens: Tokens) -> dict[str, Framework]:
    """Those that are installed."""
    found = {}
    for name, make in FRAMEWORKS.items():
        try:
            found[name] = make(tokens)
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
    return found
