"""tokenmill as its users run it: a command of its own, with workers, that is killed, traced or left in peace."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.judge import quick_folder
from lab.world import World, make_world, tree

# A document of every world is rejected, which a finished command tells by its exit code.
FINISHED = 3
FAILED = 1
_MAIN = "from tokenmill.cli.main import main; main()"
# Python says how it was interrupted in the midst of something; our errors are a sentence and a hint.
_TRACEBACK = "Traceback (most recent call last)"
_RUN_SECONDS = 120
_POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A world, and where its commands put their outputs."""

    world: World
    place: Path

    def prepare(self, output: str, *options: object) -> list[str]:
        """The command that builds the world."""
        recipe = self.world.recipe
        fixed = ["--tokenizer", recipe["tokenizer"], "--unit-bytes", recipe["unit_bytes"], "--split", "val=0.2", "-q"]
        return command("prepare", self.world.sources, "-o", output, "--no-report", *fixed, *options)

    def wrong_with(self, output: str) -> str | None:
        """What is wrong with an output that must be finished; None if nothing."""
        found = tree(output)
        if found != self.world.right:
            names = sorted(n for n in found.keys() | self.world.right.keys() if found.get(n) != self.world.right.get(n))
            return f"wrong tree: {', '.join(names[:3])}"
        if left := [str(file) for file in Path(output).rglob("*.tmp")]:
            return f"temp files stay: {left[0]}"
        if os.path.exists(os.path.join(output, ".build/lock")):
            return "the lock stays"
        return None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    errors: str

    def is_typed(self) -> bool:
        """Whether it ended as documented: finished, or with a sentence and a hint."""
        return self.code == FINISHED or (self.code == FAILED and "\nhint: " in self.errors and not self.has_traceback())

    def has_traceback(self) -> bool:
        return _TRACEBACK in self.errors or "unexpected " in self.errors


@contextlib.contextmanager
def make_bench(documents: int) -> Iterator[Bench]:
    with quick_folder() as path:
        yield Bench(world=make_world(path, documents=documents), place=path)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", _MAIN, *map(str, arguments)]


def run(arguments: Sequence[str]) -> Ended:
    """Run a command to its end. `TimeoutExpired` if that does not come."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=_RUN_SECONDS, check=False)
    return Ended(done.returncode, done.stderr)


@contextlib.contextmanager
def started(arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs; at the end of the block it and its workers are gone."""
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        for worker in below(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    """Watch until something is so; False if the process ended before."""
    deadline = time.monotonic() + _RUN_SECONDS
    while not is_so():
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, _RUN_SECONDS)
        time.sleep(_POLL_SECONDS)
    return True


def num_receipts(output: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return sum(name.endswith(".json") for name in os.listdir(os.path.join(output, ".build/receipts")))
    return 0


def below(process: int) -> list[int]:
    """The processes that live of those that a process has started, and of those that they have."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    parents.setdefault(int(fields[1]), []).append(int(name))
    found = [process]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def is_alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    return False
