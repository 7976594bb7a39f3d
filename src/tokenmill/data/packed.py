"""Packed rows as a stream: every token of a split is an input once, and labels stay within their document.

inputs     a a a a E b b E . .      E is an end of text, . is padding (the same id)
labels     a a a E - b E - - -      - is ignored
positions  0 1 2 3 4 0 1 2 0 1
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.data.dataset import Dataset, TokenSplit
from tokenmill.data.order import Order
from tokenmill.data.packing import Packing, check_packing, open_packing
from tokenmill.data.stream import IGNORED, Batch, Form, Numbers, check_order, in_order
from tokenmill.errors import RecipeError
from tokenmill.shards.layout import Tokens, numpy_dtype


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of some rows: whose they are, at which column they begin, and what they hold."""

    owners: Numbers
    columns: Numbers
    starts: Numbers
    spans: Numbers
    sizes: Numbers
    filled: Numbers  # columns of each row that hold tokens


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
        self._stored = numpy_dtype(split.dtype)
        self._dtype = form.label_dtype(self._stored)
        self._padding = split.eot_id or 0
        self._token_ends = np.array(split.token_ends, np.int64)
        self._token_begins = np.concatenate(([0], self._token_ends[:-1]))

    @property
    def num_samples(self) -> int:
        return self.packing.num_rows

    def locate(self, places: Numbers) -> Numbers:
        """The numbers of the rows."""
        return in_order(places, self.num_samples, self._order, self.identity)

    def batch(self, located: Numbers) -> Batch:
        seq_len = self.packing.spec.seq_len
        segments = find_segments(self.packing, located)
        stored = self._gather(segments, len(located))
        labels = stored[:, 1:].astype(self._dtype)
        ends = segments.owners * seq_len + segments.columns + segments.sizes
        labels.reshape(-1)[ends[segments.spans <= seq_len] - 1] = IGNORED
        for row in np.flatnonzero(segments.filled < seq_len).tolist():
            labels[row, segments.filled[row] :] = IGNORED
        batch: Batch = {"input_ids": stored[:, :-1].astype(self._dtype), "labels": labels}
        if self._fields:
            batch |= self._further(segments, located)
        return batch

    def _gather(self, segments: Segments, num_rows: int) -> Tokens:
        """Rows of one token more than inputs, as stored. Copied as bytes, as windows are; no document spans shards."""
        rows = np.full((num_rows, self.packing.spec.seq_len + 1), self._padding, self._stored)
        out, itemsize = rows.data.cast("B"), self._stored.itemsize
        shards = np.searchsorted(self._token_ends, segments.starts, side="right")
        places = (segments.starts - self._token_begins[shards]) * itemsize
        targets = (segments.owners * rows.shape[1] + segments.columns) * itemsize
        sizes = segments.spans * itemsize
        maps = {shard: self._split.shard_bytes(shard) for shard in set(shards.tolist())}
        copies = zip(shards.tolist(), places.tolist(), targets.tolist(), sizes.tolist(), strict=True)
        for shard, place, target, size in copies:
            out[target : target + size] = maps[shard][place : place + size]
        return rows

    def _further(self, segments: Segments, located: Numbers) -> Batch:
        """What was asked for beside ids and labels. Padding is a run like any other, of document -1."""
        seq_len = self.packing.spec.seq_len
        shape = (len(located), seq_len)
        short = np.flatnonzero(segments.filled < seq_len)
        begins = np.concatenate(
            (segments.owners * seq_len + segments.columns, short * seq_len + segments.filled[short])
        )
        in_turn = np.argsort(begins)
        edges = np.append(begins[in_turn], len(located) * seq_len)
        lengths = np.diff(edges)
        found: Batch = {}
        if "positions" in self._fields:
            columns = np.repeat(edges[:-1] % seq_len, lengths).reshape(shape)
            found["positions"] = np.subtract(np.arange(seq_len), columns, out=columns)
        if "document_ids" in self._fields:
            documents = np.append(self._split.document_at(segments.starts), np.full(len(short), -1))
            found["document_ids"] = np.repeat(documents[in_turn], lengths).reshape(shape)
        if "cu_seqlens" in self._fields:
            found["cu_seqlens"] = edges.astype(np.int32)
        if "sample_index" in self._fields:
            found["sample_index"] = located
        return found


def find_segments(packing: Packing, located: Numbers) -> Segments:
    """The segments of these rows, row after row."""
    rows, seq_len = packing.rows, packing.spec.seq_len
    begins = rows.borders[located]
    counts = rows.borders[located + 1] - begins
    ends = np.cumsum(counts)
    firsts = ends - counts
    numbers = np.repeat(begins - firsts, counts) + np.arange(ends[-1])
    owners = np.repeat(np.arange(len(located)), counts)
    spans: npt.NDArray[np.int64] = rows.spans[numbers].astype(np.int64)
    sizes = np.minimum(spans, seq_len)
    sums = np.cumsum(sizes)
    before = (sums - sizes)[firsts]
    return Segments(
        owners=owners,
        columns=sums - sizes - before[owners],
        starts=rows.starts[numbers],
        spans=spans,
        sizes=sizes,
        filled=sums[ends - 1] - before,
    )
