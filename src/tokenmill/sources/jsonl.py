"""JSON lines: one object a line. A bad line is told apart from its neighbours, and skipped.

A run of lines goes to one parser at once, which builds the text column and nothing else: msgspec
for plain English, Arrow for what is mostly beyond ASCII, each where it is the quicker one. If anything
in the run is odd, its lines are judged one by one: a line is good if any parser takes it, so that what
becomes of it never depends on its neighbours. A bad line takes a few times as long as a good one, and no more.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json

from tokenmill.sources.base import Batch, Skip, Source, judged_batch, make_batch, text_array
from tokenmill.sources.byte_ranges import DocumentRun, read_runs
from tokenmill.sources.files import Pin, open_stream, pin_of, read_small
from tokenmill.sources.signatures import HEAD_BYTES, recognise
from tokenmill.sources.text_columns import Rule, row_text

_BOM = b"\xef\xbb\xbf"
_NEWLINE, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
_PEEK_BYTES = 64_000_000
_PEEK_STEP = 1 << 16
# Objects that tell together where the text is: enough that an odd one does not, and quickly looked at in many files.
_FEW = 64
# Of the first bytes of a run, how many beyond ASCII make Arrow the quicker one: it need not make Python's strings.
_LOOK_BYTES = 1 << 16
_FOREIGN_SHARE = 1 / 64
# Why msgspec may not parse a line that Arrow takes.
_UNPARSED = ("invalid_utf8", "invalid_json")
# What half of a surrogate pair begins with: an escape, or its bytes in one of the encodings that json detects.
_HALVES = (b"\\u", b"\xed", b"\x00")
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_DECODER = json.JSONDecoder(parse_int=float)  # long integers would be refused
# Numbers that Arrow knows and Python's parser does not.
_OTHER_NUMBER = re.compile(rb"[:\[,]\s*-?(?:Inf|NaN)")


def read(
    path: str, index: int, source: Source, start: int, stop: int, *, limit: int, chunk: int | None = None
) -> Iterator[Batch]:
    for run in read_runs(path, source.compression, b"\n", start, stop, limit, chunk, pin_of(source)):
        yield lines(run, index, source.text, limit)


def lines(run: DocumentRun, index: int, rule: Rule, limit: int) -> Batch:
    """The documents of a run of lines, as `read` gives them."""
    if run.too_large:
        skip = Skip(index, run.start, "too_large")
        return make_batch(index, pa.array([], pa.string()), np.zeros(0, np.int64), [skip])
    data, at = run.data, run.start
    if at == 0 and data[: len(_BOM)] == _BOM:
        data, at = data[len(_BOM) :], len(_BOM)
    view = np.frombuffer(data, np.uint8)
    newlines = np.flatnonzero(view == _NEWLINE) if run.breaks is None else run.breaks - (at - run.start)
    starts = np.concatenate(([0], newlines + 1))
    ends = np.concatenate((newlines, [len(view)]))
    text = None
    if "column" in rule and _is_one_object_a_line(view, starts, ends, limit):
        parse = _arrow_column if _is_foreign(view) else _msgspec_column
        text = parse(data, rule["column"], len(starts))
    if text is not None:
        return make_batch(index, text, starts + at)
    return judged_batch(index, _judge_lines(bytes(data).split(b"\n"), starts + at, rule, limit))


def _is_one_object_a_line(
    view: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], limit: int
) -> bool:
    """Whether every line begins with "{", ends with "}" and is not too large.

    Then no object can reach over a newline, so that as many rows as lines means one row a line.
    """
    lengths = ends - starts
    if not len(view) or int(lengths.min()) < 2 or int(lengths.max()) > limit:
        return False
    last = view[ends - 1]
    last = np.where(last == _RETURN, view[ends - 2], last)
    return bool((view[starts] == _OPEN).all() and (last == _CLOSE).all())


def fields(path: str, compression: str, pin: Pin | None = None) -> Iterator[list[list[str]]]:
    """The names of the fields of each object at the beginning of a file, a few objects at a time.

    Whoever has seen enough of them asks for no more, and little more than those is read.
    """
    if pin is not None and not compression and not pin.etag and pin.bytes <= _PEEK_STEP:
        data = read_small(path, pin)
        if data is not None and recognise(data[:HEAD_BYTES]) is None:
            yield from _few_objects(data.split(b"\n"))
            return
    with open_stream(path, compression, pin=pin) as stream:
        held: list[bytes] = []  # of a line that goes on
        for _ in range(_PEEK_BYTES // _PEEK_STEP):
            chunk = stream.read(_PEEK_STEP)
            if not chunk:
                yield from _few_objects([b"".join(held)])
                return
            first, *others = chunk.split(b"\n")
            held.append(first)
            if others:
                yield from _few_objects([b"".join(held), *others[:-1]])
                held = others[-1:]


def _few_objects(lines: list[bytes]) -> Iterator[list[list[str]]]:
    """The names of the fields of each line that is an object with any, by the few."""
    objects = filter(None, map(_field_names, lines))
    while few := list(itertools.islice(objects, _FEW)):
        yield few


def _field_names(line: bytes) -> list[str]:
    line = line.removeprefix(_BOM)
    if not line.lstrip().startswith(b"{"):  # there may be millions of such lines, and an error for each takes its time
        return []
    try:
        return list(_fields_decoder().decode(line))
    except (ValueError, RecursionError):
        return []


@lru_cache(maxsize=1)
def _fields_decoder() -> msgspec.json.Decoder[dict[str, msgspec.Raw]]:
    """A decoder of objects that takes their names, and passes over the values."""
    return msgspec.json.Decoder(dict[str, msgspec.Raw])


def _is_foreign(view: npt.NDArray[np.uint8]) -> bool:
    beginning = view[:_LOOK_BYTES]
    return bool(np.count_nonzero(beginning >= 0x80) > len(beginning) * _FOREIGN_SHARE)


def _msgspec_column(data: bytes | memoryview, column: str, num_lines: int) -> pa.Array | None:
    """The text of every line; None unless each line is an object with text in that field."""
    try:
        rows = _row_decoder(column).decode_lines(data)
    except (ValueError, RecursionError):
        return None
    return text_array([row.text for row in rows]) if len(rows) == num_lines else None


@lru_cache(maxsize=16)
def _row_decoder(column: str) -> msgspec.json.Decoder[Any]:
    """A decoder of objects that passes over all fields but one."""
    return msgspec.json.Decoder(msgspec.defstruct("Row", [("text", str)], rename={"text": column}, gc=False))


def _arrow_column(data: bytes | memoryview, column: str, num_lines: int) -> pa.Array | None:
    """The same, by Arrow."""
    try:
        table = pyarrow.json.read_json(
            pa.BufferReader(pa.py_buffer(data)),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=pa.schema([(column, pa.string())]), unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowException:
        return None
    text = table.column(column)
    if table.num_rows != num_lines or text.null_count or text.num_chunks != 1:
        return None
    return text.chunk(0)


def _judge_lines(
    lines: list[bytes], positions: npt.NDArray[np.int64], rule: Rule, limit: int
) -> Iterator[tuple[int, str, str]]:
    """Position, text and reason of every line that is not blank."""
    judged: list[tuple[int, str, str]] = []
    odd: list[
        tuple[int, bytes, str]
    ] = []  # lines that Arrow may still take: their place, and the reason if it does not
    for line, position in zip(lines, positions.tolist(), strict=True):
        if len(line.removesuffix(b"\r")) > limit:
            judged.append((position, "", "too_large"))
        elif line and not line.isspace():
            text, reason = _line_text(line, rule)
            if reason and "column" in rule and _may_be_taken(line, rule["column"], reason):
                odd.append((len(judged), line, reason))
            judged.append((position, text, reason))
    if odd:
        taken = _taken_by_arrow([line for _, line, _ in odd], rule["column"])
        for (place, _, reason), data in zip(odd, taken, strict=True):
            judged[place] = (judged[place][0], *(_valid_text(data) if data is not None else ("", reason)))
    yield from judged


def _line_text(line: bytes, rule: Rule) -> tuple[str, str]:
    """The text of a line, or the reason why msgspec finds none."""
    try:
        if "column" in rule and _is_braced(line):
            return _row_decoder(rule["column"]).decode(line).text, ""
    except (ValueError, RecursionError):
        pass
    try:
        row: Any = msgspec.json.decode(line)
    except UnicodeDecodeError:
        return "", "invalid_utf8"
    except (ValueError, RecursionError):
        return "", "lone_surrogate" if _has_lone_surrogate(line) else "invalid_json"
    return row_text(rule, row) if isinstance(row, dict) else ("", "invalid_json")


def _is_braced(line: bytes) -> bool:
    return line.startswith(b"{") and line.rstrip(b"\r").endswith(b"}")


def _may_be_taken(line: bytes, column: str, reason: str) -> bool:
    """Whether Arrow could find text in a line that msgspec does not parse: NaN, deep nesting, bytes in other fields.

    To ask it takes a hundred times as long as to parse a line, so Python's own parser tells what is surely bad.
    """
    # Arrow passes over half of a surrogate pair where it is raw bytes of another field, and not where it is escaped.
    is_unparsed = reason in _UNPARSED or (reason == "lone_surrogate" and b"\xed" in line)
    if not is_unparsed or not _is_braced(line):
        return False
    try:
        row = _DECODER.decode(line.decode(errors="replace"))
    except RecursionError:
        return True
    except ValueError:
        return _OTHER_NUMBER.search(line) is not None
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        return False
    return b"\\u" not in line or not _has_surrogate(row)


def _taken_by_arrow(lines: list[bytes], column: str) -> list[bytes | None]:
    """The text of each line; None for one that Arrow does not take. All at once, unless one of them is bad."""
    text = _arrow_column(b"\n".join(lines), column, len(lines))
    if text is not None:
        found: list[bytes | None] = text.view(pa.binary()).to_pylist()
        return found
    if len(lines) == 1:
        return [None]
    half = len(lines) // 2
    return _taken_by_arrow(lines[:half], column) + _taken_by_arrow(lines[half:], column)


def _valid_text(data: bytes) -> tuple[str, str]:
    try:
        return data.decode(), ""
    except UnicodeDecodeError:
        return "", "invalid_utf8"


def _has_lone_surrogate(line: bytes) -> bool:
    """Whether a line is JSON but for an escaped half of a surrogate pair."""
    if not any(half in line for half in _HALVES):
        return False
    try:
        return _has_surrogate(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _has_surrogate(value: Any) -> bool:
    """Whether a parsed value holds text that UTF-8 cannot."""
    try:
        _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return True
    except RecursionError:
        return False
    return False
