"""datatrove's files: tokens, index, metadata."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made import EOT, FEW, documents, make_dataset, write_tokens

import tokenmill
from tokenmill.errors import DatasetError

TRAIN = [1, 2, 3, EOT, EOT, 4, EOT, 5, 6, 7, 8, EOT, 1, EOT]


@pytest.mark.parametrize(("dtype", "kind"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_datatrove_has_tokens_ends_and_what_they_are(tmp_path: Path, dtype: str, kind: str) -> None:
    tokenmill.export(make_dataset(tmp_path, FEW, dtype=dtype), tmp_path / "out", to="datatrove")
    assert (tmp_path / "out/train/00000_tokens.ds").read_bytes() == np.array(TRAIN, kind).tobytes()
    assert np.fromfile(tmp_path / "out/train/00000_tokens.ds.index", "<u8").tolist() == [4, 5, 7, 12, 14]
    about = (tmp_path / "out/train/00000_tokens.ds.metadata").read_text().splitlines()
    assert about[:2] == [f"unknown|{np.dtype(kind).itemsize}", "14"]


def test_datatrove_has_its_ends_beside(tmp_path: Path) -> None:
    write_tokens(tmp_path / "00000_x.ds", [1, 2, 3])
    (tmp_path / "00000_x.ds.index").write_bytes(np.array([1, 3], "<u8").tobytes())
    assert documents(tokenmill.open(tmp_path)["train"]) == [[1], [2, 3]]
    assert documents(tokenmill.open(tmp_path / "00000_x.ds")["train"]) == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("num_tokens", "text"),
    [(7, "7.00 T"), (1234, "1.23 kT"), (99_949, "99.9 kT"), (123_456_789, "123 MT"), (5_000_000_000, "5.00 GT")],
)
def test_the_metadata_has_three_digits_and_a_unit(num_tokens: int, text: str) -> None:
    from tokenmill.formats.datatrove import _short_count

    assert _short_count(num_tokens) == text


def test_tokens_that_do_not_match_their_index_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "00000_x.ds", [1, 2, 3])
    (tmp_path / "00000_x.ds.index").write_bytes(np.array([1, 4], "<u8").tobytes())
    with pytest.raises(DatasetError, match="6 bytes, but its index has 4 tokens"):
        tokenmill.open(tmp_path)
