"""A Ray cluster: found, joined, asked and left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from tokenmill import errors
from tokenmill.build.crew import Message
from tokenmill.build.versions import own_version
from tokenmill.cores import resolve_workers
from tokenmill.errors import BuildError, RecipeError, TokenmillError

try:
    import ray as ray  # noqa: PLC0414 - who needs a cluster takes it from here
except ImportError:
    raise RecipeError("Ray is not installed", hint="pip install 'tokenmill[ray]', on every node") from None

from tokenmill.build import ray_secret  # it needs Ray

T = TypeVar("T")

# How long a cluster may take to answer at all. Ray itself would try for ten minutes.
ANSWER_SECONDS = 5.0
# How often the size of the cluster is looked at: nodes come and go.
LOOK_SECONDS = 5.0
# How long the head may be silent. Some clusters start it again; after a minute Ray ends every program that has joined.
LOST_SECONDS = 30.0
# What is said is small; a local Ray needs no more room for it.
STORE_BYTES = 100_000_000
ADDRESS = "RAY_ADDRESS"
# Where `ray start` notes the cluster of a machine.
NOTED = "ray/ray_current_cluster"
_JOIN_HINT = "has it the same version of Ray? does it ask for a token? then set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN"


def connect(address: str | None, workers: int | None) -> bool:
    """Join a cluster, or start a Ray of our own where none is found. False in a program that has joined one already."""
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", joined):
            raise RecipeError(f"this program has joined the Ray cluster at {joined}", hint=f"leave {address} out")
        return False
    found = find_cluster(address)
    options: dict[str, Any]
    if found is None:
        options = {"num_cpus": resolve_workers(workers), "include_dashboard": False, "object_store_memory": STORE_BYTES}
        secret = ray_secret.of_our_own()
    else:
        options, secret = {"address": found}, ray_secret.of_the_user() if _is_noted(address) else {}
    try:
        with _own_signals(), ray_secret.environment(secret), _at_home() if found is None else contextlib.nullcontext():
            ray.init(**options, log_to_driver=False, logging_level="error")
    except BaseException as error:
        leave()
        if not isinstance(error, (OSError, RuntimeError, ValueError, ray.exceptions.RayError)):
            raise
        if found is None:
            raise BuildError(f"Ray does not start: {error}", hint="look at its logs in /tmp/ray") from None
        raise BuildError(f"the Ray cluster at {found} cannot be joined: {error}", hint=_JOIN_HINT) from None
    return True


def leave() -> None:
    """Leave the cluster; a Ray of our own ends with it. Nothing of it stays in this program."""
    ray.shutdown()
    ray_secret.look_again()


@contextlib.contextmanager
def _at_home() -> Iterator[None]:
    """Have a Ray that starts meanwhile listen on 127.0.0.1 alone. By itself it does so on the systems where it has no
    clusters; on others it takes that address, even if it is given, for the one where other machines find it."""
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _is_noted(address: str | None) -> bool:
    """Whether the cluster to join is the one that `ray start` noted."""
    return (address or os.environ.get(ADDRESS) or "auto") == "auto"


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


def num_slots(wanted: int | None, cores: int) -> int:
    """How many units run at once: as asked, three quarters of the cores for 0 or less, else all; never none."""
    if wanted is not None and wanted <= 0:
        wanted = cores * 3 // 4
    return max(1, cores if wanted is None else min(wanted, cores))


def num_cores() -> int:
    """How many tasks the cluster can run at once."""
    return int(ask_head(ray.cluster_resources).get("CPU", 0))


def ask_head(question: Callable[[], T]) -> T:
    """What the head of the cluster says. One that is gone keeps whoever asks it waiting until Ray ends the program, and
    no signal gets through: so another thread asks."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:  # it is raised where the answer is wanted
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(LOST_SECONDS)
    except (TimeoutError, ray.exceptions.RayError):
        raise BuildError(
            "the head of the Ray cluster was lost: it does not answer",
            hint="start the cluster again, then run the same command: what is done is kept",
        ) from None


def answered(refs: list[Any]) -> list[Any]:
    """The tasks that have an answer, once there is one; none if that takes long."""
    if not ray.wait(refs, timeout=LOOK_SECONDS)[0]:
        return []
    ready: list[Any] = ray.wait(refs, num_returns=len(refs), timeout=0)[0]
    return ready


def hear_from(ref: Any) -> Message:
    """The answer of a task, however long it takes, unless the head is lost meanwhile."""
    while not answered([ref]):
        num_cores()
    return hear(partial(ray.get, ref))


def hear(get: Callable[[], str]) -> Message:
    """The answer of a task, which `get` gives; that its worker died is one too."""
    try:
        answer: Message = json.loads(get())
        return answer
    except ray.exceptions.RayError as error:
        cause = _never_began(error)
        if cause is None:
            message = f"a worker was lost: {type(error).__name__}"
            return {"kind": "died", "error": errors.to_record(BuildError(message, hint="is there enough memory?"))}
        # An error of the whole build: a node that fails at once would be asked again and again.
        message, hint = (
            f"{_node_of(error)} cannot run tokenmill: {cause}",
            f"install tokenmill {own_version()} on every node",
        )
        return {"kind": "failed", "error": errors.to_record(RecipeError(message, hint=hint))}


def error_of(answer: Message) -> TokenmillError:
    """The error that an answer tells of, with the host where it happened, if that is known."""
    error, host = errors.from_record(answer["error"]), answer.get("host", "")
    if host and not re.search(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", error.message):
        return type(error)(f"{host}: {error.message}", hint=error.hint)
    return error


def _node_of(error: Exception) -> str:
    """The node that an error of Ray's is of, as Ray knows it."""
    found = re.search(r"\bip[=:] ?([0-9a-f.:]+[0-9a-f])", str(error))
    return f"the node at {found[1]}" if found else "a node"


def _never_began(error: Exception) -> str | None:
    """Why a call did not come to our code, which lets nothing through; None if it did, and was lost."""
    if isinstance(error, ray.exceptions.RayTaskError):
        said = str(error.cause)
    elif isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed:
        said = str(error)
    else:
        return None
    return next(reversed(said.strip().splitlines()), "nobody knows why")
