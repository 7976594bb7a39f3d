"""The entry point of the command: standard streams, signals, early start of workers, exit code.

Every command parses its options, makes one call of the library and prints the result: see commands.py.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import resource
import sys
from collections.abc import Iterator
from typing import NoReturn

from tokenmill.cli.signals import INTERRUPTED, INTERRUPTION, handle_signals


def main() -> None:
    """The `tokenmill` command."""
    if sys.argv[1:] == ["--version"]:
        # Scripts ask for it, and should not wait for the parser to load.
        from tokenmill import __version__

        print(f"tokenmill {__version__}")
        return
    _open_streams()
    try:
        handle_signals()
        # No command does linear algebra; without this numpy starts a thread for each core when it loads.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            # Arrow's own pool reserves a gigabyte of addresses, which `ulimit -v` counts as memory.
            os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
        # What a command loads stays, so collecting garbage meanwhile only makes loading slower.
        gc.set_threshold(100_000)
        with _early_workers(sys.argv[1:]):
            from tokenmill.cli.commands import run

            code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
        with contextlib.suppress(OSError):
            sys.stderr.write(INTERRUPTION)
    _leave(code)


def _open_streams() -> None:
    """Open standard streams that were closed: else the next file would get the number of one, and be taken for it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names and texts may not be ASCII
            stream.reconfigure(errors="backslashreplace")


def _leave(code: int) -> NoReturn:
    """Exit at once: everything is on disk, and a regular exit of the interpreter takes a tenth of a second."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # the reader has gone, or the output's disk is full
        code = code or 1
    os._exit(code)


@contextlib.contextmanager
def _early_workers(arguments: list[str]) -> Iterator[None]:
    """Let the fork server of a `prepare` load while this process does, where there are cores for both.

    The parser itself takes time to load, so this guesses from the words. A wrong guess costs time only.
    """
    from tokenmill.resources import has_addresses, num_cores

    line = " ".join(arguments)
    if arguments[:1] != ["prepare"] or _NO_WORKERS.search(line) or num_cores() == 1 or not has_addresses():
        yield
        return
    from tokenmill.executors.forkserver import start_early, stop_unused

    start_early(tokenizer="" if _OTHER_TOKENIZER.search(line) else "gpt2")
    try:
        yield
    finally:
        stop_unused()


_NO_WORKERS = re.compile(r"--help|--executor[ =]ray|--hosts|(-j|--workers)[ =]?1( |$)")
_OTHER_TOKENIZER = re.compile(r"--config|--tokenizer(?![ =]gpt2( |$))")
