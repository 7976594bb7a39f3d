"""Progress while a command runs: on a terminal one line that fits into it, elsewhere a line every half minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from tokenmill.arguments import Event
from tokenmill.cli.options import for_shell
from tokenmill.cli.output import printable
from tokenmill.sizes import counted, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table


LINE_SECONDS = 30.0

_BAR_CELLS = (24, 16, 8)
_GAP = "  "
# Pieces of the line in their order; and by their use, for a terminal that has no room for all.
_IN_ORDER = ("bar", "share", "bytes", "documents", "tokens", "speed", "left", "workers")
_BY_USE = ("share", "left", "speed", "bytes", "tokens", "bar", "documents", "workers")


class ProgressDisplay:
    """Shows the events of a build on standard error."""

    def __init__(self, *, quiet: bool, verbose: bool, progress: bool) -> None:
        self._quiet = quiet
        self._verbose = verbose
        self._live: Live | None = None
        self._event: Event = {}
        self._wants_live = progress and not quiet and sys.stderr.isatty()
        self._wants_lines = progress and not quiet and not sys.stderr.isatty()
        self._last_line = time.monotonic()
        self._node = ""  # who speaks, where nodes build parts of their own
        self._failures: set[str] = set()

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_live()

    @property
    def tokens_per_second(self) -> int:
        """Of all that a build has encoded in this run; 0 if it has encoded nothing."""
        return int(self._event.get("tokens_per_second", 0))

    def __call__(self, event: Event) -> None:
        kind = event["kind"]
        self._node = event.get("node", "")
        if kind == "progress":
            self._show_progress(event)
        elif kind == "start":
            if self._wants_live:
                self._start_live(event)
        elif kind == "resume":
            unchecked = event["units"] - event["trusted"]
            checks = f"; {unchecked:,} to be hashed again first, as the last run was cut off" if unchecked else ""
            self._say(f"going on: {event['units']:,} of {counted(event['total_units'], 'unit')} done{checks}")
        elif kind in ("note", "waiting"):
            self._say(event["message"])
        elif kind == "parity":
            self._say(
                f"parity: {counted(event['documents'], 'document')} ({format_bytes(event['bytes'])}) of your sources: "
                f"the same tokens with {event['reference']}",
                only_verbose=True,
            )
        elif kind == "retry":
            self._say(f"unit {event['unit']} is tried again: {event['error']}")
        elif kind == "failed":
            # A source that is gone fails each of its units for the same reason.
            self._say(f"unit {event['unit']} failed: {event['error']}", only_verbose=event["error"] in self._failures)
            self._failures.add(event["error"])
        elif kind == "done":
            self._say(f"unit {event['unit']} done", only_verbose=True)
        elif kind == "commit":
            self._end_live()

    def _say(self, text: str, *, only_verbose: bool = False) -> None:
        if self._quiet or (only_verbose and not self._verbose):
            return
        text = for_shell(f"{self._node}: {text}" if self._node else text)
        if self._live is not None:
            self._live.console.print(printable(text), markup=False, highlight=False)
        else:
            print(printable(text), file=sys.stderr, flush=True)

    def _show_progress(self, event: Event) -> None:
        self._event = event
        if self._wants_lines and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            print(join_pieces(pieces(event)), file=sys.stderr, flush=True)

    def _start_live(self, event: Event) -> None:
        from rich.console import Console
        from rich.live import Live

        self._event = event
        console = Console(stderr=True)
        # Drawn anew some times a second, for the width that the terminal has then.
        self._live = Live(get_renderable=lambda: drawn(self._event, console), console=console)
        self._live.start()

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def pieces(event: Event) -> dict[str, str]:
    """What an event tells, piece by piece. Only builds encode something, and a start tells how much there is alone."""
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
    return found


def join_pieces(found: Mapping[str, str]) -> str:
    return _GAP.join(found[name] for name in _IN_ORDER if name in found)


def fitting(found: Mapping[str, str], width: int) -> dict[str, str]:
    """The most useful pieces, as many as there is room for; one at least."""
    chosen: dict[str, str] = {}
    room = width + len(_GAP)
    for name in (name for name in _BY_USE if name in found):
        room -= len(found[name]) + len(_GAP)
        if chosen and room < 0:
            break
        chosen[name] = found[name]
    return chosen


def drawn(event: Event, console: Console) -> Table:
    """The line as a terminal shows it."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    for cells in _BAR_CELLS:
        found = fitting({**pieces(event), "bar": " " * cells}, console.width)
        if "bar" in found:
            break
    bar = [ProgressBar(max(event["total_bytes"], 1), event["bytes"], width=cells)] if found.pop("bar", None) else []
    line = Table.grid(padding=(0, len(_GAP), 0, 0))
    line.add_row(*bar, Text(join_pieces(found), no_wrap=True))
    return line
