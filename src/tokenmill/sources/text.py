"""Text files: a document a line, a document between separators, or a document a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from tokenmill.sources.base import BATCH_BYTES, Batch, Skip, Source, make_batch
from tokenmill.sources.byte_ranges import DocumentRun, read_runs
from tokenmill.sources.files import open_stream, pin_of
from tokenmill.sources.signatures import HEAD_BYTES, recognise

BOM = b"\xef\xbb\xbf"
# What Python's str.isspace takes for white space, as a pattern for Arrow.
_BLANK = r"^[\s\v\p{Z}\x{85}\x{1c}-\x{1f}]*$"


def read_lines(
    path: str, index: int, source: Source, start: int, stop: int, *, limit: int, chunk: int | None = None
) -> Iterator[Batch]:
    """Lines without their ends; lines of white space alone are no documents."""
    for run in read_runs(path, source.compression, b"\n", start, stop, limit, chunk, pin_of(source)):
        yield lines(run, index)


def lines(run: DocumentRun, index: int) -> Batch:
    """The lines of a run, as `read_lines` gives them."""
    import pyarrow.compute as pc

    batch = _separated(run, index, b"\n")
    text = batch.text
    if pc.any(pc.ends_with(text, "\r")).as_py():
        text = pc.replace_substring_regex(text, r"\r$", "") if _valid(text) else _strip_returns(text)
    blank = pc.match_substring_regex(text, _BLANK)
    if not pc.any(blank).as_py():
        return make_batch(index, text, batch.positions, batch.skips)
    keep = pc.invert(blank)
    positions = batch.positions[keep.to_numpy(zero_copy_only=False)]
    return make_batch(index, text.filter(keep), positions, batch.skips)


def read_separated(
    path: str,
    index: int,
    source: Source,
    start: int,
    stop: int,
    *,
    separator: bytes,
    limit: int,
    chunk: int | None = None,
) -> Iterator[Batch]:
    """The texts between separators."""
    for run in read_runs(path, source.compression, separator, start, stop, limit, chunk, pin_of(source)):
        yield _separated(run, index, separator)


def _separated(run: DocumentRun, index: int, separator: bytes) -> Batch:
    import pyarrow.compute as pc

    if run.too_large:
        return make_batch(index, _strings([]), np.zeros(0, np.int64), [Skip(index, run.start, "too_large")])
    data, at = run.data, run.start
    if at == 0 and data[: len(BOM)] == BOM:
        data, at = data[len(BOM) :], len(BOM)
    whole = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), 1, [None, pa.py_buffer(np.array([0, len(data)])), pa.py_buffer(data)]
    )
    parts = pc.split_pattern(whole, separator).values
    lengths = pc.binary_length(parts).to_numpy() + len(separator)
    positions = np.cumsum(lengths, dtype=np.int64) - lengths + at
    return make_batch(index, parts.view(pa.large_string()), positions)


def read_file(path: str, index: int, source: Source, *, limit: int) -> Iterator[Batch]:
    """The whole file as one document."""
    position = np.zeros(1, np.int64)
    # What is asked for is set aside at once, and neither the limit nor a small file is a reason to set aside much.
    step = BATCH_BYTES if source.compression else min(BATCH_BYTES, source.bytes + 1)
    data = bytearray()
    with open_stream(path, source.compression, pin=pin_of(source), look=False) as stream:
        while more := stream.read(min(step, limit + 1 - len(data))):
            data += more
            if len(data) > limit:
                yield make_batch(index, _strings([]), position[:0], [Skip(index, 0, "too_large")])
                return
    # What is not even UTF-8 the unit finds, as in any text.
    if recognise(bytes(data[:HEAD_BYTES])) is not None and _valid(_strings([data])):
        yield make_batch(index, _strings([]), position[:0], [Skip(index, 0, "not_text")])
        return
    if data.startswith(BOM):
        del data[: len(BOM)]
    yield make_batch(index, _strings([data]), position)


def _strings(texts: Sequence[bytes | bytearray]) -> pa.Array:
    """Bytes as Arrow text that is not known to be valid yet; the unit checks it."""
    return pa.array(texts, pa.large_binary()).view(pa.large_string())


def _valid(text: pa.Array) -> bool:
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _strip_returns(text: pa.Array) -> pa.Array:
    return _strings([line.removesuffix(b"\r") for line in text.cast(pa.large_binary()).to_pylist()])
