"""Plain JSON values to dataclasses, strictly: right fields of the right types, or an error that names the place.

A field that is a `Sequence` becomes a tuple, or a table if it is long. Only a field that has a default may be missing:
records of before it was there stay readable.

Each type is looked at once and becomes a function; where a value is wrong, the place is put
together on the way out, so that right values cost nothing for it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tokenmill.errors import DatasetError
from tokenmill.table import MANY, Table, runs_of

T = TypeVar("T")
Converter = Callable[[Any], Any]

MAX_DEPTH = 16
# No record holds a number like this or above: whatever gets into one is kept below.
MAX_INT = 1 << 62


class _WrongError(Exception):
    """What is wrong with a value, and where in it."""

    def __init__(self, what: str, place: str = "") -> None:
        self.what, self.place = what, place

    def inside(self, step: str) -> _WrongError:
        return _WrongError(self.what, step + self.place)


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
    """The same text, part by part: a long table never stands in memory as a whole. An iterator counts as a list."""
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


def make_table(
    kind: type[T],
    rows: Iterable[T],
    *,
    pack: Callable[[Sequence[T]], bytes] = canonical,
    unpack: Callable[[bytes], Sequence[T]] | None = None,
    many: int = 0,
) -> Sequence[T]:
    """Rows of a dataclass as a tuple, or packed if they are `many`."""
    if isinstance(rows, Table):
        return rows
    left, many = iter(rows), many or MANY
    first = deque(itertools.islice(left, many))
    if len(first) < many:
        return tuple(first)
    # Those that wait are let go of one by one.
    waiting = (first.popleft() for _ in range(many))
    return Table(itertools.chain(waiting, left), pack, unpack or functools.partial(_unpacked, kind))


def _unpacked(kind: type[T], text: bytes) -> Sequence[T]:
    return tuple(map(_converter(typing.cast("Any", kind)), json.loads(text)))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _names(type(value))}
    if isinstance(value, Table):
        return list(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain)


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


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


def is_table(kind: Any) -> bool:
    return typing.get_origin(kind) is Sequence


@functools.cache
def has_tables(kind: Any) -> bool:
    """Whether a value of this type is a table, or has tables in it."""
    if dataclasses.is_dataclass(kind):
        return any(map(has_tables, _hints(typing.cast("type", kind)).values()))
    return is_table(kind) or (typing.get_origin(kind) is dict and has_tables(typing.get_args(kind)[1]))


def member(kind: Any, name: str) -> Any:
    """The type of what stands under a name in an object of this type; anything where nothing should."""
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
