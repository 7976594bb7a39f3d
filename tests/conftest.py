"""Small corpora, and the command as a user runs it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings

from s3 import Bucket
from stores import bucket_server
from tokenmill.cli import commands
from tokenmill.dataset.manifest import CARD, REPORT

pytest_plugins = ["ray_lab"]

WORDS = [
    *("the", "mill", "turns", "raw", "text", "into", "tokens,", "数千の文書", "и", "слова,", "naïve", "café", "🙂"),
    *("<|endoftext|>", "\n", "12345", "def", "f(x):", "return", "x"),
]

# Whatever loads Ray after this looks for clusters at 127.0.0.1, as it does on systems where it has no others.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ.pop("COLUMNS", None)  # xdist sets it, and what is printed would be wrapped

# How long an example takes says nothing of it: machines are slow and busy with something else.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

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
    """SHA-256 of every file of a dataset, but for .build and what a person looks at."""
    root = Path(path)
    return {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(root.rglob("*"))
        if file.is_file() and ".build" not in file.parts and file.name not in (CARD, REPORT)
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


@pytest.fixture(autouse=True)
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker unless a test asks for more: starting others takes longer than these small corpora."""
    monkeypatch.setenv("DATASET_NUM_PROC", "1")


@pytest.fixture
def tokenmill(terminal: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command in this process: parsed, run and told as in a terminal, without the seconds that a start takes.

    What Python itself reads from the environment when it starts needs a process of its own, and gets one.
    """

    def run(*arguments: Any, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        if any(name.startswith("PYTHON") for name in environment):
            return terminal(*arguments, code=code, **environment)
        line = ["tokenmill", *map(str, arguments)]
        output, errors = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", line)
            for name, value in environment.items():
                patch.setenv(name, value)
            done = commands.run()
        return checked(subprocess.CompletedProcess(line, done, output.getvalue(), errors.getvalue()), code)

    return run


@pytest.fixture
def terminal(tmp_path: Path) -> Command:
    """The command as a process of its own; gives its exit code and what it printed."""

    def run(*arguments: Any, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command(*arguments),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **environment},
            timeout=300,
        )
        return checked(done, code)

    return run


def checked(done: subprocess.CompletedProcess[str], code: int | None) -> subprocess.CompletedProcess[str]:
    if code is not None:
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-c", "from tokenmill.cli.main import main; main()", *map(str, arguments)]


@dataclass(frozen=True)
class Gate:
    """A build that waits in its middle until it is told to go on: then nothing depends on how quick a machine is.

    Its filter stops at the texts that say so. Builds with `options` and `environment` wait there, or pass an open gate.
    """

    path: Path

    options = ("--filter", "gate:keep")
    text = "wait at the gate"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.path), "GATE": str(self.path / "open")}

    def open(self) -> None:
        (self.path / "open").touch()

    def close(self) -> None:
        (self.path / "open").unlink()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    folder = tmp_path / "gate"
    folder.mkdir()
    (folder / "gate.py").write_text(
        "import os, time\n"
        "def keep(text):\n"
        f"    while text == {Gate.text!r} and not os.path.exists(os.environ['GATE']):\n"
        "        time.sleep(0.01)\n"
        "    return True\n"
    )
    return Gate(folder)


def wait_for_receipts(process: subprocess.Popen[Any], out: Path, count: int = 1) -> None:
    """Until a build has done so many units. One that ends before is an error."""
    receipts = out / ".build/receipts"
    has_ended = False
    while not receipts.is_dir() or len(list(receipts.glob("*.json"))) < count:
        assert not has_ended, "it ended too early"
        time.sleep(0.002)
        has_ended = process.poll() is not None  # what it did before it ended counts: one more look


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store", default="s3", choices=["s3", "gs", "az"], help="the server that has the buckets")


@pytest.fixture(scope="session")
def make_bucket(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Bucket]]:
    with bucket_server(request.config.getoption("--store")) as make:
        yield make


@pytest.fixture
def bucket(make_bucket: Callable[[str], Bucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket of a real server, S3's unless another one was asked for, which the environment leads to."""
    found = make_bucket(f"b-{secrets.token_hex(6)}")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    return found
