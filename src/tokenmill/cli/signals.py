"""How a command ends when it is told to: the first signal interrupts it, and a thread sees to it that it ends in time.

    signal -> KeyboardInterrupt in the main thread -> what is done is noted, workers are stopped -> exit code 130
           -> a byte to the thread                 -> GRACE_SECONDS later: exit code 130, wherever the rest is

The interrupt may be raised where Python code holds a lock, or be swallowed, or come late because the main thread waits
in a library: so it is not relied on. Any moment is good to end a command: files are whole or have a temp name.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import time
from typing import NoReturn

from tokenmill.errors import INTERRUPTED

GRACE_SECONDS = 1.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = "error: stopped\nhint: run the same command again to resume\n"
_SHOW_CURSOR = "\x1b[?25h"
_is_stopping = False


def heed_signals() -> None:
    """From now on a signal ends the command. One that whoever started it has ignored, like nohup, stays ignored."""
    heard, said = os.pipe()
    os.set_blocking(said, False)
    signal.set_wakeup_fd(said, warn_on_full_buffer=False)
    _thread.start_new_thread(_end_in_time, (heard,))
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def is_stopping() -> bool:
    """Whether a signal has come. What fails from then on may do so because of it: a library that was half loaded."""
    return _is_stopping


def _interrupt(*_: object) -> None:
    """The second signal adds nothing: it would only disturb what the first one has begun."""
    global _is_stopping  # noqa: PLW0603 - a signal is of the process
    if not _is_stopping:
        _is_stopping = True
        raise KeyboardInterrupt


def _end_in_time(heard: int) -> NoReturn:
    while os.read(heard, 1)[0] not in SIGNALS:
        pass
    time.sleep(GRACE_SECONDS)
    with contextlib.suppress(OSError):
        os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}{STOPPED}".encode())
    os._exit(INTERRUPTED)
