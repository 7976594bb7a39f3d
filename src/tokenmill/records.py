"""Sealed records, strictly decoded JSON with a digest: the plan, the receipts, the manifest and other small files.

    value -> canonical JSON (sorted keys, no spaces), its SHA-256 as one more field at the end -> bytes
    bytes -> size, seal, JSON, fields and types, canonical spelling are checked                -> value

msgspec decodes a record as its dataclass. Fields must be present and have the right types; only a field with a default
may be missing, so that older records stay readable. Integers are declared as `Int`, which bounds them. The value is
encoded again and must give the same bytes: that refuses duplicate keys, spaces and every other second spelling. A
reader gets a checked value, or a `DatasetError` that names the file and the place in the record.

Long tables are packed: a million rows as objects take most of a gigabyte, packed a tenth of that.

    rows      [0 ........ 255] [256 ...... 511] [512 ...]
    memory     packed bytes     packed bytes     ...        one run of rows unpacked at a time

Reading in order unpacks each run once; reading at random costs the unpacking of one run. A table is also decoded from
a record about a megabyte at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import typing
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Generic, TypeVar, overload

import msgspec

from tokenmill.arguments import MAX_INT
from tokenmill.errors import DatasetError

__all__ = [
    "MAX_RECORD_BYTES",
    "Int",
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

# The integers of records. Nothing counts below -1, which stands for no limit.
Int = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_INT)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

MAX_RECORD_BYTES = 1 << 30
# Of the lists and objects in a record.
MAX_DEPTH = 18
RUN = 256
# Up to this length a plain tuple is better.
MANY = 1 << 16
# The same for rows of kilobytes each, like receipts.
MANY_LARGE = 1 << 12
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
    kind: Any = type(value)
    if not _has_one_spelling(kind):
        return b"".join(sealed_parts(value))
    body = _encode(value)
    return body[:-1] + _SEAL % hashlib.sha256(body).hexdigest().encode()


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
    form: Any = kind
    if has_tables(form):
        _check_seal(data, where=where)
        members = _members(memoryview(data), where=where, end=data[-_SEAL_BYTES:])
        value: T = _build(form, members, where=where, depth=MAX_DEPTH)
    else:
        value = _decode(form, opened(data, where=where), where=where, depth=MAX_DEPTH)
    return value


def opened(data: bytes, *, where: str) -> bytes:
    """The sealed text, or `DatasetError` if the seal is broken or missing. For small records: it is a copy."""
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


def parse(data: bytes, *, where: str) -> Any:
    """Strict JSON in any spelling: finite numbers, no duplicate keys."""
    try:
        value = _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not valid JSON: {error}", hint=_DAMAGED) from None
    return value


def convert(kind: type[T], value: Any, *, where: str) -> T:
    """A dataclass from the plain value of JSON. Raises `DatasetError` if fields or types are not those of `kind`."""
    try:
        canonical(value)
        found = msgspec.convert(value, kind)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(error, where) from None
    _check_plain(value, found, where=where, depth=MAX_DEPTH)
    return found


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, UTF-8, finite numbers only."""
    kind: Any = type(value)
    return _encode(value) if _has_one_spelling(kind) else _ENCODER.encode(value).encode()


def canonical_parts(value: Any) -> Iterator[bytes]:
    """The same text in parts, so that a long table is never in memory as a whole. An iterator counts as a list."""
    if isinstance(value, Table | Iterator):
        texts = value.texts() if isinstance(value, Table) else map(canonical, runs_of(value))
        yield b"["
        for number, text in enumerate(texts):
            yield b"," * bool(number) + text[1:-1]
        yield b"]"
    elif _has_one_spelling(typing.cast("Any", type(value))):
        yield _encode(value)
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
        return {name: getattr(value, name) for name in _fields(type(value))}
    if isinstance(value, Table):
        return list(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain)
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
# The same text as of `_ENCODER`, but for floating-point numbers and tables.
_encode = msgspec.json.Encoder(order="sorted").encode
_decode_plain = msgspec.json.Decoder().decode


@functools.cache
def _decoder(kind: Any) -> Callable[[bytes | memoryview], Any]:
    return msgspec.json.Decoder(kind).decode


def _decode(kind: Any, text: bytes | memoryview, *, where: str, depth: int) -> Any:
    """The value of a canonical text without tables."""
    try:
        value = _decoder(kind)(text)
        if _has_one_spelling(kind) and _encode(value) == text:
            return value
        # Other numbers, or fields that an older version did not write.
        plain = _decode_plain(text)
        is_canonical = canonical(plain) == text
    except (ValueError, RecursionError) as error:
        raise _wrong(error, where) from None
    if not is_canonical:
        raise DatasetError(f"{where}: not canonical JSON: duplicate keys, or another spelling", hint=_DAMAGED)
    _check_plain(plain, value, where=where, depth=depth)
    return value


def _build(kind: Any, members: dict[str, memoryview], *, where: str, depth: int) -> Any:
    """An object that has tables, from the texts of its members."""
    if dataclasses.is_dataclass(kind):
        _check_names(typing.cast("type", kind), members, where=where)
    found = {name: _read(_member(kind, name), text, f"{where}.{name}", depth - 1) for name, text in members.items()}
    return found if typing.get_origin(kind) is dict else kind(**found)


def _read(kind: Any, text: memoryview, where: str, depth: int) -> Any:
    if not has_tables(kind):
        return _decode(kind, text, where=where, depth=depth)
    if is_table(kind):
        (row,) = typing.get_args(kind)
        return make_table(row, _rows(row, text, where=where, depth=depth))
    return _build(kind, _members(text, where=where), where=where, depth=depth)


def _members(text: memoryview, *, where: str, end: bytes = b"}") -> dict[str, memoryview]:
    """The texts of the members of a canonical object, which ends with `end`."""
    try:
        found: dict[str, memoryview] = {
            name: memoryview(raw) for name, raw in _decoder(dict[str, msgspec.Raw])(text).items()
        }
    except (ValueError, RecursionError) as error:
        raise _wrong(error, where) from None
    if end != b"}":
        found.pop("seal")
    at = 0
    for name, raw in sorted(found.items()):
        head = (b"," if at else b"{") + canonical(name) + b":"
        stop = at + len(head) + len(raw)
        if text[at : at + len(head)] != head or text[at + len(head) : stop] != raw:
            break
        at = stop
    if text[at or 1 :] != end:
        raise DatasetError(f"{where}: not canonical JSON: duplicate keys, or another spelling", hint=_DAMAGED)
    return found


def _rows(row: Any, text: memoryview, *, where: str, depth: int) -> Iterator[Any]:
    """The rows of the text of a table, decoded about a megabyte at a time."""
    kind: Any = tuple[row, ...]
    if text[0] != ord("["):
        _decode(kind, text, where=where, depth=depth)  # says what it is
    # Inside a string, the second quote would be escaped: so this occurs between rows only.
    mark = b'},{"%s":' % _fields(row)[0].encode()
    at, end, number = 1, len(text) - 1, 0
    while at < end:
        stop = _last_row_end(text[at:end], mark) + at
        try:
            rows = _decode(kind, b"[" + text[at:stop] + b"]", where=where, depth=depth)
        except DatasetError:
            # All at once, so that the error counts from the first row.
            rows, stop = _decode(kind, text, where=where, depth=depth)[number:], end
        yield from rows
        at, number = stop + 1, number + len(rows)


def _last_row_end(text: memoryview, mark: bytes) -> int:
    """Where the last row ends that is complete in the first megabyte, or in more if rows are longer."""
    size = _PART_BYTES
    while size < len(text):
        if (found := bytes(text[:size]).rfind(mark)) >= 0:
            return found + 1
        size *= 2
    return len(text)


def _check_names(kind: type, found: Iterable[str], *, where: str) -> None:
    names, needed = set(found), {one.name for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING}
    for what, wrong in (("missing required", needed - names), ("contains unknown", names - _hints(kind).keys())):
        if wrong:
            raise DatasetError(f"{where}: object {what} field {min(wrong)}", hint=_DAMAGED)


def _check_plain(plain: Any, value: Any, *, where: str, depth: int) -> None:
    """Refuse what msgspec lets pass: unknown fields, and values nested so deeply that they may not be written again."""
    if _depth(plain) > depth:
        raise DatasetError(f"{where}: nested more than {MAX_DEPTH} deep", hint=_DAMAGED)
    if unknown := _unknown_field(plain, msgspec.to_builtins(value)):
        place, _, name = unknown.rpartition(".")
        raise DatasetError(f"{where}{place}: object contains unknown field {name}", hint=_DAMAGED)


def _unknown_field(found: Any, known: Any) -> str:
    """The first field of a plain value that a decoded value does not have, with the path to it."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name not in known:
                return f".{name}"
            if unknown := _unknown_field(value, known[name]):
                return f".{name}{unknown}"
    elif isinstance(found, list):
        for number, (value, other) in enumerate(zip(found, known, strict=True)):
            if unknown := _unknown_field(value, other):
                return f"[{number}]{unknown}"
    return ""


def _wrong(error: Exception, where: str) -> DatasetError:
    """The error of a value that msgspec or JSON refuses."""
    if not isinstance(error, msgspec.ValidationError):
        return DatasetError(f"{where}: not valid JSON: {error}", hint=_DAMAGED)
    what, _, place = str(error).replace("`", "").partition(" - at ")
    place = place.removeprefix("key in ").removeprefix("$")
    return DatasetError(f"{where}{place}: {what[:1].lower()}{what[1:]}", hint=_DAMAGED)


def _depth(value: Any) -> int:
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, level = stack.pop()
        deepest = max(deepest, level)
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        stack.extend((child, level + 1) for child in children if isinstance(child, dict | list))
    return deepest


@functools.cache
def _leaves(kind: Any) -> frozenset[Any]:
    """The simple types that a type is made of; `Sequence` for a table."""
    if dataclasses.is_dataclass(kind):
        parts: Iterable[Any] = _hints(typing.cast("type", kind)).values()
    elif typing.get_origin(kind) is Annotated:
        parts = typing.get_args(kind)[:1]
    else:
        parts = [one for one in typing.get_args(kind) if one is not ...]
    found = frozenset(itertools.chain.from_iterable(map(_leaves, parts))) or frozenset({kind})
    return found | {Sequence} if is_table(kind) else found


@functools.cache
def _has_one_spelling(kind: Any) -> bool:
    """Whether msgspec encodes values of a type as `canonical` does."""
    return _leaves(kind) <= {str, int, bool, type(None)}


def is_table(kind: Any) -> bool:
    return typing.get_origin(kind) is Sequence


@functools.cache
def has_tables(kind: Any) -> bool:
    """Whether a value of this type is a table, or has tables in it."""
    return Sequence in _leaves(kind)


def _member(kind: Any, name: str) -> Any:
    """The type of the value with this name in an object of this type."""
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else _hints(kind)[name]


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """The names of the fields of a dataclass, in order of the alphabet."""
    return tuple(sorted(field.name for field in dataclasses.fields(kind)))


def make_table(kind: type[T], rows: Iterable[T], *, many: int = 0) -> Sequence[T]:
    """Rows of a dataclass as a tuple, or packed if there are `many`."""
    if isinstance(rows, Table):
        return rows
    left, many = iter(rows), many or MANY
    first = deque(itertools.islice(left, many))
    if len(first) < many:
        return tuple(first)
    # Rows are released one by one.
    waiting = (first.popleft() for _ in range(many))
    form: Any = kind
    pack = _encode if _has_one_spelling(form) else canonical
    return Table(itertools.chain(waiting, left), pack, _decoder(tuple[form, ...]))


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
