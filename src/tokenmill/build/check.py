"""A look before the work: documents from all over the sources, encoded twice.

    here        draw texts -> the reference's ids -+-> the same? -> an estimate of the whole
    a worker             `--> the engine's ids ----'

The engine and its reference must agree on them, and they tell how many tokens and how much time
the whole will take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tokenmill.build.drawing import Drawn, draw
from tokenmill.build.estimate import Count, Seen, Survey
from tokenmill.build.task import Work
from tokenmill.build.visits import Checked, Request, Visit
from tokenmill.errors import SourceError
from tokenmill.shards.layout import numpy_dtype
from tokenmill.storage.urls import is_url
from tokenmill.tokenizer.parity import Trial, check_parity
from tokenmill.tokenizer.spec import TokenizerSpec


def check(request: Request, work: Work, spec: TokenizerSpec, encode: Callable[[Sequence[str]], Trial]) -> Checked:
    """Have documents of every place encoded by the engine and its reference, and count what they come to."""
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
    parity, trial = check_parity(spec, texts, encode)
    survey = Survey(
        seen=tuple(_count(places, texts, trial, eot=work.eot != "none")),
        counts=tuple(counts),
        planned_bytes=request.planned_bytes,
        token_bytes=numpy_dtype(work.dtype).itemsize,
        encoded_bytes=parity.bytes,
        seconds=trial.seconds,
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


def _count(places: Sequence[tuple[Drawn, list[int]]], texts: list[str], trial: Trial, *, eot: bool) -> Iterator[Seen]:
    """Tokens at every place, for each planned byte."""
    tokens = np.array(trial.lengths, np.int64)
    sizes = np.array([len(text.encode()) for text in texts], np.int64)
    for place, numbers in places:
        yield Seen(
            at=place.at,
            tokens=float(tokens[numbers].sum()) / place.planned_bytes + eot * place.documents,
            documents=place.documents,
            text_bytes=float(sizes[numbers].sum()) / place.planned_bytes,
            weight=place.weight,
        )
