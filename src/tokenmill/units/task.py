"""Tasks: a unit to do, and what all units of a build share. Plain data, which travels to other processes."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.sources.base import Source, Unit
from tokenmill.units.receipts import NO_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSlice:
    """A slice of one source, and the places in it to look at: bytes of the slice, as far as it was planned.

    `at` is where the slice begins among all planned bytes.
    """

    task: UnitTask
    at: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What to look at before the work: `encode_bytes` of text at each place. `planned_bytes` are those of all units.

    Where nothing but reading leads to a place, `read_bytes` are read for each; the places are moved closer if need be.
    """

    visits: tuple[ProbeSlice, ...]
    encode_bytes: int
    read_bytes: int
    planned_bytes: int
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """What all units of a build share. Plain data: it travels to other processes."""

    scratch: str | None
    root: str
    fingerprint: str
    documents: str
    eot: str
    eot_id: int | None
    vocab_size: int
    dtype: str
    split: dict[str, float]
    split_names: tuple[str, ...]
    seed: int
    min_chars: int
    max_document_bytes: int
    filter: str | None
    on_bad: str
    max_documents: int | None
    keep_empty: bool = False
    held_out: dict[str, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTask:
    """A unit to do, with the sources that it reads; `token_limit` cuts it to a budget."""

    unit: Unit
    sources: tuple[Source, ...]
    token_limit: int = NO_LIMIT
