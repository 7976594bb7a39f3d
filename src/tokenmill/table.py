"""Long tables of rows in little memory.

    rows     [0 ........ 255] [256 ...... 511] [512 ...]
    held      packed bytes     packed bytes     ...        one run of rows unpacked at a time

A million rows as objects take most of a gigabyte; packed, they take a tenth of that. Reading in
order unpacks each run once; reading anywhere costs the unpacking of one run.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")

RUN = 256
# Up to here a plain tuple serves better.
MANY = 1 << 16


class Table(Sequence[T], Generic[T]):
    """Rows that do not change, packed in runs. `unpack` takes back what `pack` made of a run."""

    __slots__ = ("_length", "_opened", "_runs", "_unpack")

    def __init__(
        self, rows: Iterable[T], pack: Callable[[Sequence[T]], bytes], unpack: Callable[[bytes], Sequence[T]]
    ) -> None:
        self._runs: list[bytes] = []
        self._length = 0
        for run in runs_of(rows):
            self._runs.append(zlib.compress(pack(run), 1))
            self._length += len(run)
        self._unpack = unpack
        self._opened: tuple[int, Sequence[T]] = (-1, ())

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(self._length)))
        number = range(self._length)[index]
        return self._open(number // RUN)[number % RUN]

    def __iter__(self) -> Iterator[T]:
        for number in range(len(self._runs)):
            yield from self._open(number)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(one == another for one, another in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # nobody looks one up

    def texts(self) -> Iterator[bytes]:
        """What `pack` made of each run."""
        return map(zlib.decompress, self._runs)

    def _open(self, number: int) -> Sequence[T]:
        at, rows = self._opened
        if at != number:
            rows = self._unpack(zlib.decompress(self._runs[number]))
            self._opened = (number, rows)
        return rows


def runs_of(rows: Iterable[T]) -> Iterator[list[T]]:
    """Rows, a run at a time."""
    left = iter(rows)
    while run := list(itertools.islice(left, RUN)):
        yield run
