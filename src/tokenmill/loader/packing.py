"""Packing: documents are placed in rows of `seq_len` tokens, by a plan that is stored beside the dataset.

    documents       aaaa bb ccccccc ddd e                  seq_len 5
    pieces          aaaa bb ccccc cc ddd e                 documents longer than a row are cut
    padded          aaaa. bb... ccccc cc... ddd.. e....    one piece in a row
    best_fit        aaaae ccccc cc... dddbb                the largest first, each where it leaves the least room
    truncated       aaaa. bb... ccccc ddd.. e....          one document in a row, what is longer is dropped
    document_start  aaaab ccccc                            a row begins with a document; no padding; the rest is dropped

A plan follows from document lengths alone; no token is read. It is stored and mapped:

    DATASET/packing/train-best_fit-1024.bin    row boundaries, starts and spans of segments
    DATASET/packing/train-best_fit-1024.json   sealed: what the plan belongs to, and its digest

Ranks that pack at the same time write the same bytes. A plan that is damaged, or belongs to other content, is made
again. If nothing can be written, the plan is used from memory.

With pieces, every token of a split is an input exactly once. Labels stay within their document, except those of
`document_start`, which are those of windows:

    inputs     a a a a E b b E . .      E is an end of text, . is padding (the same id)
    labels     a a a E - b E - - -      - is ignored
    positions  0 1 2 3 4 0 1 2 0 1

A piece that is not the end of its document spans one token more than it has inputs: the target of its last input.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill import arguments, records
from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.dataset.windows import TokenRanges, Windows, read_ahead, read_ranges
from tokenmill.errors import DatasetError, RecipeError, StorageError
from tokenmill.loader.batches import (
    IGNORED,
    RUN_FIELDS,
    Batch,
    BatchSpec,
    Runs,
    Segments,
    WindowStream,
    check_order,
    check_sample,
    fill_fields,
    lay_out,
    positions_in_epoch,
    samples_in_order,
)
from tokenmill.permutation import Order
from tokenmill.records import Int
from tokenmill.storage.base import Storage
from tokenmill.storage.filesystem import explained
from tokenmill.storage.local import Folder
from tokenmill.storage.memory_maps import fast_digest, map_file
from tokenmill.storage.output import Digest

FOLDER = "packing"
FORMAT = 1
Numbers = npt.NDArray[np.int64]
Spans = npt.NDArray[np.int32]

_MAX_RECORD_BYTES = 1 << 16
_MAX_SEQ_LEN = (1 << 31) - 2
_SEARCHED_AT_ONCE = 1 << 22
# Errors of reading or writing a stored plan. The plan can always be made again.
_STORAGE_ERRORS = (StorageError, DatasetError, OSError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSpec:
    """What a plan depends on. Equal specs give equal plans."""

    format: Int
    fingerprint: str
    split: str
    kind: str
    seq_len: Int
    num_tokens: Int
    content: str = ""  # missing in older plans, which are made again

    @property
    def name(self) -> str:
        return f"{FOLDER}/{self.split}-{self.kind}-{self.seq_len}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRecord:
    """The record beside a stored plan."""

    spec: PackingSpec
    num_rows: Int
    num_segments: Int
    digest: Digest


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Row i has segments [boundaries[i], boundaries[i + 1]); segment j spans `spans[j]` tokens from `starts[j]` on."""

    boundaries: Numbers
    starts: Numbers
    spans: Spans


@dataclass(frozen=True, slots=True)
class Packing:
    """The rows of a split. `path` is the dataset's, if the plan is mapped from its stored file."""

    spec: PackingSpec
    rows: PackedRows
    digest: Digest
    path: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes map the file themselves."""
        if self.path is None:
            return Packing, (self.spec, self.rows, self.digest)
        return _open_stored, (self.path, self.record)

    @property
    def record(self) -> PackingRecord:
        return PackingRecord(
            spec=self.spec, num_rows=self.num_rows, num_segments=len(self.rows.starts), digest=self.digest
        )

    @property
    def num_rows(self) -> int:
        return len(self.rows.boundaries) - 1

    @property
    def num_dropped(self) -> int:
        """Tokens of the split that are not an input of any row."""
        if self.spec.kind in PACKERS:
            return 0
        return self.spec.num_tokens - int(np.minimum(self.rows.spans, self.spec.seq_len).sum(dtype=np.int64))

    @property
    def waste(self) -> float:
        """The fraction of inputs that are padding."""
        return 1 - (self.spec.num_tokens - self.num_dropped) / (self.num_rows * self.spec.seq_len)

    def __repr__(self) -> str:
        spec = self.spec
        return (
            f"Packing({spec.kind!r}, {self.num_rows:,} rows of {spec.seq_len:,} tokens, {self.waste:.1%} padding, "
            f"{self.num_dropped:,} of {spec.num_tokens:,} tokens dropped)"
        )


def open_packing(dataset: Dataset, split: str, kind: str, seq_len: int) -> Packing:
    """The stored plan of a split. If there is none that is valid, it is made and stored."""
    tokens = dataset[split]
    if not tokens.num_tokens:
        raise RecipeError(f"the split {split!r} has no tokens", hint="use a split with documents")
    spec = PackingSpec(
        format=FORMAT,
        fingerprint=dataset.manifest.fingerprint,
        split=split,
        kind=kind,
        seq_len=seq_len,
        num_tokens=tokens.num_tokens,
        content=records.digest(dataset.pins(split)),
    )
    # If a split has the name of this folder, only its shards belong there.
    folder = Folder(dataset.path) if FOLDER not in dataset.splits else None
    if folder is not None and (found := _load(folder, spec)) is not None:
        return found
    rows = pack(tokens, kind, seq_len)
    if folder is not None:
        with contextlib.suppress(*_STORAGE_ERRORS):
            return _store(folder, spec, rows)
    return Packing(spec, rows, _digest(rows))


def pack(split: TokenSplit, kind: str, seq_len: int) -> PackedRows:
    """The rows of a split, from its document lengths."""
    if kind in DOCUMENT_PACKERS:
        return DOCUMENT_PACKERS[kind](np.concatenate([*split.document_lengths()]), seq_len)
    spans = np.concatenate([cut(lengths, seq_len) for lengths in split.document_lengths()])
    return PACKERS[kind](spans, seq_len)


def check_packing(kind: str, seq_len: int) -> int:
    """Refuse an unknown packing, and a seq_len that it cannot have."""
    known = f"choose from concat, {', '.join((*PACKERS, *DOCUMENT_PACKERS))}"
    if arguments.text("packing", kind, hint=known) not in {**PACKERS, **DOCUMENT_PACKERS}:
        raise RecipeError(f"unknown packing {kind!r}", hint=known)
    most = f"give a number of tokens, from 1 to {_MAX_SEQ_LEN}"
    return arguments.whole("seq_len", seq_len, least=1, most=_MAX_SEQ_LEN, hint=most)


def _load(folder: Storage, spec: PackingSpec) -> Packing | None:
    """The stored plan, mapped, if it is intact and has this spec."""
    with contextlib.suppress(*_STORAGE_ERRORS):
        name = f"{spec.name}.json"
        found = records.unseal(PackingRecord, folder.read(name, max_bytes=_MAX_RECORD_BYTES), where=folder.at(name))
        if found.spec == spec and fast_digest(folder, f"{spec.name}.bin") == found.digest:
            return _open_stored(folder.path, found)
    return None


def _store(folder: Storage, spec: PackingSpec, rows: PackedRows) -> Packing:
    folder.make(FOLDER)
    if (found := _load(folder, spec)) is not None:  # another rank has stored it
        return found
    plan_name, record_name = f"{spec.name}.bin", f"{spec.name}.json"
    folder.remove_tree(record_name)
    folder.remove_tree(plan_name)
    output = folder.create(plan_name)
    try:
        for data in _bytes(rows):
            output.write(data)
        digest = folder.publish([output])[plan_name]
    except BaseException:
        output.discard()
        raise
    record = Packing(spec, rows, digest).record
    folder.write(record_name, records.seal(record))
    return _open_stored(folder.path, record)


def _open_stored(path: str, record: PackingRecord) -> Packing:
    """The plan that a record describes, mapped."""
    plan_path = os.path.join(path, f"{record.spec.name}.bin")
    with explained(plan_path):
        data = map_file(plan_path, np.uint8)
    starts = 8 * (record.num_rows + 1)
    spans = starts + 8 * record.num_segments
    rows = PackedRows(data[:starts].view("<i8"), data[starts:spans].view("<i8"), data[spans:].view("<i4"))
    return Packing(record.spec, rows, record.digest, path)


def _digest(rows: PackedRows) -> Digest:
    sha, size = hashlib.sha256(), 0
    for data in _bytes(rows):
        sha.update(data)
        size += data.nbytes
    return Digest(bytes=size, sha256=sha.hexdigest())


def _bytes(rows: PackedRows) -> Iterator[memoryview]:
    for array in (rows.boundaries, rows.starts, rows.spans):
        yield array.astype(array.dtype.newbyteorder("<"), copy=False).data


@dataclass(frozen=True, slots=True)
class FullRows:
    """Complete rows: the `sizes` inputs from `begins` on, counted through all rows, are the tokens from `starts` on.

    Padding is a segment like any other, from the end of the split on. `ends` tells which segments end a document.
    """

    begins: Numbers
    sizes: Numbers
    starts: Numbers
    ends: npt.NDArray[np.bool_]
    boundaries: Numbers


class IgnoredLabels(NamedTuple):
    """Labels of a batch that are ignored: at `indices`, and in each of the `padded` rows from a column on."""

    indices: Numbers
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
    batch_spec: BatchSpec,
) -> PackedStream | DocumentStartStream:
    """The stream of a packed split. Bad arguments are refused before a plan is made."""
    seq_len = check_packing(kind, seq_len)
    if check_order(order) == "random":
        raise RecipeError(
            f"order 'random' takes windows that begin anywhere, but the rows of packing {kind!r} are fixed",
            hint="use order 'shuffled', or packing 'concat'",
        )
    content = dataset.content(split)
    if kind == "document_start":
        windows = Windows(dataset[split], seq_len)
        batch_spec.label_dtype(windows.dtype)
        packing = open_packing(dataset, split, kind, seq_len)
        return DocumentStartStream(windows, packing, identity, content, order=order, seed=seed, batch_spec=batch_spec)
    masked = replace(batch_spec, mask_boundaries=True)
    masked.label_dtype(numpy_dtype(dataset[split].dtype))
    packing = open_packing(dataset, split, kind, seq_len)
    return PackedStream(dataset[split], packing, identity, content, order=order, seed=seed, batch_spec=masked)


def _identity(identity: dict[str, Any], packing: Packing, order: Order, seed: int) -> dict[str, Any]:
    """Hashed for the order, and stored in states: keys and their order never change."""
    return {
        **identity, "packing": packing.spec.kind, "plan": packing.digest.sha256,
        "seq_len": packing.spec.seq_len, "order": order, "seed": seed,
    }  # fmt: skip


class DocumentStartStream(WindowStream):
    """Windows that begin where a plan says, in some order. `packing` has their number and that of dropped tokens."""

    def __init__(
        self,
        windows: Windows,
        packing: Packing,
        identity: dict[str, Any],
        content: str,
        *,
        order: Order,
        seed: int,
        batch_spec: BatchSpec,
    ) -> None:
        super().__init__(windows, identity, content, order=order, seed=seed, batch_spec=batch_spec)
        self.identity = _identity(identity, packing, order, seed)
        self.packing = packing

    @property
    def num_samples(self) -> int:
        return self.packing.num_rows

    def locate(self, positions: Numbers) -> Numbers:
        """The first tokens of the rows."""
        rows = samples_in_order(positions, self.num_samples, self._order, self.identity)
        found: Numbers = self.packing.rows.starts.take(rows)
        return found

    def maps(self) -> Iterable[npt.NDArray[Any]]:
        return (*super().maps(), self.packing.rows.starts)

    def _sample_index(self, starts: Numbers) -> Numbers:
        return self.packing.rows.starts.searchsorted(starts)

    def locate_number(self, number: int) -> Numbers:
        check_sample(number, self.num_samples)
        return self.packing.rows.starts[number : number + 1]

    def samples_with(self, begin: int, stop: int) -> Numbers:
        starts = self.packing.rows.starts
        first, last = starts.searchsorted([begin - self.windows.seq_len + 1, stop])
        found: Numbers = starts[first:last]
        return found

    def occurrences(self, located: Numbers, epoch: int) -> tuple[Numbers, Numbers]:
        rows = self._sample_index(located)
        return np.arange(len(rows)), positions_in_epoch(rows, self.num_samples, self._order, self.identity, epoch)


class PackedStream:
    """The rows of a packing, in some order. `packing` has their number and the fraction of padding."""

    limit: int | None = None

    def __init__(
        self,
        split: TokenSplit,
        packing: Packing,
        identity: dict[str, Any],
        content: str,
        *,
        order: Order,
        seed: int,
        batch_spec: BatchSpec,
    ) -> None:
        spec = packing.spec
        self.identity = _identity(identity, packing, order, seed)
        self.content = content
        self.packing = packing
        self._order = order
        self._split = split
        self._labels = batch_spec.labels
        self._fields = set(batch_spec.fields)
        self._run_fields = self._fields & RUN_FIELDS
        self._stored = numpy_dtype(split.dtype)
        self._dtype = batch_spec.label_dtype(self._stored)
        self._padding = np.full(spec.seq_len + 1, split.eot_id or 0, self._stored).tobytes()

    @property
    def num_samples(self) -> int:
        return self.packing.num_rows

    def locate(self, positions: Numbers) -> Numbers:
        """The numbers of the rows."""
        return samples_in_order(positions, self.num_samples, self._order, self.identity)

    def prefetch(self, batches: Sequence[Numbers]) -> Iterator[None]:
        return read_ahead(self._split, batches, self._token_ranges)

    def maps(self) -> Iterable[npt.NDArray[Any]]:
        rows = self.packing.rows
        return (*self._split.maps(), rows.boundaries, rows.starts, rows.spans)

    def _token_ranges(self, located: Numbers) -> TokenRanges:
        """The tokens of some rows, without padding."""
        segments = find_segments(self.packing, located)
        return TokenRanges(segments.starts, segments.starts + segments.spans, segments.boundaries)

    def batch(self, located: Numbers) -> Batch:
        return next(self.batches(located[None]))

    def batches(self, located: Numbers) -> Iterator[Batch]:
        num_batches, num_rows = located.shape
        full = fill_rows(find_segments(self.packing, located.ravel()), self.packing.spec)
        edges = np.arange(num_batches + 1) * num_rows
        tokens = read_ranges(self._split, find_ranges(full, edges), self._padding)
        ignored = self._find_ignored(full, edges)
        runs = self._find_runs(full, edges) if self._run_fields else itertools.repeat(None, num_batches)
        return map(self._make_batch, located, tokens, ignored, runs)

    def _make_batch(self, located: Numbers, tokens: Tokens, ignored: IgnoredLabels, runs: Runs | None) -> Batch:
        """The batch of these rows, from their tokens as stored."""
        rows = tokens.reshape(-1, self.packing.spec.seq_len + 1)
        batch = lay_out(rows, self._dtype, self._run_fields, labels=self._labels, masked=True)
        labels = batch["labels"]
        labels.reshape(-1)[ignored.indices] = IGNORED
        for row, filled in ignored.padded:
            labels[row, filled:] = IGNORED
        if "attention_mask" in self._fields:
            batch["attention_mask"] = np.ones(labels.shape, np.int64)
            for row, filled in ignored.padded:
                batch["attention_mask"][row, filled:] = 0
        if runs is not None:
            fill_fields(batch, self._run_fields, runs)
        if "sample_index" in self._fields:
            batch["sample_index"] = located
        return batch

    @property
    def split(self) -> TokenSplit:
        return self._split

    def sample_numbers(self, located: Numbers) -> Numbers:
        return located

    def locate_number(self, number: int) -> Numbers:
        check_sample(number, self.num_samples)
        return np.array([number])

    def inputs(self, located: Numbers) -> Segments:
        found = find_segments(self.packing, located)
        return replace(found, spans=np.minimum(found.spans, self.packing.spec.seq_len))

    def samples_with(self, begin: int, stop: int) -> Numbers:
        rows, seq_len = self.packing.rows, self.packing.spec.seq_len
        wanted = begin - seq_len + 1
        # Rows of one segment are in the order of their tokens. Those of several are not, so all are searched.
        is_sorted = len(rows.starts) == self.packing.num_rows
        first, last = rows.starts.searchsorted([wanted, stop]).tolist() if is_sorted else (0, len(rows.starts))
        found = [np.zeros(0, np.int64)]
        for at in range(first, last, _SEARCHED_AT_ONCE):
            some = slice(at, min(at + _SEARCHED_AT_ONCE, last))
            starts = rows.starts[some]
            near = np.flatnonzero((starts >= wanted) & (starts < stop))
            sizes = np.minimum(rows.spans[some][near], seq_len)
            found.append(near[starts[near] + sizes > begin] + at)
        return np.unique(rows.boundaries.searchsorted(np.concatenate(found), side="right") - 1)

    def occurrences(self, located: Numbers, epoch: int) -> tuple[Numbers, Numbers]:
        positions = positions_in_epoch(located, self.num_samples, self._order, self.identity, epoch)
        return np.arange(len(located)), positions

    def _find_ignored(self, full: FullRows, edges: Numbers) -> Iterator[IgnoredLabels]:
        """The ignored labels of each batch: the first token of every segment, and padding. All have as many rows."""
        num_rows, seq_len = int(edges[1]), self.packing.spec.seq_len
        # Shifted, the first token is the label of the last input before it.
        indices = full.begins.copy() if self._labels == "aligned" else (full.begins + full.sizes)[full.ends] - 1
        rows, columns = np.divmod(full.begins[full.starts == self._split.num_tokens], seq_len)
        limits = indices.searchsorted(edges * seq_len).tolist(), rows.searchsorted(edges).tolist()
        indices %= num_rows * seq_len
        padded = list(zip((rows % num_rows).tolist(), columns.tolist(), strict=True))
        for (first, last), (first_padded, last_padded) in zip(*map(pairwise, limits), strict=True):
            yield IgnoredLabels(indices[first:last], padded[first_padded:last_padded])

    def _find_runs(self, full: FullRows, edges: Numbers) -> Iterator[Runs]:
        """The runs of each batch. Padding is a run of document -1."""
        seq_len = self.packing.spec.seq_len
        documents = np.full(len(full.starts), -1)
        if "document_ids" in self._run_fields:
            real = full.starts < self._split.num_tokens
            documents[real] = self._split.document_at(full.starts[real])
        limits = full.boundaries[edges].tolist()
        for (begin, end), (first, last) in zip(pairwise(edges * seq_len), pairwise(limits), strict=True):
            yield Runs(np.append(full.begins[first:last], end) - begin, documents[first:last])


def find_segments(packing: Packing, located: Numbers) -> Segments:
    """The segments of these rows, row after row, as planned."""
    rows = packing.rows
    firsts = rows.boundaries.take(located)
    counts = rows.boundaries.take(located + 1) - firsts
    boundaries = np.concatenate(([0], np.cumsum(counts)))
    numbers = np.repeat(firsts - boundaries[:-1], counts) + np.arange(boundaries[-1])
    return Segments(rows.starts.take(numbers), rows.spans.take(numbers).astype(np.int64), boundaries)


def fill_rows(segments: Segments, spec: PackingSpec) -> FullRows:
    """The same rows, filled with padding."""
    seq_len, boundaries = spec.seq_len, segments.boundaries
    sizes = np.minimum(segments.spans, seq_len)
    room = seq_len - np.add.reduceat(sizes, boundaries[:-1])
    short = np.flatnonzero(room)
    boundaries = boundaries + np.concatenate(([0], np.cumsum(room > 0)))
    is_real = np.ones(boundaries[-1], np.bool_)
    is_real[boundaries[1:][short] - 1] = False
    full_starts = np.full(len(is_real), spec.num_tokens)
    full_sizes = np.empty_like(full_starts)
    ends = np.ones_like(is_real)
    full_starts[is_real], full_sizes[is_real], ends[is_real] = segments.starts, sizes, segments.spans <= seq_len
    full_sizes[~is_real] = room[short]
    return FullRows(np.cumsum(full_sizes) - full_sizes, full_sizes, full_starts, ends, boundaries)


def find_ranges(full: FullRows, edges: Numbers) -> TokenRanges:
    """The tokens of rows, batch after batch; batch b has rows `edges[b]` up to `edges[b + 1]`.

    Each row has one token more than inputs: the target of the last input. Behind a document that ends with its row
    it may be any token, since its label is ignored.
    """
    stops = full.starts + full.sizes
    stops[full.boundaries[1:] - 1] += 1
    return TokenRanges(full.starts, stops, full.boundaries[edges])


def best_fit(spans: Spans, seq_len: int) -> PackedRows:
    """Best fit, largest piece first. Rows are in the order of their first segments.

    Pieces of one size are interchangeable, and so are rows with the same room. So the placement is computed with
    their numbers, in a time that hardly depends on the number of documents. Then the pieces of every size are
    assigned in order.
    """
    starts = _starts(np.minimum(spans, seq_len))
    # Sorting 16-bit numbers is several times as fast.
    gaps = (seq_len - np.minimum(spans, seq_len)).astype(np.uint16 if seq_len < 1 << 16 else np.int32)
    order = np.argsort(gaps, kind="stable")
    placements = place_best_fit(((seq_len - gap, number) for gap, number in _count(gaps[order])), seq_len)
    num_rows = sum(placement.rows for placement in placements if not placement.filled)
    counts = np.zeros(num_rows, np.int32)
    firsts = np.empty(num_rows, np.int64)
    for p in placements:
        counts[p.first : p.first + p.rows] += p.each
        if not p.filled:
            firsts[p.first : p.first + p.rows] = starts[order[p.piece : p.piece + p.rows * p.each : p.each]]
    # Rows were opened for the largest pieces first. A trainer that reads rows in order must not get those first.
    by_first_segment = np.argsort(firsts)
    boundaries = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts[by_first_segment], dtype=np.int64)))
    begins = firsts
    begins[by_first_segment] = boundaries[:-1]
    packed = PackedRows(boundaries, np.empty(len(spans), np.int64), np.empty(len(spans), np.int32))
    for p in placements:
        slots = (begins[p.first : p.first + p.rows, None] + np.arange(p.filled, p.filled + p.each)).ravel()
        pieces = order[p.piece : p.piece + p.rows * p.each]
        packed.starts[slots] = starts[pieces]
        packed.spans[slots] = spans[pieces]
    return packed


def padded(spans: Spans, seq_len: int) -> PackedRows:
    """One row for each piece, in order."""
    return PackedRows(np.arange(len(spans) + 1), _starts(np.minimum(spans, seq_len)), spans)


def truncated(lengths: Spans, seq_len: int) -> PackedRows:
    """One row for each document, of its first tokens. Empty documents have none."""
    starts = _starts(lengths)[lengths > 0]
    return PackedRows(np.arange(len(starts) + 1), starts, np.minimum(lengths[lengths > 0], seq_len + 1))


def document_start(lengths: Spans, seq_len: int) -> PackedRows:
    """Full rows that begin with a document: the first one that begins behind the previous row."""
    starts = _starts(lengths)[lengths > 0]
    num_tokens = int(lengths.sum(dtype=np.int64))
    following = starts.searchsorted(starts + seq_len).data
    found, document = [], 0
    while document < len(following):
        found.append(document)
        document = following[document]
    firsts = starts[found]
    firsts = firsts[firsts + seq_len < num_tokens]  # the last row may lack tokens
    return PackedRows(np.arange(len(firsts) + 1), firsts, np.full(len(firsts), seq_len + 1, np.int32))


# Those of pieces keep every token. Those of documents drop some.
PACKERS: dict[str, Callable[[Spans, int], PackedRows]] = {"best_fit": best_fit, "padded": padded}
DOCUMENT_PACKERS: dict[str, Callable[[Spans, int], PackedRows]] = {
    "truncated": truncated, "document_start": document_start,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placement:
    """`rows` rows from `first` on, with `filled` segments, get `each` more segments: pieces from `piece` on."""

    first: int
    rows: int
    filled: int
    each: int
    piece: int


def cut(lengths: Spans, seq_len: int) -> Spans:
    """The spans of the pieces of documents with these lengths."""
    lengths = lengths[lengths > 0]
    counts = -(-lengths // seq_len)
    ends = np.cumsum(counts, dtype=np.int64)
    spans = np.full(int(ends[-1]) if len(ends) else 0, seq_len + 1, np.int32)
    spans[ends - 1] = lengths - (counts - 1) * seq_len
    return spans


def place_best_fit(classes: Iterable[tuple[int, int]], seq_len: int) -> list[Placement]:
    """Best fit of (size, number of pieces) classes, the largest size first.

    A piece goes where it leaves the least room, so the next ones of its size go into the same row until they no
    longer fit: whole ranges of equal rows are filled in one step. Each step either more than halves the room of its
    rows or finishes a size, so there are at most about seq_len * log(seq_len) steps.
    """
    placements: list[Placement] = []
    rooms: list[int] = []  # of open rows, each once, sorted
    ranges: dict[int, list[tuple[int, int, int]]] = {}  # by room: first row, rows, segments in each

    def give_back(room: int, first: int, rows: int, filled: int) -> None:
        if rows and room:
            if room not in ranges:
                rooms.insert(bisect_left(rooms, room), room)
            ranges.setdefault(room, []).append((first, rows, filled))

    num_rows = piece = 0
    for size, number in classes:
        left = number
        while left:
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms[at]
                first, rows, filled = ranges[room].pop()
                if not ranges[room]:
                    del ranges[room], rooms[at]
            else:
                room, first, filled = seq_len, num_rows, 0
                rows = -(-left // (room // size))
                num_rows += rows
            each = min(room // size, left)
            used = min(rows, left // each)
            placements.append(Placement(first, used, filled, each, piece))
            give_back(room, first + used, rows - used, filled)
            give_back(room - each * size, first, used, filled + each)
            piece += used * each
            left -= used * each
    return placements


def _count(ordered: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """The distinct values of a sorted array, and how often each occurs."""
    edges = np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1))
    counts = np.diff(edges, append=len(ordered))
    return list(zip(ordered[edges].tolist(), counts.tolist(), strict=True))


def _starts(sizes: Spans) -> Numbers:
    ends = np.cumsum(sizes, dtype=np.int64)
    ends -= sizes
    return ends
