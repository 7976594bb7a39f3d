"""The documents that nanoGPT's own script would hold out: drawn by number from all that the sources have.

How many there are is in the footers of parquet files; other sources take a pass of their own over their text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from tokenmill.layouts.shuffled import num_validation, original_permutation
from tokenmill.planning import Plan, Unit
from tokenmill.sources.reading import read_unit
from tokenmill.sources.streams import explained

Places = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def held_out(plan: Plan, root: str, *, documents: str, limit: int) -> dict[str, tuple[int, ...]]:
    """Positions of the documents that are for validation, by source."""
    found = [places for unit in plan.units for places in _unit_places(plan, unit, root, documents, limit)]
    if not found:  # no document at all, and whoever wants to keep some will say so
        return {}
    sources = np.concatenate([sources for sources, _ in found])
    positions = np.concatenate([positions for _, positions in found])
    numbers = np.sort(original_permutation(len(positions))[: num_validation(len(positions))])
    chosen: dict[str, tuple[int, ...]] = {}
    for index in np.unique(sources[numbers]).tolist():
        mine = numbers[sources[numbers] == index]
        chosen[plan.sources[index].name] = tuple(positions[mine].tolist())
    return chosen


def _unit_places(plan: Plan, unit: Unit, root: str, documents: str, limit: int) -> Iterator[Places]:
    """Source and position of every document of a unit, in order, whether or not it will be kept."""
    sources = list(plan.sources[unit.source : unit.source + unit.num_sources])
    paths = [f"{root}/{source.name}" for source in sources]
    if all(source.kind == "parquet" and os.path.isfile(path) for source, path in zip(sources, paths, strict=True)):
        for number, path in enumerate(paths, start=unit.source):
            rows = _rows(path, unit)
            yield np.full(len(rows), number), rows
        return
    for batch in read_unit(unit, paths, sources, documents=documents, limit=limit):
        index = np.concatenate((batch.sources, [skip.source for skip in batch.skips])).astype(np.int64)
        at = np.concatenate((batch.positions, [skip.position for skip in batch.skips])).astype(np.int64)
        in_turn = np.lexsort((at, index))
        yield index[in_turn], at[in_turn]


def _rows(path: str, unit: Unit) -> npt.NDArray[np.int64]:
    """The rows of a unit's row groups, from the footer alone."""
    with explained(path):
        about = pq.read_metadata(path)
        ends = np.cumsum([0, *(about.row_group(group).num_rows for group in range(about.num_row_groups))])
    stop = about.num_row_groups if unit.stop < 0 else unit.stop
    return np.arange(ends[unit.start], ends[stop])
