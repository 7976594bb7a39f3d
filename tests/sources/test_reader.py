"""From a file to its format, and the documents of a unit: pinned, in order, whatever the format."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import write_jsonl
from tokenmill.errors import RecipeError, SourceChangedError, SourceError
from tokenmill.recipe import make_recipe
from tokenmill.sizes import format_time
from tokenmill.sources.base import Batch, Section, Source, Unit
from tokenmill.sources.discover import Listing, list_sources
from tokenmill.sources.files import check_unchanged
from tokenmill.sources.reader import format_of, kind_of, read_as, read_unit, sections
from tokenmill.sources.text_columns import UNREAD


def listed(path: Path) -> Listing:
    return list_sources(make_recipe({"sources": path}))


def read(listing: Listing) -> Iterator[Batch]:
    unit = Unit(index=0, source=0, num_sources=1, start=0, stop=-1, text_bytes=1)
    return read_unit(unit, [listing.path(0)], list(listing.sources), documents="lines", limit=1 << 20)


def one_line(path: Path) -> Path:
    path.write_bytes(b'{"text": "x"}\n')
    return path


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.jsonl", "jsonl", ""),
        ("a.NDJSON", "jsonl", ""),
        ("a.jsonl.gz", "jsonl", "gz"),
        ("a.txt.gz", "text", "gz"),
        ("a.txt.zstd", "text", "zst"),
        ("a.v1.2.txt", "text", ""),
        ("a.gz", None, "gz"),
        ("A.JSONL.GZ", "jsonl", "gz"),
        ("a.parquet", "parquet", ""),
        ("a.arrow", "arrow", ""),
        ("LICENSE", None, ""),
        ("a.jsonl.bz2", "jsonl", "bz2"),
        ("a.txt.xz", "text", "xz"),
        ("a.txt.lz4", "text", "lz4"),
        ("a.csv", "csv", ""),
        ("a.TSV.gz", "csv", "gz"),
    ],
)
def test_kind_and_compression_come_from_the_ending(name: str, kind: str | None, compression: str) -> None:
    assert kind_of(f"folder.txt/{name}") == (kind, compression)
    assert read_as(name, documents="lines") == (kind or "text", compression)


@pytest.mark.parametrize("name", ["a.json", "a.JSON.gz"])
def test_a_json_file_is_text_if_its_lines_are_not_documents(name: str) -> None:
    assert read_as(name, documents="lines")[0] == "jsonl"
    assert read_as(name, documents="files")[0] == read_as(name, documents="separator:x")[0] == "text"
    assert read_as(f"{name}.jsonl", documents="files")[0] == "jsonl"


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("a.zip", "with unzip"),
        ("A.ZIP", "with unzip"),
        ("a.7z", "with 7z"),
        *((name, "with tar") for name in ("a.tar", "a.tar.gz", "a.tgz", "a.tar.zst", "a.tar.bz2", "a.txz")),
    ],
)
def test_archives_are_refused_with_what_to_do(tmp_path: Path, name: str, program: str) -> None:
    with pytest.raises(RecipeError, match=f"{name}: archives are not read") as caught:
        listed(one_line(tmp_path / name))
    assert program in caught.value.hint


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.arrow.zst"])
def test_tables_that_were_compressed_again_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=r"a compressed (parquet|arrow) file is not read"):
        listed(one_line(tmp_path / name))


@pytest.mark.parametrize("name", ["a.md", "a.html.gz", "A.PY", "x.y.rst"])
def test_a_file_of_prose_with_markup_or_of_code_is_one_document_unless_lines_are_wanted(name: str) -> None:
    assert read_as(name, documents="auto")[0] == "document"
    assert read_as(name, documents="lines")[0] == "text"


def test_a_kind_that_this_version_does_not_know_is_an_error() -> None:
    with pytest.raises(SourceError, match="sources of kind 'xml' are not read by this version"):
        format_of("xml")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "text", "csv"])
def test_a_local_build_loads_the_formats_of_its_sources_only(tmp_path: Path, kind: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["some text"])
    (tmp_path / "a.text").write_text("some text\n")
    (tmp_path / "a.csv").write_text("text\nsome text\n")
    pq.write_table(pa.table({"text": ["some text"]}), tmp_path / "a.parquet")
    code = f"""
import sys, tokenmill
tokenmill.prepare("a.{kind}", "out", tokenizer="byte", workers=1)
formats = ("parquet", "arrow", "jsonl", "text", "csv", "json_array")
print(*(name for name in formats if f"tokenmill.sources.{{name}}" in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [kind]


def test_a_source_that_is_unchanged_passes(tmp_path: Path) -> None:
    listing = listed(one_line(tmp_path / "a.txt"))
    check_unchanged(listing.path(0), listing.sources[0])
    assert [batch.text.to_pylist() for batch in read(listing)] == [['{"text": "x"}']]


def test_a_source_that_grew_since_the_plan_is_an_error_that_shows_both_sizes(tmp_path: Path) -> None:
    listing = listed(one_line(tmp_path / "a.txt"))
    with open(tmp_path / "a.txt", "ab") as file:
        file.write(b"more\n")
    with pytest.raises(SourceChangedError, match=r"a\.txt changed .* had 14 bytes .* now 19 bytes") as caught:
        list(read(listing))
    assert "update=True" in caught.value.hint


def test_a_source_of_the_same_size_that_was_written_again_is_an_error_that_shows_both_times(tmp_path: Path) -> None:
    listing = listed(one_line(tmp_path / "a.txt"))
    before = listing.sources[0].modified
    os.utime(tmp_path / "a.txt", ns=(before, before + 1_000_000_000))
    both = f"time {format_time(before)}, now .* time {format_time(before + 1_000_000_000)}"
    with pytest.raises(SourceChangedError, match=both):
        list(read(listing))


def test_a_source_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"line\n" * 4_000_000)
    listing = listed(tmp_path / "a.txt")
    batches = read(listing)
    next(batches)
    with open(tmp_path / "a.txt", "ab") as file:
        file.write(b"more\n")
    with pytest.raises(SourceChangedError, match=r"had 20000000 bytes .* now 20000005 bytes"):
        list(batches)


def test_a_source_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    listing = listed(one_line(tmp_path / "a.txt"))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(SourceError, match=r"cannot read .*a\.txt: No such file"):
        list(read(listing))


def test_sections_tell_rows_and_sizes_without_reading(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * 1000] * 3}), tmp_path / "a.parquet", row_group_size=2, use_dictionary=False)
    listing = listed(tmp_path / "a.parquet")
    first, second = sections(listing.path(0), listing.sources[0])
    assert isinstance(first, Section)
    assert (first.num_rows, second.num_rows) == (2, 1)
    assert listing.extents[0].sections == (first.text_bytes, second.text_bytes)


def test_a_source_that_was_planned_without_being_read_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    listing = listed(tmp_path / "a.parquet")
    fields = {name: getattr(listing.sources[0], name) for name in Source.__slots__}
    unread = Source(**{**fields, "text": UNREAD})
    with pytest.raises(SourceError, match="could not be read when the plan was made, and can be now"):
        sections(listing.path(0), unread)
    unit = Unit(index=0, source=0, num_sources=1, start=0, stop=-1, text_bytes=1)
    with pytest.raises(SourceError, match="could not be read when the plan was made, and can be now"):
        list(read_unit(unit, [listing.path(0)], [unread], documents="lines", limit=1000))
