from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill
from tokenmill.build import check_sources
from tokenmill.errors import SourceChangedError

Write = Callable[[Path, list[str]], None]


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "not JSON\n")


def write_compressed(path: Path, texts: list[str]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode(), mtime=0))


def write_table(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=50, use_dictionary=False, compression="none")


def write_text(path: Path, texts: list[str]) -> None:
    path.write_text("\n".join(texts) + "\n")


KINDS: dict[str, Write] = {"jsonl": write_lines, "parquet": write_table, "txt": write_text}
SETTINGS: dict[str, dict[str, Any]] = {
    "splits": {"split": "val=0.2"},
    "prepended": {"eot": "prepend", "split": "val=0.1", "seed": 3},
    "no ends": {"eot": "none", "min_chars": 12},
    "budget": {"max_tokens": 2500},
    "nanogpt": {"split": "nanogpt"},
}


def make_texts(count: int = 300) -> list[str]:
    """Texts of one length: no size and no position tells one order from another."""
    chance = random.Random(1)
    return ["".join(chance.choices("abcdefgh", k=11 + (number % 3 == 0))) for number in range(count)]


def prepare(source: Path, output: Path, **options: Any) -> Any:
    return tokenmill.prepare(source, output, tokenizer="byte", workers=1, **options)


def change(source: Path, write: Write, texts: list[str]) -> None:
    """Other text, with the size and the time that the file had."""
    before = source.stat()
    write(source, texts)
    assert source.stat().st_size == before.st_size
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_text_is_proven_and_the_next_time_quick(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    source, output = tmp_path / f"a.{kind}", tmp_path / "out"
    KINDS[kind](source, make_texts())
    prepare(source, output, **options)
    shutil.rmtree(output / ".build")
    os.utime(source)  # a copy of the file has another time
    same = prepare(source, output, **options)
    assert same.already_complete and "all documents of the sources are unchanged" in same.notes[-1]
    assert not prepare(source, output, **options).notes, "they were compared already"
    assert not tokenmill.repair(output) and tokenmill.verify(output).ok


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_other_text_of_the_same_size_and_time_is_refused(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    source, output, texts = tmp_path / f"a.{kind}", tmp_path / "out", make_texts()
    swapped = [texts[3], *texts[1:3], texts[0], *texts[4:]]
    masked = [*texts[:12], texts[12].replace("e", "x").replace("a", "x"), *texts[13:]]
    for changed in (swapped, masked):
        KINDS[kind](source, texts)
        prepare(source, output, restart=True, **options)
        shutil.rmtree(output / ".build")
        change(source, KINDS[kind], changed)
        with pytest.raises(SourceChangedError, match=rf"was made of other text than there is now: a.{kind}") as caught:
            prepare(source, output, **options)
        assert "restart=True" in str(caught.value.hint)
        result = prepare(source, output, restart=True, **options)
        assert not result.already_complete


def test_one_document_out_of_the_sample_is_found_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_sources, "ENCODED_BYTES", 0)
    monkeypatch.setattr(check_sources._SourceCheck, "_is_sampled", lambda *_: False)
    source, output, texts = tmp_path / "a.parquet", tmp_path / "out", make_texts()
    write_table(source, texts)
    prepare(source, output)
    shutil.rmtree(output / ".build")
    change(source, write_table, [*texts[:-1], texts[-1][::-1]])
    with pytest.raises(SourceChangedError, match=r"a\.parquet changed"):
        prepare(source, output)


def test_of_many_sources_the_changed_one_is_named(tmp_path: Path) -> None:
    folder, output, texts = tmp_path / "corpus", tmp_path / "out", make_texts()
    folder.mkdir()
    for number in range(6):
        write_lines(folder / f"{number}.jsonl", texts[number * 50 : number * 50 + 50])
    prepare(folder, output)
    shutil.rmtree(output / ".build")
    assert prepare(folder, output).already_complete
    shutil.rmtree(output / ".build")
    change(folder / "4.jsonl", write_lines, [texts[249], *texts[201:249], texts[200]])
    with pytest.raises(SourceChangedError, match=r"than there is now: 4\.jsonl changed"):
        prepare(folder, output)


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["aaaa", "bbbb", "xxxx"], r"2\.jsonl"),  # other tokens
        (["aaa", "bbbbb", "cccc"], r"2\.jsonl"),  # other positions
        (["aaaabbbb" + "x" * 13, "cccc"], r"2\.jsonl, 3\.jsonl"),  # one less, so that all that follow are a row earlier
    ],
)
def test_of_the_sources_of_a_batch_those_that_differ_are_named(texts: list[str], named: str, tmp_path: Path) -> None:
    folder, output = tmp_path / "corpus", tmp_path / "out"
    folder.mkdir()
    for number in range(1, 4):
        write_lines(folder / f"{number}.jsonl", ["aaaa", "bbbb", "cccc"])
    prepare(folder, output)
    shutil.rmtree(output / ".build")
    change(folder / "2.jsonl", write_lines, texts)
    with pytest.raises(SourceChangedError, match=rf"than there is now: {named} changed"):
        prepare(folder, output)


def test_a_compressed_source_is_compared_by_its_text(tmp_path: Path) -> None:
    source, output = tmp_path / "a.jsonl.gz", tmp_path / "out"
    write_compressed(source, make_texts())
    prepare(source, output)
    shutil.rmtree(output / ".build")
    assert prepare(source, output).already_complete


def test_a_plan_says_what_a_build_will_do(tmp_path: Path) -> None:
    source, output = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(source, make_texts())
    prepare(source, output)
    shutil.rmtree(output / ".build")
    result = tokenmill.plan(source, output, tokenizer="byte", workers=1)
    assert result.finished and "compares them with it" in result.notes[-1]
    assert not (output / ".build").exists()
