"""JSON lines: one object a line. A bad line is told apart from its neighbours, and skipped.

A run of lines goes to one parser at once, which builds the text column and nothing else: msgspec
for plain English, Arrow for what is mostly beyond ASCII, each where it is the quicker one. If anything
in the run is odd, its lines are judged one by one: a line is good if any parser takes it, so that what
becomes of it never depends on its neighbours.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json

from tokenmill.arrow_text import text_array
from tokenmill.planning import Source
from tokenmill.sources.batch import Batch, Skip, judged_batch, make_batch
from tokenmill.sources.columns import Rule, row_text
from tokenmill.sources.places import Pin, pin_of
from tokenmill.sources.separated import read_runs
from tokenmill.sources.streams import open_stream

_BOM = b"\xef\xbb\xbf"
_NEWLINE, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
_PEEK_BYTES = 64_000_000
_PEEK_STEP = 1 << 16
# Objects that tell together where the text is: enough that an odd one does not, and quickly looked at in many files.
_FEW = 64
# Of the first bytes of a run, how many beyond ASCII make Arrow the quicker one: it need not make Python's strings.
_LOOK_BYTES = 1 << 16
_FOREIGN_SHARE = 1 / 64


def read(
    path: str, index: int, source: Source, start: int, stop: int, *, limit: int, chunk: int | None = None
) -> Iterator[Batch]:
    for run in read_runs(path, source.compression, b"\n", start, stop, limit, chunk, pin_of(source)):
        if run.too_large:
            skip = Skip(index, run.start, "too_large")
            yield make_batch(index, pa.array([], pa.string()), np.zeros(0, np.int64), [skip])
            continue
        data, at = run.data, run.start
        if at == 0 and data[: len(_BOM)] == _BOM:
            data, at = data[len(_BOM) :], len(_BOM)
        view = np.frombuffer(data, np.uint8)
        newlines = np.flatnonzero(view == _NEWLINE) if run.breaks is None else run.breaks - (at - run.start)
        starts = np.concatenate(([0], newlines + 1))
        ends = np.concatenate((newlines, [len(view)]))
        text = None
        if "column" in source.text and _is_one_object_a_line(view, starts, ends, limit):
            parse = _arrow_column if _is_foreign(view) else _msgspec_column
            text = parse(data, source.text["column"], len(starts))
        if text is not None:
            yield make_batch(index, text, starts + at)
        else:
            lines = bytes(data).split(b"\n")
            yield judged_batch(index, _judge_lines(lines, starts + at, source.text, limit))


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
    for line, position in zip(lines, positions.tolist(), strict=True):
        if len(line.removesuffix(b"\r")) > limit:
            yield position, "", "too_large"
        elif line and not line.isspace():
            yield position, *_line_text(line, rule)


def _line_text(line: bytes, rule: Rule) -> tuple[str, str]:
    try:
        row: Any = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        if "column" in rule and line.startswith(b"{") and line.rstrip(b"\r").endswith(b"}"):
            for parse in (_msgspec_column, _arrow_column):
                column = parse(line, rule["column"], 1)
                if column is not None:
                    return _valid_text(column)
        if isinstance(error, UnicodeDecodeError):
            return "", "invalid_utf8"
        return "", "lone_surrogate" if _has_lone_surrogate(line) else "invalid_json"
    if not isinstance(row, dict):
        return "", "invalid_json"
    return row_text(rule, row)


def _valid_text(column: pa.Array) -> tuple[str, str]:
    try:
        return column.cast(pa.binary())[0].as_py().decode(), ""
    except UnicodeDecodeError:
        return "", "invalid_utf8"


def _has_lone_surrogate(line: bytes) -> bool:
    """Whether a line is JSON but for an escaped half of a surrogate pair."""
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False
