"""The check before the work: documents from all over the sources, encoded twice.

    a worker    looks at the sources  ->  the engine's ids  ---------+
                        |                                            +-> the same? -> an estimate of the whole
    here                +---------------> the reference's ids  ------+

The engine and its reference must agree on them, and they tell how many tokens and how much time
the whole will take.

The estimate: from what was seen at some places to the whole, with an error bar.

    planned bytes   |-----x-----------x-----------x-----------x-----|
    seen there            tokens, documents and text for each planned byte

The places are spread evenly over the planned bytes, so that a large document is met more often than a small one, in
proportion to its size. Hence each place counts the same, and the plain mean over the places is that of the whole.

What to look at before the work: places at even distances over all that was planned.

planned   | a.parquet  | b.jsonl         | c.txt, d.txt |
places        x      x       x      x        x      x       a visit for each unit and source that holds any
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from tokenmill.build import workspace
from tokenmill.build.plan import Plan, make_task
from tokenmill.dataset.bin_idx import index_bytes, numpy_dtype
from tokenmill.executors.base import Prober
from tokenmill.sources.base import EXPANSION, TABLES
from tokenmill.storage.base import has_space, require_space
from tokenmill.storage.local import Folder
from tokenmill.tokenizers.parity import Trial, check_parity, compare, hard_texts, open_reference
from tokenmill.tokenizers.spec import TokenizerSpec
from tokenmill.units.probe import DocumentCount, ProbeResult
from tokenmill.units.task import BuildConfig, ProbeRequest, ProbeSlice, UnitTask


def check_space(folder: Folder, whole: int) -> None:
    """Raise `DiskFullError` now rather than after hours. What is there already of the whole needs no more room."""
    if has_space(folder, whole):  # as mostly: then a million pieces need not be looked at
        return
    require_space(
        folder,
        whole - workspace.bytes_done(folder),
        hint="free some space, choose another output, or limit the work with --max-tokens or --sample",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityResult:
    """What was compared with the reference, what was seen by the way, and the units that could not be read."""

    parity: dict[str, Any]
    survey: Survey
    unread: tuple[int, ...]

    @property
    def estimate(self) -> Estimate:
        return estimate(self.survey)


def check_parity_of_plan(request: ProbeRequest, work: BuildConfig, spec: TokenizerSpec, worker: Prober) -> ParityResult:
    """Have documents of every place encoded by the engine and its reference, and count what they come to."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenmill-reference") as beside:
        reference = beside.submit(open_reference, spec)
        found = worker.probe(request)
    hard = hard_texts(spec)
    compare(spec, reference.result(), hard, worker.encode(hard))
    parity, trial = check_parity(spec, reference.result(), found.texts, worker.encode)
    survey = Survey(
        seen=tuple(_count(found, trial, eot=work.eot != "none")),
        counts=found.counts,
        planned_bytes=request.planned_bytes,
        token_bytes=numpy_dtype(work.dtype).itemsize,
        encoded_bytes=parity.bytes,
        seconds=trial.seconds,
    )
    return ParityResult(parity=dataclasses.asdict(parity), survey=survey, unread=found.unread)


def _count(found: ProbeResult, trial: Trial, *, eot: bool) -> Iterator[SampledPosition]:
    """Tokens at every place, for each planned byte."""
    tokens = np.array(trial.lengths, np.int64)
    sizes = np.array([len(text.encode()) for text in found.texts], np.int64)
    for place in found.places:
        texts = list(place.texts)
        yield SampledPosition(
            at=place.at,
            tokens=float(tokens[texts].sum()) / place.planned_bytes + eot * place.documents,
            documents=place.documents,
            text_bytes=float(sizes[texts].sum()) / place.planned_bytes,
            weight=place.weight,
        )


_Z = 1.96  # 95 % of a normal distribution lie so many deviations around its mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the whole dataset will come to, give or take `error` (a 95 % interval) of the tokens.

    `encode_seconds` are those of one worker that does nothing else, and knows all words already.
    """

    tokens: int
    error: int
    documents: int
    output_bytes: int
    text_bytes: int
    encode_seconds: float

    def share(self, max_tokens: int | None) -> float:
        """How much of the whole a budget of tokens takes."""
        return min(1.0, max_tokens / self.tokens) if max_tokens and self.tokens else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPosition:
    """What one place holds for each byte that was planned; `at` is where it is among all of those.

    `weight` is not 1 where a place turned out to stand for more or fewer bytes than the others.
    """

    at: int
    tokens: float
    documents: float
    text_bytes: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All that was seen: places, counts, and what the engine needed for the text of the places."""

    seen: tuple[SampledPosition, ...]
    counts: tuple[DocumentCount, ...]
    planned_bytes: int
    token_bytes: int
    encoded_bytes: int
    seconds: float


def estimate(survey: Survey) -> Estimate:
    """The whole of a survey."""
    seen, total = survey.seen, survey.planned_bytes
    if not seen:
        return Estimate(tokens=0, error=0, documents=0, output_bytes=0, text_bytes=0, encode_seconds=0.0)
    weights = [one.weight for one in seen]
    mean = fmean((one.tokens for one in seen), weights)
    num_tokens = round(total * mean)
    num_documents = max(1, _documents(survey))
    num_text_bytes = total * fmean((one.text_bytes for one in seen), weights)
    return Estimate(
        tokens=num_tokens,
        error=round(total * _error(seen, mean)),
        documents=num_documents,
        output_bytes=num_tokens * survey.token_bytes + index_bytes(num_documents) + 16 * num_documents,
        text_bytes=round(num_text_bytes),
        encode_seconds=num_text_bytes / survey.encoded_bytes * survey.seconds,
    )


def _error(seen: Sequence[SampledPosition], mean: float) -> float:
    """A single place says nothing of how far the others may be from it."""
    if len(seen) < 2:
        return mean
    return deviation([one.weight * (one.tokens - mean) for one in seen]) / fmean(one.weight for one in seen)


def _documents(survey: Survey) -> int:
    """Exact, if there is no byte whose documents were not counted."""
    counts = set(survey.counts)
    if sum(count.planned_bytes for count in counts) == survey.planned_bytes:
        return sum(count.documents for count in counts)
    return round(
        survey.planned_bytes * fmean((one.documents for one in survey.seen), [one.weight for one in survey.seen])
    )


def deviation(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of two or more values that were taken at even distances.

    Neighbours are alike where a corpus is in some order, which makes its mean more certain. So it is
    the steps from value to value that tell the spread, not the distances from the mean.
    """
    count = len(values)
    steps = sum((b - a) ** 2 for a, b in itertools.pairwise(values)) / 2 / (count - 1)
    return _student(2 * (count - 1) / 3) * math.sqrt(steps / count)


def _student(freedom: float) -> float:
    """The quantile of Student's distribution that takes the place of `_Z` when the spread itself is uncertain."""
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    return _Z + first / freedom + second / freedom**2


# Places that are looked at before the work; text that is encoded, and read to get there, of them all together.
POSITIONS = 8
ENCODE_BYTES = 256_000
READ_BYTES = 1_000_000


def make_request(
    plan: Plan, places: int = POSITIONS, *, encode_bytes: int = ENCODE_BYTES, read_bytes: int = READ_BYTES
) -> ProbeRequest:
    """Places at even distances over all that was planned."""
    total = plan.text_bytes()
    wanted = [total * (2 * place + 1) // (2 * places) for place in range(places)]
    visits: list[ProbeSlice] = []
    num_files = begin = taken = 0
    for unit in plan.units:
        end = begin + unit.text_bytes
        first = taken
        while taken < places and (wanted[taken] < end or unit.index == len(plan.units) - 1):
            taken += 1
        if first < taken:
            visits += _slices(make_task(plan, unit.index), begin, [at - begin for at in wanted[first:taken]])
        num_files += unit.num_sources
        begin = end
    return ProbeRequest(
        visits=tuple(visits),
        encode_bytes=encode_bytes // places,
        read_bytes=read_bytes // places,
        planned_bytes=total,
        num_files=num_files,
    )


def _slices(task: UnitTask, begin: int, places: list[int]) -> Iterator[ProbeSlice]:
    """A visit to each source of a unit that holds any of the places."""
    if len(task.sources) == 1:
        yield ProbeSlice(task=task, at=begin, places=tuple(places))
        return
    sizes = _planned_sizes(task)
    ends = list(itertools.accumulate(sizes))
    last = len(ends) - 1
    for number, inside in itertools.groupby(places, lambda place: min(bisect_right(ends, place), last)):
        start = ends[number] - sizes[number]
        unit = replace(task.unit, source=task.unit.source + number, num_sources=1, text_bytes=sizes[number])
        yield ProbeSlice(
            task=UnitTask(unit=unit, sources=(task.sources[number],)),
            at=begin + start,
            places=tuple(place - start for place in inside),
        )


def _planned_sizes(task: UnitTask) -> list[int]:
    """What was planned for each source of a unit. Of tables only the sum is known, so that files share it."""
    tables = [source.kind in TABLES for source in task.sources]
    # A table without a byte is none, but its unit was planned, and will say so.
    sizes = [
        max(1, source.bytes) if table else source.bytes * (EXPANSION if source.compression else 1)
        for source, table in zip(task.sources, tables, strict=True)
    ]
    in_tables = sum(itertools.compress(sizes, tables))
    left = task.unit.text_bytes - (sum(sizes) - in_tables)
    return [size * left // in_tables if table else size for size, table in zip(sizes, tables, strict=True)]
