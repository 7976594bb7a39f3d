"""What every peer found: a line each while they run, one table in the end. Needs nothing but Python.

python interop/results.py FILE               the table; exit code 1 if anything differs
python interop/results.py FILE PEER WHY      note that a peer could not be tried

The scripts add their lines to the file that INTEROP_RESULTS names.
"""

# ruff: noqa: T201 - a script prints

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

HEAD = ("peer", "version", "direction", "bits", "documents", "tokens", "result")
READS, WRITES, IMPORTED = "they read ours", "they write the same", "we read theirs"
DIFFERENT = "DIFFERENT: "


def found(  # noqa: PLR0917  a cell of the table each
    peer: str, version: str, direction: str, bits: int, documents: int, tokens: int, result: str
) -> None:
    """Tell of something that was found equal."""
    _add((peer, version, direction, f"{bits}", f"{documents:,}", f"{tokens:,}", result))


def stop(message: str) -> NoReturn:
    """End with a difference found."""
    _add(("", "", "", "", "", "", f"{DIFFERENT}{message}"))
    raise SystemExit(1)


def table(rows: list[list[str]]) -> str:
    """The lines, in columns."""
    lines = [list(HEAD), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in range(3, 6) else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _add(row: tuple[str, ...]) -> None:
    print(", ".join(filter(None, row)), flush=True)
    if path := os.environ.get("INTEROP_RESULTS"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def main(path: str, peer: str = "", why: str = "") -> None:
    if peer:
        os.environ["INTEROP_RESULTS"] = path
        _add((peer, "", "", "", "", "", f"not tried: {why}"))
        return
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    print(f"\n{table(rows)}")
    raise SystemExit(any(row[-1].startswith(DIFFERENT) for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
