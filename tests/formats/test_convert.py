"""What is exported in a format and imported again is the same: documents, order, fingerprint, golden files."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import EOT, FEW, LAYOUTS, OPTIONS, documents_of, file_names, make_dataset, quick_folder

import tokenmill
from conftest import make_texts, tree, write_parquet
from tokenmill.errors import RecipeError
from tokenmill.formats.convert import content_fingerprint

# 32-bit ids look like nothing that fits into 16 bits.
IDS = {"uint16": st.integers(0, 65535).filter(lambda token: token != EOT), "uint32": st.integers(10, 2**31 - 1)}


def splits(dtype: str) -> st.SearchStrategy[dict[str, list[list[int]]]]:
    document = st.lists(IDS[dtype], max_size=9)
    return st.fixed_dictionaries({name: st.lists(document, min_size=3, max_size=8) for name in ("train", "val")})


GOLDEN = Path(__file__).parent / "golden"


def content(path: Path) -> bytes:
    """The bytes that count: how well a table is compressed is up to the library."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


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
    tokenmill.export(dataset.path, tmp_path / "llmc", to="llmc", shard_size=100)
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


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_golden_files_are_written_and_read_as_ever(tmp_path: Path, layout: str, dtype: str) -> None:
    if (layout, dtype) == ("nanogpt", "uint32"):
        return
    golden = GOLDEN / f"{layout}-{dtype}"
    dataset = make_dataset(tmp_path, FEW, dtype=dtype)
    tokenmill.export(dataset.path, tmp_path / "out", to=layout, **OPTIONS[layout])
    assert file_names(tmp_path / "out") == file_names(golden)
    for name in file_names(golden):
        assert content(tmp_path / "out" / name) == content(golden / name), name
    back = tokenmill.import_(golden, tmp_path / "back", layout=layout, eot_id=EOT)
    assert back.manifest.fingerprint == (GOLDEN / "fingerprint").read_text().strip()


def test_real_texts_come_out_of_every_number_of_threads_alike(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(200))
    tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "data", workers=1, split="val=0.1")
    for workers in (1, 3):
        tokenmill.export(
            tmp_path / "data", tmp_path / f"{workers}", to="templar", workers=workers, shard_size=999, seq_len=64
        )
    assert tree(tmp_path / "1") == tree(tmp_path / "3")


def test_an_end_of_text_beyond_32_bits_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, {"train": [[1, 2]]})
    tokenmill.export(dataset.path, tmp_path / "files", to="nanogpt")
    with pytest.raises(RecipeError, match="eot_id is 99999999999"):
        tokenmill.import_(tmp_path / "files", tmp_path / "back", layout="nanogpt", eot_id=99999999999)


def test_verify_checks_an_export_by_its_own_record(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, {"train": [[1, 2]]})
    tokenmill.export(dataset.path, tmp_path / "files", to="nanogpt")
    assert tokenmill.verify(tmp_path / "files").ok
    (tmp_path / "files/train.bin").write_bytes(b"\1\0\3\0\0\0")
    (problem,) = tokenmill.verify(tmp_path / "files").problems
    assert problem.file == "train.bin"
