from __future__ import annotations

import errno
import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as api
from conftest import make_texts, write_jsonl
from s3 import Bucket
from tokenmill.build import commit
from tokenmill.dataset.provenance import MAX_PENDING_TABLES, ProvenanceWriter
from tokenmill.errors import DamagedPieceError, DatasetError, DiskFullError, RecipeError
from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.storage.output import Digest
from tokenmill.units.receipts import NO_LIMIT, PIECES, Receipt
from tokenmill.units.run import rows


def test_a_drive_that_is_full_at_the_first_byte_leaves_no_file_behind(tmp_path: Path) -> None:
    class Full(LocalFileSystem):
        def write(self, fd: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(DiskFullError):
        ProvenanceWriter(Folder(str(tmp_path), Full()).create("x.parquet"))
    assert os.listdir(tmp_path) == []


def one_row(number: int) -> pa.Table:
    return rows(
        names=[f"source-{number // 100}"],
        first_source=0,
        sources=np.zeros(1, np.int32),
        positions=np.array([number]),
        splits=np.array([number % 2], np.int8),
        split_names=("train", "val"),
        tokens=np.array([number]),
        skips=(),
    )


def test_a_file_is_the_same_however_its_rows_came_in(tmp_path: Path) -> None:
    count = 2 * MAX_PENDING_TABLES + 3
    parts = [one_row(number) for number in range(count)]
    folder = Folder(str(tmp_path))
    for name, tables in {"one by one": parts, "at once": [pa.concat_tables(parts)]}.items():
        writer = ProvenanceWriter(folder.create(name))
        for table in tables:
            writer.write(table)
        folder.publish([writer.finish()])
    assert folder.read("one by one") == folder.read("at once")
    assert pq.read_table(tmp_path / "at once")["position"].to_pylist() == list(range(count))


def unit(folder: Folder, number: int) -> Receipt:
    """A unit of one document, with its provenance."""
    name = f"{PIECES}/{number:06d}.provenance.parquet"
    writer = ProvenanceWriter(folder.create(name))
    writer.write(one_row(number))
    return Receipt(
        fingerprint="",
        unit=number,
        token_limit=NO_LIMIT,
        documents_read=1,
        dropped={},
        pieces={},
        sources=(),
        read_sum="",
        written_sum="",
        files=folder.publish([writer.finish()]),
    )


class Joined:
    """The provenance of some units, two to a file; `threads` are those that read it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, *, units: int) -> None:
        threads: set[str] = set()

        class Watched(LocalFileSystem):
            def open(self, path: str) -> int:
                threads.add(threading.current_thread().name)
                return super().open(path)

        monkeypatch.setattr(commit, "PROVENANCE_UNITS", 2)
        self.monkeypatch, self.folder, self.threads = monkeypatch, Folder(str(path), Watched()), threads
        self.folder.make(PIECES)
        self.units = [unit(self.folder, number) for number in range(units)]

    def files(self, *, cores: int) -> dict[str, Digest]:
        self.monkeypatch.setattr(commit, "num_cores", lambda: cores)
        return commit._commit_provenance(self.folder, self.units, {})


def test_files_that_are_joined_side_by_side_are_those_of_one_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, three = (Joined(monkeypatch, tmp_path / name, units=13) for name in ("1", "3"))
    found = three.files(cores=3)
    assert list(found.items()) == list(one.files(cores=1).items())
    assert list(found) == [f"provenance/{number:05d}.parquet" for number in range(7)]
    assert len(three.threads) > 1
    tables = [pq.read_table(tmp_path / "3" / name, columns=["position"]) for name in found]
    assert pa.concat_tables(tables)["position"].to_pylist() == list(range(13))


def test_a_single_file_is_joined_by_the_calling_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    joined = Joined(monkeypatch, tmp_path, units=2)
    joined.files(cores=3)
    assert joined.threads == {threading.current_thread().name}


def test_damage_in_one_of_several_files_is_told_and_leaves_no_temp_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    joined = Joined(monkeypatch, tmp_path, units=8)
    (tmp_path / joined.units[5].provenance).write_bytes(b"other bytes")
    with pytest.raises(DamagedPieceError, match="000005"):
        joined.files(cores=3)
    assert all(name.endswith(".parquet") for name in os.listdir(tmp_path / "provenance"))


def test_what_is_joined_beside_a_failure_is_not_joined_to_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, failed, seen = threading.Event(), threading.Event(), []

    class Telling(threading.Event):
        def set(self) -> None:
            super().set()
            failed.set()

    def check(sha: object, name: str, wanted: Digest) -> None:
        if "000000" in name:
            begun.wait(5)
            raise DamagedPieceError(name, hint="")
        seen.append(name)
        begun.set()
        failed.wait(5)

    joined = Joined(monkeypatch, tmp_path, units=4)
    monkeypatch.setattr(commit, "threading", SimpleNamespace(Event=Telling))
    monkeypatch.setattr(commit, "_check_bytes", check)
    with pytest.raises(DamagedPieceError):
        joined.files(cores=2)
    assert seen == [joined.units[2].provenance]


def test_documents_of_a_remote_dataset_are_found_in_its_cache(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    path = api.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", workers=1).output
    api.push(path, f"{bucket.url}/out")
    here, there = api.open(path)["train"], api.open(f"{bucket.url}/out")
    assert there["train"].sources(range(21)) == here.sources(range(21))
    assert there.find("a.jsonl", here.source(7).position).document == 7


def test_another_process_gets_no_copy_of_the_manifest_and_finds_sources_all_the_same(tmp_path: Path) -> None:
    for number in range(50):
        write_jsonl(tmp_path / f"{number:03d}.jsonl", [f"text {number}"])
    path = api.prepare(tmp_path, tmp_path / "out", tokenizer="byte", workers=1).output
    split = api.open(path)["train"]
    sent = pickle.dumps(split)
    assert b"049.jsonl" not in sent
    assert pickle.loads(sent).source(7) == split.source(7)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    path = Path(api.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", workers=1).output)
    (path / "provenance/00000.parquet").write_bytes(b"PAR1 rubbish PAR1")
    with pytest.raises(DatasetError, match=r"provenance/00000\.parquet cannot be read") as found:
        api.open(path)["train"].source(0)
    assert "tokenmill repair" in found.value.hint


def test_a_source_may_be_named_by_the_end_of_its_path(tmp_path: Path) -> None:
    for name in ("x/a.jsonl", "y/a.jsonl", "y/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [name])
    dataset = api.open(api.prepare(tmp_path, tmp_path / "out", tokenizer="byte", workers=1).output)
    assert dataset["train"].text(dataset.find("b.jsonl", 0).document or 0) == "y/b.jsonl"
    assert dataset["train"].text(dataset.find("x/a.jsonl", 0).document or 0) == "x/a.jsonl"
    with pytest.raises(RecipeError, match=r"a.jsonl is one of x/a.jsonl, y/a.jsonl"):
        dataset.find("a.jsonl", 0)
