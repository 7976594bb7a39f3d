"""Fuzzing of everything that reads a file of ours, or a file that a user hands in beside the sources.

Valid files are made by a small build; what is tried is a change of one of them. A reader may take it, and
then what it gives must hold; or it refuses it with an error of ours. Anything else is wrong: another
exception, much memory, much time.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from lab import hostile
from lab.cell import Point, explore
from lab.mutate import HUGE, body_of, bytes_of, reseal, value_of
from lab.vocabularies import byte_level, ranks, sentence_pieces, unigram
from lab.world import make_world
from lab_runner import Row
from tokenmill import records
from tokenmill.build.plan import Plan
from tokenmill.build.workspace import BuildRecord, CleanStop
from tokenmill.dataset import manifest
from tokenmill.dataset.bin_idx import check_index, dtype_for, index_bytes, numpy_dtype, parse_header, parse_index
from tokenmill.dataset.manifest import Manifest, Shard
from tokenmill.errors import TokenmillError
from tokenmill.recipe import make_recipe, parse_split
from tokenmill.sizes import parse_fraction, parse_size
from tokenmill.sources.base import text_array
from tokenmill.storage.locks import Holder
from tokenmill.storage.output import Digest
from tokenmill.tokenizers.parity import choose_engine
from tokenmill.tokenizers.spec import resolve
from tokenmill.units.receipts import Receipt

# Memory that no fuzzed file may make a reader take on top of what it holds anyway.
GROWTH_BYTES = 200_000_000
ADDRESS_BYTES = 8_000_000_000

# Changes a valid input and reads it; raises what the reader raises.
Try = Callable[[random.Random], None]


@contextlib.contextmanager
def readers(seed: int, names: tuple[str, ...]) -> Iterator[Point]:
    """Points of the named readers, in turn."""
    home = "/dev/shm" if os.path.isdir("/dev/shm") else None
    # An error looks for secrets among all variables, so that many of them would cost more than the readers.
    few = {name: value for name, value in os.environ.items() if name in ("HOME", "PATH", "TMPDIR")}
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=home) as folder, patch.dict(os.environ, few, clear=True):
        tries = [READERS[name](Path(folder)) for name in names]

        def point(number: int) -> str | None:
            chance = random.Random(seed << 32 | number)
            name = names[number % len(names)]
            try:
                tries[number % len(names)](chance)
            except TokenmillError as error:
                return None if error.message else f"{name}: an error without a word"
            except BaseException as error:
                error.add_note(name)
                raise
            return None

        yield point


def sealed_files(path: Path) -> dict[str, bytes]:
    """One valid record of each kind."""
    if not (path / "world").exists():
        world = make_world(path / "world", "budget", tokenizer="char", documents=6, unit_bytes=300, max_tokens=300)
        world.build(str(path / "out"))
    out = path / "out"
    receipts = sorted((out / ".build/receipts").glob("*.json"))
    return {
        "manifest": (out / "dataset.json").read_bytes(),
        "plan": (out / ".build/plan.json").read_bytes(),
        "job": (out / ".build/job.json").read_bytes(),
        "receipt": receipts[-1].read_bytes(),
        "clean": records.seal(CleanStop(fingerprint="f" * 64, units=(0, 1, 2))),
        "holder": records.seal(Holder(machine="m" * 16, process=4711, started="123", token="t" * 16)),
    }


def _record(name: str) -> Callable[[Path], Try]:
    """A reader of sealed records: half of the changes break the seal, the others are sealed again."""
    read = SEALED[name]

    def make(path: Path) -> Try:
        files = sealed_files(path)
        sealed, others = files[name], list(files.values())
        body = body_of(sealed)
        assert reseal(body) == sealed, "the seal is made in another way than we think"
        read(sealed)

        def attempt(chance: random.Random) -> None:
            kind = chance.random()
            if kind < 0.3:
                read(bytes_of(sealed, chance, chance.choice(others)))
            elif kind < 0.45:
                read(reseal(bytes_of(body, chance, chance.choice(others))))
            else:
                read(reseal(value_of(body, chance)))

        return attempt

    return make


def _read_manifest(data: bytes) -> None:
    found = manifest.unseal_manifest(data)
    for name, digest in found.all_files().items():
        inside = os.path.normpath(name) == name and not os.path.isabs(name) and name.split("/")[0] != ".."
        assert inside and digest.bytes >= 0, f"the file {name!r} of {digest.bytes} bytes was let through"
    assert found.documents_read == found.documents + sum(found.dropped.values()), "the totals do not agree"
    assert isinstance(found, Manifest) and found.tokens >= 0


def _index(path: Path) -> Try:
    """Indexes of tokens: any bytes, and arrays that do not fit each other under a header that does."""
    sealed_files(path)
    files = [file.read_bytes() for file in sorted((path / "out").glob("*/*.idx"))]
    sizes = [file.stat().st_size for file in sorted((path / "out").glob("*/*.bin"))]

    def attempt(chance: random.Random) -> None:
        which = int(chance.random() * len(files))
        bin_bytes = sizes[which] if chance.random() < 0.9 else chance.choice(HUGE)
        data = bytes_of(files[which], chance, files[0]) if chance.random() < 0.5 else _arrays(chance, files[which])
        digest = Digest(bytes=len(data), sha256="0" * 64)
        shard = Shard(name="train/00000", tokens=bin_bytes // 2, documents=len(data) // 20, bin=digest, idx=digest)
        kind = chance.random()
        if kind < 0.1:
            parse_header(data[:34], where="x.idx")
        elif kind < 0.3:
            check_index(memoryview(data), shard, "uint16", where="x.idx")
        else:
            read_index(data, bin_bytes)

    return attempt


def read_index(data: bytes, bin_bytes: int) -> None:
    header, lengths = parse_index(memoryview(data), bin_bytes=bin_bytes, where="x.idx")
    assert len(data) == index_bytes(header.num_sequences) and (lengths >= 0).all(), "a bad index was let through"
    total = int(lengths.sum(dtype=np.int64)) * numpy_dtype(header.dtype).itemsize
    assert total == bin_bytes, f"an index of {total} bytes was let through for {bin_bytes}"


def _arrays(chance: random.Random, valid: bytes) -> bytes:
    (count,) = struct.unpack_from("<Q", valid, 18)
    data = bytearray(valid)
    for _ in range(chance.choice((1, 1, 2, 5))):
        kind, odd = chance.random(), chance.choice(HUGE)
        if kind < 0.3:
            struct.pack_into("<QQ", data, 18, odd % 2**64, (odd + chance.choice((0, 1))) % 2**64)
        elif kind < 0.6 and count:
            struct.pack_into("<I", data, 34 + 4 * chance.randrange(count), odd % 2**32)
        elif count:
            struct.pack_into("<Q", data, 34 + 4 * count + 8 * chance.randrange(2 * count + 1), odd % 2**64)
    return bytes(data)


_SIZES = ("64MB", "1GiB", "150G", "2.5M", "0.01", "1%", "val=0.0005,test=0.001", "1_000", "  7 kib ", "0")


def _size(path: Path) -> Try:
    readers = (parse_size, parse_fraction, parse_split)

    def attempt(chance: random.Random) -> None:
        read: Callable[[Any], object] = chance.choice(readers)
        if chance.random() < 0.1 and read is not parse_split:
            read(chance.choice(HUGE))
        else:
            read(bytes_of(chance.choice(_SIZES).encode(), chance, b"inf nan 1e999").decode(errors="replace"))

    return attempt


_RECIPE = b"""sources: [a.parquet, "b/*.jsonl"]
tokenizer: gpt2
template: "{title}: {body}"
documents: "separator:x"
split: {val: 0.0005, test: 1%}
unit_bytes: 64MB
max_tokens: 150G
sample: 0.5
seed: 7
min_chars: 3
eot: append
on_bad: quarantine
"""
# What YAML has beyond JSON, and what its readers stumble over.
_YAML = (
    *(b"a: &a [x, x]\nsources: [*a, *a]\n", b"seed: 2001-99-99\n", b"seed: 0x" + b"f" * 4000 + b"\n"),
    *(b"? [a]\n: b\n", b"seed: .inf\nsample: .nan\n", b"sources: " + b"[" * 500 + b"\n", b"<<: {seed: 1}\n"),
    *(b"split: !!binary x\n", b"seed: 1:30:00\n", b"sources: !!python/object/apply:os.system [ls]\n"),
    *(b"max_tokens: " + b"9" * 6000 + b"\n", b"split: {1: 2}\nseed: 9e99\n"),
)


def _recipe(path: Path) -> Try:
    file = path / "recipe.yaml"

    def attempt(chance: random.Random) -> None:
        # PyYAML takes milliseconds for a line, so a recipe is a few of them.
        lines = chance.sample(_RECIPE.splitlines(keepends=True), chance.choice((1, 2, 2, 3, 5)))
        data = bytes_of(b"".join(lines), chance, chance.choice(_YAML))
        if chance.random() < 0.4:
            data += chance.choice(_YAML)
        file.write_bytes(data)
        make_recipe({}, config=file)

    return attempt


def _tokenizer(make: Callable[[Path], Path], *, suffix: str = "") -> Callable[[Path], Try]:
    """A tokenizer's file; once in a while what was taken is opened by its engine, and encodes."""

    def prepare(path: Path) -> Try:
        file = make(path)
        valid = file.read_bytes()
        config = path / "tokenizer_config.json"

        def attempt(chance: random.Random) -> None:
            is_json = file.suffix == ".json" and chance.random() < 0.7
            file.write_bytes(value_of(valid, chance) if is_json else bytes_of(valid, chance, valid))
            config.unlink(missing_ok=True)
            if chance.random() < 0.1:
                config.write_bytes(value_of(b'{"eos_token":{"content":"<s>"},"x":0}', chance))
            spec = resolve(f"{file}{suffix}")
            dtype_for(spec.vocab_size)
            if chance.random() < 0.1:
                _, engine, _ = choose_engine(spec)
                engine.encode(text_array(["The quick brown fox <|endoftext|> déjà vu"]))

        return attempt

    return prepare


SEALED: dict[str, Callable[[bytes], object]] = {
    "manifest": _read_manifest,
    "plan": lambda data: records.unseal(Plan, data, where="plan.json"),
    "job": lambda data: records.unseal(BuildRecord, data, where="job.json"),
    "receipt": lambda data: records.unseal(Receipt, data, where="receipt"),
    "clean": lambda data: records.unseal(CleanStop, data, where="clean.json"),
    "holder": lambda data: records.unseal(Holder, data, where="lock"),
}
READERS: dict[str, Callable[[Path], Try]] = {
    **{name: _record(name) for name in SEALED},
    "index": _index,
    "size": _size,
    "recipe": _recipe,
    "tokenizer.json": _tokenizer(byte_level),
    "unigram.json": _tokenizer(unigram),
    "ranks.tiktoken": _tokenizer(ranks, suffix=":gpt2"),
    "bpe.model": _tokenizer(lambda path: sentence_pieces(path, "bpe")),
    "unigram.model": _tokenizer(lambda path: sentence_pieces(path, "unigram")),
}
# A point is of each of these in turn. Those that take long have turns of their own.
RECORDS = ("manifest", "plan", "job", "receipt", "clean", "holder", "index", "size")
TOKENIZERS = (*("ranks.tiktoken", "tokenizer.json") * 3, "unigram.json", "bpe.model", "unigram.model")


def run(points: int, *, names: tuple[str, ...] = RECORDS, seed: int = 0) -> Row:
    found = explore(readers, (seed, names), points, patience=20, memory=ADDRESS_BYTES, is_quiet=True)
    grown = found.peak_bytes - found.base_bytes
    if grown > GROWTH_BYTES:
        found.wrong.append(f"memory grew by {grown} bytes")
    return found.row(f"fuzzed {', '.join(dict.fromkeys(names))}")


EXPERIMENTS = [
    ("fuzz-records", lambda: run(1_000_000)),
    ("fuzz-recipes", lambda: run(2000, names=("recipe",))),
    ("fuzz-tokenizers", lambda: run(4500, names=TOKENIZERS)),
    *hostile.EXPERIMENTS,
]
