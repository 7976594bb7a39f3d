"""OLMo's files: raw tokens and a table of documents."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from made import DOCUMENTS, EOT, FEW, TOKENS, documents, make_dataset, write_tokens

import tokenmill
from tokenmill.errors import DatasetError

TRAIN = [1, 2, 3, EOT, EOT, 4, EOT, 5, 6, 7, 8, EOT, 1, EOT]


@pytest.mark.parametrize(("dtype", "kind"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_olmo_has_raw_tokens_and_a_table(tmp_path: Path, dtype: str, kind: str) -> None:
    tokenmill.export(make_dataset(tmp_path, FEW, dtype=dtype), tmp_path / "out", to="olmo", shard_size=6)
    assert (tmp_path / "out/train/part-0-00000.npy").read_bytes() == np.array(TRAIN[:7], kind).tobytes()
    assert gzip.decompress((tmp_path / "out/train/part-0-00000.csv.gz").read_bytes()).decode() == (
        "0,4,train-0,train,0\n4,5,train-4,train,1\n5,7,train-5,train,2\n"
    )
    assert gzip.decompress((tmp_path / "out/train/part-0-00001.csv.gz").read_bytes()).decode() == (
        "0,5,train-7,train,0\n"
    )
    assert gzip.decompress((tmp_path / "out/train/part-0-00002.csv.gz").read_bytes()).decode() == (
        "0,2,train-12,train,0\n"
    )


def test_olmo_finds_its_dtype_by_its_table_or_is_told(tmp_path: Path) -> None:
    write_tokens(tmp_path / "part-0-00000.npy", TOKENS, "<u4")
    with pytest.raises(DatasetError, match="dtype"):
        tokenmill.open(tmp_path)
    assert documents(tokenmill.open(tmp_path, dtype="uint32", eot_id=50256)["train"]) == DOCUMENTS
    (tmp_path / "part-0-00000.csv.gz").write_bytes(gzip.compress(b"0,3,a,b,0\n3,5,a,b,1\n5,9,a,b,2\n"))
    assert documents(tokenmill.open(tmp_path)["train"]) == DOCUMENTS
