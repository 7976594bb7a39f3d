"""The loader for torch: the same stream as tensors, alone or inside torch's own DataLoader.

    DataLoader        batches for this rank, prefetched, with a state: what a training loop needs
    IterableDataset   the same batches through the worker processes of torch.utils.data.DataLoader
    Dataset           samples by their index, for torch's samplers
    TextDataset       batches straight from text, with worker processes or without
    make_get_batch    nanoGPT's get_batch(split)

Below the adapters of other frameworks, only this module and torch_workers.py import torch.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import data as torch_data

from tokenmill.arguments import Sources, StreamOptions
from tokenmill.dataset import dataset as datasets
from tokenmill.errors import RecipeError
from tokenmill.formats import open as formats
from tokenmill.loader import loader as loaders
from tokenmill.loader.batches import Batch, Labels, Numbers
from tokenmill.loader.loader import DatasetLike, LoaderOptions, RowOptions, SampleOptions
from tokenmill.loader.mixture import Mixture
from tokenmill.torch_workers import (
    STEPS,
    LoaderShare,
    Positions,
    Tensors,
    TextShare,
    WatchedLoader,
    WatchedText,
    WorkerDataset,
    num_steps_ahead,
)

if TYPE_CHECKING:
    from tokenmill.text_stream import TextStream  # noqa: F401  the parameter of a base class


class TorchOptions(LoaderOptions, total=False):
    """Options of the `DataLoader` of this module."""

    rank: int | None
    world_size: int | None
    dtype: npt.DTypeLike | None
    pin_memory: bool


def find_rank(*, within_node: bool = False) -> tuple[int, int]:
    """Rank and world size: from torch.distributed if it is initialized, else from RANK and WORLD_SIZE, else 0 of 1.

    With `within_node`, LOCAL_RANK and LOCAL_WORLD_SIZE: the ranks of a node share its part of a dataset.
    """
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if running and not within_node:
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, size = ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if within_node else ("RANK", "WORLD_SIZE")
    given = {name: os.environ.get(name) for name in (rank, size)}
    if given[rank] is None and given[size] is None and not running and "RANK" not in os.environ:
        return 0, 1
    try:
        return int(given[rank] or ""), int(given[size] or "")
    except ValueError:
        raise RecipeError(
            f"the environment has {rank}={given[rank]!r} and {size}={given[size]!r}",
            hint="set both to numbers, or unset both, or give rank and world_size to the loader",
        ) from None


class DataLoader(loaders.DataLoader):
    """`tokenmill.DataLoader` with tensors. Rank and world size are detected if they are not given: those within the
    node, if the dataset is one node's part.

    Tensors are contiguous and do not share memory: `labels.view(-1)` works, and writing to the inputs does not change
    the labels. If there is a GPU, `pin_memory` copies them into pinned memory, in the prefetching thread, so that
    `.to(device, non_blocking=True)` does not wait.
    """

    def __init__(
        self,
        dataset: DatasetLike,
        seq_len: int,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        dtype: npt.DTypeLike | None = np.int64,
        pin_memory: bool = True,
        **options: Unpack[LoaderOptions],
    ) -> None:
        opened = dataset if isinstance(dataset, datasets.Dataset | Mixture) else formats.open(dataset)
        found = find_rank(within_node=opened.is_node_part) if rank is None or world_size is None else (rank, world_size)
        super().__init__(
            opened,
            seq_len,
            batch_size,
            rank=found[0] if rank is None else rank,
            world_size=found[1] if world_size is None else world_size,
            dtype=dtype,
            **options,
        )
        self._pin = pin_memory and torch.cuda.is_available()
        self._labels = options.get("labels", "shifted")

    @property
    def dataset(self) -> Any:
        """There is none. Accelerate asks for it when it skips batches, which would be the wrong ones."""
        raise AttributeError(
            "tokenmill.torch.DataLoader has no dataset whose batches could be skipped: resume with its state_dict and "
            "load_state_dict, or give tokenmill.transformers.Dataset to the Trainer or to Accelerate"
        )

    def __iter__(self) -> Iterator[Batch]:
        check_caller(self._labels)
        return super().__iter__()

    def _batches(self, seen: int, last: int | None) -> Iterator[tuple[int, Batch]]:
        pin = self._pin and torch_data.get_worker_info() is None  # workers have no GPU
        for total, batch in super()._batches(seen, last):
            tensors = as_tensors(batch)
            yield total, {name: tensor.pin_memory() for name, tensor in tensors.items()} if pin else tensors


class IterableDataset(WorkerDataset[loaders.DataLoader]):
    """Whole batches, for `torch.utils.data.DataLoader(..., batch_size=None, num_workers=W)`.

    Worker w of W makes steps w, w + W, w + 2 W and so on. torch takes one batch of each worker in turn, so the result
    is the stream of `DataLoader`, in its order, for any W. More workers make it slower: a batch takes longer to travel
    from a worker than to be made.

    Positions are those of `DataLoader`, too: an iteration continues where the last one was left, or with the next
    pass. `state_dict()` counts what was taken, although workers run ahead, and fits any number of workers and ranks,
    and `DataLoader`. torchdata's `StatefulDataLoader` saves and loads the position by itself.
    """

    def __init__(
        self,
        dataset: DatasetLike,
        seq_len: int,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        dtype: npt.DTypeLike | None = np.int64,
        pin_memory: bool = False,
        **options: Unpack[LoaderOptions],
    ) -> None:
        options = {"prefetch": 0, **options}  # torch's workers prefetch themselves
        self._labels = options.get("labels", "shifted")
        loader = DataLoader(
            dataset,
            seq_len,
            batch_size,
            rank=rank,
            world_size=world_size,
            dtype=dtype,
            pin_memory=pin_memory,
            **options,
        )
        super().__init__(loader)

    def __len__(self) -> int:
        """Batches of this rank in a pass. A `TypeError` if the dataset repeats endlessly, as if it had no length."""
        return len(self._loader)

    def __bool__(self) -> bool:
        return True

    def _check_caller(self) -> None:
        check_caller(self._labels, self._loader.world_size)

    def _watch(self, iterator: Any) -> WatchedLoader:
        return WatchedLoader(iterator, self._loader)

    def _make_share(self, worker: int, workers: int, state: dict[str, Any] | None = None) -> LoaderShare:
        return LoaderShare(self._loader, worker, workers, state)

    @property
    def _has_equal_passes(self) -> bool:
        return self._loader.epochs is not None and self._loader.stream.identity.get("order") == "sequential"

    def _as_tensors(self, batches: Iterator[Batch]) -> Iterator[Tensors]:
        return batches  # the loader has made tensors of them


class Dataset(torch_data.Dataset):  # type: ignore[misc]  # torch is not type-checked here
    """Samples by their index, as dicts of tensors: `dataset[i]["input_ids"]`. Order and ranks are up to the sampler."""

    def __init__(
        self,
        dataset: DatasetLike,
        seq_len: int,
        *,
        dtype: npt.DTypeLike | None = np.int64,
        **options: Unpack[SampleOptions],
    ) -> None:
        if "cu_seqlens" in options.get("fields", ()):
            raise RecipeError("cu_seqlens is a field of whole batches", hint="use DataLoader or IterableDataset")
        options = {"order": "sequential", **options}
        loader = loaders.DataLoader(dataset, seq_len, batch_size=1, dtype=dtype, **options)
        self._stream, self._path = loader.stream, loader.path
        self._labels = options.get("labels", "shifted")

    def __repr__(self) -> str:
        source = "Mixture" if self._path is None else repr(self._path)
        return f"Dataset({source}, {len(self):,} samples)"

    def __len__(self) -> int:
        return self._stream.num_samples

    def __getitem__(self, index: int) -> Tensors:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensors]:
        """Several samples at once, which torch prefers and which is faster."""
        check_caller(self._labels)
        batch = as_tensors(self._stream.batch(self._stream.locate(self._positions(indices))))
        rows = zip(*(values.unbind() for values in batch.values()), strict=True)
        return [dict(zip(batch, row, strict=True)) for row in rows]

    def __getstate__(self) -> Any:
        check_caller(self._labels)
        return super().__getstate__()

    def _positions(self, indices: Sequence[int]) -> Numbers:
        """Where these samples are in the global order."""
        count = len(self)
        positions = np.asarray(indices, np.int64)
        if len(positions) and not -count <= positions.min() <= positions.max() < count:
            raise IndexError(f"samples {positions.min()} to {positions.max()} of {count}")
        return positions % count


class TextDataset(WorkerDataset["TextStream"]):
    """`tokenmill.stream` for `torch.utils.data.DataLoader(..., batch_size=None, num_workers=W)`.

    Rank and world size are detected if they are not given. As with `IterableDataset`, the result is the same for any
    W, an iteration continues where the last one was left, and `state_dict()` counts what was taken.

    Each worker makes every W-th batch. Several workers share a pool of processes that tokenizes the text once: as many
    as there are workers, up to the number of cores, unless `workers` says how many.
    """

    def __init__(
        self,
        sources: Sources,
        tokenizer: str,
        seq_len: int,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        dtype: npt.DTypeLike | None = np.int64,
        **options: Unpack[StreamOptions],
    ) -> None:
        from tokenmill.text_stream import TextStream  # loads modules that a prepared dataset does not need

        found = find_rank() if rank is None or world_size is None else (rank, world_size)
        self._labels = options.get("labels", "shifted")
        stream = TextStream(
            sources,
            tokenizer,
            seq_len,
            batch_size,
            rank=found[0] if rank is None else rank,
            world_size=found[1] if world_size is None else world_size,
            dtype=dtype,
            **options,
        )
        super().__init__(stream)
        self._positions = Positions(STEPS)

    def _check_caller(self) -> None:
        check_caller(self._labels, self._loader.world_size)

    def _watch(self, iterator: Any) -> WatchedText:
        if (steps := num_steps_ahead(iterator)) > self._positions.steps:
            self._positions = Positions(steps)
        return WatchedText(iterator, self._loader, self._positions)

    def _make_share(self, worker: int, workers: int, state: dict[str, Any] | None = None) -> TextShare:
        return TextShare(self._loader, self._positions, worker, workers, state)

    @property
    def _has_equal_passes(self) -> bool:
        return self._loader.epochs is not None and not self._loader.is_shuffled

    def _as_tensors(self, batches: Iterator[Batch]) -> Iterator[Tensors]:
        return map(as_tensors, batches)


def make_get_batch(
    dataset: DatasetLike,
    seq_len: int,
    batch_size: int,
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    dtype: npt.DTypeLike | None = np.int64,
    prefetch: int = 2,
    pin_memory: bool = True,
    **options: Unpack[RowOptions],
) -> Callable[[str], tuple[torch.Tensor, torch.Tensor]]:
    """nanoGPT's `get_batch(split)`: inputs and targets of random windows, int64, on the device.

    The same seed gives the same windows. Ranks get different windows.
    """
    opened = formats.open(dataset) if isinstance(dataset, str | os.PathLike) else dataset
    batches: dict[str, Iterator[Any]] = {}

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        if split not in batches:
            loader = DataLoader(
                opened,
                seq_len,
                batch_size,
                split=split,
                order="random",
                seed=seed,
                rank=rank,
                world_size=world_size,
                dtype=dtype,
                prefetch=prefetch,
                pin_memory=pin_memory,
                **options,
            )
            batches[split] = iter(loader)
        batch = next(batches[split])
        x, y = (batch[name].to(device, non_blocking=True) for name in ("input_ids", "labels"))
        return x, y

    return get_batch


def as_tensors(batch: Batch) -> Tensors:
    """The batch as contiguous tensors, which models can `view`, without shared memory."""
    arrays = {name: np.ascontiguousarray(array) for name, array in batch.items()}
    if np.may_share_memory(arrays["input_ids"], arrays["labels"]):  # a batch of one row is contiguous as it is
        arrays["labels"] = arrays["labels"].copy()
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def check_caller(labels: Labels, world_size: int = 1) -> None:
    """Raise `RecipeError` if transformers or Accelerate asks for what they would shift, or shard, a second time.

    They say nothing about it, so this looks at the stack. A forked worker has that of its parent below its own.
    Others do not, so datasets check their caller when they are pickled, too.
    """
    callers = set()
    frame = inspect.currentframe()
    while frame is not None:
        callers.add(frame.f_globals.get("__name__"))
        frame = frame.f_back
    if labels == "shifted" and "transformers.trainer" in callers:
        raise RecipeError(
            "the labels are shifted, and models of transformers shift them again: they would train on token t + 2",
            hint="give the Trainer a tokenmill.transformers.Dataset, or this one labels='aligned'",
        )
    if world_size > 1 and "accelerate.data_loader" in callers:
        raise RecipeError(
            f"this is one rank's share of {world_size}, and Accelerate shards it again: most samples would be lost",
            hint="give Accelerate or the Trainer a tokenmill.transformers.Dataset, or do not prepare this DataLoader",
        )
