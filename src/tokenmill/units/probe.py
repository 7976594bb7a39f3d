"""A look at the sources before the work: the texts at some places, and what is known of how many there are.

A worker looks. What it meets in a source (a page that crashes its reader, a text that takes all memory) costs a
worker, and the build can tell.

Drawing documents: those that lie at given places of the sources, and what there is around them.

    slice     | a a a | b | c c c c c | d d |      a row group, a byte range around a place, a whole file
    places          x           x                  draw a and c: large documents are met more often

A place of a byte range can be gone to. In a row group or a compressed file, reading has to lead to it: if
it is too far, all places of the slice are moved closer to its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tokenmill.errors import SourceError
from tokenmill.sources.base import EXPANSION, TABLES, Batch, Source, Unit, text_buffers
from tokenmill.sources.files import expansion, pin_of
from tokenmill.sources.reader import read_unit, sections
from tokenmill.storage.base import is_url
from tokenmill.units.task import BuildConfig, ProbeRequest, ProbeSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentCount:
    """Documents of a slice of a source whose number is known, and the bytes that were planned for it."""

    source: int
    start: int
    planned_bytes: int
    documents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedPosition:
    """A place that was looked at: which of the texts lie there, and the bytes that were planned for those.

    `documents` are those of one planned byte. A source turned out to have `weight` times the bytes that it was given.
    """

    at: int
    texts: tuple[int, ...]
    planned_bytes: float
    documents: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """All texts, the places that have them, documents that were counted, and units that could not be read."""

    texts: tuple[str, ...]
    places: tuple[ProbedPosition, ...]
    counts: tuple[DocumentCount, ...]
    unread: tuple[int, ...]


def probe(request: ProbeRequest, work: BuildConfig) -> ProbeResult:
    """Draw documents at every place."""
    texts: list[str] = []
    places: list[ProbedPosition] = []
    counts: list[DocumentCount] = []
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
            ProbedPosition(
                at=place.at,
                texts=tuple(numbers[key] for key in place.texts),
                planned_bytes=place.planned_bytes,
                documents=place.documents,
                weight=place.weight,
            )
            for place in drawn
        ]
    return ProbeResult(texts=tuple(texts), places=tuple(places), counts=tuple(counts), unread=tuple(sorted(unread)))


def _draw_all(
    request: ProbeRequest, work: BuildConfig
) -> Iterator[tuple[list[SampledTexts], list[DocumentCount]] | None]:
    """What each visit draws, those to a store at the same time; None if its source cannot be read."""

    def attempt(visit: ProbeSlice) -> tuple[list[SampledTexts], list[DocumentCount]] | None:
        try:
            return sample_documents(visit, request, work)
        except SourceError:  # when the unit is done, it will say what is wrong
            return None

    if not is_url(work.root) or len(request.visits) < 2:
        yield from map(attempt, request.visits)
        return
    with ThreadPoolExecutor(len(request.visits)) as visitors:
        yield from visitors.map(attempt, request.visits)


# Read at once, and around a place that can be gone to, if there is no need to be sparing.
_WINDOW_BYTES = 128_000
# A parquet column has the length of each text before it.
_LENGTH_BYTES = 4
# Compressed bytes that tell how much they expand.
_PEEK_BYTES = 256_000
# A document of less than this part of what is encoded at a place is never cut.
_SMALL = 8

Key = tuple[int, int]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampledTexts:
    """Texts at one place, by where they begin, and the bytes that were planned for them.

    `documents` are those of one planned byte. A source turned out to have `weight` times the bytes that it was given.
    """

    at: int
    texts: dict[Key, str]
    planned_bytes: float
    documents: float
    weight: float


@dataclass(frozen=True, slots=True)
class Slice:
    """What is read in one go. Its places are bytes of its own, each with where it is in the plan.

    If it is read to its end, `planned_bytes` are those of all of it. `scale` are those for each of its own bytes;
    None if the end has to come to tell that.
    """

    unit: Unit
    places: tuple[tuple[float, int], ...]
    planned_bytes: int | None
    scale: float | None = 1.0
    weight: float = 1.0


def sample_documents(
    visit: ProbeSlice, request: ProbeRequest, work: BuildConfig
) -> tuple[list[SampledTexts], list[DocumentCount]]:
    """What lies at the places of a visit, and the documents that are counted without reading any."""
    source, unit = visit.task.sources[0], visit.task.unit
    path = f"{work.root}/{source.name}"
    window = min(_WINDOW_BYTES, request.read_bytes // 2)
    counts: list[DocumentCount] = []
    if source.kind in TABLES:
        groups = sections(path, source)[unit.start : unit.stop if unit.stop >= 0 else None]
        slices = _row_groups(visit, [size for size, _ in groups], request.read_bytes)
        rows, planned = sum(rows for _, rows in groups), sum(size for size, _ in groups)
        counts = [DocumentCount(source=unit.source, start=unit.start, planned_bytes=planned, documents=rows)]
    elif source.compression:
        slices = [_compressed(visit, path, request.read_bytes)]
    elif source.kind == "text" and work.documents == "files":
        places = tuple((float(place), visit.at + place) for place in visit.places)
        slices = [Slice(unit, places, unit.text_bytes)]
        counts = [DocumentCount(source=-1, start=0, planned_bytes=request.planned_bytes, documents=request.num_files)]
    else:
        slices = _windows(visit, window)
    drawn = _read_all(slices, path, source, work, window, request.encode_bytes)
    if not drawn and unit.text_bytes > window:  # no document begins in any of the windows, so large are they
        near = window / unit.text_bytes
        head = Slice(unit, tuple((near * place, visit.at + place) for place in visit.places), None)
        drawn = _read_all([head], path, source, work, window, request.encode_bytes)
    return drawn, counts


def _row_groups(visit: ProbeSlice, sizes: Sequence[int], reach: int) -> list[Slice]:
    if not sizes:
        return []
    unit, ends = visit.task.unit, np.cumsum([0, *sizes])
    weight = float(ends[-1]) / max(1, unit.text_bytes)
    inside: dict[int, list[tuple[float, int]]] = {}
    for place in visit.places:
        exact = place * weight
        group = min(int(np.searchsorted(ends[1:], exact, "right")), len(sizes) - 1)
        inside.setdefault(group, []).append((exact - float(ends[group]), visit.at + place))
    slices = []
    for group, places in inside.items():
        near = min(1.0, reach * len(places) / max(1, sizes[group]))
        part = replace(unit, start=unit.start + group, stop=unit.start + group + 1)
        moved = tuple((near * place, at) for place, at in places)
        slices.append(
            Slice(part, moved, sizes[group], None, weight) if near == 1.0 else Slice(part, moved, None, 1.0, weight)
        )
    return slices


def _compressed(visit: ProbeSlice, path: str, reach: int) -> Slice:
    """A file as a whole. How much text there is in it, its beginning has to tell."""
    source, planned = visit.task.sources[0], visit.task.unit.text_bytes
    scale = EXPANSION / expansion(path, source.compression, pin_of(source), max_bytes=_PEEK_BYTES)
    near = min(1.0, reach * len(visit.places) * scale / max(1, planned))
    places = tuple((near * place / scale, visit.at + place) for place in visit.places)
    return Slice(visit.task.unit, places, *((planned, None) if near == 1.0 else (None, scale)))


def _windows(visit: ProbeSlice, window: int) -> list[Slice]:
    """Bytes around each place; all of a small file."""
    unit = visit.task.unit
    low, high = unit.start, unit.stop if unit.stop >= 0 else visit.task.sources[0].bytes
    inside: dict[int, list[tuple[float, int]]] = {}
    for place in visit.places:
        start = max(low, min(low + place - window // 2, high - window))
        inside.setdefault(start, []).append((float(low + place - start), visit.at + place))
    stops = {start: min(high, start + window) for start in inside}
    return [
        Slice(replace(unit, start=start, stop=stops[start]), tuple(places), stops[start] - start)
        for start, places in inside.items()
    ]


def _read_all(
    slices: Sequence[Slice], path: str, source: Source, work: BuildConfig, window: int, share: int
) -> list[SampledTexts]:
    drawn: list[SampledTexts] = []
    for one in slices:
        batches = read_unit(
            one.unit,
            [path],
            [source],
            documents=work.documents,
            limit=work.max_document_bytes,
            batch_bytes=window,
        )
        drawn += _read(one, batches, source.kind, share)
    return drawn


def _read(one: Slice, batches: Iterator[Batch], kind: str, share: int) -> Iterator[SampledTexts]:
    """Go through a slice and draw at its places; those behind its end draw the last document."""
    found: list[tuple[int, dict[Key, str], float]] = []
    documents = 0
    span = 0.0
    bounds = np.zeros(1)
    batch = None
    for batch in (batch for batch in batches if len(batch.text)):
        bounds = _bounds(batch, float(bounds[-1]), one.unit.start, kind)
        while len(found) < len(one.places) and one.places[len(found)][0] < bounds[-1]:
            place, at = one.places[len(found)]
            found.append((at, *_texts(batch, bounds, place, share)))
        documents += len(batch.text)
        span += float(bounds[-1] - bounds[0])
        if one.planned_bytes is None and len(found) == len(one.places):
            break
    if batch is None:
        return
    found += [(at, *_texts(batch, bounds, place, share)) for place, at in one.places[len(found) :]]
    scale = one.scale or (one.planned_bytes or 1) / max(1.0, span)
    planned = one.planned_bytes or span * scale
    for at, texts, size in found:
        if texts:
            yield SampledTexts(at, texts, size * scale, documents / planned, one.weight)


def _bounds(batch: Batch, edge: float, start: int, kind: str) -> Numbers:
    """Where documents begin and the last one ends, in the slice's own bytes; `edge` is where those before ended."""
    lengths = np.diff(text_buffers(batch.text)[0])
    if kind in TABLES:
        return edge + np.cumsum(np.concatenate(([0], lengths + _LENGTH_BYTES)), dtype=np.float64)
    # What the last one takes beside its text, those before it tell.
    span, before = batch.positions[-1] - batch.positions[0], lengths[:-1].sum()
    last = batch.positions[-1] + lengths[-1] * max(1.0, span / before if before else 1.0)
    return np.concatenate((batch.positions, [last])).astype(np.float64) - start


def _texts(batch: Batch, bounds: Numbers, place: float, share: int) -> tuple[dict[Key, str], float]:
    """About `share` bytes of text from a place on, and what they take in the slice.

    Behind the end of the batch its beginning follows, and large documents are cut, so that all bytes count the same.
    """
    offsets, data = text_buffers(batch.text)
    count = len(batch.text)
    starts, lengths, sizes = offsets.tolist(), np.diff(offsets).tolist(), np.diff(bounds).tolist()
    first = min(max(0, int(np.searchsorted(bounds, place, "right")) - 1), count - 1)
    part = min(max(0.0, (place - float(bounds[first])) / max(1.0, sizes[first])), 1.0)
    middle = int(part * lengths[first]) if lengths[first] > share // _SMALL else 0
    texts: dict[Key, str] = {}
    size, left = 0.0, share
    for step in range(count + (middle > 0)):
        index = (first + step) % count
        length = lengths[index]
        begin, end = middle if step == 0 else 0, middle if step == count else length
        if length > share // _SMALL:
            end = min(end, begin + left)
        raw = data[starts[index] + begin : starts[index] + end].tobytes()
        try:
            text = raw.decode(errors="strict" if end - begin == length else "ignore")  # pieces of characters at a cut
        except UnicodeDecodeError:
            continue
        if text:
            texts[int(batch.positions[index]), begin] = text
            size += sizes[index] * len(raw) / length
            left -= len(raw)
        if left <= 0:
            break
    return texts, size
