"""Signal handling: the first signal interrupts a command, and a thread ensures that it ends in time.

    signal -> KeyboardInterrupt in the main thread -> what is done is noted, workers are stopped -> exit code 130
           -> a byte to the thread                 -> GRACE_SECONDS later: exit code 130, wherever the rest is

The interrupt may be raised where Python code holds a lock, it may be swallowed, and it comes late while the main thread
waits in a library. So the thread does not rely on it. A command may end at any moment: files are complete or have a
temporary name.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import time
from typing import NoReturn

GRACE_SECONDS = 1.5
# The exit code after an interrupt, as shells have it; that of `errors.Interrupted`, which `--version` need not load.
INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTION = "Interrupted. Run the same command to resume.\n"
_SHOW_CURSOR = "\x1b[?25h"
_is_stopping = False


def handle_signals() -> None:
    """Let a signal end the command. One that was ignored from the start, as under nohup, stays ignored."""
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    _thread.start_new_thread(_end_in_time, (receiver,))
    sys.unraisablehook = _report_unraisable
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def is_stopping() -> bool:
    """Whether a signal has come. What fails from then on may do so because of it: a library that was half loaded."""
    return _is_stopping


def _interrupt(*_: object) -> None:
    """Ignore the second signal: it would disturb the cleaning up that the first one began."""
    global _is_stopping  # noqa: PLW0603 - a signal is of the process
    if not _is_stopping:
        _is_stopping = True
        raise KeyboardInterrupt


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """An interrupt that came where nothing can be raised, as in a callback of an import, is left to the thread."""
    if not (_is_stopping and isinstance(unraisable.exc_value, KeyboardInterrupt)):
        sys.__unraisablehook__(unraisable)


def _end_in_time(receiver: int) -> NoReturn:
    while os.read(receiver, 1)[0] not in SIGNALS:
        pass
    time.sleep(GRACE_SECONDS)
    with contextlib.suppress(OSError):
        os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}{INTERRUPTION}".encode())
    os._exit(INTERRUPTED)
