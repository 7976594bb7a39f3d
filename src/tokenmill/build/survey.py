"""A survey: a few documents from all over the sources, before the work.

It feeds the parity check, and tells how many tokens and how much time the whole will take.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tokenmill.errors import SourceError
from tokenmill.planning import Plan, Unit
from tokenmill.shards.layout import index_bytes, numpy_dtype
from tokenmill.sources import read_unit
from tokenmill.sources.batch import Batch
from tokenmill.tokenizer import Engine
from tokenmill.tokenizer.engine import text_array

PLACES = 16
SURVEY_BYTES = 512_000


@dataclass(frozen=True, slots=True)
class Place:
    """Some documents of one unit. `weight` is planned bytes of source for each byte of text."""

    texts: list[str]
    text_bytes: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the whole dataset will come to, give or take `error` (a 95 % interval) of the tokens."""

    tokens: int
    error: int
    documents: int
    output_bytes: int
    seconds: float


def survey(plan: Plan, root: str, *, documents: str, limit: int, places: int = PLACES) -> list[Place]:
    """Documents from the beginning of evenly spread units."""
    wanted = np.unique(np.linspace(0, len(plan.units) - 1, min(places, len(plan.units))).astype(int))
    share = SURVEY_BYTES // len(wanted)
    visits = (_visit(plan, plan.units[i], root, documents=documents, limit=limit, share=share) for i in wanted)
    return [place for place in visits if place is not None]


def estimate(plan: Plan, places: Sequence[Place], engine: Engine, *, dtype: str, eot: bool, workers: int) -> Estimate:
    """Tokens a byte at each place, weighted by size, give the whole and its spread."""
    text = text_array([text for place in places for text in place.texts])
    if not len(text):
        return Estimate(tokens=0, error=0, documents=0, output_bytes=0, seconds=0.0)
    engine.encode(text)  # a first pass fills its cache; a long run has a full one
    begin = time.perf_counter()
    lengths = engine.encode(text).lengths + int(eot)
    spent = time.perf_counter() - begin
    borders = np.cumsum([0, *(len(place.texts) for place in places)])
    tokens = np.array([lengths[a:b].sum() for a, b in itertools.pairwise(borders)], float)
    planned = np.array([place.text_bytes * place.weight for place in places])
    ratio = tokens.sum() / planned.sum()
    total = plan.text_bytes()
    spread = 0.0
    if len(places) > 1:
        residuals = tokens - ratio * planned
        spread = math.sqrt(len(places) / (len(places) - 1) * float((residuals**2).sum())) / float(planned.sum())
    num_tokens = round(total * ratio)
    num_documents = max(1, round(total / planned.sum() * len(text)))
    speed = sum(place.text_bytes for place in places) / spent
    return Estimate(
        tokens=num_tokens,
        error=round(1.96 * spread * total),
        documents=num_documents,
        output_bytes=num_tokens * numpy_dtype(dtype).itemsize + index_bytes(num_documents) + 16 * num_documents,
        seconds=total / float(np.mean([place.weight for place in places])) / speed / workers,
    )


def _visit(plan: Plan, unit: Unit, root: str, *, documents: str, limit: int, share: int) -> Place | None:
    sources = list(plan.sources[unit.source : unit.source + unit.num_sources])
    paths = [f"{root}/{source.name}" for source in sources]
    with contextlib.suppress(SourceError):  # when the unit is done, it will say what is wrong
        for batch in read_unit(unit, paths, sources, documents=documents, limit=limit):
            texts, size = _head(batch, share)
            if texts:
                return Place(texts, size, _weight(batch, sources[0].kind, size, len(texts)))
    return None


def _head(batch: Batch, share: int) -> tuple[list[str], int]:
    texts: list[str] = []
    size = 0
    for scalar in batch.text.cast(pa.large_binary()):
        data = scalar.as_py()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if text:
            texts.append(text)
            size += len(data)
        if size >= share:
            break
    return texts, size


def _weight(batch: Batch, kind: str, size: int, count: int) -> float:
    """JSON lines hold more than their text; how much more, the positions tell."""
    if kind != "jsonl" or len(batch.positions) < 2:
        return 1.0
    last = min(count, len(batch.positions) - 1)
    span = int(batch.positions[last] - batch.positions[0])
    return max(1.0, span * count / last / size)
