"""Megatron-LM: pairs `{split}_text_document.bin` and `.idx`, one a split or several.

A dataset's own shards are such pairs already; this gives them the names that Megatron's tools expect, and joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from tokenmill.data.bare import Hints, open_bare
from tokenmill.data.dataset import Dataset, Starts, TokenSplit
from tokenmill.layouts.shape import Export, Facts, Files, Options, Part, filled_splits
from tokenmill.layouts.stream import TokenStream, cut_at_documents, lengths_by_block
from tokenmill.shards.layout import CODES, HEADER, MAGIC, numpy_dtype

SUMMARY = "pairs of .bin and .idx with the names of Megatron-LM's tools"
OPTIONS = frozenset({"name", "shard_size"})
NEEDS: frozenset[str] = frozenset()
WIDTHS = (2, 4)

_CHUNK = 1 << 18


def plan(source: Dataset, options: Options) -> Export:
    parts = []
    for name, split in filled_splits(source).items():
        prefix = f"{options.name}_{name}" if options.name else name
        ranges = cut_at_documents(split, options.shard_size or split.num_tokens)
        for number, bounds in enumerate(ranges):
            shard = f"{prefix}_{number:05d}" if options.shard_size else prefix
            parts.append(_part(f"{shard}_text_document", split, bounds))
    return Export(parts=tuple(parts), notes=_notes(source.manifest.tokenizer["vocab_size"]))


def open(path: str, hints: Hints) -> Dataset:
    return open_bare(path, replace(hints, layout="megatron"))


def _notes(vocab_size: int) -> tuple[str, ...]:
    if 65_500 <= vocab_size <= 65_536:
        return (f"a vocabulary of {vocab_size} is read as uint16 by some of Megatron's tools and as int32 by others",)
    return ()


def _part(name: str, split: TokenSplit, bounds: tuple[int, int]) -> Part:
    start, stop = bounds

    def write(files: Files) -> Facts:
        output = files.create(f"{name}.bin")
        for data in TokenStream(split).data(start, stop):
            output.write(data)
        index = files.create(f"{name}.idx")
        for block in index_stream(split.dtype, lambda: lengths_by_block(split, start, stop)):
            index.write(block)
        return {}

    return Part(name=name, num_bytes=(stop - start) * numpy_dtype(split.dtype).itemsize, write=write)


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
