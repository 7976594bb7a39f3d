"""Files below a folder and files of a pattern: all of them, or an error."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import RecipeError, SourceError
from tokenmill.recipe import make_recipe
from tokenmill.sources.discover import list_sources
from tokenmill.storage.globs import matches, walk

NAMES = ["a", "b1", "b2", "c.txt"]
PARTS = ["**", "*", "b?", "[ab]*", "*.txt", "c.txt", "a", ".h", "**"]


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def files(folder: Path) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(parent, name), folder) for parent, _, names in walk(str(folder)) for name in names
    )


@given(
    st.sets(st.lists(st.sampled_from([*NAMES, ".h"]), min_size=1, max_size=4).map("/".join), max_size=12),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=4),
)
def test_a_pattern_matches_what_python_says_it_does(
    tmp_path_factory: pytest.TempPathFactory, paths: set[str], parts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    for path in sorted(paths):
        if not any((folder / parent).is_file() for parent in Path(path).parents) and not (folder / path).exists():
            fill(folder, path)
    pattern = os.path.join(folder, *parts)
    assert matches(pattern) == sorted({found for found in glob.glob(pattern, recursive=True) if os.path.isfile(found)})


def test_folders_behind_links_are_looked_into_and_circles_end(tmp_path: Path) -> None:
    fill(tmp_path / "store", "b.txt", "deep/c.txt")
    fill(tmp_path / "corpus", "a.txt")
    (tmp_path / "corpus/linked").symlink_to(tmp_path / "store")
    (tmp_path / "corpus/up").symlink_to(tmp_path / "corpus")
    (tmp_path / "store/back").symlink_to(tmp_path / "corpus")
    expected = ["a.txt", "linked/b.txt", "linked/deep/c.txt"]
    assert files(tmp_path / "corpus") == expected
    found = matches(str(tmp_path / "corpus/**/*.txt"))
    assert [os.path.relpath(path, tmp_path / "corpus") for path in found] == expected


@pytest.mark.parametrize("name", ["__pycache__", "lost+found"])
def test_folders_that_nobody_puts_texts_into_are_passed_over_unless_they_are_named(tmp_path: Path, name: str) -> None:
    fill(tmp_path, f"{name}/a.txt")
    assert matches(str(tmp_path / "**/*.txt")) == []
    assert matches(str(tmp_path / name / "*.txt")) == [str(tmp_path / name / "a.txt")]


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_a_folder_that_cannot_be_read_is_an_error_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    fill(tmp_path, "a.txt", "sub/b.txt")
    real = os.scandir

    def scandir(folder: Any) -> Any:  # who is root may read any folder
        if os.fspath(folder).endswith("sub"):
            raise error
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(SourceError, match=r"sub: (Permission denied|Input/output error)"):
        files(tmp_path)
    for pattern in ("**/*.txt", "*/*.txt", "sub/*"):
        with pytest.raises(SourceError, match="sub: "):
            matches(str(tmp_path / pattern))
    assert matches(str(tmp_path / "*.txt")) == [str(tmp_path / "a.txt")]


def make_dataset(folder: Path, *, finished: bool) -> Path:
    """What a build leaves: all of it, or as far as it came."""
    fill(
        folder, "provenance/00000.parquet", "train/00000.bin", "train/readme.txt", "tokenizer.json", ".build/plan.json"
    )
    if finished:
        fill(folder, "dataset.json")
        (folder / ".build/plan.json").unlink()  # nothing but a repair needs it
    return folder


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("linked", [True, False])
def test_a_dataset_among_the_sources_is_passed_over_and_named(tmp_path: Path, finished: bool, linked: bool) -> None:
    fill(tmp_path / "corpus", "a.txt", "sub/b.txt")
    there = tmp_path / "corpus/sub/data"
    dataset = make_dataset(tmp_path / "elsewhere" if linked else there, finished=finished)
    if linked:
        there.symlink_to(dataset)
    for source in ("corpus", "corpus/**/*.txt"):
        for documents in ("lines", "files"):
            found = list_sources(make_recipe({"sources": str(tmp_path / source), "documents": documents}))
            assert [file.name for file in found.sources] == ["a.txt", "sub/b.txt"]
            assert f"the dataset {there} among the sources is passed over" in found.notes
    inside = list_sources(make_recipe({"sources": str(there / "**/*.txt")}))
    assert [file.name for file in inside.sources] == ["readme.txt"], "a pattern may name its files"
    with pytest.raises(RecipeError, match="is a dataset, finished or not, and not a folder of texts"):
        list_sources(make_recipe({"sources": str(there)}))


def test_the_output_itself_is_passed_over_without_a_word_by_any_of_its_names(tmp_path: Path) -> None:
    fill(tmp_path / "corpus", "a.txt")
    output = make_dataset(tmp_path / "out", finished=False)
    (tmp_path / "corpus/link").symlink_to(output)
    (tmp_path / "name").symlink_to(output)
    for name in ("out", "name", "corpus/link"):
        found = list_sources(make_recipe({"sources": str(tmp_path / "corpus")}), output=str(tmp_path / name))
        assert [file.name for file in found.sources] == ["a.txt"]
        assert found.notes == ()
