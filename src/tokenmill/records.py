"""Sealed records: how the plan, the receipts and the manifest stand on disk.

    value -> canonical JSON (sorted keys, no spaces), its SHA-256 as one more field at the end -> bytes
    bytes -> size, digest, syntax, duplicate keys, NaN, depth, types all checked -> value

Whatever reads such a file gets a checked value or a `DatasetError`, never half of one.
Standard library only: a trainer node reads manifests too.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeVar

from tokenmill.errors import DatasetError
from tokenmill.typed import canonical, convert

__all__ = ["MAX_RECORD_BYTES", "canonical", "convert", "digest", "parse", "seal", "unseal"]

T = TypeVar("T")

MAX_RECORD_BYTES = 1 << 30


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
    return convert(kind, parse(body, where=where), where=where)


def parse(data: bytes, *, where: str) -> Any:
    """Strict JSON: finite, no key twice."""
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not valid JSON: {error}", hint=_DAMAGED) from None
    return value


_DAMAGED = "the file is damaged or was not written by tokenmill"
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
