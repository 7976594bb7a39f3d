"""Cores and memory, and the number of workers that follows from them.

    asked for  or  DATASET_NUM_PROC  or  min(cores, memory / memory of a worker)

A container may have far fewer cores and less memory than its machine. Linux has the limits in files of control groups:

    version 2    cpu.max, memory.max and memory.current
    version 1    cpu/cpu.cfs_quota_us and cpu.cfs_period_us, memory/memory.limit_in_bytes and memory.usage_in_bytes

The limits of enclosing groups apply as well. A file that cannot be read sets no limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tokenmill import arguments
from tokenmill.errors import RecipeError


def resident_bytes() -> int:
    """The resident memory of this process; 0 where the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _trim() -> None:
    """Return freed memory to the system, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# The memory of a worker, at most.
MEMORY_BUDGET = 700_000_000
# Workers compute, so more than one per core only takes memory.
MANY_A_CORE = 4
ALWAYS_FEW = 16


def resolve_workers(workers: int | None) -> int:
    """The number of workers on this machine: as given, or three quarters of the cores for 0 or less.

    By default one per core, as far as memory allows.
    """
    cores = num_cores()
    workers = arguments.workers_or_none(workers)
    if workers is None:
        fitting = min(_memory(), allowed_memory()) / MEMORY_BUDGET
        workers = positive_from_environment(NUM_WORKERS) or max(1, int(min(cores, fitting)))
    most = max(ALWAYS_FEW, MANY_A_CORE * cores)
    if workers > most:
        raise RecipeError(
            f"{workers} workers are too many for {cores} core{'s' if cores != 1 else ''}",
            hint=f"give up to {most} with `workers` or DATASET_NUM_PROC; one per core is enough",
        )
    return workers if workers > 0 else max(1, cores * 3 // 4)


# Of addresses: Arrow, numpy and gigatoken map this much before they have read anything.
LEAST_ADDRESSES = 800_000_000


def has_addresses() -> bool:
    """Whether `ulimit -v` leaves enough to work with. Libraries in Rust abort if they get no memory."""
    return _address_limit() >= LEAST_ADDRESSES


def check_addresses() -> None:
    """Refuse to encode where libraries would abort."""
    if not has_addresses():
        raise RecipeError(
            f"a process may have {_address_limit() / 1e6:.0f} MB of addresses here, and needs about "
            f"{LEAST_ADDRESSES / 1e6:.0f} MB",
            hint="allow more with ulimit -v; a control group limits the memory that is used, which is far less",
        )


def _address_limit() -> float:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return limit if limit != resource.RLIM_INFINITY else math.inf


def num_cores() -> int:
    """The cores that this process may use, rounded up."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(there, allowed_cores()))


def _memory() -> float:
    """The memory of this machine in bytes; infinite where the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return math.inf


def positive_from_environment(name: str) -> int | None:
    """A positive number from the environment; None if it is not set."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise RecipeError(f"{name}={text!r} is not a positive number", hint="unset it or correct it")
    return int(text)


NUM_WORKERS, BATCH_DOCUMENTS = "DATASET_NUM_PROC", ("DATASET_BATCH_SIZE", "DATASET_WRITER_BATCH_SIZE")


def max_batch_documents() -> int | None:
    """A bound on the documents of a batch, for those whose scripts set one. The result does not depend on it."""
    bounds = [positive_from_environment(name) for name in BATCH_DOCUMENTS]
    return min((bound for bound in bounds if bound), default=None)


def acting_variables(workers: int | None) -> list[str]:
    """The variables of the environment that decide something for a build, and what they do."""
    found = []
    if workers is None and (number := positive_from_environment(NUM_WORKERS)):
        found.append(f"{NUM_WORKERS}={number} sets the number of workers")
    bound = max_batch_documents()
    for name in BATCH_DOCUMENTS:
        if (number := positive_from_environment(name)) is not None and number == bound:
            found.append(f"{name}={number} limits the documents in a batch; the dataset does not depend on it")
    return found


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
    """Bytes that this process may still take, by its groups, its machine and `ulimit -v`; infinite if none is known."""
    found = [_free_in_group(place) for place in _places("memory", groups, own)]
    found.append(_free_addresses())
    with contextlib.suppress(OSError, ValueError):
        lines = machine.read_text(encoding="ascii").splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min(found, default=math.inf)


def _free_addresses() -> float:
    """Bytes of address space that `ulimit -v` leaves this process; infinite without such a limit."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return math.inf
    return _address_limit() - used


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
    """The folders of our group and of the enclosing ones. In a container, the outer ones are not visible."""
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
    """The number in a file; -1 if there is none."""
    try:
        return int(path.read_text(encoding="ascii").split()[word])
    except (OSError, ValueError, IndexError):  # the word for no limit is "max"
        return -1


class _NoPandas:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ImportError("not now")


def start_arrow() -> None:
    """Run pyarrow on one core, and keep it from importing pandas at its first conversion of a Python object.

    That import takes longer than most of what a worker loads, and tokenmill does not need it. Only for our own worker
    processes: a program that uses the library may want pandas and all cores.
    """
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _NoPandas)
        try:
            pa.array([""])
        finally:
            sys.meta_path.remove(_NoPandas)
