"""The loader: batches out of a stream, in an order that every rank computes alone.

    samples of all epochs, one global order:   0 1 2 3 | 4 5 6 7 | 8 9 ...
    a step takes world_size * batch_size:      rank 0  | rank 1  | the next step

All state is how many samples were seen. So a run goes on at the exact next sample with any
other number of ranks, batch size or depth of prefetching.

An iterator that runs ahead of its consumer, in a thread of its own.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from tokenmill import arguments
from tokenmill.arguments import MAX_INT
from tokenmill.dataset.bin_idx import numpy_dtype
from tokenmill.dataset.dataset import Dataset
from tokenmill.dataset.windows import Windows, check_seq_len
from tokenmill.errors import RecipeError, StateError
from tokenmill.formats import open as datasets
from tokenmill.loader.batches import Batch, BatchSpec, Numbers, SampleStream, WindowStream
from tokenmill.loader.mixture import Mixture, MixtureStream, check_steps, limit_of
from tokenmill.loader.packing import open_packed
from tokenmill.loader.page_cache import release
from tokenmill.permutation import Order

PackingKind = Literal["concat", "best_fit", "padded"]
# What a loader reads from.
DatasetLike = str | os.PathLike[str] | Dataset | Mixture


class RowOptions(TypedDict, total=False):
    """What rows contain: what every loader takes, whatever framework it is for."""

    packing: PackingKind
    fields: tuple[str, ...]
    mask_borders: bool


class SampleOptions(RowOptions, total=False):
    """The same, with which samples there are and in which order."""

    split: str
    order: Order
    seed: int


class LoaderOptions(SampleOptions, total=False):
    """The same, with how they are handed out."""

    epochs: int | None
    drop_last: bool
    prefetch: int


STATE_VERSION = 1
# Steps whose order is computed at once, at most: a permutation of many numbers takes little longer than one of few.
_STEPS = 256
# Tokens whose places are computed, and which are announced, at once.
_CHUNK_TOKENS = 1 << 23
# Rows between looks at how much is mapped: for each, the system may map two megabytes around it.
_RELEASE_ROWS = 256


class DataLoader:
    """Batches of `batch_size` samples of `seq_len` tokens, for one rank of `world_size`.

    for batch in DataLoader("data/owt", seq_len=1024, batch_size=64):
        batch["input_ids"], batch["labels"]

    It goes on for ever, epoch after epoch, unless `epochs` says how many; what is left then for no
    whole step is dropped, or with `drop_last=False` shared out as far as it goes. `fields` adds
    "positions", "document_ids", "cu_seqlens" or "sample_index" to the batches. With
    `mask_borders`, no label asks for the first token of the next document. `dtype` is that
    of ids; None leaves them as they are stored. Inputs and labels that are not masked are views of the same
    rows: copy one of them before you write into it.

    `packing` says how documents come into rows. "concat": end to end, cut wherever a row ends.
    "best_fit": whole where they fit, several in a row. "padded": one in a row. The last two cut only what
    is longer than a row, mask borders, and fill rows up with padding, whose labels are ignored.

    In place of a dataset it takes a `Mixture` of several; the field "part" then numbers them.
    """

    def __init__(
        self,
        dataset: DatasetLike,
        seq_len: int,
        batch_size: int,
        *,
        split: str = "train",
        packing: PackingKind = "concat",
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
        form = BatchSpec(fields=fields, mask_borders=mask_borders, dtype=dtype)
        share = check_share(batch_size=batch_size, rank=rank, world_size=world_size, prefetch=prefetch, epochs=epochs)
        self.batch_size, self.rank, self.world_size, self.prefetch, self.epochs = share
        self.seq_len, seed = check_seq_len(seq_len), arguments.seed_number(seed)
        self.drop_last = arguments.flag("drop_last", drop_last)
        opened = dataset if isinstance(dataset, Dataset | Mixture) else datasets.open(dataset)
        self.stream = open_stream(opened, self.seq_len, split=split, order=order, seed=seed, form=form, packing=packing)
        self.samples_seen = 0
        if self.epochs is not None:
            check_steps(self.stream, self.epochs * self.num_samples)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.stream.num_samples

    @property
    def epoch(self) -> int:
        return self.samples_seen // self.num_samples

    def __iter__(self) -> Iterator[Batch]:
        """Batches from where the loader stands; a second iterator goes on where the first was left."""
        for seen, batch in run_ahead(self._batches(self.samples_seen), self.prefetch):
            self.samples_seen = seen
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as plain JSON. It is the same on all ranks."""
        return {
            "version": STATE_VERSION,
            "stream": self.stream.identity,
            "content": self.stream.content,
            "samples_seen": self.samples_seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader of the same stream stood, whatever its ranks and batch size were."""
        hint = "open the same dataset with the same seed, order, packing and seq_len"
        seen = check_state(state, self.stream.identity, hint=hint)
        check_content(state, "content", self.stream.content)
        self.samples_seen = seen

    def _batches(self, seen: int) -> Iterator[tuple[int, Batch]]:
        """Batches from a sample on, each with the number of samples that all ranks will have seen by then."""
        step = self.batch_size * self.world_size
        mine = self.batch_size * self.rank + np.arange(self.batch_size)
        last = None if self.epochs is None else self.epochs * self.num_samples
        ends = [end for end in (last, limit_of(self.stream)) if end is not None]
        left = max(0, min(ends) - seen) // step if ends else None
        chunks = self._locate_chunks(seen + mine, step, left)
        coming = next(chunks, None)
        expected = self._expect(coming)
        release_steps, others_bytes = max(1, _RELEASE_ROWS // self.batch_size), 0
        while coming is not None:
            for _ in expected:
                pass
            located, coming = coming, next(chunks, None)
            expected = self._expect(coming)
            for number, batch in enumerate(self.stream.batches(located)):
                next(expected, None)  # a little with each batch, so that none waits for it
                if number % release_steps == 0:
                    others_bytes = release(self.stream.maps(), others_bytes)
                seen += step
                yield seen, batch
        if last is None or seen + step <= last:
            check_steps(self.stream, seen + step)
        elif seen < last and not self.drop_last:
            rest = seen + mine[seen + mine < last]
            if len(rest):
                yield last, self.stream.batch(self.stream.locate(rest))

    def _expect(self, located: Numbers | None) -> Iterator[None]:
        return iter(()) if located is None else self.stream.expect(list(located))

    def _locate_chunks(self, first: Numbers, step: int, left: int | None) -> Iterator[Numbers]:
        """The samples of the steps that are left, from the one with these places on; those of some steps at a time."""
        chunk = max(1, _CHUNK_TOKENS // (self.batch_size * self.seq_len))
        done = 0
        for power in count():
            steps = min(_STEPS, 1 << power)
            if left is not None:
                steps = min(steps, left - done)
            if not steps:
                return
            places = first + step * np.arange(done, done + steps)[:, None]
            located = self.stream.locate(places.ravel())
            located = located.reshape(*places.shape, *located.shape[1:])
            done += steps
            for begin in range(0, steps, chunk):
                yield located[begin : begin + chunk]


def open_stream(
    dataset: Dataset | Mixture,
    seq_len: int,
    *,
    split: str,
    order: Order,
    seed: int,
    form: BatchSpec,
    packing: PackingKind = "concat",
) -> SampleStream:
    """The stream of a split's samples, or of those of all parts of a mixture."""
    if isinstance(dataset, Dataset):
        return _open_part(dataset, seq_len, {}, split=split, order=order, seed=seed, form=form, packing=packing)
    stored = [numpy_dtype(part[split].dtype) for part in dataset.datasets.values()]
    plain = replace(
        form,
        fields=tuple(field for field in form.fields if field != "part"),
        # Ids as they are stored may be of several kinds; the widest has room for all.
        dtype=np.result_type(*stored) if form.dtype is None else form.dtype,
    )
    streams = [
        # Each has its name in its key, so that parts with the same dataset have orders of their own.
        _open_part(part, seq_len, {"part": name}, split=split, order=order, seed=seed, form=plain, packing=packing)
        for name, part in dataset.datasets.items()
    ]
    return MixtureStream(dataset, streams, fields=form.fields)


def _open_part(
    dataset: Dataset,
    seq_len: int,
    extra: dict[str, str],
    *,
    split: str,
    order: Order,
    seed: int,
    form: BatchSpec,
    packing: PackingKind,
) -> SampleStream:
    if "part" in form.fields:
        raise RecipeError("field 'part' of a single dataset", hint="only a Mixture has parts")
    identity = {"fingerprint": dataset.manifest.fingerprint, "split": split, **extra}
    if packing == "concat":
        windows, content = Windows(dataset[split], seq_len), dataset.content(split)
        return WindowStream(windows, identity, content, order=order, seed=seed, form=form)
    return open_packed(dataset, split, packing, seq_len, identity, order=order, seed=seed, form=form)


def check_content(state: dict[str, Any], name: str, mine: Any) -> None:
    """Refuse the state of a stream of other text. States of before it was recorded do not say, and are taken."""
    theirs = state.get(name)
    if theirs in (None, mine):
        return
    of = ""
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        parts = zip(state["stream"]["parts"], theirs, mine, strict=True)
        of = f" of part {', '.join(repr(part.get('part')) for part, was, now in parts if was != now)}"
    raise StateError(
        f"the state was written before the {name}{of} changed: it has {_short(theirs)}, this loader {_short(mine)}",
        hint="put the old text back and prepare it again, or begin without the state",
    )


def _short(digests: Any) -> str:
    return ", ".join(str(one)[:12] for one in (digests if isinstance(digests, list) else [digests]))


def check_state(state: dict[str, Any], mine: dict[str, Any], *, hint: str) -> int:
    """The samples seen of a state that belongs to the stream with this identity; else `StateError`."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state is a mapping, not of type {type(state).__name__}", hint="give what state_dict gave")
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"the state has version {state.get('version')!r}, this loader {STATE_VERSION}",
            hint="use the tokenmill that wrote it",
        )
    found = state.get("stream")
    if found != mine:
        theirs = found if isinstance(found, dict) else {}
        pairs = [(name, theirs.get(name), mine.get(name)) for name in sorted({*mine, *theirs})]
        raise StateError(
            "the state belongs to another stream:\n  "
            + "\n  ".join(f"{name}: the state has {a!r}, this loader {b!r}" for name, a, b in pairs if a != b),
            hint=hint,
        )
    seen = state.get("samples_seen")
    if type(seen) is not int or not 0 <= seen < MAX_INT:
        raise StateError(f"samples_seen is {seen!r}", hint="the state is damaged")
    return seen


class Share(NamedTuple):
    """What a rank takes of a stream, as plain numbers."""

    batch_size: int
    rank: int
    world_size: int
    prefetch: int
    epochs: int | None


def check_share(*, batch_size: int, rank: int, world_size: int, prefetch: int, epochs: int | None) -> Share:
    """The same as plain numbers, or a `RecipeError` that names what is not one."""
    share = Share(
        batch_size=arguments.whole("batch_size", batch_size, least=1, hint="give a positive number of samples"),
        rank=arguments.whole("rank", rank, hint="ranks count from 0"),
        world_size=arguments.whole("world_size", world_size, least=1, hint="give the number of ranks"),
        prefetch=arguments.whole("prefetch", prefetch, hint="give the number of batches to keep ready, or 0"),
        epochs=arguments.whole_or_none("epochs", epochs, hint="give a number of epochs, or None to go on for ever"),
    )
    if share.rank >= share.world_size:
        raise RecipeError(f"rank {share.rank} of {share.world_size} ranks", hint="ranks count from 0")
    if share.batch_size * share.world_size > arguments.MAX_STEP:
        said = f"batch_size {share.batch_size} on world_size {share.world_size} ranks"
        raise RecipeError(f"{said}: too many samples in a step", hint=f"have at most {arguments.MAX_STEP} of them")
    return share


T = TypeVar("T")


class _End:
    """The last thing in the queue: the iterator is exhausted, or failed."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def run_ahead(items: Iterator[T], depth: int) -> Generator[T]:
    """The same items; up to `depth` of them are made before they are asked for. None are with 0, and no thread."""
    if depth == 0:
        yield from items
        return
    ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
    room: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each item that may be made
    for _ in range(depth):
        room.put(None)
    wanted = True

    def work() -> None:
        try:
            while room.get() or wanted:
                ready.put(next(items))
        except StopIteration:
            ready.put(_End())
        except BaseException as error:  # whatever it is, the consumer must see it
            ready.put(_End(error))

    thread = threading.Thread(target=work, daemon=True, name="tokenmill-ahead")
    thread.start()
    process = os.getpid()
    try:
        while True:
            if os.getpid() != process:
                raise StateError(
                    "this iterator was begun in another process, and what makes its items is a thread of that one",
                    hint="call iter() again in this process: it continues where the other one was at the fork",
                )
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            room.put(None)
            yield item
    finally:
        wanted = False
        room.put(None)
        thread.join()
