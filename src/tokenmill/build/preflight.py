"""Checks before units run: parity with the reference tokenizer, size estimate and free space.

    a worker    probes the sources  ->  the engine's ids  ----------+
                        |                                           +-> equal? -> estimate of the whole
    this one            +---------------> the reference's ids  -----+

The positions to probe are at even distances over all planned bytes:

    planned     | a.parquet  | b.jsonl         | c.txt, d.txt |
    positions       x      x       x      x        x      x       a slice for each unit and source that has any

A large document is met more often than a small one, in proportion to its size. Hence each position has the same weight,
and the mean over the positions, of tokens per planned byte, is the mean of the whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

import numpy as np

from tokenmill.build import workspace
from tokenmill.build.plan import Plan, make_task
from tokenmill.dataset.bin_idx import index_bytes, numpy_dtype
from tokenmill.executors.base import Prober
from tokenmill.sources.reader import format_of
from tokenmill.storage.base import Storage, has_space, require_space
from tokenmill.tokenizers.parity import Trial, check_parity, compare, hard_texts, open_reference
from tokenmill.tokenizers.spec import TokenizerSpec
from tokenmill.units.probe import DocumentCount, ProbeResult
from tokenmill.units.task import BuildConfig, ProbeRequest, ProbeSlice, UnitTask


def check_space(folder: Storage, whole: int) -> None:
    """Raise `DiskFullError` now rather than after hours. What is written already counts."""
    if has_space(folder, whole):  # the usual case, in which a million pieces need not be listed
        return
    require_space(
        folder,
        whole - workspace.bytes_done(folder),
        hint="free some space, choose another output, or limit the work with `max_tokens` or `sample`",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityResult:
    """What was compared with the reference, what the probe found, and the units that could not be read."""

    parity: dict[str, Any]
    survey: Survey
    unread: tuple[int, ...]

    @property
    def estimate(self) -> Estimate:
        return estimate(self.survey)


def check_parity_of_plan(
    request: ProbeRequest, config: BuildConfig, spec: TokenizerSpec, worker: Prober
) -> ParityResult:
    """Compare the engine with its reference on documents of every position, and count their tokens."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenmill-reference") as beside:
        reference = beside.submit(open_reference, spec)
        found = worker.probe(request)
    hard = hard_texts(spec)
    compare(spec, reference.result(), hard, worker.encode(hard))
    parity, trial = check_parity(spec, reference.result(), found.texts, worker.encode)
    survey = Survey(
        seen=tuple(_count(found, trial, eot=config.eot != "none")),
        counts=found.counts,
        planned_bytes=request.planned_bytes,
        token_bytes=numpy_dtype(config.dtype).itemsize,
        encoded_bytes=parity.bytes,
        seconds=trial.seconds,
        document_sample=config.document_sample or 1.0,
    )
    return ParityResult(parity=dataclasses.asdict(parity), survey=survey, unread=found.unread)


def _count(found: ProbeResult, trial: Trial, *, eot: bool) -> Iterator[SampledPosition]:
    """Tokens per planned byte at every position."""
    tokens = np.array(trial.lengths, np.int64)
    sizes = np.array([len(text.encode()) for text in found.texts], np.int64)
    for position in found.positions:
        texts = list(position.texts)
        yield SampledPosition(
            at=position.at,
            tokens=float(tokens[texts].sum()) / position.planned_bytes + eot * position.documents,
            documents=position.documents,
            text_bytes=float(sizes[texts].sum()) / position.planned_bytes,
            weight=position.weight,
        )


_Z = 1.96  # 95 % of a normal distribution lie so many deviations around its mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The size of the whole dataset; its tokens are known to ± `error` (95 %).

    `encode_seconds` is the time of one worker that does nothing but encode, with a warm cache of words.
    """

    tokens: int
    error: int
    documents: int
    output_bytes: int
    text_bytes: int
    encode_seconds: float

    def share(self, max_tokens: int | None) -> float:
        """The fraction of the whole that a token budget takes."""
        return min(1.0, max_tokens / self.tokens) if max_tokens and self.tokens else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPosition:
    """What one position holds per planned byte; `at` is its offset among all planned bytes.

    `weight` is not 1 where a position turned out to stand for more or fewer bytes than the others.
    """

    at: int
    tokens: float
    documents: float
    text_bytes: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All that was found: positions, document counts, and the time that the engine took."""

    seen: tuple[SampledPosition, ...]
    counts: tuple[DocumentCount, ...]
    planned_bytes: int
    token_bytes: int
    encoded_bytes: int
    seconds: float
    document_sample: float = 1.0


def estimate(survey: Survey) -> Estimate:
    """The whole of a survey."""
    seen, total = survey.seen, survey.planned_bytes
    if not seen:
        return Estimate(tokens=0, error=0, documents=0, output_bytes=0, text_bytes=0, encode_seconds=0.0)
    weights = [one.weight for one in seen]
    mean = fmean((one.tokens for one in seen), weights)
    share = survey.document_sample
    num_tokens = round(total * mean * share)
    num_documents = max(1, round(_documents(survey) * share))
    num_text_bytes = total * fmean((one.text_bytes for one in seen), weights)
    return Estimate(
        tokens=num_tokens,
        error=round(total * _error(seen, mean) * share),
        documents=num_documents,
        output_bytes=num_tokens * survey.token_bytes + index_bytes(num_documents) + 16 * _documents(survey),
        text_bytes=round(num_text_bytes),
        encode_seconds=share * num_text_bytes / survey.encoded_bytes * survey.seconds,
    )


def _error(seen: Sequence[SampledPosition], mean: float) -> float:
    """A single position says nothing of how far the others may be from it."""
    if len(seen) <= 1:
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
    """The quantile of Student's distribution that takes the position of `_Z` when the spread itself is uncertain."""
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    return _Z + first / freedom + second / freedom**2


# Positions that are looked at before the work; text that is encoded, and read to get there, of them all together.
POSITIONS = 8
ENCODE_BYTES = 256_000
READ_BYTES = 1_000_000


def make_request(
    plan: Plan,
    positions: int = POSITIONS,
    *,
    encode_bytes: int = ENCODE_BYTES,
    read_bytes: int = READ_BYTES,
    chance: Random | None = None,
) -> ProbeRequest:
    """Positions at even distances over all that was planned, or by `chance` one between each two of these."""
    total = plan.text_bytes()
    wanted = [total * (2 * position + 1) // (2 * positions) for position in range(positions)]
    if chance is not None:
        wanted = [int(total * (position + chance.random()) / positions) for position in range(positions)]
    slices: list[ProbeSlice] = []
    num_files = begin = taken = 0
    for unit in plan.units:
        end = begin + unit.text_bytes
        first = taken
        while taken < positions and (wanted[taken] < end or unit.index == len(plan.units) - 1):
            taken += 1
        if first < taken:
            slices += _slices(make_task(plan, unit.index), begin, [at - begin for at in wanted[first:taken]])
        num_files += unit.num_sources
        begin = end
    return ProbeRequest(
        slices=tuple(slices),
        encode_bytes=encode_bytes // positions,
        read_bytes=read_bytes // positions,
        planned_bytes=total,
        num_files=num_files,
    )


def _slices(task: UnitTask, begin: int, positions: list[int]) -> Iterator[ProbeSlice]:
    """A slice for each source of a unit that has any of the positions."""
    if len(task.sources) == 1:
        yield ProbeSlice(task=task, at=begin, positions=tuple(positions))
        return
    sizes = _planned_sizes(task)
    ends = list(itertools.accumulate(sizes))
    last = len(ends) - 1
    for number, inside in itertools.groupby(positions, lambda position: min(bisect_right(ends, position), last)):
        start = ends[number] - sizes[number]
        unit = replace(task.unit, source=task.unit.source + number, num_sources=1, text_bytes=sizes[number])
        yield ProbeSlice(
            task=UnitTask(unit=unit, sources=(task.sources[number],)),
            at=begin + start,
            positions=tuple(position - start for position in inside),
        )


def _planned_sizes(task: UnitTask) -> list[int]:
    """The bytes planned for each source of a unit. Of files with sections only the sum is known, so they share it."""
    shared = [format_of(source.kind).has_sections for source in task.sources]
    # A file with sections and no bytes cannot be read, but its unit was planned and will report it.
    sizes = [
        max(1, source.bytes) if is_shared else source.expanded_bytes
        for source, is_shared in zip(task.sources, shared, strict=True)
    ]
    to_share = sum(itertools.compress(sizes, shared))
    left = task.unit.text_bytes - (sum(sizes) - to_share)
    return [size * left // to_share if is_shared else size for size, is_shared in zip(sizes, shared, strict=True)]
