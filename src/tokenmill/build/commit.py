"""Commit: from the receipts of all units to a finished dataset.

    pieces of a split, in order   [large] [small small small] [large] [small large]
    shards                        link    join                link    join

A piece of `target_tokens` or more becomes a shard by a second name; smaller ones are joined with
their neighbours until they reach it, so a split has at most tokens / target + 1 shards. Then the
books are balanced over the whole, and the manifest is written last.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill import manifest
from tokenmill.build import provenance
from tokenmill.build.receipt import PIECES, RECEIPTS, REJECTS, Receipt, hex_sum
from tokenmill.errors import BuildError, DamagedPieceError
from tokenmill.manifest import Manifest, Shard, SourceTotal, Split
from tokenmill.planning import Plan
from tokenmill.shards.layout import parse_index
from tokenmill.shards.writer import ShardWriter
from tokenmill.storage import Digest, Folder

PROVENANCE_ROWS = 1 << 24


def group_pieces(pieces: Sequence[Shard], target: int) -> Iterator[list[Shard]]:
    """Runs of pieces, each of `target` tokens or more but for the last."""
    held: list[Shard] = []
    for piece in pieces:
        held.append(piece)
        if sum(part.tokens for part in held) >= target:
            yield held
            held = []
    if held:
        yield held


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
) -> Manifest:
    """Shards, provenance and manifest from the receipts. May be run again after any interruption.

    Files that are `intact` stay as they are: their pieces need not be there any more.
    """
    intact = intact or {}
    totals = {}
    for name in (PIECES, REJECTS, RECEIPTS):
        folder.sync(name)  # files may be there from a build that was killed before it had synced their names
    for name in splits:
        pieces = [receipt.pieces[name] for receipt in receipts if name in receipt.pieces]
        totals[name] = _commit_split(folder, name, pieces, plan.target_tokens, dtype, intact)
    files = _commit_provenance(folder, receipts, intact)
    if tokenizer_file is not None:
        files[tokenizer["file"]] = tokenizer_file
    dropped: Counter[str] = Counter()
    for receipt in receipts:
        dropped.update(receipt.dropped)
    result = Manifest(
        format=manifest.FORMAT,
        fingerprint=plan.fingerprint,
        identity=plan.identity,
        tokenizer=tokenizer,
        parity=parity,
        dtype=dtype,
        splits=totals,
        documents_read=sum(receipt.documents_read for receipt in receipts),
        dropped=dict(sorted(dropped.items())),
        text_sum=_sum_of(receipt.read_sum for receipt in receipts),
        sources=_source_totals(plan, receipts),
        files=files,
    )
    check_books(plan, receipts, result)
    folder.write(manifest.NAME, manifest.seal(result), claimed=lambda: True)
    return result


def check_books(plan: Plan, receipts: Sequence[Receipt], result: Manifest) -> None:
    """The whole must be the sum of its parts; a build that does not balance has no manifest."""
    units = [receipt.unit for receipt in receipts]
    facts = {
        "units": (units, [unit.index for unit in plan.units[: len(units)]]),
        "tokens": (result.tokens, sum(receipt.tokens for receipt in receipts)),
        "documents": (result.documents, sum(receipt.documents for receipt in receipts)),
        "documents read": (result.documents_read, result.documents + sum(result.dropped.values())),
        "text": (result.text_sum, _sum_of(receipt.written_sum for receipt in receipts)),
    }
    for what, (found, expected) in facts.items():
        if found != expected:
            raise BuildError(f"the books do not balance: {what}: {found} against {expected}", hint="please report this")


def _commit_split(
    folder: Folder, split: str, pieces: Sequence[Shard], target: int, dtype: str, intact: Mapping[str, Digest]
) -> Split:
    shards, links = [], []
    if pieces:
        folder.make(split)
    for index, group in enumerate(group_pieces(pieces, target)):
        name = f"{split}/{index:05d}"
        if f"{name}.bin" in intact and f"{name}.idx" in intact:
            shards.append(_keep(group, name, intact))
        elif len(group) == 1:
            links += [(f"{group[0].name}{ending}", f"{name}{ending}") for ending in (".bin", ".idx")]
            shards.append(replace(group[0], name=name))
        else:
            shards.append(_join(folder, group, name, dtype))
    folder.link_all(links)
    if pieces:
        folder.sync(split)
    return Split(
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        shards=tuple(shards),
    )


def _keep(pieces: Sequence[Shard], name: str, intact: Mapping[str, Digest]) -> Shard:
    return Shard(
        name=name,
        tokens=sum(piece.tokens for piece in pieces),
        documents=sum(piece.documents for piece in pieces),
        bin=intact[f"{name}.bin"],
        idx=intact[f"{name}.idx"],
    )


def _join(folder: Folder, pieces: Sequence[Shard], name: str, dtype: str) -> Shard:
    writer = ShardWriter(folder.create, name, dtype)
    try:
        for piece in pieces:
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


def group_provenance(receipts: Sequence[Receipt]) -> Iterator[list[Receipt]]:
    """Runs of receipts whose documents share a provenance file."""
    held: list[Receipt] = []
    for receipt in receipts:
        held.append(receipt)
        if sum(part.documents_read for part in held) >= PROVENANCE_ROWS:
            yield held
            held = []
    if held:
        yield held


def _commit_provenance(folder: Folder, receipts: Sequence[Receipt], intact: Mapping[str, Digest]) -> dict[str, Digest]:
    folder.make("provenance")
    files: dict[str, Digest] = {}
    for index, group in enumerate(group_provenance(receipts)):
        name = f"provenance/{index:05d}.parquet"
        files[name] = intact[name] if name in intact else _join_provenance(folder, group, name)
    return files


def _join_provenance(folder: Folder, receipts: Sequence[Receipt], name: str) -> Digest:
    writer = provenance.ProvenanceWriter(folder.create(name))
    try:
        for receipt in receipts:
            data = folder.read(receipt.provenance)
            _check_bytes(hashlib.sha256(data), receipt.provenance, receipt.files[receipt.provenance])
            with pq.ParquetFile(pa.BufferReader(data)) as file:
                for table in provenance.join([file]):
                    writer.write(table)
        return folder.publish([writer.finish()])[name]
    except BaseException:
        writer.discard()
        raise


def _source_totals(plan: Plan, receipts: Sequence[Receipt]) -> tuple[SourceTotal, ...]:
    """What came from each source, in the plan's order."""
    documents: Counter[str] = Counter()
    sums: dict[str, list[str]] = {}
    for receipt in receipts:
        for part in receipt.sources:
            documents[part.name] += part.documents
            sums.setdefault(part.name, []).append(part.text_sum)
    return tuple(
        SourceTotal(
            name=source.name,
            bytes=source.bytes,
            documents=documents[source.name],
            text_sum=_sum_of(sums.get(source.name, [])),
        )
        for source in plan.sources
    )


def _sum_of(parts: Any) -> str:
    total = np.zeros(2, np.uint64)
    for part in parts:
        total += np.array([int(part[:16], 16), int(part[16:], 16)], np.uint64)
    return hex_sum(total)
