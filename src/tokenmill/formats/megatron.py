"""Megatron-LM: pairs `{split}_text_document.bin` and `.idx`, one or several for a split.

A dataset's own shards are such pairs; an export gives them the names that Megatron's tools expect, and joins them.
In the files of others a document may have several sequences, and an index need not be as regular as tokenmill's.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.bin_idx import HEADER, index_blocks, numpy_dtype, parse_header
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.errors import DatasetError
from tokenmill.formats.base import (
    DetectedFiles,
    Export,
    Facts,
    Files,
    FormatTraits,
    Hints,
    Options,
    OutputPart,
    TokenFile,
    TokenStream,
    check_nothing,
    cut_at_documents,
    filled_splits,
    lengths_by_block,
)
from tokenmill.formats.files import check_pairs, eot_policy, groups_by_name, head_of, mapped, names_in, size_of

TRAITS = FormatTraits(options={"name", "shard_size"}, document_bytes=20)


def detect(path: str, hints: Hints) -> DetectedFiles | None:
    """Pairs of .bin and .idx, given by their prefix, by one of the files, or as a folder of pairs."""
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
    inner_ends: dict[str, list[Any]] = {}
    kinds = set()
    for split, prefixes in groups.items():
        for one in prefixes:
            dtype, file, ends = _read_pair(one)
            kinds.add(dtype)
            files.setdefault(split, []).append(file)
            inner_ends.setdefault(split, []).append(ends)
    if len(kinds) > 1:
        raise DatasetError(f"{path}: pairs of different dtypes: {', '.join(sorted(kinds))}", hint="open one of them")
    (dtype,) = kinds
    eot = eot_policy(files, dtype, hints.eot_id, inner_ends, numpy_dtype(dtype).itemsize)
    return DetectedFiles(
        layout="megatron",
        dtype=dtype,
        eot=eot,
        eot_id=hints.eot_id,
        files=files,
        inner_ends=inner_ends,
        units_per_token=numpy_dtype(dtype).itemsize,
    )


def _read_pair(prefix: str) -> tuple[str, TokenFile, npt.NDArray[np.int64]]:
    """Dtype, tokens, and the byte offsets of all documents except the first, which are the ends of the others."""
    where = f"{prefix}.idx"
    header = parse_header(head_of(where, HEADER.size), where=where, hint="is the file complete?")
    num_sequences, num_bounds = header.num_sequences, header.num_bounds
    if size_of(where) != HEADER.size + 12 * num_sequences + 8 * num_bounds:
        raise DatasetError(f"{where}: its size does not match {num_sequences} sequences", hint="is the file complete?")
    size, itemsize = size_of(f"{prefix}.bin"), numpy_dtype(header.dtype).itemsize
    starts = mapped(where, "<i8", HEADER.size + 4 * num_sequences, num_sequences)
    bounds = mapped(where, "<i8", HEADER.size + 12 * num_sequences, num_bounds)
    lengths = mapped(where, "<i4", HEADER.size, num_sequences)
    if not size or not num_sequences or int(starts[-1]) + int(lengths[-1]) * itemsize != size or starts[0] != 0:
        raise DatasetError(
            f"{where}: its sequences do not fill {prefix}.bin of {size} bytes", hint="is the file complete?"
        )
    if num_bounds == num_sequences + 1:
        inner_ends = starts[1:]  # every sequence is a document
    elif len(bounds) and bounds[0] == 0 and bounds[-1] == num_sequences:
        inner_ends = starts[bounds[1:-1]]
    else:
        raise DatasetError(f"{where}: its documents do not match its sequences", hint="is the file complete?")
    return header.dtype, TokenFile(path=f"{prefix}.bin", offset=0, num_tokens=size // itemsize), inner_ends


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


def _notes(vocab_size: int) -> tuple[str, ...]:
    if vocab_size in range(65_500, 65_537):
        return (f"some of Megatron's tools read a vocabulary of {vocab_size} as uint16, others as int32",)
    return ()


def _part(name: str, split: TokenSplit, bounds: tuple[int, int]) -> OutputPart:
    start, stop = bounds

    def write(files: Files) -> Facts:
        output = files.create(f"{name}.bin")
        for data in TokenStream(split).data(start, stop):
            output.write(data)
        index = files.create(f"{name}.idx")
        for block in index_blocks(split.dtype, lambda: lengths_by_block(split, start, stop)):
            index.write(block)
        return {}

    return OutputPart(name=name, num_bytes=(stop - start) * numpy_dtype(split.dtype).itemsize, write=write)
