"""llm.c and modded-nanogpt: `{name}_val_000000.bin`, `{name}_train_000001.bin`, ...

A shard is 1024 bytes of header (256 numbers: magic, version, tokens, zeros) and the tokens. The end of text stands
first in every document; a document goes on in the next shard. Numbers count on from validation to training.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from tokenmill.data.bare import Hints, open_bare
from tokenmill.data.dataset import Dataset, TokenSplit
from tokenmill.data.finding import LLMC_HEADER_BYTES, LLMC_KINDS
from tokenmill.errors import RecipeError
from tokenmill.layouts.shape import Export, Options, Part, file_part, require_shard_size, train_and_val
from tokenmill.layouts.stream import TokenStream, cut_anywhere

SUMMARY = "shards with llm.c's header, GPT-2's or Llama-3's by the size of the vocabulary"
OPTIONS = frozenset({"name", "shard_size"})
NEEDS = frozenset({"eot"})
WIDTHS = (2, 4)

SHARD_TOKENS = 10**8
MAX_FILE_BYTES = (1 << 31) - 1


def plan(source: Dataset, options: Options) -> Export:
    splits = train_and_val(source, "llmc")
    dtype = source.manifest.dtype
    most = (MAX_FILE_BYTES - LLMC_HEADER_BYTES) // np.dtype(dtype).itemsize
    size = require_shard_size(
        options.shard_size or SHARD_TOKENS, most=most, layout="llmc", why="its readers seek in files below 2 GiB"
    )
    prefix = f"{options.name}_" if options.name else ""
    ranges = [(name, bounds) for name in ("val", "train") for bounds in _ranges(splits, name, size)]
    notes: tuple[str, ...] = ()
    if "val" not in splits:
        if len(ranges) < 2:
            raise RecipeError(
                f"llmc takes the first shard for validation, and there is no other: {size} tokens hold all",
                hint="use a smaller --shard-size, or prepare the dataset with --split val=0.0005",
            )
        notes = (
            f"the dataset has no validation split: its first {size:,} tokens become one, as llm.c's scripts do it",
        )
    parts = []
    for number, (name, bounds) in enumerate(ranges):
        called = "val" if "val" not in splits and number == 0 else name
        parts.append(_part(f"{prefix}{called}_{number:06d}", splits[name], bounds))
    return Export(parts=tuple(parts), notes=notes)


def open(path: str, hints: Hints) -> Dataset:
    return open_bare(path, replace(hints, layout="llmc"))


def _ranges(splits: dict[str, TokenSplit], name: str, size: int) -> list[tuple[int, int]]:
    return cut_anywhere(splits[name].num_tokens, size) if name in splits else []


def _part(name: str, split: TokenSplit, bounds: tuple[int, int]) -> Part:
    start, stop = bounds
    stream = TokenStream(split, "prepend")

    size = LLMC_HEADER_BYTES + (stop - start) * stream.itemsize
    head = header(split.dtype, stop - start)
    return file_part(f"{name}.bin", size, lambda: itertools.chain([head], stream.data(start, stop)))


def header(dtype: str, num_tokens: int) -> bytes:
    """GPT-2's header for uint16 tokens, Llama-3's for 32-bit ones."""
    magic, version = next((magic, kind[0]) for magic, kind in LLMC_KINDS.items() if kind[1] == dtype)
    numbers = np.zeros(LLMC_HEADER_BYTES // 4, "<i4")
    numbers[:3] = magic, version, num_tokens
    return numbers.tobytes()
