"""Documents that end with a separator, from any byte range: none lost, doubled or cut.

    bytes     a a a | b b | c c c c c c | d
    ranges    [------------)[------------)
    read      a a a   b b                    a document belongs to the range that holds its
                            c c c c c c   d  first byte, however far it reaches

A line is a document that ends with a newline. Separators count from left to right and do not
overlap; where one could overlap itself ("\\n\\n" in "\\n\\n\\n"), a range must begin its scan at
a byte that no possible separator crosses: from there it agrees with a scan of the whole file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenmill.sources.base import MAX_DOCUMENTS
from tokenmill.sources.files import ByteStream, Pin, open_stream

CHUNK = 8 << 20
_SMALL_CHUNK = 1 << 16
_LOOK_BACK = 1 << 16
# Bytes between separators from which on a search for each is quicker than a look at every byte.
_FAR_APART = 512
# A document's bytes may come with a byte order mark and a carriage return, which do not count. Only
# what is surely too large is passed over here; the exact judgement is on the document itself.
_SLACK = 4


@dataclass(frozen=True, slots=True)
class DocumentRun:
    """Documents end to end with the separators between them; the first begins at byte `start`.

    `breaks` is where in `data` separators begin, if they stand far apart and were searched for one by one.
    A run that is `too_large` stands for one document above the limit, whose bytes were passed over.
    """

    start: int
    data: memoryview
    breaks: npt.NDArray[np.int64] | None = None
    too_large: bool = False


def read_runs(
    path: str,
    compression: str,
    separator: bytes,
    start: int,
    stop: int,
    limit: int,
    chunk: int | None = None,
    pin: Pin | None = None,
) -> Iterator[DocumentRun]:
    """The documents that begin in [start, stop); a `stop` of -1 is the end of the file.

    Those that are much larger than `limit` are passed over without being held in memory. The file is
    read `chunk` bytes at a time.
    """
    begin = _fresh(path, separator, max(0, start - len(separator)), pin) if start else 0
    chunk = chunk or CHUNK
    if pin is not None and not compression:  # for a small file, nothing large is set aside
        chunk = min(chunk, max(_SMALL_CHUNK, pin.bytes + 1))
    with open_stream(path, compression, start=begin, pin=pin, step=chunk, separator=separator) as stream:
        at, held = begin, b""
        if start:
            first = _first_document(stream, separator, begin, start, stop, chunk)
            if first is None or 0 <= stop <= first[0]:
                return
            at, held = first
        yield from _runs(stream, separator, at, held, stop, limit, chunk)


def _runs(
    stream: ByteStream, separator: bytes, at: int, held: bytes, stop: int, limit: int, chunk: int
) -> Iterator[DocumentRun]:
    """Runs of whole documents. `held` is what was read and not yet given; its first byte begins a document."""
    while True:
        data, is_last = _read_behind(held, stream, chunk)
        if stop >= 0 and (end := _find(data, separator, stop - at)) >= 0:
            yield from _few(at, data, end, separator)
            return
        end = _find_last(data, separator)
        if is_last:
            if data:
                ends_whole = end >= 0 and end + len(separator) == len(data)
                yield from _few(at, data, end if ends_whole else len(data), separator)
            return
        if end >= 0:
            yield from _few(at, data, end, separator)
            held = bytes(memoryview(data)[end + len(separator) :])
            at += end + len(separator)
        elif len(data) - len(separator) > limit + _SLACK:
            yield DocumentRun(at, memoryview(b""), too_large=True)
            after = _pass_over(stream, separator, at, data, stop)
            if after is None or 0 <= stop <= after[0]:
                return
            at, held = after
        else:
            # A long document: read more at once each time, or it would be copied over and over.
            held, chunk = bytes(data), max(chunk, min(len(data), 8 * CHUNK))


def runs_of(data: bytearray) -> Iterator[DocumentRun]:
    """The lines of some bytes, the last of which may end with a newline or not."""
    yield from _few(0, data, len(data) - data.endswith(b"\n"), b"\n")


def _few(at: int, data: bytearray, end: int, separator: bytes, start: int = 0) -> Iterator[DocumentRun]:
    """The documents from `start` to `end`, in runs of few enough: a chunk of nothing but newlines holds millions."""
    breaks = _far_breaks(data, separator, start, end)
    middle = (start + end) // 2
    is_many = breaks is None and _count(data, separator, start, end) > MAX_DOCUMENTS
    cut = _find(data, separator, middle, start) if is_many else -1
    if 0 <= cut < end - len(separator):
        yield from _few(at, data, cut, separator, start)
        yield from _few(at, data, end, separator, cut + len(separator))
    else:
        yield DocumentRun(at + start, memoryview(data)[start:end], None if breaks is None else breaks - start)


def _far_breaks(data: bytearray, separator: bytes, start: int, end: int) -> npt.NDArray[np.int64] | None:
    """Where separators begin. None if they are many, which are found more quickly all at once."""
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
    return int(np.count_nonzero(np.frombuffer(data, np.uint8, end - start, start) == separator[0]))  # 3 times as fast


def _read_behind(held: bytes, stream: ByteStream, chunk: int) -> tuple[bytearray, bool]:
    """What is held and the next chunk behind it, copied once; and whether the stream has ended."""
    data = bytearray(len(held) + chunk)
    data[: len(held)] = held
    with memoryview(data) as view:
        count = stream.readinto(view[len(held) :])
    del data[len(held) + count :]
    return data, not count


def _first_document(
    stream: ByteStream, separator: bytes, at: int, start: int, stop: int, chunk: int
) -> tuple[int, bytes] | None:
    """Where the first document at or after `start` begins, and what was read of it."""
    held = stream.read(max(chunk, start - at + 2 * len(separator)))
    end = _find(held, separator, start - at)
    if end >= 0:
        return at + end + len(separator), held[end + len(separator) :]
    return _pass_over(stream, separator, at, held, stop)


def _pass_over(
    stream: ByteStream, separator: bytes, at: int, held: bytes | bytearray, stop: int
) -> tuple[int, bytes] | None:
    """Read on until a separator ends the document that `held` is in, keeping none of it; no further than `stop`.

    A document that goes on beyond it is the last one of a unit, and the units behind it need not be read twice.
    """
    while True:
        tail = bytes(held[max(0, len(held) - len(separator) + 1) :]) if len(separator) > 1 else b""
        at += len(held) - len(tail)
        if 0 <= stop <= at:
            return None
        chunk = stream.read(CHUNK)
        if not chunk:
            return None
        held = tail + chunk
        end = held.find(separator)
        if end >= 0:
            return at + end + len(separator), held[end + len(separator) :]


def overlaps_itself(separator: bytes) -> bool:
    return any(separator.endswith(separator[:size]) for size in range(1, len(separator)))


def _find(data: bytes | bytearray, separator: bytes, wanted: int, start: int = 0) -> int:
    """Where the first separator that ends at `wanted` or later begins; -1 if there is none.

    A document begins at `start`, from where separators count.
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


def _fresh(path: str, separator: bytes, at: int, pin: Pin | None) -> int:
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
