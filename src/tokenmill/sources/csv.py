"""CSV and TSV: a header with the names of the columns, then a record a line; quoted fields may contain newlines.

    bytes     id,text \\n 1,"a \\n b" \\n 2,c \\n         a newline between quotes ends no record
    records   [header ][          ][     ]            a position is the byte at which a record begins

A quote opens a field only at its beginning, and two quotes inside stand for one: the rules by which Arrow parses the
fields. Records are found here, since only a scan from the first byte knows which newlines are quoted. The plan makes
that scan once, and cuts the file between records.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from tokenmill.errors import RecipeError, SourceError
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
from tokenmill.sources.files import ByteStream, ending_of, explained, open_stream, pin_of
from tokenmill.sources.text_columns import MAX_BATCH_ROWS, columns_to_read, filter_columns, find_rule, table_batch

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_CUT_BYTES = 1 << 20
_MAX_READ = 64 << 20
_MAX_HEADER = 1 << 20
_MAX_NAME_CHARS = 200
_DELIMITERS = (",", ";", "\t", "|")
# The end of a record does not count for the limit; what is certainly larger is skipped while it is read.
_SLACK = 4
BAD_RECORD = "invalid_csv"


class CsvFormat(SourceFormat):
    has_columns: ClassVar[bool] = True
    starts_anywhere: ClassVar[bool] = False

    def find_text(self, path: str, source: Source, *, text_column: str | None, template: str | None) -> Rule:
        names = _header(path, source).names
        return find_rule(names, text_column=text_column, template=template, where=path)

    def columns(self, path: str, source: Source) -> list[str]:
        return _header(path, source).names

    def check(self, path: str, source: Source) -> None:
        _cuts(path, source, _header(path, source))

    def extent(self, path: str, source: Source) -> Extent:
        header = _header(path, source)
        _check_once(header.names, source.text, path)
        if source.compression:
            return Extent(text_bytes=source.expanded_bytes)
        return Extent(text_bytes=source.bytes, cuts=_cuts(path, source, header))

    def read(self, part: SourceSlice, *, limit: int, batch_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
        path, source = part.path, part.source
        header = _header(path, source)
        _check_once(header.names, source.text, path)
        for run in _records(path, source, header, part.start, part.stop, limit=limit, chunk=batch_bytes):
            yield from _documents(run, part.index, source.text, header, limit, path)


def _cuts(path: str, source: Source, header: _CsvHeader) -> tuple[int, ...]:
    """Where records begin, about every `_CUT_BYTES`, and the end of the file."""
    runs = _records(path, source, header, 0, -1, limit=_CUT_BYTES, chunk=_CUT_BYTES)
    return (0, *(run.start for run in runs if run.start > header.end), source.bytes)


@dataclass(frozen=True, slots=True)
class _CsvHeader:
    """The names of the columns, what separates fields, and where the first record begins."""

    names: list[str]
    delimiter: str
    end: int


@dataclass(frozen=True, slots=True)
class _RecordRun:
    """Whole records end to end. `ends` are the offsets behind each. One above the limit has no `data`."""

    start: int
    data: memoryview
    ends: npt.NDArray[np.int64]
    too_large: bool = False


def _header(path: str, source: Source) -> _CsvHeader:
    with open_stream(path, source.compression, pin=pin_of(source), step=_MAX_HEADER) as stream:
        data = stream.read(_MAX_HEADER)
    mark = len(BOM) * data.startswith(BOM)
    # What separates the fields is not known yet, but it is not part of a quoted name.
    ends = _scan(data[mark:], "".join(_DELIMITERS), is_all=len(data) < _MAX_HEADER).ends.tolist()
    lines = [(data[mark + start : mark + end], mark + end) for start, end in itertools.pairwise([0, *ends])]
    line, end = next(((line, end) for line, end in lines if line.strip()), (b"", 0))
    if not line:
        what = "its first line does not end" if data.strip() else "it is empty"
        raise SourceError(f"{path} has no header: {what}", hint="put the names of the columns in the first line")
    with explained(path):
        text = line.decode().strip("\r\n")
    is_tsv = ending_of(path).lower().startswith(".tsv")
    delimiter = "\t" if is_tsv else max(_DELIMITERS, key=re.sub(r'"[^"]*"', "", text).count)
    names = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    if (longest := max(map(len, names))) > _MAX_NAME_CHARS:
        raise RecipeError(
            f"{path}: its first line is not a header, since a name would have {longest:,} characters",
            hint="put the names of the columns in the first line",
        )
    return _CsvHeader(names, delimiter, end)


def _check_once(names: list[str], rule: Rule, path: str) -> None:
    for name in columns_to_read(rule):
        if names.count(name) > 1:
            raise RecipeError(f"{path} has several columns {name!r}", hint="rename all but one of them")


def _records(
    path: str, source: Source, header: _CsvHeader, start: int, stop: int, *, limit: int, chunk: int
) -> Iterator[_RecordRun]:
    """The records that begin in [start, stop), of which `start` begins one; a `stop` of -1 is the end of the file."""
    at = max(start, header.end)
    begin = 0 if source.compression else at
    with open_stream(path, source.compression, start=begin, pin=pin_of(source), step=chunk) as stream:
        for size in _steps(at - begin):
            stream.read(size)
        pending, step = b"", chunk
        while not 0 <= stop <= at:
            more = stream.read(step)
            data = pending + more
            found = _scan(data, header.delimiter, is_all=not more)
            _check_closed(found, at, path, is_all=not more)
            ends = found.ends if stop < 0 else found.ends[: int(np.searchsorted(found.ends, stop - at)) + 1]
            if len(ends):
                size = int(ends[-1])
                yield _RecordRun(at, memoryview(data)[:size], ends)
                at, pending, step = at + size, data[size:], chunk
            elif len(data) > limit + _SLACK:
                yield _RecordRun(at, memoryview(b""), ends, too_large=True)
                size, pending = _skip_record(stream, header.delimiter, data, found, at, path)
                at, step = at + size, chunk
            else:
                pending, step = data, max(chunk, min(len(data), _MAX_READ))
            if not more and not pending:
                return


def _steps(count: int) -> Iterator[int]:
    """Sizes that sum to `count`."""
    yield from (min(BATCH_BYTES, count - done) for done in range(0, count, BATCH_BYTES))


def _skip_record(
    stream: ByteStream, delimiter: str, data: bytes, found: _RecordScan, at: int, path: str
) -> tuple[int, bytes]:
    """Read past the end of the record that begins with `data`: its length, and what was read behind it."""
    length = len(data)
    while True:
        carry = found.carry
        more = stream.read(BATCH_BYTES)
        data = carry + more
        found = _scan(data, delimiter, is_all=not more)
        _check_closed(found, at, path, is_all=not more)
        if len(found.ends):
            end = int(found.ends[0])
            return length + end - len(carry), data[end:]
        length += len(more)


def _check_closed(found: _RecordScan, at: int, path: str, *, is_all: bool) -> None:
    if is_all and found.quote >= 0:
        raise SourceError(
            f"{path}: the quotes that open in the record at byte {at} do not close",
            hint="close them, double a quote that is part of the text, or leave the file out",
        )


class _RecordScan(NamedTuple):
    """The offsets behind each record, and of quotes left open or -1. `carry` stands for the data before more of it."""

    ends: npt.NDArray[np.int64]
    quote: int
    carry: bytes


def _scan(data: bytes, delimiters: str, *, is_all: bool) -> _RecordScan:
    """Find the ends of records in data that begins at a record, or with a `carry`."""
    view = np.frombuffer(data, np.uint8)
    opens, closes = _quotes(data, view, delimiters)
    breaks = np.flatnonzero((view == _NEWLINE) | (view == _RETURN))
    following = breaks + 1
    is_last = following == len(view)
    is_pair = (view[breaks] == _RETURN) & (view[np.where(is_last, 0, following)] == _NEWLINE) & ~is_last
    # A return at the end may be half of a pair.
    is_half = is_last & (view[breaks] == _RETURN) & (not is_all)
    breaks = breaks[~is_pair & ~is_half]
    is_open = np.searchsorted(opens, breaks) > np.searchsorted(closes, breaks)
    ends = breaks[~is_open] + 1
    quote = int(opens[-1]) if len(opens) > len(closes) else -1
    if is_all and data and quote < 0 and (not len(ends) or int(ends[-1]) < len(data)):
        ends = np.append(ends, len(data))
    # Closed quotes at the end may be the first of two, which stand for one.
    is_closed = len(closes) > 0 and int(closes[-1]) == len(data) - 1
    carry = b'"' if quote >= 0 else b'""' if is_closed else b"x" if data.endswith(b'"') else data[-1:]
    return _RecordScan(ends, quote, carry)


def _quotes(
    data: bytes, view: npt.NDArray[np.uint8], delimiters: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where quotes open and close. Two inside of quotes close and open again."""
    quotes = np.flatnonzero(view == _QUOTE)
    opens, closes = quotes[0::2], quotes[1::2]
    before = view[opens - 1]
    may_open = np.isin(before, np.frombuffer(f"{delimiters}\r\n".encode(), np.uint8)) | (opens == 0)
    may_open[1:] |= opens[1:] == closes[: len(opens) - 1] + 1
    if may_open.all():
        return opens, closes
    # Some quotes are inside of unquoted fields, where they have no meaning.
    pattern = rb'(?:\A|(?<=[\r\n%s]))"[^"]*+(?:""[^"]*+)*+("?)' % re.escape(delimiters.encode())
    spans = np.array([(*found.span(), bool(found[1])) for found in re.finditer(pattern, data)], np.int64).reshape(-1, 3)
    return spans[:, 0], spans[spans[:, 2] > 0, 1] - 1


def _documents(run: _RecordRun, index: int, rule: Rule, header: _CsvHeader, limit: int, path: str) -> Iterator[Batch]:
    """The documents of some records. Those above the limit are skipped, even if their text alone is small."""
    if run.too_large:
        yield _too_large(index, run.start)
        return
    starts = np.concatenate(([0], run.ends[:-1]))
    sizes = _sizes(run, starts)
    first = 0
    for large in [*np.flatnonzero(sizes > limit).tolist(), len(starts)]:
        if first < large:
            data = run.data[int(starts[first]) : int(run.ends[large - 1])]
            filled = starts[first:large][sizes[first:large] > 0] + run.start
            with explained(path, where=f", from byte {run.start + int(starts[first])} on"):
                yield from _parse(data, filled, index, rule, header)
        if large < len(starts):
            yield _too_large(index, run.start + int(starts[large]))
        first = large + 1


def _sizes(run: _RecordRun, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The bytes of each record without its end."""
    view = np.frombuffer(run.data, np.uint8)
    sizes = run.ends - starts
    for _ in range(2):  # a return, a newline, or both
        last = view[starts + np.maximum(sizes, 1) - 1]
        sizes = sizes - ((sizes > 0) & ((last == _NEWLINE) | (last == _RETURN)))
    return sizes


def _too_large(index: int, position: int) -> Batch:
    return make_batch(index, pa.array([], pa.string()), np.zeros(0, np.int64), [Skip(index, position, "too_large")])


def _parse(
    data: memoryview, positions: npt.NDArray[np.int64], index: int, rule: Rule, header: _CsvHeader
) -> Iterator[Batch]:
    """The texts of records that are not empty; a record with too many or too few fields is skipped."""
    wanted, for_filter = columns_to_read(rule), filter_columns(rule)
    types = {
        str(header.names.index(name)): pa.large_string() if name in for_filter else pa.large_binary() for name in wanted
    }
    odd: list[int] = []

    def skip(row: pyarrow.csv.InvalidRow) -> str:
        odd.append(row.number - 1)
        return "skip"

    # Arrow leaves out a byte order mark, which is text here.
    source = b"\n" + bytes(data) if data[: len(BOM)] == BOM else data
    table = pyarrow.csv.read_csv(
        pa.BufferReader(pa.py_buffer(source)),
        pyarrow.csv.ReadOptions(
            use_threads=False, block_size=len(source) + 1, column_names=[str(n) for n in range(len(header.names))]
        ),
        pyarrow.csv.ParseOptions(delimiter=header.delimiter, newlines_in_values=True, invalid_row_handler=skip),
        pyarrow.csv.ConvertOptions(
            check_utf8=False,
            column_types=types,
            include_columns=list(types),
            strings_can_be_null=False,
        ),
    )
    if table.num_rows + len(odd) != len(positions):
        raise pa.ArrowInvalid(f"{len(positions)} records are parsed as {table.num_rows + len(odd)}")
    good = np.delete(positions, odd)
    skips = [Skip(index, position, BAD_RECORD) for position in positions[odd].tolist()]
    if skips:
        yield make_batch(index, pa.array([], pa.string()), np.zeros(0, np.int64), skips)
    at = 0
    for part in table.rename_columns(wanted).to_batches(max_chunksize=MAX_BATCH_ROWS):
        batch = table_batch(index, part, rule, at)
        moved = tuple(skip._replace(position=int(good[skip.position])) for skip in batch.skips)
        yield Batch(batch.text, batch.sources, good[batch.positions], moved, batch.beside)
        at += part.num_rows
