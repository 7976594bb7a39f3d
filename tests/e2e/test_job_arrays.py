"""The array job for Slurm and the indexed job for Kubernetes. There is neither here: stand-ins start the tasks as
processes of this machine, as a scheduler would, and kill one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import tokenmill as library
from conftest import make_texts, tree, write_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {"tokenizer": "byte", "unit_bytes": "20kB"}
Task = Callable[[int], subprocess.Popen[bytes]]


@pytest.fixture
def corpus_with_a_bad_line(tmp_path: Path) -> Path:
    source = write_jsonl(tmp_path / "corpus.jsonl", make_texts(3000))
    with source.open("a") as file:
        file.write("{not json\n")
    return source


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where the command is on the path, as on a node."""
    command = tmp_path / "bin/tokenmill"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tokenmill "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}


def schedule(tasks: Sequence[int], start: Task, out: Path, *, signal_of: Mapping[int, signal.Signals]) -> None:
    """Run all tasks at the same time. Some get a signal when they have done a unit, and run again."""
    running = {task: start(task) for task in tasks}
    for task, number in signal_of.items():
        receipts = out / ".build/receipts"
        while running[task].poll() is None and not (receipts.exists() and len(list(receipts.iterdir())) > 2):
            time.sleep(0.01)
        running[task].send_signal(number)
        assert running[task].wait(60) != 0
        subprocess.run(["pkill", "-9", "-P", str(running[task].pid)])  # a container ends as a whole
        running[task] = start(task)
    for task in running.values():
        assert task.wait(120) == 0


def test_an_array_of_slurm_and_a_join_give_the_bytes_of_one_machine(
    corpus_with_a_bad_line: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    out, script = tmp_path / "out", EXAMPLES / "slurm/prepare-array.sbatch"
    line = ["bash", script, corpus_with_a_bad_line, "-o", out, "--tokenizer", "byte", "--unit-bytes", "20kB"]

    def start(task: int) -> subprocess.Popen[bytes]:
        slurm = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "1"}
        return subprocess.Popen(line, env={**environment, **slurm, "SLURM_CPUS_PER_TASK": "1"})

    schedule(range(2), start, out, signal_of={1: signal.SIGTERM})
    after = re.search(r'--wrap "(tokenmill join) ', script.read_text())
    subprocess.run([*after[1].split(), out], env=environment, stdout=subprocess.DEVNULL)
    library.prepare(corpus_with_a_bad_line, tmp_path / "right", workers=1, **OPTIONS)
    assert tree(out) == tree(tmp_path / "right")


def containers(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job and its only container."""
    job = yaml.safe_load((EXAMPLES / "kubernetes" / name).read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return job, container


def test_an_indexed_job_of_kubernetes_and_its_join_give_the_bytes_of_one_machine(
    corpus_with_a_bad_line: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "out"
    places = {"SOURCES": str(corpus_with_a_bad_line), "OUT": str(out), "DATASET_NUM_PROC": "1"}

    def start(container: dict[str, Any], **more: str) -> subprocess.Popen[bytes]:
        given = {one["name"]: one["value"] for one in container["env"]}
        assert container["command"][:2] == ["/bin/sh", "-c"]
        # The recipe of the right result: only the units are smaller here.
        text = container["command"][2].replace("--part", "--tokenizer byte --unit-bytes 20kB --part")
        return subprocess.Popen(["/bin/sh", "-c", text], env={**environment, **given, **places, **more})

    job, container = containers("prepare.yaml")
    spec = job["spec"]
    assert (spec["completionMode"], str(spec["completions"])) == ("Indexed", container["env"][2]["value"])
    schedule(
        range(spec["completions"]),
        lambda index: start(container, JOB_COMPLETION_INDEX=str(index)),
        out,
        signal_of={2: signal.SIGKILL},
    )
    assert start(containers("join.yaml")[1]).wait(120) == 0
    library.prepare(corpus_with_a_bad_line, tmp_path / "right", workers=1, **OPTIONS)
    assert tree(out) == tree(tmp_path / "right")
