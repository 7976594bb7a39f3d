from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokenmill.build.provenance import TABLES_HELD, ProvenanceWriter, rows
from tokenmill.errors import DiskFullError
from tokenmill.storage import Folder
from tokenmill.storage.fs import LocalFileSystem


def test_a_drive_that_is_full_at_the_first_byte_leaves_no_file_behind(tmp_path: Path) -> None:
    class Full(LocalFileSystem):
        def write(self, fd: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(DiskFullError):
        ProvenanceWriter(Folder(str(tmp_path), Full()).create("x.parquet"))
    assert os.listdir(tmp_path) == []


def test_a_file_is_the_same_however_its_rows_came_in(tmp_path: Path) -> None:
    count = 2 * TABLES_HELD + 3
    parts = [
        rows(
            names=[f"source-{number // 100}"],
            first_source=0,
            sources=np.zeros(1, np.int32),
            positions=np.array([number]),
            splits=np.array([number % 2], np.int8),
            split_names=("train", "val"),
            tokens=np.array([number]),
            skips=(),
        )
        for number in range(count)
    ]
    folder = Folder(str(tmp_path))
    for name, tables in {"one by one": parts, "at once": [pa.concat_tables(parts)]}.items():
        writer = ProvenanceWriter(folder.create(name))
        for table in tables:
            writer.write(table)
        folder.publish([writer.finish()])
    assert folder.read("one by one") == folder.read("at once")
    assert pq.read_table(tmp_path / "at once")["position"].to_pylist() == list(range(count))
