"""Which pieces become one shard, and which units share a provenance file.

    pieces of a split, in order   [large] [small small small] [large] [small large]
    shards                        0       1                   2       3

A piece of `target` tokens or more becomes a shard as it is; smaller ones are joined with their neighbours until they
reach it, so a split has at most tokens / target + 1 shards. Receipts are passed over once; what is open is held.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tokenmill.build.receipt import Key, Receipt
from tokenmill.manifest import Shard
from tokenmill.storage import Digest

PROVENANCE_ROWS = 1 << 24
PROVENANCE_UNITS = 1 << 16


@dataclass(frozen=True, slots=True)
class Group:
    """The pieces of a shard, and the units that they are of."""

    split: str
    number: int
    keys: list[Key] = field(default_factory=list)
    pieces: list[Shard] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.split}/{self.number:05d}"

    def links(self) -> list[tuple[str, str, Digest]]:
        """The files of a piece that is a shard as it is, and their names as one. Joined pieces have none."""
        return [
            (f"{piece.name}{ending}", f"{self.name}{ending}", digest)
            for piece in self.pieces
            for ending, digest in ((".bin", piece.bin), (".idx", piece.idx))
            if len(self.pieces) == 1
        ]


def group_pieces(receipts: Iterable[Receipt], splits: Iterable[str], target: int) -> Iterator[Group]:
    """The shards of some splits, each as soon as it has `target` tokens; what is left of each split comes last."""
    open_groups = {split: Group(split, 0) for split in splits}
    tokens = dict.fromkeys(open_groups, 0)
    for receipt in receipts:
        for split, piece in receipt.pieces.items():
            group = open_groups.get(split)
            if group is None:
                continue
            group.keys.append(receipt.key)
            group.pieces.append(piece)
            tokens[split] += piece.tokens
            if tokens[split] >= target:
                yield group
                open_groups[split], tokens[split] = Group(split, group.number + 1), 0
    yield from (group for group in open_groups.values() if group.pieces)


def group_provenance(receipts: Iterable[Receipt]) -> Iterator[Iterator[Receipt]]:
    """Runs of receipts whose documents share a provenance file; each lasts until the next is asked for."""

    def numbered() -> Iterator[tuple[int, Receipt]]:
        number = units = rows = 0
        for receipt in receipts:
            yield number, receipt
            units, rows = units + 1, rows + receipt.documents_read
            if rows >= PROVENANCE_ROWS or units == PROVENANCE_UNITS:
                number, units, rows = number + 1, 0, 0

    for _, group in itertools.groupby(numbered(), key=lambda item: item[0]):
        yield (receipt for _, receipt in group)
