"""The command line: parse, call the library, print. Whatever a command does, one call does."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import NoReturn

from tokenmill.cli.signals import STOPPED, heed_signals
from tokenmill.errors import INTERRUPTED


def main() -> None:
    """The `tokenmill` command."""
    if sys.argv[1:] == ["--version"]:
        # Scripts ask for it; they need not wait for the parser to load.
        from tokenmill import __version__

        print(f"tokenmill {__version__}")
        return
    _have_streams()
    try:
        heed_signals()
        # No command does linear algebra; without this numpy starts a thread for each core when it loads.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # What a command loads stays: looking through it for garbage again and again makes loading slower.
        gc.set_threshold(100_000)
        with _foreman_for(sys.argv[1:]):
            from tokenmill.cli.commands import run

            code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
        with contextlib.suppress(OSError):
            sys.stderr.write(STOPPED)
    _leave(code)


def _have_streams() -> None:
    """Open those that whoever started us has closed: the next file would get the number of one, and be taken for it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # where the output is plain ASCII, names and texts may be not
            stream.reconfigure(errors="backslashreplace")


def _leave(code: int) -> NoReturn:
    """End at once: what is done is on disk, and taking the interpreter apart would take a tenth of a second."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads on, or the disk that it went to is full
        code = code or 1
    os._exit(code)


@contextlib.contextmanager
def _foreman_for(arguments: list[str]) -> Iterator[None]:
    """Workers load as much as this command does: where there are cores for both, both begin at once."""
    from tokenmill.resources import num_cores

    line = " ".join(arguments)
    none = re.search(r"--help|--executor[ =]ray", line)
    alone = re.search(r"(-j|--workers)[ =]?1( |$)", line) and "://" not in line
    if arguments[:1] != ["prepare"] or none or alone or num_cores() == 1:
        yield
        return
    from tokenmill.executors.forkserver import start_early, stop_unused

    other = re.search(r"--config|--tokenizer(?![ =]gpt2( |$))", line)
    start_early(tokenizer="" if other else "gpt2")
    try:
        yield
    finally:
        stop_unused()
