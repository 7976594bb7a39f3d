"""Workers that a fork server forks: heard, replaced when they die, gone when they are stopped."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.executors import forkserver
from tokenmill.executors.forkserver import WorkerProcesses

_GONE = (FileNotFoundError, ProcessLookupError)  # before its file was opened, or before it was read


@pytest.fixture
def processes() -> Iterator[WorkerProcesses]:
    found = WorkerProcesses(2)
    yield found
    found.stop()


def children(process: int) -> list[int]:
    try:
        return [int(name) for name in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except _GONE:
        return []


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except _GONE:
        return False


def wait_until_gone(*processes: int) -> None:
    """A process has closed its files, which we hear, a moment before it is no more."""
    deadline = time.monotonic() + 60
    while any(is_alive(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_for_workers(count: int) -> tuple[int, list[int]]:
    """The fork server among our children, and its workers as soon as there are so many."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in children(os.getpid()):
            if len(workers := children(child)) == count:
                return child, workers
        time.sleep(0.01)
    raise AssertionError("no workers")


def test_a_worker_that_dies_is_told_of_by_its_signal_and_replaced(processes: WorkerProcesses) -> None:
    leader, workers = wait_for_workers(2)
    os.kill(workers[0], signal.SIGKILL)
    ((_, message),) = processes.receive()
    assert message["error"]["message"] == "a worker was killed by signal 9, probably because memory ran out"
    again, others = wait_for_workers(2)
    assert again == leader
    assert workers[1] in others
    assert workers[0] not in others


def test_a_worker_that_cannot_read_its_briefing_says_so(processes: WorkerProcesses) -> None:
    processes.configure({"path": sys.path, "work": {"root": 7}})
    ((_, message), *_) = processes.receive()
    assert message["kind"] == "failed"
    assert message["error"]["message"] == "work.root: expected str, got int"


def test_a_dead_fork_server_is_replaced_when_a_worker_is_needed(processes: WorkerProcesses) -> None:
    leader, workers = wait_for_workers(2)
    os.kill(leader, signal.SIGKILL)
    while is_alive(leader):
        time.sleep(0.01)
    os.kill(workers[0], signal.SIGKILL)
    ((_, message),) = processes.receive()
    assert message["error"]["message"] == "a worker died"
    again, (other,) = wait_for_workers(1)
    assert again != leader
    assert other not in workers
    processes.stop()
    wait_until_gone(leader, again, *workers, other)


def test_a_fork_server_has_one_thread_to_fork_from(processes: WorkerProcesses) -> None:
    leader, workers = wait_for_workers(2)
    threads = [Path(f"/proc/{leader}/task/{name}/comm").read_text() for name in os.listdir(f"/proc/{leader}/task")]
    assert len(threads) == 1, threads
    processes.stop()
    wait_until_gone(leader, *workers)


def test_a_fork_server_that_was_called_in_is_taken_or_sent_home() -> None:
    before = children(os.getpid())
    forkserver.start_early()
    (called,) = set(children(os.getpid())) - set(before)
    processes = WorkerProcesses(1)
    assert set(children(os.getpid())) - set(before) == {called}
    processes.stop()
    forkserver.start_early("gpt2")
    forkserver.stop_unused()
    assert children(os.getpid()) == before


def test_a_fork_server_that_does_not_hear_any_more_is_dead_before_its_process_is() -> None:
    one = forkserver.ForkServer()
    os.kill(one._process.pid, signal.SIGSTOP)  # as if it were being torn down: there, and of no use
    one._line.shutdown(socket.SHUT_RDWR)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one.start_worker(theirs)
    assert not one.is_alive
    one.close()
