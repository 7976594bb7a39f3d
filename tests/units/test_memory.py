"""Large documents: what encoding them takes is known before, and asked for."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import tokenmill as library
from tokenmill.errors import BuildError, SourceError
from tokenmill.resources import free_memory
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.spec import resolve
from tokenmill.units import memory
from tokenmill.units.memory import bytes_needed, longest_run


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
def test_the_longest_run_does_not_depend_on_how_the_text_is_looked_through(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_BLOCK_BYTES", block)
    for seed in range(30):
        text = bytes(np.random.default_rng(seed).choice(list(b"ab \n"), 60).astype(np.uint8))
        runs = itertools.groupby(text.decode(), str.isspace)
        assert longest_run(np.frombuffer(text, np.uint8)) == max(len(list(run)) for _, run in runs)


def test_a_run_without_a_space_takes_more_than_many_words() -> None:
    engine, size = open_engine(resolve("gpt2")), memory.LARGE_BYTES
    words, run = (bytes_needed(pa.array([text * (size // 4)]), engine) for text in ("abc ", "abcd"))
    assert 20 * size < run - words < 30 * size
    assert bytes_needed(pa.array(["abcd" * (size // 8)] * 2), engine) == 0


def test_a_document_that_there_is_no_memory_for_is_an_error_and_not_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.txt").write_text("x" * memory.LARGE_BYTES)
    monkeypatch.setattr(memory, "free_memory", lambda: 1e8)
    with pytest.raises(BuildError, match=r"run\.txt at 0: a document of 8\.00 MB takes about 224 MB") as caught:
        library.prepare(tmp_path / "run.txt", tmp_path / "out", tokenizer="gpt2", documents="files", workers=1)
    assert "`max_document_bytes`" in caught.value.hint


def test_a_stream_asks_for_memory_as_a_build_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.txt").write_text("ab " * (memory.LARGE_BYTES // 2))
    stream = library.stream(str(tmp_path / "run.txt"), "byte", 64, 2, documents="files", prefetch=0)
    monkeypatch.setattr(memory, "free_memory", lambda: 1e6)
    with pytest.raises(SourceError, match=r"run\.txt at 0: a document of 12\.0 MB takes about"):
        next(iter(stream))
    monkeypatch.undo()
    assert len(next(iter(stream))["input_ids"]) == 2


GIGA = 1 << 30


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        (
            "0::/a",
            {"a/memory.max": "1000", "a/memory.current": "400", "a/memory.stat": "anon 1\ninactive_file 50"},
            650,
        ),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": "400"}, 2 * GIGA),
        (
            "4:memory:/b",
            {
                "memory/b/memory.limit_in_bytes": "1000",
                "memory/b/memory.usage_in_bytes": "900",
                "memory/b/memory.stat": "total_active_file 20\ntotal_inactive_file 30\nactive_file 7",
                "memory/memory.limit_in_bytes": "500",
                "memory/memory.usage_in_bytes": "10",
            },
            150,
        ),
        ("", {}, 2 * GIGA),
    ],
)
def test_free_memory_is_what_the_narrowest_group_or_the_machine_has_left(
    tmp_path: Path, own: str, files: dict[str, str], free: int
) -> None:
    (tmp_path / "own").write_text(own)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2097152 kB\n")
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    assert free_memory(tmp_path / "groups", tmp_path / "own", tmp_path / "meminfo") == free
