"""A real Ray cluster on this machine, for the tests and the crash lab."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000, "node_ip_address": "127.0.0.1"}
STARTS = 3
# Whoever loads Ray after this looks for clusters at 127.0.0.1, as it does on systems where it has no others.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


@contextlib.contextmanager
def ray_cluster(*, nodes: int, head_slots: int) -> Iterator[Any]:
    """A head with so many slots, and nodes of one slot each. The variable NODE tells them apart."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    # It is here and gone, and it calls nobody.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    cluster = Cluster()
    try:
        add_node(cluster, num_cpus=head_slots, include_dashboard=False, env_vars={"NODE": "node0"})
        for number in range(nodes):
            add_node(cluster, env_vars={"NODE": f"node{number + 1}"})
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


def add_node(cluster: Any, **options: Any) -> Any:
    """One more node. On a busy machine Ray gives up after 20 s now and then, so it is tried again."""
    for left in reversed(range(STARTS)):
        try:
            return cluster.add_node(**{**NODE, **options})
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
    raise AssertionError("the last start gives a node, or raises")


def kill_node(node: Any) -> None:
    """Kill all processes of a node at once, as a power cut does."""
    for processes in node.all_processes.values():
        for one in processes:
            one.process.kill()


def unit_processes(function: str = "UnitActor.do") -> list[int]:
    """The processes of our nodes that do units now: Ray names them by the function that they run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_unit = (path / "cmdline").read_bytes().startswith(f"ray::{function}".encode())
            if is_unit and _parent(_parent(int(path.name))) == os.getpid():
                found.append(int(path.name))
    return found


def listening(process: int) -> list[str]:
    """The addresses at which a process and its descendants listen."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = _parent(int(path.name))
    kin, more = set[int](), {process}
    while more:
        kin |= more
        more = {one for one, parent in parents.items() if parent in kin} - kin
    ours = {socket for one in kin for socket in _sockets(one)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [_address(line[1].partition(":")[0]) for line in lines if line[3] == "0A" and line[9] in ours]


def _sockets(process: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has ended
        for path in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(path).removeprefix("socket:[").removesuffix("]")


def _address(words: str) -> str:
    """An address as the kernel shows it: words of four bytes, each of them backwards."""
    address = ipaddress.ip_address(b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8)))
    return str(getattr(address, "ipv4_mapped", None) or address)


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
