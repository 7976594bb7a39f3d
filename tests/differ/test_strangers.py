"""The quick form: what was wrong once, and some of all commands on some of all oddities."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from differ.seeding import Bug, is_caught

from differ import hostile as lab


def test_what_was_wrong_once_is_right() -> None:
    row = lab.points(
        ("import", "a pipe", "train/00000.bin", "mixture"),
        ("layout megatron", "a link to a pipe", "val_text_document.idx", "import"),
        ("layout templar", "a pipe", "tokens.bin", "inspect"),
        ("shards", "a link to a pipe", "train_000000.npy", "consolidate"),
        ("dataset", "an unreadable file", "train/00000.bin", "loader, best_fit"),
        ("dataset", "a socket", ".build/kept", "repair without a manifest"),
        ("dataset", "a huge file", ".build/plan.json", "prepare --scratch"),
        ("dataset", "a link to a stranger's file", ".build/rejects", lab.DAMAGED),
        ("dataset", "a socket", ".build/rejects", lab.DAMAGED),
        ("dataset", "a link to a device", ".build/pieces", lab.DAMAGED),
        ("unfinished", "a huge file", ".build/tokenizer", "prepare"),
        ("import", "facts.content.* is 'train'", ".build/receipts/train-00000.json", "import again"),
        ("import", "files.train/00000.bin.* is 'train'", ".build/receipts/train-00000.json", "import again"),
        ("unfinished", r"sources.1.compression is '\x1b[31mred'", ".build/plan.json", "repair"),
    )
    assert not row.wrong


def test_a_folder_on_another_disk_is_read_wherever_it_is() -> None:
    readers = ("verify", "documents", "loader", "loader, padded", "inspect", "export to nanogpt", "verify --source")
    linked = [("dataset", "a link to where it is", "train", reader) for reader in readers]
    assert not lab.points(*linked).wrong


@pytest.mark.parametrize("subject", ["dataset", "unfinished"])
def test_a_strangers_folder_stays_as_it_is(subject: str) -> None:
    row = lab.hostile(subject, 16)
    assert row.tried == 16 and not row.wrong and not row.hangs


@pytest.mark.parametrize("bug", lab.BUGS, ids=lambda bug: bug.name)
def test_the_lab_notices(bug: Bug) -> None:
    assert is_caught(bug)
