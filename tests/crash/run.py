"""The long form of the crash lab: every experiment, one table, and what was aimed at.

python tests/crash/run.py [--only NAME ...] [--lanes N] [--list]

Experiments run side by side, each in a process of its own. There are two lanes more than there are cores, since some of
them wait most of the time. Exit code 1 if anything came out wrong or fell short of its target; what came out wrong
is printed below the table, with all that it takes to see it again.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the runner, and the server and the proxy of the other tests

from lab_runner import run_lab

# Those that take longest begin first, so that no lane is left with one of them in the end.
MODULES = (
    *("powercut", "rays", "network", "bombs", "faults", "fuzz", "guided", "native", "kills"),
    *("transfers", "damage", "inputs", "races", "seeded", "leaks", "disks", "specials"),
)
TARGETS = {
    "real kills": (1_000, ("kills, ", "ray")),
    "modelled states": (100_000, ("modelled kills", "modelled power cuts", "modelled crashes in a row")),
    "seeded bugs": (12, ("seeded bugs",)),
    "damages": (10_000, ("damage-",)),
    "fuzzed inputs": (1_000_000, ("fuzz-", "inputs", "hostile")),
}

if __name__ == "__main__":
    run_lab(__doc__.partition("\n")[0], [f"lab.{module}" for module in MODULES], TARGETS)
