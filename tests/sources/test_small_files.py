"""Small files that are read together give the documents that they have one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenmill.errors import SourceChangedError, SourceError
from tokenmill.sources import files as places
from tokenmill.sources import small_files
from tokenmill.sources.base import Batch, Source, SourceSlice, Unit
from tokenmill.sources.files import find
from tokenmill.sources.reader import format_of, read_unit

PROPERTY = settings(max_examples=300, deadline=None, database=None)
FIRST = 7  # number of the first source
BOM = b"\xef\xbb\xbf"
PARTS = [
    b"", b"\n", b"\n\n", b"\r\n", b"a", b"b c", BOM, b" ", b"\r", b"\xff", b"\xc2\xa0", '{"text": "zwölf"}'.encode(),
    b'{"text": "one"}', b'{"text": ""}', b'{"text": "\\ud800"}', b'{"text": 1}', b"{}", b"[1]", b'{"other": "x"}',
    b'{"text": "two", "n": NaN}', b'{"text": "open',
]  # fmt: skip
FILES = st.lists(st.lists(st.sampled_from(PARTS), max_size=8).map(b"".join), min_size=1, max_size=8)

# Source, position, and either the bytes of a document or why it is skipped.
Documents = list[tuple[int, int, bytes | str]]


def documents_of(batches: Iterator[Batch]) -> Documents:
    found: Documents = []
    for batch in batches:
        texts = batch.text.cast("large_binary").to_pylist()
        found += zip(batch.sources.tolist(), batch.positions.tolist(), texts, strict=True)
        found += [(skip.source, skip.position, skip.reason) for skip in batch.skips]
    return sorted(found, key=lambda one: one[:2])


def sources_of(folder: Path, files: list[bytes], kind: str) -> tuple[list[str], list[Source]]:
    paths, sources = [], []
    for number, data in enumerate(files):
        path = folder / f"{number:03d}"
        path.write_bytes(data)
        pin = find(str(path))
        rule = {"column": "text"} if kind == "jsonl" else {}
        paths.append(str(path))
        sources.append(
            Source(
                name=path.name, kind=kind, compression="", bytes=pin.bytes, modified=pin.modified, split="", text=rule
            )
        )
    return paths, sources


def unit_of(sources: list[Source]) -> Unit:
    size = sum(source.bytes for source in sources)
    return Unit(index=0, source=FIRST, num_sources=len(sources), start=0, stop=-1, text_bytes=size)


def read_together(paths: list[str], sources: list[Source], documents: str, *, limit: int = 1 << 20) -> Documents:
    return documents_of(read_unit(unit_of(sources), paths, sources, documents=documents, limit=limit, batch_bytes=200))


def read_alone(paths: list[str], sources: list[Source], documents: str, *, limit: int = 1 << 20) -> Documents:
    found: Documents = []
    for number, (path, source) in enumerate(zip(paths, sources, strict=True), start=FIRST):
        format = format_of(source.kind, documents)
        found += documents_of(format.read(SourceSlice(path=path, index=number, source=source), limit=limit))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.mark.parametrize(("kind", "documents"), [("text", "files"), ("text", "lines"), ("jsonl", "lines")])
@given(files=FILES, limit=st.sampled_from([5, 1 << 20]), many=st.sampled_from([2, 1 << 17]))
@example(files=[b"", BOM, BOM + b"a", BOM + b"b\n", b"c"], limit=1 << 20, many=1 << 17)
@example(files=[b"a\n\n", b"", b"\n", b"b"], limit=1 << 20, many=2)
@PROPERTY
def test_documents_are_those_of_each_file_alone(
    place: Path, kind: str, documents: str, files: list[bytes], limit: int, many: int
) -> None:
    with mock.patch("tokenmill.sources.byte_ranges.MAX_DOCUMENTS", many):
        paths, sources = sources_of(place, files, kind)
        expected = read_alone(paths, sources, documents, limit=limit)
        assert read_together(paths, sources, documents, limit=limit) == expected


def test_none_of_them_is_read_alone(tmp_path: Path) -> None:
    files = [b'{"text": "%d"}\n' % number for number in range(500)]
    paths, sources = sources_of(tmp_path, files, "jsonl")
    with mock.patch("tokenmill.sources.files.open_file", side_effect=AssertionError):
        found = read_together(paths, sources, "lines")
    assert found == [(FIRST + number, 0, b"%d" % number) for number in range(500)]


def test_large_files_among_them_are_read_alone_and_in_order(tmp_path: Path) -> None:
    files = [b"one", b"x" * (small_files.SMALL_BYTES + 1), b"two", b"y" * small_files.SMALL_BYTES, b"three"]
    paths, sources = sources_of(tmp_path, files, "text")
    found = [(FIRST + number, 0, data) for number, data in enumerate(files)]
    assert read_together(paths, sources, "files") == read_together(paths, sources, "lines") == found


def test_files_with_other_rules_are_not_mixed(tmp_path: Path) -> None:
    paths, sources = sources_of(tmp_path, [b'{"text": "a", "b": "c"}'] * 3, "jsonl")
    other = Source(**{**{name: getattr(sources[1], name) for name in Source.__slots__}, "text": {"column": "b"}})
    found = read_together(paths, [sources[0], other, sources[2]], "lines")
    assert [data for _, _, data in found] == [b"a", b"c", b"a"]


@pytest.mark.parametrize("documents", ["files", "lines"])
def test_a_file_of_another_size_is_an_error(tmp_path: Path, documents: str) -> None:
    paths, sources = sources_of(tmp_path, [b"one", b"two", b"three"], "text")
    Path(paths[1]).write_bytes(b"tw")
    with pytest.raises(SourceChangedError, match="001 changed since the plan was made: it had 3 bytes"):
        read_together(paths, sources, documents)


def test_a_file_of_the_same_size_and_another_time_is_an_error(tmp_path: Path) -> None:
    paths, sources = sources_of(tmp_path, [b"one", b"two"], "text")
    os.utime(paths[0], ns=(1, 1))
    with pytest.raises(SourceChangedError, match="000 changed"):
        read_together(paths, sources, "files")


def test_a_file_that_is_gone_or_became_a_pipe_is_an_error(tmp_path: Path) -> None:
    paths, sources = sources_of(tmp_path, [b"one", b"two"], "text")
    os.remove(paths[1])
    with pytest.raises(SourceError, match=r"cannot read .*001: No such file"):
        read_together(paths, sources, "files")
    os.mkfifo(paths[1])
    with pytest.raises(SourceError, match="001 is not a plain file"):
        read_together(paths, sources, "files")


def test_a_file_that_is_written_to_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    paths, sources = sources_of(tmp_path, [b"one", b"two"], "text")
    real = os.read

    def read_and_change(fd: int, size: int) -> bytes:
        data = real(fd, size)
        Path(paths[1]).write_bytes(b"TWO")
        os.utime(paths[1], ns=(5, 5))
        return data

    with mock.patch.object(places.os, "read", read_and_change), pytest.raises(SourceChangedError, match="001 changed"):
        read_together(paths, sources, "files")
