from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tokenmill.build.plan import make_plan
from tokenmill.errors import RecipeError, SourceError
from tokenmill.recipe import make_recipe
from tokenmill.sources.arrow import ArrowFormat
from tokenmill.sources.base import Rule, Source, SourceSlice
from tokenmill.sources.discover import list_sources
from tokenmill.sources.reader import read_unit

Found = tuple[list[tuple[int, bytes]], list[tuple[int, str]]]
FORMATS: list[Callable[..., Any]] = [pa.ipc.new_stream, pa.ipc.new_file]
both_formats = pytest.mark.parametrize("new", FORMATS, ids=["stream", "file"])


FORMAT = ArrowFormat()


def source_of(path: Path, rule: Rule | None = None) -> Source:
    text = rule or {"column": "text"}
    return Source(name=path.name, kind="arrow", compression="", bytes=0, modified=0, split="", text=text)


def read(path: Path, rule: Rule | None = None, start: int = 0, stop: int = -1) -> Found:
    documents, skips = [], []
    for batch in FORMAT.read(
        SourceSlice(path=str(path), index=2, source=source_of(path, rule), start=start, stop=stop), limit=1 << 30
    ):
        assert set(batch.sources.tolist()) <= {2}
        binary = batch.text.view(pa.binary() if batch.text.type == pa.string() else pa.large_binary())
        documents += list(zip(batch.positions.tolist(), binary.to_pylist(), strict=True))
        skips += [(skip.position, skip.reason) for skip in batch.skips]
    return documents, skips


def write(path: Path, new: Callable[..., Any], batches: list[dict[str, Any]], schema: pa.Schema | None = None) -> None:
    tables = [pa.RecordBatch.from_pydict(columns, schema=schema) for columns in batches]
    with pa.OSFile(str(path), "wb") as sink, new(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_batch(table)


@both_formats
def test_rows_of_all_record_batches_come_in_order_with_their_numbers(tmp_path: Path, new: Callable[..., Any]) -> None:
    write(tmp_path / "f.arrow", new, [{"text": ["a", None]}, {"text": ["é"]}, {"text": ["c", "d"]}])
    assert read(tmp_path / "f.arrow") == (
        [(0, b"a"), (2, "é".encode()), (3, b"c"), (4, b"d")],
        [(1, "null_text")],
    )


@both_formats
@pytest.mark.parametrize(("start", "stop", "rows"), [(0, 1, [0, 1]), (1, 2, [2]), (2, 3, [3, 4]), (1, 3, [2, 3, 4])])
def test_a_range_is_a_run_of_record_batches(
    tmp_path: Path, new: Callable[..., Any], start: int, stop: int, rows: list[int]
) -> None:
    write(tmp_path / "f.arrow", new, [{"text": ["0", "1"]}, {"text": ["2"]}, {"text": ["3", "4"]}])
    documents, _ = read(tmp_path / "f.arrow", None, start, stop)
    assert documents == [(row, str(row).encode()) for row in rows]


@both_formats
def test_an_empty_record_batch_is_passed_over(tmp_path: Path, new: Callable[..., Any]) -> None:
    schema = pa.schema([("text", pa.string())])
    write(tmp_path / "f.arrow", new, [{"text": ["a"]}, {"text": []}, {"text": ["b"]}], schema)
    assert read(tmp_path / "f.arrow") == ([(0, b"a"), (1, b"b")], [])
    assert read(tmp_path / "f.arrow", None, 1, 2) == ([], [])
    assert len(FORMAT.extent(str(tmp_path / "f.arrow"), source_of(tmp_path / "f.arrow")).sections) == 3


@both_formats
def test_a_file_without_record_batches_has_no_documents(tmp_path: Path, new: Callable[..., Any]) -> None:
    with pa.OSFile(str(tmp_path / "f.arrow"), "wb") as sink, new(sink, pa.schema([("text", pa.string())])):
        pass
    assert FORMAT.columns(str(tmp_path / "f.arrow"), source_of(tmp_path / "f.arrow")) == ["text"]
    assert read(tmp_path / "f.arrow") == ([], [])


@both_formats
@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()],
    ids=str,
)
def test_every_kind_of_text_column_is_read(tmp_path: Path, new: Callable[..., Any], kind: pa.DataType) -> None:
    texts = ["one", None, "zwölf", "", "a text that is longer than twelve bytes"]
    column = pa.array(texts, pa.string()).cast(kind)
    write(tmp_path / "f.arrow", new, [{"text": column}])
    assert read(tmp_path / "f.arrow")[0] == [(row, text.encode()) for row, text in enumerate(texts) if text is not None]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()], ids=str)
def test_dictionary_columns_are_decoded(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(["a", "b", "a", None], kind).dictionary_encode()
    write(tmp_path / "f.arrow", pa.ipc.new_stream, [{"text": column}])
    assert read(tmp_path / "f.arrow") == ([(0, b"a"), (1, b"b"), (2, b"a")], [(3, "null_text")])


@both_formats
def test_messages_and_templates_are_read(tmp_path: Path, new: Callable[..., Any]) -> None:
    turns = [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
        [{"role": "x", "content": ""}],
    ]
    write(tmp_path / "f.arrow", new, [{"messages": turns, "n": [1, 2]}])
    assert read(tmp_path / "f.arrow", {"turns": "messages"}) == ([(0, b"Hi\n\nHo"), (1, b"")], [])
    assert read(tmp_path / "f.arrow", {"template": "no. {n}"}) == ([(0, b"no. 1"), (1, b"no. 2")], [])


@both_formats
def test_the_extent_counts_the_text_of_every_record_batch(tmp_path: Path, new: Callable[..., Any]) -> None:
    write(tmp_path / "f.arrow", new, [{"text": ["x" * 1000] * 3, "n": ["n" * 9000] * 3}, {"text": ["y"], "n": ["n"]}])
    extent = FORMAT.extent(str(tmp_path / "f.arrow"), source_of(tmp_path / "f.arrow"))
    assert 3000 <= extent.sections[0] < 3100
    assert 1 <= extent.sections[1] < 100
    assert extent.text_bytes == sum(extent.sections)


@both_formats
def test_a_column_that_holds_no_text_is_refused(tmp_path: Path, new: Callable[..., Any]) -> None:
    write(tmp_path / "f.arrow", new, [{"text": [1, 2]}])
    with pytest.raises(RecipeError, match=r"f\.arrow: column 'text' contains int64, not text"):
        FORMAT.extent(str(tmp_path / "f.arrow"), source_of(tmp_path / "f.arrow"))


@both_formats
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_file_is_an_error_that_names_it_and_never_a_short_reading(
    tmp_path: Path, new: Callable[..., Any], share: float
) -> None:
    path = tmp_path / "f.arrow"
    write(path, new, [{"text": [f"{batch} " * 200] * 20} for batch in range(10)])
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(SourceError, match=r"cannot read .*f\.arrow"):
        read(path)


def test_a_stream_without_its_end_mark_is_whole_as_the_format_allows(tmp_path: Path) -> None:
    path = tmp_path / "f.arrow"
    write(path, pa.ipc.new_stream, [{"text": ["one"]}, {"text": ["two"]}])
    end_of_stream = b"\xff\xff\xff\xff\0\0\0\0"
    data = path.read_bytes()
    assert data.endswith(end_of_stream)
    path.write_bytes(data.removesuffix(end_of_stream))
    assert read(path) == ([(0, b"one"), (1, b"two")], [])


def test_a_file_of_something_else_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "f.arrow").write_bytes(b"this is no arrow file at all, but a longer text" * 10)
    with pytest.raises(SourceError, match=r"cannot read .*f\.arrow"):
        FORMAT.columns(str(tmp_path / "f.arrow"), source_of(tmp_path / "f.arrow"))


def test_offsets_that_point_outside_the_text_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f.arrow"
    write(path, pa.ipc.new_stream, [{"text": ["abcd", "efgh"]}])
    data = path.read_bytes()
    offsets = (0).to_bytes(4, "little") + (4).to_bytes(4, "little") + (8).to_bytes(4, "little")
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, offsets[:8] + (1 << 30).to_bytes(4, "little")))
    with pytest.raises(SourceError, match=r"cannot read .*f\.arrow, record batch 0"):
        read(path)


def test_offsets_that_go_backwards_are_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "f.arrow"
    write(path, pa.ipc.new_stream, [{"text": ["abcd", "efgh"]}])
    data = path.read_bytes()
    offsets = (0).to_bytes(4, "little") + (4).to_bytes(4, "little") + (8).to_bytes(4, "little")
    path.write_bytes(data.replace(offsets, offsets[:4] + (1 << 30).to_bytes(4, "little") + offsets[8:]))
    script = f"""
from tokenmill.sources.base import Source, SourceSlice
from tokenmill.sources.arrow import ArrowFormat
source = Source(name="f", kind="arrow", compression="", bytes=0, modified=0, split="", text={{"column": "text"}})
for batch in ArrowFormat().read(SourceSlice(path={str(path)!r}, index=0, source=source), limit=1000):
    batch.text.to_pylist()
"""
    # In a process of its own: what goes wrong here takes the whole process down.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "SourceError: cannot read" in done.stderr
    assert "f.arrow, record batch 0" in done.stderr


def change(path: Path, old: bytes, new: bytes) -> None:
    """Replace what stands in a file for the last time."""
    head, found, tail = path.read_bytes().rpartition(old)
    assert found
    path.write_bytes(head + new + tail)


def offsets_of(*ends: int) -> bytes:
    return b"".join(end.to_bytes(4, "little") for end in (0, *ends))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(offsets_of(4, 8, 12), offsets_of(4, 1 << 30, 12), id="of-another-field"),
        pytest.param(offsets_of(1, 2, 3), offsets_of(1, 1 << 28, 3), id="of-the-list"),
    ],
)
def test_invalid_text_does_not_hide_offsets_that_lead_out_of_the_file(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "f.arrow"
    turns = [
        [{"content": text, "role": role}] for text, role in (("QQQQQ", "user"), ("efghi", "role"), ("jklmn", "some"))
    ]
    write(path, pa.ipc.new_stream, [{"messages": turns}])
    change(path, b"QQQQQ", b"Q\xffQQQ")
    change(path, old, new)
    script = f"""
from tokenmill.sources.base import Source, SourceSlice
from tokenmill.sources.arrow import ArrowFormat
source = Source(name="f", kind="arrow", compression="", bytes=0, modified=0, split="", text={{"turns": "messages"}})
list(ArrowFormat().read(SourceSlice(path={str(path)!r}, index=0, source=source), limit=1000))
"""
    # In a process of its own: what goes wrong here takes the whole process down.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "SourceError: cannot read" in done.stderr
    assert "f.arrow, record batch 0" in done.stderr


TURNS = pa.struct([("content", pa.string()), ("role", pa.dictionary(pa.int8(), pa.string()))])


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (pa.string(), lambda text: text),
        (pa.large_string(), lambda text: text),
        (pa.string_view(), lambda text: text),
        (pa.dictionary(pa.int8(), pa.string()), lambda text: text),
        (pa.list_(TURNS), lambda text: [{"content": text, "role": "user"}]),
        (pa.large_list(TURNS), lambda text: [{"content": text, "role": "user"}]),
        (pa.list_(TURNS, 1), lambda text: [{"content": text, "role": "user"}]),
        (pa.list_view(pa.list_view(pa.string())), lambda text: [[text]]),
        (pa.large_list_view(pa.large_string()), lambda text: [text]),
        (pa.map_(pa.string(), pa.string()), lambda text: [("key", text)]),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else "",
)
def test_invalid_text_at_any_depth_is_that_of_its_row_alone(
    tmp_path: Path, kind: pa.DataType, make: Callable[[str], Any]
) -> None:
    path = tmp_path / "f.arrow"
    rows = [make(text) for text in ("one", "QQQQQQQQQQQQQQQ", "three")]
    write(path, pa.ipc.new_stream, [{"it": pa.array(rows, kind)}])
    change(path, b"QQQQQQQQQQQQQQQ", b"QQQQQQ\xffQQQQQQQQ")
    documents, skips = read(path, {"template": "{it}"})
    assert [row for row, _ in documents] == [0, 2]
    assert skips == [(1, "invalid_utf8")]


def test_a_saved_dataset_of_several_shards_is_read_whole_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    texts = [f"document {row}: ü" for row in range(7500)]
    saved = datasets.Dataset.from_dict({"id": list(range(7500)), "text": texts})
    saved.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    listing = list_sources(make_recipe({"sources": (str(tmp_path / "saved"),)}))
    assert [source.name for source in listing.sources] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    plan = make_plan(
        identity={}, sources=listing.sources, extents=listing.extents, unit_bytes=8_000, sample=None, seed=0
    )
    assert len(plan.units) > 3
    found: list[str] = []
    for unit in plan.units:
        assert unit.num_sources == 1
        batches = read_unit(
            unit, [listing.path(unit.source)], [plan.sources[unit.source]], documents="lines", limit=1 << 20
        )
        found += [text for batch in batches for text in batch.text.to_pylist()]
    assert found == texts


def test_a_saved_dataset_with_splits_is_a_folder_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    parts = {
        name: datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(4)]}) for name in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    recipe = make_recipe({"sources": (str(tmp_path / "saved/train"),), "val_sources": (str(tmp_path / "saved/test"),)})
    listing = list_sources(recipe)
    assert [(source.name, source.split) for source in listing.sources] == [
        ("test/data-00000-of-00001.arrow", "val"),
        ("train/data-00000-of-00001.arrow", ""),
    ]
