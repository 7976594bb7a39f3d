"""Ray chaos: workers, nodes and drivers of builds on a cluster are killed; in the end the bytes are the right ones.

    worker   the process that does a unit        the driver tries the unit again
    raylet   a node's own process, -9            what ran there is done elsewhere; another node comes up
    driver   the command itself                  the same command goes on

A real cluster on this machine: a head without a slot, and two nodes of one slot each.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from functools import partial
from typing import Any

from lab.commands import FAILED, FINISHED, Bench, make_bench, num_receipts, run, started, wait_until
from lab.report import Row
from nodes import add_node, ray_cluster, unit_processes

DOCUMENTS = 400
KILLS_A_BUILD = 6


def chaos(workers: int, raylets: int, drivers: int, *, seed: int = 0) -> Row:
    """So many of each are killed, in an order and at moments that the seed draws."""
    chance = random.Random(seed)
    victims = ["worker"] * workers + ["raylet"] * raylets + ["driver"] * drivers
    chance.shuffle(victims)
    wrong: list[str] = []
    hangs = tried = builds = 0
    with make_bench(DOCUMENTS) as bench, ray_cluster(nodes=2, head_slots=0) as cluster:
        while victims:
            # Some to a build: a unit that dies three times fails, and that is another story.
            now, victims = victims[:KILLS_A_BUILD], victims[KILLS_A_BUILD:]
            output, builds = str(bench.place / f"out-{builds}"), builds + 1
            try:
                killed, sentence = _disturb(bench, cluster, output, now, chance)
            except subprocess.TimeoutExpired:
                hangs += 1
                continue
            tried += len(killed)
            victims += now[len(killed) :]
            if sentence:
                wrong.append(f"{', then '.join(killed)}: {sentence}")
    return Row(
        fault="SIGKILL of a Ray worker, raylet or driver",
        tried=tried,
        wrong=tuple(wrong),
        hangs=hangs,
    )


def _disturb(
    bench: Bench, cluster: Any, output: str, victims: list[str], chance: random.Random
) -> tuple[list[str], str | None]:
    """Kill them one after the other while the command works, then leave it in peace. Gives who was killed."""
    arguments = bench.prepare(output, "--executor", "ray", "--ray-address", cluster.address)
    num_units = num_receipts(str(bench.place / "right"))
    moments = sorted(chance.randrange(1, num_units * 3 // 4) for _ in victims)
    left = list(zip(moments, victims, strict=True))
    killed: list[str] = []
    while left:
        with started(arguments) as process:
            while left and wait_until(lambda: num_receipts(output) >= left[0][0] and bool(unit_processes()), process):
                moment, victim = left[0]
                if victim == "worker" and not _kill_one(unit_processes(), chance):
                    continue  # it has just done its unit; another one begins
                del left[0]
                killed.append(f"{victim} killed at {moment} units")
                if victim == "raylet":
                    cluster.remove_node(chance.choice(list(cluster.worker_nodes)), allow_graceful=False)
                    add_node(cluster)
                elif victim == "driver":
                    process.kill()
                    break
            process.wait(120)
            if process.returncode == FINISHED:
                break
            if process.returncode not in (FAILED, -signal.SIGKILL):
                return killed, f"the command ended with {process.returncode}"
    ended = run(arguments)
    if ended.code != FINISHED:
        return killed, f"the command does not go on: {ended.code}: {ended.errors}"
    return killed, bench.wrong_with(output)


def _kill_one(processes: list[int], chance: random.Random) -> bool:
    """Kill one of some processes; False if there is none any more."""
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(chance.choice(processes), signal.SIGKILL)
        return True
    return False


EXPERIMENTS = [("ray", partial(chaos, 20, 5, 2, seed=1))]
