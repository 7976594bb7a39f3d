"""What the system limits for a process is named, with the way to raise it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tokenmill as library
from conftest import command, leftovers, tree
from tokenmill.errors import BuildError
from tokenmill.executors import forkserver

LIMIT = 300_000


def limited(folder: Path, *arguments: Any, limit: int = LIMIT) -> str:
    """What a command says that may write files of so many bytes. It must fail."""
    done = subprocess.run(
        command(*arguments),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "(ulimit -f)" in done.stderr
    assert "hint: raise the limit (ulimit -f unlimited)" in done.stderr
    assert "drive" not in done.stderr
    return done.stderr


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / f"in/{number}.txt").write_text(f"line {number} of a text\n" * 30_000)
    return tmp_path / "in"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_build_stops_at_the_largest_file_that_is_allowed_and_goes_on_without_the_limit(
    tmp_path: Path, sources: Path, workers: int
) -> None:
    line = ("prepare", "in", "-o", "out", "--tokenizer", "byte", "--unit-bytes", "600KB", "-j", workers)
    said = limited(tmp_path, *line)
    assert "files of 300 KB" in said
    assert "units failed" not in said, "the other units cannot be done either"
    subprocess.run(command(*line), cwd=tmp_path, check=True, capture_output=True)
    library.prepare(sources, tmp_path / "right", tokenizer="byte", unit_bytes=600_000, workers=1)
    assert tree(tmp_path / "out") == tree(tmp_path / "right")
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_limit_that_is_too_low_for_anything_is_named_as_well(tmp_path: Path, sources: Path, workers: int) -> None:
    assert "a temporary file" in limited(tmp_path, "prepare", "in", "-o", "out", "-j", workers)
    limited(tmp_path, "prepare", "in", "-o", "out", "-j", workers, limit=100)


def test_an_export_and_a_scratch_disk_have_the_same_limit(tmp_path: Path, sources: Path) -> None:
    library.prepare(sources, tmp_path / "data", tokenizer="byte", workers=1)
    limited(tmp_path, "export", "data", "out", "--to", "nanogpt")
    (tmp_path / "scratch").mkdir()
    said = limited(tmp_path, "prepare", "in", "-o", "new", "--tokenizer", "byte", "--scratch", "scratch", "-j", "1")
    assert str(tmp_path / "scratch") in said


def test_workers_that_cannot_be_started_are_an_error_with_a_way_out(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    forkserver.start_early()  # whoever wants one is told
    assert not forkserver._unused
    with pytest.raises(BuildError, match=r"workers cannot be started: .*nothing") as error:
        library.prepare(sources, tmp_path / "out", tokenizer="byte", workers=2)
    assert "`workers=1`" in error.value.hint
    library.prepare(sources, tmp_path / "out", tokenizer="byte", workers=1)


_WITH_LITTLE_MEMORY = """
import resource, sys, tokenmill
from tokenmill.errors import TokenmillError
source, output, more, tokenizer = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
with open(f"{output}.txt", "w") as warm_up:  # what is loaded needs addresses too
    warm_up.write("a few words")
tokenmill.prepare(f"{output}.txt", f"{output}-before", tokenizer=tokenizer, workers=1)
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + more
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for command in (tokenmill.plan, tokenmill.prepare):
    try:
        command(source, output, tokenizer=tokenizer, workers=1)
        print("done")
    except TokenmillError as error:
        print(*f"{error.message} {error.hint}".split())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="`ulimit -v` has an effect on Linux only")
@pytest.mark.parametrize(
    ("size", "more", "tokenizer", "plan", "build"),
    [
        # It can be read and planned, and encoding it would need more: known before.
        (16_000_000, 300_000_000, "gpt2", "done", "a document of 16.0 MB takes about 448 MB of memory to encode, and"),
        # Libraries would abort.
        (60_000_000, 100_000_000, "byte", "needs about 800 MB", "needs about 800 MB"),
    ],
)
def test_with_ulimit_v_a_large_document_is_an_error_that_names_it(
    tmp_path: Path, size: int, more: int, tokenizer: str, plan: str, build: str
) -> None:
    source = tmp_path / "long.jsonl"
    source.write_text('{"text": "' + "x" * size + '"}\n')
    asked = [sys.executable, "-c", _WITH_LITTLE_MEMORY, str(source), str(tmp_path / "out"), str(more), tokenizer]
    variables = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(asked, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert plan in found[0]
    assert build in found[1]
    assert ("max_document_bytes" if plan == "done" else "ulimit -v") in found[1]


def test_the_command_leaves_addresses_to_documents_under_ulimit_v(tmp_path: Path) -> None:
    """Arrow's own pool would reserve most of them."""
    (tmp_path / "large.txt").write_text("the mill turns raw text " * 1_000_000)
    done = subprocess.run(
        command("prepare", "large.txt", "-o", "out", "-j", 1, "--documents", "files", "--tokenizer", "gpt2"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1_700_000_000, 1_700_000_000)),
    )
    assert done.returncode == 0, done.stderr
