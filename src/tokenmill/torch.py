"""The loader for torch: the same stream as tensors, alone or inside torch's own DataLoader.

    DataLoader        batches for this rank, prefetched, with a state: what a training loop needs
    IterableDataset   the same batches through the worker processes of torch.utils.data.DataLoader
    Dataset           samples by their index, for torch's samplers
    TextDataset       batches straight from text, with worker processes or without
    make_get_batch    nanoGPT's get_batch(split)

Only this module imports torch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import data as torch_data
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter

from tokenmill import arguments
from tokenmill.arguments import Sources, StreamOptions
from tokenmill.dataset import dataset as datasets
from tokenmill.errors import RecipeError, StateError
from tokenmill.formats import open as formats
from tokenmill.loader import loader as loaders
from tokenmill.loader.batches import Batch, Labels, Numbers
from tokenmill.loader.loader import DatasetLike, LoaderOptions, RowOptions, SampleOptions, run_ahead
from tokenmill.loader.mixture import Mixture

if TYPE_CHECKING:
    from tokenmill.text_stream import Cursor, TextStream

Tensors = dict[str, torch.Tensor]


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
        for total, batch in super()._batches(seen, last):
            tensors = as_tensors(batch)
            yield total, {name: tensor.pin_memory() for name, tensor in tensors.items()} if self._pin else tensors


class IterableDataset(torch_data.IterableDataset):  # type: ignore[misc]  # torch is not type-checked here
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
        self._loader = DataLoader(
            dataset,
            seq_len,
            batch_size,
            rank=rank,
            world_size=world_size,
            dtype=dtype,
            pin_memory=pin_memory,
            **options,
        )
        # In the main process, the iteration by workers; in a worker, its share of it.
        self._watched: WatchedIteration | None = None
        self._share: WorkerShare | None = None
        # Workers that the main process has not noticed say so in shared memory.
        self._is_noticed = False
        self._unnoticed = torch.zeros((), dtype=torch.bool).share_memory_()
        # Why a worker must not begin. Before a fork, nothing can be raised.
        self._refusal: StateError | None = None
        _watched_at_forks().add(self)

    def __repr__(self) -> str:
        return f"IterableDataset({self._loader!r})"

    def __len__(self) -> int:
        """Batches of this rank in a pass. A `TypeError` if the dataset repeats endlessly, as if it had no length."""
        return len(self._loader)

    def __bool__(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        """What workers get that are not forked."""
        check_caller(self._labels, self._loader.world_size)
        self._notice_workers()
        return {**self.__dict__, "_watched": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _watched_at_forks().add(self)

    def __iter__(self) -> Iterator[Tensors]:
        check_caller(self._labels, self._loader.world_size)
        info = torch_data.get_worker_info()
        if info is None:
            self._settle()
            return iter(self._loader)
        if self._refusal is not None:
            raise self._refusal
        if not self._is_noticed and info.id == 0:
            stream = self._loader.stream.identity
            is_same = self._loader.epochs is not None and stream.get("order") == "sequential"
            _note_unnoticed(self._unnoticed, begins=self._share is None and not is_same)
        if self._share is None:
            self._share = WorkerShare(self._loader, info.id, info.num_workers)
        return self._share.begin()

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of pass number `epoch`, unless the position is inside of it, as with `DataLoader`."""
        if self._unnoticed:
            self._unnoticed.fill_(False)
        self._settle()
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was taken, as plain JSON."""
        if self._share is not None:
            return self._share.state_dict()
        if self._unnoticed:
            raise _unnoticed_error()
        loader = copy.copy(self._loader)
        if self._watched is not None:
            self._watched.move(loader)
        return loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there. In the main process, call it before workers start."""
        info = torch_data.get_worker_info()
        if info is None and isinstance(state, dict) and "share" in state:
            raise StateError(
                "the state is one worker's", hint="load it with the load_state_dict of torchdata's StatefulDataLoader"
            )
        self._loader.load_state_dict(state)
        self._watched = None
        self._unnoticed.fill_(False)
        if info is not None:
            self._share = WorkerShare.load(self._loader, info.id, info.num_workers, state)

    def _settle(self) -> None:
        """Take over the position of an iteration by workers, before another one begins."""
        if self._watched is not None:
            self._watched.move(self._loader)
            self._watched = None

    def _notice_workers(self) -> None:
        """Called before each worker starts, to find the iterator of torch that starts it."""
        self._is_noticed, self._refusal = False, None
        iterator, state = _find_iterator(self)
        if iterator is None:
            return
        self._refusal = _refusal_of(iterator)
        if self._refusal is not None:
            return
        if self._watched is None or not self._watched.is_of(iterator):
            try:
                self._settle()
            except StateError as error:
                self._refusal = error
                return
            if state is not None:
                self._loader.load_state_dict(state)
            self._watched = WatchedIteration(self._loader, iterator)
            _notice_resets(iterator, self, self._watched)
        self._is_noticed = True

    def _begin_again(self, watched: WatchedIteration) -> None:
        """Workers that persist begin the pass after their last one."""
        if self._watched is watched:
            self._settle()
        end = self._loader._enter_pass()
        if end is None or self._loader.samples_seen != watched.end:
            raise StateError(
                f"workers that persist begin the next pass, but the position is sample {self._loader.samples_seen:,}",
                hint="use persistent_workers=False, or take all batches of each pass",
            )
        watched.begin, watched.end, self._watched = self._loader.samples_seen, end, watched


class WatchedIteration:
    """An iteration by torch's workers, seen from the main process: from which sample to which, and what was taken.

    Workers run ahead, and nothing tells a dataset what the trainer takes. torch's iterator counts it. Its attributes
    are kept here, since the iterator itself must end with its loop.
    """

    def __init__(self, loader: DataLoader, iterator: Any) -> None:
        self._attributes = vars(iterator)
        self.missing: list[str] = []
        self.end = loader._enter_pass()
        self.begin = loader.samples_seen

    def is_of(self, iterator: Any) -> bool:
        return self._attributes is vars(iterator)

    def move(self, loader: DataLoader) -> None:
        """Move the loader behind the last batch that was taken."""
        taken, has_all = _read_counts(self._attributes, self.missing)
        seen = loader.seen_after(self.begin, taken)
        loader.samples_seen, loader._open_end = seen if self.end is None else min(seen, self.end), self.end
        if self.end is not None and has_all:
            loader.samples_seen, loader._open_end = self.end, None


class WorkerShare:
    """What one worker makes: its batches of the passes that begin at the position of its loader."""

    def __init__(self, loader: DataLoader, worker: int, workers: int, *, taken: int = 0) -> None:
        self._loader, self._worker, self._workers, self._taken = loader, worker, workers, taken
        self._has_begun = False

    @classmethod
    def load(cls, loader: DataLoader, worker: int, workers: int, state: dict[str, Any]) -> WorkerShare:
        found = state.get("share")
        found = found if isinstance(found, dict) else {}
        mine = {"worker": worker, "workers": workers, "rank": loader.rank, "world_size": loader.world_size}
        mine["batch_size"] = loader.batch_size
        theirs = {name: found.get(name) for name in mine}
        if theirs != mine:
            raise StateError(
                f"the state is that of {theirs if found else 'no worker'}, this is {mine}",
                hint="a StatefulDataLoader needs the same number of workers and ranks; for others, save "
                "the state_dict() of the dataset, and load it into the dataset before workers start",
            )
        return cls(loader, worker, workers, taken=arguments.whole("batches taken", found["taken"]))

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader
        share = {"worker": self._worker, "workers": self._workers, "rank": loader.rank, "world_size": loader.world_size}
        return {**loader.state_dict(), "share": {**share, "batch_size": loader.batch_size, "taken": self._taken}}

    def begin(self) -> Iterator[Tensors]:
        loader = self._loader
        if self._has_begun:  # a worker that persists
            end = loader._pass_end()
            if end is None:
                raise StateError(
                    "an endless dataset was begun twice in the same worker",
                    hint="use persistent_workers=False, or give the dataset epochs=1",
                )
            loader.samples_seen, loader._open_end, self._taken = end, None, 0
        self._has_begun = True
        return self._batches(loader.samples_seen, loader._pass_end())

    def _batches(self, begin: int, end: int | None) -> Iterator[Tensors]:
        loader, workers = self._loader, self._workers
        step, left = loader.batch_size * loader.world_size, None
        if end is not None and loader.drop_last:
            left = len(range(self._worker, loader.num_given(begin, end) // step, workers)) - self._taken
        # W steps of R ranks are one step of W * R ranks, of which the first R are the first worker's.
        reader = copy.copy(loader)
        reader.rank += self._worker * loader.world_size
        reader.world_size *= workers
        reader.drop_last = reader._pin = False
        batches = run_ahead(reader._batches(reader.seen_after(begin, self._taken), end), loader.prefetch)
        for _, batch in itertools.islice(batches, left):
            self._taken += 1
            yield batch


@functools.cache
def _watched_at_forks() -> weakref.WeakSet[IterableDataset | TextDataset]:
    """The datasets of this process, which look at every fork whether it starts a worker of theirs."""
    datasets: weakref.WeakSet[IterableDataset | TextDataset] = weakref.WeakSet()

    def look() -> None:
        for dataset in list(datasets):
            dataset._notice_workers()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=look)
    return datasets


def _find_iterator(dataset: IterableDataset | TextDataset) -> tuple[Any, dict[str, Any] | None]:
    """torch's iterator that is starting a worker for this dataset, and the state that it was given.

    torch has no call for it, but its iterator is on the stack.
    """
    frame: types.FrameType | None = sys._getframe(
        1
    )  # not this one: its own locals would be a cycle that keeps the iterator
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(owner, BaseDataLoaderIter) and getattr(owner, "_dataset", None) is dataset:
            is_torchdata = type(owner).__module__.partition(".")[0] == "torchdata"
            if is_torchdata and "next_iter_state" not in frame.f_locals:
                return None, None  # it may have been given a state, but not one that is known here
            given = frame.f_locals.get("next_iter_state")
            return owner, given and given["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
        frame = frame.f_back
    return None, None


def _notice_resets(
    iterator: Any, dataset: IterableDataset | TextDataset, watched: WatchedIteration | _WatchedText
) -> None:
    """Be called when workers that persist begin again."""
    if getattr(iterator, "_persistent_workers", True):
        watched.missing = [name for name in ("_persistent_workers", "_reset") if not hasattr(iterator, name)]
        iterator._reset = functools.partial(_reset, weakref.ref(iterator), weakref.ref(dataset), watched)


def _read_counts(attributes: dict[str, Any], missing: list[str]) -> tuple[int, bool]:
    """How many batches the trainer took from torch's iterator, and whether those were all.

    The names are private, so another torch may lack them. Then nothing tells what was taken.
    """
    names = ("_num_yielded", "_rcvd_idx", "_send_idx")
    missing = [*missing, *(name for name in names if name not in attributes)]
    if missing:
        raise StateError(
            f"the iterator of torch {torch.__version__} has no {', '.join(missing)}, so the number of batches taken "
            "is unknown",
            hint="iterate without workers, or use another version of torch",
        )
    taken, received, sent = (attributes[name] for name in names)
    # As long as a worker has not ended, torch waits for more of its batches than it has received.
    return taken, received >= sent


def _refusal_of(iterator: Any) -> StateError | None:
    """Why workers of this iterator must not begin."""
    if getattr(iterator, "_in_order", True) or iterator._num_workers == 1:
        return None
    return StateError(
        "with in_order=False, batches come in the order in which workers finish them, which no state can resume",
        hint="leave in_order=False out",
    )


def _note_unnoticed(unnoticed: torch.Tensor, *, begins: bool) -> None:
    """Remember that the main process does not know of this iteration, and warn if it is not the first one."""
    if unnoticed and begins:
        warnings.warn(
            "workers begin with the same samples in the same order as in the last iteration: another dataset is around "
            "this one, so the number of batches taken is unknown. Call set_epoch(epoch) before each iteration.",
            UserWarning,
            stacklevel=3,
        )
    unnoticed.fill_(True)


def _unnoticed_error() -> StateError:
    return StateError(
        "workers iterate over this dataset in a way that is not known here, so the number of batches taken is unknown",
        hint="iterate without workers, or give this dataset to torch's DataLoader itself",
    )


def _reset(
    iterator: weakref.ref[Any],
    dataset: weakref.ref[Any],
    watched: WatchedIteration | _WatchedText,
    loader: Any,
    first_iter: bool = False,
    **options: Any,
) -> None:
    """What torch calls to begin again with workers that persist, in place of the iterator's own method."""
    owner: Any = iterator()
    mine = dataset()
    if not first_iter and mine is not None:
        mine._begin_again(watched)
    type(owner)._reset(owner, loader, first_iter, **options)


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


class TextDataset(torch_data.IterableDataset):  # type: ignore[misc]  # torch is not type-checked here
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
        self._stream = TextStream(
            sources,
            tokenizer,
            seq_len,
            batch_size,
            rank=found[0] if rank is None else rank,
            world_size=found[1] if world_size is None else world_size,
            dtype=dtype,
            **options,
        )
        # Where workers are.
        self._positions = _Positions(_STEPS)
        self._watched: _WatchedText | None = None
        # Workers that the main process has not noticed say so in shared memory.
        self._is_noticed = False
        self._unnoticed = torch.zeros((), dtype=torch.bool).share_memory_()
        # Why a worker must not begin. Before a fork, nothing can be raised.
        self._refusal: StateError | None = None
        # In a worker: how many batches it has given, and the position behind the last one.
        self._taken = 0
        self._reached: tuple[int, Cursor] | None = None
        self._has_begun = self._has_ended = False
        _watched_at_forks().add(self)

    def __repr__(self) -> str:
        return f"TextDataset({self._stream!r})"

    def __getstate__(self) -> dict[str, Any]:
        check_caller(self._labels, self._stream.world_size)
        self._notice_workers()
        return {**self.__dict__, "_watched": None}

    def __iter__(self) -> Iterator[Tensors]:
        check_caller(self._labels, self._stream.world_size)
        info = torch_data.get_worker_info()
        if info is None:
            self._settle()
            return map(as_tensors, self._stream)
        if self._refusal is not None:
            raise self._refusal
        if not self._is_noticed and info.id == 0:
            is_same = self._stream.epochs is not None and not self._stream.is_shuffled
            _note_unnoticed(self._unnoticed, begins=not self._has_begun and not is_same)
        return self._share(info.id, info.num_workers)

    def _share(self, worker: int, workers: int) -> Iterator[Tensors]:
        """The batches of one worker. It notes each position where the main process finds it."""
        if self._has_begun and not self._has_ended:
            raise StateError(
                "a worker that persists was to begin again before its pass had ended",
                hint="use persistent_workers=False, or take all batches of each pass",
            )
        first = worker if self._reached is None else workers - 1
        self._has_begun, self._has_ended = True, False
        step = self._taken * workers + worker
        for seen, cursor, batch in self._stream.share(first, workers, self._reached):
            self._positions.note(None if batch is None else step, seen, cursor)
            if batch is None:
                self._stream.move_to(seen, cursor, is_over=True)
                self._taken, self._reached, self._has_ended = 0, None, True
            else:
                self._taken, self._reached, step = self._taken + 1, (seen, cursor), step + workers
                yield as_tensors(batch)

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of pass number `epoch`, unless the position is inside of it, as with `stream`."""
        self._unnoticed.fill_(False)
        self._settle()
        self._stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was taken, as plain JSON."""
        info = torch_data.get_worker_info()
        if info is not None:
            share = {"worker": info.id, "workers": info.num_workers, "taken": self._taken}
            if self._reached is not None:
                share |= {"seen": self._reached[0], "cursor": dataclasses.asdict(self._reached[1])}
            return {**self._stream.state_dict(), "share": share}
        if self._unnoticed:
            raise _unnoticed_error()
        stream = copy.copy(self._stream)
        if self._watched is not None:
            self._watched.move(stream)
        return stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there. In the main process, call it before workers start."""
        info = torch_data.get_worker_info()
        share = state.get("share") if isinstance(state, dict) else None
        if (info is None) != (share is None) or (info and share and share["workers"] != info.num_workers):
            raise StateError(
                f"the state is that of {'the main process' if share is None else 'a worker'}, or the number of "
                "workers is another one",
                hint="a StatefulDataLoader needs the same number of workers; for others, save the state_dict() of the "
                "dataset, and load it into the dataset before workers start",
            )
        self._stream.load_state_dict(state)
        self._watched = None
        self._unnoticed.fill_(False)
        if share is not None:
            self._taken = share["taken"]
            if self._taken:
                self._reached = share["seen"], self._stream.read_cursor(share["cursor"], share["seen"])

    def _settle(self) -> None:
        """Take over the position of an iteration by workers, before another one begins."""
        if self._watched is not None:
            self._watched.move(self._stream)
            self._watched = None

    def _notice_workers(self) -> None:
        """Called before each worker starts, to find the iterator of torch that starts it."""
        self._is_noticed, self._refusal = False, None
        iterator, state = _find_iterator(self)
        if iterator is None:
            return
        self._refusal = _refusal_of(iterator)
        if self._refusal is not None:
            return
        if self._watched is None or not self._watched.is_of(iterator):
            try:
                self._settle()
            except StateError as error:
                self._refusal = error
                return
            if state is not None:
                self._stream.load_state_dict(state)
            # Workers may make so many steps ahead. The last one taken has to be kept, too.
            steps = iterator._num_workers * (iterator._prefetch_factor + 1) + 1
            if steps > self._positions.steps:
                self._positions = _Positions(steps)
            self._watched = _WatchedText(self._stream, iterator, self._positions)
            _notice_resets(iterator, self, self._watched)
        self._is_noticed = True

    def _begin_again(self, watched: _WatchedText) -> None:
        """Workers that persist begin the pass after their last one."""
        if self._watched is watched:
            self._settle()
        self._watched = watched.begin_at(self._stream)


# Steps whose positions are kept, unless torch's workers may be further ahead of the trainer.
_STEPS = 64


class _Positions:
    """Where workers are, in shared memory: a row for each of the last steps, and one for the end of the pass.

    A row has the number of its step, from 1 on, so that another step is never taken for it; that of the end has -1.
    Through numpy, since torch would start threads for a large tensor, and forked workers could wait for them.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._rows = torch.from_numpy(np.zeros((steps + 1, 8), np.int64)).share_memory_()

    def clear(self) -> None:
        self._rows.numpy()[:] = 0

    def note(self, step: int | None, seen: int, cursor: Cursor) -> None:
        """Write the position behind a step, which counts from 0, or with None behind the pass."""
        mark, row, number = cursor.mark, *self._find(step)
        values = (seen, cursor.epoch, cursor.samples_before, mark.unit, mark.tokens, mark.documents, mark.all_tokens)
        self._rows.numpy()[row] = (*values, number)

    def read(self, step: int | None) -> tuple[int, Cursor]:
        from tokenmill.text_stream import Cursor, Mark

        row, number = self._find(step)
        seen, epoch, samples_before, unit, tokens, documents, all_tokens, found = self._rows.numpy()[row].tolist()
        if found != number:
            raise StateError(
                "workers have not noted how far they are, so the number of batches taken is unknown",
                hint="give this dataset to torch's DataLoader itself",
            )
        mark = Mark(unit=unit, tokens=tokens, documents=documents, all_tokens=all_tokens)
        return seen, Cursor(epoch=epoch, samples_before=samples_before, mark=mark)

    def _find(self, step: int | None) -> tuple[int, int]:
        """The row of a step, and the number that is written there."""
        return (self.steps, -1) if step is None else (step % self.steps, step + 1)


class _WatchedText:
    """An iteration of a `TextDataset` by torch's workers, seen from the main process."""

    def __init__(self, stream: TextStream, iterator: Any, positions: _Positions) -> None:
        self._attributes, self._positions = vars(iterator), positions
        self.missing: list[str] = []
        self.begin_at(stream)

    def begin_at(self, stream: TextStream) -> _WatchedText:
        self._begin, self._is_endless = stream.samples_seen, stream.epochs is None
        self._positions.clear()
        return self

    def is_of(self, iterator: Any) -> bool:
        return self._attributes is vars(iterator)

    def move(self, stream: TextStream) -> None:
        """Move the stream behind the last batch that was taken."""
        taken, has_all = _read_counts(self._attributes, self.missing)
        is_over = has_all and not self._is_endless
        if taken or is_over:
            stream.move_to(*self._positions.read(None if is_over else taken - 1), is_over=is_over)


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
