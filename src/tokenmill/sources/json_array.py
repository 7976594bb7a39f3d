"""JSON arrays: a file that is an array of objects, or an object with one such array in it.

    [ {"text": "a"} , {"text": "b"} ]      {"version": 1, "data": [ {"text": "a"} , {"text": "b"} ]}
      [           ]   [           ]                                 [           ]   [           ]     elements

Elements are found by their brackets, outside of strings, a chunk at a time, so memory does not depend on the file.
Each is then parsed as a line of JSON lines is: a bad element is skipped with a reason. A file whose brackets do not
match is an error. A file with one object a line is JSON lines, whatever its name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.errors import SourceError
from tokenmill.sources import jsonl
from tokenmill.sources.base import (
    BATCH_BYTES,
    Batch,
    Extent,
    Rule,
    Skip,
    Source,
    SourceFormat,
    SourceSlice,
    make_batch,
)
from tokenmill.sources.byte_ranges import BOM
from tokenmill.sources.files import ByteStream, Pin, open_stream, pin_of
from tokenmill.sources.text_columns import common_rule, unseen_rule

_QUOTE, _BACKSLASH, _COMMA, _CLOSE_ARRAY = b'"\\,]'
_STEP = 1 << 16
# How much of a file is read to see what it is, and the most that may surround its array.
_MAX_HEAD = 64_000_000
_MAX_READ = 64 << 20
_SLACK = 4
_SPACE = b" \t\r\n"
_HINT = "fix the file, or make it JSON lines: jq -c '.[]' FILE > FILE.jsonl"
# A string without a raw newline, or one that is cut off, or anything else that JSON is made of.
_TOKEN = re.compile(rb'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+("?)|[\[\]{},:]|[^\s\[\]{},:"]+')


class JsonArrayFormat(SourceFormat):
    has_columns: ClassVar[bool] = True
    starts_anywhere: ClassVar[bool] = False

    def find_text(self, path: str, source: Source, *, text_column: str | None, template: str | None) -> Rule:
        groups = (group for elements in _elements(path, source) for group in jsonl.names_in_groups(elements.texts()))
        rule = jsonl.first_rule(groups, path, text_column=text_column, template=template)
        return rule or unseen_rule(text_column=text_column, template=template)

    def columns(self, path: str, source: Source) -> Iterator[str]:
        for elements in _elements(path, source):
            yield from jsonl.names_of(jsonl.names_in_groups(elements.texts()))

    def check(self, path: str, source: Source) -> None:
        for _ in _elements(path, source):
            pass

    def extent(self, path: str, source: Source) -> Extent:
        return Extent(text_bytes=source.expanded_bytes)

    def read(self, part: SourceSlice, *, limit: int, batch_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
        index = part.index
        for elements in _elements(part.path, part.source, limit=limit, chunk=batch_bytes):
            if elements.too_large:
                skip = Skip(index, elements.start, "too_large")
                yield make_batch(index, pa.array([], pa.string()), np.zeros(0, np.int64), [skip])
            else:
                yield jsonl.judged_objects(elements.texts(), elements.positions(), index, part.source.text, limit)


def kind_of_json(path: str, compression: str, pin: Pin, *, text_column: str | None, template: str | None) -> str:
    """The kind of a .json file by its beginning: `json` if it is an array, or an object with one; else `jsonl`."""
    try:
        with open_stream(path, compression, pin=pin, step=_STEP) as stream:
            return "json" if _is_array(stream, text_column, template) else "jsonl"
    except SourceError:  # it is reported when the file is read
        return "jsonl"


def _is_array(stream: ByteStream, text_column: str | None, template: str | None) -> bool:
    data, line, is_end = b"", b"", False
    while not is_end and len(data) < _MAX_HEAD:
        more = stream.read(max(_STEP, len(data)))
        is_end = not more
        data = (data + more).removeprefix(BOM).lstrip(_SPACE)
        line, _, rest = data.partition(b"\n")
        if data[:1] not in (b"[", b"{") or rest.strip(_SPACE):
            break
    if data[:1] == b"[":
        rows = _rows_of(data)
        return rows is not None and not (rest.strip(_SPACE) and _fields_of(b'{"":%b}' % line))
    fields = _fields_of(line)
    if fields and rest.strip(_SPACE):
        return False
    rows = _rows_of(data) if data[:1] == b"{" else None
    # An object that has its text beside the array is a line.
    return (
        rows is not None and common_rule([[*fields, *rows.names]], text_column=text_column, template=template) is None
    )


def _fields_of(data: bytes) -> Mapping[str, msgspec.Raw]:
    """The fields of an object; none if it is not valid."""
    try:
        return jsonl.fields_decoder().decode(data)
    except (ValueError, RecursionError):
        return {}


class _ArrayStart(NamedTuple):
    """Where the first element of an array begins, and the keys of the object before it; none for a bare array."""

    begin: int
    names: list[str]


def _rows_of(data: bytes) -> _ArrayStart | None:
    """The array of objects in data that begins with a value; None if that has none, as far as the data goes."""
    tokens = _TOKEN.finditer(data)
    first = next(tokens, None)
    if first is None or first[0] == b"[":
        return _ArrayStart(first.end(), []) if first is not None and _holds_objects(data, first.end()) else None
    names: list[str] = []
    depth, is_key = 1, True
    for token in tokens:
        mark = token[0]
        if token[1] == b"" or depth == 0:
            return None  # a string is cut off, or the object has ended
        if depth == 1 and is_key:
            if mark[:1] != b'"':
                return None
            names.append(mark[1:-1].decode(errors="replace"))
            is_key = False
        elif depth == 1 and mark == b"[" and data[token.end() :].lstrip(_SPACE)[:1] == b"{":
            return _ArrayStart(token.end(), names)
        depth += (mark in b"[{") - (mark in b"]}")
        is_key = is_key or (depth == 1 and mark == b",")
    return None


def _holds_objects(data: bytes, at: int) -> bool:
    return data[at : at + _STEP].lstrip(_SPACE)[:1] in (b"{", b"]", b"")


@dataclass(frozen=True, slots=True)
class _Elements:
    """Elements and what separates them. `edges` are their bounds in `data`. One above the limit has none."""

    start: int
    data: bytes
    edges: npt.NDArray[np.int64]
    too_large: bool = False

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """Where elements begin and end, without the white space around them. What is blank is not an element."""
        for first, last in itertools.pairwise(self.edges.tolist()):
            text = self.data[first + 1 : last]
            if bare := text.strip(_SPACE):
                begin = first + 1 + len(text) - len(text.lstrip(_SPACE))
                yield begin, begin + len(bare)

    def texts(self) -> list[bytes]:
        return [self.data[begin:end] for begin, end in self._bounds()]

    def positions(self) -> npt.NDArray[np.int64]:
        return np.array([begin for begin, _ in self._bounds()], np.int64) + self.start


def _elements(path: str, source: Source, *, limit: int = _MAX_HEAD, chunk: int = _STEP) -> Iterator[_Elements]:
    with open_stream(path, source.compression, pin=pin_of(source), step=chunk) as stream:
        data, at, is_object = _to_rows(stream, path)
        step, more = chunk, data
        while True:
            # The separator before an element is part of its data.
            found = _scan(data)
            if len(found.edges) > 1:
                last = int(found.edges[-1])
                yield _Elements(at, data[: last + 1], found.edges)
                data, at, step = data[last:], at + last, chunk
            if found.is_end:
                break
            if len(data) > limit + _SLACK and data[1:].lstrip(_SPACE):
                yield _Elements(at + 1, b"", found.edges, too_large=True)
                size, data, is_end = _skip_element(stream, data, _scan(data), path, at)
                at, step = at + size, chunk
                if is_end:
                    break
                continue
            more = stream.read(step)
            if not more:
                raise _broken(path, at, "does not end")
            data += more
            step = max(chunk, min(len(data), _MAX_READ))
        _check_tail(stream, data, path, at, is_object=is_object)


def _to_rows(stream: ByteStream, path: str) -> tuple[bytes, int, bool]:
    """What was read from the bracket of the array on, its position, and whether an object is around it."""
    data = b""
    while len(data) < _MAX_HEAD and (more := stream.read(max(_STEP, len(data)))):
        data += more
        bare = data.removeprefix(BOM).lstrip(_SPACE)
        before = len(data) - len(bare)
        if bare and (rows := _rows_of(bare)) is not None:
            at = before + rows.begin - 1
            return data[at:], at, bool(rows.names)
    raise SourceError(f"{path} has no array of objects in its first {len(data):,} bytes", hint=_HINT)


class _Separators(NamedTuple):
    """The separators of elements: the first byte, commas, and the bracket that ends the array if `is_end`.

    `carry` stands for the data in front of what follows it.
    """

    edges: npt.NDArray[np.int64]
    is_end: bool
    carry: bytes


def _scan(data: bytes) -> _Separators:
    """Find separators in data that begins with one."""
    view = np.frombuffer(data, np.uint8)
    quotes = _plain_quotes(view)
    marks = np.flatnonzero(_IS_MARK[view[1:]]) + 1
    marks = marks[np.searchsorted(quotes, marks) % 2 == 0]
    steps = _STEPS[view[marks]]
    depths = np.cumsum(steps)
    ended = np.flatnonzero(depths < 0)
    is_end = len(ended) > 0
    if is_end:
        marks, depths = marks[: int(ended[0]) + 1], depths[: int(ended[0]) + 1]
    edges = marks[((view[marks] == _COMMA) & (depths == 0)) | (depths < 0)]
    carry = b""
    if not is_end:
        carry = b"," + b"[" * (int(depths[-1]) if len(depths) else 0)
        if len(quotes) % 2:
            carry += b'"' + b"\\" * (_num_backslashes(data) % 2)
    return _Separators(np.concatenate((np.zeros(1, np.int64), edges)), is_end, carry)


_IS_MARK = np.zeros(256, np.bool_)
_IS_MARK[list(b"[]{},")] = True
_STEPS = np.zeros(256, np.int64)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def _plain_quotes(view: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The quotes that begin or end a string: an odd number of backslashes before one takes its meaning."""
    quotes = np.flatnonzero(view == _QUOTE)
    behind = view[quotes - 1] == _BACKSLASH if len(quotes) else np.zeros(0, np.bool_)
    if not behind.any():
        return quotes
    backslashes = np.flatnonzero(view == _BACKSLASH)
    firsts = backslashes[np.diff(backslashes, prepend=-2) > 1]
    last = quotes[behind] - 1
    run = last - firsts[np.searchsorted(firsts, last, side="right") - 1] + 1
    escaped = np.zeros(len(quotes), np.bool_)
    escaped[np.flatnonzero(behind)[run % 2 == 1]] = True
    return quotes[~escaped]


def _num_backslashes(data: bytes) -> int:
    """At the end of the data."""
    return len(data) - len(data.rstrip(b"\\"))


def _skip_element(stream: ByteStream, data: bytes, found: _Separators, path: str, at: int) -> tuple[int, bytes, bool]:
    """Read past an element: its length, what was read from its end on, and whether that ends the array."""
    length = len(data)
    while True:
        carry = found.carry
        if len(carry) > BATCH_BYTES:
            raise _broken(path, at, f"is nested {len(carry):,} deep")
        more = stream.read(BATCH_BYTES)
        if not more:
            raise _broken(path, at, "does not end")
        data = carry + more
        found = _scan(data)
        if len(found.edges) > 1:
            end = int(found.edges[1])
            return length + end - len(carry), data[end:], found.is_end and len(found.edges) == 2  # noqa: PLR2004
        length += len(more)


def _broken(path: str, at: int, what: str) -> SourceError:
    return SourceError(f"{path}: the element of the array behind byte {at} {what}", hint=_HINT)


def _check_tail(stream: ByteStream, data: bytes, path: str, at: int, *, is_object: bool) -> None:
    """Refuse a file with anything behind its array that could be more documents, or that is not JSON."""
    if data[0] != _CLOSE_ARRAY:
        raise _broken(path, at, "has more brackets closed than opened")
    while len(data) < _MAX_HEAD and (more := stream.read(_STEP)):
        data += more
    tail = data[1:].strip(_SPACE)
    if not is_object:
        if tail:
            raise SourceError(f"{path}: its array ends at byte {at}, and more follows", hint=_HINT)
        return
    fields = _fields_of(b'{"":0' + tail)
    if not fields:
        raise SourceError(f"{path}: what follows its array at byte {at} is not valid JSON", hint=_HINT)
    for name, value in fields.items():
        if _rows_of(bytes(value)) is not None and bytes(value).lstrip(b"[" + _SPACE)[:1] == b"{":
            raise SourceError(
                f"{path} has several arrays of objects: one before byte {at}, and {name}",
                hint="choose one and make it JSON lines: jq -c '.KEY[]' FILE > FILE.jsonl",
            )
