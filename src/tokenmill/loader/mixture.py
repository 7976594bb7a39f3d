"""Mixtures: several datasets in one stream, in exact proportions at every position.

    position of the mixture  ->  component, number of its sample  ->  the component's own stream  ->  row

Both steps are computed for any position at once, so a mixture resumes as exactly as a dataset does.

    weights 0.5, 0.3, 0.2  ->  shares 5, 3, 2 of 10  ->  a schedule of 10 positions, repeated:  a b a c a b a c a b

Up to any position, the count of a component differs from its exact share by less than 1. This is Tijdeman's solution
of the chairman assignment problem: the m-th sample of a component has a window of positions; of the windows that have
begun, the one that ends first is next.
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
from tokenmill.sizes import counted, parse_size

_COMPONENT = ("dataset", "weight")
Source = str | os.PathLike[str] | Dataset
Numbers = npt.NDArray[np.int64]

# Weights without a smaller common denominator are rounded to this many parts of a whole.
MAX_PERIOD = 1 << 16
_MAX_COMPONENTS = 127


class Mixture:
    """Datasets and their weights, for a `DataLoader` in place of a dataset.

    Mixture({"web": ("data/web", 0.7), "code": ("data/code", 0.3)}, max_repeats={"code": 4})

    Weights are relative; 0 leaves a component out. In any run of n samples, the count of each component differs
    from its share of n by less than 2. Shares are exact up to a common denominator of 65536, and rounded to that
    beyond it; `shares` has them. `max_repeats` limits how often each sample of a component may be used, for all
    components or by name: a stream that would exceed it is an error.

    `schedule` changes the weights from a sample of the stream on: {1_000_000: {"web": 0.5, "code": 0.5}}. It counts
    samples of all ranks, not steps, so that the stream is the same for any number of ranks. Each component continues
    where it was. A state loads into a mixture with other weights after the samples that it has seen, and with more
    components behind the old ones: those had weight 0 before.

    An epoch has as many samples as all components together.

    Mixture({"web": ("data/web", "10G"), "code": ("data/code", "2.5G")})

    Budgets of tokens, written as text, in place of weights: they give the proportions, and an epoch has their sum. So
    a loader with `epochs=1` ends when they are spent, each within a sample, if their shares are exact.
    """

    def __init__(
        self,
        components: Mapping[str, tuple[Source, float | str]],
        *,
        schedule: Mapping[int, Mapping[str, float]] | None = None,
        max_repeats: int | Mapping[str, int] | None = None,
    ) -> None:
        if not isinstance(components, Mapping) or not all(isinstance(name, str) for name in components):
            hint = 'write it like {"web": ("data/web", 0.7)}'
            raise RecipeError(f"components is {arguments.show(components)}", hint=hint)
        if not 1 <= len(components) <= _MAX_COMPONENTS:
            raise RecipeError(f"a mixture of {len(components)} components", hint=f"give 1 to {_MAX_COMPONENTS} of them")
        for name, component in components.items():
            if not isinstance(component, tuple | list) or len(component) != len(_COMPONENT):
                raise RecipeError(f"component {name!r} is {component!r}", hint="give a dataset and its weight")
        self.names = tuple(components)
        self.num_tokens = _check_budgets(components, schedule)
        self.weights = {0: {name: _to_weight(name, weight) for name, (_, weight) in components.items()}}
        for begin, weights in sorted(_check_schedule(schedule).items()):
            self.weights[begin] = weights
        self.shares = {begin: _check_weights(weights, self.names) for begin, weights in self.weights.items()}
        self.max_repeats = _check_repeats(max_repeats, self.names)
        self.datasets = {
            name: source if isinstance(source, Dataset) else open_dataset(source)
            for name, (source, _) in components.items()
        }
        _check_tokenizers(self.datasets)

    def __repr__(self) -> str:
        weights = {
            name: weight if self.num_tokens is None else counted(weight, "token")
            for name, weight in self.weights[0].items()
        }
        components = ", ".join(f"{name}: {weights[name]} of {self.datasets[name].path!r}" for name in self.names)
        changes = ", ".join(f"{begin:,}" for begin in self.weights if begin)
        return f"Mixture({components}{f'; weights change at sample {changes}' if changes else ''})"

    @property
    def is_node_part(self) -> bool:
        """Whether a component is one node's part of a dataset."""
        return any(dataset.is_node_part for dataset in self.datasets.values())


@dataclass(frozen=True, slots=True)
class Phase:
    """A run of the stream with constant weights: its first position, and the samples of each component before it."""

    begin: int
    schedule: Schedule
    before: tuple[int, ...]


class MixtureStream:
    """The streams of the components, interleaved by their shares."""

    def __init__(
        self,
        mixture: Mixture,
        streams: Sequence[SampleStream],
        *,
        seq_len: int,
        max_seq_len: int | None = None,
        fields: Sequence[str] = (),
    ) -> None:
        self.mixture = mixture
        self._seq_len = seq_len
        # The rows that are mixed are cut into so many samples.
        self._parts = (max_seq_len or seq_len) // seq_len
        self.streams = tuple(streams)
        # Lists, not dictionaries: the order of the components matters. Keys are those that states of 0.1 have.
        self.identity: dict[str, Any] = {
            "parts": [stream.identity for stream in streams],
            "shares": [[begin, list(shares.values())] for begin, shares in mixture.shares.items()],
        }
        self.content = [stream.content for stream in streams]
        self._phases = _make_phases(mixture)
        self._begins = np.array([phase.begin for phase in self._phases])
        self._with_component = "component" in fields
        self.limit, self._exhausted = self._find_limit()

    @property
    def num_samples(self) -> int:
        """Samples in an epoch: of all components, or of the budgets, where an incomplete one counts."""
        if self.mixture.num_tokens is not None:
            return -(-self.mixture.num_tokens // (self._seq_len * self._parts)) * self._parts
        return sum(stream.num_samples for stream in self.streams)

    def locate(self, positions: Numbers) -> Numbers:
        """Two columns: the component, and the sample of its own stream."""
        self._check_limit(int(positions.max(initial=-1)) + 1)
        located = np.empty((len(positions), 2), np.int64)
        rows, parts = np.divmod(positions, self._parts)
        numbers = np.searchsorted(self._begins, rows, side="right") - 1
        for number in np.unique(numbers).tolist():
            mine, phase = numbers == number, self._phases[number]
            components, before = phase.schedule.at(rows[mine] - phase.begin)
            samples = (before + np.array(phase.before)[components]) * self._parts + parts[mine]
            located[mine] = np.stack((components, samples), axis=1)
        for component in np.unique(located[:, 0]).tolist():
            mine = located[:, 0] == component
            located[mine, 1] = self.streams[component].locate(located[mine, 1])
        return located

    def prefetch(self, batches: Sequence[Numbers]) -> Iterator[None]:
        components, samples = np.concatenate(batches).T
        for component in np.unique(components).tolist():
            mine = samples[components == component]
            yield from self.streams[component].prefetch(np.array_split(mine, len(batches)))

    def maps(self) -> Iterable[npt.NDArray[Any]]:
        return chain.from_iterable(stream.maps() for stream in self.streams)

    def batch(self, located: Numbers) -> Batch:
        found = []
        for component in np.unique(located[:, 0]).tolist():
            rows = np.flatnonzero(located[:, 0] == component)
            found.append((rows, self.streams[component].batch(located[rows, 1])))
        merged = found[0][1] if len(found) == 1 else merge(found, len(located))
        if self._with_component:
            merged["component"] = located[:, 0].astype(np.int8)
        return merged

    def batches(self, located: Numbers) -> Iterator[Batch]:
        return map(self.batch, located)

    def positions_of(self, component: int, positions: Numbers) -> list[int | None]:
        """Where positions of a component's own stream come in the mixture; None for those that never do."""
        found: list[int | None] = []
        for position in positions.tolist():
            row, part = divmod(position, self._parts)
            mixed = _find(self._phases, component, row)
            at = None if mixed is None else mixed * self._parts + part
            found.append(at if at is None or self.limit is None or at < self.limit else None)
        return found

    def _check_limit(self, stop: int) -> None:
        """Raise `RecipeError` if a component is exhausted before position `stop`."""
        if self.limit is None or stop <= self.limit:
            return
        name, limit = self._exhausted, self.limit
        weights = self.mixture.weights[max(begin for begin in self.mixture.weights if begin * self._parts <= limit)]
        count = self.streams[self.mixture.names.index(name)].num_samples
        raise RecipeError(
            f"component {name!r}, of weight {weights[name]} and {count} samples, is exhausted at sample {limit} of the "
            f"mixture: each of its samples was used {self.mixture.max_repeats[name]} times, its max_repeats",
            hint="give it less weight, more repeats or more text, or stop before that",
        )

    def _find_limit(self) -> tuple[int | None, str]:
        """The first position at which a component has reached its repeats, and that component."""
        found: list[tuple[int, str]] = []
        for component, name in enumerate(self.mixture.names):
            if name in self.mixture.max_repeats:
                allowed = self.mixture.max_repeats[name] * self.streams[component].num_samples // self._parts
                row = _find(self._phases, component, allowed)
                if row is not None:
                    found.append((row * self._parts, name))
        return min(found) if found else (None, "")


def _make_phases(mixture: Mixture) -> list[Phase]:
    phases: list[Phase] = []
    before = (0,) * len(mixture.names)
    for begin, shares in mixture.shares.items():
        if phases:
            last = phases[-1]
            length = begin - last.begin
            before = tuple(n + last.schedule.count(component, length) for component, n in enumerate(last.before))
        phases.append(Phase(begin, make_schedule(tuple(shares.values())), before))
    return phases


def _find(phases: Sequence[Phase], component: int, number: int) -> int | None:
    """The position of a component's `number`th row, from 0; None if it never comes."""
    for phase, following in zip(phases, [*phases[1:], None], strict=True):
        if following is not None and following.before[component] <= number:
            continue
        if not phase.schedule.shares[component]:
            return None
        return phase.begin + phase.schedule.find(component, number - phase.before[component])
    return None


def merge(found: Sequence[tuple[Numbers, Batch]], num_rows: int) -> Batch:
    """One batch of several, each given with the numbers of its rows in the whole."""
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
    """The edges of runs, except the last, moved to where their rows are in the whole batch."""
    owners, columns = np.divmod(edges[:-1].astype(np.int64), seq_len)
    moved: Numbers = rows[owners] * seq_len + columns
    return moved


def _check_schedule(schedule: Any) -> dict[int, dict[str, float]]:
    """Weights by the sample from which they apply."""
    found = {} if schedule is None else schedule
    if not isinstance(found, Mapping) or not all(isinstance(weights, Mapping) for weights in found.values()):
        hint = 'write it like {1_000_000: {"web": 0.5, "code": 0.5}}'
        raise RecipeError(f"schedule is {arguments.show(schedule)}", hint=hint)
    hint = "weights change at a positive number of samples"
    return {arguments.whole("a key of schedule", at, least=1, hint=hint): dict(new) for at, new in found.items()}


def _check_budgets(components: Mapping[str, tuple[Any, Any]], schedule: Any) -> int | None:
    """The sum of the budgets, or None if the components have weights."""
    budgets = [name for name, (_, weight) in components.items() if isinstance(weight, str)]
    if not budgets:
        return None
    if len(budgets) < len(components):
        others = ", ".join(repr(name) for name in components if name not in budgets)
        raise RecipeError(
            f"component {budgets[0]!r} has a budget of tokens, and {others} a weight",
            hint="give all components budgets, or all of them weights",
        )
    if schedule:
        raise RecipeError(
            "a schedule of a mixture whose components have budgets of tokens",
            hint="give weights, which are numbers: the budgets of the first stage do as well",
        )
    return sum(int(_to_weight(name, weight)) for name, (_, weight) in components.items())


def _to_weight(name: str, weight: Any) -> Any:
    """The tokens of a budget, such as "10G", and a weight as it is."""
    what = f"the budget of component {name!r}"
    return parse_size(weight, of="tokens", name=what) if isinstance(weight, str) else weight


def _check_weights(weights: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    """The shares of these weights."""
    if set(weights) != set(names):
        raise RecipeError(
            f"weights for {', '.join(sorted(map(str, weights)))}, but the components are {', '.join(sorted(names))}",
            hint="give a weight for every component; 0 leaves one out",
        )
    for name in names:
        what = f"the weight of component {name!r}"
        arguments.number(what, weights[name], hint="weights are finite numbers, 0 or more")
    if not any(weights.values()):
        raise RecipeError("every weight is 0", hint="give at least one component a weight above 0")
    shares = dict(zip(names, to_shares([weights[name] for name in names]), strict=True))
    for name, share in shares.items():
        if weights[name] and not share:
            raise RecipeError(
                f"component {name!r} has weight {weights[name]} of {sum(weights.values())}, too little for a share",
                hint="give it at least one sample in 65536, or 0 to leave it out",
            )
    return shares


def _check_repeats(repeats: int | Mapping[str, int] | None, names: Sequence[str]) -> dict[str, int]:
    by_name = (
        dict(repeats) if isinstance(repeats, Mapping) else {} if repeats is None else dict.fromkeys(names, repeats)
    )
    if unknown := sorted(map(str, by_name.keys() - set(names))):
        raise RecipeError(f"max_repeats of {', '.join(unknown)}", hint=f"the components are {', '.join(names)}")
    what = "max_repeats of component"
    return {name: arguments.whole(f"{what} {name!r}", found, least=1) for name, found in by_name.items()}


def _check_tokenizers(datasets: Mapping[str, Dataset]) -> None:
    """Refuse datasets of different tokenizers: the same id means different texts in them."""
    first, *others = datasets
    mine = datasets[first].manifest.tokenizer
    for name in others:
        theirs = datasets[name].manifest.tokenizer
        if theirs.get("fingerprint") != mine.get("fingerprint"):
            raise RecipeError(
                f"component {first!r} has tokenizer {mine.get('name')} ({mine.get('fingerprint')}), "
                f"component {name!r} {theirs.get('name')} ({theirs.get('fingerprint')})",
                hint="prepare them with the same tokenizer",
            )


@dataclass(frozen=True, slots=True)
class Schedule:
    """A period of positions that repeats: the component at each, and how many of the same component come before it."""

    shares: tuple[int, ...]
    components: Numbers
    before: Numbers

    def at(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """The components at these positions, and how many positions of the same component come before each."""
        periods, within = np.divmod(positions, len(self.components))
        components = self.components[within]
        return components, periods * np.array(self.shares)[components] + self.before[within]

    def count(self, component: int, stop: int) -> int:
        """Positions of a component before `stop`."""
        periods, within = divmod(stop, len(self.components))
        return periods * self.shares[component] + int(np.count_nonzero(self.components[:within] == component))

    def find(self, component: int, number: int) -> int:
        """The position of a component's `number`th sample, from 0. The component must have a share."""
        periods, within = divmod(number, self.shares[component])
        return periods * len(self.components) + int(np.flatnonzero(self.components == component)[within])


def make_schedule(shares: Sequence[int]) -> Schedule:
    """The period in which each component has its share of positions."""
    components = np.array(_assign(shares), np.int64)
    before = np.empty(len(components), np.int64)
    for component, share in enumerate(shares):
        before[components == component] = np.arange(share)
    return Schedule(tuple(shares), components, before)


def to_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportion of these weights, which are not negative and not all 0.

    A float is taken as it is written, so 0.1 is a tenth. If the sum would exceed `MAX_PERIOD`, it is that, and each
    share is within one of the exact one.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [fraction / sum(exact) for fraction in exact]
    period = math.lcm(*(fraction.denominator for fraction in whole))
    if period <= MAX_PERIOD:
        return tuple(int(fraction * period) for fraction in whole)
    shares = [int(fraction * MAX_PERIOD) for fraction in whole]
    remainders = sorted(range(len(whole)), key=lambda component: shares[component] - whole[component] * MAX_PERIOD)
    for component in remainders[: MAX_PERIOD - sum(shares)]:
        shares[component] += 1
    common = math.gcd(*shares)
    return tuple(share // common for share in shares)


def _assign(shares: Sequence[int]) -> list[int]:
    """The component at each position of a period."""
    period = sum(shares)
    active = [component for component, share in enumerate(shares) if share]
    # In fractions of a position: windows are shorter by this on both sides than a difference below 1 requires.
    margin = max(2 * len(active) - 2, 2)
    starting: list[list[tuple[int, int]]] = [[] for _ in range(period)]
    for component in active:
        unit = margin * shares[component]
        for number in range(shares[component]):
            begin = -(-(number * margin + 1) * period // unit) - 1
            end = ((number + 1) * margin - 1) * period // unit
            starting[begin].append((end, component))
    waiting: list[tuple[int, int]] = []
    components = []
    for position in range(period):
        for window in starting[position]:
            heapq.heappush(waiting, window)
        components.append(heapq.heappop(waiting)[1])
    return components
