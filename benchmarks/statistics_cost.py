"""What the statistics of a dataset cost: CPU seconds of prepare with and without them, in turns in the same process.

python benchmarks/statistics_cost.py FILES... [--repeats 9] [--tokenizer gpt2] [--split val=0.01] [--text-column NAME]

The time inside of the counting itself is printed as well: on a machine that does other work, it is the steadier figure.

Without: a unit counts nothing, its receipt has no statistics, and so the commit writes none. The first run of each is
not counted; it fills the caches of the tokenizer, so the work that is left is the least that a build can have.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import tokenmill
from tokenmill.build import commit
from tokenmill.units.run import UnitRun

BAR = 1.02
spent: list[float] = []


def timed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, whose CPU seconds are added to `spent`."""

    def run(*given: Any, **named: Any) -> Any:
        begin = time.thread_time()
        result = call(*given, **named)
        spent.append(time.thread_time() - begin)
        return result

    return run


_COUNT, _STATISTICS = timed(UnitRun._count), timed(UnitRun._statistics)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def prepare(options: argparse.Namespace, *, counted: bool) -> float:
    """The CPU seconds of one build."""
    UnitRun._count = _COUNT if counted else lambda *_: None  # type: ignore[method-assign]  # the cost is in question
    UnitRun._statistics = _STATISTICS if counted else lambda _: None  # type: ignore[method-assign]  # see above
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "out")
        begin = cpu_seconds()
        tokenmill.prepare(
            options.files,
            output,
            tokenizer=options.tokenizer,
            split=options.split,
            text_column=options.text_column,
            workers=1,
        )
        seconds = cpu_seconds() - begin
        if os.path.exists(os.path.join(output, "statistics.json")) != counted:
            raise SystemExit("the build with statistics and the one without are not what they should be")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--split", default="val=0.01")
    parser.add_argument("--text-column")
    options = parser.parse_args()
    commit._commit_statistics = timed(commit._commit_statistics)
    found: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(options.repeats + 1):
        for counted in (True, False) if repeat % 2 else (False, True):
            seconds = prepare(options, counted=counted)
            if repeat:
                found[counted].append(seconds)
            else:
                spent.clear()
    with_them, without = median(found[True]), median(found[False])
    least = min(found[True]) / min(found[False])
    share = sum(spent) / sum(found[True])
    print(f"inside  {sum(spent) / options.repeats:.4f} CPU s, {share:.2%} of the build")
    print(f"with    {with_them:.3f} CPU s (least {min(found[True]):.3f})")
    print(f"without {without:.3f} CPU s (least {min(found[False]):.3f})")
    ratio = with_them / without
    print(f"ratio   {ratio:.3f} of medians, {least:.3f} of the least; bar {BAR}: {'pass' if ratio <= BAR else 'FAIL'}")


if __name__ == "__main__":
    main()
