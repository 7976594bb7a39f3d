"""A look at the sources before the work: the texts at some places, and what is known of how many there are.

A worker looks. What it meets in a source (a page that crashes its reader, a text that takes all memory) costs a
worker, and the build can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tokenmill.build.drawing import Drawn, draw
from tokenmill.build.estimate import Count
from tokenmill.build.task import Work
from tokenmill.build.visits import Request, Visit
from tokenmill.errors import SourceError
from tokenmill.storage.urls import is_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place that was looked at: which of the texts lie there, and the bytes that were planned for those.

    `documents` are those of one planned byte. A source turned out to have `weight` times the bytes that it was given.
    """

    at: int
    texts: tuple[int, ...]
    planned_bytes: float
    documents: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All texts, the places that have them, documents that were counted, and units that could not be read."""

    texts: tuple[str, ...]
    places: tuple[Place, ...]
    counts: tuple[Count, ...]
    unread: tuple[int, ...]


def look(request: Request, work: Work) -> Look:
    """Draw documents at every place."""
    texts: list[str] = []
    places: list[Place] = []
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
        places += [
            Place(
                at=place.at,
                texts=tuple(numbers[key] for key in place.texts),
                planned_bytes=place.planned_bytes,
                documents=place.documents,
                weight=place.weight,
            )
            for place in drawn
        ]
    return Look(texts=tuple(texts), places=tuple(places), counts=tuple(counts), unread=tuple(sorted(unread)))


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
