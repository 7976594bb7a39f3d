from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill
from tokenmill.build.resolve import resolve_build
from tokenmill.errors import RecipeError, SourceError
from tokenmill.recipe import make_recipe
from tokenmill.sources import csv as csv_format
from tokenmill.sources.base import Source, SourceSlice
from tokenmill.sources.csv import CsvFormat
from tokenmill.sources.discover import list_sources

Found = list[tuple[int, str, str]]
LIMIT = 1 << 30


def read(
    path: Path, start: int = 0, stop: int = -1, *, limit: int = LIMIT, chunk: int = 8_000_000, **rule: Any
) -> Found:
    """Position, text and reason of every record, in order."""
    source = Source(
        name=path.name,
        kind="csv",
        compression="gz" if path.suffix == ".gz" else "",
        bytes=path.stat().st_size,
        modified=0,
        split="",
        text=rule or {"column": "text"},
    )
    found: Found = []
    part = SourceSlice(path=str(path), index=5, source=source, start=start, stop=stop)
    for batch in CsvFormat().read(part, limit=limit, batch_bytes=chunk):
        texts = batch.text.cast("large_binary").to_pylist()
        found += [
            (position, text.decode(errors="replace"), "")
            for position, text in zip(batch.positions.tolist(), texts, strict=True)
        ]
        found += [(skip.position, "", skip.reason) for skip in batch.skips]
    return sorted(found)


def expected(data: bytes) -> list[tuple[str, str]]:
    """What Python's own reader makes of the records: text and reason."""
    rows = [row for row in csv.reader(io.StringIO(data.decode(), newline="")) if row]
    return [(row[1], "") if len(row) == 2 else ("", "invalid_csv") for row in rows[1:]]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_fields_may_be_quoted_and_contain_newlines_quotes_and_delimiters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'id,text\r\n1,plain\r\n2,"a\nb"\r\n\r\n3,"say ""hi"", then"\r\n4,last')
    assert [text for _, text, _ in read(path)] == ["plain", "a\nb", 'say "hi", then', "last"]
    data = path.read_bytes()
    assert [data[position : position + 1] for position, _, _ in read(path)] == [b"1", b"2", b"3", b"4"]


def test_a_record_with_too_many_or_too_few_fields_is_skipped_and_its_neighbours_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"id,text\n1,one\nalone\n2,two,too\n3,three\n")
    assert [(text, reason) for _, text, reason in read(path)] == [
        ("one", ""), ("", "invalid_csv"), ("", "invalid_csv"), ("three", ""),
    ]  # fmt: skip
    dataset = tokenmill.prepare(path, tmp_path / "out", tokenizer="byte", workers=1)
    assert dataset.manifest.dropped == {"invalid_csv": 2}
    rejects = (tmp_path / "out/.build/rejects/000000.jsonl").read_text().splitlines()
    assert rejects[0] == '{"position":14,"reason":"invalid_csv","source":"a.csv"}'
    tokenmill.verify(tmp_path / "out", source="all")


PIECES = st.sampled_from(['"', '""', ",", "\n", "\r\n", "\r", "a", "bc", " ", "é", '"x"', '"a\nb"', "1,"])


@given(pieces=st.lists(PIECES, max_size=30), chunk=st.integers(1, 40), limit=st.sampled_from([4, 9, LIMIT]))
@settings(max_examples=250, deadline=None, database=None)
def test_records_are_those_of_pythons_reader_however_they_are_read(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], chunk: int, limit: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.csv"
    data = write(path, b"id,text\n" + "".join(pieces).encode()).read_bytes()
    try:
        whole = read(path)
    except SourceError as error:
        assert "do not close" in error.message
        with pytest.raises(SourceError, match="do not close"):
            read(path, chunk=chunk, limit=limit)
        return
    assert [(text, reason) for _, text, reason in whole] == expected(data)
    starts = [position for position, _, _ in whole]
    sizes = [len(data[at:end].rstrip(b"\r\n")) for at, end in pairwise([*starts, len(data)])]
    fitting = [one if size <= limit else (one[0], "", "too_large") for one, size in zip(whole, sizes, strict=True)]
    assert read(path, chunk=chunk, limit=limit) == fitting


@given(texts=st.lists(st.text(alphabet='ab",\n\r é', max_size=12), min_size=1, max_size=20), data=st.data())
@settings(max_examples=60, deadline=None, database=None)
def test_slices_at_any_records_give_each_document_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "slices.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
    whole = read(path)
    assert [text for _, text, _ in whole] == texts
    starts = [position for position, _, _ in whole]
    cuts = sorted({0, path.stat().st_size, *data.draw(st.lists(st.sampled_from(starts)))})
    assert [one for a, b in pairwise(cuts) for one in read(path, a, b, chunk=7)] == whole


def test_the_plan_cuts_a_file_between_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_format, "_CUT_BYTES", 500)
    texts = [f'number "{n}"\nand, more\n' * (1 + n % 5) for n in range(300)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text",), *((text,) for text in texts)])
    plan = resolve_build(make_recipe({"sources": tmp_path / "a.csv", "unit_bytes": 2000, "tokenizer": "byte"})).plan
    bounds = [(unit.start, unit.stop) for unit in plan.units]
    assert len(bounds) > 5
    assert [text for a, b in bounds for _, text, _ in read(tmp_path / "a.csv", a, b)] == texts
    one = tokenmill.prepare(tmp_path / "a.csv", tmp_path / "one", tokenizer="byte", workers=1)
    many = tokenmill.prepare(tmp_path / "a.csv", tmp_path / "many", tokenizer="byte", workers=1, unit_bytes=2000)
    one_split, many_split = tokenmill.open(one.output)["train"], tokenmill.open(many.output)["train"]
    assert np.array_equal(one_split.tokens(0, one_split.num_tokens), many_split.tokens(0, one_split.num_tokens))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.tsv", b"id\ttext\n1\ta,b\n"),
        ("a.csv", b"id;text\n1;a,b\n"),
        ("a.csv", b'"i,d"|text\n1|a,b\n'),
        ("a.csv", b'\xef\xbb\xbftext\n\xef\xbb\xbf"a,b"\n'.replace(b"\n\xef\xbb\xbf", b"\n")),
        ("a.csv.gz", gzip.compress(b'id,text\n1,"a,b"\n', mtime=0)),
    ],
)
def test_the_header_tells_the_delimiter_and_the_text(tmp_path: Path, name: str, data: bytes) -> None:
    (source,) = list_sources(make_recipe({"sources": write(tmp_path / name, data)})).sources
    assert (source.kind, source.text) == ("csv", {"column": "text"})
    assert [text for _, text, _ in read(tmp_path / name)] == ["a,b"]


def test_several_columns_are_a_text_by_shape_or_template(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"prompt,response\nwhy,because\n")
    (source,) = list_sources(make_recipe({"sources": path})).sources
    assert source.text == {"join": ["prompt", "response"]}
    assert read(path, **source.text) == [(16, "why\n\nbecause", "")]
    assert read(path, template="{response}!") == [(16, "because!", "")]


def test_a_byte_order_mark_is_text_except_at_the_beginning(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"\xef\xbb\xbftext\n\xef\xbb\xbfone\ntwo\n")
    assert [text for _, text, _ in read(path)] == ["\ufeffone", "two"] == [text for _, text, _ in read(path, chunk=3)]


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"", SourceError, "has no header: it is empty"),
        (b"\n\r\n", SourceError, "has no header: it is empty"),
        (b'"text', SourceError, "has no header"),
        (b"a,b\n1,2\n", RecipeError, "no known shape of text among its columns: a, b"),
        (b"text,text\n1,2\n", RecipeError, "several columns 'text'"),
        (b"x" * 300 + b"\n", RecipeError, "its first line is not a header"),
    ],
)
def test_what_has_no_usable_header_is_an_error_that_names_the_file(
    tmp_path: Path, data: bytes, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"a.csv.*{said}"):
        resolve_build(make_recipe({"sources": write(tmp_path / "a.csv", data), "tokenizer": "byte"}))


@pytest.mark.parametrize("chunk", [8, 8_000_000])
@pytest.mark.parametrize("limit", [10, LIMIT])
def test_quotes_that_do_not_close_are_an_error_at_their_record(tmp_path: Path, chunk: int, limit: int) -> None:
    path = write(tmp_path / "a.csv", b'text\none\n"two\nthree\nfour\nfive\n')
    with pytest.raises(SourceError, match=r"a\.csv: the quotes that open in the record at byte 9 do not close"):
        read(path, chunk=chunk, limit=limit)
    with pytest.raises(SourceError, match="at byte 9 do not close"):
        tokenmill.prepare(path, tmp_path / "out", tokenizer="byte", workers=1)


def texts_of(found: Sequence[tuple[int, str, str]]) -> list[str]:
    return [text for _, text, _ in found]


def test_bytes_that_are_not_utf8_concern_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"text,id\none,1\n\xff\xfe,2\nthree,\xff\n")
    result = tokenmill.prepare(path, tmp_path / "out", tokenizer="byte", workers=1)
    assert (result.manifest.documents, result.manifest.dropped) == (2, {"invalid_utf8": 1})
    assert texts_of(read(path))[2] == "three"
