"""Small corpora, and the command as a user runs it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from s3 import Bucket, make_bucket, s3_server

WORDS = [
    *("the", "mill", "turns", "raw", "text", "into", "tokens,", "数千の文書", "и", "слова,", "naïve", "café", "🙂"),
    *("<|endoftext|>", "\n", "12345", "def", "f(x):", "return", "x"),
]

Command = Callable[..., subprocess.CompletedProcess[str]]


def make_texts(count: int, *, seed: int = 0, words: int = 60) -> list[str]:
    """Texts of many scripts and lengths; a few stand twice."""
    chance = random.Random(seed)
    texts = [f"{seed}-{i} " + " ".join(chance.choices(WORDS, k=chance.randint(1, words))) for i in range(count)]
    return [*texts, *texts[: count // 20]]


def write_parquet(path: Path, texts: Sequence[str | None], *, rows: int = 50) -> Path:
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=rows)
    return path


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def tree(path: str | Path) -> dict[str, str]:
    """SHA-256 of every file of a dataset, but for .build."""
    root = Path(path)
    return {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(root.rglob("*"))
        if file.is_file() and ".build" not in file.parts
    }


def leftovers(path: str | Path) -> list[str]:
    """Temp files that should not be there."""
    return [str(file) for file in Path(path).rglob("*.tmp")]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with three sources of different kinds and about a dozen small units."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_parquet(folder / "a.parquet", make_texts(400, seed=1))
    write_jsonl(folder / "b.jsonl", make_texts(300, seed=2))
    (folder / "c.txt").write_text("\n".join(text.replace("\n", " ") for text in make_texts(200, seed=3)) + "\n\n")
    return folder


@pytest.fixture
def tokenmill(tmp_path: Path) -> Command:
    """Runs the command; gives its exit code and what it printed."""

    def run(*arguments: Any, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command(*arguments),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            # One worker unless a test asks for more: starting others takes longer than these small corpora.
            env={**os.environ, "DATASET_NUM_PROC": "1", **environment},
            timeout=300,
        )
        if code is not None:
            assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-c", "from tokenmill.cli import main; main()", *map(str, arguments)]


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket of a real S3 server, which the environment leads to."""
    found = make_bucket(s3_endpoint, f"b-{secrets.token_hex(6)}")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    return found
