"""Packings: plans of rows, made once and kept beside the dataset, apart from its tokens.

    DATASET/packing/train-best_fit-1024.bin    borders of rows, starts and spans of segments
    DATASET/packing/train-best_fit-1024.json   sealed: what it belongs to, and its digest

A plan follows from the document index, so it can be made again at any time. Ranks that do this at
once write the same bytes. What is damaged, or belongs to another dataset or to other content of the
same one, is made again; where nothing can be written, the plan is used from memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenmill import arguments, records
from tokenmill.data.dataset import Dataset, TokenSplit
from tokenmill.data.pack import Rows, Spans, best_fit, cut, padded
from tokenmill.errors import DatasetError, RecipeError, StorageError
from tokenmill.storage import Digest, Folder
from tokenmill.storage.mapped import fast_digest
from tokenmill.storage.maps import map_file
from tokenmill.storage.output import explained

FOLDER = "packing"
FORMAT = 1
PACKERS: dict[str, Callable[[Spans, int], Rows]] = {"best_fit": best_fit, "padded": padded}
_MAX_RECORD_BYTES = 1 << 16
# Whatever keeps a plan from being read or written, it can be made without.
_IN_THE_WAY = (StorageError, DatasetError, OSError, ValueError)
_MAX_SEQ_LEN = (1 << 31) - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a plan is of. The same one gives the same plan."""

    format: int
    fingerprint: str
    split: str
    kind: str
    seq_len: int
    num_tokens: int
    content: str = ""  # plans of before it was recorded have none, and are made again

    @property
    def name(self) -> str:
        return f"{FOLDER}/{self.split}-{self.kind}-{self.seq_len}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What stands beside a stored plan."""

    spec: Spec
    num_rows: int
    num_segments: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Packing:
    """How the documents of a split lie in rows of `seq_len` inputs; `path` is that of the dataset it is mapped from."""

    spec: Spec
    rows: Rows
    digest: Digest
    path: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes map the file themselves."""
        if self.path is None:
            return Packing, (self.spec, self.rows, self.digest)
        return _open_stored, (self.path, self.record)

    @property
    def record(self) -> Record:
        return Record(spec=self.spec, num_rows=self.num_rows, num_segments=len(self.rows.starts), digest=self.digest)

    @property
    def num_rows(self) -> int:
        return len(self.rows.borders) - 1

    @property
    def waste(self) -> float:
        """The share of positions that are padding."""
        return 1 - self.spec.num_tokens / (self.num_rows * self.spec.seq_len)


def open_packing(dataset: Dataset, split: str, kind: str, seq_len: int) -> Packing:
    """The stored plan of a split; if there is none that can be used, it is made and stored."""
    tokens = dataset[split]
    if not tokens.num_tokens:
        raise RecipeError(f"the split {split!r} has no tokens", hint="use a split with documents")
    spec = Spec(
        format=FORMAT,
        fingerprint=dataset.manifest.fingerprint,
        split=split,
        kind=kind,
        seq_len=seq_len,
        num_tokens=tokens.num_tokens,
        content=records.digest(dataset.pins(split)),
    )
    # A split may bear the name of our folder; nothing but its shards belongs there.
    folder = Folder(dataset.path) if FOLDER not in dataset.splits else None
    if folder is not None and (found := _load(folder, spec)) is not None:
        return found
    rows = pack(tokens, kind, seq_len)
    if folder is not None:
        with contextlib.suppress(*_IN_THE_WAY):
            return _store(folder, spec, rows)
    return Packing(spec, rows, _digest(rows))


def pack(split: TokenSplit, kind: str, seq_len: int) -> Rows:
    """The rows of a split, from its document index."""
    spans = np.concatenate([cut(lengths, seq_len) for lengths in split.document_lengths()])
    return PACKERS[kind](spans, seq_len)


def check_packing(kind: str, seq_len: int) -> int:
    """The seq_len, if rows can be packed in this way."""
    known = f"there are concat, {', '.join(PACKERS)}"
    if arguments.text("packing", kind, hint=known) not in PACKERS:
        raise RecipeError(f"packing {kind!r} is unknown", hint=known)
    most = f"give a number of tokens, from 1 to {_MAX_SEQ_LEN}"
    return arguments.whole("seq_len", seq_len, least=1, most=_MAX_SEQ_LEN, hint=most)


def _load(folder: Folder, spec: Spec) -> Packing | None:
    """A stored plan, mapped, if it is whole and the right one."""
    with contextlib.suppress(*_IN_THE_WAY):
        place = f"{spec.name}.json"
        found = records.unseal(Record, folder.read(place, max_bytes=_MAX_RECORD_BYTES), where=folder.at(place))
        if found.spec == spec and fast_digest(folder, f"{spec.name}.bin") == found.digest:
            return _open_stored(folder.path, found)
    return None


def _store(folder: Folder, spec: Spec, rows: Rows) -> Packing:
    folder.make(FOLDER)
    if (found := _load(folder, spec)) is not None:  # another rank was quicker
        return found
    place, about = f"{spec.name}.bin", f"{spec.name}.json"
    folder.remove_tree(about)
    folder.remove_tree(place)
    output = folder.create(place)
    try:
        for data in _bytes(rows):
            output.write(data)
        digest = folder.publish([output])[place]
    except BaseException:
        output.discard()
        raise
    record = Packing(spec, rows, digest).record
    folder.write(about, records.seal(record))
    return _open_stored(folder.path, record)


def _open_stored(path: str, record: Record) -> Packing:
    """The plan that a record stands beside, mapped."""
    place = os.path.join(path, f"{record.spec.name}.bin")
    with explained(place):
        data = map_file(place, np.uint8)
    starts = 8 * (record.num_rows + 1)
    spans = starts + 8 * record.num_segments
    rows = Rows(data[:starts].view("<i8"), data[starts:spans].view("<i8"), data[spans:].view("<i4"))
    return Packing(record.spec, rows, record.digest, path)


def _digest(rows: Rows) -> Digest:
    sha, size = hashlib.sha256(), 0
    for data in _bytes(rows):
        sha.update(data)
        size += data.nbytes
    return Digest(bytes=size, sha256=sha.hexdigest())


def _bytes(rows: Rows) -> Iterator[memoryview]:
    for array in (rows.borders, rows.starts, rows.spans):
        yield array.astype(array.dtype.newbyteorder("<"), copy=False).data
