"""The lab tests itself: each mend is taken out in turn, and a comparison has to notice."""

from __future__ import annotations

import importlib

from differ.seeding import Bug, is_caught
from lab_runner import Row

MODULES = ("tokenizers", "derived", "arguments", "hostile", "interrupts", "bounds")


def all_bugs() -> list[Bug]:
    return [bug for module in MODULES for bug in importlib.import_module(f"differ.{module}").BUGS]


def seeded_bugs() -> Row:
    """Each bug alone, and its trial without it; a bug that no comparison notices is what is wrong."""
    bugs = all_bugs()
    wrong = [f"nothing notices: {bug.name}" for bug in bugs if not is_caught(bug)]
    wrong += [f"without {bug.name}: {sentence}" for bug in bugs for sentence in bug.trial().wrong]
    return Row(fault="seeded bugs caught", tried=len(bugs), wrong=tuple(wrong))


EXPERIMENTS = [("seeded bugs", seeded_bugs)]
