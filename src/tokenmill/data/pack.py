"""How documents are packed into rows of `seq_len` tokens: from their lengths alone, no token is read.

    documents   aaaa bb ccccccc ddd e                  seq_len 5
    pieces      aaaa bb ccccc cc ddd e                 what is too long for a row is cut
    padded      aaaa. bb... ccccc cc... ddd.. e....    a row for each piece
    best_fit    aaaae ccccc cc... dddbb                the largest first, each where it leaves the least room

Pieces lie end to end in the split. One behind which its document goes on spans a token more than it
has inputs: the target of its last one.

Pieces of one size are interchangeable, and so are rows with the same room. So best fit is
computed with their numbers, and takes no longer for many documents than for a few;
then the pieces of every size are handed out in their order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Spans = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """Row i has segments [borders[i], borders[i + 1]), and segment j spans `spans[j]` tokens from `starts[j]` on."""

    borders: Numbers
    starts: Numbers
    spans: Spans


@dataclass(frozen=True, slots=True)
class Placement:
    """Each of `rows` rows from `first` on, which had `filled` segments, gets `each` more; `piece` is the first."""

    first: int
    rows: int
    filled: int
    each: int
    piece: int


def cut(lengths: Spans, seq_len: int) -> Spans:
    """What the pieces of documents of these lengths span."""
    lengths = lengths[lengths > 0]
    counts = -(-lengths // seq_len)
    ends = np.cumsum(counts, dtype=np.int64)
    spans = np.full(int(ends[-1]) if len(ends) else 0, seq_len + 1, np.int32)
    spans[ends - 1] = lengths - (counts - 1) * seq_len
    return spans


def padded(spans: Spans, seq_len: int) -> Rows:
    """A row for each piece, in their order."""
    return Rows(np.arange(len(spans) + 1), _starts(np.minimum(spans, seq_len)), spans)


def best_fit(spans: Spans, seq_len: int) -> Rows:
    """Rows with as little room left as best fit leaves; they stand in the order of their first segments."""
    starts = _starts(np.minimum(spans, seq_len))
    # Sorting is several times as quick with numbers of 16 bits.
    lacks = (seq_len - np.minimum(spans, seq_len)).astype(np.uint16 if seq_len < 1 << 16 else np.int32)
    order = np.argsort(lacks, kind="stable")
    placements = place(((seq_len - lack, number) for lack, number in _count(lacks[order])), seq_len)
    num_rows = sum(placement.rows for placement in placements if not placement.filled)
    counts = np.zeros(num_rows, np.int32)
    firsts = np.empty(num_rows, np.int64)
    for p in placements:
        counts[p.first : p.first + p.rows] += p.each
        if not p.filled:
            firsts[p.first : p.first + p.rows] = starts[order[p.piece : p.piece + p.rows * p.each : p.each]]
    # Rows were opened for the largest first; a trainer that reads them in turn should not see those first.
    in_turn = np.argsort(firsts)
    borders = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts[in_turn], dtype=np.int64)))
    begins = firsts
    begins[in_turn] = borders[:-1]
    packed = Rows(borders, np.empty(len(spans), np.int64), np.empty(len(spans), np.int32))
    for p in placements:
        slots = (begins[p.first : p.first + p.rows, None] + np.arange(p.filled, p.filled + p.each)).ravel()
        pieces = order[p.piece : p.piece + p.rows * p.each]
        packed.starts[slots] = starts[pieces]
        packed.spans[slots] = spans[pieces]
    return packed


def place(classes: Iterable[tuple[int, int]], seq_len: int) -> list[Placement]:
    """Best fit of so many pieces of each size, the largest size first.

    A piece goes where it leaves the least room, so the next ones of its size go into the same row
    until they no longer fit: whole ranges of equal rows are filled in one step. Each step more than
    halves the room of its rows or ends a size, so there are about seq_len * log(seq_len) at most.
    """
    placements: list[Placement] = []
    rooms: list[int] = []  # of open rows, each once, sorted
    ranges: dict[int, list[tuple[int, int, int]]] = {}  # by room: first row, rows, segments in each

    def give_back(room: int, first: int, rows: int, filled: int) -> None:
        if rows and room:
            if room not in ranges:
                rooms.insert(bisect_left(rooms, room), room)
            ranges.setdefault(room, []).append((first, rows, filled))

    num_rows = piece = 0
    for size, number in classes:
        left = number
        while left:
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms[at]
                first, rows, filled = ranges[room].pop()
                if not ranges[room]:
                    del ranges[room], rooms[at]
            else:
                room, first, filled = seq_len, num_rows, 0
                rows = -(-left // (room // size))
                num_rows += rows
            each = min(room // size, left)
            used = min(rows, left // each)
            placements.append(Placement(first, used, filled, each, piece))
            give_back(room, first + used, rows - used, filled)
            give_back(room - each * size, first, used, filled + each)
            piece += used * each
            left -= used * each
    return placements


def _count(ordered: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """What stands there, and how often each, of numbers in order."""
    edges = np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1))
    counts = np.diff(edges, append=len(ordered))
    return list(zip(ordered[edges].tolist(), counts.tolist(), strict=True))


def _starts(sizes: Spans) -> Numbers:
    ends = np.cumsum(sizes, dtype=np.int64)
    ends -= sizes
    return ends
