"""What the formats of rows have in common: mds, litdata, huggingface, catid."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import EOT, FEW, SOME, documents_of, imported, make_dataset, put

import tokenmill
from conftest import tree
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats.rows import TokenRows, cut_by_size

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_SIZES = {"catid": 60, "huggingface": 6, "litdata": 6, "mds": 100}
ROWS = ("catid", "huggingface", "litdata", "mds")
IDS = {"uint16": st.integers(10, 65535), "uint32": st.integers(10, 2**31 - 1)}


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("some"), SOME)


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


@pytest.mark.parametrize(
    ("layout", "options", "what"),
    [
        ("mds", {"shard_size": 1 << 30}, "offsets have 32 bits"),
        ("litdata", {"shard_size": 1 << 30}, "4 GiB"),
        ("catid", {"shard_size": 1 << 29}, "31 bits"),
        ("mds", {"seq_len": 1000}, "do not fill a row"),
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


@pytest.mark.parametrize("layout", ["litdata", "mds"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_damaged_files_give_typed_errors_or_tokens_and_nothing_else(
    exported: dict[str, Path], layout: str, data: st.DataObject
) -> None:
    """The index is whole here, and the file has its size: what is wrong is inside."""
    from tokenmill.formats.base import Hints, load_readable_format

    path = exported[layout]
    name = "shard.00000.mds" if layout == "mds" else "chunk-0-0.bin"
    content = bytearray((path / name).read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as work:
        hurt = put(Path(work, "hurt"), {name: bytes(content), "index.json": (path / "index.json").read_bytes()})
        try:
            split = load_readable_format(layout).read(str(hurt), Hints(eot_id=EOT))["train"]
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
