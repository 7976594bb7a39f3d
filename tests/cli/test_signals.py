"""Whoever starts the command may stop it at any moment, and may have closed its standard streams."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import command, make_texts, tree, write_jsonl
from tokenmill.cli import signals
from tokenmill.errors import Interrupted

# How much is saved is said where the build had begun.
RESUME = r"Interrupted\. (Run|\d of 1 unit are saved; run) the same command to resume\.\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_still_loads_says_that_it_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    # Where a test comes late to it, it has begun by then, and must not have ended.
    (tmp_path / "slow.py").write_text("import time\ndef keep(text):\n    time.sleep(600)\n")
    write_jsonl(tmp_path / "a.jsonl", make_texts(5, seed=1))
    process = subprocess.Popen(
        command("prepare", "a.jsonl", "--tokenizer", "byte", "-o", "out", "-j", 2, "--filter", "slow:keep"),
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # the tests themselves may run under nohup
    )
    while process.poll() is None and not _catches(process.pid, number):
        time.sleep(0.001)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(RESUME, said)


def _catches(process: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(caught >> (number - 1) & 1)


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_a_build_does_without_standard_streams(tmp_path: Path, closed: tuple[int, ...]) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(50, seed=1))
    build = ("prepare", tmp_path / "a.jsonl", "--tokenizer", "byte", "-j", 2, "-o")
    subprocess.run(command(*build, tmp_path / "plain"), check=True)
    subprocess.run(command(*build, tmp_path / "out"), check=True, preexec_fn=lambda: [os.close(fd) for fd in closed])
    assert tree(tmp_path / "out") == tree(tmp_path / "plain")


def test_what_cannot_be_printed_is_told_as_that(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(5, seed=1))
    with open("/dev/full", "w") as full:
        build = command("prepare", tmp_path / "a.jsonl", "--tokenizer", "byte", "-j", 1, "-o", tmp_path / "out")
        done = subprocess.run(build, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the output cannot be printed: No space left on device")
    assert (tmp_path / "out/dataset.json").exists()


def _swallowing(folder: Path) -> subprocess.Popen[str]:
    """A build that an interrupt alone does not end: whatever is raised in its filter, it waits for ten minutes."""
    (folder / "deaf.py").write_text(
        "import time, pathlib\n"
        "def keep(text):\n"
        "    for _ in range(3):\n"
        "        try:\n"
        "            pathlib.Path('begun').touch()\n"
        "            time.sleep(600)\n"
        "        except KeyboardInterrupt:\n"
        "            pass\n"
    )
    write_jsonl(folder / "a.jsonl", make_texts(5, seed=1))
    process = subprocess.Popen(
        command("prepare", "a.jsonl", "--tokenizer", "byte", "-o", "out", "-j", 1, "--filter", "deaf:keep"),
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    while process.poll() is None and not (folder / "begun").exists():
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)])
def test_a_command_ends_in_time_even_if_the_interrupt_is_lost(tmp_path: Path, numbers: tuple[signal.Signals]) -> None:
    process = _swallowing(tmp_path)
    begin = time.monotonic()
    for number in numbers:
        process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - begin < 10
    assert re.fullmatch(RESUME, said)


def test_a_signal_that_was_ignored_from_the_start_stays_ignored(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(5, seed=1))
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "def keep(text):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    time.sleep(0.01)\n"
        "    return True\n"
    )
    done = subprocess.run(
        command("prepare", "a.jsonl", "--tokenizer", "byte", "-o", "out", "-j", 1, "--filter", "slow:keep"),
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        timeout=60,
    )
    assert done.returncode == 0, "as under nohup"


@pytest.mark.parametrize("raised", ["AttributeError('half loaded')", "OSError('cut short')", "SystemError"])
def test_what_an_interrupt_breaks_in_a_library_is_told_as_an_interrupt(tmp_path: Path, raised: str) -> None:
    # A library that is interrupted while it loads swallows that, and fails at its next use.
    (tmp_path / "half.py").write_text(
        "import pathlib, time\n"
        "try:\n"
        "    pathlib.Path('begun').touch()\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        f"    raise {raised}\n"
    )
    write_jsonl(tmp_path / "a.jsonl", make_texts(5, seed=1))
    process = subprocess.Popen(
        command("prepare", "a.jsonl", "--tokenizer", "byte", "-o", "out", "-j", 1, "--filter", "half:keep"),
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    while process.poll() is None and not (tmp_path / "begun").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "Interrupted. Run the same command to resume.\n"


def test_an_interrupt_where_nothing_can_be_raised_ends_the_command_without_a_traceback() -> None:
    code = """
import os, signal, time, weakref
from tokenmill.cli import signals
signals.handle_signals()
class Held: pass
held = Held()
callback = weakref.ref(held, lambda _: os.kill(os.getpid(), signal.SIGINT))
del held
time.sleep(30)
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (process.returncode, process.stderr) == (130, "Interrupted. Run the same command to resume.\n")


def test_an_interrupt_has_one_exit_code() -> None:
    assert Interrupted.exit_code == signals.INTERRUPTED
