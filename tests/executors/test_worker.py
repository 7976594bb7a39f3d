"""A worker process, told what to do over its socket as a fork server's parent does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any

import msgspec
import pytest

from tokenmill.build.plan import make_task
from tokenmill.build.resolve import ResolvedBuild, make_config, resolve_build
from tokenmill.executors.forkserver import receive, send
from tokenmill.recipe import make_recipe
from tokenmill.storage.local import Folder
from tokenmill.units.receipts import PIECES, RECEIPTS, REJECTS, load_receipt

WORKER = "import sys; from tokenmill.executors.worker import main; main(int(sys.argv[1]), None)"


class Worker:
    """A worker in a process of its own."""

    def __init__(self) -> None:
        ours, theirs = socketpair()
        with theirs:
            arguments = [sys.executable, "-c", WORKER, str(theirs.fileno())]
            self.process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.errors = self.process.stderr
        self.link = Connection(ours.detach())

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The next message that is no progress."""
        send(self.link, message)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        while (heard := receive(self.link))["kind"] == "progress":
            pass
        return heard


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.link.close()
    made.process.kill()
    made.process.wait()
    made.errors.close()


@pytest.fixture
def resolved(corpus: Path) -> ResolvedBuild:
    return resolve_build(make_recipe({"sources": str(corpus), "tokenizer": "byte", "unit_bytes": 4000}))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(str(tmp_path / "out"))
    for name in (PIECES, RECEIPTS, REJECTS):
        made.make(name)
    return made


def configuration(resolved: ResolvedBuild, folder: Folder, **tokenizer: Any) -> dict[str, Any]:
    return {
        "path": sys.path,
        "work": msgspec.to_builtins(make_config(resolved, scratch=None)),
        "output": folder.to_record(),
        "tokenizer": {**resolved.spec.describe(), **tokenizer},
    }


def test_a_worker_is_free_then_answers_then_has_units_done(
    worker: Worker, resolved: ResolvedBuild, folder: Folder
) -> None:
    assert worker.ask(configuration(resolved, folder)) == {"kind": "free"}
    answer = worker.ask({"texts": ["ab", "c"]})
    assert (answer["kind"], answer["answer"]["lengths"]) == ("answer", [2, 1])
    heard = [worker.ask(msgspec.to_builtins(make_task(resolved.plan, 0))), worker.hear()]
    assert sorted(heard, key=str) == [{"kind": "done", "unit": 0}, {"kind": "free"}]
    assert load_receipt(folder, 0, -1, resolved.plan.fingerprint, rehash=True) is not None


def test_an_error_of_a_unit_is_a_message_and_the_worker_stays(
    worker: Worker, resolved: ResolvedBuild, folder: Folder, corpus: Path
) -> None:
    task = make_task(resolved.plan, 0)
    (corpus / task.sources[0].name).unlink()
    assert worker.ask(configuration(resolved, folder)) == {"kind": "free"}
    failed = worker.ask(msgspec.to_builtins(task))
    assert (failed["kind"], failed["unit"]) == ("failed", 0)
    assert task.sources[0].name in failed["error"]["message"]
    assert worker.hear() == {"kind": "free"}
    assert worker.ask({"texts": ["ab"]})["kind"] == "answer"


def test_a_configuration_that_does_not_work_is_a_message_and_the_end(
    worker: Worker, resolved: ResolvedBuild, folder: Folder
) -> None:
    failed = worker.ask(configuration(resolved, folder, kind="unheard of"))
    assert (failed["kind"], failed["unit"]) == ("failed", None)
    assert failed["error"]["message"]
    assert worker.process.wait(timeout=60) == 0


def test_the_end_of_the_parent_is_the_end_of_the_worker(
    worker: Worker, resolved: ResolvedBuild, folder: Folder
) -> None:
    assert worker.ask(configuration(resolved, folder)) == {"kind": "free"}
    worker.link.close()
    assert worker.process.wait(timeout=60) == 0
    assert worker.errors.read() == ""
