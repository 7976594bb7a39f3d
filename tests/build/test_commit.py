from __future__ import annotations

import queue
import shutil
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from test_verify import FILLER, make_dataset

import tokenmill as library
from conftest import tree
from s3 import Bucket
from tokenmill.build import commit, pipeline, workspace
from tokenmill.build.commit import copying_eagerly, group_pieces
from tokenmill.build.plan import Plan
from tokenmill.errors import Interrupted
from tokenmill.storage.local import Folder
from tokenmill.storage.output import Digest
from tokenmill.units.receipts import NO_LIMIT, Receipt, read_receipt, receipt_name

SPLITS = ("train", "val")


@dataclass(frozen=True, slots=True)
class Watched(Folder):
    """A folder on the disk that is treated as a store, and says which shards it got."""

    got: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    links_are_free: ClassVar[bool] = False

    def link(self, name: str, new: str, digest: Digest) -> None:
        Folder.link(self, name, new, digest)
        self.got.put(new)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same build, stopped before its commit."""

    def stop(*_: object, **__: object) -> None:
        raise Interrupted("stopped")

    folder = tmp_path_factory.mktemp("unfinished")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(pipeline, "commit", stop)
        make_dataset(folder)
    return folder / "out"


@pytest.fixture
def folder(unfinished: Path, tmp_path: Path) -> Watched:
    shutil.copytree(unfinished, tmp_path / "out")
    for split in SPLITS:
        (tmp_path / "out" / split).mkdir()
    return Watched(str(tmp_path / "out"))


@pytest.fixture
def plan(folder: Watched) -> Plan:
    return workspace.load_plan(folder)


def shards(folder: Folder) -> dict[str, str]:
    return {name: digest for name, digest in tree(Path(folder.path)).items() if name.startswith(SPLITS)}


def read(folder: Folder, unit: int) -> Receipt:
    return read_receipt(folder, receipt_name(unit, NO_LIMIT))


def test_a_shard_is_copied_as_soon_as_all_units_before_it_are_done(folder: Watched, plan: Plan) -> None:
    done = {0, 2}
    with copying_eagerly(folder, plan, ["train"], done, set()) as look:
        assert {folder.got.get(timeout=20) for _ in range(2)} == {"train/00000.bin", "train/00000.idx"}
        done.add(1)
        look()
        expected = {f"train/{number:05d}{ending}" for number in (1, 2) for ending in (".bin", ".idx")}
        assert {folder.got.get(timeout=20) for _ in range(4)} == expected


def test_whatever_is_copied_early_is_what_stands_in_the_end(folder: Watched, plan: Plan, finished: Path) -> None:
    right = shards(Folder(str(finished)))
    with copying_eagerly(folder, plan, SPLITS, range(99), set()):
        for _ in range(8):
            folder.got.get(timeout=20)
    assert shards(folder).items() <= right.items()


def test_an_open_shard_of_a_single_piece_is_not_taken_for_a_whole_one(folder: Watched, plan: Plan) -> None:
    groups = group_pieces(map(partial(read, folder), range(7)), SPLITS, plan.target_tokens)
    *whole, left = (group.name for group in groups)
    assert left.startswith("val/")
    with copying_eagerly(folder, plan, SPLITS, range(7), linked := set()):
        got = {folder.got.get(timeout=20) for _ in range(2 * len(whole))}
    assert shards(folder).keys() == got == {f"{name}{ending}" for name in whole for ending in (".bin", ".idx")}
    assert linked == set(whole)


def test_a_receipt_that_cannot_be_read_ends_it_without_an_error(folder: Watched, plan: Plan) -> None:
    Path(folder.at(receipt_name(1, NO_LIMIT))).write_bytes(b"torn")
    follower = commit._Follower(folder, plan, SPLITS, range(99), set())
    follower.follow()
    assert {name.split("/")[1][:5] for name in shards(folder)} == {"00000"}


@dataclass(frozen=True, slots=True)
class Slow(Folder):
    """A store that copies until it is released."""

    begun: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    links_are_free: ClassVar[bool] = False

    def link(self, name: str, new: str, digest: Digest) -> None:
        self.begun.set()
        self.released.wait(20)
        self.ended.set()


def test_who_wants_to_stop_does_not_wait_for_copies(folder: Watched, plan: Plan) -> None:
    slow = Slow(folder.path)
    with pytest.raises(KeyboardInterrupt), copying_eagerly(slow, plan, ["train"], range(99), set()):
        assert slow.begun.wait(20)
        raise KeyboardInterrupt
    assert not slow.ended.is_set()
    slow.released.set()


def test_a_disk_links_when_it_commits(folder: Watched, plan: Plan) -> None:
    with copying_eagerly(Folder(folder.path), plan, SPLITS, range(99), set()) as look:
        look()
    assert shards(folder) == {}


def test_what_a_budget_leaves_out_is_never_copied(folder: Watched, plan: Plan) -> None:
    plan.identity["max_tokens"] = 100
    with copying_eagerly(folder, plan, SPLITS, range(99), set()) as look:
        look()
    assert shards(folder) == {}


def test_a_build_into_a_store_copies_before_its_commit(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Interrupted("stopped")

    source = tmp_path / "a.txt"
    source.write_text(f"{FILLER}\n" * 24)
    recipe = {"tokenizer": "byte", "unit_bytes": 256}
    library.prepare(str(source), tmp_path / "out", workers=1, **recipe)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(pipeline, "commit", stop)
        library.prepare(str(source), f"{bucket.url}/out", workers=1, **recipe)
    assert "train/00000.bin" in bucket.tree("out")
    library.prepare(str(source), f"{bucket.url}/out", workers=1, **recipe)
    assert bucket.tree("out") == tree(tmp_path / "out")
