"""Real full disks: small file systems in memory, mounted where nobody else sees them, and made larger afterwards.

    bytes     the output's disk is full at one moment or another of a build or a repair
    inodes    it has room for bytes, but not for one more file
    scratch   the scratch disk is full, and what does not fit there goes straight to the output
    margin    there is too little space from the start, and nothing is begun

A build must stop with `DiskFullError` and leave no dataset that looks finished; when there is space, the same call
must go on to the right bytes. All this runs in a process with its own user and mount namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

from lab.commands import FAILED, FINISHED, Bench, run
from lab.judge import Case, finish, looks_finished_but_wrong, make_case, mend
from lab.scenes import damage
from lab.swift import swift
from lab_runner import Row
from tokenmill.build import preflight
from tokenmill.errors import DiskFullError, TokenmillError
from tokenmill.storage import scratch as scratch_module

PAGE = 4096
ROOMY = "size=256m,nr_inodes=100000"
_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
_SECONDS = 600
# The command without its look at the free space, so that the disk is full in the midst.
_BLIND = (
    "import tokenmill.build.pipeline as b; b.check_space = lambda *_: None; from tokenmill.cli.main import main; main()"
)


def why_not() -> str:
    """Why there can be no such experiment here; empty if there can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    done = subprocess.run(
        [*_NAMESPACE, "mount", "-t", "tmpfs", "-o", "size=1m", "none", "/tmp"], capture_output=True, check=False
    )
    return "" if done.returncode == 0 else "this system does not let users mount"


def disks(scale: int, *, commands: bool = False) -> Row:
    """About `scale` sizes of disks of each kind; `commands`: and real commands on some."""
    code = f"from lab.disks import inside; inside({scale}, {commands})"
    try:
        done = subprocess.run(
            [*_NAMESPACE, sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            timeout=_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return Row(fault="full disks", tried=0, hangs=1)
    tried, wrong = json.loads(done.stdout)
    return Row(fault="full disks", tried=tried, wrong=tuple(wrong))


def inside(scale: int, commands: bool) -> None:
    """What runs in the namespace; prints how many disks were full, and what was wrong."""
    found: list[str | None] = []
    with swift(), make_case("plain") as plain, make_case("scratch") as scratch:
        # A scratch disk without a reserve, so that it is really full.
        with patch.object(preflight, "check_space", lambda *_: None), patch.object(scratch_module, "RESERVE_BYTES", 0):
            # As far as a build or a repair still fills the disk.
            found += [_build_on(plain, f"size={pages * PAGE}") for pages in _spread(1, 36, scale)]
            found += [_build_on(plain, f"size=16m,nr_inodes={count}") for count in _spread(2, 60, scale)]
            found += [_repair_on(plain, pages) for pages in _spread(0, 5, scale)]
            found += [_scratch_on(scratch, f"size={pages * PAGE}") for pages in _spread(1, 6, scale)]
            found += [_scratch_on(scratch, f"size=1m,nr_inodes={count}") for count in _spread(1, 6, scale)]
        found.append(_refused(plain))
        if commands:
            found += [_command_on(plain, f"size={pages * PAGE}", workers) for pages in (9, 30) for workers in (1, 2)]
            found.append(_refused_command(plain))
    sys.stdout.write(json.dumps([len(found), [sentence for sentence in found if sentence]]))


def _spread(low: int, high: int, count: int) -> list[int]:
    """At most `count` numbers from one to the other, evenly."""
    return sorted({low + (high - low) * step // max(1, count - 1) for step in range(count)})


@contextlib.contextmanager
def _mounted(path: Path, options: str) -> Iterator[Callable[[str], None]]:
    """A file system at a path; gives a function that mounts it anew with other options, its files as they are."""
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)
    try:
        yield lambda more: _remount(path, more)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)


def _build_on(case: Case, options: str) -> str | None:
    with _mounted(case.place / "disk", options) as remount:
        output = str(case.place / "disk/out")
        wrong = _not_full(lambda: case.world.build(output))
        wrong = wrong or looks_finished_but_wrong(case, output)
        remount(ROOMY)
        wrong = wrong or finish(case, output)
    return wrong and f"a build on a disk with {options}: {wrong}"


def _repair_on(case: Case, pages: int) -> str | None:
    """A disk that holds the damaged dataset, and so many pages more."""
    with _mounted(case.place / "disk", ROOMY) as remount:
        output = str(case.place / "disk/out")
        damage(case, output)
        used = _used(case.place / "disk")
        remount(f"size={used + pages * PAGE}")
        wrong = _not_full(lambda: case.world.repair(output))
        remount(ROOMY)
        wrong = wrong or mend(case, output)
    return wrong and f"a repair with {pages} pages left: {wrong}"


def _scratch_on(case: Case, options: str) -> str | None:
    """The build must not fail for it: there is space on the output's disk."""
    output = case.output("scratched")
    with _mounted(Path(case.world.scratch or ""), options):
        wrong = finish(case, output)
    case.remove(output)
    return wrong and f"a scratch disk with {options}: {wrong}"


def _refused(case: Case) -> str | None:
    """Less than the margin is free: nothing is begun, and the error says how much is missing."""
    with _mounted(case.place / "disk", "size=1m") as remount:
        output = str(case.place / "disk/out")
        try:
            case.world.build(output)
            return "a build without space for its margin was begun"
        except DiskFullError as error:
            if "missing" not in error.message or os.listdir(case.place / "disk/out/.build/receipts"):
                return f"a build without space for its margin: {error.message}"
        remount(ROOMY)
        return finish(case, output)


def _not_full(call: Callable[[], object]) -> str | None:
    """A sentence unless the call stops because the disk is full."""
    try:
        call()
    except DiskFullError:
        return None
    except TokenmillError as error:
        return f"{type(error).__name__} and not DiskFullError: {error.message}"
    except Exception as error:
        return f"a bare {type(error).__name__}: {error}"
    return "there was space enough"


def _command_on(case: Case, options: str, workers: int) -> str | None:
    with _mounted(case.place / "disk", options) as remount:
        output = str(case.place / "disk/out")
        bench = Bench(world=case.world, place=case.place)
        build = bench.prepare(output, "-j", workers)
        ended = run([build[0], "-c", _BLIND, *build[3:]])
        if ended.code != FAILED or "no space left" not in ended.errors or not ended.is_typed():
            return f"a command on a disk with {options}: {ended.code}: {ended.errors}"
        remount(ROOMY)
        again = run(build)
        wrong = bench.wrong_with(output) if again.code == FINISHED else f"{again.code}: {again.errors}"
    return wrong and f"a command on a disk with {options}, with space again: {wrong}"


def _refused_command(case: Case) -> str | None:
    with _mounted(case.place / "disk", "size=1m") as remount:
        output = str(case.place / "disk/out")
        bench = Bench(world=case.world, place=case.place)
        ended = run(bench.prepare(output, "-j", 1))
        if ended.code != FAILED or "are missing" not in ended.errors or not ended.is_typed():
            return f"a command without space for its margin: {ended.code}: {ended.errors}"
        remount(ROOMY)
        again = run(bench.prepare(output, "-j", 1))
        return bench.wrong_with(output) if again.code == FINISHED else f"{again.code}: {again.errors}"


def _used(path: Path) -> int:
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


EXPERIMENTS = [("full disks", partial(disks, 120, commands=True))]
