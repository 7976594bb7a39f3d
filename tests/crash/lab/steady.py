"""Thousands of runs in one process, each as if it were a process of its own on a machine that may boot anew.

All that touches the output is done for real each time. What is the same every time is remembered: the sources (see
`swift`), the recipe, the tokenizer, the encoding of provenance, the parsing of records.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from lab import world
from lab.parquets import remembered_parquets
from lab.swift import swift
from tokenmill import records, resources
from tokenmill.storage import locks
from tokenmill.tokenizers import engine as tokenizers_engine


class Boots:
    """How many times the machine was started.

    A lock that a killed run left names this process, but a heart that beats in it no more, so the next run sees at
    once that its holder is dead, as it sees of other processes of this machine. A power cut ends the boot as well, and
    with it all that ran. Only of a lock with damaged bytes can nobody tell whose it was; then a run waits half a
    minute whether it is touched, here without the half minute.
    """

    def __init__(self) -> None:
        self.count = 1

    def add(self) -> None:
        self.count += 1

    def machine(self) -> str:
        return f"host.{self.count}.numbers"


class Hearts:
    """What `threading` is to the lock: hearts that are there while their lock is held, and never come to beat.

    A run is over long before the first beat; to start a thread for it and to wait for its end only takes time.
    """

    Event = threading.Event

    def __init__(self) -> None:
        self._alive: list[Hearts.Heart] = []

    def Thread(self, *, name: str, **_: object) -> Hearts.Heart:
        return Hearts.Heart(name, self._alive)

    def enumerate(self) -> list[Hearts.Heart]:
        return list(self._alive)

    @dataclass(slots=True, eq=False)
    class Heart:
        name: str
        alive: list[Hearts.Heart] = field(repr=False)

        def start(self) -> None:
            self.alive.append(self)

        def join(self) -> None:
            self.alive.remove(self)


@contextlib.contextmanager
def steady() -> Iterator[Boots]:
    """Within it, runs are quick, and the machine is the one that the boots tell of."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    boots = Boots()
    made = _remembered(world.make_recipe, lambda fields, **_: repr(fields))
    opened = _remembered(tokenizers_engine.open_engine, lambda spec: spec.fingerprint)
    unsealed = _remembered(records.unseal, lambda kind, data, **_: (kind, data))
    with (
        swift(),
        remembered_parquets(),
        patch.object(world, "make_recipe", made),
        patch.object(tokenizers_engine, "open_engine", opened),
        patch.object(records, "unseal", unsealed),
        patch.object(resources, "resident_bytes", lambda: 0),
        patch.object(locks, "_machine", boots.machine),
        patch.object(locks, "_started", _remembered(locks._started, lambda process: process)),
        patch.object(locks, "threading", Hearts()),
        patch.object(locks, "time", SimpleNamespace(sleep=lambda seconds: None, time=lambda: 0.0)),
    ):
        yield boots


def _remembered(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    found: dict[Any, Any] = {}

    @functools.wraps(function)
    def ask(*given: Any, **more: Any) -> Any:
        asked = key(*given, **more)
        if asked not in found:
            found[asked] = function(*given, **more)
        return found[asked]

    return ask
