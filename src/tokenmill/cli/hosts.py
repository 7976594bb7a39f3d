"""The command that makes a Ray cluster file of a list of hosts."""

from __future__ import annotations

from typing import Annotated

import typer

_CLUSTER = """
Print a cluster file for `ray up`, from a file with a `host slots` line for each host. The first one is the head.

\b
Example:
  tokenmill cluster hosts.txt > cluster.yaml
  ray up cluster.yaml
"""


def add_commands(app: typer.Typer) -> None:
    """Register the command."""
    app.command(help=_CLUSTER)(cluster)


def cluster(
    hosts: Annotated[str, typer.Argument(metavar="HOSTS", help="a file like: node1 16", show_default=False)],
    user: Annotated[str | None, typer.Option(metavar="NAME", help="who logs in to the hosts; you by default")] = None,
) -> int:
    from tokenmill.hosts import cluster

    print(cluster(hosts, user=user), end="")
    return 0
