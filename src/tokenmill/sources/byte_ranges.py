"""Documents that end with a separator, from any byte range: none lost, doubled or cut.

    bytes     a a a | b b | c c c c c c | d
    ranges    [------------)[------------)
    read      a a a   b b                    a document belongs to the range with its first
                            c c c c c c   d  byte, even if it extends beyond that range

A line is a document that ends with a newline. Separators count from left to right and do not overlap. Some separators
could overlap themselves ("\\n\\n" in "\\n\\n\\n"). Therefore a range begins its scan at a byte that no possible
separator crosses; from there it agrees with a scan of the whole file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.sources.base import BATCH_BYTES, MAX_DOCUMENTS, Batch, Rule, SourceFormat, SourceSlice
from tokenmill.sources.files import ByteStream, Pin, open_stream, pin_of

BOM = b"\xef\xbb\xbf"
CHUNK = 8 << 20
_SMALL_CHUNK = 1 << 16
_LOOK_BACK = 1 << 16
# From this distance on, searching for each separator is faster than comparing every byte.
_FAR_APART = 512
# A byte order mark and a carriage return do not count as bytes of the document. Only what is certainly too large is
# skipped here; the exact limit is checked on the document itself.
_SLACK = 4


@dataclass(frozen=True, slots=True)
class DocumentRun:
    """Documents end to end with the separators between them; the first begins at byte `start`.

    `breaks` are the offsets of the separators in `data`, if they are far apart and were searched for one by one.
    A run that is `too_large` represents one document above the limit, whose bytes were skipped.
    """

    start: int
    data: memoryview
    breaks: npt.NDArray[np.int64] | None = None
    too_large: bool = False


class LineFormat(SourceFormat, Protocol):
    """A format with a document on each line. Its modules add `parse_lines`."""

    joins_small_files: ClassVar[bool] = True

    def parse_lines(self, run: DocumentRun, index: int, rule: Rule, limit: int) -> Batch:
        """The documents of a run of whole lines."""

    def read(self, part: SourceSlice, *, limit: int, batch_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
        for run in read_runs(part, b"\n", limit=limit, chunk=batch_bytes):
            yield self.parse_lines(run, part.index, part.source.text, limit)


def read_runs(part: SourceSlice, separator: bytes, *, limit: int, chunk: int | None = None) -> Iterator[DocumentRun]:
    """The documents that begin in a range of bytes. `chunk` bytes are read at a time.

    A document much larger than `limit` is skipped without keeping it in memory.
    """
    path, compression, pin = part.path, part.source.compression, pin_of(part.source)
    start, stop, chunk = part.start, part.stop, chunk or CHUNK
    begin = _scan_start(path, separator, max(0, start - len(separator)), pin) if start else 0
    if not compression:  # a small file needs no large buffer
        chunk = min(chunk, max(_SMALL_CHUNK, pin.bytes + 1))
    with open_stream(path, compression, start=begin, pin=pin, step=chunk, separator=separator) as stream:
        at, pending = begin, b""
        if start:
            first = _first_document(stream, separator, begin, start, stop, chunk)
            if first is None or 0 <= stop <= first[0]:
                return
            at, pending = first
        yield from _runs(stream, separator, at, pending, stop=stop, limit=limit, chunk=chunk)


def _runs(
    stream: ByteStream, separator: bytes, at: int, pending: bytes, *, stop: int, limit: int, chunk: int
) -> Iterator[DocumentRun]:
    """Runs of whole documents. `pending` was read and not yielded yet; its first byte begins a document."""
    while True:
        data, is_last = _read_more(pending, stream, chunk)
        if stop >= 0 and (end := _find(data, separator, stop - at)) >= 0:
            yield from _split_run(at, data, end, separator)
            return
        end = _find_last(data, separator)
        if is_last:
            if data:
                ends_whole = end >= 0 and end + len(separator) == len(data)
                yield from _split_run(at, data, end if ends_whole else len(data), separator)
            return
        if end >= 0:
            yield from _split_run(at, data, end, separator)
            pending = bytes(memoryview(data)[end + len(separator) :])
            at += end + len(separator)
        elif len(data) - len(separator) > limit + _SLACK:
            yield DocumentRun(at, memoryview(b""), too_large=True)
            after = _skip_document(stream, separator, at, data, stop)
            if after is None or 0 <= stop <= after[0]:
                return
            at, pending = after
        else:
            # A long document: read more each time, or it would be copied over and over.
            pending, chunk = bytes(data), max(chunk, min(len(data), 8 * CHUNK))


def runs_of(data: bytearray) -> Iterator[DocumentRun]:
    """The lines of some bytes. The last line may lack its newline."""
    yield from _split_run(0, data, len(data) - data.endswith(b"\n"), b"\n")


def _split_run(at: int, data: bytearray, end: int, separator: bytes, start: int = 0) -> Iterator[DocumentRun]:
    """The documents from `start` to `end` in runs of bounded length: a chunk of newlines alone has millions."""
    breaks = _far_breaks(data, separator, start, end)
    middle = (start + end) // 2
    is_many = breaks is None and _count(data, separator, start, end) > MAX_DOCUMENTS
    cut = _find(data, separator, middle, start) if is_many else -1
    if 0 <= cut < end - len(separator):
        yield from _split_run(at, data, cut, separator, start)
        yield from _split_run(at, data, end, separator, cut + len(separator))
    else:
        yield DocumentRun(at + start, memoryview(data)[start:end], None if breaks is None else breaks - start)


def _far_breaks(data: bytearray, separator: bytes, start: int, end: int) -> npt.NDArray[np.int64] | None:
    """Where separators begin; None if there are many, which are found faster all at once."""
    few = min((end - start) // _FAR_APART + 1, MAX_DOCUMENTS)
    found = np.fromiter(itertools.islice(_each(data, separator, start, end), few), np.int64)
    return found if len(found) < few else None


def _each(data: bytearray, separator: bytes, start: int, end: int) -> Iterator[int]:
    while (start := data.find(separator, start, end)) >= 0:
        yield start
        start += len(separator)


def _count(data: bytearray, separator: bytes, start: int, end: int) -> int:
    if len(separator) > 1 or end <= start:
        return data.count(separator, start, end)
    # 3 times as fast as bytes.count
    return int(np.count_nonzero(np.frombuffer(data, np.uint8, end - start, start) == separator[0]))


def _read_more(pending: bytes, stream: ByteStream, chunk: int) -> tuple[bytearray, bool]:
    """The pending bytes followed by the next chunk, copied once; and whether the stream has ended."""
    data = bytearray(len(pending) + chunk)
    data[: len(pending)] = pending
    with memoryview(data) as view:
        count = stream.readinto(view[len(pending) :])
    del data[len(pending) + count :]
    return data, not count


def _first_document(
    stream: ByteStream, separator: bytes, at: int, start: int, stop: int, chunk: int
) -> tuple[int, bytes] | None:
    """Where the first document at or after `start` begins, and the bytes that were read of it."""
    data = stream.read(max(chunk, start - at + 2 * len(separator)))
    end = _find(data, separator, start - at)
    if end >= 0:
        return at + end + len(separator), data[end + len(separator) :]
    return _skip_document(stream, separator, at, data, stop)


def _skip_document(
    stream: ByteStream, separator: bytes, at: int, data: bytes | bytearray, stop: int
) -> tuple[int, bytes] | None:
    """Read past the end of the document that `data` is in, keeping none of it, but no further than `stop`.

    A document that extends beyond `stop` is the last one of its unit, so the bytes behind it are left to other units.
    """
    while True:
        tail = bytes(data[max(0, len(data) - len(separator) + 1) :]) if len(separator) > 1 else b""
        at += len(data) - len(tail)
        if 0 <= stop <= at:
            return None
        chunk = stream.read(CHUNK)
        if not chunk:
            return None
        data = tail + chunk
        end = data.find(separator)
        if end >= 0:
            return at + end + len(separator), data[end + len(separator) :]


def overlaps_itself(separator: bytes) -> bool:
    return any(separator.endswith(separator[:size]) for size in range(1, len(separator)))


def _find(data: bytes | bytearray, separator: bytes, wanted: int, start: int = 0) -> int:
    """Where the first separator that ends at `wanted` or later begins; -1 if there is none.

    A document begins at `start`, so separators count from there.
    """
    if not overlaps_itself(separator):
        return data.find(separator, max(start, wanted - len(separator)))
    found = data.find(separator, start)
    while 0 <= found < wanted - len(separator):
        found = data.find(separator, found + len(separator))
    return found


def _find_last(data: bytes | bytearray, separator: bytes) -> int:
    if not overlaps_itself(separator):
        return data.rfind(separator)
    last, found = -1, data.find(separator)
    while found >= 0:
        last, found = found, data.find(separator, found + len(separator))
    return last


def _scan_start(path: str, separator: bytes, at: int, pin: Pin | None) -> int:
    """The last byte at or before `at` that no possible separator crosses."""
    size = len(separator)
    while at > 0 and size > 1:
        low = max(0, at - _LOOK_BACK)
        base = max(0, low - size + 1)
        with open_stream(path, "", start=base, pin=pin, separator=separator) as stream:
            window = stream.read(at + size - 1 - base)
        here = at - base
        while here > low - base:
            crossing = window.find(separator, max(0, here - size + 1), here + size - 1)
            if crossing < 0:
                return base + here
            here = crossing
        at = base + here
    return at
