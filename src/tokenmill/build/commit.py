"""Commit: from the receipts of all units to a finished dataset.

    pieces of a split, in order   [large] [small small small] [large] [small large]
    shards                        link    join                link    join

A piece that is a shard as it is gets a second name; others are joined. Then the books are balanced over the whole, and
the manifest is written last.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill import manifest, records
from tokenmill.build import provenance
from tokenmill.build.groups import Group, group_pieces, group_provenance
from tokenmill.build.receipt import PIECES, RECEIPTS, REJECTS, Receipt, hex_sum
from tokenmill.cores import num_cores
from tokenmill.errors import BuildError, DamagedPieceError, Interrupted
from tokenmill.manifest import Manifest, Shard, SourceTotal, Split
from tokenmill.planning import Plan
from tokenmill.shards.layout import parse_index
from tokenmill.shards.writer import ShardWriter
from tokenmill.storage import Digest, Folder
from tokenmill.typed import make_table

T = TypeVar("T")

LINKS_AT_ONCE = 1 << 12
# Files of a store that are on their way at once; each may have megabytes.
PROVENANCE_AHEAD = 16
# Provenance files that are joined at once; each takes some hundred megabytes.
PROVENANCE_AT_ONCE = 8


def commit(
    folder: Folder,
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
) -> Manifest:
    """Shards, provenance and manifest from the receipts. May be run again after any interruption.

    Files that are `intact` stay as they are: their pieces need not be there any more. Shards that are `linked` have
    got their names in this build.
    """
    intact = intact or {}
    totals = {}
    for name in (PIECES, REJECTS, RECEIPTS):
        folder.sync(name)  # files may be there from a build that was killed before it had synced their names
    for name in splits:
        groups = group_pieces(receipts, [name], plan.target_tokens)
        totals[name] = _commit_split(folder, name, groups, dtype, intact, linked)
    files = _commit_provenance(folder, receipts, intact)
    if tokenizer_file is not None:
        files[tokenizer["file"]] = tokenizer_file
    whole = _add_up(receipts)
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
    check_books(plan, receipts, result)
    folder.write_parts(manifest.NAME, records.sealed_parts(result), claimed=lambda: True)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """What receipts come to, taken together. `in_order` if they are those of units 0, 1, 2, ..."""

    units: int
    in_order: bool
    tokens: int
    documents: int
    documents_read: int
    dropped: Counter[str]
    read_sum: str
    written_sum: str


def _add_up(receipts: Iterable[Receipt]) -> _Whole:
    units, in_order, tokens, documents, documents_read = 0, True, 0, 0, 0
    dropped: Counter[str] = Counter()
    read_sum, written_sum = np.zeros(2, np.uint64), np.zeros(2, np.uint64)
    for receipt in receipts:
        in_order = in_order and receipt.unit == units
        units += 1
        tokens += receipt.tokens
        documents += receipt.documents
        documents_read += receipt.documents_read
        dropped.update(receipt.dropped)
        read_sum += _parse_sum(receipt.read_sum)
        written_sum += _parse_sum(receipt.written_sum)
    return _Whole(
        units=units,
        in_order=in_order,
        tokens=tokens,
        documents=documents,
        documents_read=documents_read,
        dropped=dropped,
        read_sum=hex_sum(read_sum),
        written_sum=hex_sum(written_sum),
    )


def check_books(plan: Plan, receipts: Iterable[Receipt], result: Manifest) -> None:
    """The whole must be the sum of its parts; a build that does not balance has no manifest."""
    whole = _add_up(receipts)
    facts = {
        "units in order": (whole.in_order, whole.units <= len(plan.units)),
        "tokens": (result.tokens, whole.tokens),
        "documents": (result.documents, whole.documents),
        "documents read": (result.documents_read, result.documents + sum(result.dropped.values())),
        "text": (result.text_sum, whole.written_sum),
    }
    for what, (found, expected) in facts.items():
        if found != expected:
            raise BuildError(f"the books do not balance: {what}: {found} against {expected}", hint="please report this")


def _commit_split(
    folder: Folder,
    split: str,
    groups: Iterable[Group],
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
    folder: Folder, groups: Iterable[Group], dtype: str, intact: Mapping[str, Digest], linked: Container[str]
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


def _keep(group: Group, intact: Mapping[str, Digest]) -> Shard:
    return Shard(
        name=group.name,
        tokens=sum(piece.tokens for piece in group.pieces),
        documents=sum(piece.documents for piece in group.pieces),
        bin=intact[f"{group.name}.bin"],
        idx=intact[f"{group.name}.idx"],
    )


def _join(folder: Folder, group: Group, dtype: str) -> Shard:
    writer = ShardWriter(folder.create, group.name, dtype)
    try:
        for piece in group.pieces:
            index = folder.read(f"{piece.name}.idx")
            _check_bytes(hashlib.sha256(index), f"{piece.name}.idx", piece.idx)
            _, lengths = parse_index(memoryview(index), bin_bytes=piece.bin.bytes, where=piece.name)
            writer.expect(lengths)
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
    """What is joined must be what the receipt vouches for; a unit that was trusted by its size is not yet."""
    if sha.hexdigest() != wanted.sha256:
        raise DamagedPieceError(f"{name} is not what its receipt says", hint="run the same command again: it is redone")


def _commit_provenance(folder: Folder, receipts: Iterable[Receipt], intact: Mapping[str, Digest]) -> dict[str, Digest]:
    """The files of all provenance, some of them joined side by side: Arrow lets other threads run."""
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
            stopped.set()  # the pool waits for the others
            raise
    return files


def _until(stopped: threading.Event, items: Iterable[T]) -> Iterator[T]:
    for item in items:
        if stopped.is_set():
            raise Interrupted("stopped", hint="run the same command again: it goes on from there")
        yield item


def _join_provenance(folder: Folder, parts: Iterable[tuple[str, Digest]], name: str) -> Digest:
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


def _source_totals(plan: Plan, receipts: Iterable[Receipt]) -> Sequence[SourceTotal]:
    """What came from each source, in the plan's order."""
    documents = np.zeros(len(plan.sources), np.int64)
    sums = np.zeros((len(plan.sources), 2), np.uint64)
    for receipt in receipts:
        first = plan.units[receipt.unit].source
        for index, part in enumerate(receipt.sources, start=first):
            documents[index] += part.documents
            sums[index] += _parse_sum(part.text_sum)
    return make_table(
        SourceTotal,
        (
            SourceTotal(name=source.name, bytes=source.bytes, documents=int(count), text_sum=hex_sum(total))
            for source, count, total in zip(plan.sources, documents, sums, strict=True)
        ),
    )


def _parse_sum(text: str) -> npt.NDArray[np.uint64]:
    return np.array([int(text[:16], 16), int(text[16:], 16)], np.uint64)
