"""Documents read range by range are those of the whole file, wherever ranges and chunks end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenmill.sources import byte_ranges
from tokenmill.sources.base import Batch, Source, SourceFormat, SourceSlice, Unit
from tokenmill.sources.byte_ranges import read_runs
from tokenmill.sources.files import _CheckedStream
from tokenmill.sources.jsonl import JsonLinesFormat
from tokenmill.sources.reader import read_unit
from tokenmill.sources.text import SeparatedText, TextLines

NO_LIMIT = 1 << 40
BOM = b"\xef\xbb\xbf"
PROPERTY = settings(max_examples=100, deadline=None, database=None)

Documents = list[tuple[int, bytes]]


class Case(NamedTuple):
    """A file, what ends its documents, where it is cut, and how much is read at a time."""

    data: bytes
    separator: bytes
    cuts: list[int]
    chunk: int
    look_back: int


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("separated") / "file.txt"


@contextmanager
def reading_by(chunk: int, look_back: int = 64, most: int = 3) -> Iterator[None]:
    with (
        mock.patch.object(byte_ranges, "CHUNK", chunk),
        mock.patch.object(byte_ranges, "_LOOK_BACK", look_back),
        mock.patch.object(byte_ranges, "MAX_DOCUMENTS", most),
    ):
        yield


def read(
    format: SourceFormat, path: Path, source: Source, start: int = 0, stop: int = -1, *, limit: int
) -> Iterator[Batch]:
    return format.read(
        SourceSlice(path=str(path), index=0, source=source, start=start, stop=stop),
        limit=limit,
        batch_bytes=byte_ranges.CHUNK,
    )


def source_of(path: Path, *, kind: str = "text", rule: dict[str, str] | None = None) -> Source:
    found = path.stat()
    return Source(
        name=path.name,
        kind=kind,
        compression="",
        bytes=found.st_size,
        modified=found.st_mtime_ns,
        split="",
        text=rule or {},
    )


def ranges(cuts: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *cuts], [*cuts, -1], strict=True))


def split_once(data: bytes, separator: bytes) -> Documents:
    """The one-pass reader: what ends with a separator, and a rest that does not if there is one."""
    found, at = [], 0
    for part in data.split(separator):
        found.append((at, part))
        at += len(part) + len(separator)
    if not found[-1][1]:
        found.pop()
    return found


def split_lines(data: bytes) -> Documents:
    """The one-pass reader of lines: no byte order mark, no carriage return, no blank line."""
    found = []
    for at, line in split_once(data, b"\n"):
        if at == 0 and line.startswith(BOM):
            at, line = len(BOM), line.removeprefix(BOM)
        line = line.removesuffix(b"\r")
        if line.decode(errors="replace").strip():
            found.append((at, line))
    return found


def documents_of_runs(path: Path, separator: bytes, start: int, stop: int, limit: int = NO_LIMIT) -> Documents:
    """Documents of a range; one that was passed over has the text b"<too large>"."""
    found = []
    for run in read_runs(
        SourceSlice(path=str(path), index=0, source=source_of(path), start=start, stop=stop), separator, limit=limit
    ):
        if run.too_large:
            found.append((run.start, b"<too large>"))
            continue
        at = run.start
        for part in bytes(run.data).split(separator):
            found.append((at, part))
            at += len(part) + len(separator)
    return found


def documents_of(batches: Iterator[Batch], limit: int = NO_LIMIT) -> Documents:
    """Documents and too large ones in order of position; the unit drops those that are read and too large."""
    found = []
    for batch in batches:
        texts = batch.text.cast("large_binary").to_pylist()
        found += [
            (at, part if len(part) <= limit else b"<too large>")
            for at, part in zip(batch.positions.tolist(), texts, strict=True)
        ]
        assert {skip.reason for skip in batch.skips} <= {"too_large"}
        found += [(skip.position, b"<too large>") for skip in batch.skips]
    return sorted(found)


SEPARATORS = [
    b"\n",
    b"\n\n",
    b"\r\n",
    b"aa",
    b"aaa",
    b"aba",
    b"abab",
    b"aabaa",
    b"<|endoftext|>",
    "ß".encode(),
    "¶\n¶".encode(),
]
ATOMS = [b"a", b"b", b"ab", b"\n", b"\r\n", b" ", b"\t", b"<|end", b"text|>", BOM, b"\xff"]
ATOMS += [letter.encode() for letter in ("é", "ß", "¶", "漢", "😀", "\u2028", "\u00a0")]


@st.composite
def cases(draw: st.DrawFn, separator: bytes | None = None) -> Case:
    if separator is None:
        separator = draw(st.sampled_from(SEPARATORS) | st.text("ab", min_size=1, max_size=5).map(str.encode))
    halves = [separator[: len(separator) // 2], separator[len(separator) // 2 :]]
    atom = st.sampled_from([*ATOMS, separator, separator, *filter(None, halves)])
    grain = st.lists(atom, max_size=40).map(b"".join)
    run = st.builds(lambda part, times: part * times, atom, st.integers(1, 40))
    data = b"".join(draw(st.lists(grain | run, min_size=1, max_size=4)))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=6)))
    chunk = draw(st.integers(1, 64))
    return Case(data, separator, cuts, chunk, draw(st.integers(1, 64)))


@given(case=cases())
@PROPERTY
@example(case=Case(b"\n\n\nx\n\n\n\ny", b"\n\n", [1, 2, 3, 4, 5, 6, 7, 8], 1, 1))
@example(case=Case(b"aaaaaaaaaaaaax", b"aa", [3, 7, 8], 2, 3))
@example(case=Case(b"abababababababababab", b"aba", [2, 5, 9, 16], 4, 4))
@example(case=Case(b"", b"\n", [], 1, 1))
@example(case=Case(b"aa", b"a", [1], 1, 1))
@example(case=Case(b"\n", b"\n", [], 1, 1))
def test_ranges_together_give_the_documents_of_the_whole_file_once_each_and_in_order(path: Path, case: Case) -> None:
    path.write_bytes(case.data)
    with reading_by(case.chunk, case.look_back):
        found = [documents_of_runs(path, case.separator, *bounds) for bounds in ranges(case.cuts)]
    assert list(chain.from_iterable(found)) == split_once(case.data, case.separator)


@given(case=cases())
@PROPERTY
def test_a_document_belongs_to_the_range_that_holds_its_first_byte(path: Path, case: Case) -> None:
    path.write_bytes(case.data)
    documents = split_once(case.data, case.separator)
    with reading_by(case.chunk, case.look_back):
        for start, stop in ranges(case.cuts):
            found = documents_of_runs(path, case.separator, start, stop)
            assert found == [(at, part) for at, part in documents if start <= at and (stop < 0 or at < stop)]


def test_a_range_may_end_at_the_size_of_the_file(path: Path) -> None:
    path.write_bytes(b"one\ntwo\nthree")
    assert documents_of_runs(path, b"\n", 4, 13) == [(4, b"two"), (8, b"three")]


def test_a_range_within_one_long_document_is_empty(path: Path) -> None:
    path.write_bytes(b"x" * 500 + b"\nnext\n")
    with reading_by(16):
        assert documents_of_runs(path, b"\n", 100, 400) == []
        assert documents_of_runs(path, b"\n", 400, 506) == [(501, b"next")]


def test_a_range_within_one_long_document_is_not_read_beyond_its_end(path: Path) -> None:
    """Else every range of a file that is one line would be read to the end of the file."""
    path.write_bytes(b"x" * 100_000 + b"\n")
    sizes: list[int] = []
    real = _CheckedStream.read

    def read(stream: _CheckedStream, size: int) -> bytes:
        data = real(stream, size)
        sizes.append(len(data))
        return data

    with reading_by(16), mock.patch.object(_CheckedStream, "read", read):
        assert documents_of_runs(path, b"\n", 1000, 3000) == []
    assert 2000 <= sum(sizes) <= 2100


def test_a_run_of_overlapping_separators_longer_than_the_look_back_is_cut_as_in_one_pass(path: Path) -> None:
    data = b"x" + b"ab" * 100_000 + b"a"
    path.write_bytes(data)
    for separator in (b"aba", b"abab"):
        for cut in (70_001, 70_002, 70_003, 70_004, 150_001, 150_002, 150_003, 150_004):
            found = [documents_of_runs(path, separator, *bounds) for bounds in ranges([cut])]
            assert list(chain.from_iterable(found)) == split_once(data, separator), (separator, cut)


@given(case=cases(separator=b"\n"))
@PROPERTY
@example(case=Case(BOM + b"one\r\n\r\n \t\r\ntwo", b"\n", [1, 2, 5, 8], 1, 1))
@example(case=Case(BOM + b"\nx", b"\n", [], 2, 1))
@example(case=Case(b"a\r\r\nb\xff\r\n", b"\n", [], 64, 1))
@example(case=Case("\u00a0\u2003\n\u0085\n\x1c\x1f\n\u200b\n".encode(), b"\n", [], 64, 1))
def test_lines_lose_their_ends_and_blank_ones_vanish(path: Path, case: Case) -> None:
    path.write_bytes(case.data)
    source = source_of(path)
    with reading_by(case.chunk, case.look_back):
        found = [documents_of(read(TextLines(), path, source, *bounds, limit=NO_LIMIT)) for bounds in ranges(case.cuts)]
    assert list(chain.from_iterable(found)) == split_lines(case.data)


@given(case=cases())
@PROPERTY
def test_texts_between_separators_have_the_positions_of_their_first_bytes(path: Path, case: Case) -> None:
    path.write_bytes(case.data)
    source = source_of(path)
    expected = split_once(case.data, case.separator)
    if expected and expected[0][1].startswith(BOM):
        expected[0] = (len(BOM), expected[0][1].removeprefix(BOM))
    with reading_by(case.chunk, case.look_back):
        found = [
            documents_of(read(SeparatedText(case.separator), path, source, *bounds, limit=NO_LIMIT))
            for bounds in ranges(case.cuts)
        ]
    assert list(chain.from_iterable(found)) == expected


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=12),
    ends=st.lists(st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \t\r\n"]), min_size=12, max_size=12),
    bom=st.booleans(),
    escaped=st.booleans(),
    cuts=st.sets(st.integers(1, 400), max_size=5),
    chunk=st.integers(1, 64),
)
@PROPERTY
def test_json_lines_of_all_ranges_are_those_of_the_whole_file(
    path: Path, texts: list[str], ends: list[bytes], bom: bool, escaped: bool, cuts: set[int], chunk: int
) -> None:
    data, expected = BOM if bom else b"", []
    for value, end in zip(texts, ends, strict=False):
        expected.append((len(data), value.encode()))
        data += json.dumps({"n": len(data), "text": value}, ensure_ascii=escaped).encode() + end
    path.write_bytes(data)
    source = source_of(path, kind="jsonl", rule={"column": "text"})
    with reading_by(chunk):
        found = [
            documents_of(read(JsonLinesFormat(), path, source, *bounds, limit=NO_LIMIT))
            for bounds in ranges(sorted(cut for cut in cuts if cut < len(data)))
        ]
    assert list(chain.from_iterable(found)) == expected


@given(case=cases(), limit=st.integers(1, 48))
@PROPERTY
@example(case=Case(b"12345678<|endoftext|>next", b"<|endoftext|>", [], 12, 64), limit=8)
@example(case=Case(b"x" * 30 + b"\nyy\n", b"\n", [], 4, 64), limit=8)
@example(case=Case(b"yy\n" + b"x" * 30, b"\n", [], 4, 64), limit=8)
@example(case=Case(b"yy\n" + b"x" * 30 + b"\nzz\n", b"\n", [1], 4, 64), limit=8)
def test_documents_above_the_limit_are_skipped_and_no_others(path: Path, case: Case, limit: int) -> None:
    data = case.data.replace(BOM, b"bom")
    path.write_bytes(data)
    source = source_of(path)
    documents = split_once(data, case.separator)
    expected = [(at, part if len(part) <= limit else b"<too large>") for at, part in documents]
    with reading_by(case.chunk, case.look_back):
        found = [
            documents_of(read(SeparatedText(case.separator), path, source, *bounds, limit=limit), limit)
            for bounds in ranges(case.cuts)
        ]
    assert list(chain.from_iterable(found)) == expected


@given(case=cases(separator=b"\n"), limit=st.integers(1, 48))
@PROPERTY
@example(case=Case(b"ab\r\nx", b"\n", [], 1, 1), limit=2)
def test_which_lines_are_too_large_does_not_depend_on_where_chunks_and_ranges_end(
    path: Path, case: Case, limit: int
) -> None:
    data = case.data.replace(BOM, b"bom")
    path.write_bytes(data)
    source = source_of(path)
    whole = documents_of(read(TextLines(), path, source, limit=limit), limit)
    with reading_by(case.chunk, case.look_back):
        found = [
            documents_of(read(TextLines(), path, source, *bounds, limit=limit), limit) for bounds in ranges(case.cuts)
        ]
    # A long line of white space is blank or too large as it happens; it is no document either way.
    assert [pair for pair in list(chain.from_iterable(found)) if _is_text(data, pair)] == [
        pair for pair in whole if _is_text(data, pair)
    ]


def _is_text(data: bytes, document: tuple[int, bytes]) -> bool:
    line = data[document[0] :].partition(b"\n")[0]
    return bool(line.decode(errors="replace").strip())


@pytest.mark.parametrize("large", range(4))
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 100, 10_000])
def test_an_oversized_line_in_any_position_is_skipped_alone(path: Path, large: int, end: bytes, chunk: int) -> None:
    lines = [b"first", b"second", b"third", b"fourth"]
    lines[large] = b"x" * 1000
    path.write_bytes(b"\n".join(lines) + end)
    source = source_of(path)
    with reading_by(chunk):
        found = documents_of(read(TextLines(), path, source, limit=100), 100)
    assert [part for _, part in found] == [b"<too large>" if line.startswith(b"xx") else line for line in lines]


@pytest.mark.parametrize("large", range(3))
@pytest.mark.parametrize("chunk", [1, 16, 100])
def test_an_oversized_json_line_in_any_position_is_skipped_alone(path: Path, large: int, chunk: int) -> None:
    lines = [json.dumps({"text": name}).encode() for name in ("one", "two", "three")]
    lines[large] = json.dumps({"text": "x" * 1000}).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    source = source_of(path, kind="jsonl", rule={"column": "text"})
    with reading_by(chunk):
        found = documents_of(read(JsonLinesFormat(), path, source, limit=100), 100)
    names = [b"one", b"two", b"three"]
    names[large] = b"<too large>"
    assert [part for _, part in found] == names


@given(
    sizes=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 80)), min_size=1, max_size=8),
    cuts=st.sets(st.integers(1, 600), max_size=4),
    chunk=st.integers(1, 64),
)
@PROPERTY
def test_which_json_lines_are_too_large_does_not_depend_on_where_chunks_and_ranges_end(
    path: Path, sizes: list[tuple[int, int]], cuts: set[int], chunk: int
) -> None:
    data = b"".join(json.dumps({"text": "t" * a, "other": "o" * b}).encode() + b"\n" for a, b in sizes)
    path.write_bytes(data)
    source = source_of(path, kind="jsonl", rule={"column": "text"})
    whole = documents_of(read(JsonLinesFormat(), path, source, limit=64), 64)
    with reading_by(chunk):
        found = [
            documents_of(read(JsonLinesFormat(), path, source, *bounds, limit=64), 64)
            for bounds in ranges(sorted(cut for cut in cuts if cut < len(data)))
        ]
    assert list(chain.from_iterable(found)) == whole


@given(case=cases(separator=b"\n"))
@settings(PROPERTY, max_examples=50)
def test_a_unit_of_a_byte_range_gives_what_its_reader_gives(path: Path, case: Case) -> None:
    path.write_bytes(case.data)
    source = source_of(path)
    found: Documents = []
    for index, (start, stop) in enumerate(ranges(case.cuts)):
        unit = Unit(index=index, source=0, num_sources=1, start=start, stop=stop, text_bytes=1)
        batches = read_unit(unit, [str(path)], [source], documents="lines", limit=NO_LIMIT, max_documents=3)
        for batch in batches:
            assert len(batch.text) <= 3
            found += documents_of(iter([batch]))
    assert found == split_lines(case.data)
