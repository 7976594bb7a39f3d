"""litData's chunks and index."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from made import EOT, make_dataset

import tokenmill


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
