"""Units as tasks of a Ray cluster: the third executor.

    driver    tasks  ->  at most two a core in flight  ->  answers: done | failed | the worker died
                                  ^                                        |
                                  +------------- up to 3 tries ------------+--> failures, in the end
    a node    briefing (once a process) + task -> unit -> receipt on the shared output -> answer

JSON goes in and out. An answer is a hint; the receipts are the truth, so a worker, a node or
a driver that is lost costs the units in flight, and nothing has to be told to whoever goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from tokenmill import errors, records
from tokenmill.build import state
from tokenmill.build.check import check
from tokenmill.build.crew import Message
from tokenmill.build.executor import MAX_TRIES, Checked, Failure, Listener, Request, judge
from tokenmill.build.inline import EngineHolder
from tokenmill.build.task import Task, Work
from tokenmill.build.unit import run_unit
from tokenmill.build.versions import check_versions, own_version
from tokenmill.cores import positive_from_environment, resolve_workers
from tokenmill.errors import BuildError, RecipeError
from tokenmill.storage import Folder
from tokenmill.storage.places import from_record, to_record
from tokenmill.tokenizer.engine import open_engine
from tokenmill.tokenizer.spec import TokenizerSpec, from_dataset

try:
    import ray as ray  # noqa: PLC0414 - ray_nodes takes it from here
except ImportError:
    raise RecipeError("Ray is not installed", hint="pip install 'tokenmill[ray]', on every node") from None

# Tasks in flight for each slot: one that runs, and one that waits so that no slot stands idle.
TASKS_A_SLOT = 2
# How long a cluster may take to answer at all. Ray itself would try for ten minutes.
ANSWER_SECONDS = 5.0
# How often the size of the cluster is looked at: nodes come and go.
LOOK_SECONDS = 5.0
# Tasks and answers are small; a local Ray needs no more room for them.
STORE_BYTES = 100_000_000
ADDRESS = "RAY_ADDRESS"
# Where `ray start` notes the cluster of a machine.
NOTED = "ray/ray_current_cluster"


class Ray:
    """Units as tasks of a cluster; `workers` limits how many run at once, and is the size of a local Ray."""

    def __init__(
        self, folder: Folder, work: Work, spec: TokenizerSpec, *, address: str | None, workers: int | None
    ) -> None:
        wanted = workers if workers is not None else positive_from_environment("DATASET_NUM_PROC")
        self._ours = connect(address, wanted)
        self._wanted = wanted
        self._flying: dict[Any, Task] = {}
        self._submit = ray.remote(num_cpus=1, max_retries=0)(serve)
        briefing = {
            "path": sys.path,
            "output": to_record(folder),
            "work": dataclasses.asdict(work),
            "tokenizer": spec.describe(),
            "version": own_version(),
        }
        self._briefing = ray.put(json.dumps(briefing, sort_keys=True))

    @property
    def workers(self) -> int:
        return num_slots(self._wanted, num_cores())

    def check(self, request: Request) -> Checked:
        """Have one worker look at the sources first. One that dies is replaced a few times."""
        message = json.dumps(dataclasses.asdict(request))
        for _ in range(MAX_TRIES):
            answer = hear(partial(ray.get, self._submit.remote(self._briefing, message)))
            if answer["kind"] == "checked":
                return records.convert(Checked, answer["checked"], where="checked")
            if answer["kind"] == "failed":
                break
        raise errors.from_record(answer["error"])

    def run(self, tasks: Iterator[Task], listener: Listener) -> list[Failure]:
        tries: Counter[int] = Counter()
        again: list[Task] = []
        failures: list[Failure] = []
        exhausted = False
        limit, looked = 0, -LOOK_SECONDS
        while True:
            if time.monotonic() - looked >= LOOK_SECONDS:
                limit, looked = max_in_flight(self._wanted, num_cores()), time.monotonic()
            while len(self._flying) < limit and (again or not exhausted):
                task = again.pop() if again else next(tasks, None)
                if task is None:
                    exhausted = True
                    break
                self._flying[self._submit.remote(self._briefing, json.dumps(dataclasses.asdict(task)))] = task
            if not self._flying:
                return failures
            for ref in _answered(list(self._flying)):
                task, answer = self._flying.pop(ref), hear(partial(ray.get, ref))
                if answer["kind"] == "done":
                    listener({**answer["counts"], "kind": "progress"})
                    listener({"kind": "done", "unit": task.unit.index})
                else:
                    judge(task, errors.from_record(answer["error"]), tries, again, failures, listener)

    def stop(self) -> None:
        """Stop what is in flight, and leave the cluster; a Ray of our own ends with it."""
        flying, self._flying = self._flying, {}
        ours, self._ours = self._ours, False
        leave(flying, ours=ours)


def leave(running: Iterable[Any], *, ours: bool) -> None:
    """Stop tasks at once, wherever they run, by leaving the cluster if it was us who joined it: it ends what a driver
    has left behind, while Ray's cancel can bring down a driver whose task gives its answer in that moment."""
    if ours:
        ray.shutdown()
        return
    for task in running:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it is over already
            ray.cancel(task, force=True)


def num_slots(wanted: int | None, cores: int) -> int:
    """How many units run at once: as asked, three quarters of the cores for 0 or less, else all; never none."""
    if wanted is not None and wanted <= 0:
        wanted = cores * 3 // 4
    return max(1, cores if wanted is None else min(wanted, cores))


def max_in_flight(wanted: int | None, cores: int) -> int:
    """How many tasks a cluster is given at a time. It does not hold back itself: what it gets, it runs."""
    slots = num_slots(wanted, cores)
    return slots if slots < cores else slots * TASKS_A_SLOT


def num_cores() -> int:
    """How many tasks the cluster can run at once."""
    return int(ray.cluster_resources().get("CPU", 0))


def _answered(refs: list[Any]) -> list[Any]:
    """The tasks that have an answer, once there is one; none if that takes long."""
    if not ray.wait(refs, timeout=LOOK_SECONDS)[0]:
        return []
    ready: list[Any] = ray.wait(refs, num_returns=len(refs), timeout=0)[0]
    return ready


def connect(address: str | None, workers: int | None) -> bool:
    """Join a cluster, or start a Ray of our own where none is found. False in a program that has joined one already."""
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", joined):
            raise RecipeError(f"this program has joined the Ray cluster at {joined}", hint=f"leave {address} out")
        return False
    found = find_cluster(address)
    options: dict[str, Any] = {"address": found}
    if found is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no traffic but to what the user named
        options = {"num_cpus": resolve_workers(workers), "include_dashboard": False, "object_store_memory": STORE_BYTES}
        options["_node_ip_address"] = "127.0.0.1"
    with _own_signals():
        try:
            ray.init(**options, log_to_driver=False, logging_level="error")
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise BuildError(f"Ray does not start: {error}", hint="look at its logs in /tmp/ray") from None
    return True


def find_cluster(address: str | None) -> str | None:
    """HOST:PORT of the cluster to join: the one asked for, or of the environment, or of this machine; None if none."""
    given = address or os.environ.get(ADDRESS) or None
    found = _cluster_here() if given in (None, "auto") else given
    if found is None:
        if given is None:
            return None
        raise RecipeError(
            "no Ray cluster is found from here", hint="start one with `ray start --head`, or give HOST:PORT"
        )
    host, _, port = found.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise RecipeError(
            f"{found!r} is no address of a Ray cluster",
            hint="give auto or HOST:PORT, and run the command on a node of the cluster",
        )
    if host in ("localhost", "127.0.0.1", "::1"):  # Ray looks for it at this machine's own address
        host, found = ray.util.get_node_ip_address(), f"{ray.util.get_node_ip_address()}:{port}"
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        if given is None:
            return None  # what was here has ended
        raise RecipeError(
            f"no Ray cluster answers at {found}: {error}", hint="is it up? `ray status --address` tells"
        ) from None
    return found


def _cluster_here() -> str | None:
    """The cluster that `ray start` on this machine has noted."""
    try:
        with open(os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), NOTED), encoding="ascii") as file:  # noqa: S108 - Ray's own place
            return file.read(300).strip() or None
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """What a signal means is the command's business, not Ray's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def hear(get: Callable[[], str]) -> Message:
    """The answer of a task, which `get` gives; that its worker died is one too."""
    try:
        answer: Message = json.loads(get())
        return answer
    except ray.exceptions.RayTaskError as error:  # it never came to our code, which lets nothing through
        hint = f"install tokenmill {own_version()} on every node"
        cause = str(error.cause).strip().splitlines()
        message = f"a node cannot run tokenmill: {cause[-1] if cause else error.cause!r}"
        # An error of the whole build: a node that fails at once would take every unit there is.
        return {"kind": "failed", "error": errors.to_record(RecipeError(message, hint=hint))}
    except ray.exceptions.RayError as error:
        message = f"a worker was lost: {type(error).__name__}"
        return {"kind": "died", "error": errors.to_record(BuildError(message, hint="is there enough memory?"))}


def serve(briefing: str, message: str) -> str:
    """In a process of the cluster: do a unit, or look at some before the work. Whatever it dies of is an answer."""
    try:
        answer = _do(_open_bench(briefing), json.loads(message))
    except Exception as error:  # the driver judges it
        answer = {"kind": "failed", "error": errors.to_record(error)}
    return json.dumps(answer)


@dataclasses.dataclass(frozen=True, slots=True)
class _Bench:
    """What a process of the cluster keeps between tasks."""

    folder: Folder
    work: Work
    spec: TokenizerSpec
    engine: EngineHolder


@functools.lru_cache(maxsize=1)
def _open_bench(briefing: str) -> _Bench:
    """Get ready for the tasks of a build, once in a process."""
    told = json.loads(briefing)
    sys.path += [path for path in told["path"] if path not in sys.path]
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    work = records.convert(Work, told["work"], where="work")
    folder = from_record(told["output"])
    if not folder.exists(state.PLAN):
        raise RecipeError(
            f"{folder.path} is not there on {platform.node()}",
            hint="the nodes of a cluster write to one output: give a folder that they share, or a URL",
        )
    folder.make()
    if work.scratch:
        Folder(work.scratch).make()
    name = told["tokenizer"]["file"]
    spec = from_dataset(told["tokenizer"], folder.read(name) if name else None)
    check_versions(told["version"], told["tokenizer"], spec)
    return _Bench(folder, work, spec, EngineHolder(spec, open_engine(spec)))


def _do(bench: _Bench, message: Message) -> Message:
    if "visits" in message:
        request = records.convert(Request, message, where="request")
        checked = check(request, bench.work, bench.spec, bench.engine())
        return {"kind": "checked", "checked": dataclasses.asdict(checked)}
    task = records.convert(Task, message, where="task")
    counts = Counter(documents=0, tokens=0, bytes=0)

    def report(documents: int, tokens: int, text_bytes: int) -> None:
        counts.update(documents=documents, tokens=tokens, bytes=text_bytes)

    run_unit(bench.folder, bench.work, task, bench.engine, report)
    return {"kind": "done", "counts": counts}
