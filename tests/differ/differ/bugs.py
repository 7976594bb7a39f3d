"""The lab tests itself: each mend is taken out in turn, and a comparison has to notice."""

from __future__ import annotations

import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from differ.seeding import Bug, is_caught
from lab_runner import Row

MODULES = ("tokenizers", "derived", "arguments", "hostile", "interrupts", "bounds")


def all_bugs() -> list[Bug]:
    return [bug for module in MODULES for bug in importlib.import_module(f"differ.{module}").BUGS]


def seeded_bugs() -> Row:
    """Each bug alone, and its trial without it; a bug that no comparison notices is what is wrong.

    Each has a process of its own: a library that found no descriptor left may not work again.
    """
    tried = len(all_bugs())
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as alone:
        wrong = [sentence for found in alone.map(_judge, range(tried)) for sentence in found]
    return Row(fault="seeded bugs caught", tried=tried, wrong=tuple(wrong))


def _judge(number: int) -> list[str]:
    bug = all_bugs()[number]
    missed = [] if is_caught(bug) else [f"nothing notices: {bug.name}"]
    return missed + [f"without {bug.name}: {sentence}" for sentence in bug.trial().wrong]


EXPERIMENTS = [("seeded bugs", seeded_bugs)]
