"""What commands print at 60, 80 and 120 columns. `UPDATE_SNAPSHOTS=1` writes the snapshots again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from conftest import Command, write_jsonl

SNAPSHOTS = Path(__file__).parent / "snapshots"
# What differs from run to run, or from machine to machine.
CHANGING = [
    (r"  (disk|memory|time) .*\n(?: {13}.*\n)*", r"  \1 ...\n"),
    (r"(?<=tokens/)s|\S+ tokens/s", "N tokens/s"),
    (r"\b\d+(\.\d)? ?s\b", "Ns"),
    (r"\d+(\.\d+)? KB( hashed|(?=\n  kind))", r"N KB\2"),  # provenance depends on the version of pyarrow
    (r"in Ns(, N tokens/s)?", "in Ns"),
]
TEXTS = [
    "The mill turns raw text into tokens.",
    "A line that is longer than any terminal: " + "and so on, " * 20 + "until it ends.\n" + "\n".join("abcdefghijk"),
    *(f"document {number} of the corpus" for number in range(40)),
]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_what_is_printed_fits_and_stays_as_it_is(tokenmill: Command, tmp_path: Path, columns: int) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "shards").mkdir()
    np.save(tmp_path / "shards/train_000000.npy", np.arange(64, dtype=np.uint16))
    recipe = ("a.jsonl", "-o", "out", "--tokenizer", "byte", "--split", "val=0.1,validation_of_the_web=0.2")
    shown = []
    for line in (
        ("plan", *recipe, "--layout", "mds", "--sample", "documents:90%"),
        ("prepare", *recipe, "--layout", "mds", "-q"),
        ("prepare", *recipe, "--layout", "mds", "--restart", "--sample", "documents:90%"),
        ("inspect", "out", "--documents", "2"),
        ("verify", "out"),
        ("import", "out/mds", "--from", "mds", "-o", "back"),
        ("inspect", "back", "--documents", "1"),
        ("consolidate", "--data_root", "shards", "--seq_len", "8"),
    ):
        done = tokenmill(*line, code=None, COLUMNS=str(columns))
        shown += [f"$ tokenmill {' '.join(line)}", done.stdout + done.stderr]
    (tmp_path / "out/train/00000.bin").write_bytes(b"damaged")
    failed = tokenmill("verify", "out", code=4, COLUMNS=str(columns))
    shown += ["$ tokenmill verify out (damaged)", failed.stdout]
    text = "\n".join(shown).replace(f"{tmp_path}/", "").replace(str(tmp_path), ".")
    for pattern, constant in CHANGING:
        text = re.sub(pattern, constant, text)
    path = SNAPSHOTS / f"terminal-{columns}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
