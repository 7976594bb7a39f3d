"""The long form of the crash lab: every experiment, one table, and what was aimed at.

python tests/crash/run.py [--only NAME ...] [--lanes N] [--list]

Experiments run side by side, each in a process of its own. There are two lanes more than there are cores, since some of
them wait most of the time. Exit code 1 if anything came out wrong or fell short of its target; what came out wrong
is printed below the table, with all that it takes to see it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from lab.report import Row, table

# Those that take longest begin first, so that no lane is left with one of them in the end.
MODULES = (
    *("powercut", "rays", "network", "bombs", "faults", "fuzz", "guided", "native", "kills"),
    *("transfers", "damage", "inputs", "races", "seeded", "leaks", "disks", "specials"),
)
# Of what there must be how many, and which experiments count for it, by how their names begin.
TARGETS = {
    "real kills": (1_000, ("kills, ", "ray")),
    "modelled states": (100_000, ("modelled kills", "modelled power cuts", "modelled crashes in a row")),
    "seeded bugs": (12, ("seeded bugs",)),
    "damages": (10_000, ("damage-",)),
    "fuzzed inputs": (1_000_000, ("fuzz-", "inputs", "hostile")),
}


sys.path.append(str(Path(__file__).parents[1]))  # the server and the proxy of the other tests


def experiments() -> dict[str, Callable[[], Row]]:
    return {
        name: experiment
        for module in MODULES
        for name, experiment in importlib.import_module(f"lab.{module}").EXPERIMENTS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these experiments alone; `--list` names them")
    parser.add_argument("--lanes", type=int, default=(os.cpu_count() or 1) + 2, help="how many run side by side")
    parser.add_argument("--list", action="store_true", help="name the experiments and end")
    arguments = parser.parse_args()
    known = list(experiments())
    names = arguments.only or known
    if unknown := set(names) - set(known):
        parser.error(f"no experiment is called {', '.join(sorted(unknown))}; --list names those that there are")
    if arguments.lanes < 1:
        parser.error(f"--lanes must be at least 1, not {arguments.lanes}")
    if arguments.list:
        print("\n".join(names))
        return
    begin = time.monotonic()
    rows = run_all(names, arguments.lanes)
    print(f"\n{table(list(rows.values()))}\n\n{time.monotonic() - begin:.0f} s in all, {arguments.lanes} side by side")
    reached = {
        target: sum(rows[name].tried for name in rows if name.startswith(TARGETS[target][1])) for target in TARGETS
    }
    print("; ".join(f"{target}: {reached[target]:,} of {wanted:,}" for target, (wanted, _) in TARGETS.items()))
    for row in rows.values():
        for sentence in row.wrong[:20]:
            print(f"\nWRONG {row.fault}: {sentence}")
    is_short = not arguments.only and any(reached[target] < wanted for target, (wanted, _) in TARGETS.items())
    sys.exit(is_short or any(row.wrong or row.hangs for row in rows.values()))


def run_all(names: list[str], lanes: int) -> dict[str, Row]:
    """Run these experiments, so many side by side."""
    with ProcessPoolExecutor(lanes, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        return dict(zip(names, pool.map(_run, names), strict=True))


def _run(name: str) -> Row:
    begin = time.monotonic()
    row = dataclasses.replace(experiments()[name](), seconds=time.monotonic() - begin)
    # What this process and its children took of the cores: the row's own time, whatever runs beside it.
    busy = sum(os.times()[:4])
    found = f"{row.tried:,} tried, {len(row.wrong)} wrong, {row.hangs} hangs"
    print(f"{name}: {found}, {row.seconds:.0f} s, {busy:.0f} s of a core", flush=True)
    return row


if __name__ == "__main__":
    main()
