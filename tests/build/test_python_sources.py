from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import make_texts, tree, write_jsonl
from tokenmill.build import python_sources
from tokenmill.errors import BuildError, OutputError, RecipeError, SourceChangedError
from tokenmill.storage.local import Folder

TEXTS = [*make_texts(300), "umlaut ä, \n newline"]


def prepare(sources: Any, output: Path, **options: Any) -> tokenmill.PrepareResult:
    return tokenmill.prepare(sources, output, **{"tokenizer": "byte", "workers": 1, **options})


def texts_of(output: Path) -> list[str]:
    split = tokenmill.open(output)["train"]
    return [split.text(number) for number in range(len(split))]


def generate() -> Iterator[str]:
    yield from TEXTS


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_sources, "PART_BYTES", 20_000)


@pytest.mark.parametrize("sources", [generate, lambda: TEXTS, lambda: ({"id": 1, "text": text} for text in TEXTS)])
def test_a_function_gives_the_dataset_that_a_file_of_the_same_texts_gives(tmp_path: Path, sources: Any) -> None:
    prepare(sources, tmp_path / "out")
    prepare(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "file")
    assert texts_of(tmp_path / "out") == TEXTS == texts_of(tmp_path / "file")
    assert (tmp_path / "out/train/00000.bin").read_bytes() == (tmp_path / "file/train/00000.bin").read_bytes()
    assert len(list((tmp_path / "out/.build/sources").iterdir())) > 3
    tokenmill.verify(tmp_path / "out", source="all")
    before = tree(tmp_path / "out")
    assert prepare(sources, tmp_path / "out").already_complete
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("at", [0, 1, 150, 300])
def test_a_build_that_was_stopped_while_texts_came_has_the_same_bytes_when_it_is_resumed(
    tmp_path: Path, at: int
) -> None:
    def breaks() -> Iterator[str]:
        yield from TEXTS[:at]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(breaks, tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/.build/sources").iterdir()}
    prepare(generate, tmp_path / "out")
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    prepare(generate, tmp_path / "whole")
    whole, resumed = tree(tmp_path / "whole"), tree(tmp_path / "out")
    assert {name: whole[name] for name in whole if ".build" not in name} == {
        name: resumed[name] for name in resumed if ".build" not in name
    }


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["another", *TEXTS[1:]], "one of the texts 0 to"),
        (TEXTS[:10], "one of the texts 0 to 9"),
        ([*TEXTS[:200], "another", *TEXTS[201:]], r"one of the texts \d+ to"),
        ([*TEXTS, "one more"], "one of the texts"),
    ],
)
def test_other_texts_are_refused_whether_the_build_is_finished_or_not(
    tmp_path: Path, others: list[str], said: str
) -> None:
    prepare(generate, tmp_path / "out")
    before = tree(tmp_path / "out")
    for _ in range(2):
        with pytest.raises(SourceChangedError, match=said) as caught:
            prepare(lambda: others, tmp_path / "out")
        assert "restart=True" in caught.value.hint
        assert tree(tmp_path / "out") == before
        (tmp_path / "out/dataset.json").unlink(missing_ok=True)
        before = tree(tmp_path / "out")
    prepare(lambda: others, tmp_path / "out", restart=True)
    assert texts_of(tmp_path / "out") == others


def test_fewer_texts_that_end_where_a_file_ends_are_refused(tmp_path: Path) -> None:
    prepare(generate, tmp_path / "out")
    first = (tmp_path / "out/.build/sources/00000.jsonl").read_text().splitlines()
    with pytest.raises(SourceChangedError, match=f"there are only {len(first)}"):
        prepare(lambda: TEXTS[: len(first)], tmp_path / "out")


def has_even_id(text: str, id: int) -> bool:
    return id % 2 == 0


def test_a_dataset_of_the_package_datasets_gives_its_text_column(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "body": TEXTS})
    prepare(table, tmp_path / "out", text_column="body")
    assert texts_of(tmp_path / "out") == TEXTS
    assert json.loads((tmp_path / "out/.build/sources/00000.jsonl").read_text().splitlines()[0]) == {"body": TEXTS[0]}
    with pytest.raises(RecipeError, match="no known shape of text among its columns: body, id"):
        prepare(table, tmp_path / "other")
    with pytest.raises(RecipeError, match="several splits: train, test"):
        prepare(datasets.DatasetDict(train=table, test=table), tmp_path / "other")
    prepare(table.to_iterable_dataset(), tmp_path / "streamed", text_column="body")
    assert texts_of(tmp_path / "streamed") == TEXTS
    prepare(table, tmp_path / "filtered", text_column="body", filter=has_even_id)
    assert texts_of(tmp_path / "filtered") == TEXTS[::2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: "one text", "the function gave 'one text'"),
        (lambda: 3, "the function gave 3"),
        (lambda: [b"x"], "text 0 is b'x'"),
        (lambda: ["a", None], "text 1 is None"),
        (lambda: [{"text": "a", "x": object()}], "row 0: Encoding objects of type object is unsupported"),
        (lambda: [], "the function gave no texts"),
    ],
)
def test_what_is_not_texts_is_refused_by_its_number(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        prepare(given, tmp_path / "out")


def test_a_text_that_utf8_cannot_encode_is_quarantined(tmp_path: Path) -> None:
    result = prepare(lambda: ["good", "half \ud83d pair", "good"], tmp_path / "out")
    assert (result.documents, result.manifest.dropped) == (2, {"lone_surrogate": 1})


def test_a_folder_with_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="contains other files"):
        prepare(generate, tmp_path / "out")
    assert tree(tmp_path / "out") == {"mine.txt": tree(tmp_path / "out")["mine.txt"]}


def test_a_list_of_texts_in_place_of_names_is_told_how_to_give_them(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        prepare(["A text of quite a few words, which is surely not the name of a file."], tmp_path / "out")
    assert "a function that returns them" in caught.value.hint


def test_texts_in_the_workspace_are_sources_only_of_their_own_build(tmp_path: Path) -> None:
    prepare(generate, tmp_path / "corpus/out")
    write_jsonl(tmp_path / "corpus/a.jsonl", ["a"])
    prepare(tmp_path / "corpus", tmp_path / "second")
    assert texts_of(tmp_path / "second") == ["a"]
    with pytest.raises((BuildError, OutputError)):
        prepare(tmp_path / "corpus/a.jsonl", tmp_path / "corpus/out")
    prepare(tmp_path / "corpus/a.jsonl", tmp_path / "corpus/out", restart=True)
    assert not Folder(str(tmp_path / "corpus/out")).exists(".build/sources")
