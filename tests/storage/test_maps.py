"""Maps of files: of plain ones alone, and nothing that would have to be waited for."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tokenmill.storage.memory_maps import map_file, open_plain


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a pipe": lambda path: (os.mkfifo(f"{path}.pipe"), os.symlink(f"{path}.pipe", path)),
    "device": lambda path: os.symlink("/dev/zero", path),
    "folder": os.mkdir,
    "socket": _make_socket,
}


@pytest.fixture
def seconds() -> Iterator[None]:
    """Some seconds for a test that might wait for ever."""

    def end(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.usefixtures("seconds")
def test_what_is_no_plain_file_is_an_error_at_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ODD[kind](Path("odd"))
    for attempt in (lambda: map_file("odd", np.uint8), lambda: open_plain("odd")):
        with pytest.raises(OSError):
            attempt()


def test_a_file_that_a_link_leads_to_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"abc")
    os.symlink(tmp_path / "there", tmp_path / "here")
    assert map_file(str(tmp_path / "here"), np.uint8).tobytes() == b"abc"
    with open(tmp_path / "here", "rb", opener=open_plain) as file:
        assert file.read() == b"abc"
