"""Templar: `train_000000.npy` shards of an exact size, `tokens.bin` of all of them, `sample_ids.bin`.

Sample i is tokens [i * T, (i + 1) * T) of the training split, and its id eight bytes of BLAKE2b over them. The
original looked at uint16 tokens as if they were 32 bits wide: its ids stand for two samples each, and those of the
second half for nothing. `templar_compat` writes the same ones. Validation has a folder of its own, with shards alone.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tokenmill.data.bare import Hints, open_bare
from tokenmill.data.dataset import Dataset, TokenSplit
from tokenmill.errors import RecipeError
from tokenmill.layouts.shape import Export, Options, Part, file_part, train_and_val
from tokenmill.layouts.stream import TokenStream, cut_anywhere

SUMMARY = ".npy shards of an exact size, tokens.bin and sample_ids.bin"
OPTIONS = frozenset({"shard_size", "seq_len", "templar_compat"})
NEEDS = frozenset({"eot"})
WIDTHS = (4, 8)

SHARD_TOKENS = 1 << 30
SEQ_LEN = 2048
_SAMPLES = 256


def plan(source: Dataset, options: Options) -> Export:
    splits = train_and_val(source, "templar")
    parts = [
        shard_part(f"{'' if name == 'train' else f'{name}/'}train_{number:06d}.npy", split, bounds)
        for name, split in splits.items()
        for number, bounds in enumerate(cut_anywhere(split.num_tokens, options.shard_size or SHARD_TOKENS))
    ]
    if "train" in splits:
        seq_len = options.seq_len or SEQ_LEN
        parts += consolidated(splits["train"], seq_len, compat=bool(options.templar_compat))
    return Export(parts=tuple(parts))


def open(path: str, hints: Hints) -> Dataset:
    return open_bare(path, replace(hints, layout="templar"))


def shard_part(name: str, split: TokenSplit, bounds: tuple[int, int]) -> Part:
    """A real .npy file."""
    start, stop = bounds
    stream = TokenStream(split, "append")
    held = io.BytesIO()
    about = {"descr": "<u2" if stream.itemsize == 2 else "<u4", "fortran_order": False, "shape": (stop - start,)}
    np.lib.format.write_array_header_1_0(held, about)
    head = held.getvalue()
    size = len(head) + (stop - start) * stream.itemsize
    return file_part(name, size, lambda: itertools.chain([head], stream.data(start, stop)))


def consolidated(split: TokenSplit, seq_len: int, *, compat: bool) -> list[Part]:
    """All tokens end to end, and the ids of all samples."""
    stream = TokenStream(split, "append" if split.eot != "none" else "")
    count = split.num_tokens // seq_len
    if not count:
        raise RecipeError(f"{split.num_tokens} tokens make no sample of {seq_len}", hint="use a smaller --seq-len")
    if compat and stream.itemsize != 2:
        raise RecipeError("the original's ids are those of uint16 tokens", hint="drop --templar-compat")
    size = split.num_tokens * stream.itemsize
    return [
        file_part("tokens.bin", size, lambda: stream.data(0, split.num_tokens)),
        file_part("sample_ids.bin", 8 * count, lambda: sample_ids(stream, seq_len, compat=compat)),
    ]


def sample_ids(stream: TokenStream, seq_len: int, *, compat: bool) -> Iterator[bytes]:
    """The ids of all samples, some at a time."""
    count = stream.num_tokens // seq_len
    # What the original takes for a sample is twice as long; behind the end of the tokens it is empty.
    tokens = 2 * seq_len if compat else seq_len
    whole = stream.num_tokens // 2 * 2 if compat else stream.num_tokens
    for first in range(0, count, _SAMPLES):
        last = min(first + _SAMPLES, count)
        data = b"".join(stream.data(min(first * tokens, whole), min(last * tokens, whole)))
        size = tokens * stream.itemsize
        view = memoryview(data)
        yield b"".join(
            [hashlib.blake2b(view[i * size : (i + 1) * size], digest_size=8).digest() for i in range(last - first)]
        )
