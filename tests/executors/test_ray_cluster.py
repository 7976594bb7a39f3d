"""A Ray cluster is found, joined and left; without one, a local Ray is started and stopped, and keeps its secret."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_lab import OPTIONS, wait_for

from conftest import command, tree
from nodes import listening
from tokenmill.errors import RecipeError

pytest.importorskip("ray")
from tokenmill.executors.ray_cluster import find_cluster, num_slots

pytestmark = [
    pytest.mark.usefixtures("all_slots"),
    pytest.mark.xdist_group("ray"),  # one process, so that one cluster is started
]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An environment where no cluster is found, with a home where nothing is; that home."""
    place = tempfile.mkdtemp(prefix="r")  # names of sockets must be short
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", place)
    monkeypatch.setenv("HOME", str(home))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    yield home
    shutil.rmtree(place, ignore_errors=True)


def test_without_a_cluster_a_local_ray_is_started_and_stopped(
    corpus: Path, tmp_path: Path, right: dict[str, str], alone: Path
) -> None:
    assert find_cluster(None) is None
    done = subprocess.run(
        command("prepare", corpus, "-o", tmp_path / "out", *OPTIONS, "-j", 2), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert tree(tmp_path / "out") == right
    assert not (alone / ".ray").exists(), "no secret for the Ray programs to come"


def test_a_local_ray_listens_on_the_loopback_alone_and_leaves_no_secret_in_its_program(alone: Path) -> None:
    """Twice in one program: the second one has a secret of its own."""
    code = """
import os
from tokenmill.executors.ray_cluster import connect, leave, ray

before = dict(os.environ)
for _ in range(2):
    connect(None, 1)
    ray.get(ray.remote(lambda: 0).remote())
    print({name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}, flush=True)
    input()
    leave()
print(ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.DISABLED)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "set()\n"
        found = listening(process.pid)
        assert len(found) >= 5, "its head, its node, its agent, a worker and the program"
        assert set(found) == {"127.0.0.1"}
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.communicate() == ("True\n", "")
    assert not (alone / ".ray").exists()


def test_a_local_ray_that_does_not_start_leaves_no_secret_either(alone: Path, tmp_path: Path) -> None:
    code = """
import os
from tokenmill.executors.ray_cluster import connect, ray
from tokenmill.errors import BuildError

before = dict(os.environ)
try:
    connect(None, 1)
except BuildError as error:
    print(error.message)
print(dict(os.environ) == before, ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.DISABLED)
"""
    too_long = {**os.environ, "RAY_TMPDIR": str(tmp_path / ("x" * 100))}  # for the name of a socket
    done = subprocess.run([sys.executable, "-c", code], env=too_long, capture_output=True, text=True)
    assert re.fullmatch(r"Ray does not start: .*\nTrue True\n", done.stdout, re.DOTALL), done
    assert not (alone / ".ray").exists()


def test_a_cluster_of_this_machine_that_asks_for_the_users_secret_is_joined_with_it(
    corpus: Path, tmp_path: Path, right: dict[str, str], alone: Path
) -> None:
    (alone / ".ray").mkdir()
    (alone / ".ray/auth_token").write_text("5" * 64)
    options = ("--num-cpus=2", "--port=0", "--include-dashboard=false", "--disable-usage-stats", "--block")
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options]
    head = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: find_cluster(None) is not None or head.poll() is not None)
        done = subprocess.run(
            command("prepare", corpus, "-o", tmp_path / "out", *OPTIONS, "--ray-address", "auto"),
            capture_output=True,
            text=True,
        )
    finally:
        head.terminate()
        head.wait()
    assert (done.returncode, done.stderr) == (0, "")
    assert tree(tmp_path / "out") == right


def test_addresses_where_no_cluster_is_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for address, said in {
        "auto": "no Ray cluster is found",
        "127.0.0.1:1": "no Ray cluster answers",
        "ray://host:10001": "is not the address",
        "host": "is not the address",
        "host:99999999": "no Ray cluster answers",
    }.items():
        with pytest.raises(RecipeError, match=said):
            find_cluster(address)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RecipeError, match="no Ray cluster answers"):
        find_cluster(None)


def test_slots_are_as_asked_and_never_more_than_there_are() -> None:
    assert [num_slots(wanted, 8) for wanted in (None, 3, 8, 20, 0, -1)] == [8, 3, 8, 8, 6, 6]
    assert num_slots(None, 0) == num_slots(-1, 1) == 1
