"""What the benchmarks are made of: a corpus, programs run in fresh processes, and a table.

corpus -> run(command) -> Run(seconds, output, memory) -> Row(ours, peer, ratio, bar) -> table
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.resources
import itertools
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.sizes import parse_size

FILE_BYTES = 60_000_000
ROWS_A_GROUP = 1000
SAMPLE_SECONDS = 0.02

RANKS = str(importlib.resources.files("tokenmill") / "embedded" / "gpt2.tiktoken")
COMMAND = str(Path(sys.executable).parent / "tokenmill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. `figure` is what the bar is about: a ratio, seconds or megabytes."""

    name: str
    what: str
    ours: str = ""
    peer: str = ""
    figure: float
    bar: float
    at_least: bool = False
    judged: bool = True
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar

    def cells(self) -> list[str]:
        bar = f"{'>=' if self.at_least else '<='} {self.bar:g}" if self.judged else ""
        verdict = ("pass" if self.passed else "FAIL") if self.judged else ""
        return [self.name, self.what, self.ours, self.peer, f"{self.figure:.2f}", bar, verdict]


def format_table(rows: Sequence[Row]) -> str:
    lines = [["benchmark", "what was run", "ours", "peer", "figure", "bar", ""], *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


@dataclass(frozen=True, slots=True)
class Run:
    """A program that ended well: its wall clock, what it printed, peak memory of its children and of itself.

    `cpu_seconds` are those of the program and its children, user and system.
    """

    seconds: float
    output: str
    children_bytes: int = 0
    own_bytes: int = 0
    cpu_seconds: float = 0.0

    def result(self) -> dict[str, Any]:
        return dict(json.loads(self.output.splitlines()[-1]))


def run(command: Sequence[str], *, watch: bool = False, environment: dict[str, str] | None = None) -> Run:
    """Run a program to its end in a fresh process. What earlier ones left to be written is written first."""
    os.sync()
    peaks: dict[int, int] = {}
    ended = threading.Event()
    before = OTHER_LOAD.now()
    begin = time.perf_counter()
    cpu_begin = _cpu_of_children()
    process = start(command, environment)
    if watch:
        threading.Thread(target=_sample, args=(process.pid, peaks, ended), daemon=True).start()
    output, errors = process.communicate()
    seconds = time.perf_counter() - begin
    ended.set()
    OTHER_LOAD.add(before, OTHER_LOAD.now())
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ... ended with code {process.returncode}:\n{errors[-3000:]}")
    own = peaks.pop(process.pid, 0)
    return Run(seconds, output, max(peaks.values(), default=0), own, _cpu_of_children() - cpu_begin)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class OtherLoad:
    """How much of the machine went to others while ours ran: what a figure may be blamed on."""

    def __init__(self) -> None:
        self.busy = self.own = self.wall = 0.0

    def add(self, begin: tuple[float, float, float], end: tuple[float, float, float]) -> None:
        self.busy += end[0] - begin[0]
        self.own += end[1] - begin[1]
        self.wall += end[2] - begin[2]

    @property
    def cores(self) -> float:
        return max(0.0, self.busy - self.own) / max(self.wall, 1e-9)

    @staticmethod
    def now() -> tuple[float, float, float]:
        """Busy seconds of all cores (with what the host took), of our own processes, and the clock."""
        user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return busy, sum(one.ru_utime + one.ru_stime for one in used), time.perf_counter()


OTHER_LOAD = OtherLoad()


def start(command: Sequence[str], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def kill_tree(process: subprocess.Popen[str]) -> None:
    """kill -9 of a process and all below it; the parent first, for it would replace its children."""
    everyone = [process.pid, *descendants(process.pid)]
    for pid in everyone:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()
    while any(_parent(pid) is not None for pid in everyone):
        time.sleep(0.001)


def descendants(root: int) -> list[int]:
    """The processes below one, as /proc has them now."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent(int(name))) is not None:
            below.setdefault(parent, []).append(int(name))
    found, open_ends = [], [root]
    while open_ends:
        children = below.get(open_ends.pop(), [])
        found += children
        open_ends += children
    return found


def _parent(pid: int) -> int | None:
    """The parent of a process; None if it is gone or a zombie."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(parent) if state not in "ZX" else None


def _sample(root: int, peaks: dict[int, int], ended: threading.Event) -> None:
    """Note the peak memory of a process and all below it, until they have ended."""
    while not ended.wait(SAMPLE_SECONDS):
        for pid in (root, *descendants(root)):
            with contextlib.suppress(OSError, IndexError):
                text = Path(f"/proc/{pid}/status").read_text()
                peaks[pid] = int(text.partition("VmHWM:")[2].split()[0]) * 1024


@dataclass(frozen=True, slots=True)
class Corpus:
    """The same documents as parquet and as JSON lines."""

    parquet: list[str]
    jsonl: list[str]
    sizes: list[int]

    @property
    def text_bytes(self) -> int:
        return sum(self.sizes)

    def files(self, kind: str) -> list[str]:
        return self.parquet if kind == "parquet" else self.jsonl

    def take(self, limit: int) -> Corpus:
        """The first files alone, as many as have no more text than that, but one at least."""
        count = max(1, sum(total <= limit for total in itertools.accumulate(self.sizes)))
        return Corpus(self.parquet[:count], self.jsonl[:count], self.sizes[:count])

    def times(self, count: int, folder: Path) -> Corpus:
        """So many copies of every file under other names, without the space for them."""
        folder.mkdir()
        links = []
        for copy in range(count):
            for path in self.parquet:
                links.append(str(folder / f"{copy}-{Path(path).name}"))
                os.link(path, links[-1])
        return Corpus(links, [], self.sizes * count)


def make_corpus(folder: Path, size: int, given: Sequence[str]) -> Corpus:
    """Documents, repeated up to `size` bytes of text, in files of about 60 MB each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = list(_given(given) if given else library_texts())
    corpus = Corpus([], [], [])
    for number, texts in enumerate(_files(documents, size)):
        stem = folder / f"{number:03d}"
        table = pa.table({"id": [f"{number}-{row}" for row in range(len(texts))], "text": texts})
        pq.write_table(table, f"{stem}.parquet", row_group_size=ROWS_A_GROUP)
        with open(f"{stem}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())
        corpus.parquet.append(f"{stem}.parquet")
        corpus.jsonl.append(f"{stem}.jsonl")
        corpus.sizes.append(sum(len(text.encode()) for text in texts))
    return corpus


@dataclass(frozen=True, slots=True)
class Bench:
    """What every benchmark works with."""

    corpus: Corpus
    work: Path
    workers: int
    repeats: int

    @property
    def output(self) -> Path:
        return self.work / "dataset"

    def clear(self) -> None:
        shutil.rmtree(self.output, ignore_errors=True)

    def prepare_command(self, files: list[str], workers: int | None = None, *, output: Path | None = None) -> list[str]:
        return [COMMAND, "prepare", *files, "-o", str(output or self.output), "-j", str(workers or self.workers)]

    def prepare(self, files: list[str], *, workers: int | None = None, watch: bool = False) -> Run:
        """A whole build into an empty folder."""
        self.clear()
        return run(self.prepare_command(files, workers), watch=watch)


def _files(documents: list[str], size: int) -> Iterator[list[str]]:
    texts: list[str] = []
    held = total = 0
    while total < size:
        for text in documents:
            texts.append(text)
            length = len(text.encode())
            held += length
            total += length
            if held >= FILE_BYTES or total >= size:
                yield texts
                texts, held = [], 0
            if total >= size:
                return


def library_texts() -> Iterator[str]:
    """The source files of Python's standard library, as far as they are text."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages"}.isdisjoint(path.relative_to(root).parts):
            with contextlib.suppress(UnicodeDecodeError):
                if text := path.read_bytes().decode():
                    yield text


def _given(paths: Sequence[str]) -> Iterator[str]:
    import pyarrow.parquet as pq

    for path in paths:
        yield from (text for text in pq.read_table(path, columns=["text"])["text"].to_pylist() if text)


def corpus_parser(doc: str | None) -> argparse.ArgumentParser:
    """What the benchmarks that work on a corpus are told, each with the first line of its own docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--corpus", nargs="+", default=[], help="parquet files with columns id and text")
    parser.add_argument("--size", type=parse_size, default=parse_size("450MB"), help="text in all, repeated up to it")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def describe_machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": num_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("tokenmill", "gigatoken", "pyarrow", "tiktoken")},
    }


def machine_line() -> str:
    return ", ".join(f"{name} {value}" for name, value in describe_machine().items())


def core_seconds(pid: int) -> float:
    """How long a process had a core for until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def read_events(output: Path) -> list[dict[str, Any]]:
    """What a build logged of itself."""
    return [json.loads(line) for line in (output / ".build" / "events.jsonl").read_text().splitlines()]


def seconds_between(events: list[dict[str, Any]], first: str, last: str) -> float:
    times = {event["kind"]: event["time"] for event in events}
    return float(times[last] - times[first])
