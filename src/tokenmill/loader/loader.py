"""DataLoader: the batches of one rank, prefetched, with a state that can be saved and loaded.

    samples of all epochs, one global order:   0 1 2 3 | 4 5 6 7 | 8 9 ...
    a step takes world_size * batch_size:      rank 0  | rank 1  | the next step

The only state is the number of samples seen. So a run resumes at the exact next sample with any number of ranks, any
batch size and any depth of prefetching. A thread keeps a few batches ready (`run_ahead`).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import replace
from itertools import count
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from tokenmill import arguments
from tokenmill.dataset.bin_idx import numpy_dtype
from tokenmill.dataset.dataset import Dataset
from tokenmill.dataset.windows import Windows, check_seq_len, check_tokens
from tokenmill.errors import RecipeError, StateError
from tokenmill.formats import open as datasets
from tokenmill.loader.batches import Batch, BatchSpec, Labels, Numbers, SampleStream, WindowStream
from tokenmill.loader.mixture import Mixture, MixtureStream
from tokenmill.loader.packing import open_packed
from tokenmill.loader.skip import NO_SKIPS, Skip, check_skip
from tokenmill.loader.state import STATE_VERSION, check_content, check_ignore, check_state, seq_lens
from tokenmill.loader.trace import Trace, trace_step
from tokenmill.permutation import Order
from tokenmill.storage.memory_maps import release

PackingKind = Literal["concat", "document_start", "best_fit", "padded", "truncated"]
# What a loader reads.
DatasetLike = str | os.PathLike[str] | Dataset | Mixture


class RowOptions(TypedDict, total=False):
    """The contents of rows: options of the loaders of all frameworks."""

    packing: PackingKind
    labels: Labels
    fields: tuple[str, ...]
    mask_boundaries: bool


class SampleOptions(RowOptions, total=False):
    """The same, and the split, the order and the seed."""

    split: str
    order: Order
    seed: int


class LoaderOptions(SampleOptions, total=False):
    """The same, and the options of iteration."""

    max_seq_len: int | None
    skip: Skip
    epochs: int | None
    drop_last: bool
    prefetch: int


# Steps whose samples are computed at once, at most: permuting many positions takes little longer than a few.
_MAX_STEPS = 256
# Tokens that are located and prefetched at once.
_CHUNK_TOKENS = 1 << 23
# Rows between checks of resident memory: Linux may map two megabytes around each row.
_RELEASE_ROWS = 256

T = TypeVar("T")


class DataLoader:
    """Batches of `batch_size` samples of `seq_len` tokens, for one rank of `world_size`.

    for batch in DataLoader("data/owt", seq_len=1024, batch_size=64):
        batch["input_ids"], batch["labels"]

    Repeats endlessly unless `epochs` is set. Then an iteration is one pass of that many epochs, from the current
    position to its end; the next iteration is the next pass, in its own order. An incomplete last step of a pass is
    dropped, or with `drop_last=False` divided among the ranks.

    With `labels="shifted"`, labels[i] is the token after input_ids[i], from rows of one token more, as most training
    code expects. With "aligned", labels are the inputs, for models that shift them themselves, as those of
    transformers do; the last target of each row is lost by that. With `mask_boundaries`, labels that are the first
    token of a document are -100. Labels do not change the order, so states fit both.

    `fields` adds to the batches: "positions", which restart at documents, or the same as "position_ids";
    "document_ids"; "cu_seqlens"; "attention_mask", which is 0 for padding; "sample_index". `dtype` is the dtype of
    ids and labels; None keeps the stored one. Inputs and unmasked labels are views of the same rows: copy one of them
    before you write into it.

    `packing` decides how documents are put into rows. "concat": end to end, cut wherever a row ends. "best_fit":
    whole documents, several in a row. "padded": one document in a row. These two cut only documents longer than a
    row. "truncated": the same as "padded", but what is longer than a row is dropped. These three mask boundaries, and
    fill rows with padding: the end of text, or 0 without one, whose labels are -100. "document_start": as "concat",
    but each row begins with a document, and what is left of the one before is dropped. `stream.packing` says how many
    tokens are padding and how many are dropped.

    `max_seq_len` makes loaders of several seq_len, each of which divides it, parts of one run: the order is that of
    rows of `max_seq_len`, which are cut into rows of `seq_len`. A state continues at the same token with any of them.
    Rows of a mixture, and the samples that its schedule counts, are then those of `max_seq_len`.

    `skip=[(1000, 1100)]` leaves out steps 1000 to 1099 of all ranks, counted from the start of the run. They become
    samples with the batch size and world size of this loader, are recorded in the state, and count as seen.

    `dataset` is a path, a URL, an open dataset, or a `Mixture` of several. The field "component" then tells which
    component of the mixture each row is from.
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
        max_seq_len: int | None = None,
        skip: Skip = (),
        epochs: int | None = None,
        drop_last: bool = True,
        labels: Labels = "shifted",
        fields: tuple[str, ...] = (),
        mask_boundaries: bool = False,
        dtype: npt.DTypeLike | None = np.int64,
        prefetch: int = 2,
    ) -> None:
        batch_spec = BatchSpec(labels=labels, fields=fields, mask_boundaries=mask_boundaries, dtype=dtype)
        share = check_share(batch_size=batch_size, rank=rank, world_size=world_size, prefetch=prefetch, epochs=epochs)
        self.batch_size, self.rank, self.world_size, self.prefetch, self.epochs = share
        self.seq_len, seed = check_seq_len(seq_len), arguments.seed_number(seed)
        self.drop_last = arguments.flag("drop_last", drop_last)
        opened = dataset if isinstance(dataset, Dataset | Mixture) else datasets.open(dataset)
        self.opened = opened
        self.path = None if isinstance(opened, Mixture) else opened.path
        self.stream = open_stream(
            opened,
            self.seq_len,
            split=split,
            order=order,
            seed=seed,
            batch_spec=batch_spec,
            packing=packing,
            max_seq_len=_check_max_seq_len(max_seq_len, self.seq_len, packing, order),
        )
        self.samples_seen = 0
        skips_nothing = isinstance(skip, tuple) and not skip
        self._asked_to_skip = NO_SKIPS if skips_nothing else check_skip(skip, self.batch_size * self.world_size)
        self._skips = self._asked_to_skip
        # The end of the pass whose last samples were taken, until its iteration ends; the position of a loaded state.
        self._open_end: int | None = None
        self._loaded: int | None = None
        if self.epochs is not None:
            self._check_limit(self._pass_samples)

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return self.stream.num_samples

    @property
    def num_steps(self) -> int | None:
        """Batches of a rank in a pass, or None if the loader repeats endlessly."""
        end = self._pass_end()
        if end is None:
            return None
        samples = self.num_given(end - self._pass_samples, end)
        steps, rest = divmod(samples, self.batch_size * self.world_size)
        return steps + (not self.drop_last and rest > self.batch_size * self.rank)

    @property
    def epoch(self) -> int:
        return self.samples_seen // self.num_samples

    def __repr__(self) -> str:
        source = "Mixture" if self.path is None else repr(self.path)
        shape = f"seq_len={self.seq_len}, batch_size={self.batch_size}, rank={self.rank}, world_size={self.world_size}"
        steps = "endless" if self.num_steps is None else f"{self.num_steps:,} steps"
        skipped = f", skips {self._skips.num_skipped:,} samples" if self._skips.ranges else ""
        return f"{type(self).__name__}({source}, {shape}, {steps}, {self.samples_seen:,} samples seen{skipped})"

    def __len__(self) -> int:
        """Batches of a rank in a pass. A `TypeError` if the loader repeats endlessly, as if it had no length."""
        if self.num_steps is None:
            raise TypeError("a loader that repeats endlessly has no length; give it epochs=1")
        return self.num_steps

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the current position to the end of the pass.

        A second iterator continues where the first one was left, or with the next pass if that one had all batches.
        """
        end = self._enter_pass()
        for seen, batch in run_ahead(self._batches(self.samples_seen, end), self.prefetch):
            self.samples_seen, self._open_end = seen, end
            yield batch
        if end is not None:
            self.samples_seen, self._open_end = end, None

    def num_given(self, begin: int, end: int) -> int:
        """Samples from position `begin` up to `end` that are not skipped."""
        return self._num_given_before(end) - self._num_given_before(begin)

    def seen_after(self, seen: int, steps: int) -> int:
        """The position so many whole steps of all ranks behind another one, where `samples_seen` was `seen`."""
        return self._end_of(self._num_given_before(seen) + steps * self.batch_size * self.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of pass number `epoch`, which counts from 0, unless the position is inside of it.

        So a resumed epoch is not restarted. Without `epochs`, passes are counted as if `epochs` were 1.
        """
        epoch = arguments.whole("epoch", epoch, hint="epochs count from 0")
        if epoch != self._current_pass():
            self.samples_seen, self._open_end = epoch * self._pass_samples, None

    def trace(self, step: int, rank: int | None = None) -> Trace:
        """What a step had in it: samples, documents, and the rows of the sources that those came from.

        Steps count from the start of the run, with the batch size and the ranks of this loader. `rank` is one of its
        ranks; None is all of them.
        """
        return trace_step(self, step, rank)

    def step_positions(self, step: int) -> Numbers:
        """The positions of the samples of a step, rank after rank. Steps count from the start of the run."""
        size = self.batch_size * self.world_size
        begin, end = 0, None
        if self.epochs is not None:
            number, step = self._find_pass(step)
            begin, end = number * self._pass_samples, (number + 1) * self._pass_samples
        first = self._num_given_before(begin) + step * size
        last = first + size if end is None else min(first + size, self._num_given_before(end))
        return self._positions(np.arange(first, last))

    def step_at(self, position: int) -> StepRow | None:
        """The step that takes a position, its rank and its row. None if no step does: it is skipped or dropped."""
        size, begin, before = self.batch_size * self.world_size, 0, 0
        number = self._num_given_before(position)
        if int(self._positions(np.array([number]))[0]) != position:
            return None
        if self.epochs is not None:
            in_pass = position // self._pass_samples
            begin, before = in_pass * self._pass_samples, self._num_steps_before(in_pass)
        step, within = divmod(number - self._num_given_before(begin), size)
        if self.epochs is not None and step >= self._num_pass_steps(in_pass):
            return None
        return StepRow(before + step, *divmod(within, self.batch_size))

    def _num_pass_steps(self, number: int) -> int:
        """Steps of all ranks in a pass; the last one may be incomplete."""
        begin = number * self._pass_samples
        steps, rest = divmod(self.num_given(begin, begin + self._pass_samples), self.batch_size * self.world_size)
        return steps + (rest > 0 and not self.drop_last)

    def _num_steps_before(self, number: int) -> int:
        """Steps of all passes before this one. Those behind the last skipped sample have the same number."""
        uneven = min(number, -(-self._skips.end // self._pass_samples))
        return sum(map(self._num_pass_steps, range(uneven))) + (number - uneven) * self._num_pass_steps(uneven)

    def _find_pass(self, step: int) -> tuple[int, int]:
        """The pass that has a step, and the number of the step in it."""
        number = 0
        while number * self._pass_samples < self._skips.end:
            steps = self._num_pass_steps(number)
            if step < steps:
                return number, step
            number, step = number + 1, step - steps
        steps = self._num_pass_steps(number)
        if not steps:
            raise RecipeError(
                f"an epoch of {self._pass_samples:,} samples has no step of {self.batch_size * self.world_size:,}",
                hint="use smaller batches",
            )
        return number + step // steps, step % steps

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, as plain JSON. It is the same on all ranks."""
        state = {
            "version": STATE_VERSION,
            "stream": self.stream.identity,
            "content": self.stream.content,
            "samples_seen": self.samples_seen,
        }
        if self._skips.ranges:
            state["skip"] = self._skips.to_json()
        # The end of a pass is the start of the next one: an iteration that was interrupted there has to end first.
        return {**state, "at_pass_end": True} if self._open_end == self.samples_seen else state

    def load_state_dict(self, state: dict[str, Any], *, ignore: Collection[str] = ()) -> None:
        """Continue at the position of another loader of the same stream, with any ranks and batch size.

        What the state skips is skipped, and what this loader was told to skip if it is not seen yet.

        A mixture may have other weights from there on, and more components. A state that differs in anything else is
        refused, unless `ignore` names the fields: "seed", "order", "packing", "plan", "fingerprint" or "content". Then
        only the count of samples continues: until the next epoch, samples may come twice or not at all.
        """
        hint, ignored = "open the same dataset with the same seed, order, packing and seq_len", check_ignore(ignore)
        seen = check_state(state, self.stream.identity, hint=hint, ignore=ignored)
        check_content(state, "content", self.stream.content, ignore=ignored)
        recorded = state.get("skip", [])
        self._skips = self._asked_to_skip.resumed_from(recorded, seen, *seq_lens(state, self.stream.identity))
        self.samples_seen = seen
        self._open_end = seen if seen and state.get("at_pass_end") else None
        self._loaded = seen

    def _num_given_before(self, position: int) -> int:
        return self._skips.num_given(position) if self._skips.ranges else position

    def _end_of(self, count: int) -> int:
        """The position behind the first `count` samples that are not skipped."""
        return self._skips.end_of(count) if self._skips.ranges else count

    def _positions(self, numbers: Numbers) -> Numbers:
        """The positions of the samples with these numbers, if only those that are not skipped are counted."""
        return self._skips.positions(numbers) if self._skips.ranges else numbers

    @property
    def _pass_samples(self) -> int:
        return (self.epochs or 1) * self.num_samples

    def _current_pass(self) -> int:
        number, within = divmod(self.samples_seen, self._pass_samples)
        return number - (within == 0 and self._open_end == self.samples_seen)

    def _pass_end(self) -> int | None:
        """Where the pass of the current position ends; None if the loader repeats endlessly."""
        return None if self.epochs is None else (self._current_pass() + 1) * self._pass_samples

    def _enter_pass(self) -> int | None:
        """Begin an iteration, and return where it ends.

        If the current pass has no batch left, that is the next pass, except for a state that was just loaded: it was
        saved in an iteration that had not ended, so the resumed loop has to end it, and gets a warning instead.
        """
        end = self._pass_end()
        step = self.batch_size * self.world_size
        least = step if self.drop_last else 1
        if end is None or self.num_given(self.samples_seen, end) >= least:
            return end
        count = self.num_given(end - self._pass_samples, end)
        if count < least:
            message = f"an epoch of {count:,} samples has no batch: a step of all ranks takes {step:,}"
        elif self.samples_seen != self._loaded:
            self.samples_seen, self._open_end = end, None
            return end + self._pass_samples
        else:
            number = self._current_pass()
            message = (
                f"epoch {number} has no batch left after sample {self.samples_seen:,}: the state was saved behind its "
                f"last batch. This iteration is empty, and the next one is epoch {number + 1}."
            )
        warnings.warn(message, UserWarning, stacklevel=3)
        return end

    def _batches(self, seen: int, last: int | None) -> Iterator[tuple[int, Batch]]:
        """Batches from a sample on up to `last`, each with the number of samples that all ranks have seen after it."""
        step = self.batch_size * self.world_size
        mine = self.batch_size * self.rank + np.arange(self.batch_size)
        taken, stop = self._num_given_before(seen), None if last is None else self._num_given_before(last)
        ends = [self.num_given(seen, end) for end in (last, self.stream.limit) if end is not None]
        left = max(0, min(ends)) // step if ends else None
        chunks = self._locate_chunks(taken + mine, step, left)
        following = next(chunks, None)
        prefetching = self._prefetch_chunk(following)
        release_steps, others_bytes = max(1, _RELEASE_ROWS // self.batch_size), 0
        while following is not None:
            for _ in prefetching:
                pass
            located, following = following, next(chunks, None)
            prefetching = self._prefetch_chunk(following)
            for number, batch in enumerate(self.stream.batches(located)):
                next(prefetching, None)  # one step with each batch, so that no batch waits for it
                if number % release_steps == 0:
                    others_bytes = release(self.stream.maps(), others_bytes)
                taken += step
                yield self._end_of(taken), batch
        if last is None or stop is None or taken + step <= stop:
            self._check_limit(self._end_of(taken + step))
        elif taken < stop and not self.drop_last:
            rest = taken + mine[taken + mine < stop]
            if len(rest):
                yield last, self.stream.batch(self.stream.locate(self._positions(rest)))

    def _check_limit(self, stop: int) -> None:
        """Raise `RecipeError` if the stream ends before position `stop`."""
        limit = self.stream.limit
        if limit is not None and stop > limit:
            self.stream.locate(np.array([limit]))

    def _prefetch_chunk(self, located: Numbers | None) -> Iterator[None]:
        return iter(()) if located is None else self.stream.prefetch(list(located))

    def _locate_chunks(self, first: Numbers, step: int, left: int | None) -> Iterator[Numbers]:
        """The samples of the remaining steps, several steps at a time. `first` are those of the first one."""
        chunk = max(1, _CHUNK_TOKENS // (self.batch_size * self.seq_len))
        done = 0
        for power in count():
            steps = min(_MAX_STEPS, 1 << power)
            if left is not None:
                steps = min(steps, left - done)
            if not steps:
                return
            positions = self._positions(first + step * np.arange(done, done + steps)[:, None])
            located = self.stream.locate(positions.ravel())
            located = located.reshape(*positions.shape, *located.shape[1:])
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
    batch_spec: BatchSpec,
    packing: PackingKind = "concat",
    max_seq_len: int | None = None,
) -> SampleStream:
    """The stream of the samples of a split, or of all components of a mixture."""
    if isinstance(dataset, Dataset):
        return _open_component(
            dataset,
            seq_len,
            {},
            split=split,
            order=order,
            seed=seed,
            batch_spec=batch_spec,
            packing=packing,
            max_seq_len=max_seq_len,
        )
    stored = [numpy_dtype(component[split].dtype) for component in dataset.datasets.values()]
    plain = replace(
        batch_spec,
        fields=tuple(field for field in batch_spec.fields if field != "component"),
        # Stored dtypes may differ; the widest one holds all ids.
        dtype=np.result_type(*stored) if batch_spec.dtype is None else batch_spec.dtype,
    )
    streams = [
        # The name is hashed for the order (under its key of version 0.1), so that two components with the same
        # dataset have different orders.
        _open_component(
            component,
            seq_len,
            {"part": name},
            split=split,
            order=order,
            seed=seed,
            batch_spec=plain,
            packing=packing,
            max_seq_len=max_seq_len,
        )
        for name, component in dataset.datasets.items()
    ]
    return MixtureStream(dataset, streams, seq_len=seq_len, max_seq_len=max_seq_len, fields=batch_spec.fields)


def _open_component(
    dataset: Dataset,
    seq_len: int,
    extra: dict[str, str],
    *,
    split: str,
    order: Order,
    seed: int,
    batch_spec: BatchSpec,
    packing: PackingKind,
    max_seq_len: int | None,
) -> SampleStream:
    if "component" in batch_spec.fields:
        raise RecipeError("field 'component' of a single dataset", hint="only a Mixture has components")
    identity = {"fingerprint": dataset.manifest.fingerprint, "split": split, **extra}
    if packing == "concat":
        check_tokens(dataset[split].num_tokens, max_seq_len or seq_len)
        windows, content = Windows(dataset[split], seq_len), dataset.content(split)
        return WindowStream(
            windows, identity, content, order=order, seed=seed, batch_spec=batch_spec, max_seq_len=max_seq_len
        )
    return open_packed(dataset, split, packing, seq_len, identity, order=order, seed=seed, batch_spec=batch_spec)


def _check_max_seq_len(max_seq_len: Any, seq_len: int, packing: str, order: str) -> int | None:
    """The length of the rows whose order it is, if `max_seq_len` is given."""
    if max_seq_len is None:
        return None
    found = arguments.whole("max_seq_len", max_seq_len, least=seq_len, hint="give the longest `seq_len` of the run")
    if found % seq_len:
        raise RecipeError(f"max_seq_len {found} is not a multiple of seq_len {seq_len}", hint="give a multiple of it")
    if packing != "concat":
        raise RecipeError(
            f"max_seq_len with packing {packing!r}, whose rows are other ones for each seq_len",
            hint="use packing 'concat', or leave max_seq_len out",
        )
    if order == "random":
        raise RecipeError("max_seq_len with order 'random', whose windows begin anywhere", hint="leave it out")
    return found


class StepRow(NamedTuple):
    """A step of a run, and the rank and the row of its batch that has a sample."""

    step: int
    rank: int
    row: int


class Share(NamedTuple):
    """The part of a stream that a rank reads, as plain numbers."""

    batch_size: int
    rank: int
    world_size: int
    prefetch: int
    epochs: int | None


def check_share(*, batch_size: int, rank: int, world_size: int, prefetch: int, epochs: int | None) -> Share:
    """These arguments as plain numbers. A `RecipeError` names one that is not a number, or out of range."""
    share = Share(
        batch_size=arguments.whole("batch_size", batch_size, least=1, hint="give a positive number of samples"),
        rank=arguments.whole("rank", rank, hint="ranks count from 0"),
        world_size=arguments.whole("world_size", world_size, least=1, hint="give the number of ranks"),
        prefetch=arguments.whole("prefetch", prefetch, hint="give the number of batches to keep ready, or 0"),
        epochs=arguments.whole_or_none(
            "epochs", epochs, least=1, hint="give a number of epochs, or None to repeat endlessly"
        ),
    )
    if share.rank >= share.world_size:
        raise RecipeError(f"rank {share.rank} of {share.world_size} ranks", hint="ranks count from 0")
    if share.batch_size * share.world_size > arguments.MAX_STEP:
        said = f"batch_size {share.batch_size} on world_size {share.world_size} ranks"
        raise RecipeError(f"{said}: too many samples in a step", hint=f"use at most {arguments.MAX_STEP}")
    return share


class _End:
    """The last item in the queue: the iterator is exhausted, or failed with an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def run_ahead(  # noqa: C901  a thread and its consumer
    items: Iterator[T], depth: int, *, stop: Callable[[], None] = lambda: None
) -> Generator[T]:
    """The same items, made in a thread up to `depth` ahead of their consumer. With 0 there is no thread.

    If the iteration ends early, `stop` is called: it should make an item that the thread waits for fail soon.
    """
    if depth == 0:
        yield from items
        return
    ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
    room: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry for each item that may be made
    for _ in range(depth):
        room.put(None)
    wanted = True

    def work() -> None:
        try:
            while room.get() or wanted:
                ready.put(next(items))
        except StopIteration:
            ready.put(_End())
        except BaseException as error:  # the consumer raises it
            ready.put(_End(error))

    thread = threading.Thread(target=work, daemon=True, name="tokenmill-ahead")
    thread.start()
    process = os.getpid()
    # An iterator that is left until the interpreter ends is closed after the names of this module are gone.
    find_process, is_ending = os.getpid, sys.is_finalizing
    try:
        while True:
            if find_process() != process:
                raise StateError(
                    "this iterator was started in another process, and the thread that makes its items was not forked",
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
        if not is_ending():  # then threads have stopped without a word, and a join would wait for ever
            if find_process() == process:
                stop()
            thread.join()
