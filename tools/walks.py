"""Count the files of tokenmill that three common jobs run through, and name them in the order of their first call.

    python tools/walks.py                # counts, and the aims
    python tools/walks.py --files        # the files as well
    python tools/walks.py --functions    # and their functions: which guard would spare a file?

A file counts if one of its functions is called, in this process or in a worker; code that runs while a module is
imported does not. A `sitecustomize` in a temporary folder on PYTHONPATH watches, in workers too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Logs each function of tokenmill once, when it is called first.
HOOK = '''
import os, sys, threading

log = os.open(os.environ["TOKENMILL_WALK"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
seen = set()


def is_import(frame):
    """Whether the call belongs to the import of a module of tokenmill, such as a class body."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and "/tokenmill/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def profile(frame, event, argument):
    code = frame.f_code
    if event == "call" and code not in seen:
        seen.add(code)
        if "/tokenmill/" in code.co_filename and not is_import(frame):
            file = code.co_filename.rpartition("/tokenmill/")[2]
            os.write(log, f"{file} {code.co_qualname}\\n".encode())
        elif "/tokenmill/" in code.co_filename:
            seen.discard(code)


threading.setprofile(profile)
sys.setprofile(profile)
'''

CORPUS = """
import json, sys
with open(sys.argv[1], "w") as file:
    for number in range(2000):
        file.write(json.dumps({"text": f"document {number} " * 50}) + "\\n")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A call of the public API, and how many files it should run through at most."""

    code: str
    aim: int


# Two workers and a few units each, so that every step of a build is seen.
PREPARE = """
import tokenmill
tokenmill.prepare("corpus.jsonl", "data", tokenizer="gpt2", workers=2, unit_bytes=500_000)
"""
FIRST_BATCH = """
import tokenmill
next(iter(tokenmill.DataLoader("data", seq_len=64, batch_size=4)))
"""
EXPORT = """
import tokenmill
tokenmill.export("data", "templar", to="templar")
"""
WALKS = {
    "prepare": Walk(code=PREPARE, aim=40),
    "first batch": Walk(code=FIRST_BATCH, aim=14),
    "export": Walk(code=EXPORT, aim=20),
}


def count() -> dict[str, list[str]]:
    """The files of each walk, in the order in which they are first used."""
    return {name: list(functions) for name, functions in trace().items()}


def trace() -> dict[str, dict[str, list[str]]]:
    """The functions of each file of each walk, in the order of their first call."""
    with tempfile.TemporaryDirectory() as folder:
        hook = Path(folder, "hook")
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
        subprocess.run([sys.executable, "-c", CORPUS, "corpus.jsonl"], cwd=folder, check=True)
        return {name: _run(walk, folder, hook) for name, walk in WALKS.items()}


def _run(walk: Walk, folder: str, hook: Path) -> dict[str, list[str]]:
    log = hook / "log"
    log.write_bytes(b"")
    path = os.pathsep.join([str(hook), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "TOKENMILL_WALK": str(log)}
    done = subprocess.run(
        [sys.executable, "-c", walk.code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode} of{walk.code}{done.stderr}")
    functions: dict[str, list[str]] = {}
    for line in dict.fromkeys(log.read_text(encoding="utf-8").splitlines()):
        file, _, function = line.partition(" ")
        functions.setdefault(file, []).append(function)
    return functions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="print the names of the files")
    parser.add_argument("--functions", action="store_true", help="print their functions, too")
    options = parser.parse_args()
    for name, files in trace().items():
        print(f"{name}: {len(files)} files (aim: at most {WALKS[name].aim})")
        for file, functions in files.items() if options.files or options.functions else ():
            print(f"  {file:<28} {' '.join(functions) if options.functions else ''}".rstrip())


if __name__ == "__main__":
    main()
