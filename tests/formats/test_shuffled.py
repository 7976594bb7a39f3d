from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import EOT, OPTIONS, make_dataset

import tokenmill
from conftest import make_texts, tree, write_jsonl
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import RecipeError
from tokenmill.formats import shuffled
from tokenmill.formats.base import Hints
from tokenmill.formats.open import read_files
from tokenmill.formats.shuffled import ShuffledDataset
from tokenmill.permutation import make_key, permute

DOCUMENTS = {
    "train": [[*range(100 * number, 100 * number + number % 9)] for number in range(1, 90)],
    "val": [[7] * n for n in range(6)],
}
FORMATS: dict[str, dict[str, Any]] = {
    **{layout: options for layout, options in OPTIONS.items() if layout != "nanogpt"},
    "catid": {"shard_size": 150},
    "huggingface": {"shard_size": 90, "seq_len": 8},
    "litdata": {"shard_size": 70},
    "mds": {"shard_size": 70},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("made"), DOCUMENTS)


def in_order(dataset: Dataset, seed: int) -> dict[str, list[list[int]]]:
    """The documents in the order of a seed."""
    found = {}
    for name, documents in DOCUMENTS.items():
        key = make_key("documents", dataset.manifest.fingerprint, name, seed)
        found[name] = [documents[i] for i in permute(np.arange(len(documents)), len(documents), key)]
    return found


def documents_of(dataset: Dataset) -> dict[str, list[list[int]]]:
    """All documents, without their end of text."""
    found = {}
    for name in sorted(dataset.splits):
        split = dataset[name]
        tokens = np.concatenate([*split.blocks(0, split.num_tokens)])
        parts = np.split(tokens, split.document_ends(0, split.num_tokens)[:-1])
        found[name] = [part[:-1].tolist() for part in parts]
    return found


def files_of(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in tree(folder).items() if not name.startswith(".build")}


@pytest.mark.parametrize("layout", FORMATS)
def test_a_shuffled_export_is_the_export_of_a_dataset_in_that_order(
    dataset: Dataset, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shuffled, "BLOCK_TOKENS", 13)
    other = make_dataset(tmp_path / "other", in_order(dataset, 3))
    tokenmill.export(other, tmp_path / "expected", to=layout, **FORMATS[layout])
    for workers in (1, 3):
        out = tmp_path / f"out{workers}"
        tokenmill.export(dataset, out, to=layout, order="shuffled", seed=3, workers=workers, **FORMATS[layout])
        assert files_of(out) == files_of(tmp_path / "expected")


def test_the_order_depends_on_the_seed_and_on_nothing_else(dataset: Dataset) -> None:
    first, again, other = (documents_of(ShuffledDataset(dataset, seed)) for seed in (1, 1, 2))
    assert first == again == dict(sorted(in_order(dataset, 1).items()))
    assert first != other
    assert {name: sorted(found) for name, found in first.items()} == {
        name: sorted(found) for name, found in sorted(DOCUMENTS.items())
    }


@pytest.mark.parametrize("block", [1, 5, 64, 1 << 20])
def test_any_range_of_tokens_and_ends_is_that_of_the_documents_end_to_end(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(shuffled, "BLOCK_TOKENS", block)
    monkeypatch.setattr(shuffled, "BLOCK_DOCUMENTS", 7)
    split = ShuffledDataset(dataset, 5)["train"]
    documents = in_order(dataset, 5)["train"]
    tokens = np.array([token for document in documents for token in (*document, EOT)])
    ends = np.cumsum([len(document) + 1 for document in documents])
    assert split.num_tokens == len(tokens)
    chance = np.random.default_rng(block)
    ranges = [(0, len(tokens)), (0, 0), *np.sort(chance.integers(0, len(tokens) + 1, (40, 2))).tolist()]
    for start, stop in ranges:
        found = [np.zeros(0, np.uint16), *split.blocks(start, stop)]
        assert np.array_equal(np.concatenate(found), tokens[start:stop])
        assert np.array_equal(split.document_ends(start, stop), ends[(ends > start) & (ends <= stop)])


def test_a_layout_of_prepare_may_be_shuffled_and_an_interrupted_export_resumes(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(200))
    layout = "megatron:order=shuffled,seed=4,shard_size=2000"
    result = tokenmill.prepare(source, tmp_path / "out", tokenizer="byte", workers=1, layout=layout)
    assert result.export is not None

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and event["bytes"] > 0:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"to": "megatron", "order": "shuffled", "seed": 4, "shard_size": 2000, "workers": 1}
    with pytest.raises((KeyboardInterrupt, tokenmill.Interrupted)):
        tokenmill.export(tmp_path / "out", tmp_path / "again", **options, watch=stop)
    tokenmill.export(tmp_path / "out", tmp_path / "again", **options)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out/megatron")
    with pytest.raises(tokenmill.TokenmillError):
        tokenmill.export(tmp_path / "out", tmp_path / "again", **{**options, "seed": 5})


def test_rows_that_are_decoded_in_order_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    tokenmill.export(dataset, tmp_path / "rows", to="mds")
    with pytest.raises(RecipeError, match="cannot be read in any order but their own") as caught:
        ShuffledDataset(read_files(str(tmp_path / "rows"), "mds", Hints()), 0)
    assert "import the files first" in caught.value.hint
