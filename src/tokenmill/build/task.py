"""Tasks: a unit to do, and what all units of a build share. Plain data, which travels to other processes."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.build.receipt import NO_LIMIT
from tokenmill.planning import Plan, Source, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
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
class Task:
    """A unit to do, with the sources that it reads; `token_limit` cuts it to a budget."""

    unit: Unit
    sources: tuple[Source, ...]
    token_limit: int = NO_LIMIT


def make_task(plan: Plan, unit: int, token_limit: int = NO_LIMIT) -> Task:
    """The task of a unit of a plan."""
    found = plan.units[unit]
    sources = tuple(plan.sources[found.source : found.source + found.num_sources])
    return Task(unit=found, sources=sources, token_limit=token_limit)
