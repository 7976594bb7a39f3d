"""Commit: makes shards of the pieces of all units, then writes the manifest.

    pieces of a split, in order   [large] [small small small] [large] [small large]
    shards                        0       1                   2       3
                                  link    join                link    join

A piece of at least `target` tokens becomes a shard as it is, by a hard link. Smaller pieces are joined with their
neighbours until they reach the target, so a split has at most tokens / target + 1 shards. Then the totals are checked,
and the manifest is written last.

An object store has no links: it copies, which takes time. So shards that are complete are copied while other units
still run. This is only a head start: the commit copies every shard that is not known to be `linked`, so errors here
are ignored.

    units    0 done   1 done   2 done   3 running   4 done
    shards   copied   copied   copied               waits: unit 3 decides to which shard it belongs
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill import records
from tokenmill.build.plan import Plan
from tokenmill.dataset import manifest, provenance
from tokenmill.dataset.bin_idx import ShardWriter, numpy_dtype, parse_index
from tokenmill.dataset.manifest import Manifest, Shard, SourceTotal, Split
from tokenmill.dataset.statistics import (
    STATISTICS,
    SplitStatistics,
    UnitStatistics,
    add_up,
    count_in_shards,
    write_statistics,
)
from tokenmill.errors import BuildError, DamagedPieceError, Interrupted, TokenmillError
from tokenmill.records import make_table
from tokenmill.resources import num_cores
from tokenmill.storage.base import Storage
from tokenmill.storage.output import Digest
from tokenmill.units.receipts import (
    NO_LIMIT,
    PIECES,
    RECEIPTS,
    REJECTS,
    Key,
    Receipt,
    hex_sum,
    hex_sums,
    parse_sums,
    read_receipt,
    receipt_name,
)

T = TypeVar("T")

LINKS_AT_ONCE = 1 << 12
# Files of an object store that are read at once; each may have megabytes.
PROVENANCE_AHEAD = 16
# Provenance files that are joined at once; each takes some hundred megabytes of memory.
PROVENANCE_AT_ONCE = 8


def commit(
    folder: Storage,
    plan: Plan,
    receipts: Sequence[Receipt],
    *,
    splits: Sequence[str],
    dtype: str,
    tokenizer: dict[str, Any],
    tokenizer_file: Digest | None,
    parity: dict[str, Any],
    intact: Mapping[str, Digest] | None = None,
    linked: Container[str] = (),
    with_statistics: bool = True,
    recount: bool = False,
) -> Manifest:
    """Shards, provenance, statistics and manifest from the receipts. May be run again after any interruption.

    Files that are `intact` stay as they are; their pieces may be gone. Shards in `linked` got their final names earlier
    in this build. Receipts of older versions have no statistics; then the dataset has none either. `recount`
    counts the frequencies of tokens again, after which the manifest may be another one.
    """
    intact = intact or {}
    totals = {}
    for name in (PIECES, REJECTS, RECEIPTS):
        folder.sync(name)  # a build that was killed may have left names that were never synced
    for name in splits:
        groups = group_pieces(receipts, [name], plan.target_tokens)
        totals[name] = _commit_split(folder, name, groups, dtype, intact, linked)
    files = _commit_provenance(folder, receipts, intact)
    if tokenizer_file is not None:
        files[tokenizer["file"]] = tokenizer_file
    whole = total_of(receipts)
    if with_statistics and STATISTICS in intact and not recount:
        files[STATISTICS] = intact[STATISTICS]
    elif with_statistics and whole.have_statistics:
        files[STATISTICS] = _commit_statistics(
            folder,
            plan,
            receipts,
            dropped=whole.dropped,
            splits=totals,
            dtype=dtype,
            vocab_size=tokenizer["vocab_size"],
        )
    result = Manifest(
        format=manifest.FORMAT,
        fingerprint=plan.fingerprint,
        identity=plan.identity,
        tokenizer=tokenizer,
        parity=parity,
        dtype=dtype,
        splits=totals,
        documents_read=whole.documents_read,
        dropped=dict(sorted(whole.dropped.items())),
        text_sum=whole.read_sum,
        sources=_source_totals(plan, receipts),
        files=files,
    )
    check_totals(plan, receipts, result)
    folder.write_parts(manifest.MANIFEST, records.sealed_parts(result), committed=lambda: not recount)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptTotals:
    """The totals of receipts. `in_order` says whether they are those of units 0, 1, 2, ..."""

    units: int
    in_order: bool
    tokens: int
    documents: int
    documents_read: int
    dropped: Counter[str]
    read_sum: str
    written_sum: str
    have_statistics: bool


def total_of(receipts: Iterable[Receipt]) -> ReceiptTotals:
    """The totals of units."""
    units, in_order, have_statistics, tokens, documents, documents_read = 0, True, True, 0, 0, 0
    dropped: Counter[str] = Counter()
    read_sum, written_sum = np.zeros(2, np.uint64), np.zeros(2, np.uint64)
    for receipt in receipts:
        in_order = in_order and receipt.unit == units
        have_statistics = have_statistics and receipt.statistics is not None
        units += 1
        tokens += receipt.tokens
        documents += receipt.documents
        documents_read += receipt.documents_read
        dropped.update(receipt.dropped)
        read_sum += parse_sums([receipt.read_sum])[0]
        written_sum += parse_sums([receipt.written_sum])[0]
    return ReceiptTotals(
        units=units,
        in_order=in_order,
        tokens=tokens,
        documents=documents,
        documents_read=documents_read,
        dropped=dropped,
        read_sum=hex_sum(read_sum),
        written_sum=hex_sum(written_sum),
        have_statistics=have_statistics,
    )


def check_totals(plan: Plan, receipts: Iterable[Receipt], result: Manifest) -> None:
    """Raise unless the totals of the dataset equal those of its units. The manifest is written after this check."""
    whole = total_of(receipts)
    facts = {
        "units in order": (whole.in_order, whole.units <= len(plan.units)),
        "tokens": (result.tokens, whole.tokens),
        "documents": (result.documents, whole.documents),
        "documents read": (result.documents_read, result.documents + sum(result.dropped.values())),
        "text": (result.text_sum, whole.written_sum),
    }
    for what, (found, expected) in facts.items():
        if found != expected:
            raise BuildError(f"the totals do not agree: {what}: {found} against {expected}", hint="please report this")


def _commit_split(
    folder: Storage,
    split: str,
    groups: Iterable[ShardGroup],
    dtype: str,
    intact: Mapping[str, Digest],
    linked: Container[str],
) -> Split:
    shards = make_table(Shard, _commit_shards(folder, groups, dtype, intact, linked))
    if shards:
        folder.sync(split)
    return Split(
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        shards=shards,
    )


def _commit_shards(
    folder: Storage, groups: Iterable[ShardGroup], dtype: str, intact: Mapping[str, Digest], linked: Container[str]
) -> Iterator[Shard]:
    links: list[tuple[str, str, Digest]] = []
    for group in groups:
        if not group.number:
            folder.make(group.split)
        if f"{group.name}.bin" in intact and f"{group.name}.idx" in intact:
            yield _keep(group, intact)
        elif len(group.pieces) == 1:
            links += group.links() if group.name not in linked else []
            yield replace(group.pieces[0], name=group.name)
        else:
            yield _join(folder, group, dtype)
        if len(links) >= LINKS_AT_ONCE:
            folder.link_all(links)
            links.clear()
    folder.link_all(links)


def _keep(group: ShardGroup, intact: Mapping[str, Digest]) -> Shard:
    return Shard(
        name=group.name,
        tokens=sum(piece.tokens for piece in group.pieces),
        documents=sum(piece.documents for piece in group.pieces),
        bin=intact[f"{group.name}.bin"],
        idx=intact[f"{group.name}.idx"],
    )


def _join(folder: Storage, group: ShardGroup, dtype: str) -> Shard:
    writer = ShardWriter(folder.create, group.name, dtype)
    try:
        for piece in group.pieces:
            index = folder.read(f"{piece.name}.idx")
            _check_bytes(hashlib.sha256(index), f"{piece.name}.idx", piece.idx)
            _, lengths = parse_index(memoryview(index), bin_bytes=piece.bin.bytes, where=piece.name)
            writer.add_lengths(lengths)
            sha = hashlib.sha256()
            for block in folder.blocks(f"{piece.name}.bin"):
                sha.update(block)
                writer.append(block)
            _check_bytes(sha, f"{piece.name}.bin", piece.bin)
        shard = writer.describe(folder.publish(writer.outputs()))
    except BaseException:
        writer.discard()
        raise
    return shard


def _check_bytes(sha: hashlib._Hash, name: str, wanted: Digest) -> None:
    """Raise unless the bytes are those of the receipt. Before this, only their size may have been checked."""
    if sha.hexdigest() != wanted.sha256:
        raise DamagedPieceError(
            f"{name} does not match its receipt", hint="run the same command again: it replays the unit"
        )


def _commit_provenance(folder: Storage, receipts: Iterable[Receipt], intact: Mapping[str, Digest]) -> dict[str, Digest]:
    """All provenance files, some of them joined concurrently: Arrow releases the interpreter lock."""
    stopped = threading.Event()

    def join(group: tuple[str, list[tuple[str, Digest]]]) -> tuple[str, Digest]:
        name, parts = group
        return name, intact[name] if name in intact else _join_provenance(folder, _until(stopped, parts), name)

    folder.make("provenance")
    groups = (
        (f"provenance/{index:05d}.parquet", [(one.provenance, one.files[one.provenance]) for one in group])
        for index, group in enumerate(group_provenance(receipts))
    )
    files: dict[str, Digest] = {}
    at_once = min(num_cores(), PROVENANCE_AT_ONCE)
    with ThreadPoolExecutor(at_once, thread_name_prefix="tokenmill-provenance") as pool:
        try:
            while some := list(itertools.islice(groups, at_once)):
                files.update(pool.map(join, some) if len(some) > 1 else map(join, some))
        except BaseException:
            stopped.set()  # the pool waits for its threads
            raise
    return files


def _until(stopped: threading.Event, items: Iterable[T]) -> Iterator[T]:
    for item in items:
        if stopped.is_set():
            raise Interrupted("interrupted", hint="run the same command to resume")
        yield item


def _join_provenance(folder: Storage, parts: Iterable[tuple[str, Digest]], name: str) -> Digest:
    def read(part: tuple[str, Digest]) -> bytes:
        place, digest = part
        data = folder.read(place)
        _check_bytes(hashlib.sha256(data), place, digest)
        return data

    writer = provenance.ProvenanceWriter(folder.create(name))
    try:
        for data in folder.each(read, parts, ahead=PROVENANCE_AHEAD):
            with pq.ParquetFile(pa.BufferReader(data)) as file:
                for table in provenance.join([file]):
                    writer.write(table)
        return folder.publish([writer.finish()])[name]
    except BaseException:
        writer.discard()
        raise


def _commit_statistics(
    folder: Storage,
    plan: Plan,
    receipts: Iterable[Receipt],
    *,
    dropped: dict[str, int],
    splits: dict[str, Split],
    dtype: str,
    vocab_size: int,
) -> Digest:
    """The statistics of all units together, and the frequencies of tokens in the shards."""

    def units() -> Iterator[tuple[int, UnitStatistics]]:
        for receipt in receipts:
            assert receipt.statistics is not None, "the caller has seen that every receipt has some"
            yield plan.units[receipt.unit].source, receipt.statistics

    with_frequencies = add_up(len(plan.sources), tuple(splits), dropped, units())
    found = with_frequencies(count_in_shards(folder, splits, numpy_dtype(dtype), vocab_size))
    for name, split in splits.items():
        _check_statistics(name, split, found.splits[name])
    return write_statistics(folder, found)


def _check_statistics(name: str, split: Split, found: SplitStatistics) -> None:
    """Raise unless the statistics of a split have as many documents and tokens as its shards."""
    for what, counted, expected in (
        ("documents", sum(found.documents), split.documents),
        ("tokens", sum(found.tokens), split.tokens),
    ):
        if counted != expected:
            raise BuildError(
                f"the totals do not agree: {what} of {name} in the statistics: {counted} against {expected}",
                hint="please report this",
            )


def _source_totals(plan: Plan, receipts: Iterable[Receipt]) -> Sequence[SourceTotal]:
    """The totals of each source, in the order of the plan."""
    documents = np.zeros(len(plan.sources), np.int64)
    sums = np.zeros((len(plan.sources), 2), np.uint64)
    for receipt in receipts:
        first = plan.units[receipt.unit].source
        stop = first + len(receipt.sources)
        documents[first:stop] += [part.documents for part in receipt.sources]
        sums[first:stop] += parse_sums(part.text_sum for part in receipt.sources)
    return records.make_table(
        SourceTotal,
        (
            SourceTotal(name=source.name, bytes=source.bytes, documents=count, text_sum=text_sum)
            for source, count, text_sum in zip(plan.sources, documents.tolist(), hex_sums(sums), strict=True)
        ),
    )


PROVENANCE_ROWS = 1 << 24
PROVENANCE_UNITS = 1 << 16


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """The pieces of a shard, and the units that they come from."""

    split: str
    number: int
    keys: list[Key] = field(default_factory=list)
    pieces: list[Shard] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.split}/{self.number:05d}"

    def links(self) -> list[tuple[str, str, Digest]]:
        """The files of a piece that becomes a shard as it is, with their new names. Joined pieces have none."""
        return [
            (f"{piece.name}{ending}", f"{self.name}{ending}", digest)
            for piece in self.pieces
            for ending, digest in ((".bin", piece.bin), (".idx", piece.idx))
            if len(self.pieces) == 1
        ]


def group_pieces(receipts: Iterable[Receipt], splits: Iterable[str], target: int) -> Iterator[ShardGroup]:
    """The shards of some splits, each as soon as it has `target` tokens; the rest of each split comes last."""
    open_groups = {split: ShardGroup(split, 0) for split in splits}
    tokens = dict.fromkeys(open_groups, 0)
    for receipt in receipts:
        for split, piece in receipt.pieces.items():
            group = open_groups.get(split)
            if group is None:
                continue
            group.keys.append(receipt.key)
            group.pieces.append(piece)
            tokens[split] += piece.tokens
            if tokens[split] >= target:
                yield group
                open_groups[split], tokens[split] = ShardGroup(split, group.number + 1), 0
    yield from (group for group in open_groups.values() if group.pieces)


def group_provenance(receipts: Iterable[Receipt]) -> Iterator[Iterator[Receipt]]:
    """Runs of receipts whose documents share a provenance file. A run is valid until the next one is asked for."""

    def numbered() -> Iterator[tuple[int, Receipt]]:
        number = units = rows = 0
        for receipt in receipts:
            yield number, receipt
            units, rows = units + 1, rows + receipt.documents_read
            if rows >= PROVENANCE_ROWS or units == PROVENANCE_UNITS:
                number, units, rows = number + 1, 0, 0

    for _, group in itertools.groupby(numbered(), key=lambda item: item[0]):
        yield (receipt for _, receipt in group)


# The store does the work.
SHARDS_AT_ONCE = 256
_RECEIPTS_AT_ONCE = 64


@contextlib.contextmanager
def copying_eagerly(
    folder: Storage, plan: Plan, splits: Sequence[str], done: Container[int], linked: set[str]
) -> Iterator[Callable[[], None]]:
    """Copy shards of an object store while units run. Yields a function to call when another unit is `done`."""
    # A token budget leaves units out, and which ones is known only at the end.
    if folder.links_are_free or plan.identity.get("max_tokens") is not None:
        yield lambda: None
        return
    follower = _Follower(folder, plan, splits, done, linked)
    thread = threading.Thread(target=follower.follow, name="tokenmill-copy", daemon=True)
    thread.start()
    try:
        yield follower.wake
    except BaseException:
        follower.stop()  # do not delay shutdown
        raise
    follower.stop()
    thread.join()


class _Follower:
    """Follows the completed units in the order of the plan, and copies their shards."""

    def __init__(
        self, folder: Storage, plan: Plan, splits: Sequence[str], done: Container[int], linked: set[str]
    ) -> None:
        self._folder, self._plan, self._splits, self._done, self._linked = folder, plan, splits, done, linked
        self._changed = threading.Condition()
        self._stopped = False

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def stop(self) -> None:
        self._stopped = True
        self.wake()

    def follow(self) -> None:
        slots = threading.Semaphore(SHARDS_AT_ONCE)
        with contextlib.suppress(TokenmillError), ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
            for group in group_pieces(self._receipts(), self._splits, self._plan.target_tokens):
                if self._stopped:  # this group may be incomplete
                    return
                slots.acquire()
                copying = pool.submit(self._link, group)
                copying.add_done_callback(lambda _: slots.release())

    def _link(self, group: ShardGroup) -> None:
        links = group.links()
        for link in links:
            if self._stopped:
                return
            self._folder.link(*link)
        if links:
            self._linked.add(group.name)

    def _receipts(self) -> Iterator[Receipt]:
        unit, last = 0, len(self._plan.units)
        while unit < last:
            with self._changed:
                self._changed.wait_for(partial(self._is_ready, unit))
            if self._stopped:
                return
            run = list(takewhile(self._done.__contains__, range(unit, min(unit + _RECEIPTS_AT_ONCE, last))))
            yield from self._folder.each(self._read, run)
            unit += len(run)

    def _read(self, unit: int) -> Receipt:
        return read_receipt(self._folder, receipt_name(unit, NO_LIMIT))

    def _is_ready(self, unit: int) -> bool:
        return self._stopped or unit in self._done
