"""arguments"""

from __future__ import annotations

from collections.abc import Callable

from differ.seeding import Bug
from lab_runner import Row

EXPERIMENTS: list[tuple[str, Callable[[], Row]]] = []
BUGS: list[Bug] = []
