"""A temporary Ray cluster on the hosts of a list, started over SSH from this machine: `prepare --hosts hosts.txt`.

    check    every host: reachable? the same tokenmill, engine, Ray and Python?
    start    the head here, without slots; an agent on every host starts a node there (host_agent.py)
    watch    a host that is lost is tried again every few seconds, and joins when it is back
    stop     the agents kill what they have started, and nothing else

Only SSH needs to be set up. A host tells at which address it sees this machine, and that is where the head listens. The
cluster has a token of its own, which goes to the hosts over SSH and is shown nowhere.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import BuildError
from tokenmill.executors.host_agent import BEAT_SECONDS
from tokenmill.executors.hosts import Host
from tokenmill.executors.ray_cluster import STORE_BYTES, local_environment

CONNECT_SECONDS = 10
CHECK_SECONDS = 60.0
START_SECONDS = 120.0
RETRY_SECONDS = 10.0
_AT_ONCE = 64
# A list with so many times fewer slots than cores may be one of GPUs.
_FEW_SLOTS = 4
_TAIL_LINES = 12
# Whose versions must be the same everywhere.
_PACKAGES = ("tokenmill", "gigatoken", "ray", "pyarrow")
_MARK = "tokenmill: "
_PROBE = f"""
import importlib.metadata as m, json, os, platform, sys
def version(name):
    try: return m.version(name)
    except Exception: return ""
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
try:
    from tokenmill.resources import resolve_workers
    slots = resolve_workers(None)
except Exception: slots = cores
versions = {{name: version(name) for name in sys.argv[1:]}}
versions["Python"] = platform.python_version()
print({_MARK!r} + json.dumps(dict(host=platform.node(), cores=cores, slots=slots, versions=versions,
      connection=os.environ.get("SSH_CONNECTION", ""))))
"""


@dataclass(frozen=True, slots=True)
class CheckedHost:
    """A host that can be used: its own name, its cores and slots, and the addresses of both ends of the connection."""

    host: Host
    name: str
    cores: int
    slots: int
    launcher: str
    address: str


class HostCluster:
    """The hosts of a list as a Ray cluster. `tell` receives sentences for the user."""

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        env_setup: str | None = None,
        ssh_key: str | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._hosts, self._env_setup, self._ssh_key, self._tell = hosts, env_setup, ssh_key, tell
        self._checked: list[CheckedHost] = []
        self._agents: list[_Agent] = []
        self._stopping = threading.Event()
        self._secret = local_environment()
        # On every host; Ray's sockets need a short path.
        self._place = f"/tmp/tokenmill-ray-{secrets.token_hex(4)}"  # noqa: S108 - random, and Ray makes it
        self.address = ""

    @property
    def environment(self) -> dict[str, str]:
        """What a program that joins the cluster needs in its environment."""
        return self._secret

    def check(self) -> None:
        """Raise `BuildError` unless all hosts can be used."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tokenmill-ssh") as pool:
            answers = list(pool.map(self._probe, self._hosts))
        if wrong := [answer for answer in answers if isinstance(answer, _Refusal)]:
            lines = "\n  ".join(f"{refusal.host.name}: {refusal.reason}" for refusal in wrong)
            hint = next((refusal.hint for refusal in wrong if refusal.hint), "")
            raise BuildError(f"{len(wrong)} of {len(answers)} hosts cannot be used:\n  {lines}", hint=hint)
        self._checked = [answer for answer in answers if isinstance(answer, CheckedHost)]
        for found in self._checked:
            if found.host.slots is not None and _FEW_SLOTS * found.host.slots <= found.cores:
                self._tell(
                    f"{found.host.name} has {found.cores} cores and gets {found.host.slots} slots, as the list says; "
                    "if that is its number of GPUs, leave it out of the list"
                )

    def start(self) -> None:
        """Start the cluster, and wait until all hosts have joined."""
        if self.address:
            return
        if not self._checked:
            self.check()
        ip = _own_address(self._checked)
        self.address = f"{ip}:{_free_port(ip)}"
        head = [
            "start",
            "--head",
            "--num-cpus=0",
            f"--port={self.address.rpartition(':')[2]}",
            "--include-dashboard=false",
        ]
        head += [f"--temp-dir={self._place}", *_common(ip)]
        if importlib.util.find_spec("grpc") is not None:  # then the head serves clients, too
            head.append(f"--ray-client-server-port={_free_port(ip)}")
        self._start_agent("this machine", [sys.executable, "-m", _AGENT], head, is_here=True)
        _wait([self._agents[0]])
        for found in self._checked:
            address = ip if found.address.startswith("127.") or found.address == "::1" else found.address
            node = ["start", f"--address={self.address}", f"--num-cpus={found.slots}", *_common(address)]
            self._start_agent(
                found.host.name, self._ssh(found.host, f'"$p" -m {_AGENT}'), node, is_here=found.name == platform.node()
            )
        self._tell(f"Ray starts on {len(self._checked)} hosts, with {sum(one.slots for one in self._checked)} slots")
        threading.Thread(target=self._beat, name="tokenmill-beat", daemon=True).start()
        _wait(self._agents)

    def stop(self) -> None:
        """End what was started. The agents do that by themselves if this program dies."""
        self._stopping.set()
        for agent in self._agents:
            agent.stop()
        deadline = time.monotonic() + _END_SECONDS
        for agent in self._agents:
            agent.join(deadline)
        self._agents.clear()

    def _start_agent(self, name: str, command: list[str], arguments: list[str], *, is_here: bool) -> None:
        # A node on this machine shares the folder with the head, whose agent removes it.
        place = "" if is_here and self._agents else self._place
        request = {"arguments": arguments, "environment": self._secret, "place": place}
        self._agents.append(_Agent(name, command, request, self._stopping, self._tell))

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_SECONDS):
            for agent in list(self._agents):
                agent.beat()

    def _probe(self, host: Host) -> CheckedHost | _Refusal:
        command = self._ssh(host, f'"$p" -c {shlex.quote(_PROBE)} {" ".join(_PACKAGES)}')
        try:
            done = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHECK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return _Refusal(host, f"does not answer within {CHECK_SECONDS:.0f} s")
        except OSError as error:
            return _Refusal(host, f"ssh cannot be started: {error.strerror}", "install OpenSSH's client")
        lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
        if not lines:
            return _refusal_of(host, done, has_setup=self._env_setup is not None)
        found = json.loads(lines[-1].removeprefix(_MARK))
        if wrong := _differences(found["versions"]):
            return _Refusal(host, wrong, _install_hint(host, has_setup=self._env_setup is not None))
        launcher, _, address, _ = (found["connection"].split() + [""] * 4)[:4]
        slots = found["slots"] if host.slots is None else host.slots
        return CheckedHost(host, found["host"], found["cores"], slots, launcher, address)

    def _ssh(self, host: Host, command: str) -> list[str]:
        """The command line that runs `command` on a host, where $p is its Python."""
        if self._env_setup is None:
            own = shlex.quote(sys.executable)
            find = f"if [ -x {own} ]; then p={own}; else p=python3; fi"
        else:
            find = f"{self._env_setup}\np=$(command -v python || command -v python3)"
        options = [
            f"ConnectTimeout={CONNECT_SECONDS}",
            "BatchMode=yes",
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
        ]
        line = ["ssh", "-T", *(word for option in options for word in ("-o", option))]
        if self._ssh_key is not None:
            line += ["-i", self._ssh_key]
        if host.port is not None:
            line += ["-p", str(host.port)]
        target = f"{host.user}@{host.name}" if host.user else host.name
        return [*line, "--", target, f"exec bash -c {shlex.quote(f'{find}; exec {command}')}"]


_AGENT = "tokenmill.executors.host_agent"


def _common(address: str) -> list[str]:
    """Options of all nodes. No range of ports, which another Ray may use."""
    ports = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    return [
        f"--node-ip-address={address}",
        *ports,
        "--disable-usage-stats",
        f"--object-store-memory={STORE_BYTES}",
        "--block",
    ]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a host cannot be used."""

    host: Host
    reason: str
    hint: str = ""


def _refusal_of(host: Host, done: subprocess.CompletedProcess[str], *, has_setup: bool) -> _Refusal:
    """Why a host gave no answer: SSH failed, or there is no Python."""
    said = [line.strip() for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
    reason = said[-1] if said else f"ssh ended with exit code {done.returncode}"
    if done.returncode == _SSH_FAILED:
        return _Refusal(host, reason, "`ssh HOST true` must work without a question: check names, users and keys")
    return _Refusal(host, f"Python does not start: {reason}", _install_hint(host, has_setup=has_setup))


_SSH_FAILED = 255


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _differences(theirs: dict[str, str]) -> str:
    """What a host lacks or has in another version than this machine; empty if nothing."""
    lines = []
    for name, ours in _versions().items():
        found = theirs.get(name, "")
        if found != ours:
            lines.append(f"{name} {found}, here {ours}" if found else f"{name} is not installed")
    return "; ".join(lines)


def _install_hint(host: Host, *, has_setup: bool) -> str:
    packages = " ".join(shlex.quote(f"{name}=={version}") for name, version in _versions().items() if name != "Python")
    target = f"{host.user}@{host.name}" if host.user else host.name
    where = (
        "" if has_setup else "; if it is in a virtual environment there, give `env_setup='source venv/bin/activate'`"
    )
    port = f"-p {host.port} " if host.port else ""
    return f"install the same on every host: ssh {port}{target} pip install {packages}, with this Python{where}"


def _own_address(hosts: Sequence[CheckedHost]) -> str:
    """The address at which most hosts see this machine. It must be one of its own."""
    seen = Counter(host.launcher for host in hosts if host.launcher and not host.launcher.startswith("127."))
    if not seen:
        return "127.0.0.1"
    address = seen.most_common(1)[0][0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as trial:
            trial.bind((address, 0))
    except OSError:
        raise BuildError(
            f"the hosts see this machine at {address}, which is not an address of it",
            hint="the hosts must reach this machine: run the command on one of them, or in their network",
        ) from None
    return address


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        trial.bind((address, 0))
        return int(trial.getsockname()[1])


class _Agent:
    """The agent on one host, and its supervisor: a thread that starts it again if it is lost."""

    def __init__(
        self,
        name: str,
        command: list[str],
        request: dict[str, Any],
        stopping: threading.Event,
        tell: Callable[[str], None],
    ) -> None:
        self.name, self._command, self._request = name, command, request
        self._stopping, self._tell = stopping, tell
        self._process: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.joined, self.failed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._supervise, name=f"tokenmill-{name}", daemon=True)
        self._thread.start()

    @property
    def reason(self) -> str:
        """Why it did not start, in the words of SSH or Ray."""
        return "\n    ".join(self._tail) or "no reason given"

    def beat(self) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                os.write(process.stdin.fileno(), b"\n")

    def stop(self) -> None:
        """Close the agent's life line."""
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def join(self, deadline: float) -> None:
        """Wait for the agent, which ends at once; one that is cut off is not waited for."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._process is not None:
            self._process.kill()

    def _supervise(self) -> None:
        while True:
            self._run()
            if self._stopping.is_set():
                return
            if not self.joined.is_set():
                self.failed.set()
                return
            self._tell(
                f"{self.name} is lost; its units run elsewhere, and it is tried again every {RETRY_SECONDS:.0f} s"
            )
            self._come_back()

    def _come_back(self) -> None:
        while not self._stopping.wait(RETRY_SECONDS):
            self._tail.clear()
            self.joined.clear()
            self._run(back=True)
            if self.joined.is_set() or self._stopping.is_set():
                return

    def _run(self, *, back: bool = False) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            # In a session of its own: Ctrl-C in a terminal is for the launcher, which ends the others in turn.
            self._process = process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        with contextlib.suppress(OSError, ValueError):
            os.write(process.stdin.fileno(), json.dumps(self._request).encode() + b"\n")
        for line in process.stdout:
            self._hear(line.decode(errors="replace").strip(), back=back)
        process.wait()

    def _hear(self, line: str, *, back: bool) -> None:
        message = json.loads(line) if re.fullmatch(r'\{"kind": .*\}', line) else {"kind": "", "log": [line]}
        if message["kind"] == "up":
            self.joined.set()
            if back:
                self._tell(f"{self.name} is back")
        else:
            self._tail.extend(said for said in message["log"] if said)


_END_SECONDS = 1.0


def _wait(agents: Sequence[_Agent]) -> None:
    """Wait until all nodes have joined. Raises `BuildError` with what those said that did not."""
    deadline = time.monotonic() + START_SECONDS
    while waiting := [agent for agent in agents if not agent.joined.is_set()]:
        failed = [agent for agent in waiting if agent.failed.is_set()]
        late = time.monotonic() > deadline
        if failed or late:
            lines = [f"{agent.name}: {agent.reason}" for agent in (failed or waiting)]
            raise BuildError(
                "Ray does not start:\n  " + "\n  ".join(lines),
                hint="the hosts must reach each other and this machine at any port"
                if late
                else "`ssh HOST ray start --help` must work there",
            )
        waiting[0].joined.wait(0.1)
