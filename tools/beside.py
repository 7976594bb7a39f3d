"""Can tokenmill be installed beside the packages that train on its datasets? Ask pip, and print a table.

    make beside                       # all of them
    make beside ARGS="ray litdata"    # some

Each row resolves tokenmill together with the newest release of the others, as `pip install` would in an empty
environment. Nothing is installed. Exit code 1 if a row does not resolve.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"
# What is installed together: one row each. Packages that need torch get the version that the tests use.
COMPANIONS = {
    "lightning": ("lightning[extra]", TORCH),
    "transformers": ("transformers", "accelerate", TORCH),
    "datatrove": ("datatrove[processing]",),
    "litdata": ("litdata", TORCH),
    "mosaicml-streaming": ("mosaicml-streaming", TORCH),
    "torchtitan": ("torchtitan", TORCH),
    "ray": ("ray",),
}
# Packages whose versions people ask about: the table has those that were chosen.
SHOWN = ("numpy", "pyarrow", "xxhash", "rich", "huggingface-hub", "tokenizers")
TIMEOUT = 900.0
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What pip answered: the versions that fit, or why none do."""

    versions: dict[str, str]
    conflict: str


def resolve(requirements: list[str], *options: str) -> Resolution:
    """The versions that pip would install in an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [*PIP, "install", "--dry-run", "--ignore-installed", "--report", report, *options, *requirements]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return Resolution(versions={}, conflict=f"pip found no answer within {TIMEOUT:.0f} s")
        if done.returncode:
            return Resolution(versions={}, conflict=explain(done.stdout, done.stderr))
        metadata = [entry["metadata"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return Resolution(versions={normal(entry["name"]): entry["version"] for entry in metadata}, conflict="")


def explain(stdout: str, stderr: str) -> str:
    """The conflict that pip reports, in one line; one cause for each package that pip tried many releases of."""
    lines = [line.strip() for line in stdout.splitlines()]
    if "The conflict is caused by:" in lines:
        first = lines.index("The conflict is caused by:") + 1
        causes = lines[first : lines.index("", first)]
        return "; ".join({cause.split()[0]: cause for cause in reversed(causes)}.values())
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return errors[-1] if errors else "pip failed and did not say why"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(requirement: str) -> str:
    """A requirement at its newest release, so that pip does not resolve a conflict with one from years ago."""
    if "==" in requirement:
        return requirement
    name = normal(requirement.partition("[")[0])
    newest = resolve([requirement], "--no-deps")
    return f"{requirement}=={newest.versions[name]}" if name in newest.versions else requirement


def build_wheel(folder: str) -> str:
    subprocess.run([*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT)], check=True)
    (wheel,) = Path(folder).glob("*.whl")
    return str(wheel)


def row(wheel: str, companions: tuple[str, ...]) -> tuple[bool, str]:
    """Whether tokenmill resolves beside them, and the table's row that says so."""
    wanted = [pinned(companion) for companion in companions]
    found = resolve([wheel, *wanted])
    chosen = ", ".join(f"{name} {found.versions[name]}" for name in SHOWN if name in found.versions)
    beside = ", ".join(wanted).replace("==", " ")
    return not found.conflict, f"| {beside} | {'no: ' + found.conflict if found.conflict else 'yes'} | {chosen} |"


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(COMPANIONS))
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(COMPANIONS)}", file=sys.stderr)
        return 2
    print("| beside | resolves | with |\n|---|---|---|", flush=True)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(folder)
        for name in names or COMPANIONS:
            resolves, line = row(wheel, COMPANIONS[name])
            failures += not resolves
            print(line, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
