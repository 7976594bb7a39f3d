"""Units on the benches of a Ray cluster: the third executor.

    driver    tasks  ->  a bench with room  ->  done | failed | the bench was lost
                              ^                                 |
                              +---------- up to 3 tries --------+--> failures, in the end
    a node    a bench for every core: briefing once, then call after call

An answer is a hint; the receipts are the truth, so a bench, a node or a driver that is lost costs
the units in flight, and nothing has to be told to whoever goes on.

A bench: a slot of a Ray cluster, with all that a unit needs. It has two calls at a time:

    one call      unit 7 computes | unit 7 publishes |                  unit 12 computes | ...
    the other                     | unit 9 computes  | unit 9 publishes                  | ...

JSON goes in and out. What it says is a hint; the receipts on the shared output are the truth.
"""

from __future__ import annotations

import json
import platform
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tokenmill import errors, records
from tokenmill.errors import RecipeError
from tokenmill.executors.base import MAX_TRIES, Listener, UnitFailure, judge
from tokenmill.executors.forkserver import WORKER_ENVIRONMENT, Message
from tokenmill.executors.ray_cluster import (
    LOOK_SECONDS,
    answered,
    check_versions,
    connect,
    error_of,
    hear,
    hear_from,
    leave,
    num_cores,
    num_slots,
    own_version,
    ray,
)
from tokenmill.executors.worker import answer_to
from tokenmill.resources import positive_from_environment, start_arrow
from tokenmill.storage.base import from_record, to_record
from tokenmill.storage.local import Folder
from tokenmill.tokenizers.engine import EngineHolder, open_engine
from tokenmill.tokenizers.parity import Trial
from tokenmill.tokenizers.spec import TokenizerSpec, from_dataset
from tokenmill.units import receipts
from tokenmill.units.probe import ProbeResult
from tokenmill.units.run import begin_unit
from tokenmill.units.task import BuildConfig, ProbeRequest, UnitTask

# Benches that wait for a slot: they replace lost ones at once, and an autoscaler sees that there is more to do.
SPARE_ACTORS = 16


@dataclass(frozen=True, slots=True)
class _Call:
    """What a bench was asked for, and how much of its room that takes. To open it is no task."""

    bench: Any
    task: UnitTask | None
    room: int


class RayExecutor:
    """Units on the benches of a cluster; `workers` limits how many there are, and is the size of a local Ray."""

    def __init__(
        self, folder: Folder, work: BuildConfig, spec: TokenizerSpec, *, address: str | None, workers: int | None
    ) -> None:
        wanted = workers if workers is not None else positive_from_environment("DATASET_NUM_PROC")
        self._ours = connect(address, wanted)
        self._wanted = wanted
        options = {"num_cpus": 1, "max_concurrency": CALLS, "runtime_env": {"env_vars": WORKER_ENVIRONMENT}}
        self._new_bench = ray.remote(**options)(UnitActor)
        self._room: dict[Any, int] = {}  # of every bench
        self._hosts: dict[Any, str] = {}  # of every bench that ever opened
        self._calls: dict[Any, _Call] = {}  # by what the answer comes from
        self._failed_starts = 0
        self._limit, self._looked = 0, -LOOK_SECONDS
        briefing = {
            "path": sys.path,
            "output": to_record(folder),
            "work": asdict(work),
            "tokenizer": spec.describe(),
            "version": own_version(),
        }
        self._briefing = ray.put(json.dumps(briefing, sort_keys=True))

    @property
    def workers(self) -> int:
        return num_slots(self._wanted, num_cores())

    def look(self, request: ProbeRequest) -> ProbeResult:
        return records.convert(ProbeResult, self._ask({"request": asdict(request)}), where="look")

    def encode(self, texts: Sequence[str]) -> Trial:
        return records.convert(Trial, self._ask({"texts": texts}), where="trial")

    def _ask(self, question: Message) -> Message:
        """The answer of one bench. One that is lost is replaced a few times."""
        for _ in range(MAX_TRIES):
            while (bench := self._roomiest()) is None:
                for _, answer in self._hear():
                    self._welcome(answer)
            answer = hear_from(bench.do.remote(json.dumps(question)))
            if answer["kind"] == "answer":
                return dict(answer["answer"])
            if answer["kind"] == "failed":
                break
            self._lose(bench, answer)
        raise error_of(answer)

    def run(self, tasks: Iterator[UnitTask], listener: Listener) -> list[UnitFailure]:
        tries: Counter[int] = Counter()
        again: list[UnitTask] = []
        failures: list[UnitFailure] = []
        exhausted = False
        while True:
            while (again or not exhausted) and (bench := self._roomiest()) is not None:
                task = again.pop() if again else next(tasks, None)
                if task is None:
                    exhausted = True
                    break
                # What shares a bench with a unit that kills it is lost as well. So a second try gets no new company.
                self._give(bench, task, room=CALLS if tries[task.unit.index] else 1)
            if exhausted and not again and not any(call.task for call in self._calls.values()):
                return failures
            for task, answer in self._hear():
                if task is None:
                    self._welcome(answer)
                elif answer["kind"] == "done":
                    listener({"kind": "progress", "unit": task.unit.index, **answer["counts"]})
                    listener({"kind": "done", "unit": task.unit.index})
                else:
                    judge(task, error_of(answer), tries, again, failures, listener)

    def dismiss(self) -> None:
        """The cluster gets its slots back before the commit."""
        self.stop()

    def stop(self) -> None:
        """Stop what is in flight, and leave the cluster; a Ray of our own ends with it."""
        ours, self._ours = self._ours, False
        self._calls.clear()
        if ours:
            leave()
            self._room.clear()
        for bench in list(self._room):
            self._dismiss(bench)

    def _roomiest(self) -> Any:
        """The bench with the most room; None if none has any."""
        bench = max(self._room, key=self._room.__getitem__, default=None)
        return bench if bench is not None and self._room[bench] > 0 else None

    def _give(self, bench: Any, task: UnitTask, *, room: int) -> None:
        self._room[bench] -= room
        self._calls[bench.do.remote(json.dumps(asdict(task)))] = _Call(bench, task, room)

    def _hear(self) -> Iterator[tuple[UnitTask | None, Message]]:
        """Answers, once there is one, with the tasks that they are of. Sees to it that there are benches."""
        self._hire()
        for ref in answered(list(self._calls)):
            call, answer = self._calls.pop(ref), hear(partial(ray.get, ref))
            if answer["kind"] == "died":
                self._lose(call.bench, answer)
            elif call.bench in self._room:
                self._room[call.bench] += call.room
                self._hosts.setdefault(call.bench, answer.get("host", ""))  # the first answer is that it has opened
            yield call.task, answer

    def _hire(self) -> None:
        """As many benches as the cluster has slots now, and some to spare."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._limit, self._looked = num_actors(self._wanted, num_cores()), time.monotonic()
        for _ in range(self._limit - len(self._room)):
            bench = self._new_bench.remote()
            self._room[bench] = 0
            self._calls[bench.open.remote(self._briefing)] = _Call(bench, None, CALLS)

    def _lose(self, bench: Any, answer: Message) -> None:
        """A bench died, which it could not say itself; nor where."""
        answer["host"] = self._hosts.get(bench, "")
        self._dismiss(bench)

    def _dismiss(self, bench: Any) -> None:
        """It is lost already, or no longer wanted."""
        self._room.pop(bench, None)
        ray.kill(bench)

    def _welcome(self, answer: Message) -> None:
        """A bench is ready; or it is not, and others will not do better."""
        self._failed_starts = self._failed_starts + 1 if answer["kind"] == "died" else 0
        if answer["kind"] == "failed" or self._failed_starts > MAX_TRIES * self.workers:
            raise error_of(answer)


def num_actors(wanted: int | None, cores: int) -> int:
    """How many benches a cluster is asked for. It does not hold back itself: those that have a slot get units."""
    slots = num_slots(wanted, cores)
    return slots if slots < cores else slots + min(slots, SPARE_ACTORS)


# Calls that a bench has at a time: one that computes, and one that waits for the disk.
CALLS = 2


class UnitActor:
    """An actor. Whatever a call dies of is an answer."""

    _computing: threading.Lock
    _folder: Folder
    _work: BuildConfig
    _spec: TokenizerSpec
    _engine: EngineHolder

    def open(self, briefing: str) -> str:
        """Get ready for the units of a build."""
        return _answer(lambda: self._open(json.loads(briefing)))

    def do(self, message: str) -> str:
        """Do a unit, or answer what is asked before the work."""
        told = json.loads(message)
        return _answer(lambda: self._do(told) if "unit" in told else self._look(told))

    def _open(self, told: Message) -> Message:
        start_arrow()
        sys.path += [path for path in told["path"] if path not in sys.path]
        self._computing = threading.Lock()
        self._work = records.convert(BuildConfig, told["work"], where="work")
        self._folder = from_record(told["output"])
        if not self._folder.exists(receipts.PLAN):
            raise RecipeError(
                f"{self._folder.path} is not there on {platform.node()}",
                hint="the nodes of a cluster write to one output: give a folder that they share, or a URL",
            )
        self._folder.make()
        if self._work.scratch:
            Folder(self._work.scratch).make()
        name = told["tokenizer"]["file"]
        self._spec = from_dataset(told["tokenizer"], self._folder.read(name) if name else None)
        check_versions(told["version"], told["tokenizer"], self._spec)
        self._engine = EngineHolder(self._spec, open_engine(self._spec))
        return {"kind": "free", "host": platform.node()}

    def _look(self, question: Message) -> Message:
        with self._computing:
            return {"kind": "answer", "answer": answer_to(question, self._work, self._engine())}

    def _do(self, told: Message) -> Message:
        task = records.convert(UnitTask, told, where="task")
        counts = Counter(documents=0, tokens=0, bytes=0, kept=0)

        def report(documents: int, tokens: int, planned_bytes: int, *, kept: bool = False) -> None:
            counts.update(documents=documents, tokens=tokens, bytes=planned_bytes, kept=int(kept))

        with self._computing:
            finish = begin_unit(self._folder, self._work, task, self._engine, report)
        finish()
        return {"kind": "done", "counts": counts}


def _answer(part: Callable[[], dict[str, Any]]) -> str:
    try:
        answer = part()
    except BaseException as error:  # the driver judges it
        if not errors.is_failure(error):
            raise
        answer = {"kind": "failed", "error": errors.to_record(error), "host": platform.node()}
    return json.dumps(answer)
