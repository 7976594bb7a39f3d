"""A look before the work: documents from all over the sources, encoded twice.

The engine and its reference must agree on them, and they tell how many tokens and how much time
the whole will take.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.build.executor import Checked, Estimate, Request
from tokenmill.build.task import Task, Work
from tokenmill.errors import SourceError
from tokenmill.shards.layout import index_bytes, numpy_dtype
from tokenmill.sources.batch import Batch
from tokenmill.sources.reading import read_unit
from tokenmill.tokenizer.encoded import Engine, text_array, text_buffers
from tokenmill.tokenizer.parity import check_parity
from tokenmill.tokenizer.spec import TokenizerSpec


@dataclass(frozen=True, slots=True)
class Place:
    """Some documents of one unit. `weight` is planned bytes of source for each byte of text."""

    texts: list[str]
    text_bytes: int
    weight: float


def check(request: Request, work: Work, spec: TokenizerSpec, engine: Engine) -> Checked:
    """Encode documents of every place with the engine and its reference, and measure the engine by the way."""
    places: list[Place] = []
    unread = []
    for task in request.tasks:
        try:
            places += _visit(task, work, request.bytes_each)
        except SourceError:  # when the unit is done, it will say what is wrong
            unread.append(task.unit.index)
    parity = check_parity(spec, engine, [text for place in places for text in place.texts])
    expected = _estimate(places, request.total_bytes, engine, dtype=work.dtype, eot=work.eot != "none")
    return Checked(parity=dataclasses.asdict(parity), estimate=expected, unread=tuple(unread))


def _estimate(places: Sequence[Place], total: int, engine: Engine, *, dtype: str, eot: bool) -> Estimate:
    """Tokens a byte at each place, weighted by size, give the whole and its spread."""
    text = text_array([text for place in places for text in place.texts])
    if not len(text):
        return Estimate(tokens=0, error=0, documents=0, output_bytes=0, seconds=0.0)
    engine.encode(text)  # a first pass fills its cache; a long run has a full one
    begin = time.perf_counter()
    lengths = engine.encode(text).lengths + int(eot)
    spent = time.perf_counter() - begin
    if len(places) == 1:  # a single unit: its documents have to tell the spread
        places = [Place([text], len(text.encode()), places[0].weight) for text in places[0].texts]
    borders = np.cumsum([0, *(len(place.texts) for place in places)])
    tokens = np.array([lengths[a:b].sum() for a, b in itertools.pairwise(borders)], float)
    planned = np.array([place.text_bytes * place.weight for place in places])
    ratio = tokens.sum() / planned.sum()
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
        seconds=total / float(np.mean([place.weight for place in places])) / speed,
    )


def _visit(task: Task, work: Work, share: int) -> list[Place]:
    """The first documents of a unit; no place where it has none."""
    batches = read_unit(
        task.unit,
        [f"{work.root}/{source.name}" for source in task.sources],
        list(task.sources),
        documents=work.documents,
        limit=work.max_document_bytes,
        batch_bytes=2 * share,
    )
    for batch in batches:
        texts, size = _head(batch, share)
        if texts:
            return [Place(texts, size, _weight(batch, task.sources[0].kind, size, len(texts)))]
    return []


def _head(batch: Batch, share: int) -> tuple[list[str], int]:
    texts: list[str] = []
    size = 0
    offsets, whole = text_buffers(batch.text)
    for start, stop in itertools.pairwise(offsets.tolist()):
        data = whole[start:stop].tobytes()
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
