"""From a list of hosts to a cluster file for `ray up`. The first host is the head; each gives its slots.

node1 16        host and slots; comments and empty lines are skipped
node2 32
"""

from __future__ import annotations

import getpass
import os
import re
from dataclasses import dataclass
from typing import Any

from tokenmill import arguments
from tokenmill.errors import RecipeError, hint_for

_COLUMNS = ("host", "slots")
_MAX_SLOTS = 100_000
PORT = 6379
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,251}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")
_HINT = "one host a line: its name or address, and how many units it may run at once, like `node1 16`"


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    slots: int


def cluster(hosts: str | os.PathLike[str], *, user: str | None = None) -> str:
    """The cluster file, as YAML, of a file with a `host slots` line for each host."""
    where = arguments.place("hosts", hosts)
    try:
        with open(where, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise RecipeError(f"{where} cannot be read: {error.strerror}", hint=hint_for(error, _HINT)) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{where} cannot be read: {error}", hint=_HINT) from None
    name = getpass.getuser() if user is None else arguments.text("user", user)
    if not _USER.fullmatch(name):
        raise RecipeError(f"{name!r} is not a user name", hint="give the one that logs in to the hosts")
    # Only here: the parser of files has a way to write them, too.
    import yaml

    return yaml.safe_dump(describe(parse_hosts(text, where=where), name), sort_keys=False, width=10_000)


def parse_hosts(text: str, *, where: str) -> list[Host]:
    """The hosts of a list. Errors name the line by its number."""
    found: dict[str, tuple[int, Host]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        at = f"{where}, line {number}"
        if len(words) != len(_COLUMNS):
            raise RecipeError(f"{at}: {line.strip()!r} is not a host and its slots", hint=_HINT)
        name, slots = words
        if not _HOST.fullmatch(name):
            raise RecipeError(f"{at}: {name!r} is not a host", hint=_HINT)
        if not (slots.isascii() and slots.isdecimal() and 1 <= int(slots) <= _MAX_SLOTS):
            raise RecipeError(f"{at}: {slots!r} is not a number of slots", hint=_HINT)
        if name in found:
            raise RecipeError(f"{at}: {name} is already in line {found[name][0]}", hint="add its slots up there")
        found[name] = (number, Host(name, int(slots)))
    if not found:
        raise RecipeError(f"{where} names no host", hint=_HINT)
    return [host for _, host in found.values()]


def describe(hosts: list[Host], user: str) -> dict[str, Any]:
    """The part of a cluster file that describes existing hosts."""
    head, *workers = hosts
    start = f"{_slots_here(hosts)}ray start --disable-usage-stats --num-cpus=$slots"
    return {
        "cluster_name": "tokenmill",
        "provider": {"type": "local", "head_ip": head.name, "worker_ips": [host.name for host in workers]},
        "auth": {"ssh_user": user},
        "min_workers": len(workers),
        "max_workers": len(workers),
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "head_start_ray_commands": [
            "ray stop",
            f"{start} --head --port={PORT} --dashboard-host=127.0.0.1 --autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": ["ray stop", f"{start} --address=$RAY_HEAD_IP:{PORT}"],
    }


def _slots_here(hosts: list[Host]) -> str:
    """Shell that sets `slots`. All hosts run the same commands, so each finds itself by its names and addresses."""
    if len({host.slots for host in hosts}) == 1:
        return f"slots={hosts[0].slots}; "
    cases = " ".join(f'*" {host.name} "*) slots={host.slots};;' for host in hosts)
    names = '" $(hostname) $(hostname -s) $(hostname -f) $(hostname -I) "'
    return f'case {names} in {cases} *) echo "this host is not in the list" >&2; exit 1;; esac; '
