"""Secrets: real commands with secrets in their environment, their arguments and their exceptions.

Everything that a command prints, and every byte of every file that it leaves, is searched for them.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab_runner import Row

SECRET = "hunter2-3f9c1d77aa"
VARIABLES = (
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SESSION_TOKEN",
    "WANDB_API_KEY",
    "DB_PASSWORD",
)
TIMEOUT = 120
_FILTERS = f"""
import os
def explode(text):
    raise ValueError("cannot log in with " + os.environ["HF_TOKEN"])
def explode_with_url(text):
    raise OSError("GET https://bob:{SECRET}@example.com/x?sig={SECRET} failed")
def keep(text):
    return True
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A command and the exit codes that it may have."""

    arguments: tuple[str, ...]
    codes: tuple[int, ...]


def cases() -> list[Case]:
    """What a user may do with a secret near: `A` is a good source, `OUT` a finished dataset, `NEW` a new folder."""
    url = f"https://bob:{SECRET}@example.com/a.parquet?sig={SECRET}"
    bucket = f"s3://key:{SECRET}@bucket/out"
    new = ("-o", "NEW", "--tokenizer", "byte")
    return [
        Case(("prepare", "A", *new, "-v"), (0,)),
        Case(("prepare", "A", *new, "--json", "-j", "2"), (0,)),
        Case(("plan", "A", *new, "--json"), (0,)),
        Case(("verify", "OUT", "--source", "all", "--json"), (0,)),
        Case(("inspect", "OUT"), (0,)),
        Case(("repair", "OUT"), (0,)),
        Case(("prepare", url, *new, "-v"), (2,)),
        Case(("plan", url, *new, "-v"), (2,)),
        Case(("prepare", f"missing.jsonl?sig={SECRET}", *new, "-v"), (2,)),
        Case(("prepare", "A", "-o", bucket, "--tokenizer", "byte", "-v"), (2,)),
        Case(("prepare", "A", *new, "--scratch", bucket), (2,)),
        Case(("verify", bucket), (2,)),
        Case(("repair", bucket), (2,)),
        Case(("inspect", bucket), (2,)),
        Case(("prepare", "A", "-o", "NEW", "--tokenizer", f"https://bob:{SECRET}@example.com/t.json"), (2,)),
        Case(("prepare", "A", "-o", "NEW", "--tokenizer", f"org/name?token={SECRET}", "-v"), (2,)),
        Case(("prepare", "A", "-o", "NEW", "--tokenizer", "org/private", "-v"), (2,)),
        Case(("prepare", "A", *new, "--filter", "filters:explode", "-v"), (2,)),
        Case(("prepare", "A", *new, "--filter", "filters:explode", "-v", "-j", "2"), (2,)),
        Case(("prepare", "A", *new, "--filter", "filters:explode_with_url", "-v"), (2,)),
        Case(("prepare", "A", *new, "--filter", "filters:explode_with_url", "--json", "-j", "2"), (2,)),
        Case(("prepare", "A", *new, "--filter", "filters:keep", "-v"), (0,)),
    ]


def leaks(chosen: Sequence[Case] | None = None) -> Row:
    """Run the commands one by one and look for secrets in what they left."""
    wrong: list[str] = []
    hangs = 0
    tried = list(cases() if chosen is None else chosen)
    with tempfile.TemporaryDirectory() as folder, _hub() as endpoint:
        root = Path(folder)
        (root / "a.jsonl").write_text('{"text": "some text"}\n' * 50)
        (root / "filters.py").write_text(_FILTERS)
        environment = {
            **os.environ,
            **dict.fromkeys(VARIABLES, SECRET),
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(root / "hub"),
            "PYTHONPATH": str(root),
            "DATASET_NUM_PROC": "1",
            "TMPDIR": str(root / "tmp"),
        }
        (root / "tmp").mkdir()
        # What came before the commands holds the secret in its own right.
        ours = {root / "filters.py"}
        _run(root, Case(("prepare", "A", "-o", "OUT", "--tokenizer", "byte"), (0,)), environment, "first")
        for number, case in enumerate(tried):
            try:
                done = _run(root, case, environment, f"new-{number}")
            except subprocess.TimeoutExpired:
                hangs += 1
                continue
            found = [name for name, text in (("stdout", done.stdout), ("stderr", done.stderr)) if SECRET in text]
            found += [str(file.relative_to(root)) for file in _files(root) if file not in ours and _holds(file)]
            if done.returncode not in case.codes or found:
                wrong.append(f"{' '.join(case.arguments)}: exit code {done.returncode}, the secret is in {found}")
    return Row(fault="secrets in environment, URLs and exceptions", tried=len(tried), wrong=tuple(wrong), hangs=hangs)


def _run(root: Path, case: Case, environment: dict[str, str], new: str) -> subprocess.CompletedProcess[str]:
    names = {"A": "a.jsonl", "OUT": "out", "NEW": new}
    arguments = [names.get(argument, argument) for argument in case.arguments]
    return subprocess.run(
        [sys.executable, "-c", "from tokenmill.cli.main import main; main()", *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def _files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _holds(file: Path) -> bool:
    return SECRET.encode() in file.read_bytes() or SECRET in file.name


@contextlib.contextmanager
def _hub() -> Iterator[str]:
    """A hub that refuses everybody, and says back what it was told."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = f"no access for {self.headers.get('authorization')}".encode()
            self.send_response(401)
            self.send_header("X-Error-Message", said.decode())
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


EXPERIMENTS = [("secrets", leaks)]
