"""Rows, for formats that store samples: a row is a document or `seq_len` tokens.

    documents   d d E | d d d E | d E        as long as they are, with the end of text as the dataset has it
    packed      d d E d | d d E d |          all of one length; an incomplete last row is left out

An export reads `TokenRows` and fills its files in order, each with as many whole rows as fit. An import opens files of
rows as a dataset. They are decoded where they are needed, never as a whole:

    RowsFile      rows of tokens in a file, or in a part of one that is decoded at once
    RowsSplit     such files, end to end, as tokens with documents
    RowsDataset   what an import reads

A row is a document, unless all rows have one length: then they may be packed, and the end-of-text id ends documents.
Nothing in an index or a file of another program is used before it was checked.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill import records
from tokenmill.dataset import manifest as manifests
from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
from tokenmill.dataset.dataset import Dataset, Decoder, Starts, TokenSplit
from tokenmill.errors import DatasetError, RecipeError, hint_for
from tokenmill.formats.base import Hints, TokenStream, filled_splits, lengths_by_block
from tokenmill.formats.open import EotEnds, UnknownEnds, describe_splits, pin_files, sample_file
from tokenmill.storage.memory_maps import map_file, open_plain

# Rows are copied more than once, so a block of them should fit into the CPU's cache.
BLOCK_TOKENS = 1 << 18
ROWS_NOTE = "every row is taken as a document"
# Files whose row ends stay in memory.
_CACHED_ENDS = 64
_MAX_INDEX_BYTES = 1 << 30
_COMPLETE = "is the file complete?"


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The rows of a split, in order, in blocks of about `block_tokens` tokens."""

    split: TokenSplit
    seq_len: int | None = None
    block_tokens: int = BLOCK_TOKENS

    @property
    def stream(self) -> TokenStream:
        """Only the end of text separates documents in packed rows, so it is last, where readers expect it."""
        return TokenStream(self.split, "append" if self.seq_len else "")

    @property
    def num_tokens(self) -> int:
        """Tokens in rows."""
        return self.split.num_tokens - self.split.num_tokens % (self.seq_len or 1)

    def lengths(self, start: int, stop: int) -> Iterator[Starts]:
        """The lengths of the rows of a range that they fill, block by block."""
        if self.seq_len is None:
            for lengths in lengths_by_block(self.split, start, stop, block_tokens=self.block_tokens):
                if len(filled := lengths[lengths > 0]):
                    yield filled
            return
        step = max(1, self.block_tokens // self.seq_len)
        count = (stop - start) // self.seq_len
        for first in range(0, count, step):
            yield np.full(min(step, count - first), self.seq_len, np.int64)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[Tokens, Starts]]:
        """Tokens and lengths of the rows of a range, block by block."""
        for lengths in self.lengths(start, stop):
            end = start + int(lengths.sum())
            parts: list[Any] = list(self.stream.blocks(start, end))
            yield parts[0] if len(parts) == 1 else np.concatenate(parts), lengths
            start = end


def rows_of(source: Dataset, seq_len: int | None) -> tuple[dict[str, TokenRows], tuple[str, ...]]:
    """The rows of every split, and notes on what is left out."""
    found = {name: TokenRows(split, seq_len) for name, split in filled_splits(source).items()}
    if seq_len is None:
        return found, ()
    notes = []
    for name, rows in found.items():
        if not rows.num_tokens:
            raise RecipeError(
                f"{name} has {rows.split.num_tokens:,} tokens, which do not fill a row of {seq_len:,}",
                hint="use a smaller `seq_len`",
            )
        if left := rows.split.num_tokens - rows.num_tokens:
            notes.append(f"the last {left:,} tokens of {name} do not fill a row of {seq_len:,}, and are left out")
    return found, tuple(notes)


def cut_by_size(rows: TokenRows, limit: int, cost: Callable[[Starts], Starts]) -> list[tuple[int, int]]:
    """Ranges of tokens for files: each has as many rows as fit into `limit` by their `cost`, and at least one."""
    cuts = [0]
    end, spent = 0, 0  # of the current file: the tokens up to here, and the cost of its rows
    for lengths in rows.lengths(0, rows.num_tokens):
        ends = np.cumsum(lengths) + end
        costs = np.cumsum(cost(lengths))
        first, before = 0, 0
        while True:
            last = int(np.searchsorted(costs, limit - spent + before, side="right"))
            if last == first and not spent:
                last += 1
            if last >= len(ends):
                spent += int(costs[-1]) - before
                break
            cuts.append(int(ends[last - 1]) if last else end)
            first, before, spent = last, int(costs[last - 1]) if last else 0, 0
        end = int(ends[-1])
    return [(start, stop) for start, stop in zip(cuts, [*cuts[1:], end], strict=True) if start < stop]


def interleave(*columns: tuple[npt.NDArray[Any], Starts]) -> memoryview:
    """The bytes of all columns, row by row. A column is an array, and the number of its bytes for each row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = pa.large_binary()

    def strings(data: npt.NDArray[Any], sizes: Starts) -> pa.Array:
        edges = np.concatenate(([0], np.cumsum(sizes)))
        return pa.LargeBinaryArray.from_buffers(kind, len(sizes), [None, pa.py_buffer(edges), pa.py_buffer(data)])

    between = strings(np.empty(0), np.zeros(1, np.int64))[0]  # `pa.scalar` would load pandas
    joined = pc.binary_join_element_wise(*itertools.starmap(strings, columns), between)
    return memoryview(joined.buffers()[2])


class RowsFile(Protocol):
    """Rows of tokens."""

    @property
    def path(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    def ends(self) -> Starts:
        """Where rows end, in tokens of the file."""
        ...

    def blocks(self, first: int, last: int) -> Iterator[Tokens]:
        """The tokens of rows [first, last), in order."""
        ...


class RowsDataset(Dataset):
    """Files of rows as splits. An import passes on the `notes`."""

    def __init__(
        self,
        path: str,
        layout: str,
        files: Mapping[str, Sequence[RowsFile]],
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
        splits = {name: RowsSplit(found, dtype, hints.eot_id, packed) for name, found in files.items()}
        policies = {split.find_policy() for split in splits.values()} if eot is None else {eot}
        policy = policies.pop() if len(policies) == 1 else "none"
        for split in splits.values():
            split.eot = policy
        self._splits = {name: split for name, split in splits.items() if split.num_tokens}
        self._decoder = Decoder(path, {**manifests.UNKNOWN_TOKENIZER, "eot_id": hints.eot_id})
        self.tokens_by_file: dict[str, int] = {}
        for name, found in files.items():
            for file in found:
                key = f"{name}/{os.path.basename(file.path)}"
                self.tokens_by_file[key] = self.tokens_by_file.get(key, 0) + file.num_tokens
        paths = {file.path for found in files.values() for file in found}
        about = {
            "layout": layout,
            "dtype": dtype,
            "eot": policy,
            "eot_id": hints.eot_id,
            "tokens": self.tokens_by_file,
            "files": {os.path.relpath(one, path): sample_file(one) for one in sorted(paths)},
        }
        self.manifest = describe_splits(
            {name: split.num_tokens for name, split in self._splits.items()},
            fingerprint=records.digest(about),
            layout=layout,
            dtype=dtype,
            eot=policy,
            eot_id=hints.eot_id,
        )

    def content(self, split: str) -> str:
        return self.manifest.fingerprint

    def pins(self, *splits: str) -> dict[str, Any]:
        files = [file for name in splits or self.splits for file in self._files[name]]
        paths = {path for file in files for path in (file.path, getattr(file, "index_path", file.path))}
        return {"content": self.manifest.fingerprint, "files": pin_files(paths)}


class RowsSplit(TokenSplit):
    """The tokens of some files, end to end."""

    def __init__(self, files: Sequence[RowsFile], dtype: str, eot_id: int | None, packed: bool) -> None:
        self.dtype = dtype
        self.eot, self.eot_id = "none", eot_id
        self.files = tuple(files)
        self.packed = packed
        self.token_ends = list(accumulate(file.num_tokens for file in files))
        self._ends_of = lru_cache(_CACHED_ENDS)(lambda number: self.files[number].ends())

    @property
    def num_tokens(self) -> int:
        return self.token_ends[-1] if self.files else 0

    def summary(self) -> str:
        """Documents are not counted: that may decode all rows."""
        return f"{self.num_tokens:,} tokens"

    def blocks(self, start: int, stop: int) -> Iterator[Tokens]:
        for number, _, low, high in self._overlaps(start, stop):
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
                    f"{self.files[number].path}: it has {at} tokens, expected {high} or more",
                    hint=_COMPLETE,
                )

    def document_ends(self, start: int, stop: int) -> Starts:
        if self.packed:
            if self.eot_id is None:
                return UnknownEnds(self.files[0].path).between(start, stop)
            return EotEnds(self.blocks, self.num_tokens, self.eot_id, self.eot == "prepend").between(start, stop)
        found = [np.zeros(0, np.int64)]
        for number, begin, low, high in self._overlaps(start, stop):
            ends = self._ends_of(number)
            slots = np.searchsorted(ends, [low, high], side="right").tolist()
            found.append(ends[slots[0] : slots[1]] + begin)
        return np.concatenate(found)

    def find_policy(self) -> str:
        """Where the end of text is in the first document. Packed rows have it after every document."""
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
        """The files that overlap a range: number, first token, and the overlap in tokens of the file."""
        first = int(np.searchsorted(self.token_ends, start, side="right"))
        for number in range(first, len(self.files)):
            begin, end = self.token_ends[number - 1] if number else 0, self.token_ends[number]
            if begin >= stop:
                return
            if begin < end:
                yield number, begin, max(start - begin, 0), min(stop, end) - begin


def are_packed(files: Mapping[str, Sequence[RowsFile]]) -> bool:
    """Whether all rows but the last of a split have one length. Stops at the first row with another length."""
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
    """Ids of any integer type as uint16 or int32. They are checked before they are narrowed."""
    if values.dtype in (np.dtype("<u2"), np.dtype("<i4")):
        return values
    if values.dtype.kind not in "iu":
        raise DatasetError(f"{where}: {values.dtype} values are not ids", hint="ids are integers")
    if len(values) and not (int(values.min()) >= 0 and int(values.max()) < 1 << 31):
        raise DatasetError(f"{where}: ids from {values.min()} to {values.max()}", hint="ids must be below 2^31")
    return values.astype("<i4")


def packed_note(layout: str, eot_id: int | None) -> str:
    return (
        f"all rows of {layout} have one length, so they are taken as packed: documents are recovered from the "
        f"end-of-text id {eot_id}"
    )


def find_indexes(path: str, name: str, layout: str, *, suffix: str) -> dict[str, tuple[str, Any]]:
    """By split, a folder with an index file, and the content of the index. Folders in a folder are splits.

    A folder that has files with this `suffix` but no index is an error.
    """
    folders = {"train": path}
    if not os.path.isfile(f"{path}/{name}"):
        names = [one for one in sorted(os.listdir(path)) if one.isidentifier()] if os.path.isdir(path) else []
        folders = {one: f"{path}/{one}" for one in names if os.path.isfile(f"{path}/{one}/{name}")}
        for one in names:
            if folders and one not in folders and _has_files(f"{path}/{one}", suffix):
                raise DatasetError(
                    f"{path}/{one} has no {name}", hint="is the index missing? Otherwise move the folder away"
                )
    if not folders:
        raise DatasetError(f"{path} has no files of layout {layout}", hint=f"give the folder that contains {name}")
    return {split: (folder, read_index(f"{folder}/{name}")) for split, folder in folders.items()}


def _has_files(folder: str, suffix: str) -> bool:
    return os.path.isdir(folder) and any(name.endswith(suffix) for name in os.listdir(folder))


def read_index(path: str) -> Any:
    """An index in JSON, or in YAML if its name ends with .yaml."""
    try:
        if os.path.getsize(path) > _MAX_INDEX_BYTES:
            raise DatasetError(f"{path} is too large for an index", hint=_COMPLETE)
        with open(path, "rb", opener=open_plain) as file:
            data = file.read()
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}", hint=hint_for(error, "check the path")) from None
    try:
        if not path.endswith(".yaml"):
            return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is not valid JSON: {error}", hint=_COMPLETE) from None
    import yaml

    try:
        return yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is not valid YAML: {error}", hint=_COMPLETE) from None


def known_fields(kind: Any, record: Any) -> Any:
    """A record without the keys that are not fields of a dataclass."""
    if not isinstance(record, dict):
        return record
    return {name: record[name] for name in kind.__dataclass_fields__ if name in record}


def map_bytes(path: str, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped. It must have `size` bytes."""
    data = map_file_bytes(path)
    if len(data) != size:
        raise DatasetError(f"{path}: {len(data)} bytes, expected {size} by the index", hint=_COMPLETE)
    return data


def map_file_bytes(path: str) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped."""
    try:
        return map_file(path, np.uint8)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}", hint=hint_for(error, "check the path")) from None
