"""The report says what the dataset has, escapes what the texts have, and is one file without scripts or links."""

from __future__ import annotations

import json
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import Command, write_jsonl
from s3 import Bucket
from tokenmill.dataset.manifest import CARD, REPORT
from tokenmill.dataset.statistics import STATISTICS
from tokenmill.errors import RecipeError
from tokenmill.inspection.report import report, visible

HOSTILE = [
    "<script>alert(1)</script> <img src=x onerror=alert(2)>",
    "‮ reversed ‬ ]]> \x00 \x1b[31m red \u200b hidden",
    "w" * 30_000,
    "{{ 7 * 7 }} {% raw %} --> '\" &amp;",
    "数千の文書 🙂",
    *(f"plain text number {number}, " * (number % 30 + 1) for number in range(60)),
    "<b>",
]
_VOID = {"meta", "br", "img", "link", "input", "line", "rect", "polyline", "polygon"}


class Page(HTMLParser):
    """The elements of a page, its text, and whether they nest as they should."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: str | Path) -> Page:
    text = Path(path).read_text(encoding="utf-8")
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object", "a"}
    assert not [name for _, found in page.tags for name in found if name.startswith("on") or name in ("src", "href")]
    assert "http" not in text.replace("http-equiv", "")
    return page


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "<i>owt&"
    folder.mkdir()
    write_jsonl(folder / "<u>a.jsonl", HOSTILE)
    write_jsonl(folder / "b.jsonl", ["some more"])
    with (folder / "b.jsonl").open("a") as file:
        file.write("not JSON\n")
    tokenmill.prepare(
        folder / "*.jsonl", folder / "out", tokenizer="byte", split="val=0.000001", min_chars=5, workers=1
    )
    return folder / "out"


def test_the_page_says_what_the_dataset_has(dataset: Path) -> None:
    written = report(dataset)
    page = read(written.path)
    assert written.num_bytes == os.path.getsize(dataset / REPORT) < 200_000
    found = tokenmill.open(dataset).manifest
    for number in (found.tokens, found.documents, found.documents_read):
        assert f"{number:,}" in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) >= 3
    assert all(found.get("aria-label") for tag, found in page.tags if tag == "svg")
    for text in ("too short", "invalid json", "1 document", "b.jsonl:22", "tokenmill verify", found.fingerprint):
        assert text in page.text
    assert f"{found.documents_read} documents read = {found.documents} kept + 2 dropped" in page.text


def test_hostile_texts_are_shown_and_do_nothing(dataset: Path) -> None:
    page = read(report(dataset).path)
    raw = (dataset / REPORT).read_text(encoding="utf-8")
    assert "<script>alert(1)</script>" in page.text
    assert "<u>a.jsonl" in page.text
    assert not set(raw) & set("‮‬\x00\x1b\u200b")
    assert "49" not in raw.split("<pre>")[1]


def test_control_and_hidden_characters_are_written_as_escapes() -> None:
    assert visible("a\x00\x1b‮\u200b\u2028\U000e0041\n\té") == "a\\x00\\x1b\\u202e\\u200b\\u2028\\U000e0041\n\té"


def test_the_card_is_written_beside_it_and_not_with_an_output(dataset: Path, tmp_path: Path) -> None:
    (dataset / CARD).unlink(missing_ok=True)
    written = report(dataset, output=tmp_path / "page.html")
    assert written.card is None
    assert not (dataset / CARD).exists()
    read(tmp_path / "page.html")
    assert report(dataset).card == str(dataset / CARD)


def test_one_document_and_no_log_and_no_statistics(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    tokenmill.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", workers=1)
    assert "1 document," in read(report(tmp_path / "out").path).text.replace("\n", " ").replace(
        "document ,", "document,"
    )
    shutil.rmtree(tmp_path / "out/.build")
    assert "There is no log of the build" in read(report(tmp_path / "out").path).text
    (tmp_path / "out" / STATISTICS).unlink()
    page = read(report(tmp_path / "out").path)
    assert "The statistics cannot be read" in page.text
    assert f"{STATISTICS} is missing" in page.text


def test_a_dataset_of_0_1_is_counted_when_it_is_reported_on(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[1] / "compat/v0.1/finished", tmp_path / "old")
    page = read(report(tmp_path / "old").path)
    assert "has no statistics.json" in page.text
    assert "How long documents are" in page.text
    assert "Token frequencies by rank" in page.text
    assert tokenmill.verify(tmp_path / "old", workers=1).ok


def test_a_remote_dataset_has_no_samples_and_a_part_says_what_it_is(tmp_path: Path, bucket: Bucket) -> None:
    write_jsonl(tmp_path / "a.jsonl", HOSTILE)
    tokenmill.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", split="val=0.3", workers=1)
    tokenmill.push(tmp_path / "out", f"{bucket.url}/owt")
    page = read(report(f"{bucket.url}/owt", output=tmp_path / "page.html").path)
    assert "the shards are not on this machine" in page.text
    assert "<script>" not in page.text
    tokenmill.pull(f"{bucket.url}/owt", tmp_path / "val", split="val")
    assert "This is a part of a dataset" in read(report(tmp_path / "val").path).text


def test_files_of_another_trainer_need_an_output(dataset: Path, tmp_path: Path) -> None:
    tokenmill.export(dataset, tmp_path / "nano", to="nanogpt")
    with pytest.raises(RecipeError, match="no place"):
        report(tmp_path / "nano")
    page = read(report(tmp_path / "nano", output=tmp_path / "nano.html").path)
    assert "no statistics of their text" in page.text


@pytest.mark.parametrize("line", ["", "not JSON", "[]", '{"time": "x"}', '{"time": 1, "kind": "start"}', "{" * 5000])
def test_rubbish_in_the_log_is_passed_over(dataset: Path, tmp_path: Path, line: str) -> None:
    shutil.copytree(dataset, tmp_path / "out")
    with (tmp_path / "out/.build/events.jsonl").open("a") as file:
        file.write(f"{line}\n")
    read(report(tmp_path / "out").path)


def test_speed_is_that_of_every_run(dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "out")
    events: list[dict[str, Any]] = []
    for begin in (1000.0, 2000.0):
        events.append({"kind": "start", "time": begin, "workers": 2})
        events += [
            {"kind": "progress", "time": begin + second, "tokens_per_second": 500, "tokens": 10**9}
            for second in range(1, 31)
        ]
    (tmp_path / "out/.build/events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    page = read(report(tmp_path / "out").path)
    assert "dashed lines are where it was resumed" in page.text
    assert "1m00s" in page.text
    assert any(found.get("aria-label") == "Throughput over 1m00s, resumed 1 time." for _, found in page.tags)


def test_the_commands(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", HOSTILE)
    out = tmp_path / "out"
    done = tokenmill("prepare", str(tmp_path / "a.jsonl"), "-o", str(out), "--tokenizer", "byte", "-j", "1", "--json")
    assert json.loads(done.stdout)["report"] == str(out / REPORT)
    assert (out / CARD).exists()
    done = tokenmill("report", str(out), "--license", "mit", "--json")
    assert json.loads(done.stdout)["path"] == str(out / REPORT)
    (out / REPORT).unlink()
    (out / REPORT).mkdir()  # cannot be written: the dataset is complete all the same
    again = ("prepare", str(tmp_path / "a.jsonl"), "-o", str(out), "--tokenizer", "byte", "-j", "1", "--restart")
    done = tokenmill(*again)
    assert done.returncode == 0
    assert f"note: {REPORT} was not written" in done.stderr
    (out / REPORT).rmdir()
    done = tokenmill(*again, "--no-report")
    assert done.returncode == 0
    assert not (out / REPORT).exists()
