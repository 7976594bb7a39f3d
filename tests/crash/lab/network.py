"""Networks and stores that fail: builds, readers, pushes and pulls through a proxy that injects faults.

Each run has the right bytes or an error of ours, within a bounded time; and the same call once more,
through a network that works, gives the right bytes.
"""

from __future__ import annotations

import os
import random
import secrets
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

import tokenmill
from lab.world import World, make_world, tree
from lab_runner import Row
from proxy import Proxy, at_random, fault_proxy
from s3 import Bucket, make_bucket, s3_server
from tokenmill.errors import TokenmillError
from tokenmill.storage.object_store import open_store

TIMEOUT = 120.0
KINDS = ("prepare", "read", "push", "pull", "repair")


@dataclass(frozen=True, slots=True)
class Scene:
    """A world with its sources in a bucket, and a finished dataset beside them."""

    world: World
    finished: Path
    endpoint: str
    proxy: Proxy


@dataclass(frozen=True, slots=True)
class Trial:
    """What is done through the proxy, and how to see whether it is right; `clean` repeats it undisturbed."""

    run: Callable[[], object]
    is_right: Callable[[], bool]


def network(kinds: Sequence[str], injections: int, *, seed: int = 0) -> Row:
    """Runs of these kinds in turn, until so many faults have been injected."""
    wrong: list[str] = []
    hangs = number = 0
    with tempfile.TemporaryDirectory() as folder, s3_server() as endpoint, fault_proxy(endpoint) as proxy:
        scene = Scene(make_world(Path(folder) / "world"), Path(folder) / "world" / "right", endpoint, proxy)
        while proxy.injected.total() < injections:
            kind, chance = kinds[number % len(kinds)], random.Random(f"{seed} {number}")
            rate = chance.choice((0.05, 0.15, 0.3))
            about = f"{kind}, seed {seed}, run {number}, rate {rate}"
            with _bucket(scene, Path(folder) / str(number)) as (bucket, place):
                trial = _TRIALS[kind](scene, bucket, place)
                proxy.choose = at_random(chance, rate, spare="/corpus/")
                ended, error = _within(TIMEOUT, trial.run)
                proxy.choose = lambda method, path: ""
                if not ended:
                    hangs += 1
                elif error is not None and not isinstance(error, TokenmillError):
                    wrong.append(f"{about}: {''.join(traceback.format_exception(error))}")
                elif error is None and not trial.is_right():
                    wrong.append(f"{about}: it came to an end, and the result is not right")
                else:
                    _, error = _within(TIMEOUT, trial.run)
                    if error is not None or not trial.is_right():
                        wrong.append(f"{about}: once more through a good network: {error or 'not right'}")
            number += 1
        total = proxy.injected.total()
    return Row(fault=f"network and store: {', '.join(kinds)}", tried=total, wrong=tuple(wrong), hangs=hangs)


def _prepare(scene: Scene, bucket: Bucket, place: Path) -> Trial:
    out = f"{bucket.url}/out"

    def run() -> object:
        return tokenmill.prepare(f"{bucket.url}/corpus", out, workers=1, **scene.world.recipe)

    return Trial(run, lambda: bucket.tree("out") == scene.world.right)


def _repair(scene: Scene, bucket: Bucket, place: Path) -> Trial:
    out = f"{bucket.url}/out"
    tokenmill.prepare(f"{bucket.url}/corpus", out, workers=1, **scene.world.recipe)
    bucket.delete("out/train/00000.bin")
    bucket.put("out/train/00000.idx", b"damaged")
    return Trial(lambda: tokenmill.repair(out, workers=1), lambda: bucket.tree("out") == scene.world.right)


def _push(scene: Scene, bucket: Bucket, place: Path) -> Trial:
    return Trial(
        lambda: tokenmill.push(scene.finished, f"{bucket.url}/out"),
        lambda: bucket.tree("out") == scene.world.right,
    )


def _pull(scene: Scene, bucket: Bucket, place: Path) -> Trial:
    tokenmill.push(scene.finished, f"{bucket.url}/out")
    return Trial(
        lambda: tokenmill.pull(f"{bucket.url}/out", place / "back"),
        lambda: tree(str(place / "back")) == scene.world.right,
    )


def _read(scene: Scene, bucket: Bucket, place: Path) -> Trial:
    """Every token through the cache."""
    tokenmill.push(scene.finished, f"{bucket.url}/out")
    wanted = tokenmill.open(scene.finished)
    found: list[bool] = []

    def run() -> None:
        found.clear()
        dataset = tokenmill.open(f"{bucket.url}/out", cache=place / "cache")
        for name in wanted.splits:
            ours, theirs = wanted[name], dataset[name]
            tokens = theirs.tokens(0, theirs.num_tokens)
            found.append(np.array_equal(tokens, ours.tokens(0, ours.num_tokens)))

    return Trial(run, lambda: found == [True] * len(wanted.splits))


_TRIALS = {"prepare": _prepare, "read": _read, "push": _push, "pull": _pull, "repair": _repair}


@contextmanager
def _bucket(scene: Scene, place: Path) -> Iterator[tuple[Bucket, Path]]:
    """A bucket with the corpus, which the environment leads to through the proxy, and an own folder here."""
    direct = make_bucket(scene.endpoint, f"b-{secrets.token_hex(6)}")
    for file in scene.world.sources.iterdir():
        direct.put(f"corpus/{file.name}", file.read_bytes())
    place.mkdir()
    environment = {
        **direct.environment,
        "AWS_ENDPOINT_URL": scene.proxy.endpoint,
        "TOKENMILL_CACHE": str(place / "home"),
    }
    with patch.dict(os.environ, environment):
        open_store.cache_clear()
        yield direct, place


def _within(seconds: float, run: Callable[[], object]) -> tuple[bool, BaseException | None]:
    """Whether a call ended in time, and what it raised."""
    raised: list[BaseException] = []

    def attempt() -> None:
        try:
            run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive(), raised[0] if raised else None


EXPERIMENTS = [(f"network, {kind}", partial(network, (kind,), 300)) for kind in KINDS]
