"""Hugging Face's parquet and Arrow files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made import EOT, documents_of, imported, put

from tokenmill.errors import DatasetError, RecipeError


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


def test_arrow_files_of_save_to_disk_are_imported(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = {"input_ids": [[1, 2, EOT], [3, EOT]], "text": ["a", "b"]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    assert documents_of(imported(tmp_path / "saved", "huggingface", eot_id=EOT)) == {"train": [[1, 2], [3]]}


def test_missing_files_are_known_by_the_names_of_the_others(tmp_path: Path) -> None:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"input_ids": pa.array([[1, 2]], pa.list_(pa.int32()))}), buffer)
    data = buffer.getvalue().to_pybytes()
    path = put(tmp_path / "some", {"train-00000-of-00003.parquet": data, "train-00002-of-00003.parquet": data})
    with pytest.raises(DatasetError, match="2 of 3 files of train: number 1 is missing"):
        imported(path, "huggingface")


def test_parquet_without_ids_is_refused_with_its_columns(tmp_path: Path) -> None:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": ["a"]}), buffer)
    path = put(tmp_path / "text", {"x.parquet": buffer.getvalue().to_pybytes()})
    with pytest.raises(DatasetError, match="text: string") as caught:
        imported(path, "huggingface")
    assert "input_ids" in caught.value.hint


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_column_of_tokens_may_have_another_name(tmp_path: Path, kind: str) -> None:
    """As in the dataset that nanoGPT's script makes: ids and their number."""
    table = pa.table({"ids": pa.array([[1, 2, EOT], [3, EOT]], pa.list_(pa.int64())), "len": [3, 2]})
    held = pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(table, held)
    else:
        with pa.ipc.new_stream(held, table.schema) as writer:
            writer.write_table(table)
    path = put(tmp_path / "saved", {f"train-00000-of-00001.{kind}": held.getvalue().to_pybytes()})
    with pytest.raises(DatasetError, match="ids: list") as caught:
        imported(path, "huggingface", eot_id=EOT)
    assert "name another one with `column`" in caught.value.hint
    assert documents_of(imported(path, "huggingface", eot_id=EOT, column="ids")) == {"train": [[1, 2], [3]]}
    with pytest.raises(DatasetError, match="len: int64"):
        imported(path, "huggingface", eot_id=EOT, column="len")
    with pytest.raises(RecipeError, match="`column` does not apply to nanogpt"):
        imported(path, "nanogpt", column="ids")
