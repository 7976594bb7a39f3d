"""The line of progress: it fits into any terminal, and what is of least use goes first."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from conftest import Gate, command, write_jsonl
from tokenmill.cli.progress import Event, ProgressDisplay, fitting, make_bar, pieces

EVENT: Event = {
    "kind": "progress", "bytes": 482_000_000, "total_bytes": 1_280_000_000, "units": 15, "total_units": 40,
    "documents": 94_500, "tokens": 10**8, "workers": 2, "bytes_per_second": 133_000_000,
    "tokens_per_second": 62_700_000, "seconds_left": 6.0,
}  # fmt: skip


def line(width: int, event: Event = EVENT) -> str:
    console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    bar = make_bar(console)
    found = {"label": "encoding", **pieces(event)}
    bar.add_task("", completed=event["bytes"], total=max(event["total_bytes"], 1), pieces=found)
    with console.capture() as captured:
        console.print(*bar.get_renderables())
    (found,) = captured.get().splitlines()
    return found.rstrip()


def test_a_wide_terminal_shows_everything() -> None:
    assert line(130).endswith("37%  482 MB of 1.28 GB  94.5K documents  62.7M tokens/s  133 MB/s  ETA 6s  2 workers")
    assert line(130).startswith("encoding  ━━━━━━━━━")


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (110, "37%  482 MB of 1.28 GB  94.5K documents  62.7M tokens/s  133 MB/s  ETA 6s"),
        (90, "37%  482 MB of 1.28 GB  62.7M tokens/s  133 MB/s  ETA 6s"),
        (80, "37%  482 MB of 1.28 GB  62.7M tokens/s  133 MB/s  ETA 6s"),
        (50, "37%  482 MB of 1.28 GB  133 MB/s  ETA 6s"),
        (30, "37%  133 MB/s  ETA 6s"),
        (15, "37%  ETA 6s"),
        (5, "37%"),
    ],
)
def test_what_is_of_least_use_is_left_out_first(width: int, shown: str) -> None:
    assert re.sub(r"^(encoding)?[ ━╸]*", "", line(width)) == shown
    assert ("━" in line(width)) == (width >= 80)


def test_the_line_is_never_wider_than_the_terminal() -> None:
    for width in range(1, 140):
        assert len(line(width)) <= width
        if width >= 4:
            assert sum(map(len, fitting(pieces(EVENT), width).values())) <= width


def test_a_start_and_what_is_only_moved_are_shown_as_far_as_they_go() -> None:
    start = {"kind": "start", "bytes": 0, "total_bytes": 0}
    assert re.sub(" +", " ", line(60, start)) == "encoding 0% 0 B of 0 B"
    moved = {name: EVENT[name] for name in ("bytes", "total_bytes", "bytes_per_second", "seconds_left", "workers")}
    assert line(90, moved).endswith("37%  482 MB of 1.28 GB  133 MB/s  ETA 6s  2 workers")


def test_hosts_of_a_cluster_are_shown_each_or_the_slowest_and_the_fastest() -> None:
    hosts = {f"node{n}": {"units": n, "bytes_per_second": n * 10_000_000} for n in range(1, 4)}
    shown = line(80, {**EVENT, "hosts": hosts})
    assert re.sub(r"^(encoding)?[ ━╸]*", "", shown) == (
        "37%  133 MB/s  ETA 6s  node1 10.0 MB/s, node2 20.0 MB/s, node3 30.0 MB/s"
    )
    hosts |= {f"node{n}": {"units": n, "bytes_per_second": n * 10_000_000} for n in range(4, 30)}
    assert pieces({**EVENT, "hosts": hosts})["hosts"] == "29 hosts, 10.0 MB/s (node1) to 290 MB/s (node29)"


def test_elsewhere_than_on_a_terminal_a_line_now_and_then_says_what_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = {name: EVENT[name] for name in ("kind", "bytes", "total_bytes")}
    with ProgressDisplay("encoding") as watch:
        watch(EVENT)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr("tokenmill.cli.progress.LINE_SECONDS", 0.0)
        watch(EVENT)
        watch(exported)
    assert capsys.readouterr().err.splitlines() == [
        "encoding   37%  482 MB of 1.28 GB  94.5K documents  62.7M tokens/s  133 MB/s  ETA 6s  2 workers",
        "exporting   37%  482 MB of 1.28 GB",
    ]


def test_a_terminal_that_is_resized_gets_a_line_that_fits(tmp_path: Path, gate: Gate) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["some text " * 1000, Gate.text])
    ours, theirs = pty.openpty()
    resize(ours, 80)
    build = command("prepare", tmp_path / "a.jsonl", "-o", tmp_path / "out", "-j", 1, *gate.options)
    environment = {**gate.environment, "TERM": "xterm"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(build, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    lines = drawn_on(ours)
    wide = next(text for text in lines if "%" in text)
    resize(ours, 30)
    narrow = next(text for text in lines if "%" in text and "of" not in text)
    gate.open()
    last = [text for text in lines if "%" in text][-1]
    assert process.wait(timeout=60) == 0
    assert 30 < len(wide) <= 80
    for text in (narrow, last):
        assert re.fullmatch(r" *\d+%  \S+ \w?B/s  ETA \S+", text)
        assert len(text) <= 30
    assert last.startswith("100%")


def resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def drawn_on(terminal: int) -> Iterator[str]:
    """What a terminal is told, line by line, until it is closed; a line that is drawn again counts as another."""
    held = ""
    while True:
        try:
            held += os.read(terminal, 4096).decode()
        except OSError:  # nobody has the other end any more
            return
        *whole, held = re.split(r"[\r\n]+", re.sub(r"\x1b\[\??[0-9;]*[a-zA-Z]", "", held))
        yield from (text.rstrip() for text in whole)
