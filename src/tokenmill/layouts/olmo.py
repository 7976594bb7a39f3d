"""dolma and OLMo: `{split}/part-0-00000.npy`, raw tokens in spite of the name, and a table of its documents.

The table is `part-0-00000.csv.gz` without a header row: start, end, id, source, place. Loaders may also find documents
by the end of text, so each ends with one and has none inside.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tokenmill.data.bare import Hints, open_bare
from tokenmill.data.dataset import Dataset, TokenSplit
from tokenmill.layouts.shape import Export, Facts, Files, Options, Part, filled_splits
from tokenmill.layouts.stream import TokenStream, cut_at_documents, lengths_by_block

SUMMARY = "raw .npy files with tables of documents, as dolma writes and OLMo reads them"
OPTIONS = frozenset({"shard_size"})
NEEDS = frozenset({"eot"})

SHARD_TOKENS = 1 << 30


def plan(source: Dataset, options: Options) -> Export:
    return Export(
        parts=tuple(
            _part(f"{name}/part-0-{number:05d}", name, split, bounds)
            for name, split in filled_splits(source).items()
            for number, bounds in enumerate(cut_at_documents(split, options.shard_size or SHARD_TOKENS))
        )
    )


def open(path: str, hints: Hints) -> Dataset:
    return open_bare(path, replace(hints, layout="olmo"))


def _part(name: str, split_name: str, split: TokenSplit, bounds: tuple[int, int]) -> Part:
    start, stop = bounds
    stream = TokenStream(split, "append")

    def write(files: Files) -> Facts:
        output = files.create(f"{name}.npy")
        for data in stream.data(start, stop):
            output.write(data)
        table = files.create(f"{name}.csv.gz")
        for packed in _packed(_rows(split_name, split, start, stop)):
            table.write(packed)
        return {}

    return Part(name=name, num_bytes=(stop - start) * stream.itemsize, write=write)


def _rows(name: str, split: TokenSplit, start: int, stop: int) -> Iterator[bytes]:
    """Lines of the table, some thousand at a time. A document's id is the token of the split that it begins at."""
    before, number = 0, 0
    for lengths in lengths_by_block(split, start, stop):
        edges = np.concatenate(([0], np.cumsum(lengths))) + before
        rows = zip(edges[:-1].tolist(), edges[1:].tolist(), range(number, number + len(lengths)), strict=True)
        yield "".join([f"{a},{b},{name}-{start + a},{name},{place}\n" for a, b, place in rows]).encode()
        before, number = int(edges[-1]), number + len(lengths)


def _packed(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """A gzip stream that has no time in it, so that the same rows are the same bytes."""
    held = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=held, mtime=0) as file:
        for block in blocks:
            file.write(block)
            yield held.getvalue()
            held.seek(0)
            held.truncate()
    yield held.getvalue()
