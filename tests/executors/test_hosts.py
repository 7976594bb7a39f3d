"""hosts.txt -> cluster.yaml, as Ray itself checks it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from conftest import Command
from tokenmill.errors import RecipeError
from tokenmill.executors.hosts import Host, cluster, parse_hosts

HOSTS = "# the lab\nnode1 4\n\nnode2.lab 4  # the new one\n10.0.0.3\t4\n"


def test_the_first_host_is_the_head_and_ray_takes_the_file(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text(HOSTS)
    found = yaml.safe_load(tokenmill("cluster", "hosts.txt", "--user", "me").stdout)
    assert found["provider"] == {"type": "local", "head_ip": "node1", "worker_ips": ["node2.lab", "10.0.0.3"]}
    assert found["auth"] == {"ssh_user": "me"}
    util = pytest.importorskip("ray.autoscaler._private.util")
    util.validate_config(util.prepare_config(found))
    starts = [found[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker")]
    assert "--head" in starts[0]
    assert "--address=$RAY_HEAD_IP:6379" in starts[1]


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("one 2\ntwo 2\n", "--num-cpus=2"),
        ("one\ntwo\n", f"--num-cpus={os.cpu_count()}"),
        ("{here} 3\ntwo 2\n", "--num-cpus=3"),
    ],
)
def test_each_host_gives_its_own_slots(tmp_path: Path, hosts: str, said: str) -> None:
    here = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "hosts.txt").write_text(hosts.format(here=here))
    command = yaml.safe_load(cluster(tmp_path / "hosts.txt", user="me"))["head_start_ray_commands"][-1]
    done = subprocess.run(
        ["sh", "-c", command.replace("ray start", "echo")], capture_output=True, text=True, check=True
    )
    assert said in done.stdout


def test_comments_and_empty_lines_are_passed_over() -> None:
    assert parse_hosts(HOSTS, where="x") == [Host("node1", 4), Host("node2.lab", 4), Host("10.0.0.3", 4)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a 1\nb 1 0,1,2\n", r"hosts, line 2: 'b 1 0,1,2' has 3 columns"),
        ("a 0,1,2,3\n", r"line 1: '0,1,2,3' is not a number of slots"),
        ("a:99999 1\n", r"line 1: 99999 is not a port"),
        ("a:ssh 1\n", r"line 1: 'a:ssh' is not a host"),
        ("-oProxyCommand=x@a 1\n", r"line 1: '-oProxyCommand=x@a' is not a host"),
        ("@a\n", r"line 1: '@a' is not a host"),
        ("a 0\n", r"line 1: '0' is not a number of slots"),
        ("a ²\n", r"line 1: '²' is not a number"),
        ("\n\na many\n", r"line 3: 'many' is not a number"),
        ("$(rm) 1\n", r"line 1: '\$\(rm\)' is not a host"),
        ("-a 1\n", r"line 1: '-a' is not a host"),
        ("a 1\nb 2\na 3\n", r"line 3: a is already in line 1"),
        ("# none\n", r"hosts names no host"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        parse_hosts(text, where="hosts")


def test_users_ports_and_hosts_without_slots() -> None:
    text = "me@node1:2222 slots=4\nnode2\n10.0.0.3:22 2\nfd00::1\nyou@[fd00::2]:23 8\n"
    assert parse_hosts(text, where="x") == [
        Host("node1", 4, "me", 2222),
        Host("node2"),
        Host("10.0.0.3", 2, "", 22),
        Host("fd00::1"),
        Host("fd00::2", 8, "you", 23),
    ]


def test_gpus_and_ranks_are_not_taken_for_cores_in_silence(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_hosts("node1 8 0-7\n", where="x")
    assert "leave GPUs and ranks out" in caught.value.hint
    (tmp_path / "hosts").write_text("a 8\nb 8\n")
    assert "If they are GPUs or ranks, leave them out" in cluster(tmp_path / "hosts", user="me")


def test_what_a_cluster_file_cannot_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("me@a 1\nme@b 1\n")
    assert yaml.safe_load(cluster(tmp_path / "hosts"))["auth"] == {"ssh_user": "me"}
    for text, said in (("me@a\nyou@b\n", "several users: me, you"), ("a:23\n", "has no ports")):
        (tmp_path / "hosts").write_text(text)
        with pytest.raises(RecipeError, match=said):
            cluster(tmp_path / "hosts")


def test_a_file_that_is_not_there_and_a_user_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        cluster(tmp_path / "none")
    (tmp_path / "hosts").write_text("a 1")
    with pytest.raises(RecipeError, match="not a user name"):
        cluster(tmp_path / "hosts", user="-oProxyCommand=x")
