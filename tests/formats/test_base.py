"""What all formats share: the protocol, options, the end of text, cuts at documents, files by their names."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import EOT, FEW, make_dataset

import tokenmill
from conftest import make_texts, write_parquet
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats import base
from tokenmill.formats.base import Options, TokenStream

# What a trainer node must not load to open a dataset, or to read from it.
HEAVY = (
    "pyarrow", "yaml", "zstandard", "rich", "typer", "gigatoken", "awkward", "tiktoken", "tokenizers", "sentencepiece",
    "obstore", "huggingface_hub", "torch", "jax", "ray",
)  # fmt: skip
IN_PLACE: dict[str, dict[str, Any]] = {
    "datatrove": {"shard_size": 7},
    "llmc": {"shard_size": 5},
    "megatron": {},
    "nanogpt": {},
    "olmo": {"shard_size": 7},
    "templar": {"shard_size": 5, "seq_len": 2},
}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("few"), FEW)


@pytest.mark.parametrize("name", base.FORMATS)
def test_every_format_has_what_the_protocol_asks_for(name: str) -> None:
    found = base.load_format(name)
    assert Options.__dataclass_fields__.keys() >= found.TRAITS.options
    assert {"eot", "uint16"} >= found.TRAITS.needs
    assert callable(found.check) and callable(found.write)
    assert hasattr(found, "detect") == (name in base.IN_PLACE) != hasattr(found, "read")


def test_every_format_module_is_in_the_list() -> None:
    shared = {"__init__", "base", "convert", "files", "open", "resumable", "results", "rows", "shuffled"}
    modules = {path.stem for path in Path(base.__file__).parent.glob("*.py")}
    assert modules - shared == set(base.FORMATS)


@pytest.mark.parametrize("layout", base.IN_PLACE)
def test_files_are_opened_in_place_with_numpy_and_msgspec_alone(few: Dataset, tmp_path: Path, layout: str) -> None:
    tokenmill.export(few, tmp_path / "out", to=layout, **IN_PLACE[layout])
    script = f"""
import sys, tokenmill
dataset = tokenmill.open(sys.argv[1], layout=sys.argv[2], eot_id={EOT})
train = dataset["train"]
assert len(train) == {len(FEW["train"])}, len(train)
assert sorted(train.document(0).tolist()) == {sorted([*FEW["train"][0], EOT])}
assert next(iter(tokenmill.DataLoader(dataset, 2, 2)))["input_ids"].shape == (2, 2)
repr(dataset)
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({HEAVY!r})))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "out", layout], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_detection_loads_nothing_heavy_either(few: Dataset, tmp_path: Path) -> None:
    """nanoGPT's files come last: every other format has looked at them."""
    tokenmill.export(few, tmp_path / "out", to="nanogpt")
    code = f"import sys, tokenmill; assert tokenmill.open(sys.argv[1], eot_id={EOT}).splits; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], capture_output=True, text=True, check=True)
    assert not {name.partition(".")[0] for name in done.stdout.split()} & set(HEAVY)


def test_unknown_formats_are_refused_with_those_that_exist() -> None:
    with pytest.raises(RecipeError, match="no layout 'nope'") as caught:
        base.load_format("nope")
    assert "templar" in caught.value.hint
    with pytest.raises(RecipeError, match="'mds' are not read in place"):
        base.load_in_place_format("mds")
    with pytest.raises(RecipeError, match="llmc has no files with known checksums"):
        base.load_checked_format("llmc")
    assert base.load_checked_format("templar").EXPECTED_FILES["tokens"] == "tokens.bin"


def test_no_other_module_names_a_format_to_branch_on_it() -> None:
    shared = [importlib.import_module(f"tokenmill.formats.{name}") for name in ("convert", "open", "resumable", "rows")]
    for module in shared:
        code = Path(str(module.__file__)).read_text(encoding="utf-8")
        for name in base.FORMATS:
            assert f'"{name}"' not in code, (module.__name__, name)


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("nanogpt", "nanogpt", {}),
        ("templar:seq_len=2Ki,shard_size=1Gi", "templar", {"seq_len": 2048, "shard_size": 1 << 30}),
        ("templar:templar-compat=no", "templar", {"templar_compat": False}),
        ("nanogpt:order=shuffled,seed=3", "nanogpt", {"order": "shuffled", "seed": 3}),
        ("megatron: name = owt ", "megatron", {"name": "owt"}),
    ],
)
def test_a_format_with_options_is_parsed(text: str, name: str, options: dict[str, Any]) -> None:
    found, parsed = base.parse_format(text)
    assert (found, parsed.given()) == (name, options)


@pytest.mark.parametrize("text", ["nanogpt:seed=-1,order=shuffled", "nanogpt:seed=x", "nanogpt:order=random"])
def test_values_of_options_are_checked(text: str) -> None:
    with pytest.raises(RecipeError):
        base.parse_format(text)


@pytest.mark.parametrize(("stored", "wanted"), [("append", "prepend"), ("prepend", "append"), ("append", "append")])
def test_the_end_of_text_is_moved_and_documents_keep_their_length(
    tmp_path: Path, few: Dataset, stored: str, wanted: str
) -> None:
    tokenmill.export(few, tmp_path / "out", to="llmc", shard_size=100)
    split = few["train"] if stored == "append" else tokenmill.open(tmp_path / "out", eot_id=EOT)["train"]
    assert split.eot == stored
    documents = [[*document, EOT] if wanted == "append" else [EOT, *document] for document in FEW["train"]]
    expected = [token for document in documents for token in document]
    stream = TokenStream(split, wanted)
    for start in range(len(expected)):
        for stop in range(start, len(expected) + 1):
            found = [token for block in stream.blocks(start, stop) for token in block.tolist()]
            assert found == expected[start:stop], (start, stop)
    data = b"".join(stream.data(0, stream.num_tokens))
    assert data == np.array(expected, "<u2").tobytes()


def test_ranges_end_with_the_first_document_that_reaches_a_multiple(few: Dataset) -> None:
    split = few["train"]  # documents end at 4, 5, 7, 12, 14
    assert base.cut_at_documents(split, 5) == [(0, 5), (5, 12), (12, 14)]
    assert base.cut_at_documents(split, 1) == [(0, 4), (4, 5), (5, 7), (7, 12), (12, 14)]
    assert base.cut_at_documents(split, 100) == [(0, 14)]
    assert base.cut_anywhere(14, 6) == [(0, 6), (6, 12), (12, 14)]
    assert base.document_lengths(split, 5, 14).tolist() == [2, 5, 2]
    blocks = list(base.lengths_by_block(split, 0, 14, block_tokens=3))
    assert len(blocks) > 2 and np.concatenate(blocks).tolist() == [4, 1, 2, 5, 2]


def test_cuts_need_documents_that_are_known(tmp_path: Path) -> None:
    np.arange(8, dtype="<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(DatasetError, match="where its documents end"):
        base.cut_at_documents(tokenmill.open(tmp_path / "train.bin")["train"], 4)


def test_needs_of_a_format_are_checked_with_a_way_out() -> None:
    with pytest.raises(RecipeError, match="vocabulary of 128,000 does not fit") as caught:
        base.check_needs("nanogpt", dtype="int32", vocab_size=128_000, eot="append", where="x")
    assert "llmc" in caught.value.hint and "nanogpt" not in caught.value.hint
    with pytest.raises(RecipeError, match="the documents of x have none"):
        base.check_needs("templar", dtype="uint16", vocab_size=9, eot="none", where="x")
    base.check_needs("megatron", dtype="int32", vocab_size=128_000, eot="none", where="x")


def test_an_export_takes_no_more_than_was_estimated(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(50))
    tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "data", tokenizer="byte", workers=1)
    dataset = tokenmill.open(tmp_path / "data")
    facts = (dataset.manifest.dtype, dataset.manifest.tokens, dataset.manifest.documents)
    for name in ("nanogpt", "templar", "megatron"):
        done = tokenmill.export(dataset, tmp_path / name, to=name)
        tokens = sum(size for path, size in ((p, d.bytes) for p, d in done.files.items()) if not path.endswith(".idx"))
        assert tokens <= base.format_bytes_of(name, *facts) + 1024
