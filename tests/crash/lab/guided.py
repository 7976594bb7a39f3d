"""Fuzzing that is led by the code that an input reaches (atheris, where it is installed).

The other fuzzing knows what it changes; this one knows nothing of records, and finds its way by itself. Atheris takes
over its process and never gives it back, so each reader has one of its own: it ends well after so many inputs,
or with the first one that a reader did not refuse as it should.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from lab_runner import Row

NAMES = ("manifest", "plan", "job", "receipt", "index")
_SECONDS_AN_INPUT = 20
_TRIED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_HUNG = 70  # libFuzzer's exit code


def why_not() -> str:
    """Why there can be no such experiment here; empty if there can."""
    return "" if importlib.util.find_spec("atheris") else "atheris is not installed"


def guided(runs: int, *, names: tuple[str, ...] = NAMES, seed: int = 1) -> Row:
    """So many inputs for each of these readers."""
    if why_not():
        return Row(fault=f"none, since {why_not()}", tried=0)
    ends = {name: _start(runs, seed, name) for name in names}
    tried = {name: _TRIED.search(end.stderr) for name, end in ends.items()}
    return Row(
        fault=f"fuzzed {', '.join(names)}, guided",
        tried=sum(int(found[1]) for found in tried.values() if found),
        wrong=tuple(f"{name}: {end.stderr[-3000:]}" for name, end in ends.items() if end.returncode or not tried[name]),
        hangs=sum(end.returncode == _HUNG for end in ends.values()),
    )


def _start(runs: int, seed: int, name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab.guided", name, str(runs), str(seed)]
    home = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(home.parent)}  # for what labs share
    return subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, errors="replace", check=False
    )


def _fuzz(name: str, runs: int, seed: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["tokenmill"]):
        from lab.fuzz import SEALED, read_index, sealed_files
        from lab.mutate import body_of, reseal
        from tokenmill.errors import TokenmillError

    with tempfile.TemporaryDirectory(prefix="guided-") as folder:
        path, corpus = Path(folder), Path(folder, "corpus")
        corpus.mkdir()
        sealed = sealed_files(path)
        index = min((path / "out").glob("*/*.idx"), key=lambda file: file.stat().st_size)
        bin_bytes = index.with_suffix(".bin").stat().st_size
        (corpus / "valid").write_bytes(index.read_bytes() if name == "index" else body_of(sealed[name]))

        def read(data: bytes) -> None:
            try:
                if name == "index":
                    read_index(data, bin_bytes)
                else:
                    SEALED[name](reseal(data))
            except TokenmillError as error:
                assert error.message, "an error without a word"

        limits = [f"-runs={runs}", f"-seed={seed}", f"-timeout={_SECONDS_AN_INPUT}", "-rss_limit_mb=2048"]
        atheris.Setup(["guided", *limits, "-print_final_stats=1", str(corpus)], read)
        atheris.Fuzz()


EXPERIMENTS = [("fuzz-guided", partial(guided, 20_000))]

if __name__ == "__main__":
    _fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
