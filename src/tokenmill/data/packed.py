"""Packed rows as a stream: every token of a split is an input once, and labels stay within their document.

inputs     a a a a E b b E . .      E is an end of text, . is padding (the same id)
labels     a a a E - b E - - -      - is ignored
positions  0 1 2 3 4 0 1 2 0 1
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.data.borders import RUN_FIELDS, Runs, fill_fields
from tokenmill.data.dataset import Dataset, TokenSplit
from tokenmill.data.order import Order
from tokenmill.data.packing import Packing, Spec, check_packing, open_packing
from tokenmill.data.paging import read_ahead
from tokenmill.data.stream import IGNORED, Batch, Form, Numbers, check_order, in_order, lay_out
from tokenmill.data.stretches import Stretches, read
from tokenmill.errors import RecipeError
from tokenmill.shards.layout import Tokens, numpy_dtype


@dataclass(frozen=True, slots=True)
class Segments:
    """What rows are made of: row i of segments [borders[i], borders[i + 1]), which span tokens from `starts` on."""

    starts: Numbers
    spans: Numbers
    borders: Numbers


@dataclass(frozen=True, slots=True)
class FullRows:
    """Rows that are full: `sizes` inputs from `begins` on, counted through all rows, are the tokens from `starts` on.

    Padding is a segment like any other; it lies behind the last token of the split. `ends` says which of them a
    document ends with.
    """

    begins: Numbers
    sizes: Numbers
    starts: Numbers
    ends: npt.NDArray[np.bool_]
    borders: Numbers


class Ignored(NamedTuple):
    """Labels of a batch that are ignored: at `places`, and of `padded` rows from a column on."""

    places: Numbers
    padded: list[tuple[int, int]]


def open_packed(
    dataset: Dataset,
    split: str,
    kind: str,
    seq_len: int,
    identity: dict[str, Any],
    *,
    order: Order,
    seed: int,
    form: Form,
) -> PackedStream:
    """The stream of a split that is packed in this way. What cannot be had is refused before a plan is made."""
    seq_len = check_packing(kind, seq_len)
    if check_order(order) == "random":
        raise RecipeError(
            f"order 'random' draws windows that begin anywhere, but rows of packing {kind!r} are fixed",
            hint="use order 'shuffled', or packing 'concat'",
        )
    masked = replace(form, mask_borders=True)
    masked.label_dtype(numpy_dtype(dataset[split].dtype))
    packing = open_packing(dataset, split, kind, seq_len)
    content = dataset.content(split)
    return PackedStream(dataset[split], packing, identity, content, order=order, seed=seed, form=masked)


class PackedStream:
    """Rows of a packing, in some order; `packing` tells how many there are and how much of them is padding."""

    def __init__(
        self,
        split: TokenSplit,
        packing: Packing,
        identity: dict[str, Any],
        content: str,
        *,
        order: Order,
        seed: int,
        form: Form,
    ) -> None:
        spec = packing.spec
        self.identity = {
            **identity, "packing": spec.kind, "plan": packing.digest.sha256,
            "seq_len": spec.seq_len, "order": order, "seed": seed,
        }  # fmt: skip
        self.content = content
        self.packing = packing
        self._order = order
        self._split = split
        self._fields = set(form.fields)
        self._run_fields = self._fields & RUN_FIELDS
        self._stored = numpy_dtype(split.dtype)
        self._dtype = form.label_dtype(self._stored)
        self._padding = np.full(spec.seq_len + 1, split.eot_id or 0, self._stored).tobytes()

    @property
    def num_samples(self) -> int:
        return self.packing.num_rows

    def locate(self, places: Numbers) -> Numbers:
        """The numbers of the rows."""
        return in_order(places, self.num_samples, self._order, self.identity)

    def expect(self, batches: Sequence[Numbers]) -> Iterator[None]:
        return read_ahead(self._split, batches, self._find)

    def maps(self) -> Iterable[npt.NDArray[Any]]:
        rows = self.packing.rows
        return (*self._split.maps(), rows.borders, rows.starts, rows.spans)

    def _find(self, located: Numbers) -> Stretches:
        """The tokens of some rows, without padding."""
        segments = find_segments(self.packing, located)
        return Stretches(segments.starts, segments.starts + segments.spans, segments.borders)

    def batch(self, located: Numbers) -> Batch:
        return next(self.batches(located[None]))

    def batches(self, located: Numbers) -> Iterator[Batch]:
        num_batches, num_rows = located.shape
        full = fill_up(find_segments(self.packing, located.ravel()), self.packing.spec)
        edges = np.arange(num_batches + 1) * num_rows
        tokens = read(self._split, find_stretches(full, edges), self._padding)
        ignored = self._find_ignored(full, edges)
        runs = self._find_runs(full, edges) if self._run_fields else itertools.repeat(None, num_batches)
        return map(self._form_batch, located, tokens, ignored, runs)

    def _form_batch(self, located: Numbers, tokens: Tokens, ignored: Ignored, runs: Runs | None) -> Batch:
        """What trainers want of the tokens of these rows, as stored."""
        batch = lay_out(tokens.reshape(-1, self.packing.spec.seq_len + 1), self._dtype, self._run_fields, masked=True)
        labels = batch["labels"]
        labels.reshape(-1)[ignored.places] = IGNORED
        for row, filled in ignored.padded:
            labels[row, filled:] = IGNORED
        if runs is not None:
            fill_fields(batch, self._run_fields, runs)
        if "sample_index" in self._fields:
            batch["sample_index"] = located
        return batch

    def _find_ignored(self, full: FullRows, edges: Numbers) -> Iterator[Ignored]:
        """What is ignored of each batch, all of as many rows: what would follow the end of a document, and padding."""
        num_rows, seq_len = int(edges[1]), self.packing.spec.seq_len
        places = (full.begins + full.sizes)[full.ends] - 1
        rows, columns = np.divmod(full.begins[full.starts == self._split.num_tokens], seq_len)
        limits = places.searchsorted(edges * seq_len).tolist(), rows.searchsorted(edges).tolist()
        places %= num_rows * seq_len
        padded = list(zip((rows % num_rows).tolist(), columns.tolist(), strict=True))
        for (first, last), (first_padded, last_padded) in zip(*map(pairwise, limits), strict=True):
            yield Ignored(places[first:last], padded[first_padded:last_padded])

    def _find_runs(self, full: FullRows, edges: Numbers) -> Iterator[Runs]:
        """The runs of each batch. Padding is one like any other, of document -1."""
        seq_len = self.packing.spec.seq_len
        documents = np.full(len(full.starts), -1)
        if "document_ids" in self._run_fields:
            real = full.starts < self._split.num_tokens
            documents[real] = self._split.document_at(full.starts[real])
        limits = full.borders[edges].tolist()
        for (begin, end), (first, last) in zip(pairwise(edges * seq_len), pairwise(limits), strict=True):
            yield Runs(np.append(full.begins[first:last], end) - begin, documents[first:last])


def find_segments(packing: Packing, located: Numbers) -> Segments:
    """The segments of these rows, row after row, as the plan has them."""
    rows = packing.rows
    firsts = rows.borders.take(located)
    counts = rows.borders.take(located + 1) - firsts
    borders = np.concatenate(([0], np.cumsum(counts)))
    numbers = np.repeat(firsts - borders[:-1], counts) + np.arange(borders[-1])
    return Segments(rows.starts.take(numbers), rows.spans.take(numbers).astype(np.int64), borders)


def fill_up(segments: Segments, spec: Spec) -> FullRows:
    """The same rows with padding where they have room for it."""
    seq_len, borders = spec.seq_len, segments.borders
    sizes = np.minimum(segments.spans, seq_len)
    room = seq_len - np.add.reduceat(sizes, borders[:-1])
    short = np.flatnonzero(room)
    borders = borders + np.concatenate(([0], np.cumsum(room > 0)))
    is_real = np.ones(borders[-1], np.bool_)
    is_real[borders[1:][short] - 1] = False
    full_starts = np.full(len(is_real), spec.num_tokens)
    full_sizes = np.empty_like(full_starts)
    ends = np.ones_like(is_real)
    full_starts[is_real], full_sizes[is_real], ends[is_real] = segments.starts, sizes, segments.spans <= seq_len
    full_sizes[~is_real] = room[short]
    return FullRows(np.cumsum(full_sizes) - full_sizes, full_sizes, full_starts, ends, borders)


def find_stretches(full: FullRows, edges: Numbers) -> Stretches:
    """The tokens of rows, one more than inputs, batch after batch of the rows that `edges` says.

    That one is the target of the last input. Behind a document that ends with its row it is just any token: its
    label is ignored.
    """
    stops = full.starts + full.sizes
    stops[full.borders[1:] - 1] += 1
    return Stretches(full.starts, stops, full.borders[edges])
