"""Packs save the opening of receipts, and decide nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import tree
from proxy import fault_proxy
from s3 import Bucket
from tokenmill.build import pipeline, workspace
from tokenmill.errors import Interrupted
from tokenmill.storage.base import open_folder
from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.storage.object_store import open_store
from tokenmill.units import receipts
from tokenmill.units.receipts import (
    NO_LIMIT,
    PACKS,
    PIECES,
    RECEIPTS,
    Receipt,
    load_receipts,
    packing,
    read_pack,
    receipt_name,
    write_pack,
)

UNITS = 10
RECIPE: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": 215, "workers": 1}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "PACK_UNITS", 4)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"document {number:02d} of a text, cut into some units\n" for number in range(UNITS * 5)))
    return path


def stopped(source: Path, output: Path | str) -> Folder:
    """A build that was stopped, cleanly, before its commit."""

    def stop(*_: object, **__: object) -> None:
        raise Interrupted("stopped")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(pipeline, "commit", stop)
        tokenmill.prepare(str(source), output, **RECIPE)
    return open_folder(output)


def trusted(folder: Folder) -> list[Receipt]:
    return list(workspace.trusted_receipts(folder, workspace.load_plan(folder)))


def test_a_run_is_packed_when_its_last_unit_is_done(source: Path, tmp_path: Path) -> None:
    folder = stopped(source, tmp_path / "out")
    assert len(folder.names(RECEIPTS)) == UNITS
    assert folder.names(PACKS) == ["000000.jsonl", "000001.jsonl"]
    packed = read_pack(folder, [4, 5, 6, 7])
    assert packed == {unit: folder.read(receipt_name(unit, NO_LIMIT)) for unit in (4, 5, 6, 7)}


def test_a_run_counts_the_units_that_were_done_before(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.make(RECEIPTS)
    for unit in range(8):
        folder.write(receipt_name(unit, NO_LIMIT), b"%d\n" % unit)
    with packing(folder, [0, 3, 5, 6, 7]) as note:
        note(1)
        assert folder.names(PACKS) == []
        note(2)
        assert folder.names(PACKS) == ["000000.jsonl"]
        note(4)
    assert read_pack(folder, [4, 5, 6, 7]) == {unit: b"%d\n" % unit for unit in range(4, 8)}


def test_who_goes_on_opens_no_receipt_that_is_packed(source: Path, tmp_path: Path) -> None:
    opened: list[str] = []

    class Watched(LocalFileSystem):
        def open(self, path: str) -> int:
            opened.append(os.path.basename(path))
            return super().open(path)

    folder = Folder(stopped(source, tmp_path / "out").path, Watched())
    plan = workspace.load_plan(folder)
    opened.clear()
    assert [receipt.unit for receipt in workspace.trusted_receipts(folder, plan)] == list(range(UNITS))
    assert opened == ["clean.json", "000000.jsonl", "000001.jsonl", "000008.json", "000009.json"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"torn")])
def test_a_receipt_that_is_not_as_large_as_its_copy_is_not_replaced_by_it(
    source: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    folder = stopped(source, tmp_path / "out")
    right = {name: folder.read(f"{RECEIPTS}/{name}") for name in folder.names(RECEIPTS)}
    damage(Path(folder.at(receipt_name(5, NO_LIMIT))))
    assert [receipt.unit for receipt in trusted(folder)] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    tokenmill.prepare(str(source), tmp_path / "out", **RECIPE)
    assert {name: folder.read(f"{RECEIPTS}/{name}") for name in folder.names(RECEIPTS)} == right


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.replace(b'"tokens":', b'"tokens":1', 1),
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\n" + data,
        lambda data: b"".join(reversed(data.splitlines(keepends=True))),
        lambda data: b"[" * 100_000,
    ],
)
def test_a_damaged_pack_is_put_away_and_its_receipts_are_read(
    source: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    folder = stopped(source, tmp_path / "out")
    before = trusted(folder)
    pack = Path(folder.at(receipts.pack_name(0)))
    pack.write_bytes(damage(pack.read_bytes()))
    assert trusted(folder) == before
    tokenmill.prepare(str(source), tmp_path / "right", **RECIPE)
    tokenmill.prepare(str(source), tmp_path / "out", **RECIPE)
    assert tree(tmp_path / "out") == tree(tmp_path / "right")


def test_who_distrusts_a_receipt_takes_its_pack_away(source: Path, tmp_path: Path) -> None:
    folder = stopped(source, tmp_path / "out")
    right = folder.read(receipts.pack_name(4))
    with Path(folder.at(f"{PIECES}/000005.train.bin")).open("ab") as file:
        file.write(b"x")
    assert [receipt.unit for receipt in trusted(folder)] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert "000001.jsonl" not in folder.names(PACKS)
    assert any(name.startswith(".build-packs-000001") for name in folder.names(".build/quarantine"))
    again = stopped(source, tmp_path / "out")
    assert again.read(receipts.pack_name(4)) == right


def test_a_finished_dataset_has_no_packs(source: Path, tmp_path: Path) -> None:
    stopped(source, tmp_path / "out")
    tokenmill.prepare(str(source), tmp_path / "out", **RECIPE)
    assert not (tmp_path / "out" / PACKS).exists()


def test_large_receipts_are_not_packed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MAX_PACK_BYTES", 1000)
    assert stopped(source, tmp_path / "out").names(PACKS) == []


def test_a_run_with_a_receipt_that_is_gone_is_not_packed(source: Path, tmp_path: Path) -> None:
    folder = stopped(source, tmp_path / "out")
    folder.remove(receipt_name(2, NO_LIMIT))
    folder.remove(receipts.pack_name(0))
    write_pack(folder, 0)
    assert receipts.pack_name(0).rpartition("/")[2] not in folder.names(PACKS)


def test_a_store_is_asked_for_packs_and_a_list_not_for_each_receipt(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped(source, f"{bucket.url}/out")
    asked: list[str] = []

    def note(method: str, path: str) -> str:
        asked.append(f"{method} {path.rpartition('/')[2]}")
        return ""

    with fault_proxy(bucket.endpoint) as proxy:
        for name, value in bucket.through(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        open_store.cache_clear()
        proxy.choose = note
        found = list(load_receipts(folder, range(8), workspace.load_plan(folder).fingerprint, check_files=False))
        assert [receipt.unit for receipt in found if receipt] == list(range(8))
        assert [ask for ask in asked if "plan" not in ask] == ["GET 000000.jsonl", "GET 000001.jsonl"]
        asked.clear()
        assert len(trusted(folder)) == UNITS
        assert not any(ask.startswith("HEAD") and "0000" in ask for ask in asked)
