"""What is told of sources before the work, so that nothing is left out or guessed without a word."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest

from conftest import Command, make_texts, write_jsonl, write_parquet
from tokenmill.errors import RecipeError, SourceError
from tokenmill.recipe import make_recipe
from tokenmill.sources import files as streams
from tokenmill.sources.discover import Listing, list_sources


def listed(*sources: Path, **fields: Any) -> Listing:
    return list_sources(make_recipe({"sources": [str(source) for source in sources], **fields}))


def fill(folder: Path, **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def test_files_of_a_folder_that_are_passed_over_are_counted(tmp_path: Path) -> None:
    fill(tmp_path, a__txt=b"a\n", b__png=b"x", c__png=b"x", d__json=b"{}", Makefile=b"x", dataset_info__json=b"{}")
    found = listed(tmp_path)
    assert [source.name for source in found.sources] == ["a.txt"]
    assert (
        found.notes == ("4 files of other kinds in the folders passed over: 2 .png, 1 .json, 1 without any",)
        or "2 .png" in found.notes[0]
    )
    assert listed(tmp_path, documents="files").notes == ()


def test_files_of_an_unknown_kind_that_are_named_are_read_as_lines_and_it_is_said(tmp_path: Path) -> None:
    fill(tmp_path, a__foo=b"a\n", README=b"b\n")
    (note,) = listed(tmp_path / "a.foo", tmp_path / "README").notes
    assert note.startswith("2 files of unknown kind read as text, a document a line: ")
    assert listed(tmp_path / "a.foo", documents="files").notes == ()


def test_files_that_are_one_document_each_are_counted_and_it_is_said_how_to_have_lines(tmp_path: Path) -> None:
    fill(tmp_path, a__md=b"# a\n\nb\n", b__py=b"x = 1\n", c__md=b"c")
    found = listed(tmp_path / "*.md", tmp_path / "b.py")
    assert {source.kind for source in found.sources} == {"document"}
    assert found.notes == ("each of 3 files is one document: 2 .md, 1 .py; `documents='lines'` makes it one a line",)
    assert listed(tmp_path / "*.md", documents="lines").notes == (
        "2 files of unknown kind read as text, a document a line: 2 .md",
    )


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz"])
def test_tables_as_text_are_texts_if_that_is_wanted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"text\n") if name.endswith("gz") else b"text\n")
    assert [source.kind for source in listed(tmp_path / name).sources] == ["csv"]
    assert [source.kind for source in listed(tmp_path / name, documents="files").sources] == ["text"]


def test_a_folder_gives_tables_as_text_only_if_it_has_nothing_better(tmp_path: Path) -> None:
    fill(tmp_path, a__csv=b"text\na\n", b__json=b'[{"text": "b"}]')
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(b"c\n"))
    assert [source.name for source in listed(tmp_path).sources] == ["a.csv", "b.json", "c.txt.xz"]
    fill(tmp_path, d__txt=b"d\n")
    found = listed(tmp_path)
    assert [source.name for source in found.sources] == ["d.txt"]
    assert found.notes[0].startswith("3 files of other kinds in the folders passed over: ")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("openwebtext", "Skylion007/openwebtext"),
        ("wikitext:small", "Salesforce/wikitext:small"),
        ("my-set", "ORGANIZATION/my-set"),
    ],
)
def test_a_dataset_of_the_hub_without_its_organization_is_explained(name: str, known: str) -> None:
    with pytest.raises(RecipeError, match=f"no source matches '{name}'") as caught:
        list_sources(make_recipe({"sources": name}))
    assert caught.value.hint.endswith(f"datasets of the hub are named with their organization: {known}")


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl.zstd"])
def test_other_names_of_json_lines_are_json_lines(tmp_path: Path, name: str) -> None:
    line = b'{"text": "first"}\n'
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("gz") else line)
    if name.endswith("zstd"):
        import zstandard

        (tmp_path / name).write_bytes(zstandard.compress(line))
    (source,) = listed(tmp_path / name).sources
    assert (source.kind, source.text) == ("jsonl", {"column": "text"})


@pytest.mark.parametrize("content", [b"[1, 2]", b'{\n  "text": "a"\n}\n'])
def test_json_that_is_not_lines_is_refused_with_the_way_to_lines(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(RecipeError, match="is not JSON lines") as caught:
        listed(tmp_path / "a.json")
    assert "jq -c" in caught.value.hint


def test_compressed_json_in_a_folder_is_taken_and_a_plain_one_is_not(tmp_path: Path) -> None:
    line = b'{"text": "first"}\n'
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(line))
    (tmp_path / "b.json").write_bytes(line)
    found = listed(tmp_path)
    assert [source.name for source in found.sources] == ["a.json.gz"]
    assert "1 .json" in found.notes[0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"instruction": "a", "output": "b"}, "instruction and input (if it is there) and output, with"),
        ({"messages": [{"role": "user", "content": "a"}]}, "what is said in messages"),
        ({"text": "a"}, None),
    ],
)
def test_how_the_text_was_found_is_said_unless_it_is_plain(
    tmp_path: Path, row: dict[str, Any], said: str | None
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    told = listed(tmp_path / "a.jsonl").notes
    assert [said in note for note in told if said] == ([True] if said else [])
    assert bool(told) == bool(said)


def test_a_saved_dataset_of_several_splits_is_taken_whole_and_it_is_said(tmp_path: Path) -> None:
    import datasets

    part = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict({"train": part, "validation": part}).save_to_disk(tmp_path / "d")
    (note,) = listed(tmp_path / "d").notes
    assert "several splits" in note
    assert listed(tmp_path / "d/train").notes == ()


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b""])
def test_a_table_that_cannot_be_read_fails_its_own_unit_and_lets_the_others_finish(
    tokenmill: Command, tmp_path: Path, damage: Any
) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(300))
    for name in ("b.parquet", "c.parquet"):
        (tmp_path / name).write_bytes(damage((tmp_path / "a.parquet").read_bytes()))
    write_jsonl(tmp_path / "z.jsonl", make_texts(100))
    build = ("prepare", "a.parquet", "b.parquet", "c.parquet", "z.jsonl", "-o", "out", "--unit-bytes", "5KB")
    failed = tokenmill(*build, "--tokenizer", "byte", code=1)
    assert "units failed, the others are done" in failed.stderr
    assert failed.stderr.count("b.parquet") >= 1
    assert failed.stderr.count("c.parquet") >= 1
    assert len(list((tmp_path / "out/.build/receipts").iterdir())) > 3


@pytest.mark.parametrize("name", ["z.parquet", "z.arrow"])
def test_a_table_without_a_byte_fails_the_unit_that_it_is_grouped_in_and_is_named(
    tokenmill: Command, tmp_path: Path, name: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    (tmp_path / name).touch()
    failed = tokenmill("prepare", "a.jsonl", name, "-o", "out", "--tokenizer", "byte", code=1)
    assert f"cannot read {tmp_path / name}" in failed.stderr
    assert "unexpected" not in failed.stderr


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_json_lines_that_cannot_be_read_fail_their_own_unit_and_are_named_before(
    tokenmill: Command, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without the right to read them, which nothing is to those who run tests as root."""
    write_jsonl(tmp_path / "a.jsonl", make_texts(10))
    write_parquet(tmp_path / "b.parquet", make_texts(10))
    (tmp_path / f"c.jsonl{ending}").write_bytes(b"closed")
    open_file = streams.open_file

    def open_allowed(path: str, *arguments: Any, **options: Any) -> Any:
        if "c.jsonl" in path:
            raise PermissionError(13, "Permission denied")
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(streams, "open_file", open_allowed)
    real_open = os.open

    def opened(path: str, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("c.jsonl"):
            raise PermissionError(13, "Permission denied")
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", opened)
    trouble = f"cannot read {tmp_path}/c.jsonl{ending}: [Errno 13] Permission denied"
    assert trouble in listed(tmp_path).notes
    sources = ("a.jsonl", "b.parquet", f"c.jsonl{ending}")
    failed = tokenmill("prepare", *sources, "-o", "out", "--tokenizer", "byte", "--unit-bytes", "1KB", code=1)
    assert trouble in failed.stderr
    assert "1 of" in failed.stderr
    assert list((tmp_path / "out/.build/receipts").iterdir())


def test_tables_none_of_which_can_be_read_are_an_error_before_any_work(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet"):
        (tmp_path / name).write_bytes(b"no parquet")
    with pytest.raises(SourceError, match=r"a\.parquet"):
        listed(tmp_path)


def test_parts_of_conversations_that_are_not_text_are_counted(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    image = {
        "role": "user",
        "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}],
    }
    plain = {"role": "user", "content": "hi"}
    rows = [{"messages": [plain, call]}, {"messages": [image, call]}, {"messages": [plain]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = listed(tmp_path / "a.jsonl").notes
    assert said[-1] == (
        "parts that are not text are left out; of the first 3 in a.jsonl: tool_calls in 2, image_url in 1"
    )
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[-1]))
    assert not any("left out; of" in note for note in listed(tmp_path / "a.jsonl").notes)
