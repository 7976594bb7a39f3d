"""litData's chunks and index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import EOT, imported, make_dataset, put

import tokenmill
from tokenmill.errors import DatasetError


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


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"item_loader": "PyTreeLoader"}, "PyTreeLoader"),
        ({"data_format": ["str"]}, "str"),
        ({"compression": "zstd"}, "compressed or encrypted"),
        ({"encryption": {"algorithm": "fernet"}}, "compressed or encrypted"),
    ],
)
def test_chunks_that_cannot_be_read_are_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    tokenmill.export(make_dataset(tmp_path, {"train": [[1, 2], [3]]}), tmp_path / "out", to="litdata")
    index = json.loads((tmp_path / "out/train/index.json").read_bytes())
    index["config"].update(change)
    path = put(tmp_path / "other", {"index.json": json.dumps(index).encode()})
    with pytest.raises(DatasetError, match=told):
        imported(path, "litdata")


def test_the_index_is_the_same_for_the_same_tokens(tmp_path: Path) -> None:
    documents = {"train": [[1, 2], [3]]}
    for name in ("a", "b"):
        tokenmill.export(make_dataset(tmp_path / name, documents), tmp_path / name / "out", to="litdata")
    other = make_dataset(tmp_path / "c", {"train": [[1, 2], [4]]})
    tokenmill.export(other, tmp_path / "c/out", to="litdata")
    one, same, changed = (json.loads((tmp_path / name / "out/train/index.json").read_bytes()) for name in "abc")
    assert one == same
    assert one["updated_at"] != changed["updated_at"]
