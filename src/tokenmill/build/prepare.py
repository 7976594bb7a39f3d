"""prepare: sources in, a finished dataset out; the same call again goes on where it stopped.

Light: it hires the workers first and then loads the build, so that both load at the same time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenmill import manifest as manifests
from tokenmill.build.crew import Crew
from tokenmill.cores import resolve_workers
from tokenmill.errors import RecipeError
from tokenmill.manifest import Manifest
from tokenmill.storage import local_folder, open_folder

if TYPE_CHECKING:
    from tokenmill.build.build import Hire
    from tokenmill.build.progress import Watcher
    from tokenmill.layouts.exporting import Exported

EXECUTORS = ("local", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished dataset, and whether there was anything left to do."""

    output: str
    manifest: Manifest
    already_complete: bool
    seconds: float
    export: Exported | None = None


def prepare(
    sources: str | Sequence[str] = (),
    output: str | os.PathLike[str] = "",
    *,
    config: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    restart: bool = False,
    layout: str | None = None,
    wait: bool = False,
    timeout: float | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    watch: Watcher | None = None,
    **recipe: Any,
) -> Result:
    """Turn sources into a finished dataset at `output`. Called again, it goes on where it stopped.

    The other arguments are the fields of a recipe, as on the command line: `tokenizer`,
    `text_column`, `template`, `documents`, `eot`, `split`, `val_sources`, `max_tokens`, ...
    `watch` hears of progress, as dicts. `layout` (`nanogpt`, or with options `templar:seq_len=2048`) also exports the
    dataset, to a folder of that name inside `output`.

    Every rank of a job may call it at the same time with `wait`: one of them builds, the others
    wait for it, up to `timeout` seconds if that is given; they take over if it dies, and get its error if it fails.

    With `executor="ray"` the units are tasks of the cluster at `ray_address` (or of the one that is found, or of a
    Ray of this machine for the while); `workers` then limits how many of them run at once.
    """
    begin = time.monotonic()
    if not output:
        raise RecipeError("no output is given", hint="add -o OUT")
    if wait and restart:
        raise RecipeError("each one who waits would start the build over", hint="start it over first, without waiting")
    _check_executor(executor, ray_address)
    folder = open_folder(output, spool=scratch)
    count = resolve_workers(workers)
    # Who only waits needs no workers; who builds in the end hires them then.
    early = count > 1 and executor == "local" and not wait and not folder.exists(manifests.NAME)
    crew = Crew(count) if early else None
    try:
        from tokenmill.build.beside import check_layout, export_beside
        from tokenmill.build.build import build, make_executor
        from tokenmill.build.waiting import wait_for
        from tokenmill.recipe import make_recipe

        given = (sources,) if isinstance(sources, str) else tuple(sources)
        wanted = make_recipe({"sources": given, **recipe}, config=config)
        if layout is not None:
            check_layout(layout, wanted)

        hire: Hire = partial(make_executor, count, crew)
        if executor == "ray":
            from tokenmill.build.ray import Ray

            hire = partial(Ray, address=ray_address, workers=workers)

        def attempt() -> tuple[Manifest, bool, Exported | None]:
            done = build(
                wanted,
                folder,
                hire=hire,
                scratch=None if scratch is None else local_folder(scratch).path,
                restart=restart,
                watch=watch,
            )
            if layout is None:
                return *done, None
            return *done, export_beside(
                folder.path, layout, workers=count, scratch=scratch, restart=restart, watch=watch
            )

        def tell(message: str) -> None:
            if watch is not None:
                watch({"kind": "waiting", "message": message})

        found, already_complete, exported = wait_for(folder, attempt, timeout=timeout, tell=tell) if wait else attempt()
    finally:
        if crew is not None:
            crew.stop()
    return Result(
        output=folder.path,
        manifest=found,
        already_complete=already_complete,
        seconds=time.monotonic() - begin,
        export=exported,
    )


def _check_executor(executor: str, ray_address: str | None) -> None:
    if executor not in EXECUTORS:
        raise RecipeError(f"{executor!r} is no executor", hint=f"one of {', '.join(EXECUTORS)}")
    if ray_address is not None and executor != "ray":
        raise RecipeError("an address of a Ray cluster is given, and no Ray", hint="add --executor ray")
