"""What a container allows: its cores and its memory, which may be much less than the machine's.

Linux tells in files of control groups, in two layouts:

    new    cpu.max, memory.max and memory.current
    old    cpu/cpu.cfs_quota_us and cpu.cfs_period_us, memory/memory.limit_in_bytes and memory.usage_in_bytes

A group is bound by those around it as well. Whatever cannot be read limits nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
MACHINE = Path("/proc/meminfo")
_MEMORY = ("memory.max", "memory.limit_in_bytes")
_USED = ("memory.current", "memory.usage_in_bytes")
# What is used for files that were read, and given back when it is needed.
_CACHED = ({"active_file", "inactive_file"}, {"total_active_file", "total_inactive_file"})


def allowed_cores(groups: Path = GROUPS, own: Path = OWN) -> float:
    """Cores' worth of time that this process may use; infinite if nothing says otherwise."""
    return min((_cores(place) for place in _places("cpu", groups, own)), default=math.inf)


def allowed_memory(groups: Path = GROUPS, own: Path = OWN) -> float:
    """Bytes that this process and those beside it may hold; infinite if nothing says otherwise."""
    found = (_number(place / name) for place in _places("memory", groups, own) for name in _MEMORY)
    return min((limit for limit in found if limit >= 0), default=math.inf)


def free_memory(groups: Path = GROUPS, own: Path = OWN, machine: Path = MACHINE) -> float:
    """Bytes that this process may still take, by its groups and its machine; infinite if nothing tells."""
    found = [_free_in_group(place) for place in _places("memory", groups, own)]
    with contextlib.suppress(OSError, ValueError):
        lines = machine.read_text(encoding="ascii").splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min(found, default=math.inf)


def _free_in_group(place: Path) -> float:
    for limit_name, used_name, cached_names in zip(_MEMORY, _USED, _CACHED, strict=True):
        limit, used = _number(place / limit_name), _number(place / used_name)
        if limit >= 0 and used >= 0:
            return limit - used + _cached(place / "memory.stat", cached_names)
    return math.inf


def _cached(path: Path, names: set[str]) -> int:
    try:
        rows = (line.split() for line in path.read_text(encoding="ascii").splitlines())
        return sum(int(row[1]) for row in rows if row[0] in names)
    except (OSError, ValueError, IndexError):
        return 0


def _places(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """The folders of our group and of those around it. In a container, the outer ones cannot be seen."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):
            top = groups / controller if names else groups
            inner = top / path.strip("/")
            yield inner
            yield from (place for place in inner.parents if place.is_relative_to(top))


def _cores(place: Path) -> float:
    quota, period = _number(place / "cpu.cfs_quota_us"), _number(place / "cpu.cfs_period_us")
    if (place / "cpu.max").exists():
        quota, period = _number(place / "cpu.max"), _number(place / "cpu.max", word=1)
    return quota / period if quota > 0 and period > 0 else math.inf


def _number(path: Path, *, word: int = 0) -> float:
    """A number that stands in a file; -1 if none does."""
    try:
        return int(path.read_text(encoding="ascii").split()[word])
    except (OSError, ValueError, IndexError):  # the word for no limit is "max"
        return -1
