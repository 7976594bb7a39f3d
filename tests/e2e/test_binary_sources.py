"""Sources that are not text are refused before the work, or fail or are quarantined in it: never are they a dataset."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

import tokenmill as library
from conftest import Command
from s3 import Bucket
from tokenmill.errors import BuildError, NotTextError, RecipeError
from tokenmill.sources import discover

TEXT = "a line of text\nand another one\n"


def docx() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/document.xml", "<w:p>a line of text</w:p>\n" * 99)
    return file.getvalue()


PDF = b"%PDF-1.7\n1 0 obj\n" + TEXT.encode()
WARC = b"WARC/1.0\r\nWARC-Type: response\r\n\r\n<html>a line</html>\r\n"
BINARIES = {
    "report.docx": (docx(), "an Office document"),
    "report.txt": (docx(), "an Office document"),
    "paper.pdf": (PDF, "a PDF document"),
    "crawl.warc": (WARC, "a web archive (WARC)"),
    "crawl.warc.gz": (gzip.compress(WARC), "a web archive (WARC)"),
    "twice.jsonl.gz": (gzip.compress(gzip.compress(b'{"text": "a"}\n')), "compressed with gzip"),
    "wide.txt": (TEXT.encode("utf-16"), "UTF-16 text"),
    "wider.txt": (TEXT.encode("utf-32"), "UTF-32 text"),
    "nulls.txt": (TEXT.encode("utf-16-le"), "UTF-16LE text"),
    "nulls.jsonl": (b'{"text": "a line"}\n'.decode().encode("utf-16-be"), "UTF-16BE text"),
    "packed.jsonl": (gzip.compress(b'{"text": "a"}\n'), "compressed with gzip"),
    "paper.ndjson": (PDF, "a PDF document"),
    "paper.json": (PDF, "a PDF document"),
    "array.txt": (np.arange(4000, dtype=np.int64).tobytes(), "binary data"),
}
WAYS = {"lines": (), "files": ("--documents", "files"), "separated": ("--documents", "separator:---")}


def rejects(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for file in (out / ".build/rejects").glob("*") for line in file.read_text().splitlines()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BINARIES)
def test_what_is_not_text_is_refused_before_the_work(tokenmill: Command, tmp_path: Path, name: str, way: str) -> None:
    content, what = BINARIES[name]
    (tmp_path / name).write_bytes(content)
    for command in (("plan",), ("prepare", "-o", "out")):
        done = tokenmill(*command, name, *WAYS[way], "--tokenizer", "byte", code=2)
        assert f"{tmp_path / name} is {what}; only UTF-8 text is read" in done.stderr
        assert "\nhint: " in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_stream_refuses_it_too(tmp_path: Path) -> None:
    (tmp_path / "paper.txt").write_bytes(PDF)
    with pytest.raises(RecipeError, match=r"paper\.txt is a PDF document"):
        library.stream(tmp_path / "paper.txt", "byte", 4, 1)


def test_several_are_named_at_once_among_others(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(20):
        (tmp_path / f"in/{number:02}.txt").write_bytes(PDF if number % 4 == 1 else TEXT.encode())
    done = tokenmill("prepare", "in", "-o", "out", code=2)
    assert [name for name in ("01", "05", "09", "13", "17") if f"{name}.txt is a PDF" in done.stderr] == [
        "01",
        "05",
        "09",
    ]
    assert "2 more are not text" in done.stderr


def test_a_document_a_file_quarantines_those_that_are_not_text(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text(TEXT)
    (tmp_path / "in/b.pdf").write_bytes(PDF)
    (tmp_path / "in/c.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "in/d.txt").write_bytes(TEXT.encode("utf-16-le"))
    done = tokenmill("prepare", "in", "-o", "out", "--documents", "files", "--tokenizer", "byte", code=3)
    assert "3 files will be quarantined, like this one" in done.stderr
    assert "b.pdf is a PDF document" in done.stderr
    assert {(line["source"], line["reason"]) for line in rejects(tmp_path / "out")} == {
        ("b.pdf", "not_text"),
        ("c.png", "invalid_utf8"),
        ("d.txt", "not_text"),
    }
    tokens = library.open(tmp_path / "out")["train"]
    assert bytes(tokens.document(0)[:-1].astype(np.uint8)).decode() == TEXT
    assert tokens.num_documents == 1
    tokenmill("verify", "out", "--source", "all")
    failed = tokenmill("prepare", "in", "-o", "no", "--documents", "files", "--on-bad", "fail", code=1)
    assert "b.pdf at 0: not text" in failed.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_one_of_many_files_that_was_not_looked_at_before_fails_its_unit(
    tokenmill: Command, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discover, "_MAX_HEADS", 3)
    (tmp_path / "in").mkdir()
    for number in range(9):
        (tmp_path / f"in/{number}.txt").write_text(TEXT)
    (tmp_path / "in/4.txt").write_bytes(PDF)
    command = ("prepare", "in", "-o", "out", "--tokenizer", "byte", "-j", workers, "--unit-bytes", "50")
    done = tokenmill(*command, code=1)
    assert "4.txt is a PDF document; only UTF-8 text is read" in done.stderr
    assert "--update" in done.stderr
    assert not (tmp_path / "out/dataset.json").exists()
    (tmp_path / "in/4.txt").unlink()
    tokenmill(*command, "--update")
    assert library.open(tmp_path / "out")["train"].num_documents == 16


def test_a_file_that_is_cut_is_always_looked_at_before_the_work(
    tokenmill: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit that has its first bytes may not be in the sample."""
    monkeypatch.setattr(discover, "_MAX_HEADS", 1)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text(TEXT)
    (tmp_path / "in/b.txt").write_bytes(PDF + TEXT.encode() * 5000)
    for seed in range(3):
        options = ("--sample", "5%", "--seed", seed, "--unit-bytes", "5000", "--tokenizer", "byte")
        done = tokenmill("prepare", "in", "-o", "out", *options, code=2)
        assert "b.txt is a PDF document" in done.stderr


def test_a_stray_nul_is_part_of_a_text(tokenmill: Command, tmp_path: Path) -> None:
    texts = ["one\0two", "\0", "three", "a line of text " * 9, "end\0"]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    tokenmill("prepare", "a.txt", "-o", "out", "--tokenizer", "byte")
    split = library.open(tmp_path / "out")["train"]
    assert [bytes(split.document(i)[:-1].astype(np.uint8)).decode() for i in range(5)] == texts
    tokenmill("prepare", "a.txt", "-o", "whole", "--tokenizer", "byte", "--documents", "files")
    split = library.open(tmp_path / "whole")["train"]
    assert bytes(split.document(0)[:-1].astype(np.uint8)).decode() == "\n".join(texts)


def test_texts_may_be_separated_by_nul(tokenmill: Command, tmp_path: Path) -> None:
    texts = [f"{number}" for number in range(100)]
    (tmp_path / "a.txt").write_text("\0".join(texts))
    tokenmill("prepare", "a.txt", "-o", "out", "--tokenizer", "byte", code=2)
    tokenmill("prepare", "a.txt", "-o", "out", "--tokenizer", "byte", "--documents", r"separator:\x00")
    split = library.open(tmp_path / "out")["train"]
    assert [bytes(split.document(i)[:-1].astype(np.uint8)).decode() for i in range(100)] == texts


def test_an_object_that_is_not_text_is_refused_or_fails_its_unit(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        bucket.put(f"in/{number}.txt", TEXT.encode())
    bucket.put("in/4.txt", PDF)
    with pytest.raises(RecipeError, match=r"in/4\.txt is a PDF document"):
        library.prepare(f"{bucket.url}/in", tmp_path / "out", tokenizer="byte", workers=1)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(discover, "_MAX_REMOTE_HEADS", 1)
    with pytest.raises(BuildError, match=r"in/4\.txt is a PDF document"):
        library.prepare(f"{bucket.url}/in", tmp_path / "out", tokenizer="byte", workers=1)
    assert not (tmp_path / "out/dataset.json").exists()


def test_the_error_of_a_unit_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "_MAX_HEADS", 1)
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_bytes(PDF)
    batches = library.stream([tmp_path / "a.txt", tmp_path / "b.txt"], "byte", 4, 1, epochs=1)
    with pytest.raises(NotTextError, match=r"b\.txt is a PDF document"):
        list(batches)
