"""Files that live as long as a with block."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tokenmill.storage.output import temporary_file


def test_a_temporary_file_is_there_as_long_as_its_block_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with temporary_file(b"content", suffix=".x") as path:
        assert Path(path).read_bytes() == b"content"
        assert Path(path).parent == tmp_path and path.endswith(".x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files without a name")
def test_nothing_is_left_of_a_temporary_file_whose_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_file(b"content", suffix=".x") as path:
        assert Path(path).read_bytes() == b"content"
        assert list(tmp_path.iterdir()) == []  # what is not in a folder goes with the process
    assert not os.path.exists(path)
