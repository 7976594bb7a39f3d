"""The lock of another machine that may be dead is waited for, in every command, and the user is told so first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import make_texts, write_parquet
from tokenmill import records
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import LOCK, Holder

Watch = Callable[[dict[str, Any]], None]
Work = Callable[[Path, Watch], object]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    source = str(write_parquet(tmp_path / "a.parquet", make_texts(20)))
    tokenmill.prepare(source, tmp_path / "data", tokenizer="byte", workers=1)
    tokenmill.export(tmp_path / "data", tmp_path / "exported", to="nanogpt")
    tokenmill.import_(tmp_path / "exported", tmp_path / "imported", layout="nanogpt", eot_id=256)
    return tmp_path


def _prepare(data: Path, watch: Watch) -> object:
    return tokenmill.prepare(
        str(data / "a.parquet"), data / "data", tokenizer="byte", workers=1, restart=True, watch=watch
    )


def _repair(data: Path, watch: Watch) -> object:
    os.unlink(data / "data/train/00000.idx")
    return tokenmill.repair(data / "data", workers=1, watch=watch)


def _export(data: Path, watch: Watch) -> object:
    return tokenmill.export(data / "data", data / "exported", to="nanogpt", restart=True, watch=watch)


def _import(data: Path, watch: Watch) -> object:
    return tokenmill.import_(
        data / "exported", data / "imported", layout="nanogpt", eot_id=256, restart=True, watch=watch
    )


@pytest.mark.parametrize(
    ("output", "work"), [("data", _prepare), ("data", _repair), ("exported", _export), ("imported", _import)]
)
def test_what_is_waited_for_is_said_first(data: Path, output: str, work: Work) -> None:
    folder = Folder(str(data / output))
    holder = Holder(machine="far", process=7, started="1", token="t", host="node-3")
    folder.make(".build")
    folder.write(LOCK, records.seal(holder))
    said: list[str] = []

    def watch(event: dict[str, Any]) -> None:
        if event["kind"] == "waiting":
            said.append(event["message"])
            folder.remove(LOCK)  # its holder ends

    work(data, watch)
    (message,) = said
    assert message.startswith(f"waiting for the lock of {folder.path}, held on node-3 (process 7)")
    assert tokenmill.verify(data / "data", workers=1).ok
