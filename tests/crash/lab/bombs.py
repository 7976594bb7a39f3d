"""Sources that are small on the disk and huge in memory: bombs, endless lines, millions of nothing.

Each one goes through the real command. What is too large is dropped and counted, the neighbours are kept,
and no process takes more memory than a worker may.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from lab.judge import quick_folder
from lab_runner import Row
from tokenmill.resources import MEMORY_BUDGET
from tokenmill.sources.files import HEAD_BYTES

# What begins with a hole would be refused as binary data before anything is read.
LETTERS = b"x" * HEAD_BYTES
BEFORE, AFTER = b'{"text": "before"}\n', b'{"text": "after"}\n'
TIMEOUT = 300
# The command, and the most memory that it and its workers held, as the last line of what it says.
MEASURED = """
import json, resource, sys
from tokenmill.cli.commands import run
code = run()
with open("/proc/self/status") as file:
    own = next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))
workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(f"\\n{1024 * max(own, workers)}", file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bomb:
    """A file that `write` makes of about so many bytes of text, and what becomes of its documents."""

    name: str
    write: Callable[[Path, int], None]
    kept: int = 2
    dropped: dict[str, int] = field(default_factory=lambda: {"too_large": 1})
    options: tuple[str, ...] = ()
    # Of the full size, for those whose documents are so many that each one's own time counts.
    share: float = 1.0


def _sparse(first: bytes, last: bytes) -> Callable[[Path, int], None]:
    """A hole between two texts: it reads as zeros, and takes no place."""

    def write(path: Path, size: int) -> None:
        with path.open("wb") as file:
            file.write(first)
            file.truncate(len(first) + size)
            file.seek(0, os.SEEK_END)
            file.write(last)

    return write


def _packed(pack: Callable[[bytes], bytes], first: bytes, filling: bytes, last: bytes) -> Callable[[Path, int], None]:
    """Many copies of one packed part: a stream may consist of as many as one likes."""

    def write(path: Path, size: int) -> None:
        step = min(size, 50_000_000) // len(filling)
        part = pack(filling * step)
        with path.open("wb") as file:
            file.write(pack(first))
            for _ in range(size // (step * len(filling))):
                file.write(part)
            file.write(pack(last))

    return write


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 1)


def _column(path: Path, size: int) -> None:
    """One text of 5,000 bytes, and a column that says it again and again."""
    texts = pa.array(["before", "x" * 5000, "after"])
    indices = np.ones(size // 5000, np.int32)
    indices[0], indices[-1] = 0, 2
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array(indices), texts)})
    pq.write_table(table, path, row_group_size=len(indices))


def bombs(size: int) -> list[Bomb]:
    quoted = (BEFORE + b'{"text": "' + LETTERS, b'"}\n' + AFTER)
    whole = ("--documents", "separator:<|endoftext|>")
    return [
        Bomb(name="line.txt", write=_sparse(b"before\n" + LETTERS, b"\nafter\n")),
        Bomb(name="line.jsonl", write=_sparse(*quoted)),
        Bomb(name="last.txt", write=_sparse(b"before\nmiddle\n" + LETTERS, b"")),
        Bomb(name="text.txt", write=_sparse(b"before<|endoftext|>" + LETTERS, b"<|endoftext|>after"), options=whole),
        Bomb(name="file.txt", write=_sparse(b"", b""), kept=0, options=("--documents", "files")),
        Bomb(name="bomb.jsonl.gz", write=_packed(_gzip, quoted[0], b"a", quoted[1])),
        Bomb(name="bomb.jsonl.zst", write=_packed(zstandard.compress, quoted[0], b"\0", quoted[1])),
        Bomb(name="bomb.txt.gz", write=_packed(_gzip, b"before\nx\n" + LETTERS, b"\0", b"")),
        Bomb(name="file.txt.zst", write=_packed(zstandard.compress, b"x", b"x", b"x"), kept=0, options=whole),
        Bomb(name="blank.txt.gz", write=_packed(_gzip, b"before\n", b"\n", b"after\n"), dropped={}, share=0.02),
        Bomb(
            name="bad.jsonl.zst",
            write=_packed(zstandard.compress, BEFORE, b"{}\n", AFTER),
            dropped={"missing_field": int(size * 0.001) // 3},
            share=0.001,
        ),
        Bomb(
            name="column.parquet",
            write=_column,
            dropped={"too_large": size // 5000 - 2},
            options=("--max-document-bytes", "4KB"),
            share=1.0,
        ),
    ]


def run(size: int, *, workers: tuple[int, ...] = (1, 2), names: tuple[str, ...] | None = None) -> Row:
    """All bombs, or those of these names, with each number of workers."""
    wrong: list[str] = []
    tried = hangs = 0
    for bomb in bombs(size):
        if names is not None and bomb.name not in names:
            continue
        with quick_folder() as folder:
            bomb.write(folder / bomb.name, int(size * bomb.share))
            # A small one beside it, so that something is kept in any case.
            (folder / "small.txt").write_text("small")
            for count in workers:
                tried += 1
                try:
                    wrong += [f"{bomb.name}, {count} workers: {what}" for what in _check(folder, bomb, count)]
                except subprocess.TimeoutExpired:
                    hangs += 1
                    wrong.append(f"{bomb.name}, {count} workers: no end after {TIMEOUT} s")
    return Row(
        fault="bombs and endless lines",
        tried=tried,
        wrong=tuple(wrong),
        hangs=hangs,
    )


def _check(folder: Path, bomb: Bomb, workers: int) -> Iterator[str]:
    out = folder / f"out{workers}"
    arguments = ["prepare", folder / bomb.name, folder / "small.txt", "-o", out, "--tokenizer", "byte", "--json", "-q"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments), "-j", str(workers), *bomb.options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    peak = int(done.stderr.splitlines()[-1]) if done.stderr.strip() else 0
    if done.returncode not in (0, 3):
        yield f"exit code {done.returncode}: {done.stderr[-300:]}"
        return
    result = json.loads(done.stdout)
    found = (result["documents"], result["dropped"])
    if found != (bomb.kept + 1, bomb.dropped):
        yield f"kept and dropped are {found}, not {(bomb.kept + 1, bomb.dropped)}"
    if result["documents_read"] != result["documents"] + sum(result["dropped"].values()):
        yield f"the totals do not agree: {result}"
    if not 0 < peak < MEMORY_BUDGET:
        yield f"{peak:,} bytes of memory"


EXPERIMENTS = [("bombs", lambda: run(2_200_000_000))]
