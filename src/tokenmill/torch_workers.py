"""Torch's worker processes: which batches each of them makes, and how many of them the trainer has taken.

    main process    torch's iterator  <- a, b, c, d ...       Watched: what was taken, read from the iterator
    worker 0 of 2   a     c     e                             WorkerShare: what this worker makes
    worker 1 of 2      b     d     f

Workers run ahead, and torch does not tell a dataset what the trainer takes. So a `WorkerDataset` finds the iterator of
torch when it starts its workers, and reads the counts of that iterator when it is asked for its state.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import os
import sys
import types
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch.utils import data as torch_data
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter

from tokenmill import arguments
from tokenmill.errors import StateError
from tokenmill.loader.batches import Batch
from tokenmill.loader.loader import DataLoader, run_ahead

if TYPE_CHECKING:
    from tokenmill.text_stream import Cursor, TextStream

Tensors = dict[str, torch.Tensor]


class Resumable(Protocol):
    """What makes the batches: a `DataLoader` or a `TextStream`."""

    def __iter__(self) -> Iterator[Batch]: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


Loader = TypeVar("Loader", bound=Resumable)


class WorkerDataset(torch_data.IterableDataset, Generic[Loader]):  # type: ignore[misc]  # torch is not type-checked here
    """Whole batches through torch's workers, with a state that counts what the trainer has taken."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        # In the main process, the iteration by workers; in a worker, its share of it.
        self._watched: Watched[Loader] | None = None
        self._share: WorkerShare | None = None
        # Workers that the main process has not noticed say so in shared memory.
        self._is_noticed = False
        self._unnoticed = torch.zeros((), dtype=torch.bool).share_memory_()
        # Why a worker must not begin. Before a fork, nothing can be raised.
        self._refusal: StateError | None = None
        _watched_at_forks().add(self)

    @abstractmethod
    def _check_caller(self) -> None:
        """Raise `RecipeError` if the caller would change the batches for the worse."""

    @abstractmethod
    def _watch(self, iterator: Any) -> Watched[Loader]:
        """Watch an iterator of torch that begins at the position of the loader."""

    @abstractmethod
    def _make_share(self, worker: int, workers: int, state: dict[str, Any] | None = None) -> WorkerShare:
        """The share of a worker, from the position of the loader on, or from a state of the share."""

    @property
    @abstractmethod
    def _has_equal_passes(self) -> bool:
        """Whether each pass has the same samples in the same order."""

    @abstractmethod
    def _as_tensors(self, batches: Iterator[Batch]) -> Iterator[Tensors]: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._loader!r})"

    def __getstate__(self) -> dict[str, Any]:
        """What workers get that are not forked."""
        self._check_caller()
        self._notice_workers()
        return {**self.__dict__, "_watched": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _watched_at_forks().add(self)

    def __iter__(self) -> Iterator[Tensors]:
        self._check_caller()
        info = torch_data.get_worker_info()
        if info is None:
            self._settle()
            return self._as_tensors(iter(self._loader))
        if self._refusal is not None:
            raise self._refusal
        if not self._is_noticed and info.id == 0:
            self._note_unnoticed()
        if self._share is None:
            self._share = self._make_share(info.id, info.num_workers)
        return self._as_tensors(self._share.begin())

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of pass number `epoch`, unless the position is inside of it."""
        if self._unnoticed:
            self._unnoticed.fill_(False)
        self._settle()
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was taken, as plain JSON."""
        if self._share is not None:
            return self._share.state_dict()
        if self._unnoticed:
            raise StateError(
                "workers iterate over this dataset in a way that is not known here, so the number of batches taken "
                "is unknown",
                hint="iterate without workers, or give this dataset to torch's DataLoader itself",
            )
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
            self._share = self._make_share(info.id, info.num_workers, state)

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
            self._watched = self._watch(iterator)
            _notice_resets(iterator, self, self._watched)
        self._is_noticed = True

    def _note_unnoticed(self) -> None:
        """Remember that the main process does not know of this iteration, and warn if it is not the first one."""
        if self._unnoticed and self._share is None and not self._has_equal_passes:
            warnings.warn(
                "workers begin with the same samples in the same order as in the last iteration: another dataset is "
                "around this one, so the number of batches taken is unknown. Call set_epoch(epoch) before each "
                "iteration.",
                UserWarning,
                stacklevel=3,
            )
        self._unnoticed.fill_(True)

    def _begin_again(self, watched: Watched[Loader]) -> None:
        """Workers that persist begin the pass after their last one."""
        if self._watched is watched:
            self._settle()
        watched.begin_again(self._loader)
        self._watched = watched


class Watched(Generic[Loader]):
    """An iteration by torch's workers, seen from the main process.

    The attributes of torch's iterator are kept here, since the iterator itself must end with its loop.
    """

    def __init__(self, iterator: Any) -> None:
        self._attributes = vars(iterator)
        self.missing: list[str] = []

    def is_of(self, iterator: Any) -> bool:
        return self._attributes is vars(iterator)

    @abstractmethod
    def move(self, loader: Loader) -> None:
        """Move the loader behind the last batch that was taken."""

    @abstractmethod
    def begin_again(self, loader: Loader) -> None:
        """Workers that persist begin another pass at the position of the loader."""

    def _counts(self) -> tuple[int, bool]:
        """How many batches the trainer took from torch's iterator, and whether those were all.

        The names are private, so another torch may lack them. Then nothing tells what was taken.
        """
        names = ("_num_yielded", "_rcvd_idx", "_send_idx")
        missing = [*self.missing, *(name for name in names if name not in self._attributes)]
        if missing:
            raise StateError(
                f"the iterator of torch {torch.__version__} has no {', '.join(missing)}, so the number of batches "
                "taken is unknown",
                hint="iterate without workers, or use another version of torch",
            )
        taken, received, sent = (self._attributes[name] for name in names)
        # As long as a worker has not ended, torch waits for more of its batches than it has received.
        return taken, received >= sent


class WorkerShare(Protocol):
    """What one worker makes: its batches of the passes that begin at the position of its loader."""

    def begin(self) -> Iterator[Batch]: ...
    def state_dict(self) -> dict[str, Any]: ...


class WatchedLoader(Watched[DataLoader]):
    """An iteration over a prepared dataset: from which sample to which."""

    def __init__(self, iterator: Any, loader: DataLoader) -> None:
        super().__init__(iterator)
        self._end = loader._enter_pass()
        self._begin = loader.samples_seen

    def move(self, loader: DataLoader) -> None:
        taken, has_all = self._counts()
        seen = loader.seen_after(self._begin, taken)
        loader.samples_seen, loader._open_end = seen if self._end is None else min(seen, self._end), self._end
        if self._end is not None and has_all:
            loader.samples_seen, loader._open_end = self._end, None

    def begin_again(self, loader: DataLoader) -> None:
        end = loader._enter_pass()
        if end is None or loader.samples_seen != self._end:
            raise StateError(
                f"workers that persist begin the next pass, but the position is sample {loader.samples_seen:,}",
                hint="use persistent_workers=False, or take all batches of each pass",
            )
        self._begin, self._end = loader.samples_seen, end


class LoaderShare:
    """One worker's batches of a prepared dataset."""

    def __init__(self, loader: DataLoader, worker: int, workers: int, state: dict[str, Any] | None = None) -> None:
        self._loader, self._worker, self._workers = loader, worker, workers
        self._mine = {"worker": worker, "workers": workers, "rank": loader.rank, "world_size": loader.world_size}
        self._mine["batch_size"] = loader.batch_size
        self._taken = 0 if state is None else _read_share(state, self._mine)["taken"]
        self._has_begun = False

    def state_dict(self) -> dict[str, Any]:
        return {**self._loader.state_dict(), "share": {**self._mine, "taken": self._taken}}

    def begin(self) -> Iterator[Batch]:
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

    def _batches(self, begin: int, end: int | None) -> Iterator[Batch]:
        loader, workers = self._loader, self._workers
        step, left = loader.batch_size * loader.world_size, None
        if end is not None and loader.drop_last:
            left = len(range(self._worker, loader.num_given(begin, end) // step, workers)) - self._taken
        # W steps of R ranks are one step of W * R ranks, of which the first R are the first worker's.
        reader = copy.copy(loader)
        reader.rank += self._worker * loader.world_size
        reader.world_size *= workers
        reader.drop_last = False
        batches = run_ahead(reader._batches(reader.seen_after(begin, self._taken), end), loader.prefetch)
        for _, batch in itertools.islice(batches, left):
            self._taken += 1
            yield batch


# Steps whose positions are kept, unless torch's workers may be further ahead of the trainer.
STEPS = 64


class Positions:
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


def num_steps_ahead(iterator: Any) -> int:
    """How many steps torch's workers may make before the trainer takes the first of them, which is kept, too."""
    return int(iterator._num_workers * (iterator._prefetch_factor + 1) + 1)


class WatchedText(Watched["TextStream"]):
    """An iteration over text. Where a batch ends is only known to the worker that made it, so workers note it."""

    def __init__(self, iterator: Any, stream: TextStream, positions: Positions) -> None:
        super().__init__(iterator)
        self._positions = positions
        self.begin_again(stream)

    def move(self, loader: TextStream) -> None:
        taken, has_all = self._counts()
        is_over = has_all and not self._is_endless
        if taken or is_over:
            loader.move_to(*self._positions.read(None if is_over else taken - 1), is_over=is_over)

    def begin_again(self, loader: TextStream) -> None:
        self._is_endless = loader.epochs is None
        self._positions.clear()


class TextShare:
    """One worker's batches of a text. It notes each position where the main process finds it."""

    def __init__(
        self,
        stream: TextStream,
        positions: Positions,
        worker: int,
        workers: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._stream, self._positions, self._worker, self._workers = stream, positions, worker, workers
        # How many batches this worker has given, and the position behind the last one.
        self._taken = 0
        self._reached: tuple[int, Cursor] | None = None
        self._has_begun = self._has_ended = False
        if state is not None:
            share = _read_share(state, {"worker": worker, "workers": workers})
            self._taken = share["taken"]
            if self._taken:
                self._reached = share["seen"], stream.read_cursor(share["cursor"], share["seen"])

    def state_dict(self) -> dict[str, Any]:
        share: dict[str, Any] = {"worker": self._worker, "workers": self._workers, "taken": self._taken}
        if self._reached is not None:
            share |= {"seen": self._reached[0], "cursor": dataclasses.asdict(self._reached[1])}
        return {**self._stream.state_dict(), "share": share}

    def begin(self) -> Iterator[Batch]:
        if self._has_begun and not self._has_ended:
            raise StateError(
                "a worker that persists was to begin again before its pass had ended",
                hint="use persistent_workers=False, or take all batches of each pass",
            )
        self._has_begun, self._has_ended = True, False
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        first = self._worker if self._reached is None else self._workers - 1
        step = self._taken * self._workers + self._worker
        for seen, cursor, batch in self._stream.share(first, self._workers, self._reached):
            self._positions.note(None if batch is None else step, seen, cursor)
            if batch is None:
                self._stream.move_to(seen, cursor, is_over=True)
                self._taken, self._reached, self._has_ended = 0, None, True
            else:
                self._taken, self._reached, step = self._taken + 1, (seen, cursor), step + self._workers
                yield batch


def _read_share(state: dict[str, Any], mine: dict[str, int]) -> dict[str, Any]:
    """The share in a worker's state, which has to be that of the same worker of as many."""
    found = state.get("share")
    share = found if isinstance(found, dict) else {}
    theirs = {name: share.get(name) for name in mine}
    if theirs != mine:
        raise StateError(
            f"the state is that of {theirs if share else 'no worker'}, this is {mine}",
            hint="a StatefulDataLoader needs the same number of workers and ranks; for others, save "
            "the state_dict() of the dataset, and load it into the dataset before workers start",
        )
    return {**share, "taken": arguments.whole("batches taken", share.get("taken"))}


@functools.cache
def _watched_at_forks() -> weakref.WeakSet[WorkerDataset[Any]]:
    """The datasets of this process, which look at every fork whether it starts a worker of theirs."""
    datasets: weakref.WeakSet[WorkerDataset[Any]] = weakref.WeakSet()

    def look() -> None:
        for dataset in list(datasets):
            dataset._notice_workers()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=look)
    return datasets


def _refusal_of(iterator: Any) -> StateError | None:
    """Why workers of this iterator must not begin."""
    if getattr(iterator, "_in_order", True) or iterator._num_workers == 1:
        return None
    return StateError(
        "with in_order=False, batches come in the order in which workers finish them, which no state can resume",
        hint="leave in_order=False out",
    )


def _find_iterator(dataset: WorkerDataset[Any]) -> tuple[Any, dict[str, Any] | None]:
    """torch's iterator that is starting a worker for this dataset, and the state that it was given.

    torch has no call for it, but its iterator is on the stack.
    """
    # Not the frame of this function: its own locals would be a cycle that keeps the iterator.
    frame: types.FrameType | None = sys._getframe(1)
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


def _notice_resets(iterator: Any, dataset: WorkerDataset[Any], watched: Watched[Any]) -> None:
    """Be called when workers that persist begin again."""
    if getattr(iterator, "_persistent_workers", True):
        watched.missing = [name for name in ("_persistent_workers", "_reset") if not hasattr(iterator, name)]
        iterator._reset = functools.partial(_reset, weakref.ref(iterator), weakref.ref(dataset), watched)


def _reset(
    iterator: weakref.ref[Any],
    dataset: weakref.ref[Any],
    watched: Watched[Any],
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
