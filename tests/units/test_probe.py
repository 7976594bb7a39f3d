"""What is drawn before the work tells the whole: documents from everywhere, in proportion to their size."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill
from conftest import write_jsonl, write_parquet
from s3 import Bucket
from tokenmill.build.preflight import ParityResult, check_parity_of_plan, make_request
from tokenmill.build.resolve import make_config, resolve_build
from tokenmill.executors.in_process import InProcessProber
from tokenmill.recipe import make_recipe
from tokenmill.sources.base import text_array
from tokenmill.storage.object_store import Store
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.spec import resolve


def changing_texts() -> list[str]:
    """Short plain lines first, then numbers and other scripts, which take several times the tokens."""
    chance = random.Random(3)
    plain, odd = ["the mill", "turns", "raw text", "into tokens"], ["数千の文書", "18-02", "слова", "{[()]}"]
    early = [" ".join(chance.choices(plain, k=chance.randint(3, 30))) for _ in range(2000)]
    return early + [" ".join(chance.choices(odd, k=int(chance.paretovariate(1.2) * 20))) for _ in range(400)]


TEXTS = changing_texts()


def as_one_group(folder: Path) -> None:
    write_parquet(folder / "a.parquet", TEXTS, rows=len(TEXTS))


def as_tables(folder: Path) -> None:
    for number in range(5):
        write_parquet(folder / f"{number}.parquet", TEXTS[number * 480 : number * 480 + 480], rows=100)


def as_arrow(folder: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_stream(str(folder / "a.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=500)


def as_json_lines(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl", TEXTS)


def as_lines(folder: Path) -> None:
    (folder / "a.txt").write_text("\n".join(TEXTS))


def as_compressed(folder: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def as_files(folder: Path) -> None:
    for number, text in enumerate(TEXTS[1500:]):
        (folder / f"{number:04}.txt").write_text(text)


def as_mixed(folder: Path) -> None:
    write_parquet(folder / "a.parquet", TEXTS[:1500], rows=300)
    write_jsonl(folder / "b.jsonl", TEXTS[1500:2100])
    (folder / "c.txt").write_text("\n".join(TEXTS[2100:]))


@pytest.mark.parametrize(
    "write", [as_one_group, as_tables, as_arrow, as_json_lines, as_lines, as_compressed, as_files, as_mixed]
)
def test_a_plan_is_right_within_its_error_bar(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    documents = "files" if write is as_files else "lines"
    found = tokenmill.plan(str(tmp_path), documents=documents).estimate
    texts = TEXTS[1500:] if write is as_files else TEXTS
    true_tokens = int((open_engine(resolve("gpt2")).encode(text_array(texts)).lengths + 1).sum())
    assert abs(found.tokens - true_tokens) <= found.error < true_tokens / 3
    if write in (as_one_group, as_tables, as_arrow, as_compressed, as_files):
        assert found.documents == len(texts)
    assert abs(found.documents - len(texts)) < len(texts) / 5


def look(folder: Path | str, **recipe: str) -> ParityResult:
    setup = resolve_build(make_recipe({"sources": (str(folder),), "tokenizer": "gpt2", **recipe}, config=None))
    work = make_config(setup, scratch=None, only_look=True)
    engine = open_engine(setup.spec)
    return check_parity_of_plan(make_request(setup.plan), work, setup.spec, InProcessProber(work, engine))


def test_no_text_is_compared_twice(tmp_path: Path) -> None:
    for write in (as_lines, as_json_lines):
        write(tmp_path)
    (tmp_path / "few").mkdir()
    write_parquet(tmp_path / "few/a.parquet", TEXTS[:9])
    assert look(tmp_path / "few").parity["documents"] == 9
    assert look(tmp_path).parity["bytes"] < 300_000


def test_of_a_huge_document_a_stretch_is_encoded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("数千の文書 " * 200_000)
    found = look(tmp_path, documents="files")
    assert found.parity["documents"] == 8
    assert 250_000 <= found.parity["bytes"] <= 256_000
    assert found.estimate.documents == 1


def test_documents_that_are_larger_than_what_is_read_around_a_place_are_met_at_the_beginning(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["raw text " * 300_000] * 2)
    found = look(tmp_path)
    assert found.parity["documents"] == 8
    assert found.estimate.tokens > 1_000_000


def test_little_is_fetched_from_a_store(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"text": "raw text " * 100}) + "\n"
    bucket.client().put_object(Bucket=bucket.name, Key="a.jsonl", Body=line * 20_000)
    fetched: list[int] = []

    def fetch(store: Store, key: str, start: int, stop: int, etag: str) -> Any:
        fetched.append(stop - start)
        return real(store, key, start, stop, etag)

    real = Store.fetch
    monkeypatch.setattr(Store, "fetch", fetch)
    assert look(bucket.url).parity["bytes"] > 200_000
    assert sum(fetched) < 4_000_000


def test_a_source_without_text_is_no_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n\n')
    found = look(tmp_path)
    assert (found.parity["documents"], found.estimate.tokens, found.unread) == (0, 0, ())
