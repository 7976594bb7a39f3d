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
# How half of a surrogate pair begins: an escape, or its bytes in one of the encodings that json detects.
_HALVES = (b"\\u", b"\xed", b"\x00")
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_parse_object = json.JSONDecoder().raw_decode
_parse_any_number = json.JSONDecoder(parse_int=float).raw_decode  # long integers would be refused
_WHITE_SPACE = " \t\n\r"
# Types of values that contain no others.
_PLAIN = {str, int, float, bool, type(None)}
# An escape that is surely half of a pair. Behind a backslash it may not be an escape, which a parser decides.
_HALF_ESCAPE = re.compile(
    rb"\\u[dD](?<!\\\\u[dD])(?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
# Numbers that msgspec may refuse as out of range, or ignore in a field that is not requested.
_EXTREME_NUMBER = re.compile(rb"\d(?:[eE]\+?\d{2}|\d{199})")
# Numbers that Arrow accepts and msgspec does not; Python's parser does not know all of them either.
_OTHER_NUMBER = re.compile(rb"([:\[,]\s*)-?(?:Inf(?:inity)?|NaN)")
# One that is not closed ends with the line, so that no other match begins inside of it.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)')
# From so many brackets on, they are counted before Python's parser takes them, one inside the other.
_MANY_BRACKETS = 50
# With no more than these, or no more one inside the other, no parser reaches its limit of depth.
_SAFE_BRACKETS = 900
_KEY = re.compile(rb"(" + _STRING.pattern + rb")\s*:")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
# What stands for half of a pair where a parser refuses it: no text has this character.
_MARK, _MARK_ESCAPE, _MARK_BYTES = "\uffff", b"\\uffff", b"\xef\xbf\xbf"


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

    A call to Arrow takes a hundred times as long as parsing a line, so Python's own parser rules out most bad lines.
    """
    if _has_many_brackets(line):
        if not _is_balanced(line):
            return False
        if not _SURROGATE_ESCAPE.search(line) and not _has_extreme_number(line):
            return _may_be_text_of(line, column)
    try:
        row, _ = _parse_any_number(_OTHER_NUMBER.sub(rb"\g<1>0", line).decode(errors="replace"))
    except RecursionError:
        return _is_balanced(line)
    except ValueError:
        return False
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        return False
    return b"\\u" not in line or not _has_surrogate(row)


def _may_be_text_of(line: bytes, column: str) -> bool:
    """The same for an object with many brackets, by msgspec: it takes a level in a tenth of the time."""
    if b"Inf" in line or b"NaN" in line:
        line = _OTHER_NUMBER.sub(rb"\g<1>0", line)
    try:
        row = fields_decoder().decode(line.decode(errors="replace"))
    except RecursionError:
        return True
    except ValueError:
        return False
    return bytes(row.get(column, b"")).startswith(b'"')


def _has_extreme_number(line: bytes) -> bool:
    """Whether a number may be extreme; brackets, at each of which a search would begin anew, are taken out before."""
    return _EXTREME_NUMBER.search(line.translate(None, b"[]{}")) is not None


def _has_many_brackets(line: bytes) -> bool:
    return line.count(b"[") + line.count(b"{") > _MANY_BRACKETS


def _is_balanced(line: bytes) -> bool:
    """Whether as many brackets are closed as opened, outside of strings."""
    outside = _STRING.sub(b"", line)
    return outside.count(b"[") == outside.count(b"]") and outside.count(b"{") == outside.count(b"}")


def _depth(line: bytes) -> int:
    """How many brackets are at most one inside the other, outside of strings."""
    outside = np.frombuffer(_STRING.sub(b"", line), np.uint8)
    opens, closes = (np.isin(outside, np.frombuffer(some, np.uint8)) for some in (b"[{", b"]}"))
    return int(np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int64).max(initial=0))


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
    """Whether a line is JSON except for an escaped half of a surrogate pair."""
    if not any(half in line for half in _HALVES):
        return False
    try:
        if line.startswith(b"{") and line[1:2] != b"\x00":  # as `loads` parses it, in half the time
            found = _surrogate_between_brackets(line) if _has_many_brackets(line) else None
            if found is not None:
                return found
            text = line.decode(errors="surrogatepass")
            value, end = _parse_object(text)
            return not text[end:].strip(_WHITE_SPACE) and _has_surrogate(value)
        return _has_surrogate(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _surrogate_between_brackets(line: bytes) -> bool | None:
    """The same for an object with many brackets, without Python's parser; None where only that knows.

    Python's parser takes hundreds of times as long as a good line, most of it for nothing: to find that the last
    bracket is missing, or to reach text that is at the top.
    """
    if not _is_balanced(line):
        return False
    is_plain = not any(odd in line for odd in (b"NaN", b"Inf", _MARK_ESCAPE, _MARK_BYTES))
    is_safe = line.count(b"[") + line.count(b"{") <= _SAFE_BRACKETS or _depth(line) <= _SAFE_BRACKETS
    if not (is_plain and is_safe and _is_utf8(line)) or _has_extreme_number(line):
        return None
    marked = _HALF_ESCAPE.sub(rb"\\uffff", line)
    try:
        row = fields_decoder().decode(marked)
    except ValueError:
        return None if _SURROGATE_ESCAPE.search(marked) else False
    if any(map(_is_marked, (bytes(value) for value in row.values()))):
        return True
    keys = _KEY.findall(marked)
    is_each_kept = len(set(keys)) == len(keys) and not any(b"\\" in key for key in keys)
    return True if is_each_kept and any(map(_is_marked, _STRING.findall(marked))) else None


def _is_marked(value: bytes) -> bool:
    """Whether a value is a string with half of a pair, not with the letters of its escape behind a backslash."""
    return value.startswith(b'"') and _MARK_ESCAPE in value and _MARK in msgspec.json.decode(value)


def _has_surrogate(value: Any) -> bool:
    """Whether a parsed value contains text that UTF-8 cannot encode."""
    try:
        if isinstance(value, dict) and all(type(field) in _PLAIN for field in value.values()):
            "".join([*value, *(field for field in value.values() if type(field) is str)]).encode()
        else:
            _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return True
    except RecursionError:
        return False
    return False
