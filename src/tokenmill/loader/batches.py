"""From positions in the global order to samples, and from samples to the arrays of a batch.

    positions in the global order  --locate-->  samples  --batch-->  input_ids, labels, extra fields

Both steps are pure functions of any positions. Which rank takes which positions, and when, is decided in `loader`.

Document boundaries inside the rows of a batch give positions, document ids, cu_seqlens and masked labels:

    tokens         a a E b b b E c c        E ends a document; a row is cut anywhere
    positions      0 1 2 0 1 2 3 0          they restart at each boundary, and at the start of a row
    masked labels  a E - b b E - c          the first token of the next document is not a target
      "aligned"    - a E - b b E -          the same targets under the inputs, for models that shift: the last c is lost
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from tokenmill import arguments
from tokenmill.dataset.bin_idx import Tokens
from tokenmill.dataset.dataset import TokenSplit
from tokenmill.dataset.windows import Windows, read_ahead
from tokenmill.errors import RecipeError
from tokenmill.permutation import ORDERS, Order, make_key, permute, positions_of, sample_with_replacement

Batch = dict[str, npt.NDArray[Any]]
Numbers = npt.NDArray[np.int64]

Labels = Literal["shifted", "aligned"]

FIELDS = ("positions", "position_ids", "document_ids", "cu_seqlens", "attention_mask", "sample_index", "component")
# One number for each token. `position_ids` are the positions under the name that transformers has for them.
_TOKEN_FIELDS = ("positions", "position_ids", "document_ids")
RUN_FIELDS = frozenset({*_TOKEN_FIELDS, "cu_seqlens"})
IGNORED = -100
_SEARCHED_AT_ONCE = 1 << 20


class SampleStream(Protocol):
    """A run of samples in one global order. Two streams with the same `identity`, plain JSON, are equal."""

    @property
    def identity(self) -> dict[str, Any]: ...

    @property
    def content(self) -> Any:
        """A digest of the tokens, as plain JSON. It is not part of the identity: the order does not depend on it."""

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""

    @property
    def limit(self) -> int | None:
        """The position at which the order ends; None if it never does. Only a mixture has a limit."""

    def locate(self, positions: Numbers) -> Numbers:
        """The samples at these positions of the global order. One call for many is faster.

        A position beyond `limit` is a `RecipeError`, which says what is exhausted.
        """

    def prefetch(self, batches: Sequence[Numbers]) -> Iterator[None]:
        """Announce samples that will be needed soon. Each step starts reading what one more batch lacks in memory."""

    def maps(self) -> Iterable[npt.NDArray[Any]]:
        """The memory maps that are open."""

    def batch(self, located: Numbers) -> Batch:
        """A row for each located sample."""

    def batches(self, located: Numbers) -> Iterator[Batch]:
        """Several batches, one after the other. Faster than one call for each."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of some rows: row i has [boundaries[i], boundaries[i + 1]), which span tokens from `starts` on."""

    starts: Numbers
    spans: Numbers
    boundaries: Numbers


class TraceableStream(Protocol):
    """A stream of one split, whose samples can be followed back to tokens, and tokens to positions."""

    @property
    def split(self) -> TokenSplit: ...

    @property
    def num_samples(self) -> int: ...

    def sample_numbers(self, located: Numbers) -> Numbers:
        """The numbers of located samples, as in the field "sample_index"."""

    def locate_number(self, number: int) -> Numbers:
        """The sample with this number."""

    def inputs(self, located: Numbers) -> Segments:
        """The tokens that are inputs of each of these samples."""

    def samples_with(self, begin: int, stop: int) -> Numbers:
        """The located samples that have one of the tokens [begin, stop) as an input."""

    def occurrences(self, located: Numbers, epoch: int) -> tuple[Numbers, Numbers]:
        """Where these samples come in an epoch: indices into `located`, and positions. The inverse of `locate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """What batches contain: which `labels`, extra `fields`, labels masked at document boundaries, the dtype of ids."""

    labels: Labels = "shifted"
    fields: tuple[str, ...] = ()
    mask_boundaries: bool = False
    dtype: npt.DTypeLike | None = np.int64

    def __post_init__(self) -> None:
        arguments.texts("fields", self.fields, hint=f"choose from {', '.join(FIELDS)}")
        arguments.flag("mask_boundaries", self.mask_boundaries)
        if self.labels not in get_args(Labels):
            raise RecipeError(f"labels is {arguments.show(self.labels)}", hint="use 'shifted' or 'aligned'")
        if unknown := sorted(set(self.fields) - set(FIELDS)):
            raise RecipeError(f"unknown fields {unknown}", hint=f"choose from {', '.join(FIELDS)}")

    def label_dtype(self, stored: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of ids and labels. Masked labels need a signed one."""
        try:
            found = stored if self.dtype is None else np.dtype(self.dtype)
        except (TypeError, ValueError, SyntaxError):  # what numpy raises for a dtype that it does not know
            raise RecipeError(f"dtype is {arguments.show(self.dtype)}", hint="use int64, or int32") from None
        if not np.can_cast(stored, found) or found.kind not in "iu":
            raise RecipeError(f"dtype: ids of {stored} do not fit into {found}", hint="use int64, or int32")
        if self.mask_boundaries and found.kind == "u":
            raise RecipeError(f"labels of {found} cannot be masked with {IGNORED}", hint="use a signed dtype")
        return found


class WindowStream:
    """Windows of one split, in one of the orders. The identity names the split and the order.

    With `max_seq_len`, the order is that of longer windows, and each of them is cut into windows of `seq_len`:

        order of windows of 8   | 3 ........ | 0 ........ | 2 ........ |
        seq_len 4               | 3 .. | 3 .. | 0 .. | 0 .. | 2 .. | 2 .. |     the same tokens in the same order
    """

    limit: int | None = None

    def __init__(
        self,
        windows: Windows,
        identity: dict[str, Any],
        content: str,
        *,
        order: Order,
        seed: int,
        batch_spec: BatchSpec,
        max_seq_len: int | None = None,
    ) -> None:
        longer = max_seq_len or windows.seq_len
        # Hashed for the order, and stored in states: keys and their order never change.
        self._key = {**identity, "packing": "concat", "seq_len": longer, "order": order, "seed": seed}
        self.identity = {**self._key, "seq_len": windows.seq_len}
        if longer != windows.seq_len:
            self.identity["max_seq_len"] = longer
        self.content = content
        self.windows = windows
        self._parts = longer // windows.seq_len
        self._num_longer = (windows.split.num_tokens - 1) // longer
        self._order = check_order(order)
        self._batch_spec = batch_spec
        self._layout = WindowLayout(batch_spec, windows.dtype)

    @property
    def num_samples(self) -> int:
        return self._num_longer * self._parts

    def locate(self, positions: Numbers) -> Numbers:
        """The first tokens of the windows."""
        windows = self.windows
        if self._order == "random":
            num_starts = windows.split.num_tokens - windows.seq_len
            return sample_with_replacement(positions, num_starts, make_key(self._key))
        if self._parts == 1:
            return samples_in_order(positions, self._num_longer, self._order, self._key) * windows.seq_len
        longer, parts = np.divmod(positions, self._parts)
        found = samples_in_order(longer, self._num_longer, self._order, self._key) * self._parts + parts
        return found * windows.seq_len

    def prefetch(self, batches: Sequence[Numbers]) -> Iterator[None]:
        windows = self.windows
        return read_ahead(windows.split, batches, lambda starts: windows.token_ranges(starts[None]))

    def maps(self) -> Iterable[npt.NDArray[Any]]:
        return self.windows.split.maps()

    def batch(self, located: Numbers) -> Batch:
        return next(self.batches(located[None]))

    def batches(self, located: Numbers) -> Iterator[Batch]:
        documents = located
        if "document_ids" in self._batch_spec.fields:
            documents = self.windows.split.document_at(located.ravel()).reshape(located.shape)
        return map(self._make_batch, located, self.windows.gather_batches(located), documents)

    def _make_batch(self, starts: Numbers, rows: Tokens, documents: Numbers) -> Batch:
        """The batch of rows as stored that begin at these tokens, in these documents."""
        batch = self._layout.batch(self.windows.split, starts, rows, documents)
        if "sample_index" in self._batch_spec.fields:
            batch["sample_index"] = self._sample_index(starts)
        return batch

    def _sample_index(self, starts: Numbers) -> Numbers:
        return starts if self._order == "random" else starts // self.windows.seq_len

    @property
    def split(self) -> TokenSplit:
        return self.windows.split

    def sample_numbers(self, located: Numbers) -> Numbers:
        return self._sample_index(located)

    def locate_number(self, number: int) -> Numbers:
        check_sample(number, self._num_starts if self._order == "random" else self.num_samples)
        return np.array([number if self._order == "random" else number * self.windows.seq_len])

    def inputs(self, located: Numbers) -> Segments:
        return Segments(located, np.full(len(located), self.windows.seq_len), np.arange(len(located) + 1))

    def samples_with(self, begin: int, stop: int) -> Numbers:
        seq_len = self.windows.seq_len
        if self._order == "random":
            return np.arange(max(0, begin - seq_len + 1), min(stop, self._num_starts))
        return np.arange(begin // seq_len, min(-(-stop // seq_len), self.num_samples)) * seq_len

    def occurrences(self, located: Numbers, epoch: int) -> tuple[Numbers, Numbers]:
        if self._order == "random":
            return self._search(located, epoch)
        longer, parts = np.divmod(located // self.windows.seq_len, self._parts)
        positions = positions_in_epoch(longer, self._num_longer, self._order, self._key, epoch) * self._parts + parts
        return np.arange(len(located)), positions

    @property
    def _num_starts(self) -> int:
        return self.windows.split.num_tokens - self.windows.seq_len

    def _search(self, located: Numbers, epoch: int) -> tuple[Numbers, Numbers]:
        """The same for windows that begin anywhere: each position was drawn, so all of an epoch are computed."""
        first, last = epoch * self.num_samples, (epoch + 1) * self.num_samples
        numbers, positions = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for begin in range(first, last if len(located) else first, _SEARCHED_AT_ONCE):
            starts = self.locate(np.arange(begin, min(begin + _SEARCHED_AT_ONCE, last)))
            at = np.minimum(located.searchsorted(starts), len(located) - 1)
            (found,) = np.nonzero(located[at] == starts)
            numbers.append(at[found])
            positions.append(begin + found)
        return np.concatenate(numbers), np.concatenate(positions)


def check_sample(number: int, count: int) -> None:
    if not 0 <= number < count:
        raise RecipeError(f"sample {number:,} of {count:,} samples", hint="samples count from 0")


class WindowLayout:
    """Turns rows of windows into batches as a `BatchSpec` asks for them. `stored` is the dtype of the rows."""

    def __init__(self, batch_spec: BatchSpec, stored: np.dtype[Any]) -> None:
        self._batch_spec = batch_spec
        self.dtype = batch_spec.label_dtype(stored)
        self._masked = batch_spec.mask_boundaries
        self._run_fields = RUN_FIELDS & set(batch_spec.fields)

    def batch(self, split: DocumentIndex, starts: Numbers, rows: Tokens, documents: Numbers) -> Batch:
        """The batch of rows that begin at these tokens of a split, in these documents."""
        labels = self._batch_spec.labels
        batch = lay_out(rows, self.dtype, self._run_fields, labels=labels, masked=self._masked)
        if self._masked or self._run_fields:
            seq_len = rows.shape[1] - 1
            boundaries = find_boundaries(split, rows, starts)
            if self._masked and labels == "shifted":
                # A boundary is the target of the column before it, and rows of labels are one column shorter.
                batch["labels"].reshape(-1)[boundaries - boundaries // (seq_len + 1) - 1] = IGNORED
            elif self._masked:
                batch["labels"].reshape(-1)[find_runs(boundaries, documents, seq_len).edges[:-1]] = IGNORED
            if self._run_fields:
                fill_fields(batch, self._run_fields, find_runs(boundaries, documents, seq_len))
        if "attention_mask" in self._batch_spec.fields:
            batch["attention_mask"] = np.ones(batch["labels"].shape, np.int64)
        return batch


def lay_out(
    rows: Tokens,
    dtype: np.dtype[Any],
    run_fields: Collection[str] = (),
    *,
    labels: Labels = "shifted",
    masked: bool = False,
) -> Batch:
    """Ids, labels, and uninitialized arrays for further per-token fields. Rows have one token more than inputs.

    Labels that are not masked share the memory of the inputs. Otherwise everything is one allocation: several
    large ones would be returned to the system and zeroed by it for every batch.
    """
    numbers = [field for field in _TOKEN_FIELDS if field in run_fields]
    targets = slice(1, None) if labels == "shifted" else slice(-1)
    if not masked and not numbers:
        if labels == "aligned":  # without the last column, rows are contiguous as they are widened
            cast = rows[:, :-1].astype(dtype, copy=False)
            return {"input_ids": cast, "labels": cast[:]}
        if rows.strides[0] == (rows.shape[1] - 1) * rows.itemsize:  # each row begins with the last token of the other
            cast = np.empty(rows.size - len(rows) + 1, dtype)
            batch = {"input_ids": cast[:-1].reshape(len(rows), -1), "labels": cast[1:].reshape(len(rows), -1)}
            batch["input_ids"][:], cast[-1] = rows[:, :-1], rows[-1, -1]
            return batch
        cast = rows.astype(dtype, copy=False)
        return {"input_ids": cast[:, :-1], "labels": cast[:, 1:]}
    shape = (len(rows), rows.shape[1] - 1)
    planes = np.empty((2 + (len(numbers) if dtype == np.int64 else 0), *shape), dtype)
    planes[0], planes[1] = rows[:, :-1], rows[:, targets]
    batch = {"input_ids": planes[0], "labels": planes[1]}
    if numbers:
        batch |= zip(
            numbers, planes[2:] if dtype == np.int64 else np.empty((len(numbers), *shape), np.int64), strict=True
        )
    return batch


def samples_in_order(positions: Numbers, count: int, order: str, identity: dict[str, Any]) -> Numbers:
    """The samples at these positions, epoch after epoch of `count` samples."""
    if not len(positions):
        return positions
    first, last = int(positions.min()) // count, int(positions.max()) // count
    if first == last:  # the usual case
        return _in_epoch(positions - first * count, count, order, identity, first)
    epochs, within = np.divmod(positions, count)
    for epoch in range(first, last + 1):
        mine = epochs == epoch
        within[mine] = _in_epoch(within[mine], count, order, identity, epoch)
    return within


def _in_epoch(within: Numbers, count: int, order: str, identity: dict[str, Any], epoch: int) -> Numbers:
    return permute(within, count, make_key(identity, epoch)) if order == "shuffled" else within


def positions_in_epoch(samples: Numbers, count: int, order: str, identity: dict[str, Any], epoch: int) -> Numbers:
    """Where these samples come in an epoch: the inverse of `samples_in_order`."""
    within = positions_of(samples, count, make_key(identity, epoch)) if order == "shuffled" else samples
    return within + epoch * count


def check_order(order: str, known: Sequence[str] = ORDERS) -> str:
    if arguments.text("order", order, hint=f"choose from {', '.join(known)}") not in known:
        raise RecipeError(f"unknown order {order!r}", hint=f"choose from {', '.join(known)}")
    return order


class DocumentIndex(Protocol):
    """Where documents begin among the tokens of a split."""

    @property
    def eot(self) -> str: ...

    @property
    def eot_id(self) -> int | None: ...

    def document_at(self, tokens: Numbers) -> Numbers:
        """The documents that contain these tokens."""

    def document_starts(self, documents: Numbers) -> Numbers:
        """The first tokens of these documents."""


def find_boundaries(split: DocumentIndex, rows: Tokens, starts: Numbers) -> Numbers:
    """Where documents begin inside rows that begin at `starts` of the split, as indices into the flattened rows.

    The first column is left out, since every row starts a run. If documents have an end of text, there is one for
    each, so the tokens tell the boundaries. Otherwise the document index does.
    """
    width = rows.shape[1]
    if split.eot != "none":
        (found,) = (rows.reshape(-1) == split.eot_id).nonzero()
        found += split.eot == "append"  # the boundary is behind the end of text, or at it if that comes first
        inside: Numbers = found[found % width > 0]
        return inside
    first, last = split.document_at(starts), split.document_at(starts + width - 1)
    counts = last - first
    row_numbers = np.repeat(np.arange(len(starts)), counts)
    # The numbers of all documents that begin inside a row, row after row.
    documents = np.repeat(first + 1 - (np.cumsum(counts) - counts), counts) + np.arange(len(row_numbers))
    boundaries: Numbers = split.document_starts(documents) + row_numbers * width - starts[row_numbers]
    return boundaries


@dataclass(frozen=True, slots=True)
class Runs:
    """Inputs of one document, through all rows of a batch: run i is from `edges[i]` up to the next edge."""

    edges: Numbers
    documents: Numbers


def find_runs(boundaries: Numbers, first_documents: Numbers, seq_len: int) -> Runs:
    """The runs between boundaries, in rows that begin in these documents. Each row begins a run."""
    num_rows = len(first_documents)
    row_numbers, columns = np.divmod(boundaries, seq_len + 1)
    begins = (boundaries - row_numbers)[columns < seq_len]  # a boundary at the last target concerns no input
    edges = np.sort(np.concatenate((np.arange(num_rows + 1) * seq_len, begins)))
    owners = edges[:-1] // seq_len
    before = np.arange(len(owners)) - owners.searchsorted(np.arange(num_rows))[owners]
    return Runs(edges, first_documents[owners] + before)


def fill_fields(batch: dict[str, npt.NDArray[Any]], wanted: Collection[str], runs: Runs) -> None:
    """Add the fields that follow from runs: positions in documents, document ids, cu_seqlens."""
    edges, lengths = runs.edges, np.diff(runs.edges)
    shape = batch["labels"].shape
    seq_len = shape[1]
    for name in {"positions", "position_ids"}.intersection(wanted):
        columns = np.repeat((edges[:-1] % seq_len).astype(np.int32), lengths)
        np.subtract(np.arange(seq_len, dtype=np.int32), columns.reshape(shape), out=batch[name])
    if "document_ids" in wanted:
        batch["document_ids"].reshape(-1)[:] = np.repeat(runs.documents, lengths)
    if "cu_seqlens" in wanted:
        batch["cu_seqlens"] = edges.astype(np.int32)
