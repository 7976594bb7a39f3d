"""What an experiment found: one row of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A kind of fault, how many times it was tried, and every result that was wrong.

    A wrong result is told in a sentence with all that it takes to see it again.
    """

    fault: str
    tried: int
    wrong: tuple[str, ...] = ()
    hangs: int = 0
    seconds: float = 0.0


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, which is readable as it stands."""
    lines = ["| kind of fault | points tried | wrong results | hangs | seconds |", "|---|---:|---:|---:|---:|"]
    lines += [f"| {row.fault} | {row.tried:,} | {len(row.wrong)} | {row.hangs} | {row.seconds:.0f} |" for row in rows]
    return "\n".join(lines)
