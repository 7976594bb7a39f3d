from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tokenmill.errors import StorageError
from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.storage.output import EventLog


def test_events_are_lines_behind_those_that_were_there(tmp_path: Path) -> None:
    for number in range(2):
        with EventLog(Folder(str(tmp_path)), "events.jsonl") as log:
            log.add({"kind": "start", "number": number})
    assert (tmp_path / "events.jsonl").read_text() == '{"kind":"start","number":0}\n{"kind":"start","number":1}\n'


def test_a_drive_that_fails_under_the_log_does_not_fail_the_build(tmp_path: Path) -> None:
    class Failing(LocalFileSystem):
        def write(self, fd: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "no space")

        def close(self, fd: int) -> None:
            super().close(fd)
            raise OSError(errno.EIO, "input/output error")

    with EventLog(Folder(str(tmp_path), Failing()), "events.jsonl") as log:
        log.add({"kind": "start"})


def test_a_log_that_cannot_be_opened_is_a_typed_error(tmp_path: Path) -> None:
    class Failing(LocalFileSystem):
        def append(self, path: str) -> int:
            raise OSError(errno.EIO, "input/output error")

    with pytest.raises(StorageError), EventLog(Folder(str(tmp_path), Failing()), "events.jsonl"):
        pytest.fail("it was opened")
