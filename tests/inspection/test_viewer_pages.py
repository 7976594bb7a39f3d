"""Pages show what the library gives: documents, samples, the rows of a step, searches, a build in progress."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

import tokenmill as api
from conftest import make_texts, write_jsonl
from tokenmill import DatasetError, RecipeError
from tokenmill.inspection.viewer_pages import LISTED_DOCUMENTS, PAGE_TOKENS, Pages, open_pages, visible

TEXTS = ["First\ttext,\nof two lines 🙂", "<b>bold</b> & \x1b[31m \u202ered", "naïve 数千の文書"]


def prepare(folder: Path, texts: list[str] = TEXTS, **options: Any) -> str:
    write_jsonl(folder / "a.jsonl", texts)
    return api.prepare(folder / "a.jsonl", folder / "out", workers=1, **{"tokenizer": "gpt2", **options}).output


def pages_of(path: str, **options: Any) -> Pages:
    return open_pages(path, **{"beside": None, "tokenizer": None, **options})


def shown_tokens(page: str) -> list[tuple[str, list[int]]]:
    """The text and the ids of every piece on a page."""
    found = re.findall(r'<span class="t ([^"]+)" title="([^"]*)">(.*?)</span>', page, re.DOTALL)
    return [
        (html.unescape(text), [int(number) for number in about.split(" · ")[0].split()[1:] if number.isdecimal()])
        for _, about, text in found
    ]


def ids_of(page: str) -> list[int]:
    return [number for _, ids in shown_tokens(page) for number in ids]


def test_a_document_has_its_ids_and_its_text(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    split = api.open(path)["train"]
    for number, text in enumerate(TEXTS):
        page = pages_of(path).document({"n": str(number)})
        assert ids_of(page) == split.document(number).tolist()
        assert "".join(text for text, _ in shown_tokens(page)) == visible(text) + "end of document"


def test_control_characters_can_be_seen(tmp_path: Path) -> None:
    assert visible("a\n\tb\x1b\u202e\u200b\xad") == "a↵\n⇥\tb\\x1b\\u202e\\u200b\\xad"
    page = pages_of(prepare(tmp_path)).document({"n": "1"})
    assert not set("\x1b\u202e") & set(page)


def test_the_overview_has_the_totals_and_the_charts_of_the_report(tmp_path: Path) -> None:
    path = prepare(tmp_path, make_texts(40, seed=3), split="val=0.2")
    page = pages_of(path).overview({})
    for name, split in api.open(path).manifest.splits.items():
        assert f'">{name}</a></th><td class="n">{split.tokens:,}</td><td class="n">{split.documents:,}</td>' in page
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page)[:2] == ["How long documents are", "Tokens by source"]
    assert page.count("<svg role") == page.count("<figcaption>")


def test_a_long_document_is_shown_in_parts(tmp_path: Path) -> None:
    path = prepare(tmp_path, ["word " * 3000])
    split, pages = api.open(path)["train"], pages_of(path)
    first, second = pages.document({}), pages.document({"skip": str(PAGE_TOKENS)})
    assert ids_of(first) + ids_of(second) == split.document(0).tolist()
    assert f"skip={PAGE_TOKENS}" in first


def test_documents_are_listed_page_by_page(tmp_path: Path) -> None:
    path = prepare(tmp_path, make_texts(LISTED_DOCUMENTS + 5, seed=1), tokenizer="byte")
    total = api.open(path)["train"].num_documents
    page = pages_of(path).documents({"from": str(LISTED_DOCUMENTS)})
    numbers = [int(number) for number in re.findall(r'class="number">(\d+)<', page)]
    assert numbers == list(range(LISTED_DOCUMENTS, total))
    assert 'id="previous"' in page
    assert 'id="next"' not in page


def test_a_sample_has_the_tokens_of_the_split(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    page = pages_of(path).sample({"n": "1", "seq_len": "7"})
    assert ids_of(page) == api.open(path)["train"].tokens(7, 14).tolist()


@pytest.mark.parametrize("packing", ["concat", "best_fit", "padded"])
def test_a_step_has_the_rows_that_the_loader_gives(tmp_path: Path, packing: Any) -> None:
    path = prepare(tmp_path, make_texts(60, seed=2), tokenizer="byte")
    loader = api.DataLoader(path, 16, 3, packing=packing, seed=5, rank=1, world_size=2, fields=("document_ids",))
    batches = iter(loader)
    batch = [next(batches) for _ in range(4)][3]
    given = {"step": "3", "rank": "1", "world_size": "2", "batch_size": "3", "seq_len": "16", "seed": "5"}
    page = pages_of(path).step({**given, "packing": packing})
    rows = page.split("<article")[1:]
    assert [ids_of(row) for row in rows] == batch["input_ids"].tolist()
    for row, documents, labels in zip(rows, batch["document_ids"], batch["labels"], strict=True):
        named = [int(number) for number in re.findall(r">document ([\d,]+)<", row)]
        assert named == list(dict.fromkeys(number for number in documents.tolist() if number >= 0))
        assert ("ignored" in row) == bool((labels == -100).any())


def test_a_search_finds_all_documents_with_the_text(tmp_path: Path) -> None:
    texts = [f"text {number}" + (" with a Needle" if number % 7 == 3 else "") for number in range(50)]
    page = pages_of(prepare(tmp_path, texts)).search({"q": "needle"})
    found = [int(number) for number in re.findall(r'class="number">(\d+)<', page)]
    assert found == [number for number in range(50) if number % 7 == 3]
    assert page.count("<mark>Needle</mark>") == len(found)
    assert "documents 0 to 49 of 50" in page
    assert "0 found" in pages_of(str(tmp_path / "out")).search({"q": "needle", "from": "49"})


def test_a_text_is_encoded_by_each_tokenizer(tmp_path: Path) -> None:
    pages = pages_of(prepare(tmp_path), tokenizer="byte")
    page = pages.text({"text": "naïve\r\ntext"})
    gpt2, as_bytes = page.split("<section>")[1:]
    assert ids_of(as_bytes) == list("naïve\ntext".encode())
    assert "".join(text for text, _ in shown_tokens(gpt2)) == "naïve↵\ntext"
    with pytest.raises(RecipeError, match="half of a character"):
        pages.text({"text": "\ud800"})
    with pytest.raises(RecipeError, match=r"20,001 characters"):
        pages.text({"text": "a" * 20_001})


def test_two_datasets_are_shown_beside_each_other(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    other = api.prepare(tmp_path / "a.jsonl", tmp_path / "bytes", tokenizer="byte", workers=1).output
    page = pages_of(path, beside=other).beside({"n": "2"})
    first, second = page.split("<section><h2>")[1:]
    assert ids_of(first) == api.open(path)["train"].document(2).tolist()
    assert ids_of(second) == api.open(other)["train"].document(2).tolist()
    assert "the same ids" in pages_of(path, beside=path).beside({"n": "2"})
    assert "no such document" in pages_of(path, beside=other).beside({"n": "3"})
    with pytest.raises(RecipeError, match="no second dataset"):
        pages_of(path).beside({})


def test_files_of_a_layout_are_shown_with_a_tokenizer_or_as_ids(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    api.export(path, tmp_path / "nanogpt", to="nanogpt")
    named = pages_of(str(tmp_path / "nanogpt"), tokenizer="gpt2")
    assert ids_of(named.document({})) == api.open(path)["train"].document(0).tolist()
    assert "text" in named.search({"q": "first"})
    plain = pages_of(str(tmp_path / "nanogpt"))
    assert "5962" in plain.sample({"seq_len": "8"}) or ids_of(plain.sample({"seq_len": "8"}))
    with pytest.raises(RecipeError, match="do not say"):
        plain.search({"q": "first"})


def test_a_build_in_progress_is_shown_from_its_log(tmp_path: Path) -> None:
    build = tmp_path / "out" / ".build"
    build.mkdir(parents=True)
    progress = {"kind": "progress", "bytes": 50, "total_bytes": 200, "units": 1, "total_units": 4, "tokens": 12_345}
    lines = [{"kind": "start", "time": 1.0}, {**progress, "time": 2.0, "seconds_left": 90.0, "documents": 7}]
    (build / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "pro')
    pages = pages_of(str(tmp_path / "out"))
    page = pages.overview({})
    assert 'value="25"' in page
    assert "12,345" in page
    assert 'data-refresh="2"' in page
    with pytest.raises(DatasetError, match="has not finished"):
        pages.document({})
    finished = pages_of(prepare(tmp_path / "b", ["one"]) if (tmp_path / "b").mkdir() is None else "").build({})
    assert "100 %" in finished
    assert "data-refresh" not in finished


@pytest.mark.parametrize(
    ("page", "given", "said"),
    [
        ("document", {"n": "3"}, "no document 3: there are 3"),
        ("document", {"n": "x"}, "n is 'x'"),
        ("document", {"n": "9" * 5000}, "n is "),
        ("document", {"n": "-1"}, "n is "),
        ("document", {"split": "../x"}, "no split '../x'"),
        ("sample", {"seq_len": "0"}, "seq_len is 0"),
        ("step", {"batch_size": "65536", "seq_len": "1024"}, "a batch of"),
        ("step", {"rank": "1"}, "rank is 1"),
        ("step", {"order": "odd", "seq_len": "8"}, "order"),
        ("step", {"packing": "odd", "seq_len": "8"}, "packing"),
        ("find", {"what": "file"}, "cannot be opened"),
    ],
)
def test_what_a_form_cannot_mean_is_a_typed_error(tmp_path: Path, page: str, given: dict[str, str], said: str) -> None:
    pages = pages_of(prepare(tmp_path))
    with pytest.raises(api.TokenmillError, match=re.escape(said)):
        getattr(pages, page)(given)


def test_the_form_of_the_header_leads_to_a_page(tmp_path: Path) -> None:
    pages = pages_of(prepare(tmp_path))
    assert pages.find({"what": "sample", "n": "12", "split": "train"}) == "/sample?split=train&n=12"
    assert pages.find({"what": "step", "n": "12"}) == "/step?split=train&step=12"


def test_a_source_and_a_position_lead_to_the_document_and_back(tmp_path: Path) -> None:
    path = prepare(tmp_path, [*TEXTS, "kept"], min_chars=5)
    pages = pages_of(path)
    row = api.open(path)["train"].source(1)
    assert pages.find({"what": "source", "n": f"a.jsonl:{row.position}"}) == "/document?split=train&n=1"
    assert f"from a.jsonl, byte {row.position:,}" in pages.document({"n": "1"})
    end = (tmp_path / "a.jsonl").read_bytes().rfind(b"{")
    with pytest.raises(RecipeError, match="dropped: too short"):
        pages.find({"what": "source", "n": f"a.jsonl:{end}"})
    with pytest.raises(RecipeError, match="source is"):
        pages.find({"what": "source", "n": "12"})


def test_a_folder_without_a_dataset_or_a_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError):
        pages_of(str(tmp_path))
    with pytest.raises(api.TokenizerError):
        pages_of(prepare(tmp_path), tokenizer="no-such-tokenizer.json")
