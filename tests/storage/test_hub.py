"""Which files a config has: what Hugging Face's `datasets` would load."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.errors import RecipeError
from tokenmill.storage.hub import files_of, find_config

KEYS = [
    "README.md", "data/README.md", "data/dataset_info.json", "data/train-0.jsonl", "data/train-1.jsonl",
    "data/test-0.jsonl", "data/en/a.jsonl", "data/en/deep/b.jsonl", "data/__cache__/c.jsonl", "data/.hidden/d.jsonl",
    "en/e.jsonl",
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"data_files": "data/train-*.jsonl"}, ["data/train-0.jsonl", "data/train-1.jsonl"]),
        ({"data_files": "data/*.jsonl"}, ["data/train-0.jsonl", "data/train-1.jsonl", "data/test-0.jsonl"]),
        ({"data_files": "data/**/[ab].jsonl"}, ["data/en/a.jsonl", "data/en/deep/b.jsonl"]),
        ({"data_files": "**/e.jsonl"}, ["en/e.jsonl"]),
        ({"data_files": "./en/e.jsonl"}, ["en/e.jsonl"]),
        ({"data_files": ["en/*", "data/test-0.jsonl"]}, ["data/test-0.jsonl", "en/e.jsonl"]),
        (
            {
                "data_files": [
                    {"split": "train", "path": "en/*"},
                    {"split": "test", "path": ["data/test-*", "data/en/*"]},
                ]
            },
            ["data/test-0.jsonl", "data/en/a.jsonl", "en/e.jsonl"],
        ),
        ({"data_dir": "data/en"}, ["data/en/a.jsonl", "data/en/deep/b.jsonl"]),
        ({"data_dir": "./data/en/", "data_files": "*.jsonl"}, ["data/en/a.jsonl"]),
        ({"data_dir": "data", "data_files": [{"split": "train", "path": "en/*"}]}, ["data/en/a.jsonl"]),
        ({"data_files": "data/__cache__/*"}, ["data/__cache__/c.jsonl"]),
        ({"data_files": "data/.hidden/*"}, ["data/.hidden/d.jsonl"]),
        ({"data_files": "data/README.md"}, ["data/README.md"]),
    ],
)
def test_the_files_of_a_config(config: dict[str, Any], expected: list[str]) -> None:
    assert files_of(config, KEYS, where="org/name:en") == expected


def test_a_folder_gives_neither_what_is_hidden_nor_what_is_about_the_dataset() -> None:
    assert files_of({"data_dir": "data"}, KEYS, where="") == KEYS[3:8]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"data_files": ["en/*", "en/gone.jsonl"]}, "names en/gone.jsonl, which does not exist"),
        ({"data_files": "nowhere/*"}, "matches no files"),
        ({"data_files": "s3://bucket/a.jsonl"}, "names files elsewhere"),
        ({"data_files": 3}, "neither patterns nor a list"),
        ({"data_files": [{"split": "train"}]}, "neither patterns nor a list"),
        ({"data_files": "data**"}, "must be a whole part"),
    ],
)
def test_a_card_that_cannot_be_followed_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        files_of(config, KEYS, where="org/name:en")


def test_a_config_is_found_by_its_name() -> None:
    card = {"configs": [{"config_name": "en", "data_dir": "a"}, "odd", {"config_name": "de"}]}
    assert find_config(card, "en") == {"config_name": "en", "data_dir": "a"}
    assert find_config(card, "fr") is None
    assert find_config({"configs": "odd"}, "en") is None
