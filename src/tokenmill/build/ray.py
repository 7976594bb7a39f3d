"""Units on the benches of a Ray cluster: the third executor.

    driver    tasks  ->  a bench with room  ->  done | failed | the bench was lost
                              ^                                 |
                              +---------- up to 3 tries --------+--> failures, in the end
    a node    a bench for every core: briefing once, then call after call

An answer is a hint; the receipts are the truth, so a bench, a node or a driver that is lost costs
the units in flight, and nothing has to be told to whoever goes on.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tokenmill import records
from tokenmill.build.crew import Message
from tokenmill.build.executor import MAX_TRIES, Failure, Listener, judge
from tokenmill.build.foreman import WORKER_ENVIRONMENT
from tokenmill.build.look import Look
from tokenmill.build.ray_bench import CALLS, Bench
from tokenmill.build.ray_cluster import (
    LOOK_SECONDS,
    answered,
    connect,
    error_of,
    hear,
    hear_from,
    leave,
    num_cores,
    num_slots,
    ray,
)
from tokenmill.build.task import Task, Work
from tokenmill.build.versions import own_version
from tokenmill.build.visits import Request
from tokenmill.cores import positive_from_environment
from tokenmill.storage import Folder
from tokenmill.storage.places import to_record
from tokenmill.tokenizer.parity import Trial
from tokenmill.tokenizer.spec import TokenizerSpec

# Benches that wait for a slot: they replace lost ones at once, and an autoscaler sees that there is more to do.
SPARE_BENCHES = 16


@dataclass(frozen=True, slots=True)
class _Call:
    """What a bench was asked for, and how much of its room that takes. To open it is no task."""

    bench: Any
    task: Task | None
    room: int


class Ray:
    """Units on the benches of a cluster; `workers` limits how many there are, and is the size of a local Ray."""

    def __init__(
        self, folder: Folder, work: Work, spec: TokenizerSpec, *, address: str | None, workers: int | None
    ) -> None:
        wanted = workers if workers is not None else positive_from_environment("DATASET_NUM_PROC")
        self._ours = connect(address, wanted)
        self._wanted = wanted
        options = {"num_cpus": 1, "max_concurrency": CALLS, "runtime_env": {"env_vars": WORKER_ENVIRONMENT}}
        self._new_bench = ray.remote(**options)(Bench)
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

    def look(self, request: Request) -> Look:
        return records.convert(Look, self._ask({"request": asdict(request)}), where="look")

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

    def run(self, tasks: Iterator[Task], listener: Listener) -> list[Failure]:
        tries: Counter[int] = Counter()
        again: list[Task] = []
        failures: list[Failure] = []
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

    def _give(self, bench: Any, task: Task, *, room: int) -> None:
        self._room[bench] -= room
        self._calls[bench.do.remote(json.dumps(asdict(task)))] = _Call(bench, task, room)

    def _hear(self) -> Iterator[tuple[Task | None, Message]]:
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
            self._limit, self._looked = num_benches(self._wanted, num_cores()), time.monotonic()
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


def num_benches(wanted: int | None, cores: int) -> int:
    """How many benches a cluster is asked for. It does not hold back itself: those that have a slot get units."""
    slots = num_slots(wanted, cores)
    return slots if slots < cores else slots + min(slots, SPARE_BENCHES)
