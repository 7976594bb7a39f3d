"""The script for Slurm, with a real Ray. There is no Slurm here: srun and scontrol are stand-ins that start the
processes of both nodes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tokenmill as library
from conftest import tree

pytest.importorskip("ray")

SCRIPT = Path(__file__).parents[2] / "examples/slurm/prepare.sbatch"
STAND_INS = {
    "scontrol": "printf 'node1\\nnode2\\n'",
    # Its own options first, then the command, which another node would run.
    "srun": 'echo "$@" >> "$SRUN_LOG"\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    "tokenmill": f"exec {sys.executable} -c 'from tokenmill.cli.main import main; main()' \"$@\"",
    "ray": f"exec {sys.executable} -c 'from ray.scripts.scripts import main; main()' \"$@\"",
}


def test_the_script_prepares_on_all_nodes_of_an_allocation_and_leaves_nothing_running(
    corpus: Path, tmp_path: Path
) -> None:
    library.prepare(str(corpus), tmp_path / "right", workers=1, tokenizer="byte", unit_bytes="4kB")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    number = str(os.getpid())
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SRUN_LOG": str(tmp_path / "srun.log"),
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "1",
    }
    done = subprocess.run(
        ["bash", SCRIPT, corpus, "-o", tmp_path / "out", "--tokenizer", "byte", "--unit-bytes", "4kB"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "out") == tree(tmp_path / "right")
    head, others = (tmp_path / "srun.log").read_text().splitlines()
    assert "--nodelist=node1 ray start" in head
    assert "--nodes=1 --ntasks=1 --overlap --exclude=node1 ray start" in others
    events = [json.loads(line) for line in (tmp_path / "out/.build/events.jsonl").read_text().splitlines()]
    assert {event["kind"] for event in events} >= {"start", "done", "finished"}
    deadline = time.monotonic() + 60  # what was told to end takes a moment
    while subprocess.run(["pgrep", "-f", f"/tmp/ray-{number}/"], stdout=subprocess.DEVNULL).returncode == 0:
        assert time.monotonic() < deadline, "a Ray outlives its job"
        time.sleep(0.05)
