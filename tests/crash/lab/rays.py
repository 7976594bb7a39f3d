"""Ray chaos: workers, nodes and drivers of builds on a cluster are killed; in the end the bytes are the right ones.

    worker   the process that does a unit        the driver tries the unit again
    raylet   a node's own process, -9            what ran there is done elsewhere; another node comes up
    driver   the command itself                  the same command goes on

A real cluster on this machine: a head without a slot, and two nodes of one slot each. With a shared output, and with
node-local placement, where each node has a part and a lost node comes back with its disk.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lab.commands import FAILED, FINISHED, Bench, make_bench, num_receipts, run, started, wait_until
from lab.world import tree
from lab_runner import Row
from nodes import add_node, ray_cluster, unit_processes
from tokenmill.dataset.manifest import NODES

DOCUMENTS = 400
KILLS_A_BUILD = 6


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a build puts its files and which function its tasks run: by the placement that is asked for."""

    bench: Bench
    placement: str

    @property
    def function(self) -> str:
        return "UnitActor.do" if self.placement == "shared" else "build_part"

    def folders(self, name: str) -> list[str]:
        """The folders of an output on this machine."""
        places = [""] if self.placement == "shared" else ["node1/", "node2/"]
        return [f"{self.bench.place}/{place}{name}" for place in places]

    def command(self, name: str, address: str) -> list[str]:
        place = "" if self.placement == "shared" else "$NODE/"
        options = ("--executor", "ray", "--ray-address", address, "--placement", self.placement)
        return self.bench.prepare(f"{self.bench.place}/{place}{name}", *options)

    def num_receipts(self, name: str) -> int:
        return sum(map(num_receipts, self.folders(name)))

    def processes(self) -> list[int]:
        return unit_processes(self.function)

    def wrong_with(self, name: str) -> str | None:
        """What is wrong with an output; None if it is the one that nobody disturbed."""
        if self.placement == "shared":
            return self.bench.wrong_with(*self.folders(name))
        for found, right in zip(self.folders(name), self.folders("right"), strict=True):
            trees = [{file: digest for file, digest in tree(path).items() if file != NODES} for path in (found, right)]
            if trees[0] != trees[1]:
                return f"{found} is not {right}"
            if left := [*Path(found).rglob("*.tmp"), *Path(found).glob(".build/lock")]:
                return f"{left[0]} stays"
        return None


def chaos(workers: int, raylets: int, drivers: int, *, seed: int = 0, placement: str = "shared") -> Row:
    """So many of each are killed, in an order and at moments that the seed draws."""
    chance = random.Random(seed)
    victims = ["worker"] * workers + ["raylet"] * raylets + ["driver"] * drivers
    chance.shuffle(victims)
    wrong: list[str] = []
    hangs = tried = builds = 0
    with make_bench(DOCUMENTS) as bench, ray_cluster(nodes=2, head_slots=0) as cluster:
        scene = Scene(bench, placement)
        os.environ["NODE"] = "driver"  # until the cluster is gone
        if placement != "shared":
            run(scene.command("right", cluster.address))
        while victims:
            # Some to a build: a unit that dies three times fails, and that is another story.
            now, victims = victims[:KILLS_A_BUILD], victims[KILLS_A_BUILD:]
            output, builds = f"out-{builds}", builds + 1
            try:
                killed, sentence = _disturb(scene, cluster, output, now, chance)
            except subprocess.TimeoutExpired:
                hangs += 1
                continue
            tried += len(killed)
            victims += now[len(killed) :]
            if sentence:
                wrong.append(f"{', then '.join(killed)}: {sentence}")
    return Row(
        fault=f"SIGKILL of a Ray worker, raylet or driver, {placement}",
        tried=tried,
        wrong=tuple(wrong),
        hangs=hangs,
    )


def _disturb(
    scene: Scene, cluster: Any, output: str, victims: list[str], chance: random.Random
) -> tuple[list[str], str | None]:
    """Kill them one after the other while the command works, then leave it in peace. Gives who was killed."""
    arguments = scene.command(output, cluster.address)
    num_units = scene.num_receipts("right")
    moments = sorted(chance.randrange(1, num_units * 3 // 4) for _ in victims)
    left = list(zip(moments, victims, strict=True))
    killed: list[str] = []
    while left:
        with started(arguments) as process:
            while left and wait_until(
                lambda: scene.num_receipts(output) >= left[0][0] and bool(scene.processes()), process
            ):
                moment, victim = left[0]
                if victim == "worker" and not _kill_one(scene.processes(), chance):
                    continue  # it has just done its unit; another one begins
                del left[0]
                killed.append(f"{victim} killed at {moment} units")
                if victim == "raylet":
                    _replace_one(cluster, chance)
                elif victim == "driver":
                    process.kill()
                    break
            process.wait(300)
            if process.returncode == FINISHED:
                break
            if process.returncode not in (FAILED, -signal.SIGKILL):
                return killed, f"the command ended with {process.returncode}"
    ended = run(arguments)
    if ended.code != FINISHED:
        return killed, f"the command does not go on: {ended.code}: {ended.errors}"
    return killed, scene.wrong_with(output)


def _replace_one(cluster: Any, chance: random.Random) -> None:
    """Kill a node, and start it again."""
    node = chance.choice(list(cluster.worker_nodes))
    cluster.remove_node(node, allow_graceful=False)
    add_node(cluster, env_vars=node._ray_params.env_vars)


def _kill_one(processes: list[int], chance: random.Random) -> bool:
    """Kill one of some processes; False if there is none any more."""
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(chance.choice(processes), signal.SIGKILL)
        return True
    return False


EXPERIMENTS = [
    ("ray", partial(chaos, 20, 5, 2, seed=1)),
    ("ray-node-local", partial(chaos, 6, 3, 2, seed=2, placement="node-local")),
]
