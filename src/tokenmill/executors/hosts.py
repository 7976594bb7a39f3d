"""The file of hosts, and a cluster file for `ray up` made from it. The first host is the head there.

node1 16               host and slots: how many units it runs at once, normally one for each core
me@node2:2222 32       with a user and a port of SSH
node3                  without slots: as many as its cores and memory allow
                       comments and empty lines are skipped

Some lists for trainers have the same form, with GPUs or ranks as their numbers. A number that may be one is pointed
out, and a third column is refused.
"""

from __future__ import annotations

import getpass
import os
import re
from dataclasses import dataclass
from typing import Any

from tokenmill import arguments
from tokenmill.errors import RecipeError, hint_for

_MOST_COLUMNS = 2
_MAX_SLOTS = 100_000
_MAX_PORT = 65_535
PORT = 6379
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[A-Fa-f0-9]{0,4}:[A-Fa-f0-9:]*:[A-Fa-f0-9:.]*")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")
_WHOLE = re.compile(r"(?:(?P<user>[^@]*)@)?(?:\[(?P<bracketed>[^\[\]]*)\]|(?P<plain>[^\[\]]*?))(?::(?P<port>\d{1,6}))?")
_HINT = "one host a line, and how many units it may run at once, like `node1 16`; users and ports like me@node2:2222"
_GPUS = "leave GPUs and ranks out: units run on cores, so a host needs one number at most, like `node1 16`"


@dataclass(frozen=True, slots=True)
class Host:
    """A host. Without `slots` it runs as many units as it can; without `user` and `port` SSH decides."""

    name: str
    slots: int | None = None
    user: str = ""
    port: int | None = None


def read_hosts(hosts: str | os.PathLike[str]) -> list[Host]:
    """The hosts of a file."""
    where = arguments.place("hosts", hosts)
    try:
        with open(where, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise RecipeError(f"{where} cannot be read: {error.strerror}", hint=hint_for(error, _HINT)) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{where} cannot be read: {error}", hint=_HINT) from None
    return parse_hosts(text, where=where)


def cluster(hosts: str | os.PathLike[str], *, user: str | None = None) -> str:
    """The cluster file, as YAML, of a file with a `host slots` line for each host."""
    found = read_hosts(hosts)
    if any(host.port for host in found):
        raise RecipeError(
            "a cluster file of Ray has no ports", hint="put them into ~/.ssh/config, where Ray finds them"
        )
    users = sorted({host.user for host in found if host.user})
    if user is None and len(users) > 1:
        raise RecipeError(f"{hosts} has several users: {', '.join(users)}", hint="a cluster file has one: give `user`")
    name = (users[0] if users else getpass.getuser()) if user is None else arguments.text("user", user)
    if not _USER.fullmatch(name):
        raise RecipeError(f"{name!r} is not a user name", hint="give the one that logs in to the hosts")
    # Only here: the parser of files has a way to write them, too.
    import yaml

    return _COMMENT + yaml.safe_dump(describe(found, name), sort_keys=False, width=10_000)


_COMMENT = """\
# The numbers of the list are taken for slots: units that a host runs at once, normally one for each core.
# If they are GPUs or ranks, leave them out of the list, and every host uses all of its cores.
"""


def parse_hosts(text: str, *, where: str) -> list[Host]:
    """The hosts of a list. Errors name the line by its number."""
    found: dict[str, tuple[int, Host]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        at = f"{where}, line {number}"
        if len(words) > _MOST_COLUMNS:
            raise RecipeError(f"{at}: {line.strip()!r} has {len(words)} columns", hint=_GPUS)
        host = _host(words[0], _slots(words[1], at) if len(words) == _MOST_COLUMNS else None, at)
        if host.name in found:
            raise RecipeError(
                f"{at}: {host.name} is already in line {found[host.name][0]}", hint="add its slots up there"
            )
        found[host.name] = (number, host)
    if not found:
        raise RecipeError(f"{where} names no host", hint=_HINT)
    return [host for _, host in found.values()]


def _host(word: str, slots: int | None, at: str) -> Host:
    """A host from its first column: `node1`, `me@node1`, `node1:2222`, `[fd00::1]:2222`."""
    found = _WHOLE.fullmatch(word)
    if word.count(":") > 1 and "[" not in word:  # an address of version 6, without a port
        user, _, name = word.rpartition("@")
        port = None
    elif found is not None:
        user, name = found["user"] or "", found["bracketed"] or found["plain"] or ""
        port = int(found["port"]) if found["port"] else None
    else:
        user, name, port = "", "", None
    if not _HOST.fullmatch(name) or ("@" in word and not _USER.fullmatch(user)):
        raise RecipeError(f"{at}: {word!r} is not a host", hint=_HINT)
    if port is not None and not 1 <= port <= _MAX_PORT:
        raise RecipeError(f"{at}: {port} is not a port", hint=_HINT)
    return Host(name, slots, user, port)


def _slots(word: str, at: str) -> int:
    word = word.removeprefix("slots=")
    if not (word.isascii() and word.isdecimal() and 1 <= int(word) <= _MAX_SLOTS):
        raise RecipeError(f"{at}: {word!r} is not a number of slots", hint=_GPUS if "," in word else _HINT)
    return int(word)


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
    slots = {host.name: "$(nproc)" if host.slots is None else host.slots for host in hosts}
    if len(set(slots.values())) == 1:
        return f"slots={slots[hosts[0].name]}; "
    cases = " ".join(f'*" {name} "*) slots={number};;' for name, number in slots.items())
    names = '" $(hostname) $(hostname -s) $(hostname -f) $(hostname -I) "'
    return f'case {names} in {cases} *) echo "this host is not in the list" >&2; exit 1;; esac; '
