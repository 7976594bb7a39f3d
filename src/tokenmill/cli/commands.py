"""The commands: each parses its options, makes one call of the library, and prints the result.

prepare, plan                  recipe -> dataset, or what that would take
verify, repair, inspect, bench a dataset that is there
export, import, consolidate    files of other trainers' layouts
push, pull                     object stores
cluster                        hosts -> a cluster file for Ray
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from typing import Annotated, Any, Literal

import typer

from tokenmill import __version__
from tokenmill.cli import output as show
from tokenmill.cli.options import (
    OPTIONS,
    PREPARE_OPTIONS,
    GroupedCommand,
    for_shell,
    library_arguments,
    summary,
    with_modules_here,
    with_options,
)
from tokenmill.cli.progress import ProgressDisplay
from tokenmill.cli.signals import is_stopping
from tokenmill.errors import INTERRUPTED, Interrupted, RecipeError, TokenmillError, is_failure, redact
from tokenmill.formats.open import open as open_dataset
from tokenmill.loader.loader import DataLoader

app = typer.Typer(
    help="Raw text to training-ready token datasets: crash-safe, verified, at engine speed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_PREPARE = """
Turn text into a dataset of tokens. If it is interrupted, run the same command again to resume.

\b
Examples:
  tokenmill prepare corpus/*.parquet -o data/owt
  tokenmill prepare corpus/ -o data/owt --split val=0.0005 -j 16
  tokenmill prepare chat.jsonl.zst -o data/chat --template "{prompt}\\n\\n{response}"
  tokenmill prepare "src/**/*.py" -o data/code --documents files
  tokenmill prepare big.txt -o data/big --documents "separator:<|endoftext|>"
  tokenmill prepare corpus/*.parquet -o data/owt --split nanogpt --layout nanogpt
  tokenmill prepare corpus/ -o /nfs/owt --scratch /local/tmp --max-tokens 150G
  tokenmill prepare s3://bucket/corpus -o s3://bucket/owt

\b
Exit codes: 0 done, 1 failed, 2 usage or recipe, 3 done with quarantined
documents, 4 verification failed, 5 locked by another build, 130 interrupted.
"""
_PLAN = """
Show what prepare would do with the same arguments: files, units, tokens, disk, memory, time. Writes nothing.

\b
Example:
  tokenmill plan corpus/*.parquet -o data/owt

\b
Exit codes: 0 prepare can start, 1 failed or too little disk space, 2 usage,
or a folder that prepare would refuse.
"""
_VERIFY = """
Check a dataset against its manifest: every size, every index, every SHA-256.

\b
Examples:
  tokenmill verify data/owt
  tokenmill verify data/owt --quick            sizes and structure only
  tokenmill verify data/owt --source sample    tokenize some of the sources again and compare
"""
_REPAIR = """
Restore a damaged dataset: damaged files move to .build/quarantine, and only their units are built again.

\b
Example:
  tokenmill repair data/owt
"""
_INSPECT = """
Show what a dataset contains, and the text of its first documents.

\b
Examples:
  tokenmill inspect data/owt
  tokenmill inspect data/owt --split val --documents 5
"""
_BENCH = """
Measure how quickly the loader feeds a trainer with this dataset on this machine. Writes nothing.

\b
Example:
  tokenmill bench data/owt --seq-len 2048 --batch-size 32
"""

Dataset = Annotated[str, typer.Argument(metavar="OUT", help="folder or URL of a dataset", show_default=False)]
Filter = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="the filter that the dataset was made with, if any",
        callback=with_modules_here,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
# Usage errors share this base, whichever version of click typer brings.
_UsageError: Any = typer.BadParameter.__base__
Workers = Annotated[int | None, typer.Option("-j", "--workers", metavar="N", help="all cores by default")]


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        typer.echo(f"tokenmill {__version__}")
        raise typer.Exit


@app.command(cls=GroupedCommand, help=_PREPARE, short_help=summary(_PREPARE))
@with_options(PREPARE_OPTIONS)
def prepare(options: dict[str, Any]) -> int:
    from tokenmill.build.api import prepare

    if options["workers"] == 1:
        from tokenmill.resources import start_arrow

        start_arrow()  # this process may be the worker
    quiet, progress = options["quiet"], not options["no_progress"]
    # Ray prints failures in the cluster to standard output; the progress display reports them as well.
    hushed = contextlib.redirect_stdout(io.StringIO()) if options["executor"] == "ray" else contextlib.nullcontext()
    with ProgressDisplay(quiet=quiet, verbose=options["verbose"], progress=progress) as watcher, hushed:
        result = prepare(watch=watcher, wait=options["wait"], **library_arguments(options))
    export = result.export
    if options["as_json"]:
        beside = {"export": show.export_record(export)} if export else {}
        rate = {"tokens_per_second": watcher.tokens_per_second}
        show.as_json(show.result_record(result) | rate | show.nodes_record(result.nodes) | beside)
    elif not quiet:
        show.result(result, tokens_per_second=watcher.tokens_per_second)
        show.nodes(show.nodes_record(result.nodes))
        if export is not None:
            show.exported(export)
    return 3 if result.manifest.quarantined else 0


@app.command(cls=GroupedCommand, help=_PLAN, short_help=summary(_PLAN))
@with_options(OPTIONS)
def plan(options: dict[str, Any]) -> int:
    from tokenmill.build.preview import plan

    preview = plan(**library_arguments(options))
    if options["as_json"]:
        show.as_json(dataclasses.asdict(preview) | {"disk_missing": preview.disk_missing})
    elif not options["quiet"]:
        show.preview(preview)
    if preview.conflict:
        return 2
    return 1 if preview.disk_missing else 0


@app.command(cls=GroupedCommand, help=_VERIFY, short_help=summary(_VERIFY))
def verify(
    dataset: Dataset,
    quick: Annotated[bool, typer.Option("--quick", help="sizes and structure only")] = False,
    source: Annotated[
        Literal["sample", "all"] | None, typer.Option(help="tokenize the sources again and compare")
    ] = None,
    filter: Filter = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> int:
    from tokenmill.maintenance.verify import verify

    report = verify(dataset, quick=quick, source=source, workers=workers, filter=filter)
    if as_json:
        show.as_json({"ok": report.ok, **dataclasses.asdict(report)})
    else:
        show.report(report)
    return 0 if report.ok else 4


@app.command(cls=GroupedCommand, help=_REPAIR, short_help=summary(_REPAIR))
def repair(dataset: Dataset, filter: Filter = None, workers: Workers = None, as_json: AsJson = False) -> int:
    from tokenmill.maintenance.repair import repair
    from tokenmill.maintenance.verify import verify

    with ProgressDisplay(quiet=False, verbose=False, progress=False) as watcher:
        problems = repair(dataset, workers=workers, filter=filter, watch=watcher)
    after = verify(dataset, workers=workers)
    if as_json:
        show.as_json({"ok": after.ok, "repaired": [dataclasses.asdict(problem) for problem in problems]})
    else:
        show.repaired(problems, after)
    return 0 if after.ok else 4


@app.command(cls=GroupedCommand, help=_INSPECT, short_help=summary(_INSPECT))
def inspect(
    dataset: Dataset,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="which split to show texts of (train if there is one)")
    ] = None,
    documents: Annotated[int, typer.Option(metavar="N", help="how many texts to show", min=0)] = 3,
    as_json: AsJson = False,
) -> int:
    from tokenmill.cli.output import describe, first_texts

    record = describe(dataset)
    shown, texts = first_texts(dataset, split, documents) if "tokens" in record else ("", [])
    if as_json:
        show.as_json({**record, "texts": texts})
    else:
        show.dataset(record, shown, texts)
    return 0


@app.command(cls=GroupedCommand, help=_BENCH, short_help=summary(_BENCH))
def bench(
    dataset: Dataset,
    split: Annotated[str, typer.Option(metavar="NAME", help="which split to read")] = "train",
    seq_len: Annotated[int, typer.Option(metavar="N", help="tokens in a sample", min=1)] = 1024,
    batch_size: Annotated[int, typer.Option(metavar="N", help="samples in a batch", min=1)] = 64,
    seconds: Annotated[float, typer.Option(metavar="N", help="how long to measure", min=0.01)] = 3.0,
    as_json: AsJson = False,
) -> int:

    record = measure(dataset, split=split, seq_len=seq_len, batch_size=batch_size, seconds=seconds)
    if as_json:
        show.as_json(record)
    else:
        show.rates(record)
    return 0


def run() -> int:
    """Parse and run; returns the exit code. Errors become a sentence and a hint; after a signal they are ignored."""
    try:
        return _run()
    except Interrupted as error:
        show.interrupted(error.message, error.hint)
        return error.exit_code
    except BaseException as error:
        if not is_failure(error):
            raise
        if is_stopping():
            raise KeyboardInterrupt from None
        return _explain(error)


def _run() -> int:
    try:
        code = app(standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    if code == INTERRUPTED:  # what the parser makes of an interrupt
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _explain(error: BaseException) -> int:
    """Print an error as a sentence and a hint; returns the exit code."""
    if isinstance(error, _UsageError):
        error.show()
        return 2
    if isinstance(error, TokenmillError):
        begins_with_field = isinstance(error, RecipeError)
        show.error(for_shell(error.message, begins_with_field=begins_with_field), for_shell(error.hint))
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        return 1
    if isinstance(error, OSError):  # the library wraps those of files: left are the current folder and standard output
        if error.filename is not None:
            show.error(redact(f"{error.filename}: {error.strerror}"), "check the path and its permissions")
        elif isinstance(error, FileNotFoundError):
            show.error("the current folder does not exist any more", "change to another one")
        else:
            show.error(f"the output cannot be printed: {error.strerror}", "check where standard output and error go")
        return 1
    show.error(redact(f"unexpected {type(error).__name__}: {error}"), "please report this, with what -v prints")
    return 1


_EXPORT = """
Write a dataset as the files of a trainer's layout. If it is interrupted, run the same command again to resume.

\b
Layouts: {layouts}

\b
Examples:
  tokenmill export data/owt --to nanogpt out/nanogpt
  tokenmill export data/owt --to llmc out/llmc --name fineweb --shard-size 100M
  tokenmill export data/owt --to templar out/templar --seq-len 2048 --shard-size 1Gi
  tokenmill export data/owt --to huggingface out/hub --seq-len 4096
"""
_IMPORT = """
Make a dataset from the files of a trainer's layout, with the same documents in the same order.

If a layout does not store where documents end, pass the end-of-text id or the tokenizer.

\b
Examples:
  tokenmill import out/nanogpt --from nanogpt -o data/owt --tokenizer gpt2
  tokenmill import shards/ --from templar -o data/dclm --eot-id 2
"""
_CONSOLIDATE = """
Join Templar's train_000000.npy shards into tokens.bin, and write the ids of their samples to sample_ids.bin.

The files are compared with the SHA-256 and the number of elements that you expect.

\b
Examples:
  tokenmill consolidate --data_root shards/ --seq_len 2048 --expect tokens=4c53...:161061273600
  tokenmill consolidate --data_root shards/ --seq_len 2048 --checksums expected.json
  tokenmill consolidate --data_root shards/ --seq_len 2048 --skip-validation
"""
# Repeated here so that --help loads no layout.
_LAYOUTS = "catid, datatrove, huggingface, litdata, llmc, mds, megatron, nanogpt, olmo, templar"

Output = Annotated[str, typer.Option("-o", "--output", metavar="DATASET", help="the dataset's folder")]
Threads = Annotated[int | None, typer.Option("-j", "--workers", metavar="N", help="threads; all cores by default")]
Scratch = Annotated[
    str | None, typer.Option(metavar="DIR", help="write here first, if the output is a slow network drive")
]
Restart = Annotated[bool, typer.Option("--restart", help="delete what an earlier run wrote there")]
Expect = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=SHA256[:COUNT]", help="what tokens or sample_ids must be (templar); may be repeated"),
]
Checksums = Annotated[
    str | None, typer.Option(metavar="FILE", help='the same as JSON: {"tokens": {"sha256": ..., "elements": ...}}')
]
SkipValidation = Annotated[bool, typer.Option("--skip-validation", "--skip_validation", help="skip the comparison")]


Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="print only errors")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="no progress bar and no progress lines")]


def add_format_commands(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(cls=GroupedCommand, help=_EXPORT.format(layouts=_LAYOUTS), short_help=summary(_EXPORT))(export)
    app.command("import", cls=GroupedCommand, help=_IMPORT, short_help=summary(_IMPORT))(import_)
    app.command(cls=GroupedCommand, help=_CONSOLIDATE, short_help=summary(_CONSOLIDATE))(consolidate)


def export(
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", help="a dataset, or token files of a layout", show_default=False)
    ],
    output: Annotated[str, typer.Argument(metavar="OUT", help="a folder of its own", show_default=False)],
    to: Annotated[str, typer.Option("--to", metavar="LAYOUT", help=f"one of {_LAYOUTS}")],
    shard_size: Annotated[str | None, typer.Option(metavar="N", help="tokens in a file, like 100M or 1Gi")] = None,
    seq_len: Annotated[
        str | None,
        typer.Option(metavar="N", help="tokens in a sample (templar: 2048), or in a packed row (mds, huggingface)"),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="what file names begin with")] = None,
    order: Annotated[
        Literal["source", "shuffled"] | None, typer.Option(help="order of the documents (nanogpt); source by default")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="seed of --order shuffled (0)")] = None,
    templar_compat: Annotated[
        bool, typer.Option("--templar-compat", help="sample ids as the original computes them, which is wrong")
    ] = False,
    expect: Expect = None,
    checksums: Checksums = None,
    skip_validation: SkipValidation = False,
    workers: Threads = None,
    scratch: Scratch = None,
    restart: Restart = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> int:
    from tokenmill.formats.convert import export
    from tokenmill.formats.templar import read_expected

    expected = {} if skip_validation else read_expected(expect or (), checksums)
    with ProgressDisplay(quiet=quiet, verbose=False, progress=not no_progress) as watcher:
        result = export(
            dataset,
            output,
            to=to,
            workers=workers,
            scratch=scratch,
            restart=restart,
            watch=watcher,
            expected=expected,
            shard_size=shard_size,
            seq_len=seq_len,
            name=name,
            order=order,
            seed=seed,
            templar_compat=templar_compat or None,
        )
    if as_json:
        show.as_json(show.export_record(result))
    elif not quiet:
        show.exported(result)
    return 0


def import_(
    path: Annotated[str, typer.Argument(metavar="PATH", help="files of the layout, or one of them")],
    layout: Annotated[str, typer.Option("--from", metavar="LAYOUT", help=f"one of {_LAYOUTS}")],
    output: Output,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="the tokenizer of the tokens, so that the dataset can be decoded")
    ] = None,
    eot_id: Annotated[int | None, typer.Option(metavar="N", help="the id that ends a text", min=0)] = None,
    dtype: Annotated[
        Literal["uint16", "uint32", "int32"] | None, typer.Option(help="of files that do not store it")
    ] = None,
    workers: Threads = None,
    scratch: Scratch = None,
    restart: Restart = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> int:
    from tokenmill.formats.convert import import_

    with ProgressDisplay(quiet=quiet, verbose=False, progress=not no_progress) as watcher:
        result = import_(
            path,
            output,
            layout=layout,
            tokenizer=tokenizer,
            eot_id=eot_id,
            dtype=dtype,
            workers=workers,
            scratch=scratch,
            restart=restart,
            watch=watcher,
        )
    if as_json:
        show.as_json({**show.result_record(result), "layout": result.layout, "notes": list(result.notes)})
    elif not quiet:
        show.result(result)
    return 0


def consolidate(
    data_root: Annotated[
        str, typer.Option("--data_root", "--data-root", metavar="DIR", help="the folder with train_000000.npy, ...")
    ],
    seq_len: Annotated[str, typer.Option("--seq_len", "--seq-len", metavar="N", help="tokens of a sample")] = "2048",
    expect: Expect = None,
    checksums: Checksums = None,
    skip_validation: SkipValidation = False,
    templar_compat: Annotated[
        bool, typer.Option("--templar-compat", help="sample ids as the original computes them, which is wrong")
    ] = False,
    workers: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> int:
    from tokenmill.formats.templar import consolidate, read_expected

    expected = {} if skip_validation else read_expected(expect or (), checksums)
    with ProgressDisplay(quiet=quiet, verbose=False, progress=not no_progress) as watcher:
        result = consolidate(
            data_root, seq_len, expected=expected, compat=templar_compat, workers=workers, watch=watcher
        )
    if as_json:
        show.as_json(show.export_record(result))
    elif not quiet:
        show.exported(result)
        if not expected and not skip_validation:
            sums = ", ".join(f"{name} {digest.sha256}" for name, digest in sorted(result.files.items()))
            print(f"  Not validated. SHA-256: {sums}. Pass --expect or --checksums to check them.")
    return 0


_PUSH = """
Copy a dataset to an object store. Only files that are missing or wrong there are copied. If it is interrupted, run the
same command again.

\b
Examples:
  tokenmill push data/owt s3://bucket/owt
  tokenmill push data/owt gs://bucket/owt-small --split val
"""
_PULL = """
Copy a dataset from an object store. Only files that are missing or wrong here are copied, and every file is hashed as
it arrives. If it is interrupted, run the same command again: it resumes in the middle of a file.

\b
Examples:
  tokenmill pull s3://bucket/owt data/owt
  tokenmill pull s3://bucket/owt data/some --split train --shards 0-9
"""

Splits = Annotated[list[str] | None, typer.Option("--split", metavar="NAME", help="only this split; may be repeated")]
Shards = Annotated[
    str | None,
    typer.Option("--shards", metavar="NUMBERS", help="only these shards of each split, like 0-9 or 0,3,5-7"),
]
Transfers = Annotated[int | None, typer.Option("-j", "--workers", metavar="N", help="files at once (4)")]


def add_transfer_commands(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(cls=GroupedCommand, help=_PUSH, short_help=summary(_PUSH))(push)
    app.command(cls=GroupedCommand, help=_PULL, short_help=summary(_PULL))(pull)


def push(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="a dataset's folder", show_default=False)],
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://, gs:// or az://", show_default=False)],
    split: Splits = None,
    shards: Shards = None,
    workers: Transfers = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> int:
    return _run_transfer("push", dataset, url, split, shards, workers, as_json, quiet, no_progress)


def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://, gs:// or az://", show_default=False)],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="the dataset's folder", show_default=False)],
    split: Splits = None,
    shards: Shards = None,
    workers: Transfers = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> int:
    return _run_transfer("pull", url, folder, split, shards, workers, as_json, quiet, no_progress)


def _run_transfer(
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
    from tokenmill.maintenance import push_pull

    move = push_pull.push if what == "push" else push_pull.pull
    with ProgressDisplay(quiet=quiet, verbose=False, progress=not no_progress) as watcher:
        moved = move(source, target, split=split, shards=shards, workers=workers, watch=watcher)
    if as_json:
        show.as_json(dataclasses.asdict(moved))
    elif not quiet:
        show.moved(moved)
    return 0


_CLUSTER = """
Print a cluster file for `ray up` from a file with one `host slots` line per host. The first host is the head.

\b
Example:
  tokenmill cluster hosts.txt > cluster.yaml
  ray up cluster.yaml
"""


def add_cluster_command(app: typer.Typer) -> None:
    """Register the command."""
    app.command(cls=GroupedCommand, help=_CLUSTER, short_help=summary(_CLUSTER))(cluster)


def cluster(
    hosts: Annotated[str, typer.Argument(metavar="HOSTS", help="a file like: node1 16", show_default=False)],
    user: Annotated[str | None, typer.Option(metavar="NAME", help="user on the hosts; you by default")] = None,
) -> int:
    from tokenmill.executors.hosts import cluster

    print(cluster(hosts, user=user), end="")
    return 0


def measure(path: str, *, split: str, seq_len: int, batch_size: int, seconds: float) -> dict[str, Any]:
    """Rates of a shuffled loader over some seconds, and the time from opening to the first batch."""
    begin = time.perf_counter()
    dataset = open_dataset(path)
    if split not in dataset.splits:
        raise RecipeError(f"there is no split {split!r}", hint=f"there are {', '.join(dataset.splits)}")
    loader = DataLoader(dataset, seq_len, batch_size, split=split)
    batches = iter(loader)
    next(batches)
    first = now = time.perf_counter()
    count = 0
    while now < first + seconds:
        next(batches)
        count += 1
        now = time.perf_counter()
    rate = count / (now - first)
    return {
        "path": path,
        "split": split,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "samples": loader.num_samples,
        "seconds": round(now - first, 3),
        "batches": count,
        "batches_per_second": round(rate, 1),
        "tokens_per_second": round(rate * batch_size * seq_len),
        "first_batch_ms": round(1000 * (first - begin), 2),
    }


add_format_commands(app)
add_transfer_commands(app)
add_cluster_command(app)
