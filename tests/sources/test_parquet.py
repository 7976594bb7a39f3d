from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import RecipeError, SourceError
from tokenmill.recipe import make_recipe
from tokenmill.sources.base import Extent, Rule, Source, SourceSlice
from tokenmill.sources.discover import list_sources
from tokenmill.sources.parquet import ParquetFormat

Found = tuple[list[tuple[int, bytes]], list[tuple[int, str]]]


FORMAT = ParquetFormat()


def source_of(path: Path, rule: Rule | None = None) -> Source:
    text = rule or {"column": "text"}
    return Source(name=path.name, kind="parquet", compression="", bytes=0, modified=0, split="", text=text)


def extent_of(path: Path, rule: Rule | None = None) -> Extent:
    return FORMAT.extent(str(path), source_of(path, rule))


def read(path: Path, rule: Rule | None = None, start: int = 0, stop: int = -1) -> Found:
    """Documents as bytes and skips, with their rows."""
    documents, skips = [], []
    for batch in FORMAT.read(
        SourceSlice(path=str(path), index=7, source=source_of(path, rule), start=start, stop=stop), limit=1 << 30
    ):
        assert set(batch.sources.tolist()) <= {7}
        assert batch.text.null_count == 0
        # As the engine sees them: offsets and bytes, of text that may yet be invalid.
        assert batch.text.type in (pa.string(), pa.large_string())
        binary = batch.text.view(pa.binary() if batch.text.type == pa.string() else pa.large_binary())
        documents += list(zip(batch.positions.tolist(), binary.to_pylist(), strict=True))
        skips += [(skip.position, skip.reason) for skip in batch.skips]
    return documents, skips


def write(path: Path, columns: dict[str, Any], *, row_group_size: int = 2, **options: Any) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size, **options)


def test_rows_of_all_row_groups_come_in_order_with_their_numbers(tmp_path: Path) -> None:
    write(tmp_path / "f.parquet", {"id": [1, 2, 3, 4, 5], "text": ["a", "b", "", "dé", "e"]})
    assert read(tmp_path / "f.parquet") == ([(0, b"a"), (1, b"b"), (2, b""), (3, "dé".encode()), (4, b"e")], [])


@pytest.mark.parametrize(("start", "stop", "rows"), [(0, 1, [0, 1]), (1, 2, [2, 3]), (2, 3, [4]), (1, 3, [2, 3, 4])])
def test_a_range_is_a_run_of_row_groups(tmp_path: Path, start: int, stop: int, rows: list[int]) -> None:
    write(tmp_path / "f.parquet", {"text": ["0", "1", "2", "3", "4"]})
    documents, _ = read(tmp_path / "f.parquet", None, start, stop)
    assert documents == [(row, str(row).encode()) for row in rows]


@given(
    texts=st.lists(st.none() | st.text(st.characters(codec="utf-8"), max_size=8), min_size=1, max_size=40),
    row_group_size=st.integers(1, 12),
    cuts=st.sets(st.integers(1, 40), max_size=4),
)
@settings(max_examples=60, deadline=None, database=None)
def test_row_groups_read_range_by_range_give_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str | None], row_group_size: int, cuts: set[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "ranges.parquet"
    write(path, {"text": pa.array(texts, pa.string())}, row_group_size=row_group_size)
    groups = pq.ParquetFile(path).num_row_groups
    borders = [0, *sorted(cut for cut in cuts if cut < groups), groups]
    parts = [read(path, None, start, stop) for start, stop in pairwise(borders)]
    assert list(chain.from_iterable(documents for documents, _ in parts)) == [
        (row, text.encode()) for row, text in enumerate(texts) if text is not None
    ]
    assert list(chain.from_iterable(skips for _, skips in parts)) == [
        (row, "null_text") for row, text in enumerate(texts) if text is None
    ]


def test_null_rows_are_skipped_and_their_neighbours_keep_their_rows(tmp_path: Path) -> None:
    write(tmp_path / "f.parquet", {"text": [None, "a", None, None, "b", None]})
    assert read(tmp_path / "f.parquet") == (
        [(1, b"a"), (4, b"b")],
        [(0, "null_text"), (2, "null_text"), (3, "null_text"), (5, "null_text")],
    )


KINDS = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "binary_view": pa.binary_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
}


def skip_without_views(kind: str) -> None:
    if kind.endswith("_view") and int(pa.__version__.partition(".")[0]) < 21:
        pytest.skip("Arrow before 21 does not write views to Parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_text_column_is_read(tmp_path: Path, kind: str) -> None:
    skip_without_views(kind)
    texts = ["one", None, "zwölf", "", "a text that is longer than twelve bytes", "one"]
    write(tmp_path / "f.parquet", {"text": pa.array(texts, pa.string()).cast(KINDS[kind])}, row_group_size=4)
    assert pq.read_schema(tmp_path / "f.parquet").field("text").type == KINDS[kind]
    extent_of(tmp_path / "f.parquet")
    assert read(tmp_path / "f.parquet") == (
        [(row, text.encode()) for row, text in enumerate(texts) if text is not None],
        [(1, "null_text")],
    )


@pytest.mark.parametrize("kind", ["binary", "large_binary", "binary_view"])
def test_bytes_that_are_not_utf8_reach_the_unit_as_they_are(tmp_path: Path, kind: str) -> None:
    skip_without_views(kind)
    texts = [b"good", b"\xff\xfe", b"cut \xe6\xbc", b"good too"]
    write(tmp_path / "f.parquet", {"text": pa.array(texts, KINDS[kind])})
    assert read(tmp_path / "f.parquet") == (list(enumerate(texts)), [])


def test_a_dictionary_of_bytes_that_are_not_utf8_is_read_as_well(tmp_path: Path) -> None:
    texts = [b"good", b"\xff\xfe", b"good"]
    column = pa.array(texts, pa.binary()).dictionary_encode()
    write(tmp_path / "f.parquet", {"text": column})
    assert read(tmp_path / "f.parquet") == (list(enumerate(texts)), [])


def test_a_text_column_may_be_inside_a_large_row_group(tmp_path: Path) -> None:
    texts = [f"{row} " + "x" * (row % 700) for row in range(30_000)]
    write(tmp_path / "f.parquet", {"text": texts, "id": list(range(30_000))}, row_group_size=1 << 20)
    documents, skips = read(tmp_path / "f.parquet")
    assert documents == [(row, text.encode()) for row, text in enumerate(texts)]
    assert skips == []


def test_a_template_reads_its_columns(tmp_path: Path) -> None:
    write(tmp_path / "f.parquet", {"title": ["A", None, "C"], "body": ["a", "b", "c"], "year": [1, 2, 3]})
    assert read(tmp_path / "f.parquet", {"template": "{title} ({year})\n{body}"}) == (
        [(0, b"A (1)\na"), (2, b"C (3)\nc")],
        [(1, "null_text")],
    )


def test_joined_columns_leave_out_an_optional_one_that_is_null(tmp_path: Path) -> None:
    write(
        tmp_path / "f.parquet",
        {"instruction": ["I", "J", None], "input": ["i", None, "k"], "output": ["o", "p", "q"]},
    )
    assert read(tmp_path / "f.parquet", {"join": ["instruction", "input?", "output"]}) == (
        [(0, b"I\n\ni\n\no"), (1, b"J\n\np")],
        [(2, "null_text")],
    )


def test_lists_of_messages_are_read_as_turns(tmp_path: Path) -> None:
    turn = pa.struct([("role", pa.string()), ("content", pa.string())])
    messages = [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hö"}],
        None,
        [],
        [{"role": "user", "content": None}, {"role": "assistant", "content": "Yes"}],
    ]
    write(tmp_path / "f.parquet", {"messages": pa.array(messages, pa.list_(turn)), "id": [1, 2, 3, 4]})
    rule = {"turns": "messages"}
    extent_of(tmp_path / "f.parquet", rule)
    assert read(tmp_path / "f.parquet", rule) == (
        [(0, "Hi\n\nHö".encode()), (2, b""), (3, b"Yes")],
        [(1, "null_text")],
    )


@pytest.mark.parametrize(("rule", "text"), [({"template": "{a}: {b}"}, b"x: y"), ({"join": ["a", "b"]}, b"x\n\ny")])
def test_binary_columns_may_be_parts_of_a_text(tmp_path: Path, rule: Rule, text: bytes) -> None:
    write(tmp_path / "f.parquet", {"a": pa.array([b"x"], pa.binary()), "b": pa.array(["y"], pa.string())})
    assert read(tmp_path / "f.parquet", rule) == ([(0, text)], [])


def test_a_column_whose_name_has_a_dot_is_a_column(tmp_path: Path) -> None:
    write(tmp_path / "f.parquet", {"a.b": ["x" * 1000, "y"]})
    rule = {"column": "a.b"}
    assert read(tmp_path / "f.parquet", rule) == ([(0, b"x" * 1000), (1, b"y")], [])
    assert extent_of(tmp_path / "f.parquet", rule).text_bytes > 0


def test_a_struct_beside_the_text_does_not_disturb_it(tmp_path: Path) -> None:
    write(tmp_path / "f.parquet", {"meta": [{"text": "no"}, {"text": "no"}], "text": ["yes", "yes"]})
    assert read(tmp_path / "f.parquet") == ([(0, b"yes"), (1, b"yes")], [])


def test_the_extent_counts_the_text_alone_for_every_row_group(tmp_path: Path) -> None:
    texts = ["x" * 5000, "y" * 5000, "z" * 100, "w" * 100]
    options: dict[str, Any] = {"use_dictionary": False, "compression": "zstd"}
    write(tmp_path / "f.parquet", {"text": texts, "noise": ["n" * 90_000] * 4}, **options)
    extent = extent_of(tmp_path / "f.parquet")
    assert len(extent.sections) == 2
    assert 10_000 <= extent.sections[0] < 11_000
    assert 200 <= extent.sections[1] < 1_000
    assert extent.text_bytes == sum(extent.sections)


def test_a_file_without_rows_has_no_documents(tmp_path: Path) -> None:
    write(tmp_path / "f.parquet", {"text": pa.array([], pa.string())})
    assert read(tmp_path / "f.parquet") == ([], [])
    assert FORMAT.columns(str(tmp_path / "f.parquet"), source_of(tmp_path / "f.parquet")) == ["text"]


@pytest.mark.parametrize("values", [[1, 2], [1.5, None], [["a"], ["b"]], [True, False]])
def test_a_column_that_holds_no_text_is_refused_before_any_work(tmp_path: Path, values: list[Any]) -> None:
    write(tmp_path / "f.parquet", {"text": values})
    with pytest.raises(RecipeError, match=r"f\.parquet: column 'text' contains .*, not text") as caught:
        extent_of(tmp_path / "f.parquet")
    assert "`text_column" in caught.value.hint


@pytest.mark.parametrize("keep", [0, 3, 100, -1, -9])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "f.parquet"
    write(path, {"text": ["abc" * 100] * 10})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"cannot read .*f\.parquet"):
        FORMAT.columns(str(path), source_of(path))


def test_a_corrupt_page_is_an_error_that_names_file_row_group_and_row(tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    texts = [f"text number {row} " * 20 for row in range(600)]
    write(path, {"text": texts}, row_group_size=200, compression="gzip", use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle : middle + 16] = b"\xff" * 16
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"cannot read .*f\.parquet, row group 1, from row 200 on"):
        read(path)
    assert [row for row, _ in read(path, None, 0, 1)[0]] == list(range(200))
    assert [row for row, _ in read(path, None, 2, 3)[0]] == list(range(400, 600))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_an_error_if_they_are_the_text(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["text", "text", "more"])
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(RecipeError, match=r"several columns 'text'"):
        list_sources(make_recipe({"sources": (str(path),)}))
    (found,) = list_sources(make_recipe({"sources": (str(path),), "text_column": "more"})).sources
    assert found.text == {"column": "more"}
