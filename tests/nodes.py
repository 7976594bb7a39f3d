"""A real Ray cluster on this machine, for the tests and the crash lab."""

from __future__ import annotations

import contextlib
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


def unit_processes(function: str = "Bench.do") -> list[int]:
    """The processes of our nodes that do units now: Ray names them by the function that they run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_unit = (path / "cmdline").read_bytes().startswith(f"ray::{function}".encode())
            if is_unit and _parent(_parent(int(path.name))) == os.getpid():
                found.append(int(path.name))
    return found


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
