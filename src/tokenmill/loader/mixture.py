"""Mixtures: several datasets in one stream, in exact proportions at every place of it.

    place of the mixture  ->  part, number of its sample  ->  the part's own stream  ->  row

Both steps are computed for any place at once, so a mixture resumes as exactly as a dataset does.

Exact shares: which of several parts a place of a stream belongs to, at any place at once.

    weights 0.5, 0.3, 0.2  ->  shares 5, 3, 2 of 10  ->  a turn of 10 places, over and over:  a b a c a b a c a b

Up to any place, the number of places of a part differs from its share by less than 1. This is
Tijdeman's solution of the chairman assignment problem: the m-th place of a part has a window
in which it must lie; of those whose window has begun, the one whose window ends first is next.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill import arguments
from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import RecipeError
from tokenmill.formats.open import open as open_dataset
from tokenmill.loader.batches import Batch, SampleStream

Source = str | os.PathLike[str] | Dataset
_MAX_PARTS = 127


class Mixture:
    """Datasets and their weights; to be given to a `DataLoader` in place of a dataset.

    Mixture({"web": ("data/web", 0.7), "code": ("data/code", 0.3)}, max_repeats={"code": 4})

    Weights are relative; 0 leaves a part out. In any run of n samples, each part has its share of
    n, give or take less than 2. Shares are exact up to a common denominator of 65536, beyond which
    they are rounded to that: `shares` tells. `max_repeats` says how often a sample of a part may be
    given out, for all parts or by name: a stream that would go beyond that is an error.

    `changes` gives other weights from a sample of the stream on: {1_000_000: {"web": 0.5, "code": 0.5}}.
    It counts samples of all ranks, not steps: a step has another number of them with another number
    of ranks, and the stream would not be the same. Each part goes on where it was.

    An epoch has as many samples as all parts have together.
    """

    def __init__(
        self,
        parts: Mapping[str, tuple[Source, float]],
        *,
        changes: Mapping[int, Mapping[str, float]] | None = None,
        max_repeats: int | Mapping[str, int] | None = None,
    ) -> None:
        if not isinstance(parts, Mapping) or not all(isinstance(name, str) for name in parts):
            raise RecipeError(f"parts is {arguments.show(parts)}", hint='write it like {"web": ("data/web", 0.7)}')
        if not 1 <= len(parts) <= _MAX_PARTS:
            raise RecipeError(f"a mixture of {len(parts)} parts", hint=f"give 1 to {_MAX_PARTS} of them")
        for name, part in parts.items():
            if not isinstance(part, tuple | list) or len(part) != 2:
                raise RecipeError(f"part {name!r} is {part!r}", hint="give a dataset and its weight")
        self.names = tuple(parts)
        self.weights = {0: {name: weight for name, (_, weight) in parts.items()}}
        for place, weights in sorted(_check_changes(changes).items()):
            self.weights[place] = weights
        self.shares = {place: _check_weights(weights, self.names) for place, weights in self.weights.items()}
        self.max_repeats = _check_repeats(max_repeats, self.names)
        self.datasets = {
            name: source if isinstance(source, Dataset) else open_dataset(source) for name, (source, _) in parts.items()
        }
        _check_tokenizers(self.datasets)

    @property
    def on_node(self) -> bool:
        """Whether what one node has of a dataset is among them."""
        return any(dataset.on_node for dataset in self.datasets.values())


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the stream with the same weights: where it begins, and how many samples of each part are before."""

    begin: int
    turn: Schedule
    before: tuple[int, ...]


class MixtureStream:
    """The streams of the parts, one after another as their shares have it."""

    def __init__(self, mixture: Mixture, streams: Sequence[SampleStream], *, fields: Sequence[str] = ()) -> None:
        self.mixture = mixture
        self.streams = tuple(streams)
        # Lists, not dictionaries: the order of the parts matters.
        self.identity: dict[str, Any] = {
            "parts": [stream.identity for stream in streams],
            "shares": [[place, list(shares.values())] for place, shares in mixture.shares.items()],
        }
        self.content = [stream.content for stream in streams]
        self._eras = _make_phases(mixture)
        self._begins = np.array([era.begin for era in self._eras])
        self._names_part = "part" in fields
        self.limit, self._used_up = self._find_limit()

    @property
    def num_samples(self) -> int:
        return sum(stream.num_samples for stream in self.streams)

    def locate(self, places: Numbers) -> Numbers:
        """Two columns: the part, and what its own stream has there."""
        self.check_reach(int(places.max(initial=-1)) + 1)
        located = np.empty((len(places), 2), np.int64)
        numbers = np.searchsorted(self._begins, places, side="right") - 1
        for number in np.unique(numbers).tolist():
            mine, era = numbers == number, self._eras[number]
            parts, before = era.turn.at(places[mine] - era.begin)
            located[mine] = np.stack((parts, before + np.array(era.before)[parts]), axis=1)
        for part in np.unique(located[:, 0]).tolist():
            mine = located[:, 0] == part
            located[mine, 1] = self.streams[part].locate(located[mine, 1])
        return located

    def expect(self, batches: Sequence[Numbers]) -> Iterator[None]:
        parts, places = np.concatenate(batches).T
        for part in np.unique(parts).tolist():
            mine = places[parts == part]
            yield from self.streams[part].expect(np.array_split(mine, len(batches)))

    def maps(self) -> Iterable[npt.NDArray[Any]]:
        return chain.from_iterable(stream.maps() for stream in self.streams)

    def batch(self, located: Numbers) -> Batch:
        found = []
        for part in np.unique(located[:, 0]).tolist():
            rows = np.flatnonzero(located[:, 0] == part)
            found.append((rows, self.streams[part].batch(located[rows, 1])))
        merged = found[0][1] if len(found) == 1 else merge(found, len(located))
        if self._names_part:
            merged["part"] = located[:, 0].astype(np.int8)
        return merged

    def batches(self, located: Numbers) -> Iterator[Batch]:
        return map(self.batch, located)

    def check_reach(self, stop: int) -> None:
        """Raise unless the stream goes as far as `stop`; say which part does not."""
        if self.limit is None or stop <= self.limit:
            return
        name, limit = self._used_up, self.limit
        weights = self.mixture.weights[max(place for place in self.mixture.weights if place <= limit)]
        count = self.streams[self.mixture.names.index(name)].num_samples
        raise RecipeError(
            f"part {name!r}, of weight {weights[name]} and {count} samples, is used up at sample {limit} of the "
            f"mixture: each of its samples was given out {self.mixture.max_repeats[name]} times, its max_repeats",
            hint="give it less weight, more repeats or more text, or stop before that",
        )

    def _find_limit(self) -> tuple[int | None, str]:
        """The first place at which a part has been repeated as often as it may be, and that part."""
        found: list[tuple[int, str]] = []
        for part, name in enumerate(self.mixture.names):
            if name in self.mixture.max_repeats:
                allowed = self.mixture.max_repeats[name] * self.streams[part].num_samples
                place = _find(self._eras, part, allowed)
                if place is not None:
                    found.append((place, name))
        return min(found) if found else (None, "")


def limit_of(stream: SampleStream) -> int | None:
    """Where a stream ends for good, if it does: what stands there cannot be had."""
    return stream.limit if isinstance(stream, MixtureStream) else None


def check_steps(stream: SampleStream, stop: int) -> None:
    """Raise if a stream ends before `stop`."""
    if isinstance(stream, MixtureStream):
        stream.check_reach(stop)


def _make_phases(mixture: Mixture) -> list[Phase]:
    eras: list[Phase] = []
    before = (0,) * len(mixture.names)
    for place, shares in mixture.shares.items():
        if eras:
            last = eras[-1]
            before = tuple(n + last.turn.count(part, place - last.begin) for part, n in enumerate(last.before))
        eras.append(Phase(place, make_schedule(tuple(shares.values())), before))
    return eras


def _find(eras: Sequence[Phase], part: int, number: int) -> int | None:
    """The place of a part's `number`th sample in the mixture, from 0; None if it never comes."""
    for era, following in zip(eras, [*eras[1:], None], strict=True):
        if following is not None and following.before[part] <= number:
            continue
        if not era.turn.shares[part]:
            return None
        return era.begin + era.turn.find(part, number - era.before[part])
    return None


def merge(found: Sequence[tuple[Numbers, Batch]], num_rows: int) -> Batch:
    """One batch of those of the parts, each with the rows that are its."""
    merged: Batch = {}
    seq_len = found[0][1]["input_ids"].shape[1]
    for name, first in found[0][1].items():
        if name == "cu_seqlens":
            edges = [_move_edges(batch[name], rows, seq_len) for rows, batch in found]
            merged[name] = np.append(np.sort(np.concatenate(edges)), num_rows * seq_len).astype(np.int32)
            continue
        merged[name] = np.empty((num_rows, *first.shape[1:]), first.dtype)
        for rows, batch in found:
            merged[name][rows] = batch[name]
    return merged


def _move_edges(edges: Numbers, rows: Numbers, seq_len: int) -> Numbers:
    """The edges of runs, but for the last, where their rows stand in the whole batch."""
    owners, columns = np.divmod(edges[:-1].astype(np.int64), seq_len)
    moved: Numbers = rows[owners] * seq_len + columns
    return moved


def _check_changes(changes: Any) -> dict[int, dict[str, float]]:
    """Weights by the sample from which on they hold."""
    found = {} if changes is None else changes
    if not isinstance(found, Mapping) or not all(isinstance(weights, Mapping) for weights in found.values()):
        hint = 'write it like {1_000_000: {"web": 0.5, "code": 0.5}}'
        raise RecipeError(f"changes is {arguments.show(changes)}", hint=hint)
    hint = "weights change at a positive number of samples"
    return {arguments.whole("a key of changes", at, least=1, hint=hint): dict(new) for at, new in found.items()}


def _check_weights(weights: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    """The shares of these weights."""
    if set(weights) != set(names):
        raise RecipeError(
            f"weights for {', '.join(sorted(map(str, weights)))}, but the parts are {', '.join(sorted(names))}",
            hint="give a weight for every part; 0 leaves one out",
        )
    for name in names:
        arguments.number(f"the weight of part {name!r}", weights[name], hint="weights are finite numbers from 0 on")
    if not any(weights.values()):
        raise RecipeError("no part has any weight", hint="give at least one a weight above 0")
    shares = dict(zip(names, to_shares([weights[name] for name in names]), strict=True))
    for name, share in shares.items():
        if weights[name] and not share:
            raise RecipeError(
                f"part {name!r} has weight {weights[name]} of {sum(weights.values())}, too little for a share",
                hint="give it at least one sample in 65536, or 0 to leave it out",
            )
    return shares


def _check_repeats(repeats: int | Mapping[str, int] | None, names: Sequence[str]) -> dict[str, int]:
    by_name = (
        dict(repeats) if isinstance(repeats, Mapping) else {} if repeats is None else dict.fromkeys(names, repeats)
    )
    if unknown := sorted(map(str, by_name.keys() - set(names))):
        raise RecipeError(f"max_repeats of {', '.join(unknown)}", hint=f"the parts are {', '.join(names)}")
    return {name: arguments.whole(f"max_repeats of part {name!r}", found, least=1) for name, found in by_name.items()}


def _check_tokenizers(datasets: Mapping[str, Dataset]) -> None:
    """Ids of different tokenizers mean different things; no model can learn from a mixture of them."""
    first, *others = datasets
    mine = datasets[first].manifest.tokenizer
    for name in others:
        theirs = datasets[name].manifest.tokenizer
        if theirs.get("fingerprint") != mine.get("fingerprint"):
            raise RecipeError(
                f"part {first!r} has tokenizer {mine.get('name')} ({mine.get('fingerprint')}), "
                f"part {name!r} {theirs.get('name')} ({theirs.get('fingerprint')})",
                hint="prepare them with the same tokenizer",
            )


Numbers = npt.NDArray[np.int64]

# Weights without a smaller common denominator are taken to so many parts of a whole.
MAX_SCHEDULE = 1 << 16


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run of places that repeats: `parts` at each, and how many of the same part stand `before` it in the turn."""

    shares: tuple[int, ...]
    parts: Numbers
    before: Numbers

    def at(self, places: Numbers) -> tuple[Numbers, Numbers]:
        """The parts at these places, and how many places of that part are before each."""
        turns, within = np.divmod(places, len(self.parts))
        parts = self.parts[within]
        return parts, turns * np.array(self.shares)[parts] + self.before[within]

    def count(self, part: int, stop: int) -> int:
        """Places of a part before `stop`."""
        turns, within = divmod(stop, len(self.parts))
        return turns * self.shares[part] + int(np.count_nonzero(self.parts[:within] == part))

    def find(self, part: int, number: int) -> int:
        """The place that is a part's `number`th, from 0. The part must have a share."""
        turns, within = divmod(number, self.shares[part])
        return turns * len(self.parts) + int(np.flatnonzero(self.parts == part)[within])


def make_schedule(shares: Sequence[int]) -> Schedule:
    """The turn in which each part has its share of places."""
    parts = np.array(_assign(shares), np.int64)
    before = np.empty(len(parts), np.int64)
    for part, share in enumerate(shares):
        before[parts == part] = np.arange(share)
    return Schedule(tuple(shares), parts, before)


def to_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportion of these weights, which are not negative and not all 0.

    A float is taken as it is written, so 0.1 is a tenth. Where the sum would pass `MAX_TURN`,
    it is that, and each share is within one of the exact one.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [fraction / sum(exact) for fraction in exact]
    turn = math.lcm(*(fraction.denominator for fraction in whole))
    if turn <= MAX_SCHEDULE:
        return tuple(int(fraction * turn) for fraction in whole)
    shares = [int(fraction * MAX_SCHEDULE) for fraction in whole]
    rests = sorted(range(len(whole)), key=lambda part: shares[part] - whole[part] * MAX_SCHEDULE)
    for part in rests[: MAX_SCHEDULE - sum(shares)]:
        shares[part] += 1
    common = math.gcd(*shares)
    return tuple(share // common for share in shares)


def _assign(shares: Sequence[int]) -> list[int]:
    """The part at each place of a turn."""
    turn = sum(shares)
    active = [part for part, share in enumerate(shares) if share]
    # In parts of a place: windows are shorter by this on both sides than would keep the difference below 1.
    margin = max(2 * len(active) - 2, 2)
    begun: list[list[tuple[int, int]]] = [[] for _ in range(turn)]
    for part in active:
        unit = margin * shares[part]
        for number in range(shares[part]):
            begin = -(-(number * margin + 1) * turn // unit) - 1
            end = ((number + 1) * margin - 1) * turn // unit
            begun[begin].append((end, part))
    waiting: list[tuple[int, int]] = []
    parts = []
    for place in range(turn):
        for window in begun[place]:
            heapq.heappush(waiting, window)
        parts.append(heapq.heappop(waiting)[1])
    return parts
