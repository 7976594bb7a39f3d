"""Runs on each host of `prepare --hosts`, over SSH: starts Ray there, and ends it when the launcher is gone.

    launcher   --- request, then a beat every second --->   agent   --- starts --->   ray start --block
               <--------- up | ended, with why ----------           --- kills --->   it and all that it started

The agent's standard input is its life line: if it ends, or is silent for SILENT_SECONDS, the launcher was killed, cut
off or interrupted, and the agent kills every process below itself and removes Ray's folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any

BEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0
# What `ray start` prints when a node has joined.
_STARTED = "Ray runtime started."
_TAIL_LINES = 12
_SUBREAPER = 36
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def main() -> None:
    """Serve one request, of standard input, to its end."""
    request = json.loads(sys.stdin.buffer.readline())
    # Ray's processes whose parents have ended become our children, so that none of them is missed at the end.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    for number in _STOPS:
        signal.signal(number, lambda *_: _end())
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *request["arguments"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **request["environment"], "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        text=True,
        errors="replace",
    )
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    reader = threading.Thread(target=_read, args=(process, tail), daemon=True)
    reader.start()
    heard = time.monotonic()
    while process.poll() is None and time.monotonic() - heard < SILENT_SECONDS:
        if select.select([0], [], [], BEAT_SECONDS)[0]:
            if not os.read(0, 4096):
                break
            heard = time.monotonic()
    else:
        reader.join(BEAT_SECONDS)
        _say({"kind": "ended", "log": list(tail)})
        _end()
    kill_below(os.getpid())
    if request["place"]:
        _remove(request["place"])
    _end()


def _read(process: subprocess.Popen[str], tail: deque[str]) -> None:
    assert process.stdout is not None, "it is a pipe"
    for line in process.stdout:
        if _STARTED in line:
            _say({"kind": "up"})
        if line.strip():
            tail.append(line.strip())


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone
        os.write(1, f"{json.dumps(message)}\n".encode())


def _remove(place: str) -> None:
    """Remove Ray's folder of sockets and logs. After an error of Ray it is kept."""
    from tokenmill.errors import TokenmillError
    from tokenmill.storage.local import Folder

    with contextlib.suppress(TokenmillError, OSError):
        Folder(os.path.dirname(place)).remove_tree(os.path.basename(place))


def _end() -> None:
    kill_below(os.getpid())
    os._exit(0)


def kill_below(root: int) -> None:
    """Kill all processes below one. What they start meanwhile is found by looking again."""
    while found := _below(root):
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # take in those that have ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _below(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    parents[int(name)] = int(fields[1])
    kin, more = set[int](), {root}
    while more:
        kin |= more
        more = {process for process, parent in parents.items() if parent in kin} - kin
    return sorted(kin - {root})


if __name__ == "__main__":
    main()
