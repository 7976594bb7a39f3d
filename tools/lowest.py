"""Print pip constraints that pin the package's dependencies to the lowest versions it allows.

    python tools/lowest.py > constraints.txt        # numpy>=1.26 becomes numpy==1.26

Development tools stay as pyproject.toml has them: users do not install them. Used by `make lowest`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
# Extras that `make lowest` leaves alone, and why.
SKIPPED = {
    "torch": "the tests need the build for CPUs that the group `test` names",
    "jax": "the tests of the extra need the group `jax`",
}


def lowest(requirement: str) -> str:
    """`name>=1.2` as `name==1.2`."""
    match = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)", requirement)
    if match is None:
        raise SystemExit(f"{PYPROJECT}: {requirement!r} is not NAME>=VERSION, so that it has no lowest version")
    return f"{match[1]}=={match[2]}"


def constraints() -> list[str]:
    """The core dependencies, then those of the extras, each at its lower bound."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = [
        requirement
        for extra, requirements in project["optional-dependencies"].items()
        if extra not in SKIPPED
        for requirement in requirements
    ]
    return [lowest(requirement) for requirement in [*project["dependencies"], *extras]]


if __name__ == "__main__":
    print("\n".join(constraints()))
