"""Traces: from a training step to the rows of the sources that it had, and from such a row to the steps that have it.

    step, rank  ->  positions  ->  samples  ->  tokens  ->  documents  ->  rows of the sources
    row of a source  ->  document  ->  tokens  ->  samples  ->  positions  ->  step, rank

Each arrow is a computation or a search, in both directions: the order is a permutation with an inverse, documents and
packing plans are sorted tables, and provenance is bisected. Two kinds of samples are searched one by one, without
reading text: those of order "random", and the segments of packing "best_fit".
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from tokenmill import arguments
from tokenmill.dataset.dataset import Dataset, SourceRow, TokenSplit
from tokenmill.errors import RecipeError
from tokenmill.loader.batches import Numbers, TraceableStream
from tokenmill.loader.mixture import Mixture, MixtureStream

if TYPE_CHECKING:
    from tokenmill.loader.loader import DataLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedDocument:
    """A document: where it came from, and where its tokens are stored.

    `first_token` counts tokens of the split; `file_token` those of `file`, a shard. `source` is None if the dataset has
    no provenance. A document that was dropped has a source, and no number and no tokens.
    """

    component: str | None
    split: str | None
    document: int | None
    source: SourceRow | None
    num_tokens: int
    first_token: int | None
    file: str | None
    file_token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPart:
    """`num_tokens` inputs of a row, from `column` on: tokens of a document, from its token `offset` on."""

    document: TracedDocument
    column: int
    num_tokens: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSample:
    """A sample, where it comes in the stream, and what it has of documents.

    `position` is None for a sample that does not come in the epoch that was asked for. `step`, `rank` and `row` are
    None also if the position is skipped or dropped, or the batch size is not known.
    """

    component: str | None
    sample: int
    position: int | None
    epoch: int | None
    step: int | None
    rank: int | None
    row: int | None
    parts: tuple[TracedPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The samples that were asked for, and the documents that they have parts of, each once."""

    samples: tuple[TracedSample, ...]
    documents: tuple[TracedDocument, ...]

    @property
    def sources(self) -> tuple[SourceRow, ...]:
        """The rows of the sources that the documents came from."""
        return tuple(found.source for found in self.documents if found.source is not None)

    def __repr__(self) -> str:
        return f"Trace({len(self.samples):,} samples of {len(self.documents):,} documents)"


def trace_step(loader: DataLoader, step: int, rank: int | None) -> Trace:
    """What a step of a loader had in it."""
    most = (arguments.MAX_INT - 1) // (loader.batch_size * loader.world_size) - 1
    positions = loader.step_positions(arguments.whole("step", step, most=most, hint="steps count from 0"))
    if rank is not None:
        rank = arguments.whole("rank", rank, most=loader.world_size - 1, hint="ranks count from 0")
        positions = positions[rank * loader.batch_size :][: loader.batch_size]
    return Tracer(loader).positions(positions)


class _Occurrence(NamedTuple):
    """A located sample of a component, and a position at which it comes."""

    component: str | None
    located: int
    position: int | None


class _Component(NamedTuple):
    """A dataset of a loader, and its stream."""

    stream: TraceableStream
    documents: SplitDocuments


class Tracer:
    """Follows the samples of a loader."""

    def __init__(self, loader: DataLoader, *, has_steps: bool = True) -> None:
        self._loader = loader
        self._has_steps = has_steps
        dataset, stream = loader.opened, loader.stream
        named: Any = [(None, dataset, stream)]
        if isinstance(dataset, Mixture) and isinstance(stream, MixtureStream):
            named = zip(dataset.names, dataset.datasets.values(), stream.streams, strict=True)
        self._components = {
            name: _Component(stream, SplitDocuments(name, owner, stream.split)) for name, owner, stream in named
        }

    def positions(self, positions: Numbers) -> Trace:
        """The samples at these positions."""
        stream = self._loader.stream
        located = stream.locate(positions)
        names = list(self._components)
        pairs = located.tolist() if located.ndim > 1 else [(0, one) for one in located.tolist()]
        return self._trace(
            [
                _Occurrence(names[number], one, position)
                for (number, one), position in zip(pairs, positions.tolist(), strict=True)
            ]
        )

    def sample(self, component: str | None, number: int, epoch: int) -> Trace:
        located = self._components[component].stream.locate_number(number)
        never = [_Occurrence(component, int(located[0]), None)]
        return self._trace(self._occurrences(component, located, epoch) or never)

    def document(self, component: str | None, number: int, epoch: int) -> Trace:
        stream, documents = self._components[component]
        (found,) = documents.of([number]).values()
        begin = cast("int", found.first_token)
        located = stream.samples_with(begin, begin + found.num_tokens)
        come = [one for one in self._occurrences(component, located, epoch) if one.position is not None]
        traced = self._trace(come, only=number)
        return Trace(samples=traced.samples, documents=(found,))

    def _occurrences(self, component: str | None, located: Numbers, epoch: int) -> list[_Occurrence]:
        """Where these samples come in an epoch, in the order of positions."""
        mixed = self._loader.stream
        indices, positions = self._components[component].stream.occurrences(located, epoch)
        found: list[int | None] = positions.tolist()
        if isinstance(mixed, MixtureStream):
            found = mixed.positions_of(list(self._components).index(component), positions)
        pairs = [_Occurrence(component, int(located[i]), at) for i, at in zip(indices.tolist(), found, strict=True)]
        return sorted(pairs, key=lambda one: (one.position is None, one.position or 0))

    def _trace(self, found: Sequence[_Occurrence], *, only: int | None = None) -> Trace:
        """The parts of these samples; `only` those of one document."""
        slots: dict[int, list[_Slot]] = {}
        documents: dict[tuple[str | None, int], TracedDocument] = {}
        for name, (stream, all_documents) in self._components.items():
            mine = [number for number, one in enumerate(found) if one.component == name]
            rows = all_documents.cut(stream, np.array([found[number].located for number in mine], np.int64), only)
            slots.update(zip(mine, rows, strict=True))
            numbers = sorted({slot.document for row in rows for slot in row})
            documents.update({(name, number): one for number, one in all_documents.of(numbers).items()})
        samples = []
        for number, one in enumerate(found):
            parts = tuple(
                TracedPart(
                    document=(document := documents[one.component, slot.document]),
                    column=slot.column,
                    num_tokens=slot.num_tokens,
                    offset=slot.token - cast("int", document.first_token),
                )
                for slot in slots[number]
            )
            samples.append(self._describe(one, parts))
        return Trace(samples=tuple(samples), documents=tuple(documents.values()))

    def _describe(self, one: _Occurrence, parts: tuple[TracedPart, ...]) -> TracedSample:
        loader, stream = self._loader, self._components[one.component].stream
        at = loader.step_at(one.position) if self._has_steps and one.position is not None else None
        return TracedSample(
            component=one.component,
            sample=int(stream.sample_numbers(np.array([one.located]))[0]),
            position=one.position,
            epoch=None if one.position is None else one.position // loader.num_samples,
            step=None if at is None else at.step,
            rank=None if at is None else at.rank,
            row=None if at is None else at.row,
            parts=parts,
        )


class _Slot(NamedTuple):
    """Inputs of a row that are of one document: its number, and their first token in the split."""

    document: int
    column: int
    num_tokens: int
    token: int


@dataclass(frozen=True, slots=True)
class SplitDocuments:
    """The documents of a split of a component."""

    component: str | None
    dataset: Dataset
    split: TokenSplit
    _sources: dict[int, SourceRow] = field(default_factory=dict)

    def of(self, numbers: Sequence[int]) -> dict[int, TracedDocument]:
        if not numbers:
            return {}
        if numbers[-1] >= self.split.num_documents:
            count = self.split.num_documents
            raise RecipeError(f"document {numbers[-1]:,} of {count:,} documents", hint="documents count from 0")
        firsts = self.split.document_starts(np.array(numbers)).tolist()
        rows = self.split.sources(numbers) if self.dataset.has_provenance else [None] * len(numbers)
        return {
            number: self._describe(number, first, row) for number, first, row in zip(numbers, firsts, rows, strict=True)
        }

    def cut(self, stream: TraceableStream, located: Numbers, only: int | None) -> list[list[_Slot]]:
        """The inputs of each of these samples, cut where documents end."""
        found = stream.inputs(located)
        rows = []
        for first, last in zip(found.boundaries[:-1].tolist(), found.boundaries[1:].tolist(), strict=True):
            row: list[_Slot] = []
            column = 0
            pairs = zip(found.starts[first:last].tolist(), found.spans[first:last].tolist(), strict=True)
            for start, span in pairs:
                row += self._cut_run(start, span, column)
                column += span
            rows.append([slot for slot in row if only is None or slot.document == only])
        return rows

    def _cut_run(self, start: int, span: int, column: int) -> list[_Slot]:
        ends = [*self.split.document_ends(start, start + span).tolist(), start + span]
        begins = [at for at, end in zip([start, *ends], ends, strict=False) if at < end]
        numbers = self.split.document_at(np.array(begins, np.int64)).tolist()
        stops = [*begins[1:], start + span]
        return [
            _Slot(number, column + begin - start, stop - begin, begin)
            for number, begin, stop in zip(numbers, begins, stops, strict=True)
        ]

    def _describe(self, number: int, first: int, row: SourceRow | None) -> TracedDocument:
        shard = bisect.bisect_right(self.split.token_ends, first)
        before = self.split.token_ends[shard - 1] if shard else 0
        path = self.split.shard_location(shard)[0]
        name = os.path.relpath(path, self.dataset.path)
        return TracedDocument(
            component=self.component,
            split=self.split.name,
            document=number,
            source=row,
            num_tokens=len(self.split.document(number)),
            first_token=first,
            file=os.path.basename(path) if name == "." else name,
            file_token=first - before,
        )
