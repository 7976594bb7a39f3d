"""Errors that the kernel itself gives, injected by strace into a real command: no layer of ours is in between.

    sources   what Arrow reads in native code: open, read, pread
    output    write, fsync, link, chmod, unlink, mkdir, rename

A command must finish with the right bytes, or end with a sentence, a hint and a documented exit code; and the same
command without strace must go on to the right bytes.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lab.commands import FINISHED, Bench, make_bench, run
from lab_runner import Row

DOCUMENTS = 24
_NO_END = "it came to no end"


@dataclass(frozen=True, slots=True)
class Injection:
    """An error at the n-th call of a kind by each thread, once or from then on."""

    call: str
    error: str
    at: int
    for_ever: bool
    workers: int

    def __str__(self) -> str:
        span = "for ever" if self.for_ever else "once"
        return f"{self.error} {span} at {self.call} number {self.at}, {self.workers} workers"


# Calls that go to the sources, and those that go to the output: the errors that each may give, and how often a build
# with one worker makes it at the least.
_SOURCES: dict[str, tuple[tuple[str, ...], int]] = {
    "openat": (("EIO", "EACCES", "ESTALE", "EINTR", "EMFILE"), 13),
    "read": (("EIO", "ESTALE", "EINTR"), 22),
    "pread64": (("EIO", "ESTALE"), 6),
}
_OUTPUT: dict[str, tuple[tuple[str, ...], int]] = {
    "write": (("EIO", "ENOSPC", "EDQUOT", "EINTR", "ESTALE"), 220),
    "fsync": (("EIO", "ENOSPC", "EDQUOT", "EINTR", "ESTALE"), 70),
    "linkat": (("EIO", "ENOSPC", "EPERM", "ESTALE"), 50),  # where links are not permitted, files are renamed
    "fchmod": (("EIO", "ESTALE"), 40),
    "unlink": (("EIO", "ESTALE"), 55),
    "mkdir": (("EIO", "ENOSPC"), 7),
    "rename": (("EIO", "ESTALE"), 2),
}
# Workers also write to their parent, so that only other calls are sure to go to files.
_OF_WORKERS = ("fsync", "linkat", "fchmod", "unlink")


def why_not() -> str:
    """Why there can be no such experiment here; empty if there can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    with tempfile.NamedTemporaryFile() as log:
        done = subprocess.run(_traced("fsync", "error=EIO", log.name, ["true"]), capture_output=True, check=False)
    return "" if done.returncode == 0 else "this system does not let strace trace"


def native(scale: int, *, seed: int = 0) -> Row:
    """`scale` errors, each in an output of its own."""
    chance = random.Random(seed)
    plan = [_draw(chance, number) for number in range(scale)]
    with make_bench(DOCUMENTS) as bench:
        sentences = [_point(bench, injection, number) for number, injection in enumerate(plan)]
    return Row(
        fault="errors of the kernel in a command, by strace",
        tried=scale,
        wrong=tuple(sentence for sentence in sentences if sentence),
        hangs=sum(sentence is not None and sentence.endswith(_NO_END) for sentence in sentences),
    )


def _draw(chance: random.Random, number: int) -> Injection:
    """One call after the other, so that few points reach all of them; every fourth in a command with two workers."""
    if number % 4 == 3:
        call, workers = chance.choice(_OF_WORKERS), 2
        errors, count = _OUTPUT[call]
        count //= 8  # each process has its own share of the calls
    else:
        calls = {**_SOURCES, **_OUTPUT}
        call, workers = [*calls][(4 + number * 7) % len(calls)], 1
        errors, count = calls[call]
    error = chance.choice(errors)
    # A call that is interrupted is made again by Python, and would be for ever; and errors are written, too.
    for_ever = error != "EINTR" and call != "write" and chance.random() < 0.5
    return Injection(call, error, chance.randint(1, count), for_ever, workers)


def _point(bench: Bench, injection: Injection, number: int) -> str | None:
    output = str(bench.place / f"out-{number}")
    build = bench.prepare(output, "-j", injection.workers)
    sources = sorted(bench.world.sources.iterdir()) if injection.call in _SOURCES else []
    log = bench.place / f"trace-{number}"
    span = f"{injection.at}+" if injection.for_ever else f"{injection.at}"
    try:
        ended = run(_traced(injection.call, f"error={injection.error}:when={span}", log, build, sources))
        if "(INJECTED)" not in log.read_text(errors="replace"):
            return f"{injection}: was never met"
        if not ended.is_typed():
            return f"{injection}: ended with {ended.code}: {ended.errors}"
        if ended.code == FINISHED and (wrong := bench.wrong_with(output)):
            return f"{injection}: finished, and {wrong}"
        again = run(build)
    except subprocess.TimeoutExpired:
        return f"{injection}: {_NO_END}"
    if again.code != FINISHED:
        return f"{injection}: the command does not go on: {again.code}: {again.errors}"
    wrong = bench.wrong_with(output)
    shutil.rmtree(output)
    return wrong and f"{injection}: after going on, {wrong}"


def _traced(call: str, inject: str, log: str | Path, command: Sequence[str], paths: Sequence[Path] = ()) -> list[str]:
    only = [part for path in paths for part in ("-P", str(path))]
    traced = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(log), *only]
    return [*traced, "-e", f"trace={call}", "-e", f"inject={call}:{inject}", "--", *command]


EXPERIMENTS = [("errors, native", partial(native, 36, seed=1))]
