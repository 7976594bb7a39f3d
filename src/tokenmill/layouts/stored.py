"""Files that store rows, opened for import: decoded where they are asked for, and never whole.

    StoredFile      rows of tokens in a file, or in a part of one that is decoded at once
    StoredSplit     such files end to end, as tokens with documents
    StoredDataset   what an import takes

A row is a document, unless all have one length: then they may be packed, and the end-of-text id tells documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill import manifest as manifests
from tokenmill import records
from tokenmill.data.bare import Hints, look_at, pin_files
from tokenmill.data.dataset import Dataset, Starts, TokenSplit
from tokenmill.data.ends import EotEnds, NoEnds
from tokenmill.errors import DatasetError
from tokenmill.manifest import Manifest, Split
from tokenmill.shards.layout import Tokens, numpy_dtype

_KEPT_ENDS = 64


class StoredFile(Protocol):
    """Rows of tokens."""

    @property
    def path(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    def ends(self) -> Starts:
        """Where its rows end, in its tokens."""
        ...

    def blocks(self, first: int, last: int) -> Iterator[Tokens]:
        """The tokens of rows [first, last), in order."""
        ...


class StoredDataset(Dataset):
    """Stored rows as splits. `notes` say what was found, and are passed on by an import."""

    def __init__(
        self,
        path: str,
        layout: str,
        files: Mapping[str, Sequence[StoredFile]],
        hints: Hints,
        *,
        dtype: str,
        packed: bool,
        eot: str | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.path = path
        self.notes = tuple(notes)
        self._files = files
        splits = {name: StoredSplit(found, dtype, hints.eot_id, packed) for name, found in files.items()}
        policies = {split.find_policy() for split in splits.values()} if eot is None else {eot}
        policy = policies.pop() if len(policies) == 1 else "none"
        for split in splits.values():
            split.eot = policy
        self._splits = {name: split for name, split in splits.items() if split.num_tokens}
        self.tokens_by_file: dict[str, int] = {}
        for name, found in files.items():
            for file in found:
                key = f"{name}/{os.path.basename(file.path)}"
                self.tokens_by_file[key] = self.tokens_by_file.get(key, 0) + file.num_tokens
        self.manifest = self._describe(layout, dtype, policy, hints.eot_id, {f.path for g in files.values() for f in g})

    def content(self, split: str) -> str:
        return self.manifest.fingerprint

    def pins(self, *splits: str) -> dict[str, Any]:
        files = [file for name in splits or self.splits for file in self._files[name]]
        paths = {path for file in files for path in (file.path, getattr(file, "index_path", file.path))}
        return {"content": self.manifest.fingerprint, "files": pin_files(paths)}

    def _describe(self, layout: str, dtype: str, eot: str, eot_id: int | None, paths: set[str]) -> Manifest:
        about = {
            "layout": layout,
            "dtype": dtype,
            "eot": eot,
            "eot_id": eot_id,
            "tokens": self.tokens_by_file,
            "files": {os.path.relpath(path, self.path): look_at(path) for path in sorted(paths)},
        }
        return Manifest(
            format=manifests.FORMAT,
            fingerprint=records.digest(about),
            identity={"layout": layout, "eot": eot},
            tokenizer={**manifests.UNKNOWN_TOKENIZER, "eot_id": eot_id},
            parity={},
            dtype=dtype,
            splits={
                name: Split(tokens=split.num_tokens, documents=0, shards=()) for name, split in self._splits.items()
            },
            documents_read=0,
            dropped={},
            text_sum="",
            sources=(),
            files={},
        )


class StoredSplit(TokenSplit):
    """The tokens of some files, end to end."""

    def __init__(self, files: Sequence[StoredFile], dtype: str, eot_id: int | None, packed: bool) -> None:
        self.dtype = dtype
        self.eot, self.eot_id = "none", eot_id
        self.files = tuple(files)
        self.packed = packed
        self.token_ends = list(accumulate(file.num_tokens for file in files))
        self._ends_of = lru_cache(_KEPT_ENDS)(lambda number: self.files[number].ends())

    @property
    def num_tokens(self) -> int:
        return self.token_ends[-1] if self.files else 0

    def blocks(self, start: int, stop: int) -> Iterator[Tokens]:
        for number, begin, low, high in self._overlaps(start, stop):
            ends = self._ends_of(number)
            first = int(np.searchsorted(ends, low, side="right"))
            last = int(np.searchsorted(ends, high, side="left")) + 1
            at = int(ends[first - 1]) if first else 0
            for tokens in self.files[number].blocks(first, last):
                part: Any = tokens[max(low - at, 0) : max(high - at, 0)]
                at += len(tokens)
                if len(part):
                    yield part.astype(numpy_dtype(self.dtype), order="C", copy=False)
            if at < high:
                raise DatasetError(
                    f"{self.files[number].path}: {begin + high} tokens should be there, {begin + at} are",
                    hint="is it whole?",
                )

    def document_ends(self, start: int, stop: int) -> Starts:
        if self.packed:
            if self.eot_id is None:
                return NoEnds(self.files[0].path).between(start, stop)
            return EotEnds(self.blocks, self.num_tokens, self.eot_id, self.eot == "prepend").between(start, stop)
        found = [np.zeros(0, np.int64)]
        for number, begin, low, high in self._overlaps(start, stop):
            ends = self._ends_of(number)
            slots = np.searchsorted(ends, [low, high], side="right").tolist()
            found.append(ends[slots[0] : slots[1]] + begin)
        return np.concatenate(found)

    def find_policy(self) -> str:
        """Where the end of text stands in the first document. Packed rows end documents with it."""
        if self.eot_id is None or not self.num_tokens:
            return "none"
        if self.packed:
            return "append"
        number = next(number for number, file in enumerate(self.files) if file.num_tokens)
        ends = self._ends_of(number)
        stop = int(ends[np.searchsorted(ends, 0, side="right")])
        document = np.concatenate(list(self.blocks(0, stop)))
        return "append" if document[-1] == self.eot_id else "prepend" if document[0] == self.eot_id else "none"

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Files that hold a range: number, first token, and the part of the range in tokens of the file."""
        first = int(np.searchsorted(self.token_ends, start, side="right"))
        for number in range(first, len(self.files)):
            begin, end = self.token_ends[number - 1] if number else 0, self.token_ends[number]
            if begin >= stop:
                return
            if begin < end:
                yield number, begin, max(start - begin, 0), min(stop, end) - begin


def are_packed(files: Mapping[str, Sequence[StoredFile]]) -> bool:
    """Have all rows one length, but for the last of a split? Stops at the first that has another."""
    length, num_rows = None, 0
    for found in files.values():
        filled = [file for file in found if file.num_tokens]
        for file in filled:
            lengths = np.diff(file.ends(), prepend=0)
            length = length or int(lengths[0])
            body = lengths[:-1] if file is filled[-1] else lengths
            if (body != length).any() or lengths[-1] > length:
                return False
            num_rows += len(lengths)
    return num_rows > 1


def narrowed(values: npt.NDArray[Any], *, where: str) -> Tokens:
    """Ids of any integer type as ours, which are checked before they are narrowed."""
    if values.dtype in (np.dtype("<u2"), np.dtype("<i4")):
        return values
    if values.dtype.kind not in "iu":
        raise DatasetError(f"{where}: {values.dtype} are no ids", hint="ids are integers")
    if len(values) and not (int(values.min()) >= 0 and int(values.max()) < 1 << 31):
        raise DatasetError(f"{where}: ids from {values.min()} to {values.max()}", hint="ids must be below 2^31")
    return values.astype("<i4")


def packed_note(layout: str, eot_id: int | None) -> str:
    return (
        f"all rows of {layout} have one length, so they are taken for packed ones: documents are recovered from the "
        f"end-of-text id {eot_id}"
    )


ROWS_NOTE = "a row is taken for a document"
