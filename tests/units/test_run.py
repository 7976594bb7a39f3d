"""A unit writes its pieces, their provenance and last its receipt: the same bytes whenever and wherever it is run."""

from __future__ import annotations

import errno
import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from conftest import make_texts, tree, write_jsonl
from tokenmill.build.plan import make_task
from tokenmill.build.resolve import make_config, resolve_build
from tokenmill.errors import DiskFullError
from tokenmill.recipe import make_recipe
from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.storage.output import is_temp
from tokenmill.tokenizers.engine import open_engine
from tokenmill.units.receipts import NO_LIMIT, PIECES, RECEIPTS, REJECTS, Receipt, read_receipt
from tokenmill.units.run import run_unit

TEXTS = make_texts(300, seed=4)
EOT = 256


def write_fat(path: Path) -> None:
    """Lines of which a seventh is text."""
    path.write_text("".join(json.dumps({"text": text, "html": 6 * text}) + "\n" for text in TEXTS))


def write_compressed(path: Path, times: int) -> None:
    """Text that expands to far more or less than was planned for it."""
    line = json.dumps({"text": "a" * times + os.urandom(2000).hex()})
    path.write_bytes(gzip.compress(f"{line}\n".encode() * 20))


def run(path: Path, out: Folder, *, token_limit: int = NO_LIMIT, **recipe: Any) -> Receipt:
    """The receipt of the only unit of a file."""
    setup = resolve_build(make_recipe({"sources": (str(path),), "tokenizer": "byte", **recipe}))
    for name in (PIECES, RECEIPTS, REJECTS):
        out.make(name)
    task = replace(make_task(setup.plan, 0), token_limit=token_limit)
    engine = open_engine(setup.spec)
    return run_unit(out, make_config(setup, scratch=None), task, lambda: engine, lambda *_, **__: None)


def reports(path: Path, folder: Path, **recipe: str) -> tuple[list[tuple[int, int, int]], int]:
    """What the only unit of a file reports, batch by batch, and the bytes that were planned for it."""
    setup = resolve_build(make_recipe({"sources": (str(path),), "tokenizer": "byte", **recipe}))
    out = Folder(str(folder))
    for name in (PIECES, RECEIPTS):
        out.make(name)
    task, engine = make_task(setup.plan, 0), open_engine(setup.spec)
    found: list[tuple[int, int, int]] = []
    run_unit(out, make_config(setup, scratch=None), task, lambda: engine, lambda *counts, **_: found.append(counts))
    return found, task.unit.text_bytes


def test_what_is_passed_over_in_a_plain_file_counts_as_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET_BATCH_SIZE", "7")
    write_fat(tmp_path / "a.jsonl")
    found, planned = reports(tmp_path / "a.jsonl", tmp_path / "out")
    assert len(found) > 20
    half = found[: len(found) // 2]
    assert 0.3 < sum(counts[2] for counts in half) / planned < 0.7
    assert sum(counts[2] for counts in found) == planned


def test_a_unit_never_reports_more_than_was_planned_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASET_BATCH_SIZE", "1")
    for times in (0, 100_000):
        write_compressed(tmp_path / "a.jsonl.gz", times)
        found, planned = reports(tmp_path / "a.jsonl.gz", tmp_path / f"out{times}")
        assert min(counts[2] for counts in found) >= 0
        assert sum(counts[2] for counts in found) == planned


def test_a_unit_that_is_found_done_reports_all_of_it(tmp_path: Path) -> None:
    write_fat(tmp_path / "a.jsonl")
    first, planned = reports(tmp_path / "a.jsonl", tmp_path / "out")
    again, _ = reports(tmp_path / "a.jsonl", tmp_path / "out")
    assert again == [(sum(counts[0] for counts in first), sum(counts[1] for counts in first), planned)]


def test_pieces_and_provenance_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    receipt = run(tmp_path / "a.jsonl", Folder(str(tmp_path / "out")))
    expected = [[*text.encode(), EOT] for text in TEXTS if text]
    assert (receipt.documents, receipt.tokens) == (len(expected), sum(map(len, expected)))
    tokens = np.fromfile(tmp_path / "out" / f"{receipt.pieces['train'].name}.bin", "<u2")
    assert tokens.tolist() == [token for document in expected for token in document]
    rows = pq.read_table(tmp_path / "out" / receipt.provenance).to_pylist()
    assert [row["tokens"] for row in rows if row["dropped"] is None] == [len(document) for document in expected]
    assert len(rows) == receipt.documents_read == len(TEXTS)
    assert receipt.dropped == ({"empty": len(TEXTS) - len(expected)} if "" in TEXTS else {})


def test_bad_documents_are_listed_with_their_positions_and_reasons(tmp_path: Path) -> None:
    lines = ['{"text": "good"}', "bad", '{"text": 7}', '{"text": null}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    receipt = run(tmp_path / "a.jsonl", Folder(str(tmp_path / "out")))
    (name,) = receipt.rejects()
    rejects = [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]
    starts = np.cumsum([0] + [len(line) + 1 for line in lines]).tolist()
    assert [(one["position"], one["reason"], one["source"]) for one in rejects] == [
        (starts[1], "invalid_json", "a.jsonl"),
        (starts[2], "not_text", "a.jsonl"),
        (starts[3], "null_text", "a.jsonl"),
    ]
    assert receipt.dropped == {"invalid_json": 1, "not_text": 1, "null_text": 1}


def test_a_unit_writes_the_same_bytes_wherever_it_is_run(tmp_path: Path) -> None:
    write_fat(tmp_path / "a.jsonl")
    first = run(tmp_path / "a.jsonl", Folder(str(tmp_path / "one")))
    assert run(tmp_path / "a.jsonl", Folder(str(tmp_path / "two"))) == first
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_without_its_receipt_a_unit_is_run_again_to_the_same_bytes(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    out = Folder(str(tmp_path / "out"))
    receipt = run(tmp_path / "a.jsonl", out)
    before = tree(tmp_path / "out")
    out.remove(f"{RECEIPTS}/000000.json")
    assert run(tmp_path / "a.jsonl", out) == receipt
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("ending", [".bin", ".idx", ".parquet", ".json"])
def test_a_unit_that_fails_at_any_of_its_files_leaves_no_receipt_and_no_temp_file(tmp_path: Path, ending: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)

    class FailsAtLink(LocalFileSystem):
        def link(self, source: str, target: str) -> None:
            if target.endswith(ending):
                raise OSError(errno.ENOSPC, "no space")
            super().link(source, target)

    with pytest.raises(DiskFullError):
        run(tmp_path / "a.jsonl", Folder(str(tmp_path / "out"), FailsAtLink()))
    assert not [name for *_, names in os.walk(tmp_path / "out") for name in names if is_temp(name)]
    assert not os.listdir(tmp_path / "out" / RECEIPTS)
    receipt = run(tmp_path / "a.jsonl", Folder(str(tmp_path / "out")))
    assert read_receipt(Folder(str(tmp_path / "out")), f"{RECEIPTS}/000000.json") == receipt


def test_a_budget_cuts_a_unit_inside_a_document_and_gives_it_another_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    out = Folder(str(tmp_path / "out"))
    whole, cut = run(tmp_path / "a.jsonl", out), run(tmp_path / "a.jsonl", out, token_limit=1000)
    lengths = np.array([len(text.encode()) + 1 for text in TEXTS if text])
    assert (cut.tokens, cut.documents) == (1000, int(np.searchsorted(lengths.cumsum(), 1000)) + 1)
    assert cut.dropped["over_budget"] == len(lengths) - cut.documents
    tokens = np.fromfile(tmp_path / "out" / f"{cut.pieces['train'].name}.bin", "<u2").tolist()
    assert tokens.count(EOT) == cut.documents and tokens[-1] == EOT
    assert not cut.all_files().keys() & whole.all_files().keys()
