"""Hosts in network namespaces of this machine: each with an address, a sshd, a home, a /tmp and processes of its own.

    switch      a bridge in a namespace of its own: no packet leaves it
    launcher    10.77.N.1    where commands run
    node1 ...   10.77.N.11   hosts; `cut` pulls the cable, `kill` is a power cut, `boot` brings it back

All of them see the lab's folder at /mnt/lab, as a file system that they share. Everything ends with the `with` block.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARED = "/mnt/lab"
# Of root on all machines; the interpreter may be in the real one.
HOME = "/srv"
# Its own mounts: what other hosts have in these places is not seen.
_MOUNTS = """
set -e
mount --make-rprivate /
mkdir -p {shared}
mount --bind {lab} {shared}
mkdir -p {shared}.checkout
mount --bind {checkout} {shared}.checkout
for place in {home} /tmp /dev/shm /run; do mount -t tmpfs tmpfs $place; done
sed 's#^root:.*#root:x:0:0:root:{home}:/bin/bash#' /etc/passwd > /tmp/passwd
mount --bind /tmp/passwd /etc/passwd
mkdir -p {checkout}
mount --bind {shared}.checkout {checkout}
mkdir -p /run/sshd {home}/.ssh {home}/disk
cp {shared}/ssh/known_hosts {shared}/ssh/authorized_keys {home}/.ssh/
cp {shared}/ssh/client {home}/.ssh/id_ed25519
chmod -R go= {home}
printf 'export LOCAL_DISK={home}/disk\nPATH={programs}:$PATH\n' > {home}/setup.sh
"""
_SSHD = """
Port {port}
ListenAddress {address}
HostKey {shared}/ssh/host
AuthorizedKeysFile {home}/.ssh/authorized_keys
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 50
"""


def _mounts(place: Path) -> str:
    """The script of a machine's mounts. The checkout may be in /tmp, of which each machine has its own."""
    checkout = Path(__file__).resolve().parents[2]
    return _MOUNTS.format(lab=place, shared=SHARED, home=HOME, programs=_programs(), checkout=checkout)


def why_not() -> str:
    """Why there can be no lab on this machine; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "sshd", "ssh", "unshare", "ssh-keygen"):
        if shutil.which(program) is None and not os.path.exists(f"/usr/sbin/{program}"):
            return f"{program} is not installed: `make cluster` installs it"
    name = f"tm-try-{os.getpid()}"
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if added.returncode:
        return f"the kernel does not allow network namespaces: {added.stderr.strip()}"
    try:
        inside = ["ip", "netns", "exec", name, "unshare", "--mount", "--pid", "--uts", "--fork", "mount", "-t", "tmpfs"]
        mounted = subprocess.run([*inside, "tmpfs", "/mnt"], capture_output=True, text=True)
        return f"the kernel does not allow mount namespaces: {mounted.stderr.strip()}" if mounted.returncode else ""
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@dataclass
class Machine:
    """A host of the lab. `process` is the first one of its process namespace: if it ends, all end."""

    lab: Lab
    name: str
    address: str
    port: int = 22
    process: subprocess.Popen[bytes] | None = None

    @property
    def netns(self) -> str:
        return f"{self.lab.name}-{self.name}"

    def boot(self) -> None:
        """Start its sshd; its home, /tmp and memory are empty, as after a new installation."""
        config = self.lab.place / "ssh" / f"{self.name}.conf"
        config.write_text(_SSHD.format(port=self.port, address=self.address, shared=SHARED, home=HOME))
        script = _mounts(self.lab.place)
        script += f"hostname {self.name}\nexec /usr/sbin/sshd -D -e -f {SHARED}/ssh/{self.name}.conf\n"
        log = (self.lab.place / f"{self.name}.log").open("ab")
        self.process = subprocess.Popen(
            [*self._inside(), "bash", "-c", script], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        log.close()
        self.lab.wait_for(self._listens, f"sshd of {self.name}")

    def kill(self) -> None:
        """A power cut: all of its processes end at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def cut(self) -> None:
        """Pull its cable."""
        _ip("-n", self.netns, "link", "set", "eth0", "down")

    def plug(self) -> None:
        _ip("-n", self.netns, "link", "set", "eth0", "up")

    def start(self, *command: object, **options: Any) -> subprocess.Popen[str]:
        """A command here, with mounts of its own over those of the real machine."""
        script = _mounts(self.lab.place) + 'exec "$@"\n'
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"HOME": HOME, "PATH": f"{_programs()}:{os.environ['PATH']}"}
        environment |= options.pop("env", {})
        line = [*self._inside(), "bash", "-c", script, "bash", *map(str, command)]
        return subprocess.Popen(line, text=True, env=environment, cwd=self.lab.place, **options)

    def processes(self, of: str = "ray") -> list[int]:
        """Its processes whose command lines contain a word."""
        found = subprocess.run(["ip", "netns", "pids", self.netns], capture_output=True, text=True)
        pids = []
        for word in found.stdout.split():
            with contextlib.suppress(OSError):
                if of.encode() in Path(f"/proc/{word}/cmdline").read_bytes():
                    pids.append(int(word))
        return pids

    def _inside(self) -> list[str]:
        spaces = ["--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.netns, "unshare", *spaces]

    def _listens(self) -> bool:
        check = f"exec 3<>/dev/tcp/{self.address}/{self.port}"
        return (
            subprocess.run(["ip", "netns", "exec", self.netns, "bash", "-c", check], capture_output=True).returncode
            == 0
        )


@dataclass
class Lab:
    """The machines of a lab, and the folder that they share."""

    place: Path
    name: str = field(default_factory=lambda: f"tm{secrets.token_hex(3)}")
    machines: dict[str, Machine] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def wait_for(self, holds: Any, what: str, *, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.logs()}"
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-800:]}" for log in self.place.glob("*.log"))


@contextlib.contextmanager
def network(place: Path, *, nodes: int, ports: dict[str, int] | None = None) -> Iterator[Lab]:
    """A lab of so many hosts and a launcher. `ports` are those of sshds that do not listen at 22."""
    place.chmod(0o755)
    lab = Lab(place)
    switch, third = f"{lab.name}-switch", int(lab.name[2:4], 16)
    names = ["launcher", *(f"node{number}" for number in range(1, nodes + 1))]
    _make_keys(place / "ssh")
    made: list[str] = []
    try:
        _ip("netns", "add", switch)
        made.append(switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            address = f"10.77.{third}.{number + 10}"
            machine = lab.machines[name] = Machine(lab, name, address, (ports or {}).get(name, 22))
            _ip("netns", "add", machine.netns)
            made.append(machine.netns)
            _ip(
                "-n",
                switch,
                "link",
                "add",
                f"port{number}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                machine.netns,
            )
            _ip("-n", switch, "link", "set", f"port{number}", "master", "br0", "up")
            _ip("-n", machine.netns, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", machine.netns, "link", "set", "lo", "up")
            _ip("-n", machine.netns, "link", "set", "eth0", "up")
        for machine in lab.machines.values():
            _know(place / "ssh", machine)
        for name in names[1:]:
            lab[name].boot()
        yield lab
    finally:
        for machine in lab.machines.values():
            machine.kill()
        for netns in made:
            for pid in subprocess.run(["ip", "netns", "pids", netns], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", netns], capture_output=True)


def _programs() -> str:
    """The folder of tokenmill and its Python, as a virtual environment puts it into PATH."""
    return os.path.dirname(sys.executable)


def _make_keys(place: Path) -> None:
    place.mkdir()
    for name in ("host", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / name], check=True)
    shutil.copy(place / "client.pub", place / "authorized_keys")
    (place / "known_hosts").touch()


def _know(place: Path, machine: Machine) -> None:
    """The keys of hosts are known beforehand: SSH asks nobody."""
    where = machine.address if machine.port == 22 else f"[{machine.address}]:{machine.port}"
    with (place / "known_hosts").open("a") as file:
        file.write(f"{where} {(place / 'host.pub').read_text()}")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
