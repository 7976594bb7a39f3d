"""One unit's work: from a slice of a source to pieces, provenance and a receipt.

    read -> check UTF-8 -> drop or keep -> hash -> encode -> split -> EOT -> narrow -> write
                                                                             |
    every file durable first, the receipt last  <----------------------------+

It streams: memory depends neither on the unit's size nor on how many there are. The same
function runs in the process, in a pool and on a cluster.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from tokenmill import records
from tokenmill.build import provenance
from tokenmill.build.receipt import (
    NO_LIMIT,
    PIECES,
    REJECTS,
    Receipt,
    check_books,
    hex_sum,
    load_receipt,
    receipt_name,
    unit_name,
)
from tokenmill.build.task import Task, Work
from tokenmill.build.tokens import cut_to, place_eot, select
from tokenmill.errors import BadDocumentError
from tokenmill.filters import load_filter
from tokenmill.manifest import BAD, SourceTotal
from tokenmill.shards.writer import ShardWriter
from tokenmill.sources.batch import Batch, Skip
from tokenmill.sources.reading import read_unit
from tokenmill.storage import Folder, Output, ScratchOutput
from tokenmill.tokenizer.encoded import Encoded, Engine, text_buffers

Report = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class Kept:
    """Documents of a batch that pass, with their hashes; the others are among `skips`."""

    text: pa.Array
    sources: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]
    skips: tuple[Skip, ...]
    skipped_hashes: npt.NDArray[np.uint64]


def run_unit(folder: Folder, work: Work, task: Task, engine: Callable[[], Engine], report: Report) -> Receipt:
    """Do a unit, or find that it is done. `report` hears of documents, tokens and text bytes."""
    return begin_unit(folder, work, task, engine, report)()


def begin_unit(
    folder: Folder, work: Work, task: Task, engine: Callable[[], Engine], report: Report
) -> Callable[[], Receipt]:
    """The part of a unit that computes. Gives the part that waits for the disk, which ends with the receipt."""
    unit, limit = task.unit, task.token_limit
    done = load_receipt(folder, unit.index, limit, work.fingerprint, rehash=True)
    if done is not None:
        report(done.documents_read, done.tokens, unit.text_bytes)
        return lambda: done
    run = _Run(work, task, folder)
    try:
        for batch in read_unit(
            unit,
            [f"{work.root}/{source.name}" for source in task.sources],
            list(task.sources),
            documents=work.documents,
            limit=work.max_document_bytes,
            max_documents=work.max_documents,
        ):
            tokens = run.add(batch, engine())
            report(batch.num_read, tokens, batch.text.nbytes)
    except BaseException:
        run.discard()
        raise
    return run.finish


class _Run:
    """The state of a unit while it streams."""

    def __init__(self, work: Work, task: Task, folder: Folder) -> None:
        self.work, self.task, self.folder = work, task, folder
        self.scratch = Folder(work.scratch, folder.fs) if work.scratch else None
        self.name = unit_name(task.unit.index, task.token_limit)
        self.pieces = {
            split: ShardWriter(self.create, f"{PIECES}/{self.name}.{split}", work.dtype) for split in work.split_names
        }
        self.rejects: Output | None = None
        self.keep = load_filter(work.filter) if work.filter else None
        self.documents_read = 0
        self.dropped: Counter[str] = Counter()
        self.read_sum = np.zeros(2, np.uint64)
        self.written_sum = np.zeros(2, np.uint64)
        self.source_sums = np.zeros((len(task.sources), 2), np.uint64)
        self.source_documents = np.zeros(len(task.sources), np.int64)
        self.provenance = provenance.ProvenanceWriter(self.create(f"{PIECES}/{self.name}.provenance.parquet"))

    def create(self, name: str) -> Output:
        return ScratchOutput(self.scratch, self.folder, name) if self.scratch else self.folder.create(name)

    def add(self, batch: Batch, engine: Engine) -> int:
        """Take a batch all the way to the pieces; gives the number of tokens."""
        kept = self._keep(batch)
        encoded = engine.encode(kept.text) if len(kept.text) else Encoded(np.zeros(0, np.uint32), np.zeros(0, np.int64))
        kept, encoded = self._with_tokens(kept, encoded)
        kept, encoded = self._within_budget(kept, encoded)
        splits = self._splits(kept)
        has_eot = self.work.eot != "none"
        total = 0
        for code, writer in enumerate(self.pieces.values()):
            chosen = splits == code
            if not chosen.any():
                continue
            part = select(encoded, chosen)
            tokens = place_eot(
                part,
                eot=self.work.eot,
                eot_id=self.work.eot_id,
                vocab_size=self.work.vocab_size,
                dtype=self.work.dtype,
            )
            writer.write(tokens, part.lengths + int(has_eot))
            self.written_sum += kept.hashes[chosen].sum(axis=0, dtype=np.uint64)
            total += len(tokens)
        self._record(batch, kept, encoded.lengths + int(has_eot), splits)
        return total

    def finish(self) -> Receipt:
        """Publish everything, then the receipt."""
        try:
            return self._publish()
        except BaseException:
            self.discard()
            raise

    def _publish(self) -> Receipt:
        work, unit = self.work, self.task.unit
        name = receipt_name(unit.index, self.task.token_limit)
        outputs = [output for writer in self.pieces.values() for output in writer.outputs()]
        extra = [self.provenance.finish(), *([self.rejects] if self.rejects else [])]
        digests = self.folder.publish(outputs + extra, claimed=lambda: self.folder.exists(name))
        receipt = Receipt(
            fingerprint=work.fingerprint,
            unit=unit.index,
            token_limit=self.task.token_limit,
            documents_read=self.documents_read,
            dropped=dict(sorted(self.dropped.items())),
            pieces={split: writer.describe(digests) for split, writer in self.pieces.items() if writer.tokens},
            sources=tuple(
                SourceTotal(name=source.name, bytes=source.bytes, documents=int(count), text_sum=hex_sum(total))
                for source, count, total in zip(self.task.sources, self.source_documents, self.source_sums, strict=True)
            ),
            read_sum=hex_sum(self.read_sum),
            written_sum=hex_sum(self.written_sum),
            files={output.name: digests[output.name] for output in extra},
        )
        check_books(receipt)
        self.folder.write(name, records.seal(receipt), claimed=lambda: True)
        return receipt

    def discard(self) -> None:
        for writer in self.pieces.values():
            writer.discard()
        self.provenance.discard()
        if self.rejects is not None:
            self.rejects.discard()

    def _keep(self, batch: Batch) -> Kept:
        reasons = list(_reasons(batch.text, self.work, self.keep))
        bad = np.zeros(len(batch.text), np.bool_)
        skips = list(batch.skips)
        for reason, found in reasons:
            fresh = found & ~bad
            bad |= found
            skips += [Skip(int(batch.sources[i]), int(batch.positions[i]), reason) for i in np.flatnonzero(fresh)]
        skips.sort(key=lambda skip: (skip.source, skip.position))
        hashes = hash_documents(batch.text)
        self.read_sum += hashes.sum(axis=0, dtype=np.uint64)
        if not bad.any():
            return Kept(batch.text, batch.sources, batch.positions, hashes, tuple(skips), hashes[:0])
        whole = Kept(batch.text, batch.sources, batch.positions, hashes, tuple(skips), hashes[:0])
        return _without(whole, bad, ())

    def _with_tokens(self, kept: Kept, encoded: Encoded) -> tuple[Kept, Encoded]:
        """Without an end of text, a document that encodes to nothing would leave no trace: it is dropped."""
        has_tokens = encoded.lengths > 0
        if self.work.eot != "none" or has_tokens.all():
            return kept, encoded
        return _drop(kept, ~has_tokens, "no_tokens"), Encoded(encoded.ids, encoded.lengths[has_tokens])

    def _within_budget(self, kept: Kept, encoded: Encoded) -> tuple[Kept, Encoded]:
        if self.task.token_limit == NO_LIMIT:
            return kept, encoded
        room = self.task.token_limit - sum(writer.tokens for writer in self.pieces.values())
        has_eot = self.work.eot != "none"
        if len(encoded.ids) + has_eot * len(encoded.lengths) <= room:
            return kept, encoded
        cut = cut_to(encoded, room=room, eot=has_eot) if room else Encoded(encoded.ids[:0], encoded.lengths[:0])
        return _drop(kept, np.arange(len(kept.text)) >= len(cut.lengths), "over_budget"), cut

    def _splits(self, kept: Kept) -> npt.NDArray[np.int8]:
        """The split of every document: by its source, or by its content, so that copies stay together."""
        names = self.work.split_names
        first = self.task.unit.source
        if any(source.split for source in self.task.sources):
            by_source = np.array([names.index(source.split or "train") for source in self.task.sources], np.int8)
            return by_source[kept.sources - first]
        splits = np.zeros(len(kept.text), np.int8)
        keys = kept.hashes[:, 0] ^ np.uint64(_mixed(self.work.seed))
        low = 0.0
        for name, share in self.work.split.items():
            bounds = [np.uint64(min(int(edge * 2**64), 2**64 - 1)) for edge in (low, low + share)]
            splits[(keys >= bounds[0]) & (keys < bounds[1])] = names.index(name)
            low += share
        return splits

    def _record(self, batch: Batch, kept: Kept, tokens: npt.NDArray[np.int64], splits: npt.NDArray[np.int8]) -> None:
        first = self.task.unit.source
        self.documents_read += batch.num_read
        self.written_sum += kept.skipped_hashes.sum(axis=0, dtype=np.uint64)
        self.dropped.update(skip.reason for skip in kept.skips)
        self._reject([skip for skip in kept.skips if skip.reason in BAD])
        np.add.at(self.source_sums, kept.sources - first, kept.hashes)
        self.source_documents += np.bincount(kept.sources - first, minlength=len(self.task.sources))
        self.provenance.write(
            provenance.rows(
                names=[source.name for source in self.task.sources],
                first_source=first,
                sources=kept.sources,
                positions=kept.positions,
                splits=splits,
                split_names=self.work.split_names,
                tokens=tokens,
                skips=kept.skips,
            )
        )

    def _reject(self, skips: list[Skip]) -> None:
        for skip in skips:
            name = self.task.sources[skip.source - self.task.unit.source].name
            if self.work.on_bad == "fail":
                raise BadDocumentError(
                    f"{name} at {skip.position}: {skip.reason.replace('_', ' ')}",
                    hint="mend the document, or drop --on-bad fail to quarantine it and go on",
                )
            if self.rejects is None:
                self.rejects = self.create(f"{REJECTS}/{self.name}.jsonl")
            line = {"source": name, "position": skip.position, "reason": skip.reason}
            self.rejects.write(records.canonical(line) + b"\n")


def _drop(kept: Kept, dropped: npt.NDArray[np.bool_], reason: str) -> Kept:
    """Some documents turned into skips."""
    places = zip(kept.sources[dropped].tolist(), kept.positions[dropped].tolist(), strict=True)
    return _without(kept, dropped, tuple(Skip(source, position, reason) for source, position in places))


def _without(kept: Kept, dropped: npt.NDArray[np.bool_], skips: tuple[Skip, ...]) -> Kept:
    good = ~dropped
    return Kept(
        kept.text.filter(pa.array(good)),
        kept.sources[good],
        kept.positions[good],
        kept.hashes[good],
        kept.skips + skips,
        np.concatenate((kept.skipped_hashes, kept.hashes[dropped])),
    )


def _reasons(
    text: pa.Array, work: Work, keep: Callable[[str], bool] | None
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Why documents are dropped, and which; only reasons that occur."""
    offsets, _ = text_buffers(text)
    lengths = np.diff(offsets)
    invalid = _invalid_utf8(text)
    if invalid.any():
        yield "invalid_utf8", invalid
        valid = pc.if_else(pa.array(invalid), pa.scalar("", text.type), text)
    else:
        valid = text
    candidates = {"empty": lengths == 0, "too_large": lengths > work.max_document_bytes}
    if work.min_chars:
        candidates["too_short"] = pc.utf8_length(valid).to_numpy() < work.min_chars
    for reason, found in candidates.items():
        if found.any():
            yield reason, found
    if keep is not None:
        standing = ~np.logical_or.reduce([invalid, *candidates.values()])
        wanted = iter(valid.filter(pa.array(standing)).to_pylist())
        yield "filtered", np.array([stands and not keep(next(wanted)) for stands in standing.tolist()], np.bool_)


def _invalid_utf8(text: pa.Array) -> npt.NDArray[np.bool_]:
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        binary = pa.large_binary() if pa.types.is_large_string(text.type) else pa.binary()
        return np.array([not _is_utf8(document) for document in text.view(binary).to_pylist()], np.bool_)
    return np.zeros(len(text), np.bool_)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def hash_documents(text: pa.Array) -> npt.NDArray[np.uint64]:
    """A 128-bit hash of every document, as two columns."""
    offsets, data = text_buffers(text)
    view = data.data
    digest = xxhash.xxh3_128_digest
    bounds = offsets.tolist()
    joined = b"".join([digest(view[a:b]) for a, b in itertools.pairwise(bounds)])
    return np.frombuffer(joined, ">u8").astype(np.uint64).reshape(-1, 2)


def _mixed(seed: int) -> int:
    """The seed spread over 64 bits; seed 0 changes nothing."""
    return xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little")) if seed else 0
