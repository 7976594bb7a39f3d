"""The commands that move datasets: push and pull."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from tokenmill.cli import show
from tokenmill.cli.watching import Watcher

_PUSH = """
Put a dataset to an object store. Only what is missing or wrong there is moved. Killed? Run the same command again.

\b
Examples:
  tokenmill push data/owt s3://bucket/owt
  tokenmill push data/owt gs://bucket/owt-small --split val
"""
_PULL = """
Get a dataset from an object store. Only what is missing or wrong here is moved, and every file is hashed as it
arrives. Killed? Run the same command again: it goes on in the middle of a file.

\b
Examples:
  tokenmill pull s3://bucket/owt data/owt
  tokenmill pull s3://bucket/owt data/some --split train --shards 0-9
"""

Splits = Annotated[list[str] | None, typer.Option("--split", metavar="NAME", help="this split alone; may be repeated")]
Shards = Annotated[
    str | None,
    typer.Option("--shards", metavar="NUMBERS", help="these shards of each split alone, like 0-9 or 0,3,5-7"),
]
Workers = Annotated[int | None, typer.Option("-j", "--workers", metavar="N", help="files at once (4)")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="print nothing but errors")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="no bar and no progress lines")]


def add_commands(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(help=_PUSH)(push)
    app.command(help=_PULL)(pull)


def push(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="a dataset's folder", show_default=False)],
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://, gs:// or az://", show_default=False)],
    split: Splits = None,
    shards: Shards = None,
    workers: Workers = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> int:
    return _run("push", dataset, url, split, shards, workers, as_json, quiet, no_progress)


def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://, gs:// or az://", show_default=False)],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="the dataset's folder", show_default=False)],
    split: Splits = None,
    shards: Shards = None,
    workers: Workers = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> int:
    return _run("pull", url, folder, split, shards, workers, as_json, quiet, no_progress)


def _run(
    what: str,
    source: str,
    target: str,
    split: list[str] | None,
    shards: str | None,
    workers: int | None,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
) -> int:
    from tokenmill import moving

    move = moving.push if what == "push" else moving.pull
    with Watcher(quiet=quiet, verbose=False, progress=not no_progress) as watcher:
        moved = move(source, target, split=split, shards=shards, workers=workers, watch=watcher)
    if as_json:
        show.as_json(dataclasses.asdict(moved))
    elif not quiet:
        show.moved(moved)
    return 0
