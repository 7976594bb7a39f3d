"""What a node does for node-local placement: JSON in, JSON out, and all files on its own disk.

    look        which part does the disk hold?      build_part   the whole build of a part, with all its rules
    keep_nodes  the record of which node has what

A part is built as any dataset is: by the local pool of its node, under a lock, with receipts. So whatever is lost,
what is done is kept, and no other node has to know.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import platform
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from tokenmill import errors, placement, records
from tokenmill import manifest as manifests
from tokenmill.build import state
from tokenmill.build.build import Manner, build_planned, make_executor
from tokenmill.build.crew import Message
from tokenmill.build.progress import LOG_SECONDS
from tokenmill.build.setup import Setup
from tokenmill.build.versions import check_versions, own_version
from tokenmill.build.waiting import wait_for
from tokenmill.errors import LockedError, RecipeError
from tokenmill.planning import Plan
from tokenmill.recipe import make_recipe
from tokenmill.sources.listing import Listing
from tokenmill.storage import Folder, local_folder
from tokenmill.storage.lock import locked
from tokenmill.tokenizer.spec import TokenizerSpec, from_dataset

# What a build says that its driver need not hear: it tells the same of the whole.
_OF_THE_WHOLE = ("start", "commit", "finished")

_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)
_EVERYWHERE = (
    "OUT is filled in on every node, and where the command runs: it must mean something on all of them; "
    "a node's variables are those with which Ray was started there"
)


def expand(output: str) -> str:
    """The place that OUT means on this machine: `~` and variables of its environment are filled in."""
    here = platform.node()
    for name in (plain or braced for plain, braced in _VARIABLE.findall(output)):
        if not os.environ.get(name):  # an empty one would make another place of it, like a folder of the root
            raise RecipeError(f"the variable {name}, which {output} needs, is not set on {here}", hint=_EVERYWHERE)
    path = os.path.expanduser(os.path.expandvars(output))
    if "$" in path:
        raise RecipeError(f"{output} is {path} on {here}", hint="a $ begins the name of a variable: '$NAME/owt'")
    if path.startswith("~"):
        raise RecipeError(f"no user of {here} has the home that {output} begins with", hint=_EVERYWHERE)
    folder = local_folder(path)
    if not os.path.isabs(path):
        raise RecipeError(f"{output} is {path} on {here}", hint="give a path from the root on")
    return folder.path


def look(message: str) -> str:
    """Which part this node holds, and where. With `restart`, what is there goes first."""
    return _answered(lambda: _look(json.loads(message)))


def _look(told: Message) -> Message:
    _get_ready(told)
    folder = local_folder(expand(told["output"]))
    state.check_ours(folder)
    if told["restart"] and folder.names():
        folder.make(".build")
        with locked(folder):
            state.start_over(folder)
    finished = folder.exists(manifests.NAME)
    held = manifests.load(folder) if finished else state.load_plan(folder) if folder.exists(state.PLAN) else None
    return {
        "kind": "found",
        "host": platform.node(),
        "path": folder.path,
        "part": held and held.identity.get(placement.IDENTITY),
        "finished": finished,
    }


def build_part(message: str) -> Iterator[str]:
    """Build a part. Messages as they come; the last one is `stands`, with the manifest, or `failed`."""
    said: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def work() -> None:
        said.put(
            _attempt(lambda: _build(json.loads(message), lambda event: said.put({"kind": "event", "event": event})))
        )

    threading.Thread(target=work, daemon=True).start()
    while True:
        heard = said.get()
        yield json.dumps(heard)
        if heard["kind"] != "event":
            return


def _build(told: Message, say: Callable[[Message], None]) -> Message:
    setup = _from_message(told)
    folder = Folder(told["output"])

    def attempt(heed: Callable[[], None]) -> bool:
        hire = partial(make_executor, told["workers"], None)
        return build_planned(setup, folder, Manner(hire=hire, watch=_sparing(say), heed=heed))[1]

    def tell(text: str) -> None:
        say({"kind": "waiting", "message": text})

    try:
        stood = wait_for(folder, attempt, timeout=told["patience"], tell=tell)
    except LockedError as error:
        hint = "each node needs a place of its own: is it on a disk that they share? else wait for the other build"
        raise LockedError(error.message, hint=hint) from None
    return {"kind": "stands", "manifest": folder.read(manifests.NAME).decode(), "already_complete": stood}


def keep_nodes(message: str) -> str:
    """Put the record beside the part."""
    return _answered(lambda: _keep_nodes(json.loads(message)))


def _keep_nodes(told: Message) -> Message:
    write_nodes(Folder(told["output"]), told["nodes"].encode())
    return {"kind": "kept"}


def write_nodes(folder: Folder, record: bytes) -> None:
    """Put the record into a folder, unless it is there."""
    folder.make()
    if not folder.exists(placement.NAME) or folder.read(placement.NAME) != record:
        folder.replace(placement.NAME, record)


def to_message(setup: Setup, plan: Plan) -> Message:
    """A setup with the plan of one part, as plain data for the node that will build it."""
    return {
        **greeting(setup.spec),
        "recipe": dataclasses.asdict(setup.recipe),
        "root": setup.listing.root,
        "plan": records.seal(plan).decode(),
    }


def greeting(spec: TokenizerSpec) -> Message:
    """What a driver tells every node first."""
    return {
        "path": sys.path,
        "version": own_version(),
        "tokenizer": spec.describe(),
        "content": base64.b64encode(spec.content if spec.file_name else b"").decode(),
    }


def _from_message(told: Message) -> Setup:
    spec = _get_ready(told)
    plan = records.unseal(Plan, told["plan"].encode(), where="plan")
    listing = Listing(root=told["root"], sources=plan.sources, extents=())
    return Setup(make_recipe(told["recipe"]), listing, spec, plan, ())


def _get_ready(told: Message) -> TokenizerSpec:
    """Find the driver's modules, and be of its version."""
    sys.path += [path for path in told["path"] if path not in sys.path]
    content = base64.b64decode(told["content"]) if told["tokenizer"]["file"] else None
    spec = from_dataset(told["tokenizer"], content)
    check_versions(told["version"], told["tokenizer"], spec)
    return spec


def _sparing(say: Callable[[Message], None]) -> Callable[[Message], None]:
    """Pass on what a driver wants to hear, and progress not more often than it is of use."""
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
    """What a part of the work gives; whatever it dies of is an answer too."""
    try:
        return part()
    except Exception as error:  # the driver judges it
        return {"kind": "failed", "error": errors.to_record(error), "host": platform.node()}


def _answered(part: Callable[[], Message]) -> str:
    return json.dumps(_attempt(part))
