"""Sealed records: how the plan, the receipts and the manifest stand on disk.

    value -> canonical JSON (sorted keys, no spaces), its SHA-256 as one more field at the end -> bytes
    bytes -> size, digest, syntax, duplicate keys, NaN, depth, types all checked -> value

Whatever reads such a file gets a checked value or a `DatasetError`, never half of one.
Standard library only: a trainer node reads manifests too.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from typing import Any, TypeVar

from tokenmill.errors import DatasetError

T = TypeVar("T")

MAX_RECORD_BYTES = 1 << 30
MAX_DEPTH = 16
MAX_INT = 1 << 62


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, UTF-8, finite numbers only."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain
    ).encode()


def digest(value: Any) -> str:
    """The SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value)).hexdigest()


def seal(value: Any) -> bytes:
    """Bytes of a dataclass that `unseal` takes back, and takes only unchanged."""
    body = canonical(value)
    return body[:-1] + _SEAL % hashlib.sha256(body).hexdigest().encode()


def unseal(kind: type[T], data: bytes, *, where: str) -> T:
    """The value that was sealed. Raises `DatasetError` for anything else."""
    if len(data) > MAX_RECORD_BYTES:
        raise DatasetError(f"{where}: {len(data)} bytes are too many for a record", hint=_DAMAGED)
    body = data[:-_SEAL_BYTES] + b"}"
    if data[-_SEAL_BYTES:-_SEAL_END] != _SEAL[:9]:
        raise DatasetError(f"{where}: not a sealed record", hint=_DAMAGED)
    if data[-_SEAL_BYTES:] != _SEAL % hashlib.sha256(body).hexdigest().encode():
        raise DatasetError(f"{where}: its seal does not match its content", hint=_DAMAGED)
    value: T = convert(kind, parse(body, where=where), where=where)
    return value


def parse(data: bytes, *, where: str) -> Any:
    """Strict JSON: finite, no key twice."""
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not valid JSON: {error}", hint=_DAMAGED) from None
    return value


def convert(kind: Any, value: Any, *, where: str) -> Any:
    """Check `value` against a dataclass or a builtin type and build it."""
    if kind in _PLAIN_KINDS and type(value) is kind:
        if kind is int and not -1 <= value < MAX_INT:
            raise DatasetError(f"{where}: {value} is out of range", hint=_DAMAGED)
        return value if kind is not str or value.isascii() else _checked(value, where=where)
    if hasattr(kind, "__dataclass_fields__"):
        return _convert_dataclass(kind, value, where=where)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None and type(None) in args:
            return None
        return convert(next(arg for arg in args if arg is not type(None)), value, where=where)
    if origin is tuple and isinstance(value, list):
        return tuple(convert(args[0], item, where=f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: convert(args[1], item, where=f"{where}.{key}") for key, item in value.items()}
    if kind is Any:
        return _checked(value, where=where)
    if kind is float and (type(value) is float or (type(value) is int and abs(value) < MAX_INT)):
        return float(_checked(value, where=where))
    expected = getattr(kind, "__name__", str(kind))
    raise DatasetError(f"{where}: expected {expected}, found {type(value).__name__}", hint=_DAMAGED)


_PLAIN_KINDS = (str, bool, int)
_DAMAGED = "the file is damaged or was not written by tokenmill"
_SEAL = b',"seal":"%s"}\n'
_SEAL_END = len(b'"}\n') + 64
_SEAL_BYTES = len(_SEAL % bytes(64))


def _convert_dataclass(kind: type, value: Any, *, where: str) -> Any:
    if not isinstance(value, dict):
        raise DatasetError(f"{where}: expected an object, found {type(value).__name__}", hint=_DAMAGED)
    hints = _hints(kind)
    names = hints.keys()
    if names != value.keys():
        missing, unknown = sorted(names - value.keys()), sorted(value.keys() - names)
        raise DatasetError(f"{where}: missing fields {missing}, unknown fields {unknown}", hint=_DAMAGED)
    return kind(**{name: convert(hints[name], value[name], where=f"{where}.{name}") for name in sorted(names)})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"no JSON for {type(value).__name__}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _checked(value: Any, *, where: str) -> Any:
    """A value that can be written again: bounded depth, finite numbers, whole characters."""
    if _depth(value) > MAX_DEPTH:
        raise DatasetError(f"{where}: nested more than {MAX_DEPTH} deep", hint=_DAMAGED)
    try:
        canonical(value)
    except ValueError as error:
        raise DatasetError(f"{where}: {error}", hint=_DAMAGED) from None
    return value


def _depth(value: Any) -> int:
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, level = stack.pop()
        deepest = max(deepest, level)
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        stack.extend((child, level + 1) for child in children if isinstance(child, dict | list))
    return deepest
