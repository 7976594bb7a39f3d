"""Patterns of URLs name the keys that the same patterns would name of files."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from tokenmill.errors import RecipeError
from tokenmill.storage.globs import folder_of, is_pattern, matcher, matches

KEYS = (
    "a.txt", "ab.txt", "b.jsonl", ".hidden.txt", "data/a.txt", "data/b.txt", "data/.hidden/c.txt", "data/en/a.txt",
    "data/en/deep/er/a.txt", "data/en/deep/[1].txt", "other/data/a.txt", "{a,b}.txt", "data.txt", "data/x^.txt",
)  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        "*.txt", "?.txt", "*", "[ab].*", "[!a].*", "[^a].txt", "data/*", "data/*.txt", "data/**", "data/**/*.txt", "**",
        "**/*.txt", "**/a.txt", "**/data/*.txt", "*/*/a.txt", "data/**/deep/**/a.txt", ".*", "data/.hidden/*",
        "data/.*/*.txt", "**/[[]1].txt", "{a,b}.*", "[z-a].txt", "[.txt", "**/**/a.txt", "data/*/", "*/data",
    ],
)  # fmt: skip
def test_a_pattern_names_what_it_would_name_of_files(tmp_path: Path, pattern: str) -> None:
    for key in KEYS:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).touch()
    found = glob.glob(pattern, root_dir=tmp_path, recursive=True)
    files = {os.path.normpath(key) for key in found if (tmp_path / key).is_file()}
    assert {key for key in KEYS if matcher(pattern)(key)} == files


@pytest.mark.parametrize("pattern", ["data**/a.txt", "**.txt", "data/a**"])
def test_two_stars_stand_for_folders_and_nothing_else(pattern: str) -> None:
    for match in (matcher, matches):
        with pytest.raises(RecipeError, match=r"\*\* must be a whole part"):
            match(pattern)


def test_a_pattern_of_many_ways_is_gone_through_once() -> None:
    names = matcher("**/" * 100 + "x")
    assert not names("/".join("a" * 200))
    assert names("/".join("a" * 200 + "x"))


def test_what_is_spelled_out_tells_where_to_look() -> None:
    assert folder_of("a/b/c-*/d.txt") == "a/b"
    assert folder_of("*.txt") == ""
    assert is_pattern("a/b-?.txt")
    assert not is_pattern("a/{b}.txt")
