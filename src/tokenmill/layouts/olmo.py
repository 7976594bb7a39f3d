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
from tokenmill.layouts.shape import Export, Options, Part, file_part, filled_splits
from tokenmill.layouts.stream import TokenStream, cut_at_documents, lengths_by_block

SUMMARY = "raw .npy files with tables of documents, as dolma writes and OLMo reads them"
OPTIONS = frozenset({"shard_size"})
NEEDS = frozenset({"eot"})
WIDTHS = (2, 4)

SHARD_TOKENS = 1 << 28


def plan(source: Dataset, options: Options) -> Export:
    parts = [
        part
        for name, split in filled_splits(source).items()
        for number, bounds in enumerate(cut_at_documents(split, options.shard_size or SHARD_TOKENS))
        for part in _parts(f"{name}/part-0-{number:05d}", name, split, bounds)
    ]
    return Export(parts=tuple(parts))


def open(path: str, hints: Hints) -> Dataset:
    return open_bare(path, replace(hints, layout="olmo"))


def _parts(name: str, split_name: str, split: TokenSplit, bounds: tuple[int, int]) -> list[Part]:
    """Tokens and table apart: rows take as long to write as tokens, and need not wait for them."""
    start, stop = bounds
    stream = TokenStream(split, "append")
    size = (stop - start) * stream.itemsize
    return [
        file_part(f"{name}.npy", size, lambda: stream.data(start, stop)),
        file_part(f"{name}.csv.gz", size // 64, lambda: _packed(_rows(split_name, split, start, stop))),
    ]


def _rows(name: str, split: TokenSplit, start: int, stop: int) -> Iterator[bytes]:
    """Lines of the table, some thousand at a time. A document's id is the token of the split that it begins at."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    options = csv.WriteOptions(include_header=False, quoting_style="none")
    before, number = 0, 0
    for lengths in lengths_by_block(split, start, stop):
        edges = np.concatenate(([0], np.cumsum(lengths))) + before
        ids = pc.binary_join_element_wise(name, pa.array(edges[:-1] + start).cast(pa.string()), "-")
        places = np.arange(number, number + len(lengths))
        rows = [edges[:-1], edges[1:], ids, pa.repeat(name, len(lengths)), places]
        held = pa.BufferOutputStream()
        csv.write_csv(pa.table(dict(zip(("start", "end", "id", "source", "place"), rows, strict=True))), held, options)
        yield held.getvalue().to_pybytes()
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
