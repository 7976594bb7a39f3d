from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokenmill.errors import RecipeError, SourceError
from tokenmill.recipe import make_recipe
from tokenmill.sources.discover import Listing, list_sources


def listed(*sources: Path | str, **fields: Any) -> Listing:
    return list_sources(make_recipe({"sources": tuple(str(source) for source in sources), **fields}))


def names(listing: Listing) -> list[str]:
    return [source.name for source in listing.sources]


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b'{"text": "x"}\n')


def test_a_file_is_a_source_named_after_itself(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt")
    listing = listed(tmp_path / "a.txt")
    assert names(listing) == ["a.txt"]
    assert listing.path(0) == str(tmp_path / "a.txt")
    assert listing.sources[0].bytes == 14
    assert listing.sources[0].modified == (tmp_path / "a.txt").stat().st_mtime_ns


def test_a_folder_gives_the_files_of_known_kinds_in_order_of_their_names(tmp_path: Path) -> None:
    fill(tmp_path, "b.txt", "a.jsonl", "c/d.md", "c/a.ndjson", "c.text", "Z.txt", "notes.pdf", "LICENSE", "x.bin")
    assert names(listed(tmp_path)) == ["Z.txt", "a.jsonl", "b.txt", "c.text", "c/a.ndjson"]


def test_names_are_sorted_by_their_bytes_and_not_by_a_locale(tmp_path: Path) -> None:
    fill(tmp_path, "ä.txt", "z.txt", "A.txt", "a.txt", "10.txt", "9.txt")
    assert names(listed(tmp_path)) == ["10.txt", "9.txt", "A.txt", "a.txt", "z.txt", "ä.txt"]


def test_the_order_in_which_sources_are_named_does_not_matter(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt", "b/c.txt", "b/d.txt")
    one = listed(tmp_path / "a.txt", tmp_path / "b")
    other = listed(tmp_path / "b/d.txt", tmp_path / "b/c.txt", tmp_path / "a.txt")
    assert one == other


def test_the_same_corpus_in_another_place_has_the_same_names(tmp_path: Path) -> None:
    for place in ("here", "there/deeper"):
        fill(tmp_path / place, "a.txt", "b/c.txt")
    assert names(listed(tmp_path / "here")) == names(listed(tmp_path / "there/deeper")) == ["a.txt", "b/c.txt"]


def test_a_file_that_is_named_twice_is_one_source(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt", "b.txt")
    assert names(listed(tmp_path, tmp_path / "a.txt", tmp_path / "*.txt")) == ["a.txt", "b.txt"]


def test_a_glob_gives_the_files_that_it_matches(tmp_path: Path) -> None:
    fill(tmp_path, "a1.txt", "a2.txt", "b1.txt", "d/a3.txt")
    assert names(listed(tmp_path / "a*.txt")) == ["a1.txt", "a2.txt"]
    assert names(listed(tmp_path / "**/a*.txt")) == ["a1.txt", "a2.txt", "d/a3.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    fill(tmp_path, "a[1].txt", "a1.txt")
    assert names(listed(tmp_path / "a[1].txt")) == ["a[1].txt"]


def test_hidden_files_caches_and_unfinished_files_of_a_folder_are_no_sources(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt", ".b.txt", ".git/c.txt", "__pycache__/d.txt", "cache-1234.arrow", "sub/.e.jsonl")
    assert names(listed(tmp_path)) == ["a.txt"]


def test_only_what_hugging_face_writes_is_a_cache_by_its_name(tmp_path: Path) -> None:
    fill(tmp_path, "cache-coherence.txt", "cache-2024.jsonl", "cache-1234_00000_of_00002.arrow", "cache-notes.pdf")
    listing = listed(tmp_path)
    assert names(listing) == ["cache-2024.jsonl", "cache-coherence.txt"]
    assert listing.notes == ("1 file of other kinds in the folders passed over: 1 .pdf",)


def test_a_glob_does_not_match_hidden_files(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt", ".b.txt", ".c/d.txt")
    assert names(listed(tmp_path / "**/*.txt")) == ["a.txt"]


def test_a_file_of_an_unknown_ending_is_text_if_it_is_named(tmp_path: Path) -> None:
    fill(tmp_path, "README", "a.xyz")
    assert [source.kind for source in listed(tmp_path / "README").sources] == ["text"]
    assert [source.kind for source in listed(tmp_path / "*.xyz").sources] == ["text"]


def test_a_folder_of_files_that_are_documents_may_hold_any_endings(tmp_path: Path) -> None:
    fill(tmp_path, "a.py", "b.rs", "Makefile", ".hidden")
    assert names(listed(tmp_path, documents="files")) == ["Makefile", "a.py", "b.rs"]


def test_a_folder_without_files_of_a_known_kind_is_an_error_that_says_which_are(tmp_path: Path) -> None:
    fill(tmp_path, "a.xyz")
    with pytest.raises(RecipeError, match=r"has no files of a known kind \(\.parquet, \.jsonl") as caught:
        listed(tmp_path)
    assert "glob" in caught.value.hint


def test_a_dataset_among_the_files_of_a_folder_is_no_source(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt", "data/dataset.json", "data/provenance/00000.parquet", "data/train/00000.bin", "more/b.txt")
    assert names(listed(tmp_path)) == ["a.txt", "more/b.txt"]


@pytest.mark.parametrize("argument", ["org/name.jsonl", "org/name.parquet", "org/name.zst", "here/name"])
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=f"no source matches '{argument}'") as caught:
        listed(argument)
    assert f"hf://datasets/{argument}" in caught.value.hint


def test_nothing_that_matches_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no source matches '.*/\*\.txt'"):
        listed(tmp_path / "*.txt")
    with pytest.raises(RecipeError, match=r"no source matches '.*/a\.txt'"):
        listed(tmp_path / "a.txt")


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:SECRET@bucket/a.parquet",
        "https://KEY:SECRET@host/a.parquet",
        "https://host/a.parquet?token=SECRET",
        "https://host/a.parquet?X-Amz-Credential=KEY&sig=SECRET@x",
        "https://host/a.parquet#SECRET",
        "HTTPS://user:SEC@RET@host/a.parquet",
    ],
)
def test_a_url_is_refused_and_no_secret_of_it_is_told(tmp_path: Path, url: str) -> None:
    with pytest.raises(RecipeError) as caught:
        listed(url)
    told = caught.value.message + caught.value.hint
    assert "://" in told
    assert "SEC" not in told
    assert "KEY" not in told


def test_validation_sources_are_marked_and_sorted_among_the_others(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt", "m/val.txt", "z.txt")
    listing = listed(tmp_path / "a.txt", tmp_path / "z.txt", val_sources=(str(tmp_path / "m"),))
    assert [(source.name, source.split) for source in listing.sources] == [
        ("a.txt", ""),
        ("m/val.txt", "val"),
        ("z.txt", ""),
    ]


def test_a_source_cannot_be_a_validation_source_too(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt", "b.txt")
    with pytest.raises(RecipeError, match=r"a\.txt is a source and a validation source"):
        listed(tmp_path, val_sources=(str(tmp_path / "a.txt"),))


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_validation_source_by_another_name_of_a_source_is_refused(
    tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    fill(tmp_path, "in/a.txt", "in/b.txt", "held/c.txt")
    link(tmp_path / "in/b.txt", tmp_path / "held/val.txt")
    with pytest.raises(RecipeError, match=r"val\.txt and .*b\.txt are the same file, one of them for validation"):
        listed(tmp_path / "in", val_sources=(str(tmp_path / "held"),))
    assert len(listed(tmp_path / "in", tmp_path / "held").sources) == 4
    assert len(listed(tmp_path / "in", val_sources=(str(tmp_path / "held/c.txt"),)).sources) == 3


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".txt", ".jsonl"])
def test_a_pointer_in_the_place_of_a_large_file_is_refused(tmp_path: Path, ending: str) -> None:
    fill(tmp_path, "a.txt")
    (tmp_path / f"b{ending}").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(RecipeError, match="is a Git LFS pointer") as error:
        listed(tmp_path)
    assert "git lfs pull" in error.value.hint


def test_each_table_gets_the_rule_of_its_own_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"question": ["x"], "answer": ["y"]}), tmp_path / "b.parquet")
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    assert [source.text for source in listed(tmp_path).sources] == [
        {"column": "text"},
        {"join": ["question", "answer"]},
        {"turns": "messages"},
    ]


def test_a_table_of_an_unknown_shape_is_an_error_that_names_it_and_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"title": ["x"], "body": ["y"]}), tmp_path / "a.parquet")
    with pytest.raises(RecipeError, match=r"a\.parquet: .*: body, title"):
        listed(tmp_path)


def test_a_file_of_json_lines_without_an_object_is_a_source_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (source,) = listed(tmp_path, text_column="body").sources
    assert source.text == {"column": "body"}


@pytest.mark.parametrize("filling", [0, 100, 200_000])
def test_objects_without_text_at_the_beginning_of_json_lines_do_not_hide_it(tmp_path: Path, filling: int) -> None:
    lines = [{"version": 1}] + [{"note": "x" * 100}] * (filling // 100) + [{"body": "B", "text": "T"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for fields, rule in (
        ({}, {"column": "text"}),
        ({"text_column": "body"}, {"column": "body"}),
        ({"template": "{body}{text}"}, {"template": "{body}{text}"}),
    ):
        (source,) = listed(tmp_path, **fields).sources
        assert source.text == rule


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, r"a\.jsonl: no known shape of text among its columns: a, b, c"),
        ({"text_column": "d"}, r"a\.jsonl has no column 'd'; its columns: a, b, c"),
        ({"template": "{a}{d}"}, r"a\.jsonl has no column 'd'; its columns: a, b, c"),
        ({"template": "{a}{c}"}, r"a\.jsonl has no object with all of a, c; its columns: a, b, c"),
    ],
)
def test_json_lines_none_of_which_shows_its_text_are_an_error_that_lists_the_fields_of_all(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"b": 1, "a": 2}\n{"c": 3}\n')
    with pytest.raises(RecipeError, match=said):
        listed(tmp_path, **fields)


def test_an_error_does_not_list_fields_without_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"field {number}": 1}}\n' for number in range(100_000)))
    with pytest.raises(RecipeError, match="field 0, ") as caught:
        listed(tmp_path)
    assert len(caught.value.message) < 2000


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_without_any_column_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    if name == "a.parquet":
        pq.write_table(pa.table({}), tmp_path / name)
    else:
        with pa.OSFile(str(tmp_path / name), "wb") as sink, pa.ipc.new_stream(sink, pa.schema([])):
            pass
    with pytest.raises((RecipeError, SourceError), match=name):
        listed(tmp_path / name)


def test_a_path_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(SourceError, match=r"cannot read .*a\.parquet"):
        listed(tmp_path)


def test_a_link_that_points_nowhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises((SourceError, RecipeError), match=r"b\.txt"):
        listed(tmp_path)


def test_a_name_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "wb") as file:
        file.write(b"x")
    with pytest.raises(SourceError, match="not UTF-8"):
        listed(tmp_path)


def test_a_folder_above_the_sources_whose_name_is_not_utf8_is_an_error_and_a_link_leads_around_it(
    tmp_path: Path,
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    fill(folder, "a.txt", "b/c.txt")
    for sources in ([folder], [folder / "a.txt"], [folder / "a.txt", folder / "b"]):
        with pytest.raises(SourceError, match=r"the name of .*udcff' is not UTF-8") as caught:
            listed(*sources)
        assert "link" in caught.value.hint
    (tmp_path / "link").symlink_to(folder)
    assert names(listed(tmp_path / "link")) == ["a.txt", "b/c.txt"]


def test_text_and_json_lines_may_be_cut_anywhere_and_what_is_compressed_may_not(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt", "b.jsonl")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"x\n"))
    assert [extent.divisible for extent in listed(tmp_path).extents] == [True, True, False]
    assert [extent.divisible for extent in listed(tmp_path, documents="files").extents] == [False, True, False]


def test_sources_that_all_lie_in_the_output_are_none(tmp_path: Path) -> None:
    fill(tmp_path, "out/a.txt")
    with pytest.raises(RecipeError, match="no sources but what lies in the output"):
        list_sources(make_recipe({"sources": (str(tmp_path / "out/a.txt"),)}), output=str(tmp_path / "out"))
