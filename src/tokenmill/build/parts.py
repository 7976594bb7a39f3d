"""Node-local placement: cuts a plan into parts, and builds a part on the disk of a node.

    find_part    which part the node's disk holds
    build_part   the whole build of a part
    keep_nodes   the record of which node has which part

A part is built like any dataset: by the process pool of its node, under a lock, with receipts. So if a node is lost,
its completed units are kept, and no other node is affected.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import os
import platform
import queue
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from tokenmill import errors, records
from tokenmill.build import workspace
from tokenmill.build.api import open_executor
from tokenmill.build.deal import deal_units
from tokenmill.build.pipeline import BuildOptions, run_build
from tokenmill.build.plan import Plan
from tokenmill.build.progress import LOG_SECONDS
from tokenmill.build.resolve import ResolvedBuild
from tokenmill.build.wait import wait_for
from tokenmill.dataset import manifest
from tokenmill.dataset.manifest import NODES_IDENTITY, SPREAD, Manifest, NodePart, SourceTotal, Split
from tokenmill.errors import BuildError, LockedError, OutputError, RecipeError
from tokenmill.executors.forkserver import Message
from tokenmill.executors.ray_cluster import check_versions, own_version
from tokenmill.recipe import make_recipe
from tokenmill.sizes import counted
from tokenmill.sources.discover import Listing
from tokenmill.storage.base import Storage, local_folder
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import locked
from tokenmill.tokenizers.spec import TokenizerSpec, from_dataset
from tokenmill.units import receipts


def deal(plan: Plan, count: int, *, in_runs: bool = False) -> list[Plan]:
    """Deal a plan to so many parts of about equal text, each with at least one unit and a fair sample of the corpus.

    `in_runs` deals runs of neighbours instead, as version 0.1 did. Pure, like the plan.
    """
    if in_runs:
        ends = itertools.pairwise(_run_ends([unit.text_bytes for unit in plan.units], count))
        dealt = [list(range(begin, end)) for begin, end in ends]
    else:
        dealt = deal_units(plan, count)
    return [_cut_out(plan, number, units, count, in_runs=in_runs) for number, units in enumerate(dealt)]


def _run_ends(weights: Sequence[int], count: int) -> Iterator[int]:
    """The first item of each run, and the end of the last. A run ends where its share of the weight is reached."""
    total, seen, index = sum(weights), 0, 0
    for number in range(count):
        yield index
        latest = len(weights) - (count - number - 1)  # each of the runs that follow needs an item as well
        begin = index
        while index < latest and (index == begin or (2 * seen + weights[index]) * count <= 2 * total * (number + 1)):
            seen += weights[index]
            index += 1
    yield len(weights)


def _cut_out(plan: Plan, number: int, numbers: Sequence[int], count: int, *, in_runs: bool) -> Plan:
    """The plan of a part: some units, in order, and the sources that they read."""
    units = [plan.units[index] for index in numbers]
    if in_runs:  # with the sources between them, as version 0.1 has them
        used = list(range(units[0].source, units[-1].source + units[-1].num_sources))
    else:
        used = sorted({source for unit in units for source in range(unit.source, unit.source + unit.num_sources)})
    places = {source: place for place, source in enumerate(used)}
    part = {"number": number, "into": count, "whole": plan.fingerprint}
    return replace(
        plan,
        identity={**plan.identity, NODES_IDENTITY: part if in_runs else {**part, "dealt": SPREAD}},
        sources=records.make_table(type(plan.sources[0]), (plan.sources[source] for source in used)),
        units=records.make_table(
            type(units[0]),
            (replace(unit, index=index, source=places[unit.source]) for index, unit in enumerate(units)),
        ),
    )


def dealt_in_runs(found: Iterable[NodePart | None], whole: str) -> bool:
    """Whether the nodes hold parts that version 0.1 dealt."""
    return any(part is not None and part.whole == whole and part.dealt != SPREAD for part in found)


def splits_in_few_parts(plan: Plan, parts: Sequence[Plan]) -> Iterator[str]:
    """A sentence for each split with too few units for all parts."""
    for split in dict.fromkeys(source.split for source in plan.sources):
        holding = sum(any(part.sources[unit.source].split == split for unit in part.units) for part in parts)
        if split and 0 < holding < len(parts):
            yield (
                f"only {holding} of {len(parts)} parts have documents of {split}, whose sources are "
                f"{counted(holding, 'unit')}: for more of them, start over with smaller `unit_bytes`"
            )


def assign(found: Sequence[tuple[NodePart | None, bool]], whole: str, num_units: int) -> list[int]:
    """The node of each part, as an index of `found`: the part on each node's disk, and whether it is finished.

    Nodes keep their parts; missing parts go to nodes without one. The first start decides the number of parts. Nodes
    that hold other data get a part last: the build there reports what differs.
    """
    ours = {node: part for node, (part, _) in enumerate(found) if part is not None and part.whole == whole}
    counts = sorted({part.into for part in ours.values()})
    if len(counts) > 1 or len({part.dealt for part in ours.values()}) > 1:
        what = f"parts of {' and of '.join(map(str, counts))}" if len(counts) > 1 else "parts of two ways of dealing"
        raise OutputError(
            f"the nodes hold {what}: they belong to two builds",
            hint="start all of them over with `restart=True`, or choose another output",
        )
    count = counts[0] if counts else min(len(found), num_units)
    owners: dict[int, int] = {}
    for node, part in sorted(ours.items(), key=lambda item: not found[item[0]][1]):  # finished parts first
        owners.setdefault(part.number, node)
    free = sorted(set(range(len(found))) - ours.keys(), key=lambda node: found[node][0] is not None)
    missing = [number for number in range(count) if number not in owners]
    if len(missing) > len(free):
        raise BuildError(
            f"parts {', '.join(map(str, missing))} of {count} are on none of the {len(found)} nodes that are up",
            hint="restart the missing nodes, or start as many others, then run the same command; or distribute all "
            "parts anew with `restart=True`",
        )
    owners.update(zip(missing, free, strict=False))
    return [owners[number] for number in range(count)]


def combined_totals(plan: Plan, parts: Sequence[Manifest]) -> Manifest:
    """The totals of the parts of a plan. Shards keep the names that they have on their nodes."""
    splits = {
        name: Split(
            tokens=sum(part.splits[name].tokens for part in parts),
            documents=sum(part.splits[name].documents for part in parts),
            shards=[shard for part in parts for shard in part.splits[name].shards],
        )
        for name in parts[0].splits
    }
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(part.dropped)
    return replace(
        parts[0],
        fingerprint=plan.fingerprint,
        identity=plan.identity,
        splits=splits,
        documents_read=sum(part.documents_read for part in parts),
        dropped=dict(sorted(dropped.items())),
        text_sum=_add(part.text_sum for part in parts),
        sources=_join_sources(plan, itertools.chain.from_iterable(part.sources for part in parts)),
        files={},
    )


def _join_sources(plan: Plan, found: Iterable[SourceTotal]) -> list[SourceTotal]:
    """The totals of each source of the plan. Several parts may have read some of it."""
    joined = {
        source.name: SourceTotal(name=source.name, bytes=source.bytes, documents=0, text_sum=_ZERO)
        for source in plan.sources
    }
    for source in found:
        before = joined[source.name]
        documents, text_sum = before.documents + source.documents, _add((before.text_sum, source.text_sum))
        joined[source.name] = replace(before, documents=documents, text_sum=text_sum)
    return list(joined.values())


_ZERO = "0" * 32


def _add(sums: Iterable[str]) -> str:
    """The sum of sums of document hashes, whose two halves of 64 bits are added separately."""
    high, low = (
        sum(halves) % (1 << 64) for halves in zip(*((int(s[:16], 16), int(s[16:], 16)) for s in sums), strict=True)
    )
    return f"{high:016x}{low:016x}"


# Events of a part that the driver does not need: it emits its own for the whole build.
_OF_THE_WHOLE = ("start", "commit", "finished")

_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)
_EVERYWHERE = (
    "OUT is expanded on every node and where the command runs, so it must be valid on all of them; "
    "a node has the variables with which Ray was started there"
)


def expand(output: str) -> str:
    """The path of OUT on this machine, with `~` and variables of its environment expanded."""
    here = platform.node()
    for name in (plain or braced for plain, braced in _VARIABLE.findall(output)):
        if not os.environ.get(name):  # an empty variable would give another path, such as a folder of the root
            raise RecipeError(f"the variable {name}, which {output} needs, is not set on {here}", hint=_EVERYWHERE)
    path = os.path.expanduser(os.path.expandvars(output))
    if "$" in path:
        raise RecipeError(f"{output} is {path} on {here}", hint="a $ begins the name of a variable: '$NAME/owt'")
    if path.startswith("~"):
        raise RecipeError(f"no user of {here} has the home that {output} begins with", hint=_EVERYWHERE)
    folder = local_folder(path)
    if not os.path.isabs(path):
        raise RecipeError(f"{output} is {path} on {here}", hint="give an absolute path")
    return folder.path


def find_part(message: str) -> str:
    """Which part this node holds, and where. With `restart`, an existing part is removed first."""
    return _answered(lambda: _find_part(json.loads(message)))


def _find_part(request: Message) -> Message:
    _take_over_environment(request)
    folder = local_folder(expand(request["output"]))
    workspace.check_ours(folder)
    if request["restart"] and folder.names():
        folder.make(".build")
        with locked(folder):
            workspace.start_over(folder)
    finished = folder.exists(manifest.MANIFEST)
    held = (
        manifest.load_manifest(folder)
        if finished
        else workspace.load_plan(folder)
        if folder.exists(receipts.PLAN)
        else None
    )
    return {
        "kind": "found",
        "host": platform.node(),
        "path": folder.path,
        "part": held and held.identity.get(manifest.NODES_IDENTITY),
        "finished": finished,
    }


def build_part(message: str) -> Iterator[str]:
    """Build a part. Yields messages; the last one is `complete`, with the manifest, or `failed`."""
    said: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def work() -> None:
        said.put(
            _attempt(lambda: _build(json.loads(message), lambda event: said.put({"kind": "event", "event": event})))
        )

    threading.Thread(target=work, daemon=True).start()
    while True:
        reply = said.get()
        yield json.dumps(reply)
        if reply["kind"] != "event":
            return


def _build(request: Message, say: Callable[[Message], None]) -> Message:
    setup = _from_message(request)
    folder = Folder(request["output"])

    def attempt(on_lock: Callable[[], None]) -> bool:
        start_executor = partial(open_executor, request["workers"], None)
        return run_build(
            setup, folder, BuildOptions(start_executor=start_executor, watch=_throttled(say), on_lock=on_lock)
        )[1]

    def tell(text: str) -> None:
        say({"kind": "waiting", "message": text})

    try:
        stood = wait_for(folder, attempt, timeout=request["patience"], tell=tell)
    except LockedError as error:
        hint = (
            "each node needs a folder of its own: if they share this disk, choose another one; else wait for the build"
        )
        raise LockedError(error.message, hint=hint) from None
    return {"kind": "complete", "manifest": folder.read(manifest.MANIFEST).decode(), "already_complete": stood}


def keep_nodes(message: str) -> str:
    """Write the record of all nodes beside the part."""
    return _answered(lambda: _keep_nodes(json.loads(message)))


def _keep_nodes(request: Message) -> Message:
    write_nodes(Folder(request["output"]), request["nodes"].encode())
    return {"kind": "kept"}


def write_nodes(folder: Storage, record: bytes) -> None:
    """Write the record of all nodes into a folder, unless it exists."""
    folder.make()
    if not folder.exists(manifest.NODES) or folder.read(manifest.NODES) != record:
        folder.replace(manifest.NODES, record)


def to_message(setup: ResolvedBuild, plan: Plan) -> Message:
    """A resolved build with the plan of one part, as plain data for the node that will build it."""
    return {
        **handshake(setup.spec),
        "recipe": dataclasses.asdict(setup.recipe),
        "root": setup.listing.root,
        "plan": records.seal(plan).decode(),
    }


def handshake(spec: TokenizerSpec) -> Message:
    """The first message of a driver to every node."""
    return {
        "path": sys.path,
        "version": own_version(),
        "tokenizer": spec.describe(),
        "content": base64.b64encode(spec.content if spec.file_name else b"").decode(),
    }


def _from_message(request: Message) -> ResolvedBuild:
    spec = _take_over_environment(request)
    plan = records.unseal(Plan, request["plan"].encode(), where="plan")
    listing = Listing(root=request["root"], sources=plan.sources, extents=())
    return ResolvedBuild(make_recipe(request["recipe"]), listing, spec, plan, ())


def _take_over_environment(request: Message) -> TokenizerSpec:
    """Adopt the module path of the driver, and check that the versions agree."""
    sys.path += [path for path in request["path"] if path not in sys.path]
    content = base64.b64decode(request["content"]) if request["tokenizer"]["file"] else None
    spec = from_dataset(request["tokenizer"], content)
    check_versions(request["version"], request["tokenizer"], spec)
    return spec


def _throttled(say: Callable[[Message], None]) -> Callable[[Message], None]:
    """Pass on the events that the driver needs, and progress only a few times a second."""
    last = 0.0

    def pass_on(event: Message) -> None:
        nonlocal last
        if event["kind"] in _OF_THE_WHOLE:
            return
        if event["kind"] == "progress":
            now = time.monotonic()
            if now - last < LOG_SECONDS and event["units"] < event["total_units"]:
                return
            last = now
        say(event)

    return pass_on


def _attempt(part: Callable[[], Message]) -> Message:
    """The result of a call. An error is an answer, too."""
    try:
        return part()
    except BaseException as error:  # the driver decides
        if not errors.is_failure(error):
            raise
        return {"kind": "failed", "error": errors.to_record(error), "host": platform.node()}


def _answered(part: Callable[[], Message]) -> str:
    return json.dumps(_attempt(part))
