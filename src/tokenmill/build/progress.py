"""Progress of a build: its events, its totals, and their log in `.build/events.jsonl`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.arguments import Event, Watcher, progress_event
from tokenmill.sources.base import Unit
from tokenmill.storage.output import EventLog

LOG_SECONDS = 1.0
_COUNTS = ("documents", "tokens", "bytes")


@dataclass(slots=True)
class Tally:
    """Running totals, with the work of earlier runs apart. Bytes are planned bytes, out of `total_bytes`.

    Rates and the remaining time count the work of this run only. `hosts` has its bytes and units on each host.
    """

    total_bytes: int
    total_units: int
    workers: int
    done_bytes: int = 0
    done_units: int = 0
    bytes: int = 0
    documents: int = 0
    done_tokens: int = 0
    tokens: int = 0
    started: float = 0.0
    hosts: dict[str, Counter[str]] = field(default_factory=dict)

    def add_to_host(self, host: str, planned_bytes: int) -> None:
        """Count a unit that a host has done."""
        self.hosts.setdefault(host, Counter()).update(units=1, bytes=planned_bytes)

    def add(self, documents: int, tokens: int, planned_bytes: int) -> None:
        self.documents += documents
        self.tokens += tokens
        self.bytes += planned_bytes

    def add_kept(self, documents: int, tokens: int, planned_bytes: int) -> None:
        """Count work of an earlier run that was found intact."""
        self.documents += documents
        self.done_tokens += tokens
        self.done_bytes += planned_bytes
        if not self.bytes:  # hashing again is not work of this run
            self.started = time.monotonic()

    def snapshot(self) -> Event:
        seconds = max(time.monotonic() - self.started, 1e-6)
        hosts = {
            host: {"units": counts["units"], "bytes_per_second": round(counts["bytes"] / seconds)}
            for host, counts in sorted(self.hosts.items())
        }
        return progress_event(
            self.done_bytes + self.bytes,
            self.total_bytes,
            moved_bytes=self.bytes,
            seconds=seconds,
            units=self.done_units,
            total_units=self.total_units,
            documents=self.documents,
            tokens=self.done_tokens + self.tokens,
            workers=self.workers,
            tokens_per_second=round(self.tokens / seconds),
            **({"hosts": hosts} if hosts else {}),
        )


class Progress:
    """Passes events on to a watcher and to the log."""

    def __init__(self, watch: Watcher | None) -> None:
        self._watch = watch
        self._log: EventLog | None = None
        self._logged = 0.0
        self._counted: dict[int, tuple[int, int, int]] = {}  # of each unit that is running
        self._kept: set[int] = set()  # running units that an earlier run has done
        self.tally = Tally(total_bytes=0, total_units=0, workers=0)

    def log_to(self, log: EventLog) -> None:
        self._log = log

    def emit(self, kind: str, **fields: Any) -> None:
        """Emit an event that is worth a line."""
        event = {"kind": kind, **fields}
        if self._log is not None:
            self._log.add({"time": round(time.time(), 3), **event})
        if self._watch is not None:
            self._watch(event)

    def start(self, tally: Tally) -> None:
        self.tally = tally
        self.tally.started = time.monotonic()
        self.emit("start", **{key: value for key, value in tally.snapshot().items() if key != "kind"})

    def set_remaining(self, left: Sequence[Unit]) -> None:
        """Only these units are left: a token budget took more or less of the plan than expected."""
        self.tally.total_bytes = self.tally.done_bytes + self.tally.bytes + sum(unit.text_bytes for unit in left)
        self.tally.total_units = self.tally.done_units + len(left)
        self._show()

    def handle(self, message: Event) -> None:
        """Count a message of an executor, and emit progress."""
        if message["kind"] == "progress":
            if message.get("kept"):
                self._kept.add(message["unit"])
            self._count(message["unit"], *(message[name] for name in _COUNTS))
            if message.get("host"):  # an executor on several hosts reports a unit when it is done
                self.tally.add_to_host(message["host"], message["bytes"])
        else:
            counted = self._counted.pop(message["unit"], (0, 0, 0))
            if message["kind"] == "done":
                self.tally.done_units += 1
            else:  # the unit will be run again, or has failed
                self._adder(message["unit"])(*(-count for count in counted))
            self._kept.discard(message["unit"])
            self.emit(message["kind"], **{key: value for key, value in message.items() if key != "kind"})
        self._show()

    def _show(self) -> None:
        event = self.tally.snapshot()
        if self._log is not None and time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            self._log.add({"time": round(time.time(), 3), **event})
        if self._watch is not None:
            self._watch(event)

    def _count(self, unit: int, documents: int, tokens: int, planned_bytes: int) -> None:
        self._adder(unit)(documents, tokens, planned_bytes)
        before = self._counted.get(unit, (0, 0, 0))
        self._counted[unit] = (before[0] + documents, before[1] + tokens, before[2] + planned_bytes)

    def _adder(self, unit: int) -> Callable[[int, int, int], None]:
        return self.tally.add_kept if unit in self._kept else self.tally.add
