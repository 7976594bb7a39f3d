"""Plain data that is sent to workers: build configuration, unit tasks and probe requests."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.records import Int, Share
from tokenmill.sources.base import Source, Unit
from tokenmill.units.receipts import NO_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSlice:
    """A slice of one source and the positions to probe in it, as planned bytes from its beginning.

    `at` is the offset of the slice among all planned bytes.
    """

    task: UnitTask
    at: Int
    positions: tuple[Int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What to probe before the work: `encode_bytes` of text at each position. `planned_bytes` is the plan of all units.

    Where a position cannot be read directly, at most `read_bytes` are read for it, and it is moved closer if need be.
    """

    slices: tuple[ProbeSlice, ...]
    encode_bytes: Int
    read_bytes: Int
    planned_bytes: Int
    num_files: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """What all units of a build share."""

    scratch: str | None
    root: str
    fingerprint: str
    documents: str
    eot: str
    eot_id: Int | None
    vocab_size: Int
    dtype: str
    split: dict[str, Share]
    split_names: tuple[str, ...]
    seed: Int
    min_chars: Int
    max_document_bytes: Int
    filter: str | None
    on_bad: str
    max_documents: Int | None
    keep_empty: bool = False
    document_sample: float | None = None
    held_out: dict[str, tuple[Int, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTask:
    """A unit to run, with the sources that it reads. `token_limit` cuts it to the rest of a budget.

    With `compare_text` a source was touched: if the unit is done, its text is compared with what was read then.
    """

    unit: Unit
    sources: tuple[Source, ...]
    token_limit: Int = NO_LIMIT
    compare_text: bool = False
