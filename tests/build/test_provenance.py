from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tokenmill.build.provenance import ProvenanceWriter
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
