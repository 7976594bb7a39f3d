"""Connections to a Ray cluster: find, join, query and leave it; versions and the authentication token.

The cluster is the given one, else that of RAY_ADDRESS, else the one that `ray start` recorded on this machine. If there
is none, a temporary local Ray is started that listens on 127.0.0.1 only.

Every process of a Ray cluster, and every driver, authenticates with a token:

    a temporary local Ray        a new token, known to its own processes only
    a recorded cluster           the user's token, if there is one, as `ray.init("auto")` would use
    a cluster at an address      what the environment says: a token is not sent to just any address

By default, Ray would write its token to the user's home, where every later Ray program finds it, and would change the
environment of this process for good.

Driver and nodes must run the same tokenmill and the same engine, or the build is refused.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from tokenmill import errors
from tokenmill.errors import BuildError, RecipeError, TokenmillError
from tokenmill.executors.forkserver import Message
from tokenmill.resources import resolve_workers
from tokenmill.tokenizers.spec import TokenizerSpec

try:
    import ray as ray  # noqa: PLC0414 - other modules import it from here
except ImportError:
    raise RecipeError("Ray is not installed", hint="pip install 'tokenmill[ray]', on every node") from None


T = TypeVar("T")

# How long a cluster may take to answer at all. Ray itself would try for ten minutes.
ANSWER_SECONDS = 5.0
# How often the size of the cluster is checked: nodes come and go.
LOOK_SECONDS = 5.0
# How long the head may be silent. Some clusters restart it; after a minute Ray ends every program that has joined.
LOST_SECONDS = 30.0
# Messages are small, so the object store of a local Ray may be small.
STORE_BYTES = 100_000_000
ADDRESS = "RAY_ADDRESS"
# Where `ray start` records the cluster of a machine.
RECORDED = "ray/ray_current_cluster"
_JOIN_HINT = (
    "check that it runs the same version of Ray; if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
)


def connect(address: str | None, workers: int | None, secret: Mapping[str, str] | None = None) -> bool:
    """Join a cluster, or start a temporary local Ray. False if this program has joined one already.

    `secret` is the environment of a cluster that this program has started on other hosts.
    """
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", joined):
            raise RecipeError(f"this program has joined the Ray cluster at {joined}", hint=f"leave {address} out")
        return False
    found = find_cluster(address)
    options: dict[str, Any]
    if found is None:
        options = {"num_cpus": resolve_workers(workers), "include_dashboard": False, "object_store_memory": STORE_BYTES}
        secret = local_environment()
    else:
        options = {"address": found}
        secret = secret or (user_environment() if _is_recorded(address) else {})
    try:
        with (
            _own_signal_handlers(),
            environment(secret),
            _on_loopback() if found is None else contextlib.nullcontext(),
        ):
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
    """Leave the cluster. A temporary local Ray ends with it."""
    ray.shutdown()
    reload_token()


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make a Ray that starts inside this context listen on 127.0.0.1 only.

    Ray does so by itself only on systems without clusters. Elsewhere it replaces that address, even if it is given,
    with one that other machines can reach.
    """
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _is_recorded(address: str | None) -> bool:
    """Whether the cluster to join is the one that `ray start` recorded on this machine."""
    return (address or os.environ.get(ADDRESS) or "auto") == "auto"


def find_cluster(address: str | None) -> str | None:
    """HOST:PORT of the cluster to join: as asked for, from the environment, or of this machine; else None."""
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
            f"{found!r} is not the address of a Ray cluster",
            hint="give auto or HOST:PORT, and run the command on a node of the cluster",
        )
    if host in ("localhost", "127.0.0.1", "::1"):  # Ray expects the own address of this machine
        host, found = ray.util.get_node_ip_address(), f"{ray.util.get_node_ip_address()}:{port}"
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        if given is None:
            return None  # the recorded cluster has ended
        raise RecipeError(
            f"no Ray cluster answers at {found}: {error}", hint="check that it is up: `ray status --address`"
        ) from None
    return found


def _cluster_here() -> str | None:
    """The cluster that `ray start` recorded on this machine."""
    try:
        with open(os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), RECORDED), encoding="ascii") as file:  # noqa: S108 - Ray's own place
            return file.read(300).strip() or None
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep our signal handlers: Ray installs its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def num_slots(wanted: int | None, cores: int) -> int:
    """How many units run at once: as asked, three quarters of the cores for 0 or less, else all; at least one."""
    if wanted is not None and wanted <= 0:
        wanted = cores * 3 // 4
    return max(1, cores if wanted is None else min(wanted, cores))


def num_cores() -> int:
    """How many tasks the cluster can run at once."""
    return int(ask_head(ray.cluster_resources).get("CPU", 0))


def ask_head(question: Callable[[], T]) -> T:
    """Ask the head of the cluster, in another thread.

    If the head is gone, the call blocks until Ray ends the program, and no signal is delivered until then.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:  # raised in the calling thread
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(LOST_SECONDS)
    except (TimeoutError, ray.exceptions.RayError):
        raise BuildError(
            "the head of the Ray cluster was lost: it does not answer",
            hint="restart the cluster, then run the same command to resume",
        ) from None


def answered(refs: list[Any]) -> list[Any]:
    """The tasks that have an answer, as soon as there is one; empty after a while without any."""
    if not ray.wait(refs, timeout=LOOK_SECONDS)[0]:
        return []
    ready: list[Any] = ray.wait(refs, num_returns=len(refs), timeout=0)[0]
    return ready


def wait_for_answer(ref: Any) -> Message:
    """Wait for the answer of a task, as long as the head of the cluster is up."""
    while not answered([ref]):
        num_cores()
    return receive_answer(partial(ray.get, ref))


def receive_answer(get: Callable[[], str]) -> Message:
    """The answer of a task, from `get`. The death of its worker is an answer, too."""
    try:
        answer: Message = json.loads(get())
        return answer
    except ray.exceptions.RayError as error:
        cause = _start_error(error)
        if cause is None:
            message = f"a worker was lost: {type(error).__name__}"
            return {"kind": "died", "error": errors.to_record(BuildError(message, hint="is there enough memory?"))}
        # An error of the whole build: a node that fails at once would get task after task.
        message, hint = (
            f"{_node_of(error)} cannot run tokenmill: {cause}",
            f"install tokenmill {own_version()} on every node",
        )
        return {"kind": "failed", "error": errors.to_record(RecipeError(message, hint=hint))}


def error_of(answer: Message) -> TokenmillError:
    """The error in an answer, with the host where it happened, if that is known."""
    error, host = errors.from_record(answer["error"]), answer.get("host", "")
    if host and not re.search(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", error.message):
        return type(error)(f"{host}: {error.message}", hint=error.hint)
    return error


def _node_of(error: Exception) -> str:
    """The node that an error of Ray names."""
    found = re.search(r"\bip[=:] ?([0-9a-f.:]+[0-9a-f])", str(error))
    return f"the node at {found[1]}" if found else "a node"


def _start_error(error: Exception) -> str | None:
    """Why a call never reached our code, which raises nothing itself; None if it did and was lost."""
    if isinstance(error, ray.exceptions.RayTaskError):
        said = str(error.cause)
    elif isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed:
        said = str(error)
    else:
        return None
    return next(reversed(said.strip().splitlines()), "no reason given")


MODE, SECRET, SECRET_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
USAGE = "RAY_USAGE_STATS_ENABLED"
HOME_PATH = "~/.ray/auth_token"


def local_environment() -> dict[str, str]:
    """The environment in which a temporary local Ray starts, without usage reports."""
    return {MODE: "token", SECRET: secrets.token_hex(32), USAGE: "0"}


def user_environment() -> dict[str, str]:
    """The environment in which a cluster is joined."""
    has_secret = os.environ.get(SECRET) or os.environ.get(SECRET_PATH) or os.path.exists(os.path.expanduser(HOME_PATH))
    return {MODE: "token"} if has_secret and MODE not in os.environ else {}


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables for what is started inside this context, then restore the environment, whatever Ray changed."""
    before = dict(os.environ)
    os.environ.update(changes)
    reload_token()
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def reload_token() -> None:
    """Make this process read its token from the environment again."""
    within: Any = ray._raylet
    with contextlib.suppress(AttributeError):  # a Ray without tokens
        within.Config.initialize("")
        within.AuthenticationTokenLoader.instance().reset_cache()


def own_version() -> str:
    return importlib.metadata.version("tokenmill")


def check_versions(version: str, tokenizer: dict[str, Any], spec: TokenizerSpec) -> None:
    """Refuse a driver whose tokenmill or engine differs from those of this node."""
    ours, theirs = (version, tokenizer["engine"]), (own_version(), spec.describe()["engine"])
    if ours != theirs:
        raise RecipeError(
            f"{platform.node()} has tokenmill {theirs[0]} with {theirs[1]}, the driver {ours[0]} with {ours[1]}",
            hint="install the same versions on every node",
        )
