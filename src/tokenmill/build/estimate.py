"""The estimate: from what was seen at some places to the whole, with an error bar.

    planned bytes   |-----x-----------x-----------x-----------x-----|
    seen there            tokens, documents and text for each planned byte

The places are spread evenly over the planned bytes, so that a large document is met more often than a small one, in
proportion to its size. Hence each place counts the same, and the plain mean over the places is that of the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tokenmill.shards.layout import index_bytes

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
class Seen:
    """What one place holds for each byte that was planned; `at` is where it is among all of those.

    `weight` is not 1 where a place turned out to stand for more or fewer bytes than the others.
    """

    at: int
    tokens: float
    documents: float
    text_bytes: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Documents of a slice of a source whose number is known, and the bytes that were planned for it."""

    source: int
    start: int
    planned_bytes: int
    documents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All that was seen: places, counts, and what the engine needed for the text of the places."""

    seen: tuple[Seen, ...]
    counts: tuple[Count, ...]
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


def _error(seen: Sequence[Seen], mean: float) -> float:
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
