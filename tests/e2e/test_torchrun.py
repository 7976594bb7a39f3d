"""A job of torchrun in which every rank prepares: one builds, is killed, and the job goes on with the same bytes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import leftovers, make_texts, tree, write_jsonl

pytestmark = pytest.mark.xdist_group("torchrun")  # one process, so that the job is run once

RANKS = 4
RECIPE = {"tokenizer": "byte", "unit_bytes": 2000, "workers": 1}

# What a rank does. Those who wait put a byte into a pipe each. So the one who builds goes on only when all others wait:
# in the first build to fail, in the second one to be killed in the middle. Then torchrun starts all ranks again.
PROGRAM = f"""
import json, os, signal, sys, time
import tokenmill

folder, rank = sys.argv[1], int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
pipe = os.open(f"{{folder}}/pipe", os.O_RDWR)

def note(what, output, **more):
    line = {{"what": what, "attempt": attempt, "output": output, "time": time.monotonic_ns(), **more}}
    with open(f"{{folder}}/rank{{rank}}.log", "a") as log:
        log.write(json.dumps(line) + "\\n")

def meet():
    waiting = b""
    while len(waiting) < {RANKS} - 1:
        waiting += os.read(pipe, {RANKS} - 1 - len(waiting))

def prepare(source, output, act=lambda event: None, **options):
    def watch(event):
        if event["kind"] in ("waiting", "resume", "start", "finished"):
            note(event["kind"], output, units=event.get("units"))
        if attempt == 0:
            if event["kind"] == "waiting":
                os.write(pipe, b".")
            act(event)
    found = tokenmill.prepare(f"{{folder}}/{{source}}", f"{{folder}}/{{output}}", wait=True, watch=watch,
                              **{RECIPE!r}, **options)
    note("result", output, already_complete=found.already_complete)

def fail(event):
    if event["kind"] == "start":
        meet()

def die(event):
    if event["kind"] == "progress" and event["units"] == 3 and not os.path.exists(f"{{folder}}/killed"):
        meet()
        open(f"{{folder}}/killed", "x").close()
        note("killed", "out")
        os.kill(os.getpid(), signal.SIGKILL)

if attempt == 0:
    try:
        prepare("bad.jsonl", "bad", fail, on_bad="fail")
    except tokenmill.TokenmillError as error:
        note("error", "bad", text=f"{{type(error).__name__}}: {{error}}")
prepare("good.jsonl", "out", die)

# As with a disk for every two ranks.
disk = f"disk{{rank // 2}}"
prepare("good.jsonl", disk)

import torch
import tokenmill.torch
torch.distributed.init_process_group("gloo")
batch = next(iter(tokenmill.torch.DataLoader(f"{{folder}}/{{disk}}", 32, 3, fields=("sample_index",))))
everyone = [torch.empty_like(batch["sample_index"]) for _ in range(torch.distributed.get_world_size())]
torch.distributed.all_gather(everyone, batch["sample_index"])
note("batch", disk, samples=torch.cat(everyone).tolist(), mine=batch["sample_index"].tolist())
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that has run."""
    path = tmp_path_factory.mktemp("torchrun")
    write_jsonl(path / "good.jsonl", make_texts(200, words=30))
    write_jsonl(path / "bad.jsonl", make_texts(200, words=30))
    with (path / "bad.jsonl").open("a") as file:
        file.write("{not json\n")
    (path / "program.py").write_text(PROGRAM)
    os.mkfifo(path / "pipe")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    done = subprocess.run(
        [*command, str(path / "program.py"), str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return path


def notes(job: Path, output: str, *what: str) -> list[dict[str, Any]]:
    """What the ranks noted of an output, in order of time."""
    found = [
        {"rank": rank, **json.loads(line)}
        for rank in range(RANKS)
        for line in (job / f"rank{rank}.log").read_text().splitlines()
    ]
    return sorted(
        (note for note in found if note["output"] == output and note["what"] in what),
        key=lambda note: int(note["time"]),
    )


def test_the_builder_dies_and_the_restarted_job_goes_on_from_its_units(job: Path) -> None:
    (killed,) = notes(job, "out", "killed")
    waited = {note["rank"] for note in notes(job, "out", "waiting") if note["attempt"] == 0}
    assert waited == set(range(RANKS)) - {killed["rank"]}
    resumed = notes(job, "out", "resume")
    assert resumed
    assert all(note["units"] >= 3 for note in resumed)
    results = [note for note in notes(job, "out", "result") if note["attempt"] == 1]
    assert {note["rank"] for note in results} == set(range(RANKS))


def test_the_bytes_are_those_of_an_undisturbed_build(job: Path, tmp_path: Path) -> None:
    tokenmill.prepare(str(job / "good.jsonl"), tmp_path / "right", **RECIPE)
    for output in ("out", "disk0", "disk1"):
        assert tree(job / output) == tree(tmp_path / "right")
        assert not leftovers(job / output)


@pytest.mark.parametrize(("output", "attempt"), [("out", 0), ("out", 1), ("disk0", 1), ("disk1", 1)])
def test_there_is_one_builder_at_a_time_on_every_disk(job: Path, output: str, attempt: int) -> None:
    found = [note for note in notes(job, output, "start", "killed", "finished") if note["attempt"] == attempt]
    for begun, ended in itertools.zip_longest(found[::2], found[1::2]):
        assert begun["what"] == "start"
        # The last builder of the first attempt may be one that took over, and was ended by torchrun.
        assert ended is None or (ended["what"] != "start" and ended["rank"] == begun["rank"])
    if output != "out":
        assert [note["what"] for note in found] == ["start", "finished"]


def test_the_error_of_the_builder_reaches_those_who_wait(job: Path) -> None:
    (builder,) = notes(job, "bad", "start")
    errors = notes(job, "bad", "error")
    assert {note["rank"] for note in errors} == set(range(RANKS))
    assert {note["rank"] for note in notes(job, "bad", "waiting")} == set(range(RANKS)) - {builder["rank"]}
    (text,) = {note["text"] for note in errors}
    assert text.startswith("BadDocumentError: bad.jsonl at ")


def test_every_rank_loads_a_batch_of_its_own(job: Path) -> None:
    found = [note for disk in ("disk0", "disk1") for note in notes(job, disk, "batch")]
    assert len(found) == RANKS
    for note in found:
        assert len(set(note["samples"])) == 3 * RANKS
        assert note["mine"] == note["samples"][3 * note["rank"] : 3 * note["rank"] + 3]
