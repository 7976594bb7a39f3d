"""Commands that are told to stop: they end in time, and the same command then gives what an undisturbed one does.

    a command of its own process, after a moment that chance says  <-  SIGINT, SIGTERM, SIGHUP; to it alone or, as by
                                                                        a terminal, to its workers too; once or twice
    130 within two seconds, a sentence, no process left            ->  once more: the bytes of an undisturbed run

The two seconds are those of a machine that does nothing else: what threads of the command were ready to run and had to
wait, because other programs had the cores, is taken off. The kernel counts it, and a command that sleeps, waits for a
lock or keeps a core busy does not gain by it.

A signal that comes before the command has begun to heed them ends it as any other program.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenmill
from differ.homes import LAYOUTS, Tree, environment, tree
from differ.seeding import Bug, Plant, replaced
from lab_runner import Row
from stores import bucket_server

SECONDS_TO_END = 2.0
# Whoever has not ended by then hangs.
PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.01
SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
_MAIN = "from tokenmill.cli.main import main; main()"
_SIZES = {
    "llmc": ["--shard-size", 200_000],
    "templar": ["--seq-len", 64, "--shard-size", 200_000],
    "mds": ["--shard-size", 200_000],
    "catid": ["--shard-size", 200_000],
    "litdata": ["--shard-size", 200_000],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class World:
    """A corpus, what is made of it, and a bucket if there is one."""

    root: Path
    bucket: Any = None

    @property
    def url(self) -> str:
        return str(self.bucket.url)

    def at(self, name: str) -> Path:
        return self.root / name


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A command on a place of its own: what is there before, and what it must leave."""

    name: str
    arguments: Callable[[World, Path], Sequence[object]]
    before: Callable[[World, Path], None] = lambda world, place: place.mkdir()
    result: Callable[[World, Path], Any] = lambda world, place: _whole(place)
    code: int = 0


def _whole(place: Path) -> Tree:
    """All files of a finished output; whatever was left behind has a place in it too. A report tells times."""
    found = {name: digest for name, digest in tree(place).items() if ".build" not in name.split("/")}
    found = {name: "" if name.endswith("report.html") else digest for name, digest in found.items()}
    for file in place.rglob("*"):
        if file.name.endswith((".tmp", ".part")) or file.name == "lock":
            found[f"left: {file.relative_to(place)}"] = ""
    return found


def _copy_of(name: str) -> Callable[[World, Path], None]:
    return lambda world, place: shutil.copytree(world.at(name), place)


def _to_repair(world: World, place: Path) -> None:
    shutil.copytree(world.at("dataset"), place)
    for name in ("train/00001.bin", "train/00003.idx", "provenance/00000.parquet"):
        (place / name).unlink()


def _to_consolidate(world: World, place: Path) -> None:
    place.mkdir()
    for shard in world.at("templar").glob("train_*.npy"):
        shutil.copy2(shard, place)


def _prepare(*more: object) -> Callable[[World, Path], Sequence[object]]:
    fixed = ("--tokenizer", "byte", "--split", "val=0.1", "--unit-bytes", "400KB", *more)
    return lambda world, place: ["prepare", world.at("corpus"), "-o", place / "out", *fixed]


JOBS = [
    Job(name="prepare -j 1", arguments=_prepare("-j", 1)),
    Job(name="prepare -j 2", arguments=_prepare("-j", 2)),
    Job(name="prepare --layout", arguments=_prepare("-j", 2, "--layout", "nanogpt")),
    Job(
        name="prepare --scratch",
        arguments=lambda world, place: [*_prepare("-j", 2)(world, place), "--scratch", place / "scratch"],
    ),
    Job(
        name="plan",
        arguments=lambda world, place: ["plan", world.at("corpus"), "-o", place / "out", "--tokenizer", "byte"],
    ),
    Job(name="verify", arguments=lambda world, place: ["verify", place], before=_copy_of("dataset")),
    Job(
        name="verify --source",
        arguments=lambda world, place: ["verify", place, "--source", "all"],
        before=_copy_of("dataset"),
    ),
    Job(name="repair", arguments=lambda world, place: ["repair", place, "-j", 2], before=_to_repair),
    *(
        Job(
            name=f"export to {layout}",
            arguments=lambda world, place, layout=layout: [
                "export", world.at("dataset"), place / "out", "--to", layout, *_SIZES.get(layout, ())
            ],
        )
        for layout in LAYOUTS
    ),
    Job(
        name="import",
        arguments=lambda world, place: [
            "import", world.at("megatron"), "-o", place / "out", "--from", "megatron", "--eot-id", 256
        ],
    ),
    Job(
        name="consolidate",
        arguments=lambda world, place: ["consolidate", "--data-root", place, "--seq-len", 64],
        before=_to_consolidate,
    ),
    Job(
        name="bench",
        arguments=lambda world, place: ["bench", world.at("dataset"), "--seconds", 1, "--seq-len", 64],
    ),
]  # fmt: skip
MOVES = [
    Job(
        name="push",
        arguments=lambda world, place: ["push", world.at("dataset"), f"{world.url}/{place.name}"],
        result=lambda world, place: world.bucket.tree(place.name),
    ),
    Job(name="pull", arguments=lambda world, place: ["pull", f"{world.url}/good", place / "out"]),
]


@contextlib.contextmanager
def make_world(num_bytes: int = 6_000_000) -> Iterator[World]:
    """A corpus of so much text, in a few files, a dataset of it and files of some layouts."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-interrupts-", ignore_cleanup_errors=True) as root:
        world = World(Path(root))
        world.at("corpus").mkdir()
        chance = random.Random(1)
        words = [f"word{number}" for number in range(500)]
        for number in range(4):
            lines = (" ".join(chance.choices(words, k=60)) for _ in range(num_bytes // 4 // 440))
            world.at(f"corpus/{number}.txt").write_text("".join(f"{line}\n" for line in lines))
        make = {"tokenizer": "byte", "split": {"val": 0.1}, "unit_bytes": "400KB", "workers": 1}
        tokenmill.prepare(world.at("corpus"), world.at("dataset"), **make)
        tokenmill.export(world.at("dataset"), world.at("megatron"), to="megatron")
        tokenmill.export(world.at("dataset"), world.at("templar"), to="templar", seq_len=64, shard_size=200_000)
        with environment(TOKENMILL_CACHE=f"{root}/cache"):
            yield world


@contextlib.contextmanager
def make_bucket_world() -> Iterator[World]:
    """The same with a bucket, in which the dataset is."""
    with make_world() as world, bucket_server("s3") as make_bucket:
        bucket = make_bucket(f"b-{uuid.uuid4().hex[:12]}")
        for file in world.at("dataset").rglob("*"):
            if file.is_file() and ".build" not in file.parts:
                bucket.put(f"good/{file.relative_to(world.at('dataset'))}", file.read_bytes())
        with environment(**bucket.environment):
            yield World(world.root, bucket)


def interrupt_one(world: World, job: Job, right: Any, seconds: float, chance: random.Random, limit: float) -> str:
    """Interrupt a command until it is through, up to three times, and look at what it leaves."""
    place = world.at(f"place-{uuid.uuid4().hex[:8]}")
    job.before(world, place)
    told = []
    try:
        for _ in range(chance.choice((1, 1, 2, 3))):
            moment = chance.uniform(0, seconds)
            how = (chance.choice(SIGNALS), chance.random() < 0.4, chance.random() < 0.3)
            told.append(f"{how[0].name}{' to all' if how[1] else ''}{' twice' if how[2] else ''} after {moment:.3f} s")
            what = _interrupt(job, job.arguments(world, place), moment, how, chance, limit)
            if what:
                return f"{job.name}, {', then '.join(told)}: {what}"
        again = subprocess.run(
            _command(job.arguments(world, place)), capture_output=True, text=True, timeout=120, check=False
        )
        if again.returncode != job.code:
            return f"{job.name}, {', then '.join(told)}: then it ends with {again.returncode}: {again.stderr[-500:]}"
        found = job.result(world, place)
        if found != right:
            names = sorted(name for name in found.keys() | right.keys() if found.get(name) != right.get(name))
            return f"{job.name}, {', then '.join(told)}: other bytes than undisturbed: {', '.join(names[:4])}"
        return ""
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _interrupt(
    job: Job,
    arguments: Sequence[object],
    moment: float,
    how: tuple[signal.Signals, bool, bool],
    chance: random.Random,
    limit: float,
) -> str:
    """What is wrong with how a command ends after a signal."""
    number, to_all, twice = how
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(_command(arguments), stdout=said, stderr=said, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moment)
            heeds = _heeds(process.pid)
            below = _below(process.pid)
            send = os.killpg if to_all else os.kill
            ending = Ending(process, below)
            with contextlib.suppress(ProcessLookupError):
                send(process.pid, number)
                if twice:
                    time.sleep(chance.choice((0, chance.uniform(0, 0.02), chance.uniform(0, 0.3))))
                    send(process.pid, number)
            code = ending.wait(PATIENCE_SECONDS)
            if code is None:
                return f"no end after {PATIENCE_SECONDS:.0f} s"
            said.seek(0)
            text = said.read().decode(errors="replace")
            if ending.seconds > limit:
                return f"it took {ending.told} to end"
            if left := [one for one in below if _is_alive(one, time.monotonic() + limit)]:
                return f"{len(left)} of its processes outlived it"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == job.code:  # it was through
        return "" if "Traceback" not in text else f"it said: {text[-500:]}"
    if not heeds and code in (-number, INTERRUPTED):
        return ""
    if code != INTERRUPTED:
        return f"it ended with {code}: {text[-500:]}"
    if "Traceback" in text or "Exception" in text or "Interrupted." not in text or "to resume" not in text:
        return f"it said: {text[-700:]}"
    return ""


class Ending:
    """How long a command takes to end, from now on, and how long its threads were kept from running meanwhile."""

    def __init__(self, process: subprocess.Popen[bytes], below: Sequence[int]) -> None:
        self._process = process
        self._family = (process.pid, *below)
        self._begin = time.monotonic()
        self._before = _run_delays(self._family)
        self._now = dict(self._before)
        self._took = 0.0

    def wait(self, patience: float) -> int | None:
        """Its exit code; None if it does not end."""
        while (code := self._process.poll()) is None and self._took < patience:
            self._now |= _run_delays(self._family)  # a thread that has ended cannot be asked any more
            time.sleep(_POLL_SECONDS)
            self._took = time.monotonic() - self._begin
        self._took = time.monotonic() - self._begin
        return code

    @property
    def kept_from_running(self) -> float:
        """Of the process that was kept from it for longest; its threads wait for each other, as for Python's lock."""
        delays: Counter[int] = Counter()
        for (process, thread), now in self._now.items():
            delays[process] += now - self._before.get((process, thread), 0)
        return max(delays.values(), default=0) / 1e9

    @property
    def seconds(self) -> float:
        """What it would have taken with a core of its own."""
        return self._took - self.kept_from_running

    @property
    def told(self) -> str:
        return f"{self._took:.2f} s, of which it was kept from running for {self.kept_from_running:.2f} s,"


def _run_delays(processes: Sequence[int]) -> dict[tuple[int, str], int]:
    """The nanoseconds for which each thread of some processes has been ready to run, but did not run."""
    found: dict[tuple[int, str], int] = {}
    for process in processes:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                with contextlib.suppress(OSError):
                    found[process, thread] = int(
                        Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[1]
                    )
    return found


def _command(arguments: Sequence[object]) -> list[str]:
    return [sys.executable, "-c", _MAIN, *map(str, arguments)]


def _heeds(process: int) -> bool:
    """Whether a command has begun to heed signals. Python itself heeds SIGINT alone."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
        return bool(caught >> (signal.SIGHUP - 1) & 1)
    return True


def _below(process: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(name))
    found = [process]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def _is_alive(process: int, deadline: float) -> bool:
    """Whether a process still runs at some time."""
    while True:
        try:
            state = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state in "ZX" or time.monotonic() > deadline:
            return state not in "ZX"
        time.sleep(0.02)


def interrupts(
    jobs: Sequence[Job], count: int, *, seed: int = 0, limit: float = SECONDS_TO_END, has_bucket: bool = False
) -> Row:
    """Each command, interrupted `count` times or more at moments drawn by the seed."""
    _heed_signals()
    chance = random.Random(seed)
    tried, hangs, wrong = 0, 0, []
    with make_bucket_world() if has_bucket else make_world() as world:
        for job in jobs:
            place = world.at("right")
            job.before(world, place)
            begin = time.monotonic()
            done = subprocess.run(_command(job.arguments(world, place)), capture_output=True, text=True, check=False)
            seconds = time.monotonic() - begin
            if done.returncode != job.code:
                wrong.append(f"{job.name}: undisturbed, it ends with {done.returncode}: {done.stderr[-500:]}")
                continue
            right = job.result(world, place)
            shutil.rmtree(place, ignore_errors=True)
            for _ in range(count):
                what = interrupt_one(world, job, right, seconds, chance, limit)
                tried += 1
                hangs += "no end after" in what
                wrong += [what] if what else []
    names = ", ".join(job.name for job in jobs) if len(jobs) < 4 else f"{len(jobs)} commands"
    return Row(fault=f"interrupted: {names}", tried=tried, wrong=tuple(wrong), hangs=hangs)


# Filters of a build with one worker: one that no interrupt ends, and one that is half loaded when it comes.
_FILTERS = {
    "deaf": """
import pathlib, time
def keep(text):
    while True:
        try:
            pathlib.Path("begun").touch()
            time.sleep(600)
        except KeyboardInterrupt:
            pass
""",
    "half": """
import pathlib, time
try:
    pathlib.Path("begun").touch()
    time.sleep(600)
except KeyboardInterrupt:
    raise AttributeError("it is half loaded")
""",
}


def swallowed(kinds: Sequence[str] = tuple(_FILTERS), *, limit: float = SECONDS_TO_END, patience: float = 30.0) -> Row:
    """An interrupt that code of others swallows, or makes another error of."""
    _heed_signals()
    tried, wrong = 0, []
    for kind in kinds:
        for number in (signal.SIGINT, signal.SIGTERM):
            tried += 1
            with tempfile.TemporaryDirectory(prefix="tokenmill-interrupts-") as place:
                what = _interrupt_in_filter(Path(place), kind, number, limit, patience)
            wrong += [f"{kind} filter, {number.name}: {what}"] if what else []
    return Row(fault="interrupts that code of others swallows", tried=tried, wrong=tuple(wrong))


def _heed_signals() -> None:
    """A lab that runs in the background, or under nohup, ignores signals, and so would the commands that it starts."""
    for number in set(SIGNALS):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _interrupt_in_filter(place: Path, kind: str, number: signal.Signals, limit: float, patience: float) -> str:
    (place / f"{kind}.py").write_text(_FILTERS[kind])
    (place / "a.txt").write_text("a line\n")
    fixed = ("prepare", "a.txt", "-o", "out", "--tokenizer", "byte", "-j", 1, "--filter", f"{kind}:keep")
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(_command(fixed), stdout=said, stderr=said, cwd=place)
        try:
            while process.poll() is None and not (place / "begun").exists():
                time.sleep(0.01)
            ending = Ending(process, ())
            process.send_signal(number)
            code = ending.wait(patience)
            if code is None:
                return f"no end after {patience:.0f} s"
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        text = said.read().decode(errors="replace")
    if ending.seconds > limit:
        return f"it took {ending.told} to end"
    return "" if code == INTERRUPTED and text.startswith("Interrupted.") else f"it ended with {code}: {text[-300:]}"


EXPERIMENTS: list[tuple[str, Callable[[], Row]]] = [
    *((f"interrupts {job.name}", functools.partial(interrupts, [job], 15)) for job in JOBS),
    *((f"interrupts {job.name}", functools.partial(interrupts, [job], 15, has_bucket=True)) for job in MOVES),
    ("interrupts swallowed", swallowed),
]


def _started_with(code: str) -> Plant:
    """Commands that run this before anything else."""
    return replaced(sys.modules[__name__], "_MAIN", f"{code}; {_MAIN}")


BUGS: list[Bug] = [
    Bug(
        name="an interrupt alone is relied on",
        plant=_started_with(
            "from tokenmill.cli import signals as stopping; stopping._end_in_time = lambda heard: None"
        ),
        trial=lambda: swallowed(("deaf",), patience=4.0),
        says="no end after 4 s",
    ),
    Bug(
        name="an error that an interrupt leads to is told as its own",
        plant=_started_with("from tokenmill.cli import commands as app; app.is_stopping = lambda: False"),
        trial=lambda: swallowed(("half",)),
        says="it ended with 2: error: --filter",
    ),
    Bug(
        name="a signal but SIGINT is not heeded",
        plant=_started_with(
            "import signal; from tokenmill.cli import signals as stopping; stopping.SIGNALS = (signal.SIGINT,)"
        ),
        trial=lambda: swallowed(("half",)),
        says="it ended with -15",
    ),
]
