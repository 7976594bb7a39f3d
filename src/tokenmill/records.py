"""Sealed records: the format of the plan, the receipts, the manifest and other small files.

    value -> canonical JSON (sorted keys, no spaces), its SHA-256 as one more field at the end -> bytes
    bytes -> size, digest, syntax, duplicate keys, NaN, depth, fields and types are checked   -> value

A reader of such a file gets a checked value or a `DatasetError`. Fields must be present and have the right types; only
a field with a default may be missing, so that older records stay readable. An error names the place in the record.

Long tables are packed: a million rows as objects take most of a gigabyte, packed a tenth of that.

    rows      [0 ........ 255] [256 ...... 511] [512 ...]
    memory     packed bytes     packed bytes     ...        one run of rows unpacked at a time

Reading in order unpacks each run once; reading at random costs the unpacking of one run. Large records with tables are
read row by row as well, since their plain values would take gigabytes.

A build that resumes may find a million receipts. `unseal_many` decodes them with msgspec, and accepts what it encodes
to the same bytes again: that is canonical, has the right fields and types, and has no duplicate keys. Anything else
goes to `unseal`, which says what is wrong.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import types
import typing
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast, overload

import msgspec

from tokenmill.arguments import MAX_INT
from tokenmill.errors import DatasetError

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
    "sealed",
    "sealed_parts",
    "unseal",
]


T = TypeVar("T")
Converter = Callable[[Any], Any]

MAX_RECORD_BYTES = 1 << 30
MAX_DEPTH = 16
RUN = 256
# Up to this length a plain tuple is better.
MANY = 1 << 16
# Receipts take kilobytes each, so fewer of them are packed.
_MANY = 1 << 12
_DAMAGED = "the file is damaged or was not written by tokenmill"
_PART_BYTES = 1 << 20
_SEAL = b',"seal":"%s"}\n'
_SEAL_END = len(b'"}\n') + 64
_SEAL_BYTES = len(_SEAL % bytes(64))


def digest(value: Any) -> str:
    """The SHA-256 of a value's canonical JSON."""
    sha = hashlib.sha256()
    for part in canonical_parts(value):
        sha.update(part)
    return sha.hexdigest()


def seal(value: Any) -> bytes:
    """The bytes of a dataclass and its seal. `unseal` accepts them only unchanged."""
    return b"".join(sealed_parts(value))


def sealed_parts(value: Any) -> Iterator[bytes]:
    """The same bytes in parts of about a megabyte."""
    sha, buffer = hashlib.sha256(), bytearray()
    for part in canonical_parts(value):
        if len(buffer) > _PART_BYTES:
            yield bytes(buffer)
            buffer.clear()
        sha.update(part)
        buffer += part
    yield bytes(buffer[:-1]) + _SEAL % sha.hexdigest().encode()


def sealed(body: bytes) -> bytes:
    """The record of a value whose canonical JSON this is."""
    return body[:-1] + _SEAL % hashlib.sha256(body).hexdigest().encode()


def seal_of(blocks: Iterable[bytes | memoryview]) -> str | None:
    """The seal of a record, which is the digest of the value in it; None if it is broken. Parses nothing."""
    sha, end = hashlib.sha256(), b""
    for block in blocks:
        end += block
        sha.update(memoryview(end)[:-_SEAL_BYTES])
        end = end[-_SEAL_BYTES:]
    sha.update(b"}")
    return sha.hexdigest() if end == _SEAL % sha.hexdigest().encode() else None


def unseal(kind: type[T], data: bytes, *, where: str) -> T:
    """The value that was sealed. Raises `DatasetError` for anything else."""
    _check_seal(data, where=where)
    value = _in_tables(kind, data)
    return convert(kind, parse(data[:-_SEAL_BYTES] + b"}", where=where) if value is None else value, where=where)


def seal_many(value: Any) -> bytes:
    """The record of a dataclass without floating numbers, as `seal` makes it, but faster."""
    return sealed(_ENCODE(value))


def unseal_many(kind: type[T], data: bytes, *, where: str) -> T:
    """The same as `unseal`, faster; numbers may be of any size."""
    body = opened(data, where=where)
    with contextlib.suppress(msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        value: T = _decoder(cast("Any", kind))(body)
        if _ENCODE(value) == body:
            return value
    return unseal(kind, data, where=where)


def opened(data: bytes, *, where: str) -> bytes:
    """The sealed text, or `DatasetError` if the seal is broken or missing. For small records: it is a copy."""
    body = data[:-_SEAL_BYTES] + b"}"
    if data[-_SEAL_BYTES:] != _SEAL % hashlib.sha256(body).hexdigest().encode():
        _check_seal(data, where=where)  # says what is wrong
    return body


def parse(data: bytes, *, where: str) -> Any:
    """Strict JSON: finite numbers, no duplicate keys."""
    try:
        value = _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not valid JSON: {error}", hint=_DAMAGED) from None
    return value


def convert(kind: type[T], value: Any, *, where: str) -> T:
    """Check `value` against a dataclass and build it."""
    try:
        found: T = _converter(typing.cast("Any", kind))(value)
    except _WrongError as wrong:
        hint = "the file is damaged or was not written by tokenmill"
        raise DatasetError(f"{where}{wrong.place}: {wrong.what}", hint=hint) from None
    return found


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, UTF-8, finite numbers only."""
    return _ENCODER.encode(value).encode()


def canonical_parts(value: Any) -> Iterator[bytes]:
    """The same text in parts, so that a long table is never in memory as a whole. An iterator counts as a list."""
    if isinstance(value, Table | Iterator):
        texts = value.texts() if isinstance(value, Table) else map(canonical, runs_of(value))
        yield b"["
        for number, text in enumerate(texts):
            yield b"," * bool(number) + text[1:-1]
        yield b"]"
    elif dataclasses.is_dataclass(value) or (isinstance(value, dict) and value):
        plain = value if isinstance(value, dict) else _plain(value)
        for number, name in enumerate(sorted(plain)):
            yield (b"," if number else b"{") + canonical(name) + b":"
            yield from canonical_parts(plain[name])
        yield b"}"
    else:
        yield canonical(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _names(type(value))}
    if isinstance(value, Table):
        return list(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain)


def make_table(
    kind: type[T],
    rows: Iterable[T],
    *,
    pack: Callable[[Sequence[T]], bytes] = canonical,
    unpack: Callable[[bytes], Sequence[T]] | None = None,
    many: int = 0,
) -> Sequence[T]:
    """Rows of a dataclass as a tuple, or packed if there are `many`."""
    if isinstance(rows, Table):
        return rows
    left, many = iter(rows), many or MANY
    first = deque(itertools.islice(left, many))
    if len(first) < many:
        return tuple(first)
    # Rows are released one by one.
    waiting = (first.popleft() for _ in range(many))
    return Table(itertools.chain(waiting, left), pack, unpack or functools.partial(_unpacked, kind))


def pack_table(kind: type[T], rows: Iterable[T]) -> Sequence[T]:
    """Rows without floating-point numbers as a tuple, or packed if there are many."""
    unpack = _decoder(tuple[kind, ...])  # type: ignore[valid-type]  # made at run time
    return make_table(kind, rows, pack=_ENCODE, unpack=unpack, many=_MANY)


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
            start, stop, step = index.indices(self._length)
            return tuple(self._between(start, stop) if step == 1 else map(self.__getitem__, range(start, stop, step)))
        number = range(self._length)[index]
        return self._open(number // RUN)[number % RUN]

    def __iter__(self) -> Iterator[T]:
        for number in range(len(self._runs)):
            yield from self._open(number)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented if not isinstance(other, Sequence) else False
        if isinstance(other, Table) and other._runs == self._runs:
            return True
        return all(one == another for one, another in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # a table is not a key

    def texts(self) -> Iterator[bytes]:
        """What `pack` made of each run."""
        return map(zlib.decompress, self._runs)

    def _between(self, start: int, stop: int) -> Iterator[T]:
        while start < stop:
            number, at = divmod(start, RUN)
            yield from self._open(number)[at : at + stop - start]
            start = (number + 1) * RUN

    def _open(self, number: int) -> Sequence[T]:
        at, rows = self._opened
        if at != number:
            rows = self._unpack(zlib.decompress(self._runs[number]))
            self._opened = (number, rows)
        return rows


def runs_of(rows: Iterable[T]) -> Iterator[list[T]]:
    """Rows in runs."""
    left = iter(rows)
    while run := list(itertools.islice(left, RUN)):
        yield run


def _unpacked(kind: type[T], text: bytes) -> Sequence[T]:
    return tuple(map(_converter(typing.cast("Any", kind)), json.loads(text)))


_ENCODE = msgspec.json.Encoder(order="sorted").encode


@functools.cache
def _decoder(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(kind).decode


def _check_seal(data: bytes, *, where: str) -> None:
    if len(data) > MAX_RECORD_BYTES:
        raise DatasetError(f"{where}: {len(data)} bytes are too many for a record", hint=_DAMAGED)
    if data[-_SEAL_BYTES:-_SEAL_END] != _SEAL[:9]:
        raise DatasetError(f"{where}: not a sealed record", hint=_DAMAGED)
    if seal_of([data]) is None:
        raise DatasetError(f"{where}: its seal does not match its content", hint=_DAMAGED)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)


def _in_tables(kind: type, data: bytes) -> Any:
    """The fields of a canonical record, with its tables built row by row: as plain values they would take gigabytes.

    None for a record that is short, has no tables, or is invalid: `parse` says what is wrong.
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
    """The next value, which should be of this type. Values without tables are not converted."""
    if not has_tables(kind):
        return reader.value()
    if is_table(kind):
        return table_of_rows(kind, reader.rows())
    found: dict[str, Any] = {}
    for name in reader.names():
        if name in found:
            raise ValueError(f"{name} is a duplicate key")
        found[name] = _read(reader, member(kind, name))
    return found


class _Reader:
    """A position in the JSON text of a record without its last brace. Only part of the text is decoded at a time."""

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
            # A number at the end of the decoded text may continue in the next part.
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
                raise ValueError(f"{name} is not a name")
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
        """Decode more of the text, and drop what was read; False at the end."""
        left = self._text[self._at :]
        # At least twice as much, so that a long value is tried only a few times.
        block = self._data[self._taken : self._taken + max(_PART_BYTES, len(left))]
        if not block:
            return False
        self._taken += len(block)
        is_last = self._taken == len(self._data)
        self._text = left + self._decode(block, is_last) + "}" * is_last
        self._at = 0
        return True


class _WrongError(Exception):
    """What is wrong with a value, and where. The path is built as the error is raised: valid values pay nothing."""

    def __init__(self, what: str, place: str = "") -> None:
        self.what, self.place = what, place

    def inside(self, step: str) -> _WrongError:
        return _WrongError(self.what, step + self.place)


@functools.cache
def _converter(kind: Any) -> Converter:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast("type", kind))
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return _optional(_converter(next(arg for arg in args if arg is not type(None))))
    if origin is tuple:
        return _tuple(_converter(args[0]))
    if origin is Sequence:
        return _sequence(args[0])
    if origin is dict:
        return _dict(_converter(args[1]))
    raise TypeError(f"no converter for {kind}")


def _dataclass(kind: type) -> Converter:
    fields = {name: _converter(hint) for name, hint in sorted(_hints(kind).items())}
    needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}

    def build(value: Any) -> Any:
        if type(value) is not dict:
            raise _WrongError(f"expected an object, found {type(value).__name__}")
        if not needed <= value.keys() <= fields.keys():
            missing, unknown = sorted(needed - value.keys()), sorted(value.keys() - fields.keys())
            raise _WrongError(f"missing fields {missing}, unknown fields {unknown}")
        found = {}
        for name in fields if len(value) == len(fields) else sorted(value):
            try:
                found[name] = fields[name](value[name])
            except _WrongError as wrong:
                raise wrong.inside(f".{name}") from None
        return kind(**found)

    return build


def _optional(converter: Converter) -> Converter:
    return lambda value: None if value is None else converter(value)


def _tuple(converter: Converter) -> Converter:
    return lambda value: tuple(_items(converter, value))


def _sequence(kind: Any) -> Converter:
    def build(value: Any) -> Any:
        return value if isinstance(value, tuple | Table) else make_table(kind, _items(_converter(kind), value))

    return build


def _items(converter: Converter, value: Any) -> Iterator[Any]:
    if type(value) is not list:
        raise _WrongError(f"expected tuple, found {type(value).__name__}")
    for number, item in enumerate(value):
        try:
            found = converter(item)
        except _WrongError as wrong:
            raise wrong.inside(f"[{number}]") from None
        yield found


def _dict(converter: Converter) -> Converter:
    def build(value: Any) -> Any:
        if type(value) is not dict:
            raise _WrongError(f"expected dict, found {type(value).__name__}")
        found = {}
        for key, item in value.items():
            try:
                found[_text(key)] = converter(item)
            except _WrongError as wrong:
                raise wrong.inside(f".{key!r}" if not key.isidentifier() else f".{key}") from None
        return found

    return build


def _text(value: Any) -> Any:
    if type(value) is not str:
        raise _WrongError(f"expected str, found {type(value).__name__}")
    return value if value.isascii() else _any(value)


def _int(value: Any) -> Any:
    if type(value) is not int:
        raise _WrongError(f"expected int, found {type(value).__name__}")
    if not -1 <= value < MAX_INT:
        raise _WrongError(f"{value} is out of range")
    return value


def _bool(value: Any) -> Any:
    if type(value) is not bool:
        raise _WrongError(f"expected bool, found {type(value).__name__}")
    return value


def _float(value: Any) -> Any:
    if type(value) is not float and (type(value) is not int or abs(value) >= MAX_INT):
        raise _WrongError(f"expected float, found {type(value).__name__}")
    return float(_any(value))


def _any(value: Any) -> Any:
    """A value that can be written again: bounded depth, finite numbers, whole characters."""
    if type(value) is str and value.isascii():
        return value
    if _depth(value) > MAX_DEPTH:
        raise _WrongError(f"nested more than {MAX_DEPTH} deep")
    try:
        canonical(value)
    except ValueError as error:
        raise _WrongError(str(error)) from None
    return value


_SIMPLE: dict[Any, Converter] = {str: _text, int: _int, bool: _bool, float: _float, Any: _any}


def _depth(value: Any) -> int:
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, level = stack.pop()
        deepest = max(deepest, level)
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        stack.extend((child, level + 1) for child in children if isinstance(child, dict | list))
    return deepest


def is_table(kind: Any) -> bool:
    return typing.get_origin(kind) is Sequence


@functools.cache
def has_tables(kind: Any) -> bool:
    """Whether a value of this type is a table, or has tables in it."""
    if dataclasses.is_dataclass(kind):
        return any(map(has_tables, _hints(typing.cast("type", kind)).values()))
    return is_table(kind) or (typing.get_origin(kind) is dict and has_tables(typing.get_args(kind)[1]))


def member(kind: Any, name: str) -> Any:
    """The type of the value with this name in an object of this type; Any if there should be none."""
    if dataclasses.is_dataclass(kind):
        return _hints(typing.cast("type", kind)).get(name, Any)
    return typing.get_args(kind)[1]


def table_of_rows(kind: Any, rows: Iterable[Any]) -> Sequence[Any]:
    """The table of this type that has such plain rows, or `ValueError`. `convert` takes it as it is."""
    row = typing.get_args(kind)[0]
    try:
        return make_table(row, map(_converter(row), rows))
    except _WrongError as wrong:
        raise ValueError(wrong.what) from None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
