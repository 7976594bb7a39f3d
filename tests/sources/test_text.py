"""Text files: what a document is in them, and which files are not text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.errors import NotTextError
from tokenmill.sources.base import Source, SourceSlice
from tokenmill.sources.files import find
from tokenmill.sources.text import text_format

BOM = b"\xef\xbb\xbf"

Found = list[tuple[int, bytes | str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.txt"


def source_of(path: Path) -> Source:
    pin = find(str(path))
    return Source(name="a", kind="text", compression="", bytes=pin.bytes, modified=pin.modified, split="", text={})


def read(path: Path, documents: str, *, limit: int = 1 << 20) -> Found:
    """Position and text of every document, or why it is skipped."""
    found: Found = []
    for batch in text_format(documents).read(SourceSlice(path=str(path), index=3, source=source_of(path)), limit=limit):
        assert set(batch.sources.tolist()) | {skip.source for skip in batch.skips} == {3}
        found += zip(batch.positions.tolist(), batch.text.cast("large_binary").to_pylist(), strict=True)
        found += [(skip.position, skip.reason) for skip in batch.skips]
    return found


def test_the_recipe_says_what_a_document_is(path: Path) -> None:
    path.write_bytes(b"one\ntwo\n\nthree\n")
    assert read(path, "lines") == [(0, b"one"), (4, b"two"), (9, b"three")]
    assert read(path, "files") == [(0, b"one\ntwo\n\nthree\n")]
    assert read(path, "separator:\n\n") == [(0, b"one\ntwo"), (9, b"three\n")]


def test_lines_lose_their_carriage_returns_even_beside_invalid_text(path: Path) -> None:
    path.write_bytes(b"one\r\ntwo\r\n")
    assert read(path, "lines") == [(0, b"one"), (5, b"two")]
    path.write_bytes(b"one\r\n\xff\r\n")
    assert read(path, "lines") == [(0, b"one"), (5, b"\xff")]


def test_a_text_between_separators_keeps_its_white_space(path: Path) -> None:
    path.write_bytes(b" one \n|\n|two")
    assert read(path, "separator:|") == [(0, b" one \n"), (7, b"\n"), (9, b"two")]


def test_only_lines_and_separated_texts_are_cut(path: Path) -> None:
    path.write_bytes(b"one\n")
    divisible = [
        text_format(name).extent(str(path), source_of(path)).divisible for name in ("lines", "separator:x", "files")
    ]
    assert divisible == [True, True, False]
    assert [text_format(name).is_one_document for name in ("lines", "separator:x", "files")] == [False, False, True]


@pytest.mark.parametrize(("size", "kept"), [(99, True), (100, True), (101, False), (5000, False)])
def test_a_whole_file_is_a_document_unless_it_is_above_the_limit(path: Path, size: int, kept: bool) -> None:
    path.write_bytes(b"x" * size)
    assert read(path, "files", limit=100) == [(0, b"x" * size if kept else "too_large")]


@pytest.mark.parametrize("documents", ["lines", "files", "separator:|"])
def test_a_byte_order_mark_is_not_part_of_the_text(path: Path, documents: str) -> None:
    path.write_bytes(BOM + "é".encode())
    ((_, data),) = read(path, documents)
    assert data == "é".encode()


def test_a_file_that_is_not_text_is_an_error_or_one_document_that_is_skipped(path: Path) -> None:
    path.write_bytes(b"%PDF-1.7 and only text behind it")
    assert read(path, "files") == [(0, "not_text")]
    for documents in ("lines", "separator:|"):
        with pytest.raises(NotTextError, match="is a PDF document"):
            read(path, documents)


@pytest.mark.parametrize("documents", ["lines", "files", "separator:|"])
def test_the_first_bytes_tell_whether_a_file_is_text(path: Path, documents: str) -> None:
    path.write_bytes(b"text")
    text_format(documents).check(str(path), source_of(path))
    path.write_bytes(b"%PDF-1.7 and more")
    with pytest.raises(NotTextError, match="is a PDF document"):
        text_format(documents).check(str(path), source_of(path))


def test_a_separator_may_be_any_bytes(path: Path) -> None:
    path.write_bytes(b"one\0two\0" * 100)
    text_format("separator:\0").check(str(path), source_of(path))
    assert len(read(path, "separator:\0")) == 200
    with pytest.raises(NotTextError):
        text_format("lines").check(str(path), source_of(path))
