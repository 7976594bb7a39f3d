from __future__ import annotations

import bz2
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill
from tokenmill.errors import BuildError, RecipeError, SourceError
from tokenmill.recipe import make_recipe
from tokenmill.sources.base import Source, SourceSlice
from tokenmill.sources.discover import list_sources
from tokenmill.sources.json_array import JsonArrayFormat

Found = list[tuple[int, str, str]]
LIMIT = 1 << 30
ROWS: list[dict[str, Any]] = [
    {"text": "one"},
    {"text": 'two "quoted" \\ [x], {y}', "x": {"y": [1, "]"]}},
    {"id": 3, "text": "drei é\n"},
]


def read(path: Path, *, limit: int = LIMIT, chunk: int = 8_000_000, **rule: Any) -> Found:
    """Position, text and reason of every element, in order."""
    source = Source(
        name=path.name,
        kind="json",
        compression="",
        bytes=path.stat().st_size,
        modified=0,
        split="",
        text=rule or {"column": "text"},
    )
    found: Found = []
    part = SourceSlice(path=str(path), index=5, source=source)
    for batch in JsonArrayFormat().read(part, limit=limit, batch_bytes=chunk):
        found += [
            (position, text, "")
            for position, text in zip(batch.positions.tolist(), batch.text.to_pylist(), strict=True)
        ]
        found += [(skip.position, "", skip.reason) for skip in batch.skips]
    return sorted(found)


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def kind_of(path: Path, **fields: Any) -> str:
    return list_sources(make_recipe({"sources": path, **fields})).sources[0].kind


LAYOUTS = {
    "compact": json.dumps(ROWS),
    "indented": json.dumps(ROWS, indent=2, ensure_ascii=False),
    "lines": "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n",
    "marked": "\ufeff\n " + json.dumps(ROWS),
    "inside": json.dumps({"version": "1", "n": [1, {"a": 2}], "about": {"x": [{"y": 1}]}, "data": ROWS, "end": []}),
    "inside, indented": json.dumps({"version": "1", "data": ROWS, "last": {"x": 1}}, indent=4),
    "inside, in lines": '{"data": [\n' + ",\n".join(map(json.dumps, ROWS)) + "\n]}\n",
}


@pytest.mark.parametrize("data", LAYOUTS.values(), ids=LAYOUTS)
def test_the_objects_of_an_array_are_documents_however_it_is_laid_out(tmp_path: Path, data: str) -> None:
    path = write(tmp_path / "a.json", data)
    assert kind_of(path) == "json"
    found = read(path)
    assert [(text, reason) for _, text, reason in found] == [(row["text"], "") for row in ROWS]
    assert all(path.read_bytes()[position:].startswith(b"{") for position, _, _ in found)
    for chunk in (1, 2, 7, 50):
        assert read(path, chunk=chunk) == found


@pytest.mark.parametrize(
    "data",
    [
        '{"text": "a"}\n{"text": "b"}\n',
        '{"text": "a", "more": [{"x": 1}]}',  # one line, with its text beside an array
        '{"messages": [{"content": "a"}]}\n',
        '{"text": "cut\n{"text": "b", "x": [{"y": 1}]}\n',  # the first line is broken
        '{"text": "cut",\n{"text": "b"}\n',
        '[1, 2]\n{"text": "b"}\n',
    ],
)
def test_json_lines_stay_json_lines_whatever_their_first_line_is(tmp_path: Path, data: str) -> None:
    assert kind_of(write(tmp_path / "a.json", data)) == "jsonl"


def test_which_field_is_asked_for_tells_an_object_with_an_array_from_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"text": "about", "rows": [{"body": "a"}, {"body": "b"}]}')
    assert (kind_of(path), kind_of(path, text_column="body")) == ("jsonl", "json")
    assert kind_of(path, documents="files") == "text"


@given(
    values=st.lists(
        st.dictionaries(st.sampled_from(["text", "x", '"', "\\"]), st.text('a"\\[]{},é\n', max_size=8), max_size=3),
        min_size=1,
        max_size=8,
    ),
    indent=st.sampled_from([None, 1]),
    chunk=st.integers(1, 30),
    limit=st.sampled_from([20, LIMIT]),
    is_inside=st.booleans(),
)
@settings(max_examples=100, deadline=None, database=None)
def test_elements_are_those_of_pythons_parser_however_they_are_read(
    tmp_path_factory: pytest.TempPathFactory,
    values: list[dict[str, str]],
    indent: int | None,
    chunk: int,
    limit: int,
    is_inside: bool,
) -> None:
    tree = {"before": "[{", "rows": values} if is_inside else values
    path = write(tmp_path_factory.getbasetemp() / "a.json", json.dumps(tree, indent=indent, ensure_ascii=False))
    found = read(path, chunk=chunk, limit=limit)
    data, decoder = path.read_bytes(), json.JSONDecoder()
    sizes = [len(data[at:].decode()[: decoder.raw_decode(data[at:].decode())[1]].encode()) for at, _, _ in found]
    expected = [
        ("", "too_large") if size > limit else (value.get("text", ""), "" if "text" in value else "missing_field")
        for value, size in zip(values, sizes, strict=True)
    ]
    assert [(text, reason) for _, text, reason in found] == expected


def test_bad_elements_are_skipped_with_their_reason_and_position(tmp_path: Path) -> None:
    bad = {
        '{"text": 7}': "not_text",
        '{"other": 1}': "missing_field",
        "3": "invalid_json",
        '"a"': "invalid_json",
        '{"text": "\\ud800"}': "lone_surrogate",
        '{"text": NaN}': "invalid_json",
        '{"text" 1}': "invalid_json",
        '{"text": null}': "null_text",
    }
    path = write(tmp_path / "a.json", '[{"text": "first"}, ' + ", ".join(bad) + ',\n {"text": "last"}, ]')
    found = read(path)
    assert [reason for _, _, reason in found] == ["", *bad.values(), ""]
    assert [path.read_bytes()[position:].split(b",")[0].strip().decode() for position, _, _ in found[1:-1]] == [*bad]
    result = tokenmill.prepare(path, tmp_path / "out", tokenizer="byte", workers=1)
    assert (result.manifest.documents_read, result.manifest.dropped["invalid_json"]) == (10, 4)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('[{"text": "a"}, {"text": "b"', "does not end"),
        ('[{"text": "a"}, {"text": "b', "does not end"),
        ('[{"text": "a"}, {"text": "b"}', "does not end"),
        ('[{"text": "a"}, {"text": "bcdefghijkl"}}, {"text": "c"}]', "more brackets closed than opened"),
        ('[{"text": "a"}] [{"text": "b"}]', "its array ends at byte 14, and more follows"),
        ('{"x": [{"text": "a"}], "y": [{"text": "b"}]}', "several arrays of objects: one before byte 20, and y"),
        ('{"x": [{"text": "a"}], "y": oops}', "is not valid JSON"),
        ('{"x": [{"text": "a"}]', "is not valid JSON"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, data: str, said: str) -> None:
    path = write(tmp_path / "a.json", data)
    for chunk, limit in ((1, 12), (1, LIMIT), (1000, 12), (1000, LIMIT)):
        with pytest.raises(SourceError, match=rf"a\.json.*{said}"):
            read(path, chunk=chunk, limit=limit)


def test_a_damaged_file_fails_its_unit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '[{"text": "a"}, {"text": "b"')
    with pytest.raises(BuildError, match="does not end"):
        tokenmill.prepare(path, tmp_path / "out", tokenizer="byte", workers=1)


def test_an_element_that_is_too_large_is_skipped_without_being_kept(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"x": [[{"deep": '"]}\\'}] * 3000], "text": "b" * 100_000}, {"text": "c"}]
    path = write(tmp_path / "a.json", json.dumps(rows))
    found = read(path, limit=1000, chunk=4096)
    assert [(text, reason) for _, text, reason in found] == [("a", ""), ("", "too_large"), ("c", "")]
    assert read(path, limit=1000) == found


def test_arrays_without_text_are_refused_by_their_columns(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no known shape of text among its columns: a, b"):
        list_sources(make_recipe({"sources": write(tmp_path / "a.json", '[{"a": 1}, {"b": 2}]')}))


@pytest.mark.parametrize(("ending", "pack"), [("bz2", bz2.compress), ("xz", lzma.compress)])
def test_an_array_may_be_compressed(tmp_path: Path, ending: str, pack: Any) -> None:
    path = write(tmp_path / f"a.json.{ending}", pack(json.dumps(ROWS).encode()))
    result = tokenmill.prepare(path, tmp_path / "out", tokenizer="byte", workers=1)
    split = tokenmill.open(result.output)["train"]
    assert [split.text(n) for n in range(len(split))] == [row["text"] for row in ROWS]
