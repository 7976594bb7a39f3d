"""A receipt is believed if it is whole and speaks of its own unit, and never else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill import records
from tokenmill.dataset.manifest import Shard, SourceTotal
from tokenmill.errors import DatasetError
from tokenmill.storage.local import Folder
from tokenmill.storage.output import Digest
from tokenmill.units.receipts import PIECES, RECEIPTS, REJECTS, Receipt, load_receipt, load_receipts, read_receipt

NAME = f"{RECEIPTS}/000003.json"
SOME = Digest(bytes=10, sha256="0" * 64)
SUM = "0" * 32


def example() -> Receipt:
    piece = Shard(name=f"{PIECES}/000003.train", tokens=5, documents=1, bin=SOME, idx=SOME)
    return Receipt(
        fingerprint="f" * 64,
        unit=3,
        token_limit=-1,
        documents_read=2,
        dropped={"empty": 1},
        pieces={"train": piece},
        sources=(SourceTotal(name="a", bytes=1, documents=1, text_sum=SUM),),
        read_sum=SUM,
        written_sum=SUM,
        files={f"{PIECES}/000003.provenance.parquet": SOME, f"{REJECTS}/000003.jsonl": SOME},
    )


def put(path: Path, receipt: Receipt) -> Folder:
    (path / RECEIPTS).mkdir(parents=True)
    (path / NAME).write_bytes(records.seal(receipt))
    return Folder(str(path))


def reseal(folder: Folder, old: bytes, new: bytes) -> None:
    """Change the text of the receipt, and seal it again."""
    body = records.opened(folder.read(NAME), where=NAME).replace(old, new)
    seal = hashlib.sha256(body).hexdigest().encode()
    Path(folder.at(NAME)).write_bytes(body[:-1] + b',"seal":"' + seal + b'"}\n')


def test_a_receipt_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_receipt(put(tmp_path, example()), NAME) == example()


def test_without_a_look_only_the_bad_documents_must_be_there_which_no_commit_asks_for(tmp_path: Path) -> None:
    folder = put(tmp_path, example())
    assert list(load_receipts(folder, [3], "f" * 64, check_files=False)) == [None]
    (tmp_path / REJECTS).mkdir()
    (tmp_path / REJECTS / "000003.jsonl").write_bytes(b"x" * SOME.bytes)
    assert list(load_receipts(folder, [3], "f" * 64, check_files=False)) == [example()]
    assert list(load_receipts(folder, [3], "f" * 64)) == [None]


@pytest.mark.parametrize(
    "change",
    [
        lambda good: replace(good, pieces={"train": replace(good.pieces["train"], name="../../etc/passwd")}),
        lambda good: replace(good, pieces={"train": replace(good.pieces["train"], name=f"{PIECES}/000004.train")}),
        lambda good: replace(good, pieces={"..": replace(good.pieces["train"], name=f"{PIECES}/000003...")}),
        lambda good: replace(good, files={**good.files, "/etc/passwd": SOME}),
        lambda good: replace(good, files={}),
        lambda good: replace(good, read_sum="<|endoftext|>", written_sum="<|endoftext|>"),
        lambda good: replace(good, sources=(replace(good.sources[0], text_sum="x"),)),
        lambda good: replace(good, documents_read=0, dropped={"empty": -1}),
        lambda good: replace(good, sources=(replace(good.sources[0], documents=1 << 63),)),
        lambda good: replace(good, sources=(replace(good.sources[0], documents=1 << 80),)),
    ],
)
def test_a_sealed_receipt_that_is_not_true_is_refused_and_quarantined(
    tmp_path: Path, change: Callable[[Receipt], Receipt]
) -> None:
    folder = put(tmp_path, change(example()))
    with pytest.raises(DatasetError, match=r"000003\.json"):
        read_receipt(folder, NAME)
    assert load_receipt(folder, 3, -1, "f" * 64, rehash=False) is None
    assert not folder.exists(NAME)


@pytest.mark.parametrize(
    ("found", "put_there"),
    [
        (b'"unit":3', b'"unit":3,"unit":3'),
        (b'"unit":3', b'"unit":3,"more":1'),
        (b'"unit":3', b'"unit":3.0'),
        (b'"unit":3,', b""),
        (b'"name":"a"', b'"name":"\\ud800"'),
    ],
)
def test_a_seal_around_what_is_no_receipt_does_not_make_it_one(tmp_path: Path, found: bytes, put_there: bytes) -> None:
    folder = put(tmp_path, example())
    reseal(folder, found, put_there)
    with pytest.raises(DatasetError, match=r"000003\.json"):
        read_receipt(folder, NAME)


def test_a_text_that_is_right_but_not_canonical_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path, example())
    reseal(folder, b'"unit":3', b'"unit": 3')
    with pytest.raises(DatasetError, match="not canonical JSON"):
        read_receipt(folder, NAME)
