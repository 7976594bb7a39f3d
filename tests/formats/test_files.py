"""Files of other programs: splits by names and folders, gaps, missing halves, files that change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats import files
from tokenmill.formats.base import Hints, TokenFile


def test_splits_are_told_by_words_of_names() -> None:
    names = ["owt_val_000000.bin", "owt_train_000001.bin", "value.bin", "test-1.bin"]
    assert files.groups_by_name(names) == {
        "val": ["owt_val_000000.bin"],
        "train": ["owt_train_000001.bin", "value.bin"],
        "test": ["test-1.bin"],
    }


def test_gaps_in_numbered_files_are_refused() -> None:
    files.check_numbers(["x_000007.bin", "x_000008.bin", "x_000009.bin"])
    with pytest.raises(DatasetError, match=r"x_000009\.bin follows number 7"):
        files.check_numbers(["x_000007.bin", "x_000009.bin"])


def test_a_file_without_the_other_of_its_pair_is_refused(tmp_path: Path) -> None:
    for name in ("a.ds", "a.ds.index", "b.ds.index"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DatasetError, match=r"b\.ds\.index without b\.ds"):
        files.files_by_folder(str(tmp_path), ".ds", ".ds.index")


def test_a_file_that_has_become_shorter_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(b"\1\0" * 4)
    file = TokenFile(path=str(path), offset=2, num_tokens=3)
    assert files.map_token_file(file, "uint16").tolist() == [1, 1, 1]
    path.write_bytes(b"\1\0" * 3)
    with pytest.raises(DatasetError, match="has become shorter"):
        files.map_token_file(file, "uint16")


@pytest.mark.parametrize(
    ("tokens", "ends", "found"),
    [([1, 9, 2, 9], [2], "append"), ([9, 1, 9, 2], [2], "prepend"), ([1, 2, 3, 4], [2], "none")],
)
def test_the_first_document_says_where_the_end_of_text_is(
    tmp_path: Path, tokens: list[int], ends: list[int], found: str
) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(b"".join(token.to_bytes(2, "little") for token in tokens))
    file = TokenFile(path=str(path), offset=0, num_tokens=len(tokens))
    assert files.eot_policy({"train": [file]}, "uint16", 9, {"train": [ends]}, 1) == found
    assert files.eot_policy({"train": [file]}, "uint16", None, {"train": [ends]}, 1) == "none"


def test_dtypes_are_those_that_are_stored() -> None:
    assert Hints(dtype="uint32").stored_dtype(where="x") == "int32"
    assert Hints().stored_dtype(default="uint16", where="x") == "uint16"
    with pytest.raises(DatasetError, match="x does not record its dtype"):
        Hints().stored_dtype(where="x")
    with pytest.raises(RecipeError, match="unknown dtype 'int8'"):
        Hints(dtype="int8").stored_dtype(where="x")
    table = np.array([3, 10])
    assert [files.fitting_dtype(size, table) for size in (20, 40, 30)] == ["uint16", "int32", None]
    assert files.fitting_dtype(20, None) is None
