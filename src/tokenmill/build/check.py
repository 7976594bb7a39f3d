"""A look before the work: documents from all over the sources, encoded twice.

The engine and its reference must agree on them, and they tell how many tokens and how much time
the whole will take.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tokenmill.build.drawing import Drawn, draw
from tokenmill.build.estimate import Count, Seen, Survey
from tokenmill.build.task import Work
from tokenmill.build.visits import Checked, Request, Visit
from tokenmill.errors import SourceError
from tokenmill.shards.layout import numpy_dtype
from tokenmill.storage.urls import is_url
from tokenmill.tokenizer.encoded import Engine, text_array, text_buffers
from tokenmill.tokenizer.parity import check_parity
from tokenmill.tokenizer.spec import TokenizerSpec


def check(request: Request, work: Work, spec: TokenizerSpec, engine: Engine) -> Checked:
    """Encode documents of every place with the engine and its reference, and measure the engine by the way."""
    texts: list[str] = []
    places: list[tuple[Drawn, list[int]]] = []
    counts: list[Count] = []
    unread = set()
    for visit, result in zip(request.visits, _draw_all(request, work), strict=True):
        if result is None:
            unread.add(visit.task.unit.index)
            continue
        drawn, counted = result
        counts += counted
        # Places close together have texts in common.
        found = {key: text for place in drawn for key, text in place.texts.items()}
        numbers = {key: number for number, key in enumerate(found, start=len(texts))}
        texts += found.values()
        places += [(place, [numbers[key] for key in place.texts]) for place in drawn]
    parity = check_parity(spec, engine, texts)
    seen, seconds = _measure(places, texts, engine, eot=work.eot != "none")
    survey = Survey(
        seen=seen,
        counts=tuple(counts),
        planned_bytes=request.planned_bytes,
        token_bytes=numpy_dtype(work.dtype).itemsize,
        encoded_bytes=parity.bytes,
        seconds=seconds,
    )
    return Checked(parity=dataclasses.asdict(parity), survey=survey, unread=tuple(sorted(unread)))


def _draw_all(request: Request, work: Work) -> Iterator[tuple[list[Drawn], list[Count]] | None]:
    """What each visit draws, those to a store at the same time; None if its source cannot be read."""

    def attempt(visit: Visit) -> tuple[list[Drawn], list[Count]] | None:
        try:
            return draw(visit, request, work)
        except SourceError:  # when the unit is done, it will say what is wrong
            return None

    if not is_url(work.root) or len(request.visits) < 2:
        yield from map(attempt, request.visits)
        return
    with ThreadPoolExecutor(len(request.visits)) as visitors:
        yield from visitors.map(attempt, request.visits)


def _measure(
    places: Sequence[tuple[Drawn, list[int]]], texts: list[str], engine: Engine, *, eot: bool
) -> tuple[tuple[Seen, ...], float]:
    """Tokens at every place, for each planned byte; and the seconds that the engine took."""
    if not texts:
        return (), 0.0
    text = text_array(texts)
    engine.encode(text)  # a first pass fills its cache; a long run has a full one
    begin = time.perf_counter()
    tokens = engine.encode(text).lengths
    seconds = time.perf_counter() - begin
    sizes = np.diff(text_buffers(text)[0])
    seen = [
        Seen(
            at=place.at,
            tokens=float(tokens[numbers].sum()) / place.planned_bytes + eot * place.documents,
            documents=place.documents,
            text_bytes=float(sizes[numbers].sum()) / place.planned_bytes,
            weight=place.weight,
        )
        for place, numbers in places
    ]
    return tuple(seen), seconds
