"""The layouts that store rows: mds, litdata, huggingface, catid. What goes out comes back, in the peers' bytes."""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import EOT, FEW, Documents, documents_of, make_dataset

import tokenmill
from conftest import tree
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats.catid import cityhash64, hash_one
from tokenmill.formats.rows import TokenRows, cut_by_size
from tokenmill.storage.base import local_folder

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_SIZES = {"catid": 60, "huggingface": 6, "litdata": 6, "mds": 100}
ROWS = ("catid", "huggingface", "litdata", "mds")
SOME: Documents = {"train": [[1, 2, 3], [], [4], [5, 6, 7, 8], list(range(10, 300))], "val": [[2, 2], [3]]}
# Of what Mosaic's own writer makes of SOME with hashes=["sha256"], size_limit=400; variable, and packed in fours.
MDS = {
    "index.json": "8b29492ff6a1d9a5ae38e727361b8775724d2e06628085b3060131327ff879f6",
    "shard.00000.mds": "f78ecb967cdafc1ff8974cb9169ceb408f7fc7f88f9916b940da335571064f0a",
    "shard.00001.mds": "0324861d834186d90becfbc667dc5711ebab2d668ac81e81230d9ec05cf25e8c",
}
MDS_PACKED = {
    "index.json": "aebb6de6e7d5ad869a165e8ec8fe623f35a947a3b8392fcbfafeaef386de4873",
    "shard.00000.mds": "b550830b5064f1f600e73d7b08c53754571918a93c75fc07c8e86996d791f07b",
    "shard.00007.mds": "b2cb07b8110d7df7b0a120da54822103f39b527fb32b2bef0fb004ef0fd71303",
}
# What catid's own writer made of 70001, 70002, 70003 and 70005 to 70008.
CATID = {
    "data_0.bin": "KLUv/SAMYQAAcXJzERERAQEBAAAAKLUv/SAQgQAAdXZ3eBEREREBAQEBAAAAAA4E/3FfG+dEsYs=",
    "index_0.bin": "AAAAAAMAAAAVAAAABAAAAC4AAAAOBLSJdTEonMrF",
}
CATID_INDEX = (
    b"version: 14\ntoken_bytes: 4\ntotal_tokens: 7\ndata_files:\n  - data_0.bin\nindex_files:\n  - index_0.bin\n"
)
# Of the first 0, 1, 3, 4, 7, ... bytes below, by the published implementation.
CITY = [
    "9ae16a3b2f90404f",
    "be6056edf5e94b54",
    "2c15359798678555",
    "e0ce51a94e0157d1",
    "42dddf8b335f2364",
    "380e4eb152ab0b6d",
    "bc310e5874cb6fd7",
    "202decd1ed205390",
    "e03f15f8fe079e34",
    "ca33e129bb5a02b0",
    "b33d4e1d2d302597",
    "9bb82903f9cdc5ad",
    "5e7f86d433570967",
    "a141d951ab614244",
    "7760b7cf04b3c9a1",
    "b207f761718329c2",
]
IDS = {"uint16": st.integers(10, 65535), "uint32": st.integers(10, 2**31 - 1)}


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("some"), SOME)


def digests(folder: Path, names: dict[str, str]) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def put(folder: Path, files: dict[str, bytes]) -> Path:
    target = local_folder(folder)
    target.make()
    for name, data in files.items():
        target.write(name, data)
    return folder


def imported(path: Path, layout: str, **options: Any) -> Dataset:
    out = path.parent / f"{path.name}-imported"
    tokenmill.import_(path, out, layout=layout, workers=1, **options)
    return tokenmill.open(out)


@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("layout", ROWS)
@given(data=st.data(), size=st.integers(1, 40))
@settings(max_examples=4, deadline=None)
def test_documents_and_fingerprint_survive(layout: str, dtype: str, data: st.DataObject, size: int) -> None:
    document = st.lists(IDS[dtype], min_size=1 if layout == "catid" else 0, max_size=9)
    documents = {"train": data.draw(st.lists(document, min_size=1, max_size=8))}
    with tempfile.TemporaryDirectory() as work:
        dataset = make_dataset(Path(work), documents, dtype=dtype)
        tokenmill.export(dataset, f"{work}/out", to=layout, workers=1, shard_size=size + 50 * (layout == "mds"))
        back = imported(Path(work, "out"), layout, eot_id=EOT)
        assert documents_of(back) == documents
        assert back.manifest.fingerprint == dataset.manifest.fingerprint


@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("layout", ROWS)
def test_the_golden_files_are_written_and_read_as_ever(tmp_path: Path, layout: str, dtype: str) -> None:
    golden = GOLDEN / (f"{layout}-{dtype}" if layout == "litdata" else layout)  # others have 32 bits always
    dataset = make_dataset(tmp_path, FEW, dtype=dtype)
    tokenmill.export(dataset, tmp_path / "out", to=layout, shard_size=GOLDEN_SIZES[layout])
    found, expected = tree(tmp_path / "out"), tree(golden)
    assert found.keys() == expected.keys()
    assert found == expected or layout == "huggingface"  # how parquet is written is up to the library
    tokenmill.import_(golden, tmp_path / "back", layout=layout, eot_id=EOT)
    kept = {name: [one for one in documents if one or layout != "catid"] for name, documents in FEW.items()}
    assert documents_of(tokenmill.open(tmp_path / "back")) == kept


@pytest.mark.parametrize("layout", ["huggingface", "mds"])
def test_packed_rows_give_back_documents_by_the_end_of_text_and_say_so(tmp_path: Path, layout: str) -> None:
    dataset = make_dataset(tmp_path, {"train": [[1, 2, 3], [], [4], [5]]})
    assert tokenmill.export(dataset, tmp_path / "out", to=layout, seq_len=3).notes == ()
    found = tokenmill.import_(tmp_path / "out", tmp_path / "back", layout=layout, eot_id=EOT)
    assert any("recovered from the end-of-text id 9" in note for note in found.notes)
    assert found.manifest.fingerprint == dataset.manifest.fingerprint
    with pytest.raises(DatasetError, match="where its documents end"):
        tokenmill.import_(tmp_path / "out", tmp_path / "no", layout=layout)


def test_tokens_that_fill_no_row_are_told(some: Dataset, tmp_path: Path) -> None:
    done = tokenmill.export(some, tmp_path / "out", to="mds", seq_len=4, shard_size=100)
    assert done.notes[0] == "the last 3 tokens of train do not fill a row of 4, and are left out"
    assert digests(tmp_path / "out" / "train", MDS_PACKED) == MDS_PACKED


def test_mosaics_writer_gives_the_same_bytes(some: Dataset, tmp_path: Path) -> None:
    tokenmill.export(some, tmp_path / "out", to="mds", shard_size=100)
    assert digests(tmp_path / "out" / "train", MDS) == MDS


@pytest.mark.parametrize(("dtype", "code"), [("uint16", 20), ("uint32", 16)])
def test_litdata_chunks_are_offsets_and_tokens(tmp_path: Path, dtype: str, code: int) -> None:
    out = tmp_path / "out"
    tokenmill.export(make_dataset(tmp_path, {"train": [[1, 2], [], [3]]}, dtype=dtype), out, to="litdata", shard_size=4)
    size = np.dtype(dtype).itemsize
    head = np.array([2, 16, 16 + 3 * size, 16 + 4 * size], "<u4").tobytes()
    assert (out / "train" / "chunk-0-0.bin").read_bytes() == head + np.array([1, 2, EOT, EOT], dtype).tobytes()
    index = json.loads((out / "train" / "index.json").read_bytes())
    assert [(chunk["chunk_size"], chunk["dim"]) for chunk in index["chunks"]] == [(2, 4), (1, 2)]
    assert index["config"]["data_format"] == [f"no_header_tensor:{code}"]


def test_what_catids_writer_made_is_imported(tmp_path: Path) -> None:
    files = {name: base64.b64decode(text) for name, text in CATID.items()}
    path = put(tmp_path / "catid", {**files, "index.yaml": CATID_INDEX})
    ids = [[70001, 70002, 70003], [70005, 70006, 70007, 70008]]
    assert documents_of(imported(path, "catid", eot_id=EOT)) == {"train": ids}
    plain = tokenmill.import_(path, tmp_path / "plain", layout="catid")
    assert [document.tolist() for document in tokenmill.open(tmp_path / "plain")["train"]] == ids
    assert plain.manifest.identity["eot"] == "none"


def test_catids_index_and_hashes_are_those_of_its_writer(tmp_path: Path) -> None:
    dataset = make_dataset(
        tmp_path, {"train": [[70001, 70002, 70003], [], [70005, 70006, 70007, 70008]]}, dtype="uint32"
    )
    done = tokenmill.export(dataset, tmp_path / "out", to="catid")
    assert done.notes[0] == "1 documents of train have no tokens but the end of text, and are left out"
    for name, text in CATID.items():
        assert (tmp_path / "out" / "train" / name).read_bytes() == base64.b64decode(text)


@pytest.mark.parametrize("name", ["data_0.bin", "index_0.bin"])
@pytest.mark.parametrize("place", [0, 5, -12, -1])
def test_damage_of_catids_files_is_found_by_their_hashes(tmp_path: Path, name: str, place: int) -> None:
    files = {one: bytearray(base64.b64decode(text)) for one, text in CATID.items()}
    files[name][place] ^= 64
    path = put(tmp_path / "catid", {**{one: bytes(data) for one, data in files.items()}, "index.yaml": CATID_INDEX})
    with pytest.raises(DatasetError, match=name):
        imported(path, "catid")


def test_cityhash_is_the_published_one() -> None:
    data = (np.arange(5000, dtype=np.uint64) * 2654435761 >> 16).astype(np.uint8)
    sizes = np.array([0, 1, 3, 4, 7, 8, 16, 17, 32, 33, 64, 65, 128, 129, 1000, 4999])
    assert [f"{one:016x}" for one in cityhash64(data, np.zeros(16, np.int64), sizes).tolist()] == CITY
    assert [hash_one(data[:size].tobytes()) for size in sizes] == [int(one, 16) for one in CITY]


@pytest.mark.parametrize("kind", ["int32", "int64", "uint16"])
def test_parquet_of_others_is_imported_with_other_columns_and_empty_rows(tmp_path: Path, kind: str) -> None:
    rows = [[1, 2, EOT], None, [], [3, EOT], [4, 5, 6, EOT]]
    table = pa.table(
        {"text": ["a", "b", "c", "d", "e"], "input_ids": pa.array(rows, pa.list_(pa.type_for_alias(kind)))}
    )
    held = pa.BufferOutputStream()
    pq.write_table(table, held, row_group_size=2)
    path = put(tmp_path / "parquet", {"validation-00000-of-00001.parquet": held.getvalue().to_pybytes()})
    assert documents_of(imported(path, "huggingface", eot_id=EOT)) == {"validation": [[1, 2], [3], [4, 5, 6]]}


def test_ids_that_are_none_are_refused(tmp_path: Path) -> None:
    cases = [
        ([[1, -2]], "ids from -2"),
        ([[1, 2**40]], "ids from 1"),
        ([[1, None]], "null"),
        ([[1, 2], [None]], "null"),
    ]
    for number, (rows, what) in enumerate(cases):
        held = pa.BufferOutputStream()
        pq.write_table(pa.table({"input_ids": pa.array(rows, pa.list_(pa.int64()))}), held)
        path = put(tmp_path / f"{number}", {"x.parquet": held.getvalue().to_pybytes()})
        with pytest.raises(DatasetError, match=what):
            imported(path, "huggingface")


@pytest.mark.parametrize(
    ("layout", "options", "what"),
    [
        ("mds", {"shard_size": 1 << 30}, "offsets have 32 bits"),
        ("litdata", {"shard_size": 1 << 30}, "4 GiB"),
        ("catid", {"shard_size": 1 << 29}, "31 bits"),
        ("mds", {"seq_len": 1000}, "fill no row"),
        ("litdata", {"seq_len": 4}, "does not apply"),
    ],
)
def test_what_cannot_be_is_refused_before_writing(
    some: Dataset, tmp_path: Path, layout: str, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(RecipeError, match=what):
        tokenmill.export(some, tmp_path / "out", to=layout, **options)
    assert not (tmp_path / "out").exists()


def test_packed_rows_need_an_end_of_text(some: Dataset, tmp_path: Path) -> None:
    tokenmill.export(some, tmp_path / "out", to="mds")
    plain = imported(tmp_path / "out", "mds")
    assert plain.manifest.identity["eot"] == "none"
    with pytest.raises(RecipeError, match="end of text"):
        tokenmill.export(plain, tmp_path / "no", to="huggingface", seq_len=2)


def test_compressed_shards_are_refused_with_the_reason(some: Dataset, tmp_path: Path) -> None:
    tokenmill.export(some, tmp_path / "out", to="mds")
    index = json.loads((tmp_path / "out" / "train" / "index.json").read_bytes())
    index["shards"][0].update(compression="zstd", raw_data={"basename": "gone.mds", "bytes": 1, "hashes": {}})
    path = put(tmp_path / "zipped", {"index.json": json.dumps(index).encode()})
    with pytest.raises(DatasetError, match="compressed with zstd"):
        imported(path, "mds")


@pytest.mark.parametrize("layout", ["litdata", "mds"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_damaged_files_give_typed_errors_or_tokens_and_nothing_else(
    exported: dict[str, Path], layout: str, data: st.DataObject
) -> None:
    """The index is whole here, and the file has its size: what is wrong is inside."""
    from tokenmill.formats.base import Hints, load_format

    path = exported[layout]
    name = "shard.00000.mds" if layout == "mds" else "chunk-0-0.bin"
    content = bytearray((path / name).read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as work:
        hurt = put(Path(work, "hurt"), {name: bytes(content), "index.json": (path / "index.json").read_bytes()})
        try:
            split = load_format(layout).read(str(hurt), Hints(eot_id=EOT))["train"]
            assert sum(len(block) for block in split.blocks(0, split.num_tokens)) == split.num_tokens
            split.document_ends(0, split.num_tokens)
        except DatasetError:
            pass


@pytest.fixture(scope="module")
def exported(some: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    work = tmp_path_factory.mktemp("exported")
    for layout in ("litdata", "mds"):
        tokenmill.export(some, work / layout, to=layout)
    return {layout: work / layout / "train" for layout in ("litdata", "mds")}


class _Lengths(TokenSplit):
    """Documents of given lengths, in blocks of given sizes."""

    def __init__(self, lengths: list[int]) -> None:
        self.ends = np.cumsum(lengths)
        self.eot = "none"

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1])

    def document_ends(self, start: int, stop: int) -> Any:
        return self.ends[(self.ends > start) & (self.ends <= stop)]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    limit=st.integers(1, 60),
    block=st.integers(1, 50),
)
@settings(max_examples=100, deadline=None)
def test_files_are_filled_in_order_with_as_many_rows_as_fit(lengths: list[int], limit: int, block: int) -> None:
    found = cut_by_size(TokenRows(_Lengths(lengths), block_tokens=block), limit, lambda some: some)
    expected, filled = [0], 0
    for end, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
        if filled and filled + length > limit:
            expected.append(end - length)
            filled = 0
        filled += length
    assert found == list(zip(expected, [*expected[1:], sum(lengths)], strict=True))
