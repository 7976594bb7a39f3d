"""What must never happen: others' files lost, others' code run, damage sealed in, staleness called complete."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tokenmill as library
from conftest import Command, make_texts, tree, write_jsonl, write_parquet
from tokenmill import records
from tokenmill.build import pipeline, workspace
from tokenmill.storage.local import Folder


@pytest.mark.parametrize("name", ["dataset.json", ".build"])
def test_restart_removes_nothing_from_a_folder_that_only_looks_like_ours(
    tokenmill: Command, tmp_path: Path, name: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "out/train").mkdir(parents=True)
    (tmp_path / "out/train/picture.png").write_bytes(b"precious")
    if name == ".build":
        (tmp_path / "out/.build").mkdir()
    else:
        (tmp_path / "out/dataset.json").write_text('{"name": "somebody else"}')
    refused = tokenmill("prepare", "a.jsonl", "-o", "out", "--restart", code=2)
    assert "other files" in refused.stderr
    assert (tmp_path / "out/train/picture.png").read_bytes() == b"precious"


def test_restart_leaves_files_that_others_put_into_a_dataset(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    tokenmill("prepare", "a.jsonl", "-o", "out")
    (tmp_path / "out/train/notes.txt").write_text("mine")
    tokenmill("prepare", "a.jsonl", "-o", "out", "--tokenizer", "byte", "--restart")
    assert (tmp_path / "out/train/notes.txt").read_text() == "mine"


def test_a_piece_that_changed_after_a_clean_stop_is_not_joined(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"tokenizer": "byte", "split": {"val": 0.05}, "unit_bytes": 4000, "workers": 1}
    library.prepare(str(corpus), tmp_path / "reference", **fields)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "commit", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            library.prepare(str(corpus), out, **fields)
    piece = min((out / ".build/pieces").glob("*.val.bin"), key=lambda path: path.stat().st_size)
    data = bytearray(piece.read_bytes())
    data[3] ^= 1
    piece.write_bytes(data)
    with pytest.raises(library.TokenmillError, match="does not match its receipt"):
        library.prepare(str(corpus), out, **fields)
    library.prepare(str(corpus), out, **fields)
    assert tree(out) == tree(tmp_path / "reference")


@pytest.mark.parametrize("size", ["1", "2", "5"])
def test_batch_bounds_do_not_change_where_skipped_documents_stand(
    tokenmill: Command, tmp_path: Path, size: str
) -> None:
    lines = [f'{{"text": "document {i}"}}' if i % 3 else "bad line" for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    tokenmill("prepare", "a.jsonl", "-o", "reference", code=3)
    tokenmill("prepare", "a.jsonl", "-o", "out", code=3, DATASET_BATCH_SIZE=size)
    assert tree(tmp_path / "out") == tree(tmp_path / "reference")
    rejects = [(tmp_path / name / ".build/rejects/000000.jsonl").read_text() for name in ("out", "reference")]
    assert rejects[0] == rejects[1]


def test_code_that_a_dataset_names_is_not_run_unless_the_user_names_it(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    tokenmill("prepare", "a.jsonl", "-o", "out")
    folder = Folder(str(tmp_path / "out"))
    job = json.loads(folder.read(workspace.JOB))
    job["work"]["filter"] = "builtins:exit"
    del job["seal"]
    (tmp_path / "out/.build/job.json").write_bytes(records.seal(job))
    refused = tokenmill("verify", "out", "--source", "all", code=4)
    assert "builtins:exit" in refused.stderr
    os.truncate(tmp_path / "out/train/00000.bin", 10)
    assert "--filter" in tokenmill("repair", "out", code=4).stderr


def test_a_dataset_with_a_filter_is_checked_against_its_sources_when_the_filter_is_named(
    tokenmill: Command, tmp_path: Path
) -> None:
    (tmp_path / "taste.py").write_text("def keep(text):\n    return len(text) > 9\n")
    write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    tokenmill("prepare", "a.jsonl", "-o", "out", "--filter", "taste:keep", PYTHONPATH=str(tmp_path))
    tokenmill("verify", "out", "--source", "all", "--filter", "taste:keep", PYTHONPATH=str(tmp_path))


def test_python_files_of_the_working_folder_are_not_taken_for_libraries(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "xxhash.py").write_text("raise SystemExit(9)\n")
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    # The console script has no working folder on its path; the setting makes `python -c` the same.
    done = tokenmill("prepare", "a.jsonl", "-o", "out", "-j", 2, PYTHONSAFEPATH="1")
    assert "out is done" in done.stdout


def test_an_output_inside_of_a_source_folder_is_no_source(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    write_parquet(tmp_path / "c/a.parquet", make_texts(30))
    tokenmill("prepare", "c", "-o", "c/out")
    assert "complete already" in tokenmill("prepare", "c", "-o", "c/out").stdout


def test_a_source_that_was_edited_in_place_is_not_called_complete(tokenmill: Command, tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("one\n")
    tokenmill("prepare", "a.txt", "-o", "out")
    source.write_text("two\n")
    os.utime(source, (1, 1))
    refused = tokenmill("prepare", "a.txt", "-o", "out", code=1)
    assert "changed since the plan" in refused.stderr


def test_invalid_utf8_under_a_template_is_quarantined(tokenmill: Command, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    body = pa.array([b"fine", b"\xff", b"good"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"title": ["a", "b", "c"], "body": body}), tmp_path / "a.parquet")
    done = tokenmill("prepare", "a.parquet", "-o", "out", "--template", "{title}: {body}", "--json", code=3)
    assert json.loads(done.stdout)["dropped"] == {"invalid_utf8": 1}
