"""Runs one unit: reads a slice of the sources, and writes pieces, provenance and a receipt.

    read -> documents and their tokens -> write
                                            |
    every file is made durable first, and the receipt last

It streams: memory depends neither on the size of the unit nor on the number of units. The same function runs in the
build's own process, in a pool and on a cluster.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill import records
from tokenmill.dataset import provenance
from tokenmill.dataset.bin_idx import ShardWriter
from tokenmill.dataset.manifest import BAD, DROPS, NOT_SAMPLED, SourceTotal
from tokenmill.dataset.provenance import REASONS, SCHEMA, dictionary_column
from tokenmill.dataset.statistics import (
    MAX_EXAMPLE_CHARS,
    NUM_EXAMPLES,
    DocumentCounts,
    DropExample,
    UnitStatistics,
    add_examples,
)
from tokenmill.errors import DeterminismError, RecipeError, SourceChangedError
from tokenmill.recipe import load_filter
from tokenmill.sizes import few
from tokenmill.sources.base import Batch, Skip, naming_what_needs_memory, text_buffers
from tokenmill.sources.reader import format_of
from tokenmill.storage.base import Storage
from tokenmill.storage.local import Folder
from tokenmill.storage.output import Output
from tokenmill.storage.scratch import ScratchOutput
from tokenmill.tokenizers.base import Engine
from tokenmill.units.encode import (
    Documents,
    chars_of_groups,
    encode_batch,
    first_document,
    hash_documents,
    memory_for,
    name_of,
    num_eot,
    read_batches,
    tokens_of_split,
)
from tokenmill.units.receipts import (
    NO_LIMIT,
    PIECES,
    REJECTS,
    Receipt,
    check_totals,
    hex_sum,
    hex_sums,
    load_receipt,
    read_receipt,
    receipt_name,
    unit_name,
)
from tokenmill.units.task import BuildConfig, UnitTask


def rows(
    *,
    names: Sequence[str],
    first_source: int,
    sources: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int64],
    splits: npt.NDArray[np.int8],
    split_names: Sequence[str],
    tokens: npt.NDArray[np.int64],
    skips: Sequence[Skip],
) -> pa.Table:
    """Provenance of a batch: kept documents and skips, in the order of the source."""
    # The reasons of all datasets come first, so that a file without others has the bytes that it always had.
    reasons = list(dict.fromkeys((*REASONS, *(skip.reason for skip in skips))))
    if len(reasons) > _MAX_REASONS:
        raise RecipeError(f"a filter gives more than {_MAX_REASONS} reasons", hint="give fewer, as one word each")
    numbers = {reason: number for number, reason in enumerate(reasons)}
    source = np.concatenate((sources, np.array([skip.source for skip in skips], np.int32)))
    position = np.concatenate((positions, np.array([skip.position for skip in skips], np.int64)))
    split = np.concatenate((splits, np.full(len(skips), -1, np.int8)))
    reason = np.concatenate(
        (np.full(len(splits), -1, np.int8), np.array([numbers[skip.reason] for skip in skips], np.int8))
    )
    counts = np.concatenate((tokens.astype(np.int32), np.zeros(len(skips), np.int32)))
    # Skips come behind the kept documents; without skips the order is right already.
    order = np.lexsort((position, source)) if skips else slice(None)
    return pa.table(
        [
            pa.DictionaryArray.from_arrays(source[order] - np.int32(first_source), pa.array(names, pa.string())),
            position[order],
            dictionary_column(split[order], split_names),
            dictionary_column(reason[order], reasons),
            counts[order],
        ],
        schema=SCHEMA,
    )


# Not those of a filter, which may leave documents out because nobody should read them.
_WITH_TEXT = {*DROPS, *BAD, NOT_SAMPLED} - {"filtered"}


def _beginning(batch: Batch, skip: Skip) -> str:
    """The beginning of the text of a document that was dropped; empty if its text could not be read."""
    found = np.flatnonzero((batch.sources == skip.source) & (batch.positions == skip.position))
    if not len(found):
        return ""
    offsets, data = text_buffers(batch.text)
    start, stop = offsets[found[0] : found[0] + 2].tolist()
    # A character has at most four bytes; the last one may be cut.
    part = bytes(data[start : min(stop, start + 4 * MAX_EXAMPLE_CHARS)])
    return part.decode(errors="backslashreplace" if skip.reason == "invalid_utf8" else "ignore")[:MAX_EXAMPLE_CHARS]


# Provenance numbers them in 8 bits.
_MAX_REASONS = 100


class ReportProgress(Protocol):
    """Receives counts of documents, tokens and planned bytes; `kept` if an earlier run has done the unit."""

    def __call__(self, documents: int, tokens: int, planned_bytes: int, *, kept: bool = False) -> None: ...


_REPORT_SECONDS = 0.2


class Reporter:
    """Collects the progress of a unit and passes it on a few times a second, and at the end of its `with` block."""

    def __init__(self, say: Callable[[dict[str, Any]], None], unit: int) -> None:
        self._say = say
        self._unit = unit
        self._counts = (0, 0, 0)
        self._kept = False
        self._last = time.monotonic()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()

    def __call__(self, documents: int, tokens: int, planned_bytes: int, *, kept: bool = False) -> None:
        self._kept = kept
        now = (documents, tokens, planned_bytes)
        self._counts = tuple(a + b for a, b in zip(self._counts, now, strict=True))  # type: ignore[assignment]  # three
        if time.monotonic() - self._last >= _REPORT_SECONDS:
            self._flush()

    def _flush(self) -> None:
        documents, tokens, planned_bytes = self._counts
        counts = {"documents": documents, "tokens": tokens, "bytes": planned_bytes}
        self._say({"kind": "progress", "unit": self._unit, "kept": self._kept, **counts})
        self._counts, self._last = (0, 0, 0), time.monotonic()


def run_unit(
    folder: Storage, config: BuildConfig, task: UnitTask, engine: Callable[[], Engine], report: ReportProgress
) -> Receipt:
    """Run a unit, unless an earlier run has done it. `report` receives its progress, and all of it at the end."""
    return begin_unit(folder, config, task, engine, report)()


def begin_unit(
    folder: Storage, config: BuildConfig, task: UnitTask, engine: Callable[[], Engine], report: ReportProgress
) -> Callable[[], Receipt]:
    """The part of a unit that computes. Returns the part that waits for the disk and ends with the receipt."""
    unit, limit = task.unit, task.token_limit
    done = load_receipt(folder, unit.index, limit, config.fingerprint, rehash=True)
    if done is not None:
        if task.compare_text:
            _compare_text(folder, config, task, done)
        report(done.documents_read, done.tokens, unit.text_bytes, kept=True)
        return lambda: done
    run = UnitRun(config, task, folder)
    done_bytes = 0
    where = task.sources[0].name
    try:
        with naming_what_needs_memory(lambda: where):
            for batch in read_batches(config, task):
                where = first_document(batch, task) or where
                tokens = run.add(batch, engine())
                before, done_bytes = done_bytes, _planned_bytes_read(task, batch, done_bytes)
                report(batch.num_read, tokens, done_bytes - before)
                where = f"{where}, or behind it"
    except BaseException:
        run.discard()
        raise
    report(0, 0, unit.text_bytes - done_bytes)
    return run.finish


def _compare_text(folder: Storage, config: BuildConfig, task: UnitTask, done: Receipt) -> None:
    """Raise `SourceChangedError` unless a unit still has the documents that it had, and in their places."""
    from tokenmill.sources.files import open_file

    read_sum = np.zeros(2, np.uint64)
    positions = [np.zeros(0, np.int64)]
    for batch in read_batches(config, task):
        read_sum += hash_documents(batch.text).sum(axis=0, dtype=np.uint64)
        source = np.concatenate((batch.sources, np.array([skip.source for skip in batch.skips], np.int32)))
        position = np.concatenate((batch.positions, np.array([skip.position for skip in batch.skips], np.int64)))
        positions.append(position[np.lexsort((position, source))])
    with open_file(folder.at(done.provenance)) as data, pq.ParquetFile(data) as file:
        before = file.read(columns=["position"])["position"].to_numpy()
    if hex_sum(read_sum) != done.read_sum or not np.array_equal(np.concatenate(positions), before):
        names = few([source.name for source in task.sources], ", ")
        raise SourceChangedError(
            f"{names} changed since unit {done.unit} was built, with the same size and time",
            hint="restore the old file, or prepare again with `update=True`, which keeps the results of the others",
        )


def _planned_bytes_read(task: UnitTask, batch: Batch, before: int) -> int:
    """How many of its planned bytes a unit has read, including this batch.

    In a plain file the position of the last document says it; in any other source, the size of the text.
    """
    unit, source = task.unit, task.sources[0]
    if unit.num_sources == 1 and not source.compression and format_of(source.kind).positions_are_bytes:
        now = int(batch.positions[-1]) - unit.start if len(batch.positions) else before
    else:
        now = before + batch.text.nbytes
    return max(before, min(now, unit.text_bytes))


class UnitRun:
    """The state of a unit while it streams."""

    def __init__(self, config: BuildConfig, task: UnitTask, folder: Storage) -> None:
        self.config, self.task, self.folder = config, task, folder
        self.scratch = Folder(config.scratch, folder.fs) if config.scratch else None
        self.name = unit_name(task.unit.index, task.token_limit)
        self.pieces = {
            split: ShardWriter(self.create, f"{PIECES}/{self.name}.{split}", config.dtype)
            for split in config.split_names
        }
        self.rejects: Output | None = None
        self.keep = load_filter(config.filter) if config.filter else None
        self.documents_read = 0
        self.dropped: Counter[str] = Counter()
        self.read_sum = np.zeros(2, np.uint64)
        self.written_sum = np.zeros(2, np.uint64)
        self.source_sums = np.zeros((len(task.sources), 2), np.uint64)
        self.source_documents = np.zeros(len(task.sources), np.int64)
        self.counts = DocumentCounts(len(task.sources), config.split_names)
        self.examples: dict[str, list[DropExample]] = {}
        self.provenance = provenance.ProvenanceWriter(self.create(f"{PIECES}/{self.name}.provenance.parquet"))

    def create(self, name: str) -> Output:
        return ScratchOutput(self.scratch, self.folder, name) if self.scratch else self.folder.create(name)

    def add(self, batch: Batch, engine: Engine) -> int:
        """Encode a batch and write it to the pieces. Returns its number of tokens."""
        before = sum(writer.tokens for writer in self.pieces.values())
        tokens_left = None if self.task.token_limit == NO_LIMIT else self.task.token_limit - before
        with memory_for(batch.text, engine, self.folder, where=first_document(batch, self.task)):
            documents = encode_batch(batch, self.config, self.task, engine, keep=self.keep, tokens_left=tokens_left)
        total = 0
        for split, writer in enumerate(self.pieces.values()):
            part = tokens_of_split(documents, split, self.config)
            if part is not None:
                writer.write(part.tokens, part.lengths)
                self.written_sum += part.hash_sum
                total += len(part.tokens)
        self._record(batch, documents)
        return total

    def finish(self) -> Receipt:
        """Publish everything, then the receipt."""
        try:
            return self._publish()
        except BaseException:
            self.discard()
            raise

    def _publish(self) -> Receipt:
        config, unit = self.config, self.task.unit
        name = receipt_name(unit.index, self.task.token_limit)
        outputs = [output for writer in self.pieces.values() for output in writer.outputs()]
        extra = [self.provenance.finish(), *([self.rejects] if self.rejects else [])]
        digests = self.folder.publish(outputs + extra, committed=lambda: self.folder.exists(name))
        receipt = Receipt(
            fingerprint=config.fingerprint,
            unit=unit.index,
            token_limit=self.task.token_limit,
            documents_read=self.documents_read,
            dropped=dict(sorted(self.dropped.items())),
            pieces={split: writer.describe(digests) for split, writer in self.pieces.items() if writer.tokens},
            sources=tuple(
                SourceTotal(name=source.name, bytes=source.bytes, documents=count, text_sum=text_sum)
                for source, count, text_sum in zip(
                    self.task.sources, self.source_documents.tolist(), hex_sums(self.source_sums), strict=True
                )
            ),
            read_sum=hex_sum(self.read_sum),
            written_sum=hex_sum(self.written_sum),
            files={output.name: digests[output.name] for output in extra},
            statistics=self._statistics(),
        )
        check_totals(receipt)
        try:
            self.folder.write(name, records.seal(receipt), committed=lambda: True)
        except DeterminismError:
            before = read_receipt(self.folder, name)
            if replace(before, statistics=None) != replace(receipt, statistics=None):
                raise
            return before  # of an older version, without statistics
        return receipt

    def discard(self) -> None:
        for writer in self.pieces.values():
            writer.discard()
        self.provenance.discard()
        if self.rejects is not None:
            self.rejects.discard()

    def _record(self, batch: Batch, documents: Documents) -> None:
        kept, first = documents.kept, self.task.unit.source
        self.documents_read += batch.num_read
        self.read_sum += documents.read_sum
        self.written_sum += kept.skipped_hashes.sum(axis=0, dtype=np.uint64)
        self.dropped.update(skip.reason for skip in kept.skips)
        self._reject([skip for skip in kept.skips if skip.reason in BAD])
        np.add.at(self.source_sums, kept.sources - first, kept.hashes)
        self.source_documents += np.bincount(kept.sources - first, minlength=len(self.task.sources))
        lengths = documents.encoded.lengths + num_eot(self.config)
        self._count(batch, documents, lengths)
        self.provenance.write(
            rows(
                names=[source.name for source in self.task.sources],
                first_source=first,
                sources=kept.sources,
                positions=kept.positions,
                splits=documents.splits,
                split_names=self.config.split_names,
                tokens=lengths,
                skips=kept.skips,
            )
        )

    def _count(self, batch: Batch, documents: Documents, lengths: npt.NDArray[np.int64]) -> None:
        """Add a batch to the statistics. `lengths` are in tokens, ends of text included."""
        kept = documents.kept
        groups, num_groups = self.counts.groups_of(documents.splits, kept.sources - self.task.unit.source)
        chars = chars_of_groups(kept.text, groups, num_groups)
        self.counts.add(groups, lengths, np.diff(text_buffers(kept.text)[0]), chars)
        add_examples(self.examples, self._examples(batch, kept.skips))

    def _statistics(self) -> UnitStatistics | None:
        return UnitStatistics(
            splits=self.counts.splits(empty=False),
            examples={reason: tuple(found) for reason, found in sorted(self.examples.items())},
        )

    def _examples(self, batch: Batch, skips: Sequence[Skip]) -> Iterator[tuple[str, DropExample]]:
        """The first skips of each reason, unless there are enough of them already."""
        left = {reason: NUM_EXAMPLES - len(self.examples.get(reason, ())) for reason in {skip.reason for skip in skips}}
        for skip in skips:
            if left[skip.reason] > 0:
                left[skip.reason] -= 1
                text = _beginning(batch, skip) if skip.reason in _WITH_TEXT else ""
                yield skip.reason, DropExample(source=name_of(skip, self.task), position=skip.position, text=text)

    def _reject(self, skips: list[Skip]) -> None:
        """Record the bad documents of a batch with one write: there may be millions."""
        if not skips:
            return
        if self.rejects is None:
            self.rejects = self.create(f"{REJECTS}/{self.name}.jsonl")
        # Keys are sorted, so `position` comes first, and the rest of the line is the same for many documents.
        endings: dict[tuple[int, str], str] = {}
        lines: list[str] = []
        for skip in skips:
            ending = endings.get((skip.source, skip.reason))
            if ending is None:
                line = records.canonical({"reason": skip.reason, "source": name_of(skip, self.task)}).decode()
                ending = endings[skip.source, skip.reason] = f",{line[1:]}\n"
            lines.append(f'{{"position":{skip.position}{ending}')
        self.rejects.write("".join(lines).encode())
