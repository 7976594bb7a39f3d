"""A folder in an object store behaves like one on a disk, by the store's own rules. Against a real server."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy import Proxy, fault_proxy
from s3 import Bucket
from tokenmill.errors import DatasetError, DeterminismError, LockedError, ObjectChangedError, StorageError
from tokenmill.storage import object_folder, object_store
from tokenmill.storage.base import from_record, open_folder
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import LOCK, locked
from tokenmill.storage.memory_maps import fast_digest
from tokenmill.storage.object_folder import ObjectFolder
from tokenmill.storage.object_store import WHOLE_BYTES, Store
from tokenmill.storage.output import Digest
from tokenmill.storage.ranged_reader import RANGE_BYTES, RemoteFile


@pytest.fixture
def folder(bucket: Bucket) -> Folder:
    return open_folder(f"{bucket.url}/out")


def digest_of(data: bytes) -> Digest:
    return Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def publish(folder: Folder, name: str, *blocks: bytes, committed: bool = False) -> Digest:
    output = folder.create(name)
    for block in blocks:
        output.write(block)
    return folder.publish([output], committed=lambda: committed)[name]


def lead(monkeypatch: pytest.MonkeyPatch, bucket: Bucket, proxy: Proxy) -> None:
    """Go to the bucket by the proxy from here on."""
    for name, value in bucket.through(proxy.endpoint).items():
        monkeypatch.setenv(name, value)


def spool(folder: Folder) -> list[str]:
    assert isinstance(folder, ObjectFolder)
    return os.listdir(folder.spool)


def test_a_file_grows_on_this_machine_and_appears_whole(folder: Folder, bucket: Bucket) -> None:
    output = folder.create("train/00000.bin")
    output.write(b"some ")
    assert bucket.listed() == []
    output.write(b"tokens")
    assert folder.publish([output]) == {"train/00000.bin": digest_of(b"some tokens")}
    assert bucket.get("out/train/00000.bin") == b"some tokens"
    assert spool(folder) == []


def test_a_large_file_goes_in_parts_and_comes_back_in_ranges(folder: Folder, bucket: Bucket) -> None:
    data = os.urandom(WHOLE_BYTES + 12345)
    assert publish(folder, "big.bin", data) == digest_of(data)
    assert bucket.is_in_parts("out/big.bin")
    assert folder.digest("big.bin") == fast_digest(folder, "big.bin") == digest_of(data)
    assert b"".join(folder.blocks("big.bin")) == data
    assert folder.part("big.bin", 0, 10) == data[:10]


def test_the_same_bytes_again_are_success(folder: Folder) -> None:
    assert publish(folder, "a", b"x") == publish(folder, "a", b"x", committed=True)
    assert folder.write("b", b"x") == folder.write("b", b"x", committed=lambda: True)


def test_a_leftover_of_other_bytes_goes_to_quarantine(folder: Folder, bucket: Bucket) -> None:
    publish(folder, "a", b"old")
    folder.write("b", b"old")
    publish(folder, "a", b"new")
    folder.write("b", b"new")
    assert (folder.read("a"), folder.read("b")) == (b"new", b"new")
    kept = bucket.listed("out/.build/quarantine/")
    assert [bucket.get(key) for key in kept] == [b"old", b"old"]


def test_other_bytes_under_a_receipt_stop_the_build(folder: Folder) -> None:
    publish(folder, "a", b"old")
    folder.write("b", b"old")
    with pytest.raises(DeterminismError, match="exists with other bytes"):
        publish(folder, "a", b"new", committed=True)
    with pytest.raises(DeterminismError, match="exists with other bytes"):
        folder.write("b", b"new", committed=lambda: True)
    assert (folder.read("a"), folder.read("b")) == (b"old", b"old")


def test_many_questions_are_asked_at_once_and_answered_in_order(folder: Folder) -> None:
    together = threading.Barrier(3)

    def ask(number: int) -> int:
        together.wait(timeout=20)
        return -number

    assert list(folder.each(ask, range(9), ahead=3)) == [-number for number in range(9)]


def test_questions_are_asked_no_more_than_so_far_ahead_and_end_with_the_first_error(folder: Folder) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(9):
            taken.append(number)
            yield number

    answers = folder.each(lambda number: 6 // (3 - number), items(), ahead=2)
    assert [next(answers) for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(answers)
    assert taken == [0, 1, 2, 3, 4]


def test_a_link_is_a_copy_inside_of_the_store(folder: Folder, bucket: Bucket) -> None:
    piece = (".build/pieces/a.bin", publish(folder, ".build/pieces/a.bin", b"tokens"))
    folder.link_all([(piece[0], "train/00000.bin", piece[1]), (piece[0], "train/00001.bin", piece[1])])
    folder.link(piece[0], "train/00000.bin", piece[1])
    assert bucket.get("out/train/00000.bin") == bucket.get("out/train/00001.bin") == b"tokens"
    bucket.put("out/train/00000.bin", b"tokenz")
    folder.link(piece[0], "train/00000.bin", piece[1])
    assert folder.read("train/00000.bin") == b"tokens"
    with pytest.raises(StorageError, match="is gone"):
        folder.link("nothing", "x", piece[1])


def test_a_copy_that_the_store_makes_in_its_own_time_is_waited_for(
    folder: Folder, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Azure does with large ones: the copy is empty at first."""
    monkeypatch.setattr(object_store, "_COPYING_LATER", (bucket.url,))
    piece = (".build/pieces/a.bin", publish(folder, ".build/pieces/a.bin", b"tokens"))
    copied = Store.copy

    def copy(self: Store, key: str, new: str) -> None:
        bucket.put(new, b"")
        threading.Timer(0.3, copied, (self, key, new)).start()

    monkeypatch.setattr(Store, "copy", copy)
    folder.link(piece[0], "train/00000.bin", piece[1])
    assert folder.read("train/00000.bin") == b"tokens"


def test_what_has_been_empty_for_long_is_not_waited_for(
    folder: Folder, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = (".build/pieces/a.bin", publish(folder, ".build/pieces/a.bin", b"tokens"))
    bucket.put("out/train/00000.bin", b"")
    monkeypatch.setattr(object_store, "_COPYING_LATER", (bucket.url,))
    monkeypatch.setattr(object_store, "_seconds_since", lambda found: 1e6 if found.size == 0 else 0)
    folder.link(piece[0], "train/00000.bin", piece[1])
    assert folder.read("train/00000.bin") == b"tokens"


def test_a_copy_that_cannot_be_asked_for_yet_is_waited_for(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_COPYING_LATER", (bucket.url,))
    with fault_proxy(bucket.endpoint) as proxy:
        lead(monkeypatch, bucket, proxy)
        folder = open_folder(f"{bucket.url}/out")
        piece = ("a.bin", publish(folder, "a.bin", b"tokens"))
        faults = iter(["409"] * 9)
        proxy.choose = lambda method, path: next(faults, "") if method == "HEAD" else ""
        monkeypatch.setattr(object_store, "_POLL_SECONDS", 0.01)
        folder.link(piece[0], "b.bin", piece[1])
        assert proxy.injected.total() == 9
    assert bucket.get("out/b.bin") == b"tokens"


def test_what_is_gone_already_does_not_keep_the_others_from_being_removed(folder: Folder, bucket: Bucket) -> None:
    names = [f"{number:02}" for number in range(40)]
    for name in names:
        bucket.put(f"out/{name}", b"x")
    bucket.delete("out/00")
    folder.remove_all(names)
    assert bucket.listed() == []


def test_an_object_is_listed_with_the_etag_that_it_is_read_by(folder: Folder) -> None:
    publish(folder, "a b/ü+%41&'.bin", b"tokens")
    assert isinstance(folder, ObjectFolder)
    (listed,) = folder.store.under("out")
    assert listed.key == "out/a b/ü+%41&'.bin"
    found = folder.store.find(listed.key)
    assert found is not None and found.etag == listed.etag
    assert bytes(folder.store.fetch(listed.key, 0, 6, listed.etag)) == b"tokens"


def test_names_sizes_and_kinds_are_those_of_a_folder(folder: Folder) -> None:
    assert folder.stat("") is None
    assert folder.names() == []
    for name in ("dataset.json", ".build/plan.json", ".build/receipts/000000.json"):
        folder.write(name, b"12345")
    assert folder.names() == [".build", "dataset.json"]
    assert folder.names(".build") == ["plan.json", "receipts"]
    assert folder.sizes(".build/receipts") == {"000000.json": 5}
    assert folder.exists(".build")
    assert not folder.exists(".buil")
    found = folder.stat("dataset.json")
    assert found is not None and found.is_file and found.size == 5
    folder.remove_tree(".build")
    folder.remove("nothing")
    assert folder.names() == ["dataset.json"]


def test_what_is_missing_or_too_large_is_a_dataset_error(folder: Folder) -> None:
    folder.write("a", b"12345")
    for ask in (lambda: folder.read("b"), lambda: folder.part("b", 0, 1), lambda: list(folder.blocks("b"))):
        with pytest.raises(DatasetError, match=r"://.*/out/b is missing"):
            ask()
    with pytest.raises(DatasetError, match="5 bytes, too many"):
        folder.read("a", max_bytes=4)


def test_a_bucket_that_is_not_there_is_named(bucket: Bucket) -> None:
    nowhere = open_folder(f"{bucket.url}-nowhere/out")
    with pytest.raises(StorageError, match=f"{bucket.url}-nowhere"):
        nowhere.replace("a", b"x")


def test_one_builder_holds_the_lock_and_shows_that_it_lives(folder: Folder) -> None:
    with locked(folder):
        with pytest.raises(LockedError, match="is being built by process"), locked(folder):
            raise AssertionError("two have it")
        before = folder.read(LOCK)
        folder.touch(LOCK)
        assert folder.read(LOCK) == before
    assert not folder.exists(LOCK)
    folder.touch(LOCK)
    assert not folder.exists(LOCK), "a heartbeat brings no lock back"


def test_the_log_goes_on_where_the_last_one_ended(folder: Folder) -> None:
    for number in range(2):
        with folder.open_log(".build/events.jsonl") as log:
            log.add({"number": number})
    assert folder.read(".build/events.jsonl") == b'{"number":0}\n{"number":1}\n'


def test_of_the_log_of_a_store_the_last_megabytes_are_kept(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_folder, "_KEPT_BYTES", 100)
    monkeypatch.setattr(object_folder, "_MAX_LOG_BYTES", 200)
    folder = open_folder(f"{bucket.url}/out")
    for first in (0, 50):
        with folder.open_log("events.jsonl") as events:
            for number in range(first, first + 50):
                events.add({"number": number})
    lines = folder.read("events.jsonl").splitlines()
    assert lines == [b'{"number":%d}' % number for number in range(100 - len(lines), 100)]
    assert 100 <= len(b"\n".join(lines)) <= 200


def test_a_folder_goes_to_another_process_as_plain_data(folder: Folder, tmp_path: Path) -> None:
    assert from_record(folder.to_record()) == folder
    assert from_record(Folder(str(tmp_path)).to_record()) == Folder(str(tmp_path))


def test_a_store_with_conditions_takes_more_than_one_writer(folder: Folder, bucket: Bucket) -> None:
    probed, note = folder.ready()
    assert (probed, note) == (folder, "")
    assert bucket.listed() == [], "the probe leaves nothing"


def test_reads_at_any_place_give_the_bytes_that_are_there(folder: Folder) -> None:
    data = os.urandom(3 * RANGE_BYTES + 77)
    publish(folder, "a", data)
    assert isinstance(folder, ObjectFolder)
    found = folder.store.find(folder.key("a"))
    assert found is not None
    with RemoteFile(folder.store, found.key, found.size, found.etag) as file:
        for at, size in [(0, 10), (10, 100), (110, RANGE_BYTES), (5, 5), (len(data) - 3, 10), (len(data), 4), (200, 0)]:
            file.seek(at)
            assert file.read(size) == data[at : at + size], (at, size)
        file.seek(0)
        parts = [file.read(1_000_003) for _ in range(len(data) // 1_000_003 + 1)]
        assert b"".join(parts) == data
        file.seek(-7, 2)
        buffer = bytearray(10)
        assert file.readinto(buffer) == 7
        assert buffer[:7] == data[-7:]


@pytest.mark.filterwarnings("ignore:.*fork")  # newer Pythons warn of it, and trainers do it
def test_a_forked_process_that_reads_an_object_is_told_and_does_not_hang(folder: Folder) -> None:
    publish(folder, "a", bytes(1 << 20))
    assert isinstance(folder, ObjectFolder)
    found = folder.store.find(folder.key("a"))
    assert found is not None
    with RemoteFile(folder.store, found.key, found.size, found.etag) as file:
        assert file.read(4) == bytes(4)
        pid = os.fork()
        if pid == 0:
            file.seek(900_000)
            try:
                file.read(10)
            except StorageError as error:
                os._exit(7 if "forked" in error.message else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_an_object_that_is_replaced_while_it_is_read_is_noticed(folder: Folder, bucket: Bucket) -> None:
    publish(folder, "a", bytes(2 * RANGE_BYTES))
    assert isinstance(folder, ObjectFolder)
    found = folder.store.find(folder.key("a"))
    assert found is not None
    with RemoteFile(folder.store, found.key, found.size, found.etag) as file:
        assert file.read(4) == bytes(4)
        bucket.put("out/a", b"x" * found.size)
        file.seek(RANGE_BYTES)
        with pytest.raises(ObjectChangedError):
            file.read(4)


@pytest.fixture
def careless(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """A folder in a store that knows no conditions."""
    with fault_proxy(bucket.endpoint) as proxy:
        proxy.ignores_conditions = True
        lead(monkeypatch, bucket, proxy)
        yield open_folder(f"{bucket.url}/out")


def test_a_store_without_conditions_gets_one_writer_and_a_clear_message(careless: Folder, bucket: Bucket) -> None:
    folder, note = careless.ready()
    assert "ignores conditional puts" in note
    assert isinstance(folder, ObjectFolder) and not folder.conditional
    folder.write("a", b"first")
    with pytest.raises(DeterminismError):
        folder.write("a", b"second", committed=lambda: True)
    assert bucket.get("out/a") == b"first"
    with locked(folder), pytest.raises(LockedError), locked(folder):
        raise AssertionError("two have it")


@pytest.mark.parametrize("fault", ["lost", "409", "500", "reset"])
def test_a_receipt_whose_answer_is_lost_is_looked_for(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with fault_proxy(bucket.endpoint) as proxy:
        lead(monkeypatch, bucket, proxy)
        faults = iter([fault])
        proxy.choose = lambda method, path: next(faults, "") if method == "PUT" else ""
        folder = open_folder(f"{bucket.url}/out")
        assert folder.write("receipt", b"done", committed=lambda: True) == digest_of(b"done")
        assert proxy.injected.total() == 1
    assert bucket.get("out/receipt") == b"done"
    assert bucket.listed("out/") == ["out/receipt"]
