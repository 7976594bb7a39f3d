"""The Ray executor: units run on actors of a Ray cluster.

    driver    tasks  ->  an actor with a free call  ->  done | failed | the actor was lost
                                 ^                                  |
                                 +---------- up to 3 tries ---------+--> failures, at the end
    node      an actor for every core: configured once, then one unit after the other

A reply is a hint and the receipts on the shared output are the truth, so losing an actor, a node or the driver costs
the units in flight, and the next run needs no other information to resume.

An actor runs two calls at a time, so that it computes a unit while it publishes the one before:

    one call      unit 7 computes | unit 7 publishes |                  unit 12 computes | ...
    the other                     | unit 9 computes  | unit 9 publishes                  | ...

JSON goes in and out.
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
from tokenmill.executors.base import MAX_TRIES, Listener, UnitFailure, retry_or_fail
from tokenmill.executors.forkserver import WORKER_ENVIRONMENT, Message
from tokenmill.executors.host_cluster import HostCluster
from tokenmill.executors.ray_cluster import (
    LOOK_SECONDS,
    answered,
    check_versions,
    connect,
    error_of,
    leave,
    num_cores,
    num_slots,
    own_version,
    ray,
    receive_answer,
    wait_for_answer,
)
from tokenmill.executors.worker import answer_to
from tokenmill.resources import positive_from_environment, start_arrow
from tokenmill.storage.base import Storage, from_record
from tokenmill.storage.local import Folder
from tokenmill.tokenizers.engine import EngineHolder, open_engine
from tokenmill.tokenizers.parity import Trial
from tokenmill.tokenizers.spec import TokenizerSpec, from_dataset
from tokenmill.units import receipts
from tokenmill.units.probe import ProbeResult
from tokenmill.units.run import begin_unit
from tokenmill.units.task import BuildConfig, ProbeRequest, UnitTask

# Actors that wait for a slot: they replace lost ones at once, and an autoscaler sees that there is more to do.
SPARE_ACTORS = 16


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an actor, and how many of its free calls it takes. `task` is None while the actor opens."""

    actor: Any
    task: UnitTask | None
    free_calls: int


class RayExecutor:
    """Units on the actors of a cluster; `workers` limits how many there are, and is the size of a local Ray.

    The cluster of `hosts`, if they are given, is started first; who made it stops it.
    """

    def __init__(
        self,
        folder: Storage,
        config: BuildConfig,
        spec: TokenizerSpec,
        *,
        address: str | None,
        workers: int | None,
        hosts: HostCluster | None = None,
    ) -> None:
        wanted = workers if workers is not None else positive_from_environment("DATASET_NUM_PROC")
        if hosts is not None:
            hosts.start()
            address = hosts.address
        self._ours = connect(address, wanted, hosts.environment if hosts is not None else None)
        self._wanted = wanted
        options = {"num_cpus": 1, "max_concurrency": CALLS, "runtime_env": {"env_vars": WORKER_ENVIRONMENT}}
        self._new_actor = ray.remote(**options)(UnitActor)
        self._free_calls: dict[Any, int] = {}  # of every actor
        self._hosts: dict[Any, str] = {}  # of every actor that has opened
        self._calls: dict[Any, _Call] = {}  # by the reference of their result
        self._failed_starts = 0
        self._limit, self._looked = 0, -LOOK_SECONDS
        configuration = {
            "path": sys.path,
            "output": folder.to_record(),
            "work": asdict(config),
            "tokenizer": spec.describe(),
            "version": own_version(),
        }
        self._configuration = ray.put(json.dumps(configuration, sort_keys=True))

    @property
    def workers(self) -> int:
        return num_slots(self._wanted, num_cores())

    def probe(self, request: ProbeRequest) -> ProbeResult:
        return records.convert(ProbeResult, self._ask({"request": asdict(request)}), where="probe")

    def encode(self, texts: Sequence[str]) -> Trial:
        return records.convert(Trial, self._ask({"texts": texts}), where="trial")

    def _ask(self, question: Message) -> Message:
        """The answer of one actor. If the actor is lost, another one is asked, a few times."""
        for _ in range(MAX_TRIES):
            while (actor := self._least_busy()) is None:
                for _, answer in self._receive_answers():
                    self._check_opened(answer)
            answer = wait_for_answer(actor.do.remote(json.dumps(question)))
            if answer["kind"] == "answer":
                return dict(answer["answer"])
            if answer["kind"] == "failed":
                break
            self._on_actor_death(actor, answer)
        raise error_of(answer)

    def run(self, tasks: Iterator[UnitTask], listener: Listener) -> list[UnitFailure]:
        tries: Counter[int] = Counter()
        again: list[UnitTask] = []
        failures: list[UnitFailure] = []
        exhausted = False
        while True:
            while (again or not exhausted) and (actor := self._least_busy()) is not None:
                task = again.pop() if again else next(tasks, None)
                if task is None:
                    exhausted = True
                    break
                # A unit that kills its actor takes the other call down with it, so a second try runs alone.
                self._submit(actor, task, free_calls=CALLS if tries[task.unit.index] else 1)
            if exhausted and not again and not any(call.task for call in self._calls.values()):
                return failures
            for task, answer in self._receive_answers():
                if task is None:
                    self._check_opened(answer)
                elif answer["kind"] == "done":
                    about = {"unit": task.unit.index, "host": answer["host"]}
                    listener({"kind": "progress", **about, **answer["counts"]})
                    listener({"kind": "done", "unit": task.unit.index})
                else:
                    retry_or_fail(task, error_of(answer), tries, again, failures, listener)

    def release(self) -> None:
        """Give the cluster its slots back before the commit."""
        self.stop()

    def stop(self) -> None:
        """Stop what is in flight and leave the cluster. A temporary local Ray ends with it."""
        ours, self._ours = self._ours, False
        self._calls.clear()
        if ours:
            leave()
            self._free_calls.clear()
        for actor in list(self._free_calls):
            self._kill_actor(actor)

    def _least_busy(self) -> Any:
        """The actor with the most free calls; None if there is no free call."""
        actor = max(self._free_calls, key=self._free_calls.__getitem__, default=None)
        return actor if actor is not None and self._free_calls[actor] > 0 else None

    def _submit(self, actor: Any, task: UnitTask, *, free_calls: int) -> None:
        self._free_calls[actor] -= free_calls
        self._calls[actor.do.remote(json.dumps(asdict(task)))] = _Call(actor, task, free_calls)

    def _receive_answers(self) -> Iterator[tuple[UnitTask | None, Message]]:
        """Wait for answers and give them with their tasks. Starts actors where some are missing."""
        self._start_actors()
        for ref in answered(list(self._calls)):
            call, answer = self._calls.pop(ref), receive_answer(partial(ray.get, ref))
            if answer["kind"] == "died":
                self._on_actor_death(call.actor, answer)
            elif call.actor in self._free_calls:
                self._free_calls[call.actor] += call.free_calls
                self._hosts.setdefault(call.actor, answer.get("host", ""))  # its first answer: it has opened
                answer["host"] = self._hosts[call.actor]
            yield call.task, answer

    def _start_actors(self) -> None:
        """Start as many actors as the cluster has slots now, and some spare ones."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._limit, self._looked = num_actors(self._wanted, num_cores()), time.monotonic()
        for _ in range(self._limit - len(self._free_calls)):
            actor = self._new_actor.remote()
            self._free_calls[actor] = 0
            self._calls[actor.open.remote(self._configuration)] = _Call(actor, None, CALLS)

    def _on_actor_death(self, actor: Any, answer: Message) -> None:
        """Note that an actor died, and on which host."""
        answer["host"] = self._hosts.get(actor, "")
        self._kill_actor(actor)

    def _kill_actor(self, actor: Any) -> None:
        """Remove an actor that is lost or no longer needed."""
        self._free_calls.pop(actor, None)
        ray.kill(actor)

    def _check_opened(self, answer: Message) -> None:
        """Raise if an actor could not open, and others would not either."""
        self._failed_starts = self._failed_starts + 1 if answer["kind"] == "died" else 0
        if answer["kind"] == "failed" or self._failed_starts > MAX_TRIES * self.workers:
            raise error_of(answer)


def num_actors(wanted: int | None, cores: int) -> int:
    """How many actors to start. The cluster itself decides which of them have a slot, and only those get units."""
    slots = num_slots(wanted, cores)
    return slots if slots < cores else slots + min(slots, SPARE_ACTORS)


# Calls of an actor at a time: one computes, one waits for the disk.
CALLS = 2


class UnitActor:
    """The actor itself. An error of a call is part of its answer."""

    _computing: threading.Lock
    _folder: Storage
    _config: BuildConfig
    _spec: TokenizerSpec
    _engine: EngineHolder

    def open(self, configuration: str) -> str:
        """Get ready for the units of a build."""
        return _answer(lambda: self._open(json.loads(configuration)))

    def do(self, message: str) -> str:
        """Do a unit, or answer what is asked before the config."""
        request = json.loads(message)
        return _answer(lambda: self._run_task(request) if "unit" in request else self._answer_question(request))

    def _open(self, request: Message) -> Message:
        start_arrow()
        sys.path += [path for path in request["path"] if path not in sys.path]
        self._computing = threading.Lock()
        self._config = records.convert(BuildConfig, request["work"], where="work")
        self._folder = from_record(request["output"])
        if not self._folder.exists(receipts.PLAN):
            raise RecipeError(
                f"{self._folder.path} is not there on {platform.node()}",
                hint="the nodes of a cluster write to one output: give a folder that they share, or a URL",
            )
        self._folder.make()
        if self._config.scratch:
            Folder(self._config.scratch).make()
        name = request["tokenizer"]["file"]
        self._spec = from_dataset(request["tokenizer"], self._folder.read(name) if name else None)
        check_versions(request["version"], request["tokenizer"], self._spec)
        self._engine = EngineHolder(self._spec, open_engine(self._spec))
        return {"kind": "free", "host": platform.node()}

    def _answer_question(self, question: Message) -> Message:
        with self._computing:
            return {"kind": "answer", "answer": answer_to(question, self._config, self._engine())}

    def _run_task(self, request: Message) -> Message:
        task = records.convert(UnitTask, request, where="task")
        counts = Counter(documents=0, tokens=0, bytes=0, kept=0)

        def report(documents: int, tokens: int, planned_bytes: int, *, kept: bool = False) -> None:
            counts.update(documents=documents, tokens=tokens, bytes=planned_bytes, kept=int(kept))

        with self._computing:
            finish = begin_unit(self._folder, self._config, task, self._engine, report)
        finish()
        return {"kind": "done", "counts": counts}


def _answer(part: Callable[[], dict[str, Any]]) -> str:
    try:
        answer = part()
    except BaseException as error:  # the driver decides
        if not errors.is_failure(error):
            raise
        answer = {"kind": "failed", "error": errors.to_record(error), "host": platform.node()}
    return json.dumps(answer)
