"""Streams: an endless run of samples in one global order, and a batch of any places in it.

    places of the global order  --locate-->  samples  --batch-->  rows of tokens

Both are pure functions. Who takes which places, and when, is the loader's business.

Where documents begin inside the rows of a batch: what positions, document ids and masks are made of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill import arguments
from tokenmill.dataset.bin_idx import Tokens
from tokenmill.dataset.windows import Windows
from tokenmill.errors import RecipeError
from tokenmill.loader.page_cache import read_ahead
from tokenmill.permutation import ORDERS, Order, draw, make_key, permute

Batch = dict[str, npt.NDArray[Any]]
Numbers = npt.NDArray[np.int64]

FIELDS = ("positions", "document_ids", "cu_seqlens", "sample_index", "part")
IGNORED = -100


class SampleStream(Protocol):
    """What a loader draws from. `identity` is plain JSON: two streams with the same one are the same."""

    @property
    def identity(self) -> dict[str, Any]: ...

    @property
    def content(self) -> Any:
        """What it is read from, as plain JSON. Not part of the identity: the order does not depend on it."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""

    def locate(self, places: Numbers) -> Numbers:
        """What stands at these places of the global order, which has no end. Quicker for many than for a few."""

    def expect(self, batches: Sequence[Numbers]) -> Iterator[None]:
        """These will be asked for soon. With each step, the system begins to read what is not in memory of another."""

    def maps(self) -> Iterable[npt.NDArray[Any]]:
        """The files that are mapped by now."""

    def batch(self, located: Numbers) -> Batch:
        """A row for each of them."""

    def batches(self, located: Numbers) -> Iterator[Batch]:
        """The same for the samples of several batches, one after another. Quicker than each alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """What batches look like: further `fields`, labels masked at the borders of documents, the dtype of ids."""

    fields: tuple[str, ...] = ()
    mask_borders: bool = False
    dtype: npt.DTypeLike | None = np.int64

    def __post_init__(self) -> None:
        arguments.texts("fields", self.fields, hint=f"give some of {', '.join(FIELDS)}")
        arguments.flag("mask_borders", self.mask_borders)
        if unknown := sorted(set(self.fields) - set(FIELDS)):
            raise RecipeError(f"fields {unknown} are unknown", hint=f"there are {', '.join(FIELDS)}")

    def label_dtype(self, stored: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of ids and labels; masks need room for a negative number."""
        try:
            found = stored if self.dtype is None else np.dtype(self.dtype)
        except (TypeError, ValueError, SyntaxError):  # what numpy says of a type that it does not know
            raise RecipeError(f"dtype is {arguments.show(self.dtype)}", hint="use int64, or int32") from None
        if not np.can_cast(stored, found) or found.kind not in "iu":
            raise RecipeError(f"dtype: ids of {stored} do not fit into {found}", hint="use int64, or int32")
        if self.mask_borders and found.kind == "u":
            raise RecipeError(f"labels of {found} cannot be masked with {IGNORED}", hint="use a signed dtype")
        return found


class WindowStream:
    """Windows of one split, in some order; `identity` tells which."""

    def __init__(
        self, windows: Windows, identity: dict[str, Any], content: str, *, order: Order, seed: int, form: BatchSpec
    ) -> None:
        self.identity = {**identity, "packing": "concat", "seq_len": windows.seq_len, "order": order, "seed": seed}
        self.content = content
        self.windows = windows
        self._order = check_order(order)
        self._form = form
        self._layout = WindowLayout(form, windows.dtype)

    @property
    def num_samples(self) -> int:
        return len(self.windows)

    def locate(self, places: Numbers) -> Numbers:
        """The first tokens of the windows."""
        windows = self.windows
        if self._order == "random":
            return draw(places, windows.split.num_tokens - windows.seq_len, make_key(self.identity))
        return in_order(places, self.num_samples, self._order, self.identity) * windows.seq_len

    def expect(self, batches: Sequence[Numbers]) -> Iterator[None]:
        windows = self.windows
        return read_ahead(windows.split, batches, lambda starts: windows.stretches(starts[None]))

    def maps(self) -> Iterable[npt.NDArray[Any]]:
        return self.windows.split.maps()

    def batch(self, located: Numbers) -> Batch:
        return next(self.batches(located[None]))

    def batches(self, located: Numbers) -> Iterator[Batch]:
        documents = located
        if "document_ids" in self._form.fields:
            documents = self.windows.split.document_at(located.ravel()).reshape(located.shape)
        return map(self._form_batch, located, self.windows.gather_batches(located), documents)

    def _form_batch(self, starts: Numbers, stored: Tokens, documents: Numbers) -> Batch:
        """What trainers want of rows as they are stored, which begin at these tokens and in these documents."""
        batch = self._layout.batch(self.windows.split, starts, stored, documents)
        if "sample_index" in self._form.fields:
            batch["sample_index"] = starts if self._order == "random" else starts // self.windows.seq_len
        return batch


class WindowLayout:
    """How rows of windows become batches of a form; `stored` is the dtype that they have before."""

    def __init__(self, form: BatchSpec, stored: np.dtype[Any]) -> None:
        self._dtype = form.label_dtype(stored)
        self._masked = form.mask_borders
        self._run_fields = RUN_FIELDS & set(form.fields)

    def batch(self, split: DocumentIndex, starts: Numbers, stored: Tokens, documents: Numbers) -> Batch:
        """The batch of rows that begin at these tokens of a split, and in these documents."""
        if not self._masked and not self._run_fields:
            return lay_out(stored, self._dtype)
        width = stored.shape[1]
        borders = find_boundaries(split, stored, starts)
        batch = lay_out(stored, self._dtype, self._run_fields, masked=self._masked)
        if self._masked:
            # A border is a target a column earlier, in rows that have one less.
            batch["labels"].reshape(-1)[borders - borders // width - 1] = IGNORED
        if self._run_fields:
            fill_fields(batch, self._run_fields, find_runs(borders, documents, width - 1))
        return batch


def lay_out(stored: Tokens, dtype: np.dtype[Any], run_fields: Collection[str] = (), *, masked: bool = False) -> Batch:
    """A batch of rows of one token more than inputs: ids, labels, and room for what else every input has.

    Labels that are not masked share the memory of inputs. Else all of it is one allocation: several
    large ones would be given back to the system, and cleared by it anew, with every batch.
    """
    numbers = [field for field in ("positions", "document_ids") if field in run_fields]
    if not masked and not numbers:
        rows = stored.astype(dtype, copy=False)
        return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
    shape = (len(stored), stored.shape[1] - 1)
    planes = np.empty((2 + (len(numbers) if dtype == np.int64 else 0), *shape), dtype)
    planes[0], planes[1] = stored[:, :-1], stored[:, 1:]
    batch = {"input_ids": planes[0], "labels": planes[1]}
    if numbers:
        batch |= zip(
            numbers, planes[2:] if dtype == np.int64 else np.empty((len(numbers), *shape), np.int64), strict=True
        )
    return batch


def in_order(places: Numbers, count: int, order: str, identity: dict[str, Any]) -> Numbers:
    """The samples at these places, epoch after epoch of `count` samples."""
    if not len(places):
        return places
    first, last = int(places.min()) // count, int(places.max()) // count
    if first == last:  # most often
        return _in_epoch(places - first * count, count, order, identity, first)
    epochs, within = np.divmod(places, count)
    for epoch in range(first, last + 1):
        mine = epochs == epoch
        within[mine] = _in_epoch(within[mine], count, order, identity, epoch)
    return within


def _in_epoch(within: Numbers, count: int, order: str, identity: dict[str, Any], epoch: int) -> Numbers:
    return permute(within, count, make_key(identity, epoch)) if order == "shuffled" else within


def check_order(order: str, known: Sequence[str] = ORDERS) -> str:
    if arguments.text("order", order, hint=f"there are {', '.join(known)}") not in known:
        raise RecipeError(f"order {order!r} is unknown", hint=f"there are {', '.join(known)}")
    return order


RUN_FIELDS = frozenset({"positions", "document_ids", "cu_seqlens"})


class DocumentIndex(Protocol):
    """Where the documents of a split lie among its tokens."""

    @property
    def eot(self) -> str: ...

    @property
    def eot_id(self) -> int | None: ...

    def document_at(self, tokens: Numbers) -> Numbers:
        """The documents in which these tokens lie."""

    def document_starts(self, documents: Numbers) -> Numbers:
        """The first tokens of these documents."""


def find_boundaries(split: DocumentIndex, rows: Tokens, starts: Numbers) -> Numbers:
    """Where documents begin in rows of tokens that begin at `starts` of the split, counted through all rows.

    The first column is left out: there, a row begins anyway. Where documents have an end of text, there are as
    many of these as documents, so the tokens themselves tell. Where they have none, the index does.
    """
    width = rows.shape[1]
    if split.eot != "none":
        (places,) = (rows.reshape(-1) == split.eot_id).nonzero()
        places += split.eot == "append"  # it stands before the border, or is the first token behind it
        inside: Numbers = places[places % width > 0]
        return inside
    first, last = split.document_at(starts), split.document_at(starts + width - 1)
    counts = last - first
    found = np.repeat(np.arange(len(starts)), counts)
    # The numbers of all documents that begin inside, row after row.
    documents = np.repeat(first + 1 - (np.cumsum(counts) - counts), counts) + np.arange(len(found))
    borders: Numbers = split.document_starts(documents) + found * width - starts[found]
    return borders


@dataclass(frozen=True, slots=True)
class Runs:
    """Inputs of the same document, through all rows of a batch: run i is from `edges[i]` up to the next edge."""

    edges: Numbers
    documents: Numbers


def find_runs(borders: Numbers, first_documents: Numbers, seq_len: int) -> Runs:
    """The runs between borders, in rows that begin in these documents. Each row begins one."""
    num_rows = len(first_documents)
    found, columns = np.divmod(borders, seq_len + 1)
    begins = (borders - found)[columns < seq_len]  # a border at the last target concerns no input
    edges = np.sort(np.concatenate((np.arange(num_rows + 1) * seq_len, begins)))
    owners = edges[:-1] // seq_len
    before = np.arange(len(owners)) - owners.searchsorted(np.arange(num_rows))[owners]
    return Runs(edges, first_documents[owners] + before)


def fill_fields(batch: dict[str, npt.NDArray[Any]], wanted: Collection[str], runs: Runs) -> None:
    """Put into a batch what follows from its runs: positions in documents, document numbers, lengths."""
    edges, lengths = runs.edges, np.diff(runs.edges)
    shape = batch["labels"].shape
    seq_len = shape[1]
    if "positions" in wanted:
        columns = np.repeat((edges[:-1] % seq_len).astype(np.int32), lengths)
        np.subtract(np.arange(seq_len, dtype=np.int32), columns.reshape(shape), out=batch["positions"])
    if "document_ids" in wanted:
        batch["document_ids"].reshape(-1)[:] = np.repeat(runs.documents, lengths)
    if "cu_seqlens" in wanted:
        batch["cu_seqlens"] = edges.astype(np.int32)
