"""Threads that are waited for by a caller whom a signal may interrupt anywhere."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from tokenmill.errors import Interrupted
from tokenmill.threads import ByteTally, as_done


def test_every_item_comes_with_its_result() -> None:
    found = dict(done for done in as_done(lambda item: item * item, range(1000), 3) if done is not None)
    assert found == {item: item * item for item in range(1000)}
    assert list(as_done(str, (), 3)) == []


def test_the_first_error_stops_the_others() -> None:
    stopped = threading.Event()
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ValueError("of item 1")
        stopped.wait(10)

    with pytest.raises(ValueError, match="of item 1"):
        list(as_done(work, range(100), 2, stop=stopped.set))
    assert stopped.is_set()
    assert len(begun) < 100


def test_an_interrupt_is_not_held_up_by_work_that_does_not_stop() -> None:
    free = threading.Event()
    begin = time.monotonic()

    def work(_: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        free.wait(60)

    with pytest.raises(KeyboardInterrupt), contextlib.closing(as_done(work, range(100), 1)) as results:
        list(results)
    assert time.monotonic() - begin < 10
    free.set()


def test_a_tally_tells_how_far_its_threads_are_and_stops_them() -> None:
    told: list[dict[str, object]] = []
    tally = ByteTally(told.append)
    tally.start(100, workers=2)
    tally.add(30, moved=False)
    tally.add(70)
    tally.show(is_last=True, workers=2)
    assert told[0] == {"kind": "start", "bytes": 0, "total_bytes": 100, "workers": 2}
    assert (told[-1]["bytes"], told[-1]["seconds_left"], told[-1]["workers"]) == (100, 0.0, 2)
    tally.stop()
    with pytest.raises(Interrupted):
        tally.add(1)
    with pytest.raises(Interrupted):
        tally.check()
