"""Small files of this machine, many at once: to open and parse each by itself takes longer than its text.

    a file a document     [one][two][three]           -> one batch
    lines                 a b | c | d e f  ->  a b c d e f   read as one file is; each line knows which it is of

The documents are those that the files have one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tokenmill.sources import jsonl, text
from tokenmill.sources.base import Batch, Source, unchecked_array
from tokenmill.sources.byte_ranges import runs_of
from tokenmill.sources.files import pin_of, read_small
from tokenmill.sources.signatures import HEAD_BYTES, recognise
from tokenmill.sources.text import BOM
from tokenmill.sources.text_columns import UNREAD, Rule

# Of so many bytes, to open a file takes as long as to read it.
SMALL_BYTES = 1 << 18
# What a text takes in Arrow beside its bytes.
_OFFSET_BYTES = 8


def read(
    paths: Sequence[str], sources: Sequence[Source], number: int, first: int, *, documents: str, limit: int, most: int
) -> tuple[list[Batch], int]:
    """Batches of small files from the one at `number` on, up to about `most` bytes, and how many files they are of.

    The sources count from `first` on. A file that is not small, not as it was planned,
    or not text, ends the batches before it: it is read by itself.
    """
    kind, rule = sources[number].kind, sources[number].text
    if kind not in ("text", "jsonl") or rule == UNREAD or (kind == "text" and documents.startswith("separator:")):
        return [], 0
    found: list[bytes] = []
    size = _OFFSET_BYTES
    for path, source in zip(paths[number:], sources[number:], strict=True):
        size += source.bytes + _OFFSET_BYTES
        if (
            (source.kind, source.text, source.compression, source.etag) != (kind, rule, "", "")
            or source.bytes > min(limit, SMALL_BYTES)
            or (found and size > most)
        ):
            break
        data = read_small(path, pin_of(source))
        if data is None or recognise(data[:HEAD_BYTES]) is not None:
            break
        found.append(data)
    if not found:
        return [], 0
    if kind == "text" and documents == "files":
        return [_whole(found, first + number)], len(found)
    return list(_lines(found, first + number, kind, rule, limit)), len(found)


def _whole(found: list[bytes], first: int) -> Batch:
    numbers = np.arange(first, first + len(found), dtype=np.int32)
    texts = unchecked_array([data.removeprefix(BOM) for data in found])
    return Batch(texts, numbers, np.zeros(len(found), np.int64))


def _lines(found: list[bytes], first: int, kind: str, rule: Rule, limit: int) -> Iterator[Batch]:
    joined = _join(found, first)
    if not joined.data:
        return
    for run in runs_of(joined.data):
        yield joined.place(jsonl.lines(run, 0, rule, limit) if kind == "jsonl" else text.lines(run, 0))


@dataclass(frozen=True, slots=True)
class _Joined:
    """Files end to end, each on lines of its own: where each begins, how much of it was left out there, its number."""

    data: bytearray
    starts: npt.NDArray[np.int64]
    left_out: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int32]

    def place(self, batch: Batch) -> Batch:
        """A batch of the joined data, with the documents where they are in their own files."""
        files = self._files(batch.positions)
        at = np.array([skip.position for skip in batch.skips], np.int64)
        skipped = self._files(at)
        own = zip(self.numbers[skipped].tolist(), self._own(at, skipped).tolist(), batch.skips, strict=True)
        return Batch(
            batch.text,
            self.numbers[files],
            self._own(batch.positions, files),
            tuple(replace(skip, source=number, position=position) for number, position, skip in own),
        )

    def _files(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        return np.searchsorted(self.starts, positions, "right") - 1

    def _own(self, positions: npt.NDArray[np.int64], files: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        return positions - self.starts[files] + self.left_out[files]


def _join(found: list[bytes], first: int) -> _Joined:
    """Empty files have no line. A byte order mark is left out but of the first, whose reader expects it."""
    data = bytearray()
    starts: list[int] = []
    left_out: list[int] = []
    numbers: list[int] = []
    for number, own in enumerate(found, start=first):
        marked = bool(data) and own.startswith(BOM)
        if not own or (marked and own == BOM):
            continue
        if data and not data.endswith(b"\n"):
            data += b"\n"
        starts.append(len(data))
        left_out.append(len(BOM) * marked)
        numbers.append(number)
        data += own[len(BOM) :] if marked else own
    return _Joined(data, np.array(starts, np.int64), np.array(left_out, np.int64), np.array(numbers, np.int32))
