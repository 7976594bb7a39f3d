"""The commands."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import traceback
from typing import Annotated, Any, Literal

import typer

from tokenmill import __version__
from tokenmill.cli import hosts, layouts, moving, show
from tokenmill.cli.options import (
    OPTIONS,
    PREPARE_OPTIONS,
    library_arguments,
    naming_options,
    with_modules_here,
    with_options,
)
from tokenmill.cli.stopping import INTERRUPTED
from tokenmill.cli.watching import Watcher
from tokenmill.errors import TokenmillError
from tokenmill.redaction import redact

app = typer.Typer(
    help="Raw text to training-ready token datasets: crash-safe, verified, at engine speed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_PREPARE = """
Prepare a dataset. Killed? Run the same command again: it goes on where it stopped.

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
Tell what prepare would do with the same arguments: files, units, tokens, disk, memory, time. Writes nothing.

\b
Example:
  tokenmill plan corpus/*.parquet -o data/owt

\b
Exit codes: 0 prepare could begin, 1 too little space on the disk or failed,
2 usage, or a folder that prepare would refuse.
"""
_VERIFY = """
Check a dataset against its manifest: every size, every index, every SHA-256.

\b
Examples:
  tokenmill verify data/owt
  tokenmill verify data/owt --quick            sizes and structure only
  tokenmill verify data/owt --source sample    tokenise some of the sources again, and compare
"""
_REPAIR = """
Restore a damaged dataset: what is bad goes to .build/quarantine, and only that is done again.

\b
Example:
  tokenmill repair data/owt
"""
_INSPECT = """
Show what a dataset holds, and the text of its first documents.

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

Dataset = Annotated[str, typer.Argument(metavar="OUT", help="a dataset's folder or URL", show_default=False)]
Filter = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="the filter that the dataset was made with, if any",
        callback=with_modules_here,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
# Whichever parser typer brings along, its usage errors share this base.
_UsageError: Any = typer.BadParameter.__base__
Workers = Annotated[int | None, typer.Option("-j", "--workers", metavar="N", help="all cores by default")]


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        typer.echo(f"tokenmill {__version__}")
        raise typer.Exit


@app.command(help=_PREPARE)
@with_options(PREPARE_OPTIONS)
def prepare(options: dict[str, Any]) -> int:
    from tokenmill.build.prepare import prepare

    if options["workers"] == 1:
        from tokenmill.sources.startup import start_arrow

        start_arrow()  # this process may be the worker
    quiet, progress = options["quiet"], not options["no_progress"]
    # Ray prints what goes wrong in a cluster to the output by itself; the watcher tells it as well.
    hushed = contextlib.redirect_stdout(io.StringIO()) if options["executor"] == "ray" else contextlib.nullcontext()
    with Watcher(quiet=quiet, verbose=options["verbose"], progress=progress) as watcher, hushed, naming_options():
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


@app.command(help=_PLAN)
@with_options(OPTIONS)
def plan(options: dict[str, Any]) -> int:
    from tokenmill.build.preview import plan

    with naming_options():
        preview = plan(**library_arguments(options))
    if options["as_json"]:
        show.as_json(dataclasses.asdict(preview) | {"disk_missing": preview.disk_missing})
    elif not options["quiet"]:
        show.preview(preview)
    if preview.conflict:
        return 2
    return 1 if preview.disk_missing else 0


@app.command(help=_VERIFY)
def verify(
    dataset: Dataset,
    quick: Annotated[bool, typer.Option("--quick", help="sizes and structure only")] = False,
    source: Annotated[
        Literal["sample", "all"] | None, typer.Option(help="tokenise the sources again, and compare")
    ] = None,
    filter: Filter = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> int:
    from tokenmill.verifying import verify

    report = verify(dataset, quick=quick, source=source, workers=workers, filter=filter)
    if as_json:
        show.as_json({"ok": report.ok, **dataclasses.asdict(report)})
    else:
        show.report(report)
    return 0 if report.ok else 4


@app.command(help=_REPAIR)
def repair(dataset: Dataset, filter: Filter = None, workers: Workers = None, as_json: AsJson = False) -> int:
    from tokenmill.repairing import repair
    from tokenmill.verifying import verify

    problems = repair(dataset, workers=workers, filter=filter)
    after = verify(dataset, workers=workers)
    if as_json:
        show.as_json({"ok": after.ok, "repaired": [dataclasses.asdict(problem) for problem in problems]})
    else:
        show.repaired(problems, after)
    return 0 if after.ok else 4


@app.command(help=_INSPECT)
def inspect(
    dataset: Dataset,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="which split to show texts of (train if there is one)")
    ] = None,
    documents: Annotated[int, typer.Option(metavar="N", help="how many texts to show", min=0)] = 3,
    as_json: AsJson = False,
) -> int:
    from tokenmill.cli.inspecting import describe, first_texts

    record = describe(dataset)
    shown, texts = first_texts(dataset, split, documents) if "tokens" in record else ("", [])
    if as_json:
        show.as_json({**record, "texts": texts})
    else:
        show.dataset(record, shown, texts)
    return 0


@app.command(help=_BENCH)
def bench(
    dataset: Dataset,
    split: Annotated[str, typer.Option(metavar="NAME", help="which split to read")] = "train",
    seq_len: Annotated[int, typer.Option(metavar="N", help="tokens of a sample", min=1)] = 1024,
    batch_size: Annotated[int, typer.Option(metavar="N", help="samples of a batch", min=1)] = 64,
    seconds: Annotated[float, typer.Option(metavar="N", help="how long to measure", min=0.01)] = 3.0,
    as_json: AsJson = False,
) -> int:
    from tokenmill.cli.benching import measure

    record = measure(dataset, split=split, seq_len=seq_len, batch_size=batch_size, seconds=seconds)
    if as_json:
        show.as_json(record)
    else:
        show.rates(record)
    return 0


layouts.add_commands(app)
moving.add_commands(app)
hosts.add_commands(app)


def run() -> int:
    """Parse and run; gives the exit code. Errors become a sentence and a hint."""
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # what the parser makes of an interrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except _UsageError as error:
        error.show()
        return 2
    except TokenmillError as error:
        show.error(error.message, error.hint)
        return error.exit_code
    except BrokenPipeError:
        return 1
    except OSError as error:  # of files, ours would be; what is left is where we stand, and where the output goes
        if error.filename is not None:
            show.error(redact(f"{error.filename}: {error.strerror}"), "check the path, and who may use it")
        elif isinstance(error, FileNotFoundError):
            show.error("the current folder is not there any more", "change to another one")
        else:
            show.error(f"the output cannot be printed: {error.strerror}", "check where standard output and error go")
        return 1
    except Exception as error:
        if "-v" in sys.argv or "--verbose" in sys.argv:
            print(redact(traceback.format_exc()), file=sys.stderr)
        show.error(redact(f"unexpected {type(error).__name__}: {error}"), "please report this, with what -v prints")
        return 1
