"""The progress display: one line on a terminal, elsewhere a line every half minute.

    encoding  ━━━━━━━━━━━━━━━━  37%  482 MB of 1.28 GB  62.7M tokens/s  133 MB/s  ETA 6s  2 workers

The columns are those of rich. What a terminal has no room for is left out, the least useful first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tokenmill.arguments import Event
from tokenmill.cli.options import for_shell
from tokenmill.cli.output import printable
from tokenmill.sizes import counted, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LINE_SECONDS = 30.0

_BAR_CELLS = (24, 16, 8)
_GAP = "  "
# Columns in their order; and by their use, for a terminal that has no room for all.
_IN_ORDER = ("label", "bar", "share", "bytes", "documents", "tokens", "speed", "left", "workers", "hosts")
_BY_USE = ("share", "left", "speed", "hosts", "bytes", "label", "tokens", "bar", "documents", "workers")
# Hosts that are shown each by itself.
_FEW_HOSTS = 4


class ProgressDisplay:
    """Shows the events of a command on standard error. `label` says what it does."""

    def __init__(self, label: str, *, quiet: bool = False, verbose: bool = False, progress: bool = True) -> None:
        self._label = label
        self._quiet = quiet
        self._verbose = verbose
        self._bar: Progress | None = None
        self._event: Event = {}
        self._wants_bar = progress and not quiet and sys.stderr.isatty()
        self._wants_lines = progress and not quiet and not sys.stderr.isatty()
        self._last_line = time.monotonic()
        self._node = ""  # where nodes build parts of their own, the one that reports
        self._failures: set[str] = set()

    @classmethod
    def of(cls, options: Mapping[str, Any], label: str) -> ProgressDisplay:
        """What the options of a command ask for."""
        verbose = options.get("verbose", False)
        return cls(label, quiet=options["quiet"], verbose=verbose, progress=not options["no_progress"])

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_bar()

    @property
    def tokens_per_second(self) -> int:
        """Of all that a build has encoded in this run; 0 if it has encoded nothing."""
        return int(self._event.get("tokens_per_second", 0))

    def __call__(self, event: Event) -> None:
        self._node = event.get("node", "")
        show: Callable[[Event], None] | None = getattr(self, f"_on_{event['kind']}", None)
        if show is not None:
            show(event)

    def _on_start(self, event: Event) -> None:
        if self._wants_bar:
            self._event = event
            self._start_bar()

    def _on_progress(self, event: Event) -> None:
        self._event = event
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.update(
                    task, completed=event["bytes"], total=max(event["total_bytes"], 1), pieces=self._pieces()
                )
        if self._wants_lines and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            print(join_pieces(self._pieces()), file=sys.stderr, flush=True)

    def _on_resume(self, event: Event) -> None:
        unchecked = event["units"] - event["trusted"]
        checks = f"; {unchecked:,} are hashed again first, because the last run was cut off" if unchecked else ""
        self._say(f"resuming: {event['units']:,} of {counted(event['total_units'], 'unit')} are done{checks}")

    def _on_note(self, event: Event) -> None:
        self._say(event["message"])

    _on_waiting = _on_note

    def _on_parity(self, event: Event) -> None:
        self._say(
            f"parity: {counted(event['documents'], 'document')} ({format_bytes(event['bytes'])}) of your sources: "
            f"the same tokens with {event['reference']}",
            only_verbose=True,
        )

    def _on_retry(self, event: Event) -> None:
        self._say(f"unit {event['unit']} is retried: {event['error']}")

    def _on_failed(self, event: Event) -> None:
        # A source that is gone fails each of its units for the same reason.
        self._say(f"unit {event['unit']} failed: {event['error']}", only_verbose=event["error"] in self._failures)
        self._failures.add(event["error"])

    def _on_done(self, event: Event) -> None:
        self._say(f"unit {event['unit']} done", only_verbose=True)

    def _on_commit(self, event: Event) -> None:
        self._end_bar()

    def _say(self, text: str, *, only_verbose: bool = False) -> None:
        if self._quiet or (only_verbose and not self._verbose):
            return
        text = for_shell(f"{self._node}: {text}" if self._node else text)
        if self._bar is not None:
            self._bar.console.print(printable(text), markup=False, highlight=False)
        else:
            print(printable(text), file=sys.stderr, flush=True)

    def _pieces(self) -> dict[str, str]:
        # With `--layout`, an export follows the build.
        is_export = self._label == "encoding" and "documents" not in self._event
        return {"label": "exporting" if is_export else self._label, **pieces(self._event)}

    def _state(self) -> dict[str, Any]:
        total = max(self._event["total_bytes"], 1)
        return {"completed": self._event["bytes"], "total": total, "pieces": self._pieces()}

    def _start_bar(self) -> None:
        from rich.console import Console

        self._bar = make_bar(Console(stderr=True))
        self._bar.add_task(
            "", completed=self._event["bytes"], total=max(self._event["total_bytes"], 1), pieces=self._pieces()
        )
        self._bar.start()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def pieces(event: Event) -> dict[str, str]:
    """An event as columns. Only builds have documents and tokens; a start has only the total."""
    done, total = event["bytes"], event["total_bytes"]
    found = {
        "share": f"{100 * done // max(total, 1):3d}%",
        "bytes": f"{format_bytes(done)} of {format_bytes(total)}",
    }
    if "tokens_per_second" in event:
        found["documents"] = f"{format_count(event['documents'])} documents"
        found["tokens"] = f"{format_count(event['tokens_per_second'])} tokens/s"
    if "seconds_left" in event:
        left = event["seconds_left"]
        found["speed"] = f"{format_bytes(event['bytes_per_second'])}/s"
        found["left"] = f"ETA {format_seconds(left) if left is not None else '?'}"
        found["workers"] = counted(event["workers"], "worker")
    if "hosts" in event:
        found["hosts"] = _hosts({name: host["bytes_per_second"] for name, host in event["hosts"].items()})
    return found


def _hosts(rates: Mapping[str, int]) -> str:
    """How fast each host is, or the slowest and the fastest of many."""
    if len(rates) <= _FEW_HOSTS:
        return ", ".join(f"{host} {format_bytes(rate)}/s" for host, rate in rates.items())
    slowest, fastest = (choose(rates, key=rates.__getitem__) for choose in (min, max))
    ends = " to ".join(f"{format_bytes(rates[host])}/s ({host})" for host in (slowest, fastest))
    return f"{len(rates)} hosts, {ends}"


def join_pieces(found: Mapping[str, str]) -> str:
    return _GAP.join(found[name] for name in _IN_ORDER if name in found)


def fitting(found: Mapping[str, str], width: int) -> dict[str, str]:
    """The most useful columns that fit into a width; at least one."""
    chosen: dict[str, str] = {}
    room = width + len(_GAP)
    for name in (name for name in _BY_USE if name in found):
        room -= len(found[name]) + len(_GAP)
        if chosen and room < 0:
            break
        chosen[name] = found[name]
    return chosen


def make_bar(console: Console) -> Progress:
    """rich's progress, with the columns that fit into the terminal as wide as it is at the moment."""
    from rich.progress import BarColumn, Progress
    from rich.table import Table
    from rich.text import Text

    class FittingProgress(Progress):
        def get_renderables(self) -> Iterator[Table]:
            for task in self.tasks:
                found = task.fields["pieces"]
                for cells in _BAR_CELLS:
                    chosen = fitting({**found, "bar": " " * cells}, self.console.width)
                    if "bar" in chosen:
                        break
                bar = BarColumn(bar_width=cells)
                line = Table.grid(padding=(0, len(_GAP), 0, 0))
                line.add_row(
                    *(
                        bar(task) if name == "bar" else Text(chosen[name], no_wrap=True)
                        for name in _IN_ORDER
                        if name in chosen
                    )
                )
                yield line

    return FittingProgress(console=console)
