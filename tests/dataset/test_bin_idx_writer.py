from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.dataset.bin_idx import (
    ShardWriter,
    check_index,
    check_structure,
    document_starts,
    map_tokens,
    numpy_dtype,
)
from tokenmill.dataset.manifest import Shard
from tokenmill.errors import BuildError, DatasetError
from tokenmill.storage.local import Folder

Documents = list[list[int]]


def write(folder: Folder, name: str, dtype: str, batches: list[Documents]) -> Shard | None:
    """A shard of these documents, or None if there was nothing to publish."""
    writer = ShardWriter(folder.create, name, dtype)
    for documents in batches:
        tokens = np.array([token for document in documents for token in document], numpy_dtype(dtype))
        writer.write(tokens, np.array([len(document) for document in documents], np.int64))
    outputs = writer.outputs()
    return writer.describe(folder.publish(outputs)) if outputs else None


def write_pair(path: Path, dtype: str, documents: Documents) -> Shard:
    shard = write(Folder(str(path)), "00000", dtype, [documents])
    assert shard is not None
    return shard


def batches_of(limit: int) -> st.SearchStrategy[list[Documents]]:
    document = st.lists(st.integers(0, limit), max_size=6)
    return st.lists(st.lists(document, max_size=5), max_size=4)


def test_a_writer_without_a_token_creates_no_file(tmp_path: Path) -> None:
    writer = ShardWriter(Folder(str(tmp_path)).create, "00000", "uint16")
    writer.write(np.zeros(0, np.uint16), np.zeros(0, np.int64))
    writer.write(np.zeros(0, np.uint16), np.zeros(3, np.int64))
    assert writer.outputs() == []
    assert os.listdir(tmp_path) == []


def test_a_discarded_writer_leaves_no_file(tmp_path: Path) -> None:
    writer = ShardWriter(Folder(str(tmp_path)).create, "00000", "uint16")
    writer.write(np.arange(3, dtype=np.uint16), np.array([1, 2]))
    writer.outputs()
    assert len(os.listdir(tmp_path)) == 2
    writer.discard()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("dtype", "limit"), [("uint16", 65535), ("int32", (1 << 31) - 1)])
def test_what_is_written_is_read_back(tmp_path: Path, dtype: str, limit: int) -> None:
    folder = Folder(str(tmp_path))

    @given(batches=batches_of(limit))
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(batches: list[Documents]) -> None:
        for name in os.listdir(tmp_path):
            os.unlink(tmp_path / name)
        documents = [document for batch in batches for document in batch]
        flat = [token for document in documents for token in document]
        shard = write(folder, "00000", dtype, batches)
        if not flat:
            assert shard is None
            return
        assert shard is not None
        assert (shard.tokens, shard.documents) == (len(flat), len(documents))
        assert (folder.digest("00000.bin"), folder.digest("00000.idx")) == (shard.bin, shard.idx)
        bin_path, idx_path = (str(tmp_path / f"00000{ending}") for ending in (".bin", ".idx"))
        check_structure(folder, shard, dtype)
        check_index(memoryview((tmp_path / "00000.idx").read_bytes()), shard, dtype, where="00000.idx")
        assert np.memmap(bin_path, "<u2" if dtype == "uint16" else "<i4", "r").tolist() == flat
        assert map_tokens(bin_path, dtype).tolist() == flat
        starts = (document_starts(idx_path, len(documents)) // numpy_dtype(dtype).itemsize).tolist()
        assert [flat[a:b] for a, b in zip(starts, [*starts[1:], len(flat)], strict=True)] == documents

    check()


def test_bytes_that_are_appended_make_the_same_shard(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    written = write(folder, "a", "uint16", [[[1, 2], [3]], [[4, 5, 6]]])
    assert written is not None
    writer = ShardWriter(folder.create, "b", "uint16")
    writer.add_lengths(np.array([2, 1], np.int32))
    writer.append(memoryview(np.array([1, 2, 3, 4], "<u2").tobytes()))
    writer.append(memoryview(np.array([5, 6], "<u2").tobytes()))
    writer.add_lengths(np.array([3], np.int32))
    joined = writer.describe(folder.publish(writer.outputs()))
    assert (joined.bin, joined.idx, joined.tokens, joined.documents) == (written.bin, written.idx, 6, 3)


def test_a_document_of_too_many_tokens_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(Folder(str(tmp_path)).create, "00000", "uint16")
    with pytest.raises(BuildError, match=r"2\^31"):
        writer.write(np.zeros(0, np.uint16), np.array([1 << 31]))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("ending", "change"),
    [(".bin", -1), (".bin", 2), (".idx", -1), (".idx", 20), (".bin", None), (".idx", None)],
)
def test_a_pair_of_the_wrong_sizes_is_rejected_by_name(tmp_path: Path, ending: str, change: int | None) -> None:
    shard = write_pair(tmp_path, "uint16", [[1, 2], [3]])
    path = tmp_path / f"00000{ending}"
    if change is None:
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + change)
    with pytest.raises(DatasetError, match=f"00000{ending}"):
        check_structure(Folder(str(tmp_path)), shard, "uint16")


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_link_in_the_place_of_a_shard_is_rejected(tmp_path: Path, ending: str) -> None:
    shard = write_pair(tmp_path, "uint16", [[1, 2], [3]])
    os.rename(tmp_path / f"00000{ending}", tmp_path / "elsewhere")
    os.symlink("elsewhere", tmp_path / f"00000{ending}")
    with pytest.raises(DatasetError, match="not a plain file"):
        check_structure(Folder(str(tmp_path)), shard, "uint16")


@pytest.mark.parametrize("place", [34, 42, 58], ids=["a length", "an offset", "a bound"])
def test_a_wrong_array_is_found_by_the_deep_check(tmp_path: Path, place: int) -> None:
    shard = write_pair(tmp_path, "uint16", [[1, 2], [3]])
    data = bytearray((tmp_path / "00000.idx").read_bytes())
    data[place] ^= 1
    with pytest.raises(DatasetError, match=r"00000\.idx"):
        check_index(memoryview(data), shard, "uint16", where="00000.idx")


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_an_index_of_another_dtype_is_rejected(tmp_path: Path, dtype: str) -> None:
    other = "int32" if dtype == "uint16" else "uint16"
    shard = write_pair(tmp_path, other, [[1, 2], [3, 4]])
    tokens = 4 * numpy_dtype(other).itemsize // numpy_dtype(dtype).itemsize
    with pytest.raises(DatasetError, match=f"expected 2 of {dtype}"):
        check_structure(Folder(str(tmp_path)), replace(shard, tokens=tokens), dtype)
