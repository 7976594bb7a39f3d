"""Types and extremes of every public argument: as the plain call, or a `TokenmillError` that names the argument.

The order that a loader gives is compared with one that is computed here from its definition, one sample at a time and
with plain numbers: the key of an epoch is a hash of the identity, the permutation a Feistel network.
"""

from __future__ import annotations

import decimal
import fractions
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import tokenmill
from differ.seeding import Bug, replaced
from lab_runner import Row
from tokenmill import arguments
from tokenmill.errors import TokenmillError

SEQ_LEN, BATCH, NUM_LINES = 8, 3, 40
_MASK = (1 << 64) - 1


def permuted(place: int, count: int, key: bytes) -> int:
    """Where the keyed permutation of `range(count)` takes a place."""
    if count < 2:
        return place
    bits = (count - 1).bit_length()
    low = bits // 2
    num_rounds = 6 if bits > 12 else 24
    stream = hashlib.shake_256(key).digest(8 * num_rounds)
    while True:
        left, right, sizes = place >> low, place & ((1 << low) - 1), (bits - low, low)
        for i in range(num_rounds):
            mixed = right ^ int.from_bytes(stream[8 * i : 8 * i + 8], "little")
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
            mixed ^= mixed >> 31
            left, right = right, left ^ (mixed & ((1 << sizes[i % 2]) - 1))
        place = left << low | right
        if place < count:
            return place


def expected_order(fingerprint: str, count: int, seq_len: int, seed: int, places: range) -> list[int]:
    """The samples at these places of a shuffled stream of windows, from plain numbers alone."""
    identity = {
        "fingerprint": fingerprint, "split": "train", "packing": "concat",
        "seq_len": seq_len, "order": "shuffled", "seed": seed,
    }  # fmt: skip
    found = []
    for place in places:
        epoch, within = divmod(place, count)
        key = hashlib.sha256("\0".join(map(repr, (identity, epoch))).encode()).digest()
        found.append(permuted(within, count, key))
    return found


class Index:
    """A number of somebody else's, which says exactly which int it stands for."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def same_numbers(value: int) -> list[Any]:
    """Ways to write a small whole number that mean it."""
    kinds = (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64)
    return [value, *(kind(value) for kind in kinds), np.array(value), Index(value)]


# What is not a whole number, whatever the argument is.
NO_NUMBERS: list[Any] = [
    True, False, np.True_, 1.0, 1.5, -0.0, np.float64(1), np.float32(2), math.nan, math.inf, "1", "a", "", b"1",
    decimal.Decimal(1), fractions.Fraction(1), 1j, [], [1], (), {}, {1}, np.array([1, 2]), np.array([]), object(),
    int, lambda: 1,
]  # fmt: skip
HUGE = [2**31, 2**62, 2**63, 2**64, 10**30, -1, -(2**63), 10**5000]
NO_PATHS: list[Any] = [None, b"data", "", " ", "\n\t", 0, 1.5, True, [], ["a"], {}, object(), "a\0b"]
NO_TEXTS: list[Any] = [b"train", 0, 1.5, True, [], {}, object(), np.array(["a"])]


@contextmanager
def corpus() -> Iterator[tuple[Path, Path]]:
    """A source and a small dataset of it."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-arguments-") as folder:
        source, dataset = Path(folder) / "text.jsonl", Path(folder) / "dataset"
        source.write_text("".join(json.dumps({"text": f"line {i} of some"}) + "\n" for i in range(NUM_LINES)))
        tokenmill.prepare(source, dataset, tokenizer="byte", workers=1, split={"val": 0.2})
        yield source, dataset


Check = Callable[[str, Any], str]


def refused(call: Callable[[Any], Any], *, may_work: bool = False) -> Check:
    """A value must raise a `TokenmillError` that names the argument; one that `may_work` need not raise."""

    def check(name: str, value: Any) -> str:
        try:
            call(value)
        except TokenmillError as error:
            words = name.replace("_", " ")
            if name not in error.message and words not in error.message:
                return f"{error.message!r} does not name it"
            return "" if error.hint else f"{error.message!r} has no hint"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        return "" if may_work else "it was taken"

    return check


def _row(fault: str, cases: Iterator[tuple[str, Any, Check]]) -> Row:
    tried, wrong = 0, []
    for name, value, check in cases:
        tried += 1
        if what := check(name, value):
            wrong.append(f"{name}={arguments.show(value)}: {what}")
    return Row(fault=fault, tried=tried, wrong=tuple(wrong))


def orders(seeds: tuple[int, ...] = (0, 1, 7, 100)) -> Row:
    """Every way to write the numbers of a loader gives the order of the plain ones, and the same state."""
    tried, wrong = 0, []
    with corpus() as (_, path):
        dataset = tokenmill.open(path)
        count = (dataset["train"].num_tokens - 1) // SEQ_LEN
        places = range(2 * count)
        for seed in seeds:
            wanted = expected_order(dataset.manifest.fingerprint, count, SEQ_LEN, seed, places)
            plain = tokenmill.DataLoader(dataset, SEQ_LEN, BATCH, seed=seed).state_dict()
            for name, value in (("seed", seed), ("seq_len", SEQ_LEN), ("batch_size", BATCH), ("epochs", 2)):
                for written in same_numbers(value):
                    given = {"seq_len": SEQ_LEN, "batch_size": BATCH, "seed": seed, "epochs": 2, name: written}
                    tried += 1
                    about = f"{name}={written!r}, seed {seed}"
                    try:
                        loader = tokenmill.DataLoader(dataset, **given, fields=("sample_index",), drop_last=False)
                        if repr(loader.state_dict()) != repr(plain):
                            wrong.append(f"{about}: another state")
                        found = [number for batch in loader for number in batch["sample_index"].tolist()]
                    except Exception as error:
                        wrong.append(f"{about}: {type(error).__name__}: {error}")
                        continue
                    if found != wanted:
                        wrong.append(f"{about}: another order")
    return Row(fault="numbers of a loader", tried=tried, wrong=tuple(wrong))


def loaders(*, few: bool = False) -> Row:
    """What no loader can be called with."""

    def cases(path: Path) -> Iterator[tuple[str, Any, Check]]:
        dataset = tokenmill.open(path)

        def load(**given: Any) -> Any:
            return tokenmill.DataLoader(**{"dataset": dataset, "seq_len": 8, "batch_size": 2, "prefetch": 0, **given})

        for name in ("seq_len", "batch_size", "seed", "rank", "world_size", "epochs", "prefetch"):
            for value in [*(NO_NUMBERS[:9] if few else NO_NUMBERS), *([] if name == "epochs" else [None])]:
                yield name, value, refused(lambda value, name=name: load(**{name: value}))
            for value in HUGE:
                yield name, value, refused(lambda value, name=name: load(**{name: value}), may_work=True)
        for name in ("order", "packing", "split"):
            for value in [*NO_TEXTS, None, "other"]:
                yield name, value, refused(lambda value, name=name: load(**{name: value}))
        for value in [None, "positions", 1, b"part", {"positions": 1}, [1], ["other"], [["positions"]]]:
            yield "fields", value, refused(lambda value: load(fields=value))
        for name in ("drop_last", "mask_boundaries"):
            for value in [None, "no", 2, -1, 0.5, [], object()]:
                yield name, value, refused(lambda value, name=name: load(**{name: value}))
        for value in ["other", object(), 5, b"x", float]:
            yield "dtype", value, refused(lambda value: load(dtype=value), may_work=value is float)
        for value in NO_PATHS:
            yield "path", value, refused(lambda value: load(dataset=value))
            yield "path", value, refused(tokenmill.open)
        for value in [*NO_NUMBERS, None, 0, -1]:
            yield "seq_len", value, refused(dataset["train"].samples)

    with corpus() as (_, path):
        return _row("arguments of a loader", cases(path))


def states() -> Row:
    """States that are none."""

    def cases(path: Path) -> Iterator[tuple[str, Any, Check]]:
        loader = tokenmill.DataLoader(path, 8, 2)
        good = loader.state_dict()
        for value in [None, [], "state", 1, b"", object(), (), [("version", 1)]]:
            yield "state", value, refused(loader.load_state_dict)
        for value in [None, -1, 2**62, 2**63, 10**30, 1.0, math.nan, "3", True, [], {}]:
            yield "samples_seen", value, refused(lambda value: loader.load_state_dict({**good, "samples_seen": value}))
        for value in [None, {}, [], "a", 1]:
            yield "state", value, refused(lambda value: loader.load_state_dict({**good, "stream": value}))
        for value in ["a", [], 1, {}, ["a"]]:
            yield "state", value, refused(lambda value: loader.load_state_dict({**good, "content": value}))
        for value in [None, 2, "1", 1.5, []]:
            yield "state", value, refused(lambda value: loader.load_state_dict({**good, "version": value}))

    with corpus() as (_, path):
        return _row("states", cases(path))


def mixtures() -> Row:
    def cases(path: Path) -> Iterator[tuple[str, Any, Check]]:
        dataset = tokenmill.open(path)

        def mix(**given: Any) -> Any:
            return tokenmill.Mixture(**{"components": {"a": (dataset, 1), "b": (dataset, 2)}, **given})

        for value in [math.nan, math.inf, -math.inf, -1, -0.1, "1", b"1", None, True, [], {}, 1j, 10**5000]:
            yield "weight", value, refused(lambda value: mix(components={"a": (dataset, value), "b": (dataset, 1)}))
        for value in [
            None,
            [],
            "ab",
            {1: (dataset, 1)},
            {None: (dataset, 1)},
            5,
            {"a": dataset},
            {"a": (dataset,)},
            {},
        ]:
            yield "component", value, refused(lambda value: mix(components=value))
        for value in [*NO_NUMBERS, 0, -1]:
            if not isinstance(value, dict):
                yield "max_repeats", value, refused(lambda value: mix(max_repeats=value))
            if getattr(value, "__hash__", None) and not isinstance(value, np.ndarray):
                yield "schedule", value, refused(lambda value: mix(schedule={value: {"a": 1, "b": 1}}))
        for value in [[], "a", {1: None}, {1: [1, 2]}, 5]:
            yield "schedule", value, refused(lambda value: mix(schedule=value))
        for value in NO_PATHS:
            yield "path", value, refused(lambda value: mix(components={"a": (value, 1)}))

    with corpus() as (_, path):
        return _row("mixtures", cases(path))


def builds() -> Row:
    """prepare, plan and stream, and the fields of a recipe."""

    def cases(source: Path, dataset: Path) -> Iterator[tuple[str, Any, Check]]:
        out = dataset.parent / "never"

        def prepare(**given: Any) -> Any:
            fields = {"sources": source, "output": out, "tokenizer": "byte", "workers": 1, **given}
            return tokenmill.prepare(**fields)

        def plan(**given: Any) -> Any:
            return tokenmill.plan(**{"sources": source, "tokenizer": "byte", "workers": 1, **given})

        def stream(**given: Any) -> Any:
            basic = {"sources": source, "tokenizer": "byte", "seq_len": 8, "batch_size": 2}
            return tokenmill.stream(**{**basic, **given})

        for call in (prepare, plan, stream):
            for name in ("seed", "min_chars"):
                for value in NO_NUMBERS:
                    # In a recipe a number may be written as text, and an empty list counts as not given.
                    if not (isinstance(value, str) and value == "1") and not (
                        isinstance(value, list | tuple) and not value
                    ):
                        yield name, value, refused(lambda value, call=call, name=name: call(**{name: value}))
                yield name, -1, refused(lambda value, call=call, name=name: call(**{name: value}))
            for name in ("unit_bytes", "max_tokens", "max_document_bytes"):
                for value in [True, math.nan, math.inf, -1, 0, 1.5, "a", b"1", {}, object(), 2**62, 10**5000]:
                    yield name, value, refused(lambda value, call=call, name=name: call(**{name: value}))
            for value in [True, math.nan, math.inf, -1, 0, 1.5, "a", b"1", {}, object()]:
                yield "sample", value, refused(lambda value, call=call: call(sample=value))
            for value in [b"a", {}, 1, 1.5, True, object(), [None], [b"a"], [1]]:
                yield "sources", value, refused(lambda value, call=call: call(sources=value))
        for value in ["Val=0.1,val=0.1", "Train=0.1", {"a": 0.1, "A": 0.1}, "TRAIN=0.5"]:
            for call in (prepare, plan):
                yield "split", value, refused(lambda value, call=call: call(split=value))
        for call in (prepare, plan):
            for value in NO_NUMBERS:
                yield "workers", value, refused(lambda value, call=call: call(workers=value))
            for value in [b"a", 1, 1.5, True, [], {}, object()]:
                yield "scratch", value, refused(lambda value, call=call: call(scratch=value))
                yield "output", value, refused(lambda value, call=call: call(output=value))
                yield "layout", value, refused(lambda value, call=call: call(layout=value))
                yield "executor", value, refused(lambda value, call=call: call(executor=value))
            for name in ("restart", "update"):
                for value in [None, "no", 2, 0.5, []]:
                    yield name, value, refused(lambda value, call=call, name=name: call(**{name: value}))
        for value in [None, "no", 2, 0.5, []]:
            yield "wait", value, refused(lambda value: prepare(wait=value))
        for value in [math.nan, math.inf, -1, "1", True, []]:
            yield "timeout", value, refused(lambda value: prepare(timeout=value))
        for name in ("seq_len", "batch_size", "rank", "world_size", "epochs", "prefetch", "shuffle"):
            for value in NO_NUMBERS[:16]:
                yield name, value, refused(lambda value, name=name: stream(**{name: value}))

    with corpus() as (source, dataset):
        return _row("builds and streams", cases(source, dataset))


def commands() -> Row:
    """export, import_, verify, repair, push, pull, cluster."""

    def cases(source: Path, dataset: Path) -> Iterator[tuple[str, Any, Check]]:
        out = dataset.parent / "never"
        for value in NO_PATHS:
            yield "path", value, refused(lambda value: tokenmill.verify(value))
            yield "path", value, refused(lambda value: tokenmill.repair(value))
            yield "dataset", value, refused(lambda value: tokenmill.push(value, "s3://bucket/a"))
            yield "url", value, refused(lambda value: tokenmill.push(dataset, value))
            yield "url", value, refused(lambda value: tokenmill.pull(value, out))
            yield "folder", value, refused(lambda value: tokenmill.pull("s3://bucket/a", value))
            yield "hosts", value, refused(lambda value: tokenmill.cluster(value))
            yield "output", value, refused(lambda value: tokenmill.export(dataset, value, to="nanogpt"))
            yield "path", value, refused(lambda value: tokenmill.export(value, out, to="nanogpt"))
            yield "path", value, refused(lambda value: tokenmill.import_(value, out, layout="nanogpt"))
            yield "output", value, refused(lambda value: tokenmill.import_(source, value, layout="nanogpt"))
        for value in [*NO_TEXTS, None]:
            yield "to", value, refused(lambda value: tokenmill.export(dataset, out, to=value))
            yield "layout", value, refused(lambda value: tokenmill.import_(source, out, layout=value))
        for value in NO_NUMBERS:
            yield "workers", value, refused(lambda value: tokenmill.verify(dataset, workers=value))
            yield "workers", value, refused(lambda value: tokenmill.repair(dataset, workers=value))
            yield "workers", value, refused(lambda value: tokenmill.export(dataset, out, to="nanogpt", workers=value))
            yield "seed", value, refused(lambda value: tokenmill.export(dataset, out, to="nanogpt", seed=value))
            yield "eot_id", value, refused(lambda value: tokenmill.import_(source, out, layout="nanogpt", eot_id=value))
            yield "eot_id", value, refused(lambda value: tokenmill.open(dataset, eot_id=value))
        for value in [True, math.nan, -1, 0, 1.5, "a", b"1", {}, object()]:
            yield "seq_len", value, refused(lambda value: tokenmill.export(dataset, out, to="templar", seq_len=value))
            yield (
                "shard_size",
                value,
                refused(lambda value: tokenmill.export(dataset, out, to="llmc", shard_size=value)),
            )
            yield "cache_bytes", value, refused(lambda value: tokenmill.open(dataset, cache_bytes=value))
        for value in [*NO_TEXTS, "al", "", "ALL"]:
            yield "source", value, refused(lambda value: tokenmill.verify(dataset, source=value))
        for value in [None, "no", 2, 0.5, []]:
            yield "quick", value, refused(lambda value: tokenmill.verify(dataset, quick=value))
            yield "restart", value, refused(lambda v: tokenmill.export(dataset, out, to="nanogpt", restart=v))

    with corpus() as (source, dataset):
        return _row("commands", cases(source, dataset))


EXPERIMENTS: list[tuple[str, Callable[[], Row]]] = [
    ("arguments orders", lambda: orders((0, 1, 2, 7, 100))),
    ("arguments loaders", loaders),
    ("arguments states", states),
    ("arguments mixtures", mixtures),
    ("arguments builds", builds),
    ("arguments commands", commands),
]
BUGS = [
    Bug(
        name="a number stays what it was written as",
        plant=replaced(arguments, "as_int", lambda value: value),
        trial=lambda: orders((1,)),
        says="another order",
    ),
    Bug(
        name="true counts as 1",
        plant=replaced(arguments, "as_int", lambda value: int(value) if isinstance(value, bool | int) else None),
        trial=lambda: loaders(few=True),
        says="seq_len=True: it was taken",
    ),
    Bug(
        name="a float counts as a number",
        plant=replaced(arguments, "as_int", lambda value: int(value)),
        trial=lambda: loaders(few=True),
        says="seq_len=1.5: it was taken",
    ),
    Bug(
        name="any text counts as true",
        plant=replaced(arguments, "flag", lambda _, value: bool(value)),
        trial=lambda: loaders(few=True),
        says="drop_last='no': it was taken",
    ),
]
