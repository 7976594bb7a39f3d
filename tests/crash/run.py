"""The long form of the crash lab: every experiment, one table.

python tests/crash/run.py [--only NAME ...] [--list]

Exit code 1 if anything came out wrong; what did is printed below the table, with all that it
takes to see it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lab.report import Row, table

MODULES = (
    *("powercut", "kills", "faults", "native", "disks", "races", "seeded"),
    *("damage", "fuzz", "guided", "inputs", "bombs", "specials", "leaks", "network", "rays", "transfers"),
)


sys.path.append(str(Path(__file__).parents[1]))  # the server and the proxy of the other tests


def experiments() -> Iterator[tuple[str, Callable[[], Row]]]:
    for module in MODULES:
        yield from importlib.import_module(f"lab.{module}").EXPERIMENTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these experiments alone")
    parser.add_argument("--list", action="store_true", help="name the experiments and end")
    arguments = parser.parse_args()
    found = dict(experiments())
    if arguments.list:
        print("\n".join(found))
        return
    begin = time.monotonic()
    rows = [_run(name, found[name]) for name in arguments.only or found]
    print(f"\n{table(rows)}\n\n{time.monotonic() - begin:.0f} s in all")
    for row in rows:
        for sentence in row.wrong[:20]:
            print(f"\nWRONG {row.fault}: {sentence}")
    sys.exit(any(row.wrong or row.hangs for row in rows))


def _run(name: str, experiment: Callable[[], Row]) -> Row:
    begin = time.monotonic()
    row = dataclasses.replace(experiment(), seconds=time.monotonic() - begin)
    print(f"{name}: {row.tried:,} tried, {len(row.wrong)} wrong, {row.hangs} hangs, {row.seconds:.0f} s", flush=True)
    return row


if __name__ == "__main__":
    main()
