"""Which hosts can be used. There is one machine here: a stand-in for ssh runs the command on it, as a host would.

tests/cluster has real hosts, with a sshd each.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tokenmill.build.api import prepare
from tokenmill.errors import BuildError, RecipeError
from tokenmill.executors.host_cluster import HostCluster
from tokenmill.executors.hosts import Host

# Takes the options of ssh, notes them, and runs the rest as a host's shell would; "away" cannot be reached.
STAND_IN = """#!/bin/bash
echo "$@" >> {log}
while [ "$1" != "--" ]; do shift; done
if [[ "$2" = *away ]]; then echo "ssh: connect to host away port 22: No route to host" >&2; exit 255; fi
if [[ "$2" = *bare ]]; then echo "bash: python3: command not found" >&2; exit 127; fi
export SSH_CONNECTION="127.0.0.1 40000 127.0.0.1 22"
cd {home} && exec bash -c "$3"
"""


@pytest.fixture
def ssh_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stand-in was given. Its path comes first in PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    stand_in = tmp_path / "bin/ssh"
    stand_in.write_text(STAND_IN.format(log=tmp_path / "ssh.log", home=tmp_path / "home"))
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(shutil.which('bash') or '/bin/bash').parent}:/usr/bin:/bin")
    return tmp_path / "ssh.log"


def test_hosts_with_the_same_versions_can_be_used_and_few_slots_are_pointed_out(
    ssh_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    hosts = [Host("one", slots=1), Host("two", user="me", port=2222)]
    HostCluster(hosts, ssh_key="keys/id", tell=said.append).check()
    lines = sorted(ssh_log.read_text().splitlines())
    calls = [line for line in lines if "BatchMode=yes" in line]
    assert sum("-i keys/id -- one exec bash" in call for call in calls) == 1
    assert sum("-i keys/id -p 2222 -- me@two exec bash" in call for call in calls) == 1
    assert not said, "one slot of two cores is nothing to ask about"


def test_what_is_wrong_with_each_host_is_said_at_once(ssh_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    with pytest.raises(BuildError, match="2 of 3 hosts cannot be used") as caught:
        HostCluster([Host("one"), Host("away"), Host("bare", user="me", port=7)]).check()
    assert "  away: ssh: connect to host away port 22: No route to host" in caught.value.message
    assert "  bare: Python does not start: bash: python3: command not found" in caught.value.message
    assert "`ssh HOST true` must work" in caught.value.hint
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "ray" else real(name))
    with pytest.raises(BuildError, match=rf"one: ray {real('ray')}, here 9\.9") as caught:
        HostCluster([Host("one", user="me", port=7)]).check()
    assert "ssh -p 7 me@one pip install tokenmill==" in caught.value.hint
    assert "give `env_setup='source venv/bin/activate'`" in caught.value.hint


def test_the_set_up_comes_first_and_decides_which_python_is_used(ssh_log: Path, tmp_path: Path) -> None:
    environment = tmp_path / "home/venv/bin"
    environment.mkdir(parents=True)
    (environment / "python").write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    (environment / "python").chmod(0o755)
    (environment / "activate").write_text(f'PATH="{environment}:$PATH"\n')
    HostCluster([Host("one")], env_setup="source venv/bin/activate").check()
    assert (tmp_path / "used").exists()
    with pytest.raises(BuildError, match="1 of 1 hosts cannot be used"):
        HostCluster([Host("one")], env_setup="source nowhere/bin/activate && false || exit 1").check()


def test_options_that_do_not_go_together_are_refused_before_anything_is_written(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "hosts").write_text("one\n")
    hosts = tmp_path / "hosts"
    for given in (
        {"env_setup": "true"},
        {"ssh_key": "key"},
        {"hosts": hosts, "ray_address": "auto"},
        {"hosts": hosts, "part": "1/2"},
        {"hosts": hosts, "env_setup": " "},
        {"hosts": tmp_path / "none"},
    ):
        with pytest.raises(RecipeError):
            prepare(str(corpus), tmp_path / "out", tokenizer="byte", **given)
    assert not (tmp_path / "out").exists()
