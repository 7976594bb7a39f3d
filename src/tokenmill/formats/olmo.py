"""dolma and OLMo: `{split}/part-0-00000.npy`, raw tokens in spite of the name, and a table of its documents.

The table is `part-0-00000.csv.gz` without a header row: start, end, id, source, position. Readers may also find
documents by the end of text, so each document ends with one and has none inside.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.bin_idx import numpy_dtype
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.errors import DatasetError
from tokenmill.formats.base import (
    DetectedFiles,
    Export,
    FormatTraits,
    Hints,
    Options,
    OutputPart,
    TokenFile,
    TokenStream,
    check_nothing,
    cut_at_documents,
    file_part,
    filled_splits,
    lengths_by_block,
)
from tokenmill.formats.files import DTYPE_HINT, NPY_MAGIC, eot_policy, files_by_folder, fitting_dtype, head_of, size_of

_TABLE_ROW = re.compile(rb"(\d+),(\d+)(?:,|$)")

TRAITS = FormatTraits(options={"shard_size"}, needs={"eot"}, document_bytes=12)

SHARD_TOKENS = 1 << 28


def detect(path: str, hints: Hints) -> DetectedFiles | None:
    """.npy files that are raw tokens: a file, or a folder. Folders in it are splits."""
    groups = files_by_folder(path, ".npy", ".csv.gz")
    if not groups or any(head_of(one, len(NPY_MAGIC)) == NPY_MAGIC for paths in groups.values() for one in paths):
        return None
    tables = {one: _table_of(one) for paths in groups.values() for one in paths}
    has_tables = all(table is not None for table in tables.values())
    files: dict[str, list[TokenFile]] = {}
    inner_ends: dict[str, list[Any]] = {}
    dtype = hints.stored_dtype(where=path) if hints.dtype else None
    for split, paths in groups.items():
        for one in paths:
            size = size_of(one)
            if dtype is None:
                dtype = hints.stored_dtype(default=fitting_dtype(size, tables[one]), where=one)
            count, rest = divmod(size, numpy_dtype(dtype).itemsize)
            table = tables[one]
            if rest or not count or (table is not None and int(table[-1]) != count):
                raise DatasetError(f"{one}: {size} bytes do not match its tokens of {dtype}", hint=DTYPE_HINT)
            files.setdefault(split, []).append(TokenFile(path=one, offset=0, num_tokens=count))
            if table is not None:
                inner_ends.setdefault(split, []).append(table[:-1])
    assert dtype is not None, "there is a file"
    eot = "none" if hints.eot_id is None else "append"
    return DetectedFiles(
        layout="olmo",
        dtype=dtype,
        eot=eot_policy(files, dtype, hints.eot_id, inner_ends, 1) if has_tables else eot,
        eot_id=hints.eot_id,
        files=files,
        inner_ends=inner_ends if has_tables else None,
    )


def _table_of(path: str) -> npt.NDArray[np.int64] | None:
    """The document ends in the table beside the tokens, or None if there is no table."""
    table = f"{path.removesuffix('.npy')}.csv.gz"
    if not os.path.isfile(table):
        return None
    try:
        with gzip.open(table) as file:
            found = [(int(row[1]), int(row[2])) for row in map(_TABLE_ROW.match, file) if row]
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{table} cannot be read: {error}", hint="is the file complete?") from None
    bounds = np.array(found, np.int64).reshape(-1, 2)
    if not len(bounds) or bounds[0, 0] != 0 or (bounds[1:, 0] != bounds[:-1, 1]).any():
        raise DatasetError(f"{table}: its documents are not contiguous", hint="is the file complete?")
    return bounds[:, 1]


check = check_nothing


def write(source: Dataset, options: Options) -> Export:
    parts = [
        part
        for name, split in filled_splits(source).items()
        for number, bounds in enumerate(cut_at_documents(split, options.shard_size or SHARD_TOKENS))
        for part in _parts(f"{name}/part-0-{number:05d}", name, split, bounds)
    ]
    return Export(parts=tuple(parts))


def _parts(name: str, split_name: str, split: TokenSplit, bounds: tuple[int, int]) -> list[OutputPart]:
    """Tokens and table as separate parts: the table takes as long to write, and can be written in parallel."""
    start, stop = bounds
    stream = TokenStream(split, "append")
    size = (stop - start) * stream.itemsize
    return [
        file_part(f"{name}.npy", size, lambda: stream.data(start, stop)),
        file_part(f"{name}.csv.gz", size // 64, lambda: _compressed(_rows(split_name, split, start, stop))),
    ]


def _rows(name: str, split: TokenSplit, start: int, stop: int) -> Iterator[bytes]:
    """Lines of the table, block by block. The id of a document has the token of the split at which it begins."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    options = csv.WriteOptions(include_header=False, quoting_style="none")
    before, number = 0, 0
    for lengths in lengths_by_block(split, start, stop):
        edges = np.concatenate(([0], np.cumsum(lengths))) + before
        ids = pc.binary_join_element_wise(name, pa.array(edges[:-1] + start).cast(pa.string()), "-")
        positions = np.arange(number, number + len(lengths))
        rows = [edges[:-1], edges[1:], ids, pa.repeat(name, len(lengths)), positions]
        buffer = pa.BufferOutputStream()
        columns = ("start", "end", "id", "source", "position")
        csv.write_csv(pa.table(dict(zip(columns, rows, strict=True))), buffer, options)
        yield buffer.getvalue().to_pybytes()
        before, number = int(edges[-1]), number + len(lengths)


def _compressed(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """A gzip stream without a time, so that the same rows give the same bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=buffer, mtime=0) as file:
        for block in blocks:
            file.write(block)
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()
