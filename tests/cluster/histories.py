"""What may happen to `prepare --hosts`, on hosts in network namespaces. Each history ends with the right bytes.

quiet         the documented command, beside a Ray that was there before
Ctrl-C        nothing of it runs on the hosts two seconds later; the same command resumes
launcher      killed with SIGKILL: the same, within five seconds
cable         of a host is pulled: its Ray ends by itself, its units run elsewhere
power cut     of a host: its units run elsewhere; it comes back and is used
own disks     every host keeps a part on its own disk
refusals      what cannot be used is named, before anything starts
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from machines import Lab, Machine, network

from conftest import WORDS, tree
from lab_runner import Row

# While the file `slow` is there, a document takes some milliseconds, so that there is a middle to disturb. While `hold`
# is there, it waits.
_FILTER = """
import os, time
def keep(text):
    if os.path.exists("/mnt/lab/slow"):
        time.sleep(0.004)
    while os.path.exists("/mnt/lab/hold"):
        time.sleep(0.05)
    return True
"""
OPTIONS = ("--tokenizer", "byte", "--unit-bytes", "15kB", "--filter", "slowly:keep", "--no-progress")
DOCUMENTS, SEED = 3000, 7
# Where the folder of a lab is made: /tmp is another one on every host.
PLACE = Path("/var/tmp")


@dataclass(frozen=True)
class Scene:
    """A lab with a corpus and a list of hosts, and the right dataset."""

    lab: Lab
    right: dict[str, str]

    @property
    def nodes(self) -> list[Machine]:
        return [machine for name, machine in self.lab.machines.items() if name != "launcher"]

    def prepare(self, *more: object, hosts: str = "hosts.txt") -> subprocess.Popen[str]:
        """The command on the launcher. What it prints goes to its log."""
        words = ["tokenmill", "prepare", "corpus", "-o", "out", "--hosts", hosts, *OPTIONS, *more]
        with (self.lab.place / "launcher.log").open("a") as log:
            return self.lab["launcher"].start(*words, stdout=log, stderr=log)

    def receipts(self) -> int:
        return len(list((self.lab.place / "out/.build/receipts").glob("*.json")))

    def reach(self, count: int, process: subprocess.Popen[str]) -> None:
        """Wait until so many units are done."""
        self.lab.wait_for(lambda: self.receipts() >= count or process.poll() is not None, f"{count} units", seconds=150)
        assert process.poll() is None, f"ended with {process.poll()}\n{self.lab.logs()}"

    def finish(self, process: subprocess.Popen[str]) -> None:
        """Let it run to its end, and compare."""
        (self.lab.place / "slow").unlink(missing_ok=True)
        code = process.wait(240)
        assert code == 0, f"ended with {code}\n{self.lab.logs()}"
        assert tree(self.lab.place / "out") == self.right, "other bytes than one machine"
        self.nothing_runs(5)

    def nothing_runs(self, seconds: float, *, but: tuple[int, ...] = ()) -> None:
        """Nothing of the command runs on any host."""

        def is_quiet() -> bool:
            return not any(set(node.processes(word)) - {*but} for node in self.nodes for word in ("ray", "host_agent"))

        self.lab.wait_for(is_quiet, "what was started has ended", seconds=seconds)

    def said(self) -> str:
        return (self.lab.place / "launcher.log").read_text()


@contextlib.contextmanager
def scene(*, nodes: int = 3, slow: bool = True) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="tokenmill-cluster-", dir=PLACE) as folder:
        place = Path(folder)
        with network(place, nodes=nodes, ports={"node2": 2222}) as lab:
            chance = random.Random(SEED)
            texts = [" ".join(chance.choices(WORDS, k=12)) for _ in range(DOCUMENTS)]
            (place / "corpus").mkdir()
            (place / "corpus/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            (place / "slowly.py").write_text(_FILTER)
            lines = [f"{lab[f'node{number}'].address} 1" for number in range(1, nodes + 1)]
            lines[1] = f"root@{lab['node2'].address}:2222 slots=1   # another port"
            (place / "hosts.txt").write_text("# the hosts of the lab\n\n" + "\n".join(lines) + "\n")
            words = ["tokenmill", "prepare", "corpus", "-o", "right", *OPTIONS, "-q", "-j", "1"]
            assert lab["launcher"].start(*words).wait(120) == 0
            right = tree(place / "right")
            if slow:
                (place / "slow").touch()
            yield Scene(lab, right)


def quiet(*, nodes: int = 3, with_ray: bool = True) -> None:
    with scene(nodes=nodes, slow=False) as found:
        node, ours = found.nodes[0], None
        if with_ray:
            words = [
                "ray",
                "start",
                "--head",
                "--block",
                "--num-cpus=1",
                "--include-dashboard=false",
                "--disable-usage-stats",
            ]
            ours = node.start(*words, f"--node-ip-address={node.address}", stdout=subprocess.DEVNULL)
            found.lab.wait_for(lambda: any(node.processes("raylet")), "a Ray of the user", seconds=90)
        before = set(node.processes())
        process = found.prepare("--env-setup", "source setup.sh")
        assert process.wait(240) == 0, found.lab.logs()
        assert tree(found.lab.place / "out") == found.right
        found.nothing_runs(5, but=tuple(node.processes()) if with_ray else ())
        assert f"Ray starts on {nodes} hosts, with {nodes} slots" in found.said()
        for host in found.nodes:
            temp = Path(f"/proc/{host.processes('sshd')[0]}/root/tmp")
            assert not list(temp.glob("tokenmill-ray-*")), "Ray's folder is left"
        if ours is not None:
            assert before <= set(node.processes()), "the user's Ray was disturbed"
            ours.kill()


def interrupted() -> None:
    with scene() as found:
        process = found.prepare()
        found.reach(5, process)
        _signal_inside(found, signal.SIGINT)
        found.nothing_runs(2)
        assert process.wait(10) == 130, found.lab.logs()
        assert re.search(r"Interrupted\. .*[Rr]un the same command to resume", found.said()), found.said()
        found.finish(found.prepare())


def launcher_killed() -> None:
    with scene() as found:
        process = found.prepare()
        found.reach(5, process)
        process.kill()  # the first process of its namespace: all of them end
        found.nothing_runs(5)
        found.finish(found.prepare())


def cut_off() -> None:
    with scene() as found:
        process, lost = found.prepare(), found.nodes[2]
        found.reach(5, process)
        lost.cut()
        (found.lab.place / "slow").unlink()
        found.lab.wait_for(lambda: not lost.processes("raylet"), "a host that is cut off ends its Ray", seconds=90)
        assert process.wait(240) == 0, found.lab.logs()
        assert tree(found.lab.place / "out") == found.right
        lost.plug()
        found.nothing_runs(30)


def killed_and_back() -> None:
    with scene() as found:
        process, lost = found.prepare(), found.nodes[1]
        found.reach(5, process)
        (found.lab.place / "hold").touch()
        lost.kill()
        found.lab.wait_for(lambda: f"{lost.address} is lost" in found.said(), "that a host is lost is said")
        lost.boot()
        found.lab.wait_for(lambda: f"{lost.address} is back" in found.said(), "it comes back", seconds=120)
        (found.lab.place / "hold").unlink()
        found.finish(process)


def killed_for_good() -> None:
    with scene() as found:
        process = found.prepare()
        found.reach(5, process)
        found.nodes[0].kill()
        found.finish(process)


def own_disks() -> None:
    with scene(slow=False) as found:
        words = ["tokenmill", "prepare", "corpus", "-o", "$LOCAL_DISK/out", "--hosts", "hosts.txt", *OPTIONS]
        words += ["--placement", "node-local", "--env-setup", "source setup.sh", "--json"]
        environment = {"LOCAL_DISK": "/srv/driver"}
        process = found.lab["launcher"].start(*words, stdout=subprocess.PIPE, env=environment)
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, found.lab.logs()
        result, right = json.loads(said), json.loads((found.lab.place / "right/dataset.json").read_text())
        assert result["tokens"] == right["splits"]["train"]["tokens"]
        tokens = [place["splits"]["train"]["tokens"] for place in result["nodes"]]
        assert [place["path"] for place in result["nodes"]] == ["/srv/disk/out"] * 3
        assert max(tokens) - min(tokens) < 40_000, "no more than two units"
        for node in found.nodes:
            check = ["ssh", "-p", str(node.port), node.address, f"{sys.executable} -m tokenmill verify /srv/disk/out"]
            assert found.lab["launcher"].start(*check, stdout=subprocess.DEVNULL).wait(60) == 0, found.lab.logs()


def refusals() -> None:
    with scene(slow=False) as found:
        (found.lab.place / "more.txt").write_text((found.lab.place / "hosts.txt").read_text() + "10.77.255.9 1\n")
        assert found.prepare(hosts="more.txt").wait(60) == 1
        assert re.search(r"1 of 4 hosts cannot be used:\n  10\.77\.255\.9: .*", found.said()), found.said()
        assert found.prepare("--env-setup", "source nowhere/bin/activate && false").wait(60) == 1
        assert "3 of 3 hosts cannot be used" in found.said()
        assert not (found.lab.place / "out").exists()
        found.nothing_runs(1)


def _signal_inside(found: Scene, number: signal.Signals) -> None:
    """Ctrl-C for the command, whose parent keeps its namespaces."""
    (pid,) = (p for p in found.lab["launcher"].processes("--hosts") if _is_command(p))
    subprocess.run(["kill", f"-{number.name.removeprefix('SIG')}", str(pid)], check=True)


def _is_command(process: int) -> bool:
    words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    return b"unshare" not in words[0] and any(word.endswith(b"tokenmill") for word in words[:2])


def _row(fault: str, history: Callable[[], None]) -> Row:
    begin = time.monotonic()
    try:
        history()
    except AssertionError as error:
        return Row(fault=fault, tried=1, wrong=(str(error)[:4000],), seconds=time.monotonic() - begin)
    return Row(fault=fault, tried=1, seconds=time.monotonic() - begin)


HISTORIES: dict[str, Callable[[], None]] = {
    "quiet, beside another Ray": quiet,
    "Ctrl-C": interrupted,
    "the launcher is killed": launcher_killed,
    "a host is cut off": cut_off,
    "a host is killed, and comes back": killed_and_back,
    "a host is killed": killed_for_good,
    "a part on the disk of each host": own_disks,
    "hosts that cannot be used": refusals,
}
EXPERIMENTS = [(name, partial(_row, name, history)) for name, history in HISTORIES.items()]
