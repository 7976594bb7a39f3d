"""Mosaic streaming: `{split}/shard.00000.mds` and `{split}/index.json`, samples with a column of tokens.

    u32 n; u32[n + 1] offsets from the beginning of the file; a description as JSON; n samples
    a sample of any length   u32 size; u8 4 | log2 w; its length in w bytes; int32 tokens
    a packed one             int32 tokens: the description has their number

A sample is a document, or with `--seq-len` that many tokens. The files are those that MDSWriter makes of the same
samples with `hashes=["sha256"]` and a size limit of four bytes a token, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenmill.data.bare import Hints
from tokenmill.data.dataset import Dataset, Starts
from tokenmill.errors import RecipeError
from tokenmill.layouts.mds_files import open_mds
from tokenmill.layouts.rows import Rows, cut_by_size, interleave, rows_of
from tokenmill.layouts.shape import Export, Facts, Files, Options, Part, Receipt, require_shard_size
from tokenmill.shards.layout import Tokens

SUMMARY = "shards of Mosaic's streaming datasets, a sample a document or packed ones"
OPTIONS = frozenset({"shard_size", "seq_len"})
NEEDS: frozenset[str] = frozenset()
WIDTHS = (4, 4)

SHARD_TOKENS = 1 << 24
_MAX_BYTES = (1 << 32) - 1
_WHY = "offsets have 32 bits"


def plan(source: Dataset, options: Options) -> Export:
    size = require_shard_size(options.shard_size or SHARD_TOKENS, most=_MAX_BYTES // 4, layout="mds", why=_WHY)
    splits, notes = rows_of(source, "mds", options.seq_len)
    about = _about(options.seq_len, 4 * size)
    config = json.dumps(about, sort_keys=True).encode()
    parts = [
        _part(f"{name}/shard.{number:05d}.mds", rows, bounds, config)
        for name, rows in splits.items()
        for number, bounds in enumerate(_cut(rows, 4 * size - 8 - len(config)))
    ]
    return Export(parts=tuple(parts), notes=notes, finish=lambda receipts: _indexes(about, receipts))


def open(path: str, hints: Hints) -> Dataset:
    return open_mds(path, hints)


def _about(seq_len: int | None, size_limit: int) -> dict[str, Any]:
    """What Mosaic's writer says of a shard, in the shard and in the index."""
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": ["sha256"],
        "size_limit": size_limit,
        "column_names": ["tokens"],
        "column_encodings": [f"ndarray:int32:{seq_len}" if seq_len else "ndarray:int32"],
        "column_sizes": [4 * seq_len if seq_len else None],
    }


def _cut(rows: Rows, limit: int) -> list[tuple[int, int]]:
    longest = max(int(lengths.max()) for lengths in rows.lengths(0, rows.num_tokens))
    if 4 * longest + 1024 > _MAX_BYTES:
        raise RecipeError(f"mds cannot hold a document of {longest} tokens: {_WHY}", hint="use another layout")
    return cut_by_size(rows, limit, lambda lengths: sample_bytes(lengths, rows.seq_len) + 4)


def _part(name: str, rows: Rows, bounds: tuple[int, int], config: bytes) -> Part:
    start, stop = bounds

    def write(files: Files) -> Facts:
        output = files.create(name)
        count = sum(map(len, rows.lengths(start, stop)))
        place = 4 + 4 * (count + 1) + len(config)
        output.write(np.array([count, place], "<u4").tobytes())
        for lengths in rows.lengths(start, stop):
            places = np.cumsum(sample_bytes(lengths, rows.seq_len)) + place
            output.write(places.astype("<u4").tobytes())
            place = int(places[-1])
        output.write(config)
        for tokens, lengths in rows.blocks(start, stop):
            values = tokens.astype("<i4", copy=False)
            output.write(values.data.cast("B") if rows.seq_len else _samples(values, lengths))
        return {"samples": count}

    return Part(name=name, num_bytes=4 * (stop - start), write=write)


def sample_bytes(lengths: Starts, seq_len: int | None) -> Starts:
    """Bytes of samples of so many tokens."""
    return 4 * lengths if seq_len else 4 * lengths + 5 + _width(lengths)


def _width(lengths: Starts) -> Starts:
    """Bytes in which a length is written."""
    return 1 + (lengths >= 1 << 8) + 2 * (lengths >= 1 << 16)


def _samples(values: Tokens, lengths: Starts) -> memoryview:
    """Samples of any length, end to end: what stands before each one's tokens is computed for all at once."""
    width = _width(lengths)
    heads = np.zeros((len(lengths), 9), np.uint8)
    heads[:, :4] = (sample_bytes(lengths, None) - 4).astype("<u4").view(np.uint8).reshape(-1, 4)
    heads[:, 4] = 1 << 2 | width >> 1
    heads[:, 5:] = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    used = np.arange(9) < 5 + width[:, None]
    return interleave((heads[used], 5 + width), (values, 4 * lengths))


def _indexes(about: dict[str, Any], receipts: Sequence[Receipt]) -> Mapping[str, bytes]:
    """index.json of every split."""
    shards: dict[str, list[dict[str, Any]]] = {}
    for receipt in receipts:
        split, _, name = receipt.part.partition("/")
        digest = receipt.files[receipt.part]
        raw = {"basename": name, "bytes": digest.bytes, "hashes": {"sha256": digest.sha256}}
        shards.setdefault(split, []).append(
            {**about, "samples": receipt.facts["samples"], "raw_data": raw, "zip_data": None}
        )
    return {
        f"{split}/index.json": json.dumps({"version": 2, "shards": found}, sort_keys=True).encode()
        for split, found in shards.items()
    }
