"""Megatron-LM: pairs `{split}_text_document.bin` and `.idx`, one a split or several.

A dataset's own shards are such pairs already; this gives them the names that Megatron's tools expect, and joins them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.bin_idx import CODES, HEADER, MAGIC, NAMES, numpy_dtype
from tokenmill.dataset.dataset import Dataset, Starts, TokenSplit
from tokenmill.errors import DatasetError
from tokenmill.formats.base import (
    Export,
    Facts,
    Files,
    FoundFiles,
    Hints,
    Options,
    OutputPart,
    TokenFile,
    TokenStream,
    check_nothing,
    check_pairs,
    cut_at_documents,
    eot_policy,
    filled_splits,
    groups_by_name,
    head_of,
    lengths_by_block,
    mapped,
    names_in,
    size_of,
)
from tokenmill.formats.open import open_in_place


def detect(path: str, hints: Hints) -> FoundFiles | None:
    """Pairs of .bin and .idx: given by prefix, by one of the two, or a folder of them."""
    prefix = path.removesuffix(".idx").removesuffix(".bin")
    if os.path.isfile(f"{prefix}.idx") and not os.path.isdir(path):
        groups = {"train": [prefix]}
    else:
        groups = groups_by_name([f"{path}/{name[:-4]}" for name in names_in(path) if name.endswith(".idx")])
        if groups:
            check_pairs(path, ".bin", ".idx")
    if not groups:
        return None
    files: dict[str, list[TokenFile]] = {}
    inner: dict[str, list[Any]] = {}
    kinds = set()
    for split, prefixes in groups.items():
        for one in prefixes:
            dtype, file, ends = _megatron_pair(one)
            kinds.add(dtype)
            files.setdefault(split, []).append(file)
            inner.setdefault(split, []).append(ends)
    if len(kinds) > 1:
        raise DatasetError(f"{path}: pairs of different dtypes: {', '.join(sorted(kinds))}", hint="open one of them")
    (dtype,) = kinds
    eot = eot_policy(files, dtype, hints.eot_id, inner, numpy_dtype(dtype).itemsize)
    return FoundFiles(
        layout="megatron",
        dtype=dtype,
        eot=eot,
        eot_id=hints.eot_id,
        files=files,
        inner=inner,
        unit=numpy_dtype(dtype).itemsize,
    )


def _megatron_pair(prefix: str) -> tuple[str, TokenFile, npt.NDArray[np.int64]]:
    """Dtype, tokens, and where documents begin (in bytes) but for the first."""
    where = f"{prefix}.idx"
    head = head_of(where, HEADER.size)
    if len(head) < HEADER.size:
        raise DatasetError(f"{where}: too short for an index", hint="is it whole?")
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(head)
    if magic != MAGIC or version != 1 or code not in NAMES:
        raise DatasetError(
            f"{where}: magic {magic!r}, version {version}, dtype code {code}",
            hint="an index of Megatron's with tokens of uint16 or int32 can be read",
        )
    if size_of(where) != HEADER.size + 12 * num_sequences + 8 * num_bounds:
        raise DatasetError(f"{where}: its size does not fit {num_sequences} sequences", hint="is it whole?")
    size, itemsize = size_of(f"{prefix}.bin"), numpy_dtype(NAMES[code]).itemsize
    starts = mapped(where, "<i8", HEADER.size + 4 * num_sequences, num_sequences)
    bounds = mapped(where, "<i8", HEADER.size + 12 * num_sequences, num_bounds)
    lengths = mapped(where, "<i4", HEADER.size, num_sequences)
    if not size or not num_sequences or int(starts[-1]) + int(lengths[-1]) * itemsize != size or starts[0] != 0:
        raise DatasetError(f"{where}: its sequences do not fill {prefix}.bin of {size} bytes", hint="is it whole?")
    if num_bounds == num_sequences + 1:
        inner = starts[1:]  # a sequence is a document
    elif len(bounds) and bounds[0] == 0 and bounds[-1] == num_sequences:
        inner = starts[bounds[1:-1]]
    else:
        raise DatasetError(f"{where}: its documents do not fit its sequences", hint="is it whole?")
    return NAMES[code], TokenFile(path=f"{prefix}.bin", offset=0, num_tokens=size // itemsize), inner


SUMMARY = "pairs of .bin and .idx with the names of Megatron-LM's tools"
OPTIONS = frozenset({"name", "shard_size"})
NEEDS: frozenset[str] = frozenset()
WIDTHS = (2, 4)
DOCUMENT_BYTES = 20

_CHUNK = 1 << 18


check = check_nothing


def write(source: Dataset, options: Options) -> Export:
    parts = []
    for name, split in filled_splits(source).items():
        prefix = f"{options.name}_{name}" if options.name else name
        ranges = cut_at_documents(split, options.shard_size or split.num_tokens)
        for number, bounds in enumerate(ranges):
            shard = f"{prefix}_{number:05d}" if options.shard_size else prefix
            parts.append(_part(f"{shard}_text_document", split, bounds))
    return Export(parts=tuple(parts), notes=_notes(source.manifest.tokenizer["vocab_size"]))


def read(path: str, hints: Hints) -> Dataset:
    return open_in_place(path, replace(hints, layout="megatron"))


def _notes(vocab_size: int) -> tuple[str, ...]:
    if 65_500 <= vocab_size <= 65_536:
        return (f"a vocabulary of {vocab_size} is read as uint16 by some of Megatron's tools and as int32 by others",)
    return ()


def _part(name: str, split: TokenSplit, bounds: tuple[int, int]) -> OutputPart:
    start, stop = bounds

    def write(files: Files) -> Facts:
        output = files.create(f"{name}.bin")
        for data in TokenStream(split).data(start, stop):
            output.write(data)
        index = files.create(f"{name}.idx")
        for block in index_stream(split.dtype, lambda: lengths_by_block(split, start, stop)):
            index.write(block)
        return {}

    return OutputPart(name=name, num_bytes=(stop - start) * numpy_dtype(split.dtype).itemsize, write=write)


def index_stream(dtype: str, lengths: Callable[[], Iterator[Starts]]) -> Iterator[bytes]:
    """The .idx of documents whose lengths can be gone through again and again, so that none need be kept."""
    count = sum(map(len, lengths()))
    itemsize = numpy_dtype(dtype).itemsize
    yield HEADER.pack(MAGIC, 1, CODES[dtype], count, count + 1)
    for some in lengths():
        yield some.astype("<i4").tobytes()
    offset = 0
    for some in lengths():
        ends = np.cumsum(some) * itemsize + offset
        yield np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes()
        offset = int(ends[-1])
    for start in range(0, count + 1, _CHUNK):
        yield np.arange(start, min(start + _CHUNK, count + 1), dtype="<i8").tobytes()
