"""Small local files, many at a time: opening and parsing each by itself takes longer than its text.

    a file a document     [one][two][three]           -> one batch
    a line a document     a b | c | d e f  ->  a b c d e f   parsed as one file; each line keeps its own file and offset

The documents are the same as those of the files one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from tokenmill.sources.base import Batch, Rule, Source, SourceFormat, unchecked_array
from tokenmill.sources.byte_ranges import BOM, LineFormat, runs_of
from tokenmill.sources.files import HEAD_BYTES, pin_of, read_small, recognise
from tokenmill.sources.text_columns import UNREAD

# Up to this size, opening a file takes as long as reading it.
SMALL_BYTES = 1 << 18
# What a text takes in Arrow besides its bytes.
_OFFSET_BYTES = 8


def read(
    format: SourceFormat,
    paths: Sequence[str],
    sources: Sequence[Source],
    number: int,
    first: int,
    *,
    limit: int,
    max_bytes: int,
) -> tuple[list[Batch], int]:
    """Batches of the small files from `number` on, about `max_bytes` together, and how many files they are from.

    The sources are numbered from `first` on. The batches end before a file that is not small, has changed since it was
    planned, or is not text: that file is read by itself.
    """
    kind, rule = sources[number].kind, sources[number].text
    if rule == UNREAD:
        return [], 0
    found: list[bytes] = []
    size = _OFFSET_BYTES
    for path, source in zip(paths[number:], sources[number:], strict=True):
        size += source.bytes + _OFFSET_BYTES
        if (
            (source.kind, source.text, source.compression, source.etag) != (kind, rule, "", "")
            or source.bytes > min(limit, SMALL_BYTES)
            or (found and size > max_bytes)
        ):
            break
        data = read_small(path, pin_of(source))
        if data is None or recognise(data[:HEAD_BYTES]) is not None:
            break
        found.append(data)
    if not found:
        return [], 0
    if format.is_one_document:
        return [_whole(found, first + number)], len(found)
    return list(_lines(cast("LineFormat", format), found, first + number, rule, limit)), len(found)


def _whole(found: list[bytes], first: int) -> Batch:
    numbers = np.arange(first, first + len(found), dtype=np.int32)
    texts = unchecked_array([data.removeprefix(BOM) for data in found])
    return Batch(texts, numbers, np.zeros(len(found), np.int64))


def _lines(format: LineFormat, found: list[bytes], first: int, rule: Rule, limit: int) -> Iterator[Batch]:
    joined = _join(found, first)
    if not joined.data:
        return
    for run in runs_of(joined.data):
        yield joined.separate(format.parse_lines(run, 0, rule, limit))


@dataclass(frozen=True, slots=True)
class _JoinedFiles:
    """Files end to end, each on lines of its own: their source numbers, where each begins, and the bytes of its byte
    order mark, which is left out."""

    data: bytearray
    starts: npt.NDArray[np.int64]
    mark_bytes: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int32]

    def separate(self, batch: Batch) -> Batch:
        """A batch of the joined data with the source and the position that each document has in its own file."""
        files = self._files(batch.positions)
        at = np.array([skip.position for skip in batch.skips], np.int64)
        skipped = self._files(at)
        own = zip(self.numbers[skipped].tolist(), self._own(at, skipped).tolist(), batch.skips, strict=True)
        return Batch(
            batch.text,
            self.numbers[files],
            self._own(batch.positions, files),
            tuple(skip._replace(source=number, position=position) for number, position, skip in own),
            batch.beside,
        )

    def _files(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        return np.searchsorted(self.starts, positions, "right") - 1

    def _own(self, positions: npt.NDArray[np.int64], files: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        return positions - self.starts[files] + self.mark_bytes[files]


def _join(found: list[bytes], first: int) -> _JoinedFiles:
    """Empty files have no line. Byte order marks are left out, except the first one, which the parser expects."""
    data = bytearray()
    starts: list[int] = []
    mark_bytes: list[int] = []
    numbers: list[int] = []
    for number, own in enumerate(found, start=first):
        marked = bool(data) and own.startswith(BOM)
        if not own or (marked and own == BOM):
            continue
        if data and not data.endswith(b"\n"):
            data += b"\n"
        starts.append(len(data))
        mark_bytes.append(len(BOM) * marked)
        numbers.append(number)
        data += own[len(BOM) :] if marked else own
    return _JoinedFiles(data, np.array(starts, np.int64), np.array(mark_bytes, np.int64), np.array(numbers, np.int32))
