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
from typing import Any

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
    """The segments of some rows: at which column of them they begin, counted through all rows, and what they hold."""

    begins: Numbers
    starts: Numbers
    spans: Numbers
    sizes: Numbers
    filled: Numbers  # columns of each row that hold tokens
    borders: Numbers  # row i has segments [borders[i], borders[i + 1])


@dataclass(frozen=True, slots=True)
class Ignored:
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
    check_packing(kind, seq_len)
    if check_order(order) == "random":
        raise RecipeError(
            f"order 'random' draws windows that begin anywhere, but rows of packing {kind!r} are fixed",
            hint="use order 'shuffled', or packing 'concat'",
        )
    masked = replace(form, mask_borders=True)
    masked.label_dtype(numpy_dtype(dataset[split].dtype))
    packing = open_packing(dataset, split, kind, seq_len)
    return PackedStream(dataset[split], packing, identity, order=order, seed=seed, form=masked)


class PackedStream:
    """Rows of a packing, in some order; `packing` tells how many there are and how much of them is padding."""

    def __init__(
        self, split: TokenSplit, packing: Packing, identity: dict[str, Any], *, order: Order, seed: int, form: Form
    ) -> None:
        spec = packing.spec
        self.identity = {
            **identity, "packing": spec.kind, "plan": packing.digest.sha256,
            "seq_len": spec.seq_len, "order": order, "seed": seed,
        }  # fmt: skip
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
        segments = find_segments(self.packing, located.ravel())
        edges = np.arange(num_batches + 1) * num_rows
        tokens = read(self._split, find_stretches(segments, self.packing.spec, edges), self._padding)
        ignored = find_ignored(segments, self.packing.spec.seq_len, edges)
        runs = self._find_runs(segments, edges) if self._run_fields else itertools.repeat(None, num_batches)
        return map(self._form_batch, located, tokens, ignored, runs)

    def _form_batch(self, located: Numbers, tokens: Tokens, ignored: Ignored, runs: Runs | None) -> Batch:
        """What trainers want of the tokens of these rows, as stored."""
        batch = lay_out(tokens.reshape(len(located), -1), self._dtype, self._run_fields, masked=True)
        labels = batch["labels"]
        labels.reshape(-1)[ignored.places] = IGNORED
        for row, filled in ignored.padded:
            labels[row, filled:] = IGNORED
        if runs is not None:
            fill_fields(batch, self._run_fields, runs)
        if "sample_index" in self._fields:
            batch["sample_index"] = located
        return batch

    def _find_runs(self, segments: Segments, edges: Numbers) -> Iterator[Runs]:
        """The runs of each batch. Padding is one like any other, of document -1."""
        seq_len = self.packing.spec.seq_len
        short = np.flatnonzero(segments.filled < seq_len)
        begins = np.append(segments.begins, short * seq_len + segments.filled[short])
        documents = np.full(len(begins), -1)
        if "document_ids" in self._run_fields:
            documents[: len(segments.starts)] = self._split.document_at(segments.starts)
        in_turn = np.argsort(begins)
        begins, documents = begins[in_turn], documents[in_turn]
        limits = begins.searchsorted(edges * seq_len)
        for (begin, end), (first, last) in zip(pairwise(edges * seq_len), pairwise(limits), strict=True):
            yield Runs(np.append(begins[first:last], end) - begin, documents[first:last])


def find_segments(packing: Packing, located: Numbers) -> Segments:
    """The segments of these rows, row after row."""
    rows, seq_len = packing.rows, packing.spec.seq_len
    firsts = rows.borders[located]
    counts = rows.borders[located + 1] - firsts
    borders = np.concatenate(([0], np.cumsum(counts)))
    numbers = np.repeat(firsts - borders[:-1], counts) + np.arange(borders[-1])
    spans: npt.NDArray[np.int64] = rows.spans[numbers].astype(np.int64)
    sizes = np.minimum(spans, seq_len)
    sums = np.concatenate(([0], np.cumsum(sizes)))
    before = sums[borders[:-1]]
    return Segments(
        begins=sums[:-1] + np.repeat(np.arange(len(located)) * seq_len - before, counts),
        starts=rows.starts[numbers],
        spans=spans,
        sizes=sizes,
        filled=sums[borders[1:]] - before,
        borders=borders,
    )


def find_ignored(segments: Segments, seq_len: int, edges: Numbers) -> Iterator[Ignored]:
    """What is ignored of each batch: what would follow the end of a document, and padding."""
    places = (segments.begins + segments.sizes)[segments.spans <= seq_len] - 1
    limits = places.searchsorted(edges * seq_len)
    short = np.flatnonzero(segments.filled < seq_len)
    short_limits = short.searchsorted(edges)
    for number, (begin, _) in enumerate(pairwise(edges)):
        rows = short[short_limits[number] : short_limits[number + 1]]
        yield Ignored(
            places[limits[number] : limits[number + 1]] - begin * seq_len,
            list(zip((rows - begin).tolist(), segments.filled[rows].tolist(), strict=True)),
        )


def find_stretches(segments: Segments, spec: Spec, edges: Numbers) -> Stretches:
    """The tokens of rows of one token more than inputs, batch after batch of the rows that `edges` says.

    A full row whose last document ends with it takes the token behind that: its label is ignored. What
    is not full is filled up with padding, which lies behind the last token of the split.
    """
    starts, stops = segments.starts, segments.starts + segments.spans
    lasts = segments.borders[1:] - 1
    room = spec.seq_len - segments.filled
    stops[lasts] += (room == 0) & (segments.spans[lasts] <= spec.seq_len)
    short = np.flatnonzero(room)
    places = segments.borders[1:][short]
    return Stretches(
        np.insert(starts, places, spec.num_tokens),
        np.insert(stops, places, spec.num_tokens + room[short] + 1),
        segments.borders[edges] + short.searchsorted(edges),
    )
