"""JSON lines: one object a line. A bad line is skipped with a reason; the lines around it are not affected.

One call parses a run of lines into the text column and nothing else: msgspec for plain English, Arrow for text with
many characters beyond ASCII, each where it is faster. If anything in the run is odd, its lines are parsed one by one: a
line is good if either parser accepts it, so the result never depends on other lines. A bad line takes a few times as
long as a good one, not more.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json

from tokenmill.errors import RecipeError
from tokenmill.sources.base import Batch, Rule, Skip, Source, judged_batch, make_batch, text_array
from tokenmill.sources.byte_ranges import BOM, DocumentRun, LineFormat
from tokenmill.sources.files import HEAD_BYTES, Pin, is_plain_json, open_stream, pin_of, read_small, recognise
from tokenmill.sources.text_columns import MAX_NAMES, common_rule, filter_columns, refusal, row_text, unseen_rule

_FIRST_NOT_ASCII = 0x80
_NEWLINE, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
_PEEK_BYTES = 64_000_000
_PEEK_STEP = 1 << 16
# Objects that decide together where the text is: enough to outvote an odd one, and few enough for many files.
_VOTES = 64
# If more than this fraction of the first bytes of a run is beyond ASCII, Arrow is faster: it makes no Python strings.
_SAMPLE_BYTES = 1 << 16
_NON_ASCII_SHARE = 1 / 64
# Reasons for which msgspec refuses a line that Arrow may accept.
_UNPARSED = ("invalid_utf8", "invalid_json")
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False)
# An escape that is surely half of a pair. Behind a backslash it may not be an escape, which a parser decides.
_HALF_ESCAPE = re.compile(
    rb"\\u[dD](?<!\\\\u[dD])(?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
# Numbers that msgspec may refuse as out of range, or ignore in a field that is not requested.
_EXTREME_NUMBER = re.compile(rb"\d(?:[eE]\+?\d{2}|\d{199})")
# Half of a pair as raw bytes.
_HALF_BYTES = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
# Numbers that Arrow accepts and msgspec does not; Python's parser does not know all of them either.
_OTHER_NUMBER = re.compile(rb"-?(?:Inf(?:inity)?|NaN)(?=\s*[,\]}])")
# One that is not closed ends with the line, so that no other match begins inside of it.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)')
_KEY = re.compile(rb"(" + _STRING.pattern + rb")\s*:")
# What stands for half of a pair where a parser refuses it: no text has this character.
_MARK = "\uffff"
_MARK_BYTES = _MARK.encode()
# Where half of a pair or a mark cannot be told from something else: behind a backslash, or beside a mark.
_UNCLEAR = (b"\\\\u", b"\\uf", b"\\uF", _MARK_BYTES)
# Numbers that Python's parser accepts and msgspec does not; digits that it refuses.
_PYTHONS_NUMBER = re.compile(rb"-?Infinity|NaN")
_MAX_DIGITS = 4300
_LONG_NUMBER = re.compile(rb"(?<!\d)\d{%d}" % (_MAX_DIGITS + 1))
# Brackets one inside the other that Python's parser still takes in a worker: the same wherever a line is read.
_MAX_DEPTH = 976
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


class JsonLinesFormat(LineFormat):
    has_columns: ClassVar[bool] = True

    def find_text(self, path: str, source: Source, *, text_column: str | None, template: str | None) -> Rule:
        """The rule of the first objects that have a known shape, or the requested fields."""
        groups = fields(path, source.compression, pin_of(source))
        rule = first_rule(groups, path, text_column=text_column, template=template)
        if rule is None and is_plain_json(path):
            raise RecipeError(
                f"{path} is not JSON lines: it has no line that is an object",
                hint="put one object on each line: jq -c '.[]' FILE > FILE.jsonl",
            )
        return rule or unseen_rule(text_column=text_column, template=template)

    def columns(self, path: str, source: Source) -> Iterator[str]:
        return names_of(fields(path, source.compression, pin_of(source)))

    def check(self, path: str, source: Source) -> None:
        for _ in fields(path, source.compression, pin_of(source)):
            pass

    def parse_lines(self, run: DocumentRun, index: int, rule: Rule, limit: int) -> Batch:
        return lines(run, index, rule, limit)


def first_rule(
    groups: Iterable[list[list[str]]], path: str, *, text_column: str | None, template: str | None
) -> Rule | None:
    """The rule of the first group of objects that decides, from the names of their fields; None without objects."""
    seen: set[str] = set()
    for objects in groups:
        rule = common_rule(objects, text_column=text_column, template=template)
        if rule is not None:
            return rule
        if len(seen) < MAX_NAMES:
            seen.update(*objects)
    if seen:
        raise refusal(sorted(seen)[:MAX_NAMES], text_column=text_column, template=template, where=path)
    return None


def names_of(groups: Iterable[list[list[str]]]) -> Iterator[str]:
    """The names of the fields of objects, one object after the other."""
    return (name for objects in groups for names in objects for name in names)


def judged_objects(objects: list[bytes], positions: npt.NDArray[np.int64], index: int, rule: Rule, limit: int) -> Batch:
    """The documents of objects that were found one by one."""
    judged = _judge_lines(objects, positions, rule, limit)
    if not (names := filter_columns(rule)):
        return judged_batch(index, judged)
    line_at = dict(zip(positions.tolist(), objects, strict=True))
    beside: list[dict[str, Any]] = []

    def with_values() -> Iterator[tuple[int, str, str]]:
        for position, text, reason in judged:
            row = None if reason else _whole_object(line_at[position])
            if row is None:
                yield position, "", reason or "invalid_json"
            else:
                beside.append({name: row.get(name) for name in names})
                yield position, text, ""

    batch = judged_batch(index, with_values())
    return replace(batch, beside=tuple(beside))


def _whole_object(line: bytes) -> dict[str, Any] | None:
    """All fields of an object whose text was found; None if only its text can be parsed."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (ValueError, RecursionError):
        pass
    try:  # numbers such as NaN, which only Arrow and Python accept
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def lines(run: DocumentRun, index: int, rule: Rule, limit: int) -> Batch:
    """The documents of a run of lines."""
    if run.too_large:
        skip = Skip(index, run.start, "too_large")
        return make_batch(index, pa.array([], pa.string()), np.zeros(0, np.int64), [skip])
    data, at = run.data, run.start
    if at == 0 and data[: len(BOM)] == BOM:
        data, at = data[len(BOM) :], len(BOM)
    view = np.frombuffer(data, np.uint8)
    newlines = np.flatnonzero(view == _NEWLINE) if run.breaks is None else run.breaks - (at - run.start)
    starts = np.concatenate(([0], newlines + 1))
    ends = np.concatenate((newlines, [len(view)]))
    text = None
    if "column" in rule and not filter_columns(rule) and _is_one_object_a_line(view, starts, ends, limit):
        parse = _arrow_column if _is_non_ascii(view) else _msgspec_column
        text = parse(data, rule["column"], len(starts))
    if text is not None:
        return make_batch(index, text, starts + at)
    return judged_objects(bytes(data).split(b"\n"), starts + at, index, rule, limit)


def _is_one_object_a_line(
    view: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], limit: int
) -> bool:
    """Whether every line begins with "{", ends with "}" and is not too large.

    Then no object can contain a newline, so as many rows as lines means one row per line.
    """
    lengths = ends - starts
    if not len(view) or int(lengths.min()) <= 1 or int(lengths.max()) > limit:
        return False
    last = view[ends - 1]
    last = np.where(last == _RETURN, view[ends - 2], last)
    return bool((view[starts] == _OPEN).all() and (last == _CLOSE).all())


def fields(path: str, compression: str, pin: Pin | None = None) -> Iterator[list[list[str]]]:
    """The names of the fields of each object at the beginning of a file, some objects at a time.

    The file is read lazily, not much further than the objects that the caller has asked for.
    """
    if pin is not None and not compression and not pin.etag and pin.bytes <= _PEEK_STEP:
        data = read_small(path, pin)
        if data is not None and recognise(data[:HEAD_BYTES]) is None:
            yield from names_in_groups(data.split(b"\n"))
            return
    with open_stream(path, compression, pin=pin) as stream:
        pending: list[bytes] = []  # the beginning of a line whose end is not read yet
        for _ in range(_PEEK_BYTES // _PEEK_STEP):
            chunk = stream.read(_PEEK_STEP)
            if not chunk:
                yield from names_in_groups([b"".join(pending)])
                return
            first, *others = chunk.split(b"\n")
            pending.append(first)
            if others:
                yield from names_in_groups([b"".join(pending), *others[:-1]])
                pending = others[-1:]


def names_in_groups(lines: Iterable[bytes]) -> Iterator[list[list[str]]]:
    """The names of the fields of each line that is an object with any, `_VOTES` objects at a time."""
    objects = filter(None, map(_field_names, lines))
    while group := list(itertools.islice(objects, _VOTES)):
        yield group


def _field_names(line: bytes) -> list[str]:
    line = line.removeprefix(BOM)
    if not line.lstrip().startswith(b"{"):  # an exception for each of millions of such lines would be slow
        return []
    try:
        return list(fields_decoder().decode(line))
    except (ValueError, RecursionError):
        return []


@lru_cache(maxsize=1)
def fields_decoder() -> msgspec.json.Decoder[dict[str, msgspec.Raw]]:
    """A decoder that takes the names of an object's fields and leaves the values undecoded."""
    return msgspec.json.Decoder(dict[str, msgspec.Raw])


def _is_non_ascii(view: npt.NDArray[np.uint8]) -> bool:
    beginning = view[:_SAMPLE_BYTES]
    return bool(np.count_nonzero(beginning >= _FIRST_NOT_ASCII) > len(beginning) * _NON_ASCII_SHARE)


def _msgspec_column(data: bytes | memoryview, column: str, num_lines: int) -> pa.Array | None:
    """The text of every line; None unless each line is an object with text in that field."""
    try:
        rows = _row_decoder(column).decode_lines(data)
    except (ValueError, RecursionError):
        return None
    return text_array([row.text for row in rows]) if len(rows) == num_lines else None


@lru_cache(maxsize=16)
def _row_decoder(column: str) -> msgspec.json.Decoder[Any]:
    """A decoder that takes one field of an object and skips all others."""
    return msgspec.json.Decoder(msgspec.defstruct("Row", [("text", str)], rename={"text": column}, gc=False))


def _arrow_column(data: bytes | memoryview, column: str, num_lines: int) -> pa.Array | None:
    """The same with Arrow's parser."""
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
    # Lines that Arrow may still accept: their index in `judged`, and the reason if it does not.
    odd: list[tuple[int, bytes, str]] = []
    column = rule.get("column")
    for line, position in zip(lines, positions.tolist(), strict=True):
        if len(line) > limit and len(line.removesuffix(b"\r")) > limit:
            judged.append((position, "", "too_large"))
        elif line and not line.isspace():
            if column is not None and _is_braced(line):
                text, reason, is_odd = _column_text(line, column)
                if is_odd:
                    odd.append((len(judged), line, reason))
            else:
                text, reason = _any_text(line, rule)
            judged.append((position, text, reason))
    if odd:
        parsed = _parsed_by_arrow([line for _, line, _ in odd], rule["column"])
        for (number, _, reason), data in zip(odd, parsed, strict=True):
            judged[number] = (judged[number][0], *(_valid_text(data) if data is not None else ("", reason)))
    yield from judged


def _is_braced(line: bytes) -> bool:
    return line.startswith(b"{") and (line.endswith(b"}") or line.rstrip(b"\r").endswith(b"}"))


def _column_text(line: bytes, column: str) -> tuple[str, str, bool]:
    """The text of an object; or the reason why msgspec does not find any, and whether Arrow may.

    An exception takes ten times as long as a good line, so no parser is called that is known to fail.
    """
    if _HALF_ESCAPE.search(line) and _is_utf8(line):  # every parser refuses it; is anything else wrong?
        return "", *_unparsed(line, column)
    try:
        return _row_decoder(column).decode(line).text, "", False
    except msgspec.ValidationError:  # it is JSON, and its text is missing or is not text
        pass
    except UnicodeDecodeError:
        # It is the text itself if no other key has this name, and nothing before it is refused.
        if b"\\" not in line and line.count(column.encode()) == 1 and not _EXTREME_NUMBER.search(line):
            return "", "invalid_utf8", False
    except msgspec.DecodeError:
        if _is_utf8(line):
            return "", *_unparsed(line, column)
    except RecursionError:
        if _is_utf8(line):
            return "", "invalid_json", _is_balanced(line)
    except ValueError:  # a name of a column that msgspec cannot have
        pass
    text, reason = _any_text(line, {"column": column})
    # Arrow ignores half of a surrogate pair as raw bytes in another field, but not as an escape.
    is_unparsed = reason in _UNPARSED or (reason == "lone_surrogate" and b"\xed" in line)
    return text, reason, is_unparsed and _arrow_may_accept(line, column)


def _is_utf8(line: bytes) -> bool:
    """Whether an object is UTF-8, so that only its JSON can be wrong."""
    if line[1:2] == b"\x00":  # UTF-16 or UTF-32 to Python's parser
        return False
    return line.isascii() or not _valid_text(line)[1]


def _unparsed(line: bytes, column: str) -> tuple[str, bool]:
    """Why msgspec refuses a line of UTF-8, and whether Arrow may accept it."""
    if _has_lone_surrogate(line):
        return "lone_surrogate", False
    is_other_number = (b"Inf" in line or b"NaN" in line) and _OTHER_NUMBER.search(line) is not None
    return "invalid_json", is_other_number and _arrow_may_accept(line, column)


def _any_text(line: bytes, rule: Rule) -> tuple[str, str]:
    """The text of any line, or the reason why msgspec does not find any."""
    try:
        row: Any = msgspec.json.decode(line)
    except UnicodeDecodeError:
        return "", "invalid_utf8"
    except (ValueError, RecursionError):
        return "", "lone_surrogate" if _has_lone_surrogate(line) else "invalid_json"
    return row_text(rule, row) if isinstance(row, dict) else ("", "invalid_json")


def _arrow_may_accept(line: bytes, column: str) -> bool:
    """Whether Arrow might parse an object that msgspec refuses: NaN, deep nesting, invalid bytes in other fields.

    A call to Arrow takes a hundred times as long as parsing a line, so msgspec, which leaves the values as they are,
    rules out most bad lines.
    """
    if b"Inf" in line or b"NaN" in line:
        line = _OTHER_NUMBER.sub(b"0", line)
    try:
        row = fields_decoder().decode(line.decode(errors="replace"))
    except RecursionError:
        return _is_balanced(line)
    except ValueError:
        return False
    return bytes(row.get(column, b"")).startswith(b'"')


def _is_balanced(line: bytes) -> bool:
    """Whether as many brackets are closed as opened, outside of strings."""
    outside = _STRING.sub(b"", line)
    return outside.count(b"[") == outside.count(b"]") and outside.count(b"{") == outside.count(b"}")


def _is_too_deep(line: bytes) -> bool:
    """Whether too many brackets are one inside the other, outside of strings."""
    if line.count(b"[") + line.count(b"{") <= _MAX_DEPTH:
        return False
    steps = np.frombuffer(_STRING.sub(b"", line).translate(_STEPS, _NO_BRACKETS), np.int8)
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0)) > _MAX_DEPTH


def _parsed_by_arrow(lines: list[bytes], column: str) -> list[bytes | None]:
    """The text of each line; None for a line that Arrow refuses. Halves the lines until it accepts them."""
    text = _arrow_column(b"\n".join(lines), column, len(lines))
    if text is not None:
        found: list[bytes | None] = text.view(pa.binary()).to_pylist()
        return found
    if len(lines) == 1:
        return [None]
    half = len(lines) // 2
    return _parsed_by_arrow(lines[:half], column) + _parsed_by_arrow(lines[half:], column)


def _valid_text(data: bytes) -> tuple[str, str]:
    try:
        return data.decode(), ""
    except UnicodeDecodeError:
        return "", "invalid_utf8"


def _has_lone_surrogate(line: bytes) -> bool:
    """Whether a line is JSON except for half of a surrogate pair.

    What is JSON, and which of two fields of one name is kept, is as Python's parser has it. To ask it takes up to a
    hundred times as long as msgspec takes, which refuses half of a pair: so that is replaced by a mark first.
    """
    if not (b"\\u" in line or b"\xed" in line or b"\x00" in line):
        return False
    is_clear = line[:1] == b"{" and line[1:2] != b"\x00" and not any(map(line.__contains__, _UNCLEAR))
    if not is_clear or (len(line) > _MAX_DIGITS and _LONG_NUMBER.search(line)):
        return _has_surrogate(line)
    marked = _HALF_ESCAPE.sub(_MARK_BYTES, line)
    if b"\xed" in line:
        marked = _HALF_BYTES.sub(_MARK_BYTES, marked)
    if _MARK_BYTES not in marked or _valid_text(marked)[1] or _is_too_deep(marked):
        return False
    if b"NaN" in marked or b"Inf" in marked:
        marked = _PYTHONS_NUMBER.sub(b"[]", marked)
    try:
        row = fields_decoder().decode(marked)
    except RecursionError:  # the caller's own stack is deep: what is in there is not known, but its brackets match
        return _is_balanced(marked)
    except ValueError:
        return False
    return _MARK in "".join(row) or any(map(_is_mark_kept, map(bytes, row.values())))


def _is_mark_kept(value: bytes) -> bool:
    """Whether a value has a mark that does not vanish because a later field of the same object has the same name."""
    if _MARK_BYTES not in value or value.startswith(b'"'):
        return _MARK_BYTES in value
    names = _KEY.findall(value)
    if len(set(names)) == len(names) and not any(b"\\" in name for name in names):
        return True
    return _has_surrogate(value.replace(_MARK_BYTES, b"\\ud800"))


def _has_surrogate(line: bytes) -> bool:
    """Whether Python's parser finds text that UTF-8 cannot encode."""
    try:
        _ENCODER.encode(json.loads(line)).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False
