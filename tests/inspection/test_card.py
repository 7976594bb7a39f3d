"""The dataset card: valid metadata for the hub, the same bytes again, and never over a file of the user."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import tokenmill
from conftest import write_jsonl
from tokenmill.dataset.manifest import CARD, Manifest
from tokenmill.errors import RecipeError
from tokenmill.inspection.card import card, is_unchanged, size_category, write_card
from tokenmill.storage.local import Folder


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("card")
    write_jsonl(folder / "a.jsonl", ["one", "two three", ""])
    return tokenmill.prepare(folder / "a.jsonl", folder / "out", tokenizer="byte", workers=1).manifest


@pytest.mark.parametrize("name", ["owt", 'a "quoted": name', "<script>`x`\n---\n", "‮ evil 🙂", "a\\b"])
def test_the_metadata_is_yaml_whatever_the_name(manifest: Manifest, name: str) -> None:
    text = card(manifest, name=name, license="cc-by-4.0")
    _, head, body = text.split("---\n", 2)
    found = yaml.safe_load(head)
    assert found["license"] == "cc-by-4.0"
    assert found["task_categories"] == ["text-generation"]
    assert found["size_categories"] == ["n<1K"]
    assert "tokenmill" in found["tags"]
    assert found["configs"] == [{"config_name": "provenance", "data_files": "provenance/*.parquet"}]
    assert "<script>" not in body
    assert "2 documents" in body
    assert "1 empty, of 3 documents read" in body


def test_a_card_has_the_same_bytes_again(manifest: Manifest) -> None:
    assert card(manifest, name="owt") == card(manifest, name="owt")
    assert is_unchanged(card(manifest, name="owt").encode())


def test_a_card_that_somebody_changed_is_kept(manifest: Manifest, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert write_card(folder, manifest, name="owt", license="mit")
    assert write_card(folder, replace(manifest, fingerprint="0" * 64), name="owt")  # ours: written again
    text = (tmp_path / CARD).read_text()
    assert "0" * 64 in text
    assert 'license: "mit"' in text, "the license is the one that was given before"
    (tmp_path / CARD).write_text(text.replace("## Load it", "## Load it like this"))
    before = (tmp_path / CARD).read_bytes()
    assert write_card(folder, manifest, name="owt") is None
    assert (tmp_path / CARD).read_bytes() == before


@pytest.mark.parametrize("text", ["", "# Mine\n", "x" * (2 << 20)])
def test_a_readme_of_the_user_is_kept(manifest: Manifest, tmp_path: Path, text: str) -> None:
    (tmp_path / CARD).write_text(text)
    assert write_card(Folder(str(tmp_path)), manifest, name="owt") is None
    assert (tmp_path / CARD).read_text() == text


@pytest.mark.parametrize("license", ["", "a b", "x\ny", '"'])
def test_a_license_is_an_identifier(manifest: Manifest, license: str) -> None:
    with pytest.raises(RecipeError, match="license"):
        card(manifest, name="owt", license=license)


@pytest.mark.parametrize(
    ("documents", "category"),
    [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (10**6, "1M<n<10M"), (10**9 - 1, "100M<n<1B"), (10**13, "n>1T")],
)
def test_sizes_have_the_hubs_names(documents: int, category: str) -> None:
    assert size_category(documents) == category
