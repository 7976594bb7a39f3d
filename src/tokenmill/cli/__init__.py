"""The command line: parse, call the library, print. Whatever a command does, one call does."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The `tokenmill` command."""
    if sys.argv[1:] == ["--version"]:
        # Scripts ask for it; they need not wait for the parser to load.
        from tokenmill import __version__

        print(f"tokenmill {__version__}")
        return
    # No command does linear algebra; without this numpy starts a thread for each core when it loads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from tokenmill.cli.app import run

    sys.exit(run())
