"""Placement on nodes: a plan is dealt into parts, each on one node's own disk, and one record says which is where.

    units of the plan    0 1 2 3 | 4 5 6 | 7 8 9     runs of about the same text, in the plan's order
    parts                   0    |   1   |   2       each an ordinary dataset, in OUT on its node
    nodes.json            node1  | node3 | node2     written when all parts stand, the same on every node

A part's plan has its own units and their sources alone, and says of which whole it is a part. So a disk
tells by itself what it holds, and no list of nodes has to be kept: whoever starts again asks the disks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill import records
from tokenmill.errors import BuildError, DatasetError, OutputError
from tokenmill.manifest import Manifest, SourceTotal, Split
from tokenmill.planning import Plan
from tokenmill.storage import Digest, Folder

NAME = "nodes.json"
FORMAT = 1
IDENTITY = "part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a whole: the `number`th of as many as it was dealt `into`. `whole` is the whole plan's fingerprint."""

    number: int
    into: int
    whole: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    tokens: int
    documents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a part is, what it holds, and the digest of its manifest."""

    host: str
    path: str
    splits: dict[str, Totals]
    manifest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Which node has what: a place for each part, in order. `fingerprint` is that of the whole plan."""

    format: int
    fingerprint: str
    parts: tuple[Place, ...]


def part_of(identity: Mapping[str, Any]) -> Part | None:
    """Which part of a whole a dataset is, by the identity in its plan or manifest; None if it is a whole."""
    found = identity.get(IDENTITY)
    return None if found is None else records.convert(Part, found, where=f"identity.{IDENTITY}")


def deal(plan: Plan, count: int) -> list[Plan]:
    """Cut a plan into so many parts of about the same text, none without a unit. Pure, as the plan is."""
    borders = list(_borders([unit.text_bytes for unit in plan.units], count))
    return [
        _cut_out(plan, number, begin, end, count) for number, (begin, end) in enumerate(itertools.pairwise(borders))
    ]


def _borders(weights: Sequence[int], count: int) -> Iterator[int]:
    """The first item of each run, and the end: a run goes on until its share of the weight is reached."""
    total, seen, index = sum(weights), 0, 0
    for number in range(count):
        yield index
        latest = len(weights) - (count - number - 1)  # every run behind this one needs an item too
        begin = index
        while index < latest and (index == begin or (2 * seen + weights[index]) * count <= 2 * total * (number + 1)):
            seen += weights[index]
            index += 1
    yield len(weights)


def _cut_out(plan: Plan, number: int, begin: int, end: int, count: int) -> Plan:
    units = plan.units[begin:end]
    first, last = units[0].source, units[-1].source + units[-1].num_sources
    part = {"number": number, "into": count, "whole": plan.fingerprint}
    return replace(
        plan,
        identity={**plan.identity, IDENTITY: part},
        sources=records.make_table(type(plan.sources[0]), plan.sources[first:last]),
        units=records.make_table(
            type(units[0]),
            (replace(unit, index=index, source=unit.source - first) for index, unit in enumerate(units)),
        ),
    )


def assign(found: Sequence[tuple[Part | None, bool]], whole: str, num_units: int) -> list[int]:
    """The node of each part, as places in `found`: what each node's disk holds, and whether that is finished.

    Nodes keep what they have; parts that nobody has go to nodes that have none. How many there are is settled by the
    first start. Who holds something else is given a part at last: the build there will say what differs.
    """
    ours = {node: part for node, (part, _) in enumerate(found) if part is not None and part.whole == whole}
    counts = sorted({part.into for part in ours.values()})
    if len(counts) > 1:
        raise OutputError(
            f"the nodes hold parts of {' and of '.join(map(str, counts))}: they belong to two builds",
            hint="start all of them over with --restart, or choose another output",
        )
    count = counts[0] if counts else min(len(found), num_units)
    owners: dict[int, int] = {}
    for node, part in sorted(ours.items(), key=lambda item: not found[item[0]][1]):  # what is finished goes before
        owners.setdefault(part.number, node)
    free = sorted(set(range(len(found))) - ours.keys(), key=lambda node: found[node][0] is not None)
    missing = [number for number in range(count) if number not in owners]
    if len(missing) > len(free):
        raise BuildError(
            f"parts {', '.join(map(str, missing))} of {count} are on none of the {len(found)} nodes that are up",
            hint="start the missing nodes again, or as many others, then run the same command; or deal anew "
            "with --restart",
        )
    owners.update(zip(missing, free, strict=False))
    return [owners[number] for number in range(count)]


def describe(manifest: Manifest, digest: Digest, *, host: str, path: str) -> Place:
    """A part that stands, for the record."""
    splits = {name: Totals(tokens=split.tokens, documents=split.documents) for name, split in manifest.splits.items()}
    return Place(host=host, path=path, splits=splits, manifest=digest)


def together(plan: Plan, parts: Sequence[Manifest]) -> Manifest:
    """What the parts of a plan come to. Its shards are named as they are on their nodes."""
    splits = {
        name: Split(
            tokens=sum(part.splits[name].tokens for part in parts),
            documents=sum(part.splits[name].documents for part in parts),
            shards=[shard for part in parts for shard in part.splits[name].shards],
        )
        for name in parts[0].splits
    }
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(part.dropped)
    return replace(
        parts[0],
        fingerprint=plan.fingerprint,
        identity=plan.identity,
        splits=splits,
        documents_read=sum(part.documents_read for part in parts),
        dropped=dict(sorted(dropped.items())),
        text_sum=_add(part.text_sum for part in parts),
        sources=_join_sources(part.sources for part in parts),
        files={},
    )


def _join_sources(parts: Iterable[Sequence[SourceTotal]]) -> list[SourceTotal]:
    """What came from each source. One that was cut between parts is the last of one and the first of the next."""
    joined: list[SourceTotal] = []
    for source in itertools.chain.from_iterable(parts):
        if joined and joined[-1].name == source.name:
            last = joined.pop()
            documents, text_sum = last.documents + source.documents, _add((last.text_sum, source.text_sum))
            joined.append(replace(source, documents=documents, text_sum=text_sum))
        else:
            joined.append(source)
    return joined


def _add(sums: Iterable[str]) -> str:
    """The sum of sums of document hashes: two halves of 64 bits, each by itself."""
    high, low = (
        sum(halves) % (1 << 64) for halves in zip(*((int(s[:16], 16), int(s[16:], 16)) for s in sums), strict=True)
    )
    return f"{high:016x}{low:016x}"


def load(folder: Folder) -> Nodes | None:
    """The record beside a dataset, or in place of one; None if the dataset is a whole."""
    if not folder.exists(NAME):
        return None
    found = records.unseal(Nodes, folder.read(NAME, max_bytes=1 << 26), where=folder.at(NAME))
    if found.format != FORMAT:
        raise DatasetError(
            f"{folder.at(NAME)}: format {found.format}, this tokenmill reads {FORMAT}",
            hint="use the tokenmill that wrote it",
        )
    return found


def where(nodes: Nodes) -> str:
    """Where the parts are, in a few words."""
    places = [f"{place.host}:{place.path}" for place in nodes.parts[:4]]
    return ", ".join(places) + (f" and {len(nodes.parts) - 4} more" if len(nodes.parts) > 4 else "")
