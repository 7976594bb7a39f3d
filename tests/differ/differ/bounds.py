"""What a process may use is bounded: open files, maps, and the time of a child that was forked.

more shards than files may be open   ->  every token of every file, read here by numpy alone
more shards than a URL's locks       ->  the same batches as from the files themselves
an iterator begun before a fork      ->  an error in the child within seconds, and the parent is not disturbed
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tokenmill
from differ.seeding import Bug, replaced
from lab_runner import Row
from stores import bucket_server
from tokenmill.dataset import bin_idx
from tokenmill.dataset import dataset as datasets
from tokenmill.errors import StateError, TokenmillError
from tokenmill.loader import loader as prefetching
from tokenmill.storage import shard_cache

DOCUMENTS_A_SHARD = 3
EOT = 256  # of the byte tokenizer
LAYOUTS: dict[str, dict[str, Any]] = {
    "catid": {},
    "datatrove": {},
    "huggingface": {},
    "litdata": {},
    "llmc": {"shard_size": 1024},
    "mds": {},
    "megatron": {},
    "nanogpt": {},
    "olmo": {},
    "templar": {"seq_len": 16, "shard_size": 1024},
}
# Layouts that hold every token in its order, for an import that is compared with the whole dataset.
READ_AS_THEY_ARE = ("datatrove", "megatron")
PACKINGS = ("concat", "best_fit", "padded")


def build(path: Path, num_shards: int, name: str = "out") -> Path:
    """A dataset of about so many shards, each a few documents of random words."""
    draw = random.Random(name)
    texts = [" ".join(f"w{draw.randrange(999)}" for _ in range(30)) for _ in range(num_shards * DOCUMENTS_A_SHARD)]
    source = path / f"{name}.parquet"
    pq.write_table(pa.table({"text": texts}), source, row_group_size=DOCUMENTS_A_SHARD)
    unit_bytes = sum(map(len, texts)) // num_shards
    tokenmill.prepare(source, path / name, tokenizer="byte", unit_bytes=unit_bytes, workers=2)
    return path / name


def stored(path: Path) -> np.ndarray[Any, Any]:
    """All tokens of a dataset, by numpy alone."""
    return np.concatenate([np.fromfile(file, "<u2") for file in sorted((path / "train").glob("*.bin"))])


_OWN_FILES = 10  # what a process that has just started has open


@contextlib.contextmanager
def open_files(limit: int) -> Iterator[None]:
    """A process that may open so many files. What tests before this one left open does not count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = max(0, len(os.listdir("/proc/self/fd")) - _OWN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit + others, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def few_descriptors(num_shards: int, limit: int) -> Row:
    """Loaders of every packing, a mixture, documents one by one and `verify`, with fewer files than shards."""
    wrong: list[str] = []
    tried = 0

    def check(what: str, read: Callable[[], Any], expected: Any) -> None:
        nonlocal tried
        tried += 1
        about = f"{what} over {num_shards} shards with {limit} open files"
        try:
            if not np.array_equal(read(), expected):
                wrong.append(f"{about} differs")
        except TokenmillError as error:
            wrong.append(f"{about}: {error.message}")

    with tempfile.TemporaryDirectory() as place, open_files(limit):
        path = build(Path(place), num_shards)
        expected = stored(path)
        shards = len(list((path / "train").glob("*.bin")))
        if shards < num_shards // 2:
            wrong.append(f"only {shards} shards of {num_shards} were built")
        train = tokenmill.open(path)["train"]
        check("documents one by one", lambda: np.concatenate(list(train)), expected)
        all_rows = expected[: (len(expected) - 1) // 32 * 32].reshape(-1, 32)
        check("sequential rows", lambda: _rows_of(path, "sequential"), all_rows)
        check("shuffled rows", lambda: _in_order(_rows_of(path, "shuffled")), _in_order(all_rows))
        # Every document but its last token, which is a target alone.
        inputs = np.sort(np.delete(expected, np.flatnonzero(expected == train.eot_id)))
        for packing in PACKINGS[1:]:
            check(f"{packing} tokens", lambda packing=packing: _inputs_of(path, packing), inputs)
        check("parts of a mixture", lambda: _share_of_parts(path) > 0.9, True)
        check("verify", lambda: tokenmill.verify(path).ok, True)
    return Row(fault=f"{num_shards:,} shards, {limit} open files", tried=tried, wrong=tuple(wrong))


def commands_with_few_descriptors(num_shards: int, limit: int, layouts: Sequence[str] = tuple(LAYOUTS)) -> Row:
    """Every command that takes or gives a dataset, with fewer files than shards."""
    wrong: list[str] = []
    tried = 0

    def check(what: str, run: Callable[[], Any], is_right: Callable[[], bool]) -> None:
        nonlocal tried
        tried += 1
        about = f"{what} of {num_shards} shards with {limit} open files"
        try:
            run()
            if not is_right():
                wrong.append(f"{about}: the files differ")
        except (TokenmillError, OSError) as error:
            wrong.append(f"{about}: {error}")

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, bucket_server("s3") as make_bucket:
        place = Path(name)
        path = build(place, num_shards)
        expected = stored(path)
        bucket = make_bucket(f"b-{uuid.uuid4().hex[:12]}")
        far = f"{bucket.url}/ds"
        with environment(bucket.environment), open_files(limit):
            for layout in layouts:
                there, back = place / f"{layout}-there", place / f"{layout}-back"
                check(
                    f"export to {layout}",
                    lambda there=there, layout=layout: tokenmill.export(path, there, to=layout, **LAYOUTS[layout]),
                    lambda there=there: any(there.iterdir()),
                )
                if layout in READ_AS_THEY_ARE:
                    check(
                        f"import of {layout}",
                        lambda there=there, back=back, layout=layout: tokenmill.import_(
                            there, back, layout=layout, eot_id=EOT
                        ),
                        lambda back=back: np.array_equal(stored(back), expected),
                    )
            check("push", lambda: tokenmill.push(path, far), lambda: tokenmill.verify(far).ok)
            check(
                "pull",
                lambda: tokenmill.pull(far, place / "back"),
                lambda: np.array_equal(stored(place / "back"), expected),
            )
            for file in sorted((path / "train").glob("*.bin"))[::2]:
                file.unlink()
            check("verify", lambda: None, lambda: len(tokenmill.verify(path).problems) >= num_shards // 4)
            check("repair", lambda: tokenmill.repair(path), lambda: np.array_equal(stored(path), expected))
    return Row(fault=f"commands, {num_shards:,} shards, {limit} open files", tried=tried, wrong=tuple(wrong))


def _rows_of(path: Path, order: Any) -> Any:
    loader = tokenmill.DataLoader(path, 32, 64, epochs=1, order=order, seed=3, drop_last=False)
    return np.concatenate([batch["input_ids"] for batch in loader])


def _in_order(rows: Any) -> Any:
    return rows[np.lexsort(rows.T)]


def _inputs_of(path: Path, packing: Any) -> Any:
    """The tokens of all packed rows that are followed by one of their own document."""
    loader = tokenmill.DataLoader(path, 512, 8, epochs=1, packing=packing, drop_last=False)
    return np.sort(np.concatenate([batch["input_ids"][batch["labels"] >= 0] for batch in loader]))


def _share_of_parts(path: Path) -> float:
    """How much of what it should have the part of a mixture has that has least."""
    mixture = tokenmill.Mixture(dict.fromkeys("abc", (path, 1)))
    loader = tokenmill.DataLoader(mixture, 32, 6, fields=("component",))
    steps = loader.num_samples // 6
    seen = dict.fromkeys(range(3), 0)
    for _, batch in zip(range(steps), loader, strict=False):
        for part in batch["component"].tolist():
            seen[part] += 1
    return min(seen.values()) / steps


def few_locks(num_shards: int, num_locks: int) -> Row:
    """A dataset in an S3 server, with fewer locks than shards, against the files themselves."""
    wrong = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, bucket_server("s3") as make_bucket:
        path = build(Path(place), num_shards)
        bucket = make_bucket(f"b-{uuid.uuid4().hex[:12]}")
        for file in path.rglob("*"):
            if file.is_file() and ".build" not in file.parts:
                bucket.put(f"ds/{file.relative_to(path)}", file.read_bytes())
        with replaced(shard_cache, "_MAX_LOCKS", num_locks)(), environment(bucket.environment):
            far = tokenmill.DataLoader(
                tokenmill.open(f"{bucket.url}/ds", cache=f"{place}/cache"), 32, 4, epochs=2, prefetch=0
            )
            near = tokenmill.DataLoader(path, 32, 4, epochs=2, prefetch=0)
            tried = most = 0
            for one, other in zip(far, near, strict=True):
                tried += 1
                if not np.array_equal(one["input_ids"], other["input_ids"]):
                    wrong.append(f"batch {tried} with {num_locks} locks differs from that of the files")
                if tried > 20:  # the downloads of the beginning open files too
                    most = max(most, _num_open(f"{place}/cache"))
            if most > num_locks + 16:
                wrong.append(f"{most} files were open with {num_locks} locks")
    return Row(fault="shards of a URL, few locks", tried=tried, wrong=tuple(wrong))


def _num_open(folder: str) -> int:
    """How many files of a folder are open. Connections to a server do not count: how many there are depends on time."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(folder)
    return count


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def forked(num_children: int) -> Row:
    """`next()` in children of a process that had begun to iterate, at several depths and places."""
    wrong, hangs, tried = [], 0, 0
    with tempfile.TemporaryDirectory() as place:
        path = build(Path(place), 8)
        rows = [batch["input_ids"].tolist() for batch in tokenmill.DataLoader(path, 16, 2, epochs=1)]
        for number in range(num_children):
            depth, steps = 1 + number % 4, 1 + number % 7
            loader = tokenmill.DataLoader(path, 16, 2, prefetch=depth, epochs=1)
            running = iter(loader)
            for _ in range(steps):
                next(running)
            child = os.fork()
            if not child:
                os._exit(_in_child(running, loader, rows[steps]))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            tried += 1
            if status == -signal.SIGALRM:
                hangs += 1
                wrong.append(f"depth {depth}, {steps} steps: the child of a fork hangs")
            if status > 0:
                wrong.append(f"depth {depth}, {steps} steps: the child of a fork ended with {status}")
            if next(running)["input_ids"].tolist() != rows[steps]:
                wrong.append(f"depth {depth}, {steps} steps: the parent's next batch is another one")
            running.close()  # type: ignore[attr-defined]
    return Row(fault="an iterator begun before a fork", tried=tried, wrong=tuple(wrong), hangs=hangs)


def _in_child(running: Iterator[Any], loader: Any, expected: list[Any]) -> int:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(3)
    try:
        next(running)
    except StateError:
        return 0 if next(iter(loader))["input_ids"].tolist() == expected else 2
    except BaseException:
        return 3
    return 4


# What a process of its own runs before anything else: where a mend is taken out, that is here.
_BEFORE = ""
_BUILD = """
import resource, sys, tokenmill
tokenmill.prepare(sys.argv[1], sys.argv[2], tokenizer="byte", workers=1)
used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
print(sum(one.ru_utime + one.ru_stime for one in used))
"""
_ENCODE = """
import sys, pathlib
from tokenmill.sources.base import text_array
from tokenmill.units import memory
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.spec import resolve

def kilobytes(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))

engine = open_engine(resolve(sys.argv[1]))
engine.encode(text_array(["a few words"] * 1000))
text = text_array([pathlib.Path(sys.argv[2]).read_text()])
before = kilobytes("VmRSS")
engine.encode(text)
print(1024 * (kilobytes("VmHWM") - before), memory.bytes_needed(text, engine))
"""
GOOD_LINE = '{"text": "a good line, which is as long as others are, number %d"}'
BAD_LINES = {
    "lone surrogates": '{"text": "\\ud800 %d"}',
    "no object": "[%d]",
    "no such field": '{"words": "%d"}',
    "broken off": '{"text": "a %d',
    "not UTF-8": '{"text": "\xff %d"}',
    "a number": '{"text": %d}',
    "infinity, not quoted": '{"x": Inf, "text": a %d}',
    "an open string": '{"text": "a %d}',
}
# The same with brackets inside of brackets: what is before and after, and one bracket that opens and one that closes.
DEEP_LINES = {
    "brackets left open": ('{"text": "%d", "x": ', "[", "", "}"),
    "objects left open": ('{"text": "%d", "x": ', '{"a":', "", "}"),
    "escapes, not UTF-8, brackets left open": ('{"text": "\\n\xff %d", "x": ', "[", "", "}"),
    "lone surrogates, brackets left open": ('{"text": "\\ud800 %d", "x": ', "[", "", "}"),
    "NaN, brackets left open": ('{"text": "%d", "y": NaN, "x": ', "[", "", "}"),
    "lone surrogates, brackets": ('{"text": "\\ud800 %d", "x": ', "[", "]", "}"),
    "escapes, not UTF-8, brackets": ('{"text": "\\n\xff %d", "x": ', "[", "]", "}"),
    "brackets that do not match": ('{"text": "%d", "x": ', "[", "}", "}"),
    "open strings of quotes": ('{"x": [[, "%d', '\\"', "", "}"),
    "lone surrogates within brackets": ('{"x": ["\\ud800 %d", ', "[", "]", "]}"),
}
LINE_BYTES = (24, 100, 1000, 2000)  # of a bad line, and of the good lines that it is compared with
LARGE_DOCUMENTS: dict[str, Callable[[int], str]] = {
    "of words": lambda size: "the mill turns raw text " * (size // 24),
    "of spaces": lambda size: " " * size,
    "of one run": lambda size: random.Random(1).randbytes(size // 2).hex(),
    "of one run beyond ASCII": lambda size: "天地玄黃宇宙洪荒" * (size // 24),
}


def _numbers(code: str, *arguments: object) -> list[float]:
    """What a process of its own prints."""
    asked = [sys.executable, "-c", f"{_BEFORE}\n{code}", *map(str, arguments)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(done.stderr[-600:])
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


def _long_line(line: str, size: int) -> str:
    """Letters where the number was are all that makes a line longer."""
    return line[:-3] + "a" * (size - len(line)) + line[-3:]


def _deep_line(kind: str, number: int, size: int) -> str:
    before, opens, closes, after = DEEP_LINES[kind]
    depth = max(1, (size - len(before) - len(after)) // len(opens + closes))
    return before % number + opens * depth + closes * depth + after


def bad_lines(
    num_lines: int,
    kinds: Sequence[str] = (*BAD_LINES, *DEEP_LINES),
    line_bytes: Sequence[int] = LINE_BYTES,
) -> Row:
    """The time of lines that are not right JSON, against the time of as many good ones as long: at most ten times."""
    wrong = []
    with tempfile.TemporaryDirectory() as place:

        def seconds(name: str, size: int, lines: Iterable[str]) -> float:
            source = Path(place, f"{name}-{size}.jsonl")
            made = chain((GOOD_LINE % number for number in range(100)), lines)
            source.write_bytes("".join(f"{line}\n" for line in made).encode("latin-1"))
            return _numbers(_BUILD, source, f"{place}/{name}-{size}")[0]

        def seconds_of(kind: str, size: int, count: int) -> float:
            if kind in DEEP_LINES:
                made = (_deep_line(kind, number, size) for number in range(count))
            else:
                made = (_long_line(BAD_LINES[kind] % number, size) for number in range(count))
            return seconds(kind.replace(" ", "-"), size, made)

        start = seconds("none", 0, ())
        for size in line_bytes:
            count = num_lines * 300 // max(size, 300)  # long lines take their time
            good = seconds("good", size, (_long_line(f'{{"text": "{number} "}}', size) for number in range(count)))
            good = max(0.02, good - start)
            for kind in kinds:
                times = (seconds_of(kind, size, count) - start) / good
                if times > 10:
                    wrong.append(f"{count} lines of {size} bytes, {kind}: {times:.0f} times the time of good ones")
    return Row(fault="time of bad JSON lines", tried=len(kinds) * len(line_bytes), wrong=tuple(wrong))


def large_documents(size: int, kinds: Sequence[str] = tuple(LARGE_DOCUMENTS)) -> Row:
    """The memory that encoding a large document takes, against what is asked for before."""
    tried, wrong = 0, []
    with tempfile.TemporaryDirectory() as place:
        for kind in kinds:
            document = Path(place, "document")
            document.write_text(LARGE_DOCUMENTS[kind](size))
            for tokenizer in ("gpt2", "byte"):
                tried += 1
                taken, asked = _numbers(_ENCODE, tokenizer, document)
                if taken > asked:
                    needs = f"{taken / 1e6:.0f} MB, not {asked / 1e6:.0f} MB"
                    wrong.append(f"{tokenizer}, a document {kind}, {size / 1e6:.0f} MB: it takes {needs}")
    return Row(fault="memory of large documents", tried=tried, wrong=tuple(wrong))


def _held_map(path: str, dtype: Any, *, offset: int = 0, count: int | None = None) -> Any:
    """The map of numpy, which keeps a file open."""
    return np.memmap(path, dtype, "r", offset, None if count is None else (count,)).view(np.ndarray)


@contextlib.contextmanager
def _python_maps() -> Iterator[None]:
    with replaced(bin_idx, "map_file", _held_map)(), replaced(datasets, "map_file", _held_map)():
        yield


_LINE_BY_LINE = """
from tokenmill.sources import jsonl
real = jsonl._parsed_by_arrow
jsonl._unparsed = lambda line, column: ("lone_surrogate", True)
jsonl._parsed_by_arrow = lambda lines, column: [real([line], column)[0] for line in lines]
"""
EXPERIMENTS: list[tuple[str, Callable[[], Row]]] = [
    ("bounds: descriptors", lambda: few_descriptors(10_000, 256)),
    ("bounds: commands", lambda: commands_with_few_descriptors(1_000, 128)),
    ("bounds: locks", lambda: few_locks(300, 8)),
    ("bounds: forks", lambda: forked(200)),
    ("bounds: bad lines", lambda: bad_lines(200_000)),
    ("bounds: large documents", lambda: large_documents(30_000_000)),
]
BUGS: list[Bug] = [
    Bug(
        name="a map keeps its file open",
        plant=_python_maps,
        trial=lambda: few_descriptors(60, 100),
        says="documents one by one over 60 shards with 100 open files: ",
    ),
    Bug(
        name="an export keeps every file open",
        plant=_python_maps,
        trial=lambda: commands_with_few_descriptors(100, 70, ("datatrove",)),
        says="export to datatrove of 100 shards with 70 open files: ",
        is_quick=False,
    ),
    Bug(
        name="an iterator does not know its process",
        plant=replaced(prefetching.os, "getpid", lambda: 1),
        trial=lambda: forked(1),
        says="the child of a fork hangs",
    ),
    Bug(
        name="every lock is kept",
        plant=replaced(shard_cache, "_max_held", lambda: 1 << 30),
        trial=lambda: few_locks(30, 3),
        says=" files were open with 3 locks",
    ),
    Bug(
        name="every bad line has a parser of its own",
        plant=replaced(sys.modules[__name__], "_BEFORE", _LINE_BY_LINE),
        trial=lambda: bad_lines(20_000, ("lone surrogates",), (100,)),
        says="times the time of good ones",
        is_quick=False,
    ),
    Bug(
        name="a run without a space counts as words do",
        plant=replaced(
            sys.modules[__name__], "_BEFORE", "from tokenmill.units import memory; memory.longest_run = lambda data: 0"
        ),
        trial=lambda: large_documents(9_000_000, ("of spaces",)),
        says="gpt2, a document of spaces, 9 MB: it takes",
        is_quick=False,
    ),
]
