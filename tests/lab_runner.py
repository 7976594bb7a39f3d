"""What the labs share: the row that an experiment gives, the table of all rows, and a command that runs them.

tests/crash/run.py, tests/differ/run.py  ->  run_lab(modules, targets)  ->  one process per experiment  ->  a table
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

# Of what there must be how many, and which experiments count towards it, by how their names begin.
Targets = Mapping[str, tuple[int, tuple[str, ...]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A kind of fault, how many times it was tried, and every result that was wrong.

    A wrong result is told in a sentence with all that it takes to see it again.
    """

    fault: str
    tried: int
    wrong: tuple[str, ...] = ()
    hangs: int = 0
    seconds: float = 0.0


def table(rows: Sequence[Row], first_column: str = "kind of fault") -> str:
    """The rows as a Markdown table, which is readable as it is."""
    lines = [f"| {first_column} | points tried | wrong results | hangs | seconds |", "|---|---:|---:|---:|---:|"]
    lines += [f"| {row.fault} | {row.tried:,} | {len(row.wrong)} | {row.hangs} | {row.seconds:.0f} |" for row in rows]
    return "\n".join(lines)


def run_lab(description: str, modules: Sequence[str], targets: Targets, *, first_column: str = "kind of fault") -> None:
    """Parse the command line, run the experiments, print the table; exit code 1 if anything was wrong or fell short."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these experiments alone; `--list` names them")
    parser.add_argument("--lanes", type=int, default=(os.cpu_count() or 1) + 2, help="how many run side by side")
    parser.add_argument("--list", action="store_true", help="name the experiments and end")
    arguments = parser.parse_args()
    known = [name for module in modules for name in experiments(module)]
    names = arguments.only or known
    if unknown := set(names) - set(known):
        parser.error(f"unknown experiments: {', '.join(sorted(unknown))}; --list names those that exist")
    if arguments.lanes < 1:
        parser.error(f"--lanes must be at least 1, not {arguments.lanes}")
    if arguments.list:
        print("\n".join(names))
        return
    begin = time.monotonic()
    rows = _run_all(modules, names, arguments.lanes)
    print(f"\n{table(list(rows.values()), first_column)}\n")
    print(f"{time.monotonic() - begin:.0f} s in all, {arguments.lanes} side by side")
    reached = {
        target: sum(rows[name].tried for name in rows if name.startswith(beginnings))
        for target, (_, beginnings) in targets.items()
    }
    print("; ".join(f"{target}: {reached[target]:,} of {wanted:,}" for target, (wanted, _) in targets.items()))
    for row in rows.values():
        for sentence in row.wrong[:20]:
            print(f"\nWRONG {row.fault}: {sentence}")
    is_short = not arguments.only and any(reached[target] < wanted for target, (wanted, _) in targets.items())
    sys.exit(is_short or any(row.wrong or row.hangs for row in rows.values()))


def experiments(module: str) -> dict[str, Callable[[], Row]]:
    return dict(importlib.import_module(module).EXPERIMENTS)


def _run_all(modules: Sequence[str], names: Sequence[str], lanes: int) -> dict[str, Row]:
    with ProcessPoolExecutor(lanes, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        return dict(zip(names, pool.map(_run, [modules] * len(names), names), strict=True))


def _run(modules: Sequence[str], name: str) -> Row:
    begin = time.monotonic()
    experiment = next(found[name] for module in modules if name in (found := experiments(module)))
    try:
        row = experiment()
    except Exception:  # the others go on, and the table tells
        row = Row(fault=name, tried=0, wrong=(f"it broke: {traceback.format_exc()[-2000:]}",))
    row = dataclasses.replace(row, seconds=time.monotonic() - begin)
    # The core time of this process and its children: the cost of the row itself, whatever runs beside it.
    busy = sum(os.times()[:4])
    counts = f"{row.tried:,} tried, {len(row.wrong)} wrong, {row.hangs} hangs"
    print(f"{name}: {counts}, {row.seconds:.0f} s, {busy:.0f} s of a core", flush=True)
    return row
