"""The long form of the lab of differences: every comparison, one table, and what was aimed at.

python tests/differ/run.py [--only NAME ...] [--lanes N] [--list]

Exit code 1 if anything differed or fell short of its target; what differed is printed below the table, with all that
it takes to see it again.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the runner, and what other tests share

from lab_runner import run_lab

MODULES = ("tokenizers", "derived", "arguments", "hostile", "interrupts", "bounds", "bugs")
TARGETS = {
    "seeded bugs": (24, ("seeded bugs",)),
    "hostile datasets": (5_000, ("hostile",)),
    "interrupts": (300, ("interrupts",)),
}

if __name__ == "__main__":
    run_lab(__doc__.partition("\n")[0], [f"differ.{module}" for module in MODULES], TARGETS, first_column="comparison")
