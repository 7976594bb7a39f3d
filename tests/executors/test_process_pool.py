"""What a pool is asked before the work, and who answers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from test_forkserver import wait_for_workers

from tokenmill.build.preflight import check_parity_of_plan, make_request
from tokenmill.build.resolve import ResolvedBuild, make_config, resolve_build
from tokenmill.errors import BuildError
from tokenmill.executors.forkserver import Message, WorkerProcesses
from tokenmill.executors.in_process import InProcessProber
from tokenmill.executors.process_pool import ProcessPool
from tokenmill.recipe import make_recipe
from tokenmill.storage.local import Folder
from tokenmill.tokenizers.engine import open_engine

WORKERS = 2
Tell = Callable[[Connection, Message], None]


@pytest.fixture
def setup(corpus: Path) -> ResolvedBuild:
    return resolve_build(make_recipe({"sources": (str(corpus),), "tokenizer": "gpt2"}))


@pytest.fixture
def processes() -> Iterator[WorkerProcesses]:
    found = WorkerProcesses(WORKERS)
    yield found
    found.stop()


def killing(send: Tell, question: str, times: int) -> Tell:
    """Whoever is asked that dies of it, and the others with it, so many times."""
    left = [times]

    def told(link: Connection, message: Message) -> None:
        if question in message and left[0]:
            left[0] -= 1
            for worker in wait_for_workers(WORKERS)[1]:
                os.kill(worker, signal.SIGKILL)
        send(link, message)

    return told


@pytest.mark.parametrize("question", ["request", "texts"])
def test_a_question_that_its_worker_dies_of_is_put_to_another(
    setup: ResolvedBuild, processes: WorkerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    work, request = make_config(setup, scratch=None), make_request(setup.plan)
    pool = ProcessPool(processes, Folder(str(tmp_path)), work, setup.spec)
    monkeypatch.setattr(processes, "send", killing(processes.send, question, times=1))
    found = check_parity_of_plan(request, work, setup.spec, pool)
    alone = check_parity_of_plan(request, work, setup.spec, InProcessProber(work, open_engine(setup.spec)))
    assert found.parity == alone.parity
    assert found.survey.seen == alone.survey.seen


def test_a_question_that_everyone_dies_of_is_an_error(
    setup: ResolvedBuild, processes: WorkerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ProcessPool(processes, Folder(str(tmp_path)), make_config(setup, scratch=None), setup.spec)
    monkeypatch.setattr(processes, "send", killing(processes.send, "texts", times=99))
    with pytest.raises(BuildError, match="killed by signal 9"):
        pool.encode(["a text"])
