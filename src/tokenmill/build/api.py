"""prepare(): checks its arguments, starts workers and runs the build. The same call again resumes.

Light: it starts the worker processes first and then loads the build, so that both load at the same time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from tokenmill import arguments
from tokenmill.arguments import RecipeOptions, Sources, TableOfTexts, Texts, Watcher
from tokenmill.dataset import manifest as manifests
from tokenmill.dataset.manifest import Manifest, Nodes
from tokenmill.errors import LockedError, RecipeError
from tokenmill.executors.forkserver import WorkerProcesses, needs_processes
from tokenmill.formats.results import ExportResult
from tokenmill.resources import check_addresses, num_cores, resolve_workers
from tokenmill.sizes import counted, format_seconds
from tokenmill.storage.base import Storage, is_url, local_folder, open_folder

if TYPE_CHECKING:
    from tokenmill.build.pipeline import BuildOptions, ExecutorFactory
    from tokenmill.executors.base import Executor
    from tokenmill.executors.host_cluster import HostCluster
    from tokenmill.recipe import Recipe
    from tokenmill.tokenizers.spec import TokenizerSpec
    from tokenmill.units.task import BuildConfig


EXECUTORS = ("local", "ray")
PLACEMENTS = ("shared", "node-local")
# How long an earlier build of the same part, stopped a moment ago, may take to end.
ENDING_SECONDS = 30.0
_TAKE_OVER = "stop it and run the same command again"
_PART_IS_LOCAL = "a part runs in worker processes of one machine, on an output that all parts share"
_NO_BESIDES = "each part is on a disk of its node already; export each one on its node"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """Part `number` of `into`, which has so many `units`, and how many units of all parts are still missing.

    `is_joined` if the dataset is complete already.
    """

    number: int
    into: int
    units: int
    missing_units: int
    is_joined: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """A finished dataset, and whether it was complete already. `seconds` excludes the time of waiting.

    `notes` are sentences that the user should read.

    If it is in parts on `nodes`, `output` is as it was given, and the manifest has the totals of all parts. If one
    `part` was built, it is not a dataset yet: the manifest has the totals of the part, and no files.
    """

    output: str
    manifest: Manifest
    already_complete: bool
    seconds: float
    export: ExportResult | None = None
    nodes: Nodes | None = None
    part: PartStatus | None = None
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return self.manifest.tokens

    @property
    def documents(self) -> int:
        return self.manifest.documents

    def __repr__(self) -> str:
        done = "complete already" if self.already_complete else f"done in {format_seconds(self.seconds)}"
        totals = f"{counted(self.tokens, 'token')}, {counted(self.documents, 'document')}"
        of = f", part {self.part.number}/{self.part.into}" if self.part is not None else ""
        return f"PrepareResult({self.output!r}{of}: {totals} in {', '.join(self.manifest.splits)}; {done})"


def prepare(
    sources: Sources | Texts | TableOfTexts = (),
    output: str | os.PathLike[str] = "",
    *,
    config: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    restart: bool = False,
    update: bool = False,
    layout: str | None = None,
    only_layout: bool = False,
    wait: bool = False,
    timeout: float | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    placement: str = "shared",
    part: str | None = None,
    hosts: str | os.PathLike[str] | None = None,
    env_setup: str | None = None,
    ssh_key: str | os.PathLike[str] | None = None,
    watch: Watcher | None = None,
    **recipe: Unpack[RecipeOptions],
) -> PrepareResult:
    """Turn sources into a finished dataset at `output`. Called again, it resumes.

    The other arguments are the fields of a recipe, as on the command line: `tokenizer`,
    `text_column`, `template`, `documents`, `eot`, `split`, `val_sources`, `max_tokens`, ...
    `watch` is called with progress events, which are dicts. `layout` (`nanogpt`, or with options
    `templar:seq_len=2048`) also exports the dataset, to a folder of that name inside `output`. The result has `tokens`,
    `documents` and the whole `manifest`.

    With `only_layout` the dataset is removed once that export is complete and was compared, so that the tokens are on
    the disk once. Given up with it: `repair`, `verify` against the sources, provenance, other exports.

    `sources` may also be a function that returns texts or rows (a generator function, or `lambda: texts`), or a
    `datasets.Dataset`. Its texts are stored in `.build/sources` of the output first. A resumed build calls it again,
    and refuses other texts.

    If sources of an unfinished build have changed, `update` keeps the units of the others, and `restart` keeps nothing.

    Every rank of a job may call it at the same time with `wait`: one of them builds, the others
    wait for it, up to `timeout` seconds if that is given; they take over if it dies, and get its error if it fails.

    With `executor="ray"` the units are tasks of the cluster at `ray_address` (or of the one that is found, or of a
    temporary local Ray); `workers` then limits how many of them run at once.

    With `placement="node-local"` as well, every node keeps a part of the dataset at `output` on its own disk, and
    `nodes.json` there says which node has which part. Variables in `output` are expanded on the node; `workers` are per
    node.

    With `hosts`, a file with a line `host [slots]` for each host, a temporary Ray cluster is started on them over SSH,
    and stopped at the end. `env_setup` is a line of shell that runs there first, like `source venv/bin/activate`;
    `ssh_key` is the file of a private key.

    With `part="2/4"` only the second quarter of the units is done, and `tokenmill.join` makes the dataset when all
    parts are done, on any machines that share the output.
    """
    begin = time.monotonic()
    arguments.function_or_none("watch", watch)
    notes, watch = _noting(watch)
    if output is None or output == "":
        raise RecipeError("no output is given", hint="give the folder or URL of the dataset with `output='OUT'`")
    output, scratch = arguments.place("output", output), arguments.place_or_none("scratch", scratch)
    workers, layout = arguments.workers_or_none(workers), arguments.text_or_none("layout", layout)
    wait, restart, update, timeout = _check_flags(wait=wait, restart=restart, update=update, timeout=timeout)
    executor = _check_hosts(hosts, executor, {"ray_address": ray_address, "part": part}, (env_setup, ssh_key))
    check_executor(executor, ray_address, placement)
    only_layout, fields = check_only_layout(only_layout, layout), {"sources": sources, **recipe}
    is_given = {"layout": layout is not None, "restart": restart, "wait": wait, "update": update}
    _check_part(part, sources, {**is_given, "executor": executor != "local"})
    if placement == "node-local":
        _check_node_local(layout is not None or scratch is not None, sources, update=update)
        return _prepare_on_nodes(
            fields,
            output,
            cluster=None if hosts is None else _host_cluster(hosts, env_setup, ssh_key, watch),
            config=config,
            address=ray_address,
            workers=workers,
            restart=restart,
            patience=timeout if wait else ENDING_SECONDS,
            notes=notes,
            watch=watch,
        )
    folder = open_folder(output, spool=scratch)
    check_place(layout, folder)
    # On a cluster the cores of this machine do not count.
    check_addresses()
    count = resolve_workers(workers) if executor == "local" else num_cores()
    # A process that waits needs no workers; if it builds in the end, it starts them then.
    early = (
        needs_processes(count, folder) and executor == "local" and not wait and not folder.exists(manifests.MANIFEST)
    )
    processes = WorkerProcesses(count) if early else None
    cluster = None if hosts is None else _host_cluster(hosts, env_setup, ssh_key, watch)
    try:
        from tokenmill.build.pipeline import BuildOptions
        from tokenmill.build.wait import wait_for
        from tokenmill.recipe import make_recipe

        wanted = make_recipe(_with_texts_stored(fields, folder, restart=restart), config=config)
        run = _runner(part, layout, only_layout=only_layout, workers=count)
        besides = _bytes_of_layout(layout, wanted, folder)
        start_executor: ExecutorFactory = partial(open_executor, count, processes)
        if executor == "ray":
            from tokenmill.executors.ray import RayExecutor  # without Ray, an error before anything is written

            start_executor = partial(RayExecutor, address=ray_address, workers=workers, hosts=cluster)
        loading = time.monotonic() - begin

        def attempt(on_lock: Callable[[], None] = lambda: None) -> PrepareResult:
            begin = time.monotonic()
            place = None if scratch is None else local_folder(scratch).path
            options = BuildOptions(
                start_executor=start_executor,
                scratch=place,
                restart=restart,
                update=update,
                watch=watch,
                on_lock=on_lock,
                **besides,
            )
            found, already_complete, besides_it = run(wanted, folder, options)
            return PrepareResult(
                output=folder.path,
                manifest=found,
                already_complete=already_complete,
                seconds=loading + time.monotonic() - begin,
                **besides_it,
                notes=tuple(dict.fromkeys(notes)),
            )

        if wait:
            return wait_for(
                folder,
                attempt,
                timeout=timeout,
                tell=lambda message: watch({"kind": "waiting", "message": message}),
            )
        try:
            return attempt()
        except LockedError as error:
            hint = f"wait for it with `wait=True`, or {_TAKE_OVER}" if part is None else error.hint
            raise LockedError(error.message, hint=hint) from None
    finally:
        for started in (processes, cluster):
            if started is not None:
                started.stop()


def _host_cluster(
    hosts: str | os.PathLike[str], env_setup: str | None, ssh_key: str | os.PathLike[str] | None, watch: Watcher
) -> HostCluster:
    """A cluster on the hosts of a file, which are checked now and started when units run."""
    from tokenmill.executors.host_cluster import HostCluster  # without Ray, an error before anything is written
    from tokenmill.executors.hosts import read_hosts

    cluster = HostCluster(
        read_hosts(hosts),
        env_setup=arguments.name_or_none("env_setup", env_setup),
        ssh_key=arguments.place_or_none("ssh_key", ssh_key),
        tell=lambda message: watch({"kind": "note", "message": message}),
    )
    cluster.check()
    return cluster


def _check_hosts(hosts: object, executor: str, others: dict[str, object], ssh: tuple[object, ...]) -> str:
    """The executor, which is Ray if hosts are given. Refuse what does not go with them."""
    if hosts is None:
        if any(option is not None for option in ssh):
            raise RecipeError("`env_setup` and `ssh_key` are for `hosts`", hint="add `hosts='hosts.txt'`")
        return executor
    for name in (name for name, value in others.items() if value is not None):
        raise RecipeError(f"`{name}` does not go with `hosts`", hint="`hosts` starts a cluster of its own: drop one")
    return "ray"


def _are_from_python(sources: object) -> bool:
    """Whether sources are a function, a `datasets.Dataset` or several: anything but names of files."""
    return callable(sources) or hasattr(sources, "select_columns") or isinstance(sources, Mapping)


def _with_texts_stored(fields: dict[str, Any], folder: Storage, *, restart: bool) -> dict[str, Any]:
    """The fields of a recipe, in which texts from Python are files."""
    if not _are_from_python(fields["sources"]):
        return fields
    from tokenmill.build.python_sources import store

    chosen = {name: arguments.text_or_none(name, fields.get(name)) for name in ("text_column", "template")}
    return {
        **fields,
        "sources": store(fields["sources"], folder, filter=fields.get("filter"), restart=restart, **chosen),
    }


def _noting(watch: Watcher | None) -> tuple[list[str], Watcher]:
    """A list, and a watcher that collects notes in it and passes all events on."""
    notes: list[str] = []

    def hear(event: dict[str, Any]) -> None:
        if event["kind"] == "note":
            notes.append(event["message"])
        if watch is not None:
            watch(event)

    return notes, hear


def _prepare_on_nodes(
    fields: dict[str, Any],
    output: str,
    *,
    config: str | os.PathLike[str] | None,
    notes: list[str],
    cluster: HostCluster | None,
    **options: Any,
) -> PrepareResult:
    from tokenmill.build.ray_nodes import build_on_nodes
    from tokenmill.recipe import make_recipe

    begin = time.monotonic()
    # A path that begins with a variable or `~` is expanded on every node; any other path is the same on all.
    place = output if output.startswith(("$", "~")) or is_url(output) else os.path.abspath(output)
    try:
        found, already_complete, nodes = build_on_nodes(
            make_recipe(fields, config=config), place, hosts=cluster, **options
        )
    finally:
        if cluster is not None:
            cluster.stop()
    return PrepareResult(
        output=place,
        manifest=found,
        already_complete=already_complete,
        seconds=time.monotonic() - begin,
        nodes=nodes,
        notes=tuple(dict.fromkeys(notes)),
    )


def check_place(layout: str | None, folder: Storage | None) -> None:
    """Refuse a layout beside a dataset that is not on this machine."""
    if layout is not None and folder is not None and is_url(folder.path):
        to = layout.partition(":")[0]
        hint = f"export it afterwards: `tokenmill.export({folder.path!r}, 'DIR', to={to!r})`"
        raise RecipeError("`layout` writes files on this machine, beside a dataset in a folder", hint=hint)


def check_only_layout(only_layout: bool, layout: str | None) -> bool:
    """Refuse to keep only an export where there is none."""
    if arguments.flag("only_layout", only_layout) and layout is None:
        raise RecipeError(
            "`only_layout` keeps only an export", hint="name it with `layout='nanogpt'`, or drop `only_layout`"
        )
    return bool(only_layout)


def _check_flags(
    *, wait: bool, restart: bool, update: bool, timeout: float | None
) -> tuple[bool, bool, bool, float | None]:
    wait, restart = arguments.flag("wait", wait), arguments.flag("restart", restart)
    update = arguments.flag("update", update)
    if timeout is not None:
        timeout = arguments.number("timeout", timeout, hint="give a number of seconds, or None to wait for ever")
    if restart and update:
        raise RecipeError("`restart` keeps nothing, `update` keeps what it can", hint="drop one of the two")
    if wait and restart:
        raise RecipeError(
            "`wait` does not go with `restart`: every waiting process would start over",
            hint="start over first, without `wait`",
        )
    return wait, restart, update, timeout


Outcome = tuple[Manifest, bool, dict[str, Any]]


def _runner(
    part: str | None, layout: str | None, *, only_layout: bool, workers: int
) -> Callable[[Recipe, Storage, BuildOptions], Outcome]:
    """What builds the whole, with or without an export, or a part of it. It gives fields of the result besides."""
    if part is not None:
        from tokenmill.build.join import build_part, parse_part

        number = parse_part(part)

        def run_part(recipe: Recipe, folder: Storage, options: BuildOptions) -> Outcome:
            found, already_complete, status = build_part(recipe, folder, options, part=number)
            return found, already_complete, {"part": status}

        return run_part
    if layout is not None:
        from tokenmill.build.export_layout import build_and_export

        def run_export(recipe: Recipe, folder: Storage, options: BuildOptions) -> Outcome:
            found, already_complete, export = build_and_export(
                recipe, folder, options, layout, only_layout=only_layout, workers=workers
            )
            return found, already_complete, {"export": export}

        return run_export
    from tokenmill.build.pipeline import build

    def run(recipe: Recipe, folder: Storage, options: BuildOptions) -> Outcome:
        return *build(recipe, folder, options), {}

    return run


def _bytes_of_layout(layout: str | None, recipe: Recipe, folder: Storage) -> dict[str, Any]:
    """The option of a build that says how many bytes the export will write."""
    if layout is None:
        return {}
    from tokenmill.build.export_layout import plan_layout_export

    return {"extra_bytes": partial(plan_layout_export(layout, recipe).bytes_needed, folder)}


def _check_part(part: str | None, sources: object, is_given: dict[str, bool]) -> None:
    """Refuse what does not go with a part of a build."""
    if part is None:
        return
    if _are_from_python(sources):
        raise RecipeError("texts from Python are in one process", hint="write them to files that all parts reach first")
    hints = {
        "layout": "export the dataset after `tokenmill.join`",
        "restart": "every part would start over: remove the output first, or choose another one",
        "wait": "parts do not wait for each other: run each one somewhere, then `tokenmill.join`",
        "update": "update the whole with `tokenmill.prepare`, without `part`",
        "executor": _PART_IS_LOCAL,
    }
    for name in (name for name, is_there in is_given.items() if is_there):
        raise RecipeError(f"`{name}` does not go with `part`", hint=hints[name])


def _check_node_local(has_besides: bool, sources: object, *, update: bool) -> None:
    if _are_from_python(sources):
        raise RecipeError("texts from Python are on one node", hint="write them to files that all nodes reach first")
    if has_besides:
        raise RecipeError("`layout` and `scratch` do not go with `placement='node-local'`", hint=_NO_BESIDES)
    if update:
        raise RecipeError("`update` does not go with `placement='node-local'`", hint="start over with `restart=True`")


def check_executor(executor: str, ray_address: str | None = None, placement: str = "shared") -> None:
    """Refuse unknown values, and values that exclude each other."""
    arguments.text("executor", executor)
    arguments.text("placement", placement)
    arguments.text_or_none("ray_address", ray_address)
    if executor not in EXECUTORS:
        raise RecipeError(f"{executor!r} is not an executor", hint=f"one of {', '.join(EXECUTORS)}")
    if placement not in PLACEMENTS:
        raise RecipeError(f"{placement!r} is not a placement", hint=f"one of {', '.join(PLACEMENTS)}")
    if placement == "node-local" and executor != "ray":
        raise RecipeError("`placement='node-local'` is for the nodes of a cluster", hint="add `executor='ray'`")
    if ray_address is not None and executor != "ray":
        raise RecipeError("`ray_address` is given without Ray", hint="add `executor='ray'`")


def open_executor(
    workers: int, processes: WorkerProcesses | None, folder: Storage, config: BuildConfig, spec: TokenizerSpec
) -> Executor:
    """The executor for units of this machine. `processes` are workers that were started early, if there are any."""
    if needs_processes(workers, folder):
        from tokenmill.executors.process_pool import ProcessPool

        return ProcessPool(processes or WorkerProcesses(workers), folder, config, spec)
    # In a pool, only the workers load the engine.
    from tokenmill.executors.in_process import InProcess
    from tokenmill.tokenizers.engine import open_engine

    return InProcess(folder, config, spec, open_engine(spec))
