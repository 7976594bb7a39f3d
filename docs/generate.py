"""Write docs/cli.md: what every command says of itself. Run by `make docs`; a test fails when it is stale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.main import get_command

from tokenmill.cli.commands import app

COMMANDS = tuple(get_command(app).commands)
PAGE = Path(__file__).with_name("cli.md")


def help_of(command: str) -> str:
    environment = {**os.environ, "COLUMNS": "110", "TERM": "dumb", "NO_COLOR": "1"}
    code = "from tokenmill.cli.commands import app; app(prog_name='tokenmill')"
    done = subprocess.run(
        [sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, check=True, env=environment
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def page() -> str:
    parts = ["# The command line\n\nMade by `make docs` from the commands themselves.\n"]
    parts += [f"## tokenmill {command}\n\n```\n{help_of(command)}\n```\n" for command in COMMANDS]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
