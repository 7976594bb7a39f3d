"""Checks that the sources are those of a finished dataset whose plan is gone.

    all documents    read again: their hashes add up to the manifest's, their positions are those of the provenance
    a sample         encoded again: the same tokens as in the shards; some of every source, all of a small corpus

Names, sizes and times of sources cannot prove that. While the plan is there, its pins are compared instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.build.plan import make_task
from tokenmill.build.resolve import ResolvedBuild, make_config
from tokenmill.dataset import provenance
from tokenmill.dataset.dataset import Dataset
from tokenmill.dataset.manifest import Manifest
from tokenmill.errors import SourceChangedError
from tokenmill.formats import open as formats
from tokenmill.recipe import load_filter
from tokenmill.sizes import counted, few
from tokenmill.sources.base import Batch
from tokenmill.sources.files import open_file
from tokenmill.storage.base import Storage
from tokenmill.tokenizers.engine import open_engine
from tokenmill.units.encode import encode_batch, hash_documents, read_batches, tokens_of_split
from tokenmill.units.memory import bytes_needed
from tokenmill.units.receipts import hex_sum, hex_sums
from tokenmill.units.task import UnitTask

# So much text is encoded in any case, and then one batch of so many, beside the first batch of every source.
ENCODED_BYTES = 64_000_000
ONE_IN = 16
_HINT = "start over with `restart=True`, choose another output, or put the old files back"


def compare_sources(resolved: ResolvedBuild, folder: Storage, found: Manifest) -> str:
    """What was compared, in a sentence; `SourceChangedError` if the dataset was made of other documents."""
    comparison = _SourceCheck(resolved, folder, found)
    max_tokens = resolved.recipe.max_tokens
    for unit in resolved.plan.units:
        if max_tokens is not None and comparison.num_tokens >= max_tokens:
            break
        comparison.add_unit(make_task(resolved.plan, unit.index))
    comparison.finish()
    encoded = counted(comparison.num_encoded, "document")
    return f"all documents of the sources are unchanged, and the tokens of a sample of {encoded} are the same"


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of the provenance. `splits` is -1 for documents that were dropped."""

    positions: npt.NDArray[np.int64]
    splits: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]


class _SourceCheck:
    """How far the sources have been compared with the dataset."""

    def __init__(self, resolved: ResolvedBuild, folder: Storage, found: Manifest) -> None:
        self._plan, self._spec, self._found, self._path = resolved.plan, resolved.spec, found, folder.path
        self._config = make_config(resolved, scratch=None)
        self._keep = load_filter(self._config.filter) if self._config.filter else None
        self._engine = open_engine(resolved.spec)
        self._budget = resolved.recipe.max_tokens
        self._dataset: Dataset = formats.open(folder.path)
        self._rows = _RowReader(folder, found, self._config.split_names)
        self._chance = random.Random(found.fingerprint)
        self._seen: set[int] = set()
        self._encoded_bytes = 0
        self._sum = np.zeros(2, np.uint64)
        self._source_sums = np.zeros((len(self._plan.sources), 2), np.uint64)
        self._offsets = np.zeros(len(self._config.split_names), np.int64)
        self.num_encoded = 0

    @property
    def num_tokens(self) -> int:
        return int(self._offsets.sum())

    def add_unit(self, task: UnitTask) -> None:
        for batch in read_batches(self._config, task):
            self._add(batch, task)

    def finish(self) -> None:
        """Check the sums, once all has been read."""
        if hex_sum(self._sum) != self._found.text_sum or self._rows.take(1) is not None:
            sums = zip(self._found.sources, hex_sums(self._source_sums), strict=True)
            names = [before.name for before, now in sums if before.text_sum != now]
            raise self._changed(few(names, ", ") if names else "the sources")

    def _add(self, batch: Batch, task: UnitTask) -> None:
        hashes = hash_documents(batch.text)
        self._sum += hashes.sum(axis=0, dtype=np.uint64)
        order = _order(batch)
        rows = self._rows.take(batch.num_read)
        positions = np.concatenate((batch.positions, np.array([skip.position for skip in batch.skips], np.int64)))
        sources = _sources(batch)[order]
        if rows is None:
            raise self._changed(self._names(sources))
        is_moved = rows.positions != positions[order]
        if is_moved.any():
            # A source that lost its last documents is the one before.
            first = int(np.argmax(is_moved))
            raise self._changed(self._names([*sources[max(0, first - 1) : first], *sources[is_moved]]))
        places = np.argsort(order)[: len(batch.text)]  # the row of each document
        is_kept = rows.splits[places] >= 0
        np.add.at(self._source_sums, batch.sources[is_kept], hashes[is_kept])
        if self._is_sampled(batch):
            self._compare_tokens(batch, task, rows)
        self._offsets += np.bincount(
            rows.splits[rows.splits >= 0], rows.tokens[rows.splits >= 0], minlength=len(self._offsets)
        ).astype(np.int64)

    def _is_sampled(self, batch: Batch) -> bool:
        sources = set(np.unique(batch.sources).tolist())
        is_new = not sources <= self._seen
        self._seen |= sources
        is_drawn = self._chance.random() * ONE_IN < 1
        return (is_new or is_drawn or self._encoded_bytes < ENCODED_BYTES) and not bytes_needed(
            batch.text, self._engine
        )

    def _compare_tokens(self, batch: Batch, task: UnitTask, rows: _Rows) -> None:
        tokens_left = None if self._budget is None else self._budget - self.num_tokens
        documents = encode_batch(batch, self._config, task, self._engine, keep=self._keep, tokens_left=tokens_left)
        self._encoded_bytes += batch.text.nbytes
        self.num_encoded += len(batch.text)
        for number, name in enumerate(self._config.split_names):
            part = tokens_of_split(documents, number, self._config)
            lengths = rows.tokens[rows.splits == number]
            if part is None and not len(lengths):
                continue
            sources = _sources(batch)[_order(batch)][rows.splits == number]
            if part is None or len(part.lengths) != len(lengths):
                raise self._changed(self._names(sources))
            is_other = part.lengths != lengths
            if not is_other.any():
                start = int(self._offsets[number])
                stored = self._dataset[name].tokens(start, start + len(part.tokens))
                ends = np.cumsum(lengths)
                is_other[np.searchsorted(ends, np.flatnonzero(part.tokens != stored), side="right")] = True
            if is_other.any():
                raise self._changed(self._names(sources[is_other]))

    def _names(self, sources: Iterable[int]) -> str:
        return few([self._plan.sources[number].name for number in sorted(set(sources))], ", ")

    def _changed(self, names: str) -> SourceChangedError:
        return SourceChangedError(
            f"{self._path} was made of other text than there is now: {names} changed since", hint=_HINT
        )


def _sources(batch: Batch) -> npt.NDArray[np.int32]:
    """The source of each document, and then of each skip."""
    return np.concatenate((batch.sources, np.array([skip.source for skip in batch.skips], np.int32)))


def _order(batch: Batch) -> npt.NDArray[np.intp]:
    """Documents and skips of a batch in the order of the provenance."""
    sources = _sources(batch)
    positions = np.concatenate((batch.positions, np.array([skip.position for skip in batch.skips], np.int64)))
    return np.lexsort((positions, sources))


class _RowReader:
    """The rows of a dataset's provenance, taken a few at a time."""

    def __init__(self, folder: Storage, found: Manifest, split_names: tuple[str, ...]) -> None:
        self._tables = self._read(folder, sorted(name for name in found.files if name.startswith("provenance/")))
        self._split_names = split_names
        self._table = provenance.SCHEMA.empty_table()

    def take(self, count: int) -> _Rows | None:
        """The next rows; None if there are not as many."""
        while self._table.num_rows < count:
            following = next(self._tables, None)
            if following is None:
                return None
            self._table = pa.concat_tables([self._table, following])
        taken, self._table = self._table[:count], self._table[count:]
        numbers = {name: number for number, name in enumerate(self._split_names)}
        splits = taken["split"].unify_dictionaries().combine_chunks()
        of_name = np.array([*(numbers[name] for name in splits.dictionary.to_pylist()), -1], np.int64)
        return _Rows(
            taken["position"].to_numpy(),
            of_name[splits.indices.fill_null(len(of_name) - 1).to_numpy(zero_copy_only=False)],
            taken["tokens"].to_numpy().astype(np.int64),
        )

    @staticmethod
    def _read(folder: Storage, names: list[str]) -> Iterator[pa.Table]:
        for name in names:
            with open_file(folder.at(name)) as data, pq.ParquetFile(data) as file:
                yield from provenance.join([file])
