"""Sealed records: how the plan, the receipts and the manifest stand on disk.

    value -> canonical JSON (sorted keys, no spaces), its SHA-256 as one more field at the end -> bytes
    bytes -> size, digest, syntax, duplicate keys, NaN, depth, types all checked -> value

Whatever reads such a file gets a checked value or a `DatasetError`, never half of one.
Standard library only: a trainer node reads manifests too.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tokenmill.errors import DatasetError
from tokenmill.typed import (
    canonical,
    canonical_parts,
    convert,
    has_tables,
    is_table,
    make_table,
    member,
    table_of_rows,
)

__all__ = [
    "MAX_RECORD_BYTES",
    "canonical",
    "convert",
    "digest",
    "make_table",
    "opened",
    "parse",
    "seal",
    "seal_of",
    "sealed_parts",
    "unseal",
]

T = TypeVar("T")

MAX_RECORD_BYTES = 1 << 30


def digest(value: Any) -> str:
    """The SHA-256 of a value's canonical JSON."""
    sha = hashlib.sha256()
    for part in canonical_parts(value):
        sha.update(part)
    return sha.hexdigest()


def seal(value: Any) -> bytes:
    """Bytes of a dataclass that `unseal` takes back, and takes only unchanged."""
    return b"".join(sealed_parts(value))


def sealed_parts(value: Any) -> Iterator[bytes]:
    """The same bytes, in parts of about a megabyte."""
    sha, held = hashlib.sha256(), bytearray()
    for part in canonical_parts(value):
        if len(held) > _PART_BYTES:
            yield bytes(held)
            held.clear()
        sha.update(part)
        held += part
    yield bytes(held[:-1]) + _SEAL % sha.hexdigest().encode()


def seal_of(blocks: Iterable[bytes | memoryview]) -> str | None:
    """The seal of a record, which is the digest of the value in it; None if it is broken. Parses nothing."""
    sha, held = hashlib.sha256(), b""
    for block in blocks:
        held += block
        sha.update(memoryview(held)[:-_SEAL_BYTES])
        held = held[-_SEAL_BYTES:]
    sha.update(b"}")
    return sha.hexdigest() if held == _SEAL % sha.hexdigest().encode() else None


def unseal(kind: type[T], data: bytes, *, where: str) -> T:
    """The value that was sealed. Raises `DatasetError` for anything else."""
    _check_seal(data, where=where)
    value = _in_tables(kind, data)
    return convert(kind, parse(data[:-_SEAL_BYTES] + b"}", where=where) if value is None else value, where=where)


def opened(data: bytes, *, where: str) -> bytes:
    """What was sealed, as text; `DatasetError` if the seal is broken or not there. For small records: it is a copy."""
    body = data[:-_SEAL_BYTES] + b"}"
    if data[-_SEAL_BYTES:] != _SEAL % hashlib.sha256(body).hexdigest().encode():
        _check_seal(data, where=where)  # says what is wrong
    return body


def _check_seal(data: bytes, *, where: str) -> None:
    if len(data) > MAX_RECORD_BYTES:
        raise DatasetError(f"{where}: {len(data)} bytes are too many for a record", hint=_DAMAGED)
    if data[-_SEAL_BYTES:-_SEAL_END] != _SEAL[:9]:
        raise DatasetError(f"{where}: not a sealed record", hint=_DAMAGED)
    if seal_of([data]) is None:
        raise DatasetError(f"{where}: its seal does not match its content", hint=_DAMAGED)


def _in_tables(kind: type, data: bytes) -> Any:
    """The fields of a canonical record, its tables made row by row: as plain values they would be gigabytes.

    None for one that is short or has no tables, and for one with which anything is wrong: `parse` says what.
    """
    if len(data) < _PART_BYTES or not has_tables(kind):
        return None
    reader = _Reader(memoryview(data)[:-_SEAL_BYTES])
    try:
        found = _read(reader, kind)
        return found if reader.is_at_end() else None
    except (ValueError, RecursionError):
        return None


def _read(reader: _Reader, kind: Any) -> Any:
    """The next value, which should be of this type; what holds no table is left as it stands."""
    if not has_tables(kind):
        return reader.value()
    if is_table(kind):
        return table_of_rows(kind, reader.rows())
    found: dict[str, Any] = {}
    for name in reader.names():
        if name in found:
            raise ValueError(f"{name} stands twice")
        found[name] = _read(reader, member(kind, name))
    return found


class _Reader:
    """A place in the JSON text of a record that lacks its last brace. Only a part of the text is held."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._taken = 0
        self._text = ""
        self._at = 0

    def is_at(self, mark: str) -> bool:
        return (self._at < len(self._text) or self._take()) and self._text[self._at] == mark

    def is_at_end(self) -> bool:
        return self._at == len(self._text) and not self._take()

    def value(self) -> Any:
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except ValueError:
                if not self._take():
                    raise
                continue
            # A number that ends where the held text does may go on behind it.
            if end < len(self._text) or not self._take():
                self._at = end
                return value

    def rows(self) -> Iterator[Any]:
        """The values of a list, one at a time."""
        return (self.value() for _ in self._members("[", "]"))

    def names(self) -> Iterator[str]:
        """The names of an object, each before its value is read."""
        for _ in self._members("{", "}"):
            name = self.value()
            if not isinstance(name, str):
                raise ValueError(f"{name} is no name")
            self._skip(":")
            yield name

    def _members(self, begin: str, end: str) -> Iterator[None]:
        """Stops before each member."""
        self._skip(begin)
        if not self.is_at(end):
            yield
        while not self.is_at(end):
            self._skip(",")
            yield
        self._skip(end)

    def _skip(self, mark: str) -> None:
        if not self.is_at(mark):
            raise ValueError(f"no {mark}")
        self._at += 1

    def _take(self) -> bool:
        """Hold more of the text, and no more of what was read; False if there is no more."""
        left = self._text[self._at :]
        # At least as much again: a long value is tried a few times only.
        block = self._data[self._taken : self._taken + max(_PART_BYTES, len(left))]
        if not block:
            return False
        self._taken += len(block)
        is_last = self._taken == len(self._data)
        self._text = left + self._decode(block, is_last) + "}" * is_last
        self._at = 0
        return True


def parse(data: bytes, *, where: str) -> Any:
    """Strict JSON: finite, no key twice."""
    try:
        value = _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not valid JSON: {error}", hint=_DAMAGED) from None
    return value


_DAMAGED = "the file is damaged or was not written by tokenmill"
_PART_BYTES = 1 << 20
_SEAL = b',"seal":"%s"}\n'
_SEAL_END = len(b'"}\n') + 64
_SEAL_BYTES = len(_SEAL % bytes(64))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
