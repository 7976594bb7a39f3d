"""Samples documents at given positions of the sources, and counts documents, before units run.

    slice       | a a a | b | c c c c c | d d |      a row group, a byte range around a position, a whole file
    positions         x           x                  sample a and c: large documents are met more often

A position in a byte range can be read directly. In a row group or a compressed file everything before it has to be
read; if it is too far, all positions of the slice move closer to its beginning.

A worker probes, so a source that crashes its reader or takes all memory costs a worker and not the build.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tokenmill.errors import SourceError
from tokenmill.records import Int
from tokenmill.sources.base import EXPANSION, Batch, Source, Unit, naming_what_needs_memory, text_buffers
from tokenmill.sources.files import expansion, pin_of
from tokenmill.sources.reader import format_of, read_unit, sections
from tokenmill.storage.base import is_url
from tokenmill.units.task import BuildConfig, ProbeRequest, ProbeSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentCount:
    """The number of documents of a slice, known without reading it, and the bytes planned for the slice."""

    source: Int
    start: Int
    planned_bytes: Int
    documents: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedPosition:
    """A position that was probed: which of the texts are there, and the bytes that were planned for them.

    `documents` is per planned byte. The source turned out to have `weight` times the bytes planned for it.
    """

    at: Int
    texts: tuple[Int, ...]
    planned_bytes: float
    documents: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """All sampled texts, the positions that they belong to, document counts, and units that could not be read."""

    texts: tuple[str, ...]
    positions: tuple[ProbedPosition, ...]
    counts: tuple[DocumentCount, ...]
    unread: tuple[Int, ...]


def probe(request: ProbeRequest, config: BuildConfig) -> ProbeResult:
    """Sample documents at every position of a request."""
    texts: list[str] = []
    positions: list[ProbedPosition] = []
    counts: list[DocumentCount] = []
    unread = set()
    for wanted, result in zip(request.slices, _sample_all(request, config), strict=True):
        if result is None:
            unread.add(wanted.task.unit.index)
            continue
        sampled, counted = result
        counts += counted
        # Positions close together share texts.
        found = {key: text for position in sampled for key, text in position.texts.items()}
        numbers = {key: number for number, key in enumerate(found, start=len(texts))}
        texts += found.values()
        positions += [
            ProbedPosition(
                at=position.at,
                texts=tuple(numbers[key] for key in position.texts),
                planned_bytes=position.planned_bytes,
                documents=position.documents,
                weight=position.weight,
            )
            for position in sampled
        ]
    return ProbeResult(
        texts=tuple(texts), positions=tuple(positions), counts=tuple(counts), unread=tuple(sorted(unread))
    )


def _sample_all(
    request: ProbeRequest, config: BuildConfig
) -> Iterator[tuple[list[SampledTexts], list[DocumentCount]] | None]:
    """The samples of each slice, concurrently for an object store; None for a source that cannot be read."""

    def attempt(wanted: ProbeSlice) -> tuple[list[SampledTexts], list[DocumentCount]] | None:
        with naming_what_needs_memory(lambda: wanted.task.sources[0].name):
            try:
                return sample_documents(wanted, request, config)
            except SourceError:  # the unit itself will report it
                return None

    if not is_url(config.root) or len(request.slices) <= 1:
        yield from map(attempt, request.slices)
        return
    with ThreadPoolExecutor(len(request.slices)) as threads:
        yield from threads.map(attempt, request.slices)


# Read at once, and around a position that can be read directly.
_WINDOW_BYTES = 128_000
# A parquet column has the length of each text before it.
_LENGTH_BYTES = 4
# Compressed bytes from which the expansion is estimated.
_PEEK_BYTES = 256_000
# A document smaller than this fraction of the bytes encoded at a position is never cut.
_SMALL = 8

Key = tuple[int, int]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampledTexts:
    """Texts at one position, by where they begin, and the bytes that were planned for them.

    `documents` is per planned byte. The source turned out to have `weight` times the bytes planned for it.
    """

    at: int
    texts: dict[Key, str]
    planned_bytes: float
    documents: float
    weight: float


@dataclass(frozen=True, slots=True)
class ReadRange:
    """What is read in one go. Its positions are offsets into it, each with its offset in the plan.

    If it is read to its end, `planned_bytes` is the plan for all of it. `scale` is planned bytes per byte read; None if
    that is known only at the end.
    """

    unit: Unit
    positions: tuple[tuple[float, int], ...]
    planned_bytes: int | None
    scale: float | None = 1.0
    weight: float = 1.0


def sample_documents(
    wanted: ProbeSlice, request: ProbeRequest, config: BuildConfig
) -> tuple[list[SampledTexts], list[DocumentCount]]:
    """Documents at the positions of a slice, and document counts that are known without reading."""
    source, unit = wanted.task.sources[0], wanted.task.unit
    path = f"{config.root}/{source.name}"
    window = min(_WINDOW_BYTES, request.read_bytes // 2)
    counts: list[DocumentCount] = []
    format = format_of(source.kind, config.documents)
    if format.has_sections:
        groups = sections(path, source)[unit.start : unit.stop if unit.stop >= 0 else None]
        ranges = _row_groups(wanted, [group.text_bytes for group in groups], request.read_bytes)
        rows, planned = sum(group.num_rows for group in groups), sum(group.text_bytes for group in groups)
        counts = [DocumentCount(source=unit.source, start=unit.start, planned_bytes=planned, documents=rows)]
    elif source.compression or not format.starts_anywhere:
        ranges = [_from_start(wanted, path, request.read_bytes)]
    elif format.is_one_document:
        positions = tuple((float(position), wanted.at + position) for position in wanted.positions)
        ranges = [ReadRange(unit, positions, unit.text_bytes)]
        counts = [DocumentCount(source=-1, start=0, planned_bytes=request.planned_bytes, documents=request.num_files)]
    else:
        ranges = _windows(wanted, window)
    sampled = _read_all(ranges, path, source, config, window, request.encode_bytes)
    if not sampled and unit.text_bytes > window:  # documents so large that none begins in a window
        near = window / unit.text_bytes
        head = ReadRange(unit, tuple((near * position, wanted.at + position) for position in wanted.positions), None)
        sampled = _read_all([head], path, source, config, window, request.encode_bytes)
    return sampled, counts


def _row_groups(wanted: ProbeSlice, sizes: Sequence[int], max_bytes: int) -> list[ReadRange]:
    if not sizes:
        return []
    unit, ends = wanted.task.unit, np.cumsum([0, *sizes])
    weight = float(ends[-1]) / max(1, unit.text_bytes)
    inside: dict[int, list[tuple[float, int]]] = {}
    for position in wanted.positions:
        exact = position * weight
        group = min(int(np.searchsorted(ends[1:], exact, "right")), len(sizes) - 1)
        inside.setdefault(group, []).append((exact - float(ends[group]), wanted.at + position))
    ranges = []
    for group, positions in inside.items():
        near = min(1.0, max_bytes * len(positions) / max(1, sizes[group]))
        part = replace(unit, start=unit.start + group, stop=unit.start + group + 1)
        moved = tuple((near * position, at) for position, at in positions)
        ranges.append(
            ReadRange(part, moved, sizes[group], None, weight)
            if near == 1.0
            else ReadRange(part, moved, None, 1.0, weight)
        )
    return ranges


def _from_start(wanted: ProbeSlice, path: str, max_bytes: int) -> ReadRange:
    """A whole slice. How much a compressed file expands to is estimated from its beginning."""
    source, planned, scale = wanted.task.sources[0], wanted.task.unit.text_bytes, 1.0
    if source.compression:
        scale = EXPANSION / expansion(path, source.compression, pin_of(source), max_bytes=_PEEK_BYTES)
    near = min(1.0, max_bytes * len(wanted.positions) * scale / max(1, planned))
    positions = tuple((near * position / scale, wanted.at + position) for position in wanted.positions)
    return ReadRange(wanted.task.unit, positions, *((planned, None) if near == 1.0 else (None, scale)))


def _windows(wanted: ProbeSlice, window: int) -> list[ReadRange]:
    """A window around each position, or all of a small file."""
    unit = wanted.task.unit
    low, high = unit.start, unit.stop if unit.stop >= 0 else wanted.task.sources[0].bytes
    inside: dict[int, list[tuple[float, int]]] = {}
    for position in wanted.positions:
        start = max(low, min(low + position - window // 2, high - window))
        inside.setdefault(start, []).append((float(low + position - start), wanted.at + position))
    stops = {start: min(high, start + window) for start in inside}
    return [
        ReadRange(replace(unit, start=start, stop=stops[start]), tuple(positions), stops[start] - start)
        for start, positions in inside.items()
    ]


def _read_all(
    ranges: Sequence[ReadRange], path: str, source: Source, config: BuildConfig, window: int, share: int
) -> list[SampledTexts]:
    positions_are_bytes = format_of(source.kind).positions_are_bytes
    sampled: list[SampledTexts] = []
    for one in ranges:
        batches = read_unit(
            one.unit,
            [path],
            [source],
            documents=config.documents,
            limit=config.max_document_bytes,
            batch_bytes=window,
        )
        sampled += _read(one, batches, share, positions_are_bytes=positions_are_bytes)
    return sampled


def _read(one: ReadRange, batches: Iterator[Batch], share: int, *, positions_are_bytes: bool) -> Iterator[SampledTexts]:
    """Read a range and sample at its positions. Positions behind its end sample the last document."""
    found: list[tuple[int, dict[Key, str], float]] = []
    documents = 0
    span = 0.0
    bounds = np.zeros(1)
    batch = None
    for batch in (batch for batch in batches if len(batch.text)):
        bounds = (_byte_bounds if positions_are_bytes else _row_bounds)(batch, one.unit.start, float(bounds[-1]))
        while len(found) < len(one.positions) and one.positions[len(found)][0] < bounds[-1]:
            position, at = one.positions[len(found)]
            found.append((at, *_texts(batch, bounds, position, share)))
        documents += len(batch.text)
        span += float(bounds[-1] - bounds[0])
        if one.planned_bytes is None and len(found) == len(one.positions):
            break
    if batch is None:
        return
    found += [(at, *_texts(batch, bounds, position, share)) for position, at in one.positions[len(found) :]]
    scale = one.scale or (one.planned_bytes or 1) / max(1.0, span)
    planned = one.planned_bytes or span * scale
    for at, texts, size in found:
        if texts:
            yield SampledTexts(at, texts, size * scale, documents / planned, one.weight)


def _row_bounds(batch: Batch, start: int, edge: float) -> Numbers:
    """Where the texts of rows begin and the last one ends, as offsets into the range; the rows before end at `edge`."""
    lengths = np.diff(text_buffers(batch.text)[0])
    return edge + np.cumsum(np.concatenate(([0], lengths + _LENGTH_BYTES)), dtype=np.float64)


def _byte_bounds(batch: Batch, start: int, edge: float) -> Numbers:
    """Where documents begin and the last one ends, as offsets into the range, which begins at byte `start`."""
    lengths = np.diff(text_buffers(batch.text)[0])
    # The overhead of the last document is estimated from those before it.
    span, before = batch.positions[-1] - batch.positions[0], lengths[:-1].sum()
    last = batch.positions[-1] + lengths[-1] * max(1.0, span / before if before else 1.0)
    return np.concatenate((batch.positions, [last])).astype(np.float64) - start


def _texts(batch: Batch, bounds: Numbers, position: float, share: int) -> tuple[dict[Key, str], float]:
    """About `share` bytes of text from a position on, and how many bytes of the range they represent.

    The batch is read as a ring and large documents are cut, so that every byte is equally likely to be sampled.
    """
    offsets, data = text_buffers(batch.text)
    count = len(batch.text)
    starts, lengths, sizes = offsets.tolist(), np.diff(offsets).tolist(), np.diff(bounds).tolist()
    first = min(max(0, int(np.searchsorted(bounds, position, "right")) - 1), count - 1)
    part = min(max(0.0, (position - float(bounds[first])) / max(1.0, sizes[first])), 1.0)
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
