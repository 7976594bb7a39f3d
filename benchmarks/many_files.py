"""Very many small files: what they cost beside the same text as one file, and beside opening and reading them alone.

python benchmarks/many_files.py [--files 100000] [--repeats 3] [--workers 2] [--only KIND ...]

Each file has 100 to 1,000 bytes of Python's own standard library: a document a file, lines, or JSON lines. Everything
is a fresh process, in turn within each repeat; medians are shown, of the clock and of the seconds that cores were had
for, which others that use this machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from measure import COMMAND, library_texts, machine_line, read_events, run, seconds_between

FILES = 100_000
FOLDER_FILES = 1_000
LEAST_BYTES, MOST_BYTES = 100, 1_000
# Nothing but what no reader of files can do without.
READ = """
import os, sys
for folder, folders, files in os.walk(sys.argv[1]):
    for name in files:
        file = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.read(file, 1 << 20)
        os.close(file)
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to write a small text as a file, and all of them as one; and what tells tokenmill how to read them."""

    ending: str
    own: Callable[[str], str]
    whole_ending: str
    whole: Callable[[str], str]
    options: tuple[str, ...] = ()


def _as_rows(text: str) -> str:
    return "".join(json.dumps({"text": line}) + "\n" for line in text.splitlines() if line)


def _as_row(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


def _as_lines(text: str) -> str:
    return text.removesuffix("\n") + "\n"


KINDS = {
    "files": Kind(".txt", str, ".jsonl", _as_row, ("--documents", "files")),
    "lines": Kind(".txt", _as_lines, ".txt", _as_lines),
    "jsonl": Kind(".jsonl", _as_rows, ".jsonl", _as_rows),
}


def small_texts(count: int) -> Iterator[str]:
    """Pieces of the library, of many sizes and in ASCII, so that characters are bytes."""
    library = "".join(text for text in library_texts() if text.isascii())
    at = 0
    for number in range(count):
        size = LEAST_BYTES + number * 7919 % (MOST_BYTES - LEAST_BYTES)
        at = at if at + size <= len(library) else 0
        yield library[at : at + size]
        at += size


def write(place: Path, kind: Kind, count: int) -> tuple[Path, Path, int]:
    """A folder of files, the same text as one file, and how many bytes that are."""
    folder, whole = place / "files", place / f"whole{kind.whole_ending}"
    size = 0
    with whole.open("w", encoding="ascii") as file:
        for number, text in enumerate(small_texts(count)):
            parent = folder / f"{number // FOLDER_FILES:03d}"
            if number % FOLDER_FILES == 0:
                parent.mkdir(parents=True)
            own = kind.own(text)
            (parent / f"{number:07d}{kind.ending}").write_text(own, encoding="ascii")
            file.write(kind.whole(text))
            size += len(own)
    return folder, whole, size


def measure_kind(name: str, given: argparse.Namespace, place: Path) -> None:
    kind = KINDS[name]
    folder, whole, size = write(place, kind, given.files)
    output = place / "out"

    def prepare(source: Path, workers: int, *options: str) -> list[str]:
        return [COMMAND, "prepare", str(source), "-o", str(output), "-j", str(workers), "-q", *options]

    ways = {
        "open, read, close": [sys.executable, "-c", READ, str(folder)],
        "plan": [COMMAND, "plan", str(folder), *kind.options],
        "prepare -j 1": prepare(folder, 1, *kind.options),
        f"prepare -j {given.workers}": prepare(folder, given.workers, *kind.options),
        "the same text as one file, -j 1": prepare(whole, 1),
    }
    clocks: defaultdict[str, list[float]] = defaultdict(list)
    cores: defaultdict[str, list[float]] = defaultdict(list)
    builds: defaultdict[str, list[float]] = defaultdict(list)
    units = 0
    for _ in range(given.repeats):
        for way, command in ways.items():
            shutil.rmtree(output, ignore_errors=True)
            before = _core_seconds()
            clocks[way].append(run(command).seconds)
            cores[way].append(_core_seconds() - before)
            if "-j" in way:
                builds[way].append(seconds_between(read_events(output), "start", "commit"))
            if way == "prepare -j 1":
                units = len(os.listdir(output / ".build" / "receipts"))
    sys.stdout.write(f"\n{name}: {given.files:,} files, {size / 1e6:.1f} MB, {units} units\n")
    base = median(cores["open, read, close"])
    for way in ways:
        own = median(cores[way])
        build = f"  units alone {median(builds[way]):6.2f} s" if builds[way] else ""
        sys.stdout.write(
            f"  {way:32} {median(clocks[way]):6.2f} s  cores {own:6.2f} s  {own / base:5.1f} times"
            f"  {own / given.files * 1e6:6.1f} us a file{build}\n"
        )


def _core_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    sys.stdout.write(f"{machine_line()}\n")
    for name in given.only:
        with tempfile.TemporaryDirectory() as place:
            measure_kind(name, given, Path(place))


if __name__ == "__main__":
    main()
