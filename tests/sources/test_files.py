"""Compressed sources are read to their last byte, or not at all: never silently short."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import SourceError
from tokenmill.sources import byte_ranges, jsonl, text
from tokenmill.sources.base import Batch, Source, SourceSlice
from tokenmill.sources.jsonl import JsonLinesFormat
from tokenmill.sources.text import TextLines, WholeText

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lz4": lambda data: pa.Codec("lz4").compress(data, asbytes=True),
}
CHECKED = {**COMPRESS, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}
each = pytest.mark.parametrize("ending", list(COMPRESS))
LINES = [f"line {number}: {random.Random(number).random()}" for number in range(20_000)]
WHOLE = "".join(line + "\n" for line in LINES).encode()


def source_of(path: Path, kind: str = "text") -> Source:
    return Source(
        name=path.name,
        kind=kind,
        compression=path.suffix[1:],
        bytes=path.stat().st_size,
        modified=0,
        split="",
        text={"column": "text"} if kind == "jsonl" else {},
    )


def read(path: Path, *, limit: int = 1 << 30) -> Iterator[Batch]:
    return TextLines().read(
        SourceSlice(path=str(path), index=0, source=source_of(path)), limit=limit, batch_bytes=byte_ranges.CHUNK
    )


def read_whole(path: Path, *, limit: int) -> Iterator[Batch]:
    return WholeText().read(SourceSlice(path=str(path), index=0, source=source_of(path)), limit=limit)


def read_lines(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for batch in read(path):
        found += zip(batch.positions.tolist(), batch.text.to_pylist(), strict=True)
    return found


@each
def test_a_compressed_file_gives_its_lines_with_positions_in_the_text(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(COMPRESS[ending]("one\n\nzwölf\nthree".encode()))
    assert read_lines(path) == [(0, "one"), (5, "zwölf"), (12, "three")]


@each
@given(parts=st.lists(st.binary(max_size=300).map(lambda data: data.hex().encode() + b"\n"), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None, database=None)
def test_members_and_frames_one_behind_the_other_are_one_text(
    tmp_path_factory: pytest.TempPathFactory, ending: str, parts: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / f"parts.txt.{ending}"
    path.write_bytes(b"".join(COMPRESS[ending](part) for part in parts))
    with mock.patch.object(byte_ranges, "CHUNK", 50):
        assert [line for _, line in read_lines(path)] == [line for line in b"".join(parts).decode().split("\n") if line]


@each
def test_a_line_may_cross_the_border_of_two_members_or_frames(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(
        b"".join(COMPRESS[ending](part) for part in (b"one\ntw", b"", "o\nzw\xc3".encode("latin-1"), b"\xb6lf"))
    )
    assert read_lines(path) == [(0, "one"), (4, "two"), (8, "zwölf")]


@each
def test_json_lines_and_whole_files_may_be_compressed(tmp_path: Path, ending: str) -> None:
    rows = tmp_path / f"f.jsonl.{ending}"
    rows.write_bytes(COMPRESS[ending](b"".join(json.dumps({"text": line}).encode() + b"\n" for line in LINES[:50])))
    found = [
        batch.text.to_pylist()
        for batch in JsonLinesFormat().read(
            SourceSlice(path=str(rows), index=0, source=source_of(rows, "jsonl")), limit=1 << 20
        )
    ]
    assert list(chain.from_iterable(found)) == LINES[:50]
    assert list(chain.from_iterable(jsonl.fields(str(rows), ending))) == [["text"]] * 50
    whole = tmp_path / f"f.txt.{ending}"
    whole.write_bytes(COMPRESS[ending](WHOLE[:100]) + COMPRESS[ending](WHOLE[100:]))
    (batch,) = read_whole(whole, limit=1 << 30)
    assert batch.text.to_pylist() == [WHOLE.decode()]


@each
def test_a_compressed_file_above_the_limit_is_too_large_for_one_document(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(COMPRESS[ending](b"x" * 100_000))
    (batch,) = read_whole(path, limit=99_999)
    assert (len(batch.text), [skip.reason for skip in batch.skips]) == (0, ["too_large"])


@each
def test_a_limit_that_no_memory_holds_takes_none_from_a_small_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(COMPRESS[ending](b"small"))
    (batch,) = read_whole(path, limit=1 << 60)
    assert batch.text.to_pylist() == ["small"]


@each
def test_a_file_of_many_steps_is_one_document(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(COMPRESS[ending](WHOLE))
    with mock.patch.object(text, "BATCH_BYTES", 1000):
        (batch,) = read_whole(path, limit=len(WHOLE))
        (too_large,) = read_whole(path, limit=len(WHOLE) - 1)
    assert batch.text.to_pylist() == [WHOLE.decode()]
    assert [skip.reason for skip in too_large.skips] == ["too_large"]


@each
def test_a_line_that_swells_beyond_the_limit_is_skipped_and_its_neighbours_survive(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(COMPRESS[ending](b"one\n" + b"x" * 30_000_000 + b"\ntwo\n"))
    batches = list(read(path, limit=1_000_000))
    assert list(chain.from_iterable(batch.text.to_pylist() for batch in batches)) == ["one", "two"]
    assert [(skip.position, skip.reason) for batch in batches for skip in batch.skips] == [(4, "too_large")]


@each
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_an_error_that_names_file_and_position(tmp_path: Path, ending: str, share: float) -> None:
    path = tmp_path / f"f.txt.{ending}"
    data = COMPRESS[ending](WHOLE)
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(SourceError, match=rf"cannot read .*f\.txt\.{ending} after \d+ bytes of text") as caught:
        read_lines(path)
    assert caught.value.hint


@each
@pytest.mark.parametrize("missing", range(1, 9))
def test_a_file_that_lacks_its_last_bytes_is_an_error(tmp_path: Path, ending: str, missing: int) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(CHECKED[ending](WHOLE)[:-missing])
    with pytest.raises(SourceError, match=rf"cannot read .*f\.txt\.{ending} after \d+ bytes of text"):
        read_lines(path)


@each
def test_a_second_member_or_frame_that_is_truncated_is_an_error(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    part = COMPRESS[ending](WHOLE)
    path.write_bytes(part + part[: len(part) // 2])
    with pytest.raises(SourceError, match=rf"cannot read .*f\.txt\.{ending} after \d+ bytes of text"):
        read_lines(path)


@each
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_a_second_member_or_frame_that_is_barely_begun_is_an_error(tmp_path: Path, ending: str, size: int) -> None:
    path = tmp_path / f"f.txt.{ending}"
    part = COMPRESS[ending](b"one\ntwo\n")
    path.write_bytes(part + part[:size])
    with pytest.raises(SourceError, match=rf"cannot read .*f\.txt\.{ending} after \d+ bytes of text"):
        read_lines(path)


@each
def test_a_truncated_file_read_as_one_document_is_an_error(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(COMPRESS[ending](WHOLE)[:-5])
    with pytest.raises(SourceError, match=rf"cannot read .*f\.txt\.{ending} after \d+ bytes of text"):
        list(read_whole(path, limit=1 << 30))


@each
def test_no_line_before_the_break_is_invented(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(COMPRESS[ending](WHOLE)[:-100])
    found: list[str] = []
    with mock.patch.object(byte_ranges, "CHUNK", 1000), pytest.raises(SourceError):
        for batch in read(path):
            found += batch.text.to_pylist()
    assert found == LINES[: len(found)]


@pytest.mark.parametrize("ending", [ending for ending in COMPRESS if ending != "lz4"])  # Arrow's has no checksum
@given(place=st.floats(0.05, 0.95), flip=st.integers(1, 255))
@settings(max_examples=60, deadline=None, database=None)
def test_a_corrupt_byte_is_an_error_and_never_other_text(
    tmp_path_factory: pytest.TempPathFactory, ending: str, place: float, flip: int
) -> None:
    path = tmp_path_factory.getbasetemp() / f"corrupt.txt.{ending}"
    data = bytearray(CHECKED[ending](WHOLE[:50_000]))
    data[int(len(data) * place)] ^= flip
    path.write_bytes(data)
    try:
        found = read_lines(path)
    except SourceError as error:
        assert re.match(rf"cannot read .*corrupt\.txt\.{ending} after \d+ bytes of text", error.message)
    else:  # some bits of gzip's code tables are not in use
        assert "\n".join(text for _, text in found).encode() == WHOLE[:50_000].rstrip(b"\n")


@each
def test_a_file_that_is_not_compressed_at_all_is_an_error(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(b"this is plain text\n" * 100)
    with pytest.raises(SourceError, match=rf"cannot read .*f\.txt\.{ending} after 0 bytes of text"):
        read_lines(path)


@each
def test_an_empty_text_that_is_compressed_has_no_lines(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(COMPRESS[ending](b""))
    assert read_lines(path) == []


@each
def test_a_compressed_file_of_no_bytes_is_truncated(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.txt.{ending}"
    path.write_bytes(b"")
    with pytest.raises(SourceError, match=rf"cannot read .*f\.txt\.{ending}"):
        read_lines(path)


def test_a_skippable_frame_of_zstd_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "f.txt.zst"
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    path.write_bytes(zstandard.compress(b"one\n") + skippable + zstandard.compress(b"two\n"))
    assert [line for _, line in read_lines(path)] == ["one", "two"]


def test_zeros_behind_the_last_gzip_member_are_passed_over_or_refused_but_hide_nothing(tmp_path: Path) -> None:
    path = tmp_path / "f.txt.gz"
    path.write_bytes(gzip.compress(b"one\n") + b"\0" * 512 + gzip.compress(b"two\n"))
    try:
        found = [line for _, line in read_lines(path)]
    except SourceError as error:
        assert "f.txt.gz" in error.message
    else:
        assert found == ["one", "two"]


def test_padding_between_streams_of_xz_is_passed_over_and_anything_else_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.txt.xz"
    path.write_bytes(lzma.compress(b"one\n") + bytes(70_000) + lzma.compress(b"two\n") + bytes(4))
    assert [line for _, line in read_lines(path)] == ["one", "two"]
    path.write_bytes(lzma.compress(b"one\n") + b"junk" * 10)
    with pytest.raises(SourceError, match=r"cannot read .*f\.txt\.xz after 4 bytes of text"):
        read_lines(path)


def test_an_xz_file_that_asks_for_too_much_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.txt.xz"
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    path.write_bytes(lzma.compress(b"one\n", filters=filters))
    with pytest.raises(SourceError, match=r"cannot read .*f\.txt\.xz after 0 bytes of text: .*[Mm]emory"):
        read_lines(path)
