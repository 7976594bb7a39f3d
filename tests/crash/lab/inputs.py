"""Sources that are not what they should be: changed parquet, JSON, CSV, compressed text and Arrow files.

Each changed file is listed, planned and read as a build does it. What comes out are documents that can be
looked at, or an error of ours. The libraries that read them are native code: a file that ends their
process is a finding too, so the points run in cells.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import zstandard

from lab.cell import Point, explore
from lab.mutate import bytes_of, value_of
from lab_runner import Row
from tokenmill.build.plan import Plan
from tokenmill.build.resolve import resolve_build
from tokenmill.errors import TokenmillError
from tokenmill.recipe import make_recipe
from tokenmill.resources import MEMORY_BUDGET
from tokenmill.sources.reader import read_unit
from tokenmill.units.encode import hash_documents

ADDRESS_BYTES = 8_000_000_000
TEXTS = [f"{i} the mill turns 数千の文書 into слова 🙂 <|endoftext|> " * (1 + i % 4) for i in range(40)]
LINES = b"".join(json.dumps({"id": i, "text": text}).encode() + b"\n" for i, text in enumerate(TEXTS))


def _parquet(**options: object) -> bytes:
    table = pa.table({"id": list(range(len(TEXTS))), "text": [*TEXTS[:-1], None]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=15, **options)
    return sink.getvalue().to_pybytes()


def _turns() -> bytes:
    turns = [[{"role": "user", "content": text[:20]}, {"role": "x", "content": text}] for text in TEXTS]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"messages": turns}), sink, row_group_size=15)
    return sink.getvalue().to_pybytes()


def _arrow(kind: Callable[..., pa.ipc.RecordBatchStreamWriter], text: pa.Array) -> bytes:
    table = pa.table({"id": list(range(len(TEXTS))), "text": text})
    sink = pa.BufferOutputStream()
    with kind(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=15)
    return sink.getvalue().to_pybytes()


def _csv(delimiter: str = ",") -> bytes:
    sink = io.StringIO(newline="")
    csv.writer(sink, delimiter=delimiter).writerows([("id", "text"), *enumerate(f'"{text}"\n' for text in TEXTS)])
    return sink.getvalue().encode()


def samples() -> dict[str, bytes]:
    """One valid file of each kind, small enough that a change hits something."""
    plain = "\n".join(TEXTS).encode()
    return {
        "plain.parquet": _parquet(compression="none", use_dictionary=False),
        "snappy.parquet": _parquet(compression="snappy"),
        "zstd.parquet": _parquet(compression="zstd", use_dictionary=False, data_page_version="2.0"),
        "delta.parquet": _parquet(use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}),
        "turns.parquet": _turns(),
        "a.jsonl": LINES,
        "a.jsonl.gz": gzip.compress(LINES),
        "a.jsonl.zst": zstandard.compress(LINES),
        "a.txt": plain,
        "a.txt.gz": gzip.compress(plain),
        "a.txt.zst": zstandard.compress(plain),
        "a.csv": _csv(),
        "a.tsv.gz": gzip.compress(_csv("\t")),
        "a.json": json.dumps([{"id": i, "text": text} for i, text in enumerate(TEXTS)], indent=1).encode(),
        "object.json": json.dumps({"n": 1, "data": [{"text": text} for text in TEXTS]}).encode(),
        "a.jsonl.bz2": bz2.compress(LINES),
        "a.jsonl.xz": lzma.compress(LINES),
        "a.jsonl.lz4": pa.Codec("lz4").compress(LINES, asbytes=True),
        "stream.arrow": _arrow(pa.ipc.new_stream, pa.array(TEXTS)),
        "file.arrow": _arrow(pa.ipc.new_file, pa.array(TEXTS, pa.large_string())),
        "dictionary.arrow": _arrow(pa.ipc.new_stream, pa.array(TEXTS).dictionary_encode()),
        "view.arrow": _arrow(pa.ipc.new_file, pa.array(TEXTS, pa.string_view())),
    }


def change(name: str, data: bytes, chance: random.Random) -> bytes:
    """The file with something wrong: in its packing, in what is packed, or in what says where things are."""
    inner = {
        ".gz": (gzip.decompress, gzip.compress),
        ".zst": (zstandard.decompress, zstandard.compress),
        ".bz2": (bz2.decompress, bz2.compress),
        ".xz": (lzma.decompress, lzma.compress),
    }
    kind = chance.random()
    for ending, (unpack, pack) in inner.items():
        if name.endswith(ending) and kind < 0.5:
            return bytes(pack(_change_text(name, bytes(unpack(data)), chance)))
    if name.endswith((".jsonl", ".txt", ".csv", ".json")):
        return _change_text(name, data, chance)
    if kind < 0.7 and name.endswith((".parquet", ".arrow")):
        # Footers and headers are few bytes of a file, and most of what can be wrong with it.
        start = chance.choice((0, 4, len(data) // 3, len(data) // 2, max(0, len(data) - 700), max(0, len(data) - 200)))
        window = data[start : start + chance.choice((16, 64, 256, 700))]
        changed = _same_size(window, chance) if chance.random() < 0.8 else bytes_of(window, chance, data)
        return data[:start] + changed + data[start + len(window) :]
    return bytes_of(data, chance, data)


def _change_text(name: str, data: bytes, chance: random.Random) -> bytes:
    if ".jsonl" in name and chance.random() < 0.5:
        lines = data.splitlines()
        at = chance.randrange(len(lines))
        lines[at] = value_of(lines[at], chance)
        return b"\n".join(lines)
    if name.endswith(".json") and chance.random() < 0.5:
        return value_of(data, chance)
    return bytes_of(data, chance, b'{"text": "\\ud83d\\ude42"}\r\n\x00\xff\xef\xbb\xbf')


def _same_size(data: bytes, chance: random.Random) -> bytes:
    """Bytes changed and none moved, so that all offsets still lead where they did."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(changed))
        odd = (0, 1, 127, 128, 255, changed[at] ^ 1, changed[at] + 1, changed[at] - 1, chance.randrange(256))
        changed[at] = chance.choice(odd) % 256
    return bytes(changed)


def read_as_a_build(path: Path, documents: str) -> int:
    """List, plan and read a source; gives the number of documents and of those that were skipped."""
    recipe = make_recipe({"sources": (str(path),), "tokenizer": "byte", "documents": documents, "unit_bytes": 700})
    setup = resolve_build(recipe)
    return sum(_read(setup.plan, str(path.parent), unit, documents) for unit in range(len(setup.plan.units)))


def _read(plan: Plan, root: str, number: int, documents: str) -> int:
    unit = plan.units[number]
    sources = list(plan.sources[unit.source : unit.source + unit.num_sources])
    paths = [f"{root}/{source.name}" for source in sources]
    count = 0
    for batch in read_unit(unit, paths, sources, documents=documents, limit=100_000):
        hash_documents(batch.text)  # looks at every byte, as a build does next
        assert len(batch.text) == len(batch.positions) == len(batch.sources), "a document without its place"
        assert batch.text.null_count == 0, "a document that is null"
        count += batch.num_read
    return count


@contextlib.contextmanager
def changed_sources(seed: int) -> Iterator[Point]:
    home = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="inputs-", dir=home) as folder:
        valid = samples()
        for name, data in valid.items():
            Path(folder, name).write_bytes(data)
            assert read_as_a_build(Path(folder, name), "lines") >= len(TEXTS), f"{name} cannot even be read as it is"

        def point(number: int) -> str | None:
            name, data = list(valid.items())[number % len(valid)]
            chance = random.Random(f"{seed} {number}")
            path = Path(folder, name)
            path.write_bytes(change(name, data, chance))
            documents = chance.choice(("lines", "lines", "files", "separator:\n\n")) if ".txt" in name else "lines"
            try:
                read_as_a_build(path, documents)
            except TokenmillError as error:
                return None if error.message else f"{name}: an error without a word"
            except BaseException as error:
                return f"{name}: {type(error).__name__}: {str(error)[:200]} {_places(error)}"
            return None

        yield point


def _places(error: BaseException) -> str:
    trace, places = error.__traceback__, []
    while trace is not None:
        places.append(f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(places[-5:]))


def run(points: int, *, seed: int = 0) -> Row:
    """Changed sources, each read as a build reads it."""
    found = explore(changed_sources, (seed,), points, patience=30, memory=ADDRESS_BYTES, is_quiet=True)
    if found.peak_bytes > MEMORY_BUDGET:
        found.wrong.append(f"a cell took {found.peak_bytes} bytes of memory")
    return found.row("changed parquet, arrow, jsonl, json, csv, txt sources, plain and compressed")


EXPERIMENTS = [("inputs", lambda: run(12_000))]
