"""Whatever goes out in a layout comes back: documents, order, fingerprint."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import EOT, FEW, LAYOUTS, OPTIONS, documents_of, make_dataset, quick_folder

import tokenmill
from tokenmill.errors import RecipeError
from tokenmill.formats.convert import content_fingerprint

# 32-bit ids look like nothing that fits into 16 bits.
IDS = {"uint16": st.integers(0, 65535).filter(lambda token: token != EOT), "uint32": st.integers(10, 2**31 - 1)}


def splits(dtype: str) -> st.SearchStrategy[dict[str, list[list[int]]]]:
    document = st.lists(IDS[dtype], max_size=9)
    return st.fixed_dictionaries({name: st.lists(document, min_size=3, max_size=8) for name in ("train", "val")})


@pytest.mark.parametrize(
    ("layout", "dtype"), [pair for pair in itertools.product(LAYOUTS, IDS) if pair != ("nanogpt", "uint32")]
)
@given(data=st.data(), size=st.integers(3, 40))
@settings(max_examples=6, deadline=None)
def test_documents_and_fingerprint_survive(layout: str, dtype: str, data: st.DataObject, size: int) -> None:
    documents = data.draw(splits(dtype))
    with quick_folder() as work:
        dataset = make_dataset(work, documents, dtype=dtype)
        options = {**OPTIONS[layout], **({"shard_size": size} if "shard_size" in OPTIONS[layout] else {})}
        tokenmill.export(dataset, f"{work}/out", to=layout, workers=1, **options)
        back = tokenmill.import_(f"{work}/out", f"{work}/back", layout=layout, eot_id=EOT, workers=1)
        assert documents_of(tokenmill.open(f"{work}/back")) == documents
        assert back.manifest.fingerprint == content_fingerprint(dataset) == dataset.manifest.fingerprint
        assert tokenmill.verify(f"{work}/back").ok
        in_place = tokenmill.open(f"{work}/out", eot_id=EOT)
        assert documents_of(in_place) == documents
        for split in documents:
            assert np.array_equal(
                [len(document) for document in in_place[split]], [len(document) + 1 for document in documents[split]]
            )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_end_of_text_may_stand_first_in_the_dataset(tmp_path: Path, layout: str) -> None:
    dataset = make_dataset(tmp_path, FEW)
    tokenmill.export(dataset, tmp_path / "llmc", to="llmc", shard_size=100)
    prepended = tokenmill.open(tmp_path / "llmc", eot_id=EOT)
    assert prepended["train"].eot == "prepend"
    tokenmill.export(prepended, tmp_path / "out", to=layout, **OPTIONS[layout])
    back = tokenmill.import_(tmp_path / "out", tmp_path / "back", layout=layout, eot_id=EOT)
    assert documents_of(tokenmill.open(tmp_path / "back")) == FEW
    assert back.manifest.fingerprint == dataset.manifest.fingerprint


def test_several_layouts_in_a_row_change_nothing(tmp_path: Path) -> None:
    source = make_dataset(tmp_path, FEW)
    for number, layout in enumerate(LAYOUTS):
        tokenmill.export(source, tmp_path / f"{number}", to=layout, **OPTIONS[layout])
        source = tokenmill.open(tmp_path / f"{number}", eot_id=EOT)
        assert source.manifest.identity["layout"] == layout
        assert documents_of(source) == FEW


def test_without_an_end_of_text_the_index_alone_tells_documents(tmp_path: Path) -> None:
    tokenmill.export(make_dataset(tmp_path, FEW), tmp_path / "out", to="megatron")
    found = tokenmill.import_(tmp_path / "out", tmp_path / "back", layout="megatron")
    assert found.manifest.identity["eot"] == "none"
    assert any("index" in note for note in found.notes)
    assert documents_of(tokenmill.open(tmp_path / "back")) == FEW
    with pytest.raises(RecipeError, match="end of text"):
        tokenmill.export(tmp_path / "back", tmp_path / "no", to="nanogpt")


def test_documents_with_an_end_of_text_inside_are_known_by_the_index_alone(tmp_path: Path) -> None:
    tokenmill.export(make_dataset(tmp_path, FEW), tmp_path / "out", to="datatrove")
    found = tokenmill.import_(tmp_path / "out", tmp_path / "back", layout="datatrove", eot_id=2)
    assert found.manifest.identity["eot"] == "none"
    assert documents_of(tokenmill.open(tmp_path / "back")) == FEW


def test_the_manifest_records_where_tokens_came_from(tmp_path: Path) -> None:
    tokenmill.export(make_dataset(tmp_path, FEW), tmp_path / "out", to="llmc", shard_size=8)
    found = tokenmill.import_(tmp_path / "out", tmp_path / "back", layout="llmc", eot_id=EOT, tokenizer="gpt2")
    assert found.manifest.identity["imported"] == {
        "layout": "llmc",
        "files": {"train/train_000001.bin": 8, "train/train_000002.bin": 6, "val/val_000000.bin": 5},
    }
    assert found.manifest.tokenizer["name"] == "gpt2"
