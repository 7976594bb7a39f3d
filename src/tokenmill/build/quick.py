"""Receipts read and held quickly: a build that goes on may find a million of them.

A sealed text that gives itself again when it is decoded and encoded is canonical, of the right fields and types, and
holds no key twice. Any other one is left to `records`, which says what is wrong with it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from tokenmill import records
from tokenmill.typed import make_table

T = TypeVar("T")

# A receipt takes kilobytes.
_MANY = 1 << 12


def unseal(kind: type[T], data: bytes, *, where: str) -> T:
    """The value that was sealed, or `DatasetError`; as `records.unseal`, but numbers may be of any size."""
    body = records.opened(data, where=where)
    with contextlib.suppress(msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        value: T = _decoder(cast("Any", kind))(body)
        if _ENCODE(value) == body:
            return value
    return records.unseal(kind, data, where=where)


def table(kind: type[T], rows: Iterable[T]) -> Sequence[T]:
    """Rows without floating numbers as a tuple, or packed if they are many."""
    unpack = _decoder(tuple[kind, ...])  # type: ignore[valid-type]  # made at run time
    return make_table(kind, rows, pack=_ENCODE, unpack=unpack, many=_MANY)


_ENCODE = msgspec.json.Encoder(order="sorted").encode


@functools.cache
def _decoder(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(kind).decode
