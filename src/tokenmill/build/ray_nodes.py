"""The driver of node-local placement: every node of a Ray cluster builds its part on its own disk.

    plan -> ask the disks -> deal -> [ node: a whole build of its part ] x nodes -> nodes.json, on every node
                                        messages -> progress of the whole

The plan is made once, here, so that all parts are of the same sources. A node does the rest alone, its commit too,
so the driver has next to nothing to do, whatever the size of the whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenmill import errors, records
from tokenmill.arguments import Event, Watcher
from tokenmill.build import parts as build_parts
from tokenmill.build import parts as part
from tokenmill.build import workspace
from tokenmill.build.deal import deal_units
from tokenmill.build.plan import Plan
from tokenmill.build.resolve import ResolvedBuild, resolve_build
from tokenmill.dataset import manifest as dataset_manifest
from tokenmill.dataset import manifest as manifests
from tokenmill.dataset.manifest import Manifest, NodePart, Nodes, PartLocation
from tokenmill.errors import BuildError, Interrupted, RecipeError, TokenmillError
from tokenmill.executors.base import MAX_TRIES
from tokenmill.executors.forkserver import Message
from tokenmill.executors.host_cluster import HostCluster
from tokenmill.executors.ray_cluster import (
    LOOK_SECONDS,
    ask_head,
    connect,
    error_of,
    leave,
    num_slots,
    ray,
    receive_answer,
    wait_for_answer,
)
from tokenmill.recipe import Recipe
from tokenmill.storage.base import local_folder
from tokenmill.storage.output import Digest

# Fields of the nodes' reports that are added up.
_SUMS = ("bytes", "units", "documents", "tokens", "workers", "bytes_per_second", "tokens_per_second")


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is up. `host` and `path` are its own names for them."""

    id: str
    slots: int
    host: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class NodeJob:
    """A part, and the node that builds it."""

    node: Node
    plan: Plan


def build_on_nodes(
    recipe: Recipe,
    output: str,
    *,
    address: str | None,
    workers: int | None,
    restart: bool,
    patience: float | None,
    watch: Watcher | None,
    hosts: HostCluster | None = None,
) -> tuple[Manifest, bool, Nodes]:
    """Build a dataset in parts: their totals, whether all were complete already, and where they are.

    `patience` is how long a node waits for another build there, which may be one that is about to end.
    """
    _check_recipe(recipe)
    here = local_folder(part.expand(output))
    workspace.check_ours(here)
    setup = resolve_build(recipe, output=here.path)
    tell: Watcher = watch or (lambda event: None)
    for note in setup.notes:
        tell({"kind": "note", "message": note})
    if hosts is not None:
        hosts.start()
        address = hosts.address
    ours = connect(address, workers, hosts.environment if hosts is not None else None)
    running: dict[Any, int] = {}
    try:
        setup, jobs = _assign_parts(setup, output, tell, restart=restart)

        def submit(job: NodeJob) -> Any:
            slots = num_slots(workers, job.node.slots)
            request = {"output": job.node.path, "workers": slots, "patience": patience}
            return _submit(job, slots, {**part.to_message(setup, job.plan), **request})

        ends = _run(jobs, submit, running, _AllNodes(setup.plan, tell))
        parts = [
            manifests.unseal_manifest(end["manifest"].encode(), where=job.node.host)
            for job, end in zip(jobs, ends, strict=True)
        ]
        record = Nodes(
            format=dataset_manifest.NODES_FORMAT,
            fingerprint=setup.plan.fingerprint,
            parts=tuple(map(_place, jobs, parts, ends, _units_of_parts(setup.plan, jobs))),
        )
        sealed = records.seal(record)
        requests = [(job.node, {"output": job.node.path, "nodes": sealed.decode()}) for job in jobs]
        for job, (_, answer) in zip(jobs, _call_all(part.keep_nodes, requests), strict=True):
            if answer["kind"] == "died":
                raise _lost(f"{job.node.host} was lost before {dataset_manifest.NODES} was written there")
    finally:
        _leave(running, ours=ours)
    part.write_nodes(here, sealed)
    return build_parts.combined_totals(setup.plan, parts), all(end["already_complete"] for end in ends), record


def _check_recipe(recipe: Recipe) -> None:
    """Refuse settings that need all documents in one place."""
    if recipe.max_tokens is not None:
        raise RecipeError("`max_tokens` counts through all parts, which nodes build alone", hint="use `sample`")
    if recipe.split == "nanogpt":
        raise RecipeError("`split='nanogpt'` is drawn from all documents", hint="use `split='val=0.0005'`")


def _assign_parts(
    setup: ResolvedBuild, output: str, tell: Watcher, *, restart: bool
) -> tuple[ResolvedBuild, list[NodeJob]]:
    """The parts, each with the node that has it or will build it, and the resolved build that they are parts of."""
    request = {**part.handshake(setup.spec), "output": output, "restart": restart}
    found: dict[Node, Message] = {}
    for node, answer in _call_all(part.find_part, [(node, request) for node in _alive_nodes()]):
        if answer["kind"] == "died":  # Ray takes some seconds to notice that a node is gone
            tell({"kind": "note", "message": f"a node does not answer and is left out: {answer['error']['message']}"})
        else:
            found[replace(node, host=answer["host"], path=answer["path"])] = answer
    if not found:
        raise BuildError("no node of the cluster answers", hint="`ray status` shows its nodes")
    nodes = sorted(found, key=lambda node: (node.host, node.path))
    for one, other in itertools.pairwise(nodes):
        if (one.host, one.path) == (other.host, other.path):
            raise RecipeError(
                f"two nodes on {one.host} would both write to {one.path}",
                hint="put a variable into OUT that each node has set to a place of its own, like '$LOCAL/owt'",
            )
    held = [(dataset_manifest.part_of(found[node]), found[node]["finished"]) for node in nodes]
    setup = match_node_parts(setup, [held_part for held_part, _ in held])
    owners = build_parts.assign(held, setup.plan.fingerprint, len(setup.plan.units))
    in_runs = build_parts.dealt_in_runs((held_part for held_part, _ in held), setup.plan.fingerprint)
    parts = build_parts.deal(setup.plan, len(owners), in_runs=in_runs)
    for note in build_parts.splits_in_few_parts(setup.plan, parts):
        tell({"kind": "note", "message": note})
    return setup, [NodeJob(nodes[owner], plan) for owner, plan in zip(owners, parts, strict=True)]


def match_node_parts(setup: ResolvedBuild, held: Iterable[NodePart | None]) -> ResolvedBuild:
    """The build that the nodes hold parts of: version 0.1 put any number of small files into a unit."""
    wholes = {held_part.whole for held_part in held if held_part is not None}
    if setup.formerly is None or not wholes or setup.plan.fingerprint in wholes:
        return setup
    before = setup.formerly()
    return before if before.plan.fingerprint in wholes else setup


def _alive_nodes() -> list[Node]:
    """Nodes that are up and have slots."""
    up = [Node(node["NodeID"], int(node["Resources"].get("CPU", 0))) for node in ask_head(ray.nodes) if node["Alive"]]
    found = [node for node in up if node.slots]
    if not found:
        raise BuildError("no node of the cluster has a slot", hint="`ray status` shows its nodes")
    return found


def _call_all(function: Callable[[str], str], calls: Iterable[tuple[Node, Message]]) -> list[tuple[Node, Message]]:
    """Ask all nodes at the same time, without taking a slot of theirs. A refusal is raised."""
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    asked = [(node, task.options(scheduling_strategy=_only(node)).remote(json.dumps(one))) for node, one in calls]
    answers = [(node, wait_for_answer(ref)) for node, ref in asked]
    for _, answer in answers:
        if answer["kind"] == "failed":
            raise error_of(answer)
    return answers


def _submit(job: NodeJob, slots: int, request: Message) -> Any:
    """Begin to build a part. Returns the source of its messages."""
    options = {"num_cpus": slots, "max_retries": 0, "num_returns": "streaming"}
    return ray.remote(**options, scheduling_strategy=_only(job.node))(part.build_part).remote(json.dumps(request))


def _only(node: Node) -> Any:
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)


def _next(generator: Any) -> str:
    said: str = ray.get(next(generator))
    return said


def _run(
    jobs: Sequence[NodeJob], submit: Callable[[NodeJob], Any], running: dict[Any, int], whole: _AllNodes
) -> list[Message]:
    """Build all parts concurrently; the last message of each. If one fails, the others still run to their end.
    What `running` holds at the end is still running."""
    running.update((submit(job), number) for number, job in enumerate(jobs))
    tries: Counter[int] = Counter(running.values())
    ends: dict[int, Message] = {}
    failures: list[tuple[NodeJob, TokenmillError]] = []
    looked = time.monotonic()
    try:
        while running:
            if time.monotonic() - looked >= LOOK_SECONDS:
                ask_head(ray.nodes)
                looked = time.monotonic()
            for generator in ray.wait(list(running), timeout=LOOK_SECONDS)[0]:
                number, reply = running[generator], receive_answer(partial(_next, generator))
                if reply["kind"] == "event":
                    whole.update(jobs[number].node, reply["event"])
                    continue
                del running[generator]
                if reply["kind"] == "complete":
                    ends[number] = reply
                    whole.complete(jobs[number])
                elif reply["kind"] == "died" and not _is_up(jobs[number].node):
                    failures.append((jobs[number], _lost("the node was lost")))
                elif reply["kind"] == "died" and tries[number] < MAX_TRIES:
                    whole.update(
                        jobs[number].node,
                        {"kind": "note", "message": f"{reply['error']['message']}; its part is resumed"},
                    )
                    running[submit(jobs[number])] = number
                    tries[number] += 1
                else:
                    failures.append((jobs[number], errors.from_record(reply["error"])))
    except KeyboardInterrupt:
        raise Interrupted("what the nodes have done is saved", hint="run the same command to resume") from None
    _raise_failures(failures, len(jobs))
    return [ends[number] for number in range(len(jobs))]


def _leave(running: Iterable[Any], *, ours: bool) -> None:
    """Stop tasks at once, wherever they run, by leaving the cluster if this program joined it. The cluster then ends
    the tasks, whereas Ray's cancel can crash a driver whose task finishes at that moment."""
    if ours:
        leave()
        return
    for task in running:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has ended already
            ray.cancel(task, force=True)


def _is_up(node: Node) -> bool:
    return any(found["NodeID"] == node.id and found["Alive"] for found in ask_head(ray.nodes))


def _lost(message: str) -> BuildError:
    hint = "start it again with the disk that it had, then run the same command: what it has done is kept"
    return BuildError(message, hint=hint)


def _raise_failures(failures: Sequence[tuple[NodeJob, TokenmillError]], num_parts: int) -> None:
    if not failures:
        return
    lines = [f"{job.node.host}:{job.node.path}: {error.message}" for job, error in failures[:10]]
    first = failures[0][1]
    kind = type(first) if all(type(error) is type(first) for _, error in failures) else BuildError
    others = ", the others are done" if len(failures) < num_parts else ""
    raise kind(
        f"{len(failures)} of {num_parts} parts failed{others}:\n  " + "\n  ".join(lines),
        hint=first.hint or "run the same command to resume; what is done is kept",
    )


def _units_of_parts(plan: Plan, jobs: Sequence[NodeJob]) -> list[tuple[int, ...]]:
    """The units of each part, by their numbers in the whole plan; empty for parts that version 0.1 dealt."""
    held = [dataset_manifest.part_of(job.plan.identity) for job in jobs]
    if build_parts.dealt_in_runs(held, plan.fingerprint):
        return [() for _ in jobs]
    return [tuple(units) for units in deal_units(plan, len(jobs))]


def _place(job: NodeJob, manifest: Manifest, end: Message, units: tuple[int, ...]) -> PartLocation:
    data = end["manifest"].encode()
    digest = Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    return dataset_manifest.describe_nodes(manifest, digest, host=job.node.host, path=job.node.path, units=units)


class _AllNodes:
    """The progress of all nodes as one: the last report of each, added up."""

    def __init__(self, plan: Plan, tell: Watcher) -> None:
        self._tell = tell
        self._last: dict[Node, Event] = {}
        self._total = {"total_bytes": plan.text_bytes(), "total_units": len(plan.units)}
        tell({"kind": "start", "bytes": 0, **self._total})

    def update(self, node: Node, event: Event) -> None:
        if event["kind"] == "progress":
            self._last[node] = event
            self._report()
        else:
            self._tell({**event, "node": node.host})

    def complete(self, job: NodeJob) -> None:
        """Count a part as complete, with no work left and no worker on it."""
        before = self._last.get(job.node, dict.fromkeys(_SUMS, 0))
        done = {"bytes": job.plan.text_bytes(), "units": len(job.plan.units), "seconds_left": 0}
        self._last[job.node] = {**before, **done, "workers": 0, "bytes_per_second": 0, "tokens_per_second": 0}
        self._report()

    def _report(self) -> None:
        last = self._last.values()
        left = [one["seconds_left"] for one in last]
        sums = {name: sum(one[name] for one in last) for name in _SUMS}
        self._tell({"kind": "progress", **sums, **self._total, "seconds_left": None if None in left else max(left)})
