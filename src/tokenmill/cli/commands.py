"""The commands: each parses its options, makes one call of the library, and prints the result.

prepare, join, plan            recipe -> dataset, or what that would take
verify, repair, bench          a dataset that is there
report                         a page about it
doctor                         whether this machine, a corpus or a dataset is right
inspect, peek, trace, view     what it contains, and where that came from
compare, tokenizers            two datasets, or several tokenizers, side by side
export, import, consolidate    files of other trainers' layouts
push, pull                     object stores
cluster                        hosts -> a cluster file for Ray
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import __version__
from tokenmill.cli import options as declared
from tokenmill.cli import output as show
from tokenmill.cli.options import command, for_shell, library_arguments
from tokenmill.cli.progress import ProgressDisplay
from tokenmill.cli.signals import INTERRUPTED, is_stopping
from tokenmill.errors import MORE_MEMORY, Interrupted, RecipeError, TokenmillError, is_failure, redact

if TYPE_CHECKING:
    from tokenmill.build.api import PrepareResult
    from tokenmill.maintenance.push_pull import TransferResult

app = typer.Typer(
    help="Raw text to training-ready token datasets: crash-safe, verified, at engine speed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
# Usage errors share this base, whichever version of click typer brings.
_UsageError: Any = typer.BadParameter.__base__


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        typer.echo(f"tokenmill {__version__}")
        raise typer.Exit


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
  tokenmill prepare /nfs/corpus -o /nfs/owt --hosts hosts.txt --env-setup 'source venv/bin/activate'
  tokenmill prepare corpus/ -o /nfs/owt --part 2/4        on one of four machines; then: tokenmill join /nfs/owt

\b
Environment: DATASET_NUM_PROC is the number of workers where -j is not given;
DATASET_BATCH_SIZE and DATASET_WRITER_BATCH_SIZE limit the documents in a
batch. -v says which of them act.

\b
Exit codes: 0 done, 1 failed, 2 usage or recipe, 3 done with quarantined
documents, 4 verification failed, 5 locked by another build, 130 interrupted.
"""


@command(app, "prepare", _PREPARE, declared.PREPARE_OPTIONS)
def prepare(options: dict[str, Any]) -> int:
    from tokenmill.build.api import prepare

    if options["workers"] == 1:
        from tokenmill.resources import start_arrow

        start_arrow()  # this process may be the worker
    _tell_variables(options)
    # Ray prints failures in the cluster to standard output; the progress display reports them as well.
    on_ray = options["executor"] == "ray" or options["hosts"] is not None
    hushed = contextlib.redirect_stdout(io.StringIO()) if on_ray else contextlib.nullcontext()
    with ProgressDisplay.of(options, "encoding") as watcher, hushed:
        result = prepare(watch=watcher, **library_arguments(options))
    page = None if options["no_report"] or options["only_layout"] else _report_of(result)
    export = result.export
    if options["json"]:
        beside = {"export": show.export_record(export)} if export else {}
        rate = {"tokens_per_second": watcher.tokens_per_second}
        show.as_json(
            show.result_record(result)
            | {"report": page}
            | rate
            | show.part_record(result.part)
            | show.nodes_record(result.nodes)
            | beside
        )
    elif not options["quiet"]:
        if result.part is not None and not result.part.is_joined:
            show.part(result, result.part, tokens_per_second=watcher.tokens_per_second)
        else:
            show.result(result, tokens_per_second=watcher.tokens_per_second, is_kept=not options["only_layout"])
        show.nodes(show.nodes_record(result.nodes))
        if export is not None:
            show.exported(export)
        if page is not None:
            show.location_of_report(page)
    return 3 if result.manifest.quarantined else 0


def _tell_variables(options: dict[str, Any]) -> None:
    """With --verbose, name the variables of the environment that decide something."""
    if options["verbose"] and not options["quiet"]:
        from tokenmill.resources import acting_variables

        for line in acting_variables(options["workers"]):
            typer.echo(line, err=True)


def _report_of(result: PrepareResult) -> str | None:
    """Write the report of a new dataset in a folder of this machine. Without it, the dataset is complete as well."""
    from tokenmill.dataset.manifest import REPORT
    from tokenmill.inspection.report import report
    from tokenmill.storage.base import is_url, open_folder

    is_whole = result.nodes is None and (result.part is None or result.part.is_joined)
    if not is_whole or is_url(result.output):
        return None
    folder = open_folder(result.output)
    if result.already_complete and folder.exists(REPORT):
        return folder.at(REPORT)
    try:
        return report(result.output).path
    except Exception as error:  # whatever it is, it does not make the dataset worse
        if not is_failure(error):
            raise
        show.note(f"{REPORT} was not written: {error}")
        return None


_JOIN = """
Make the dataset when all parts of `prepare --part` are done, or say which parts miss how many units.

\b
Examples:
  tokenmill prepare corpus/ -o /nfs/owt --part 1/2        on one machine
  tokenmill prepare corpus/ -o /nfs/owt --part 2/2        on another one
  tokenmill join /nfs/owt
"""


@command(app, "join", _JOIN, declared.JOIN_OPTIONS)
def join(options: dict[str, Any]) -> int:
    from tokenmill.build.join import join

    with ProgressDisplay.of(options, "joining") as watcher:
        result = join(watch=watcher, **library_arguments(options))
    if options["json"]:
        show.as_json(show.result_record(result))
    elif not options["quiet"]:
        show.result(result)
    return 3 if result.manifest.quarantined else 0


_PLAN = """
Show what prepare would do with the same arguments: files, units, tokens, disk, memory, time. Writes nothing.

\b
Example:
  tokenmill plan corpus/*.parquet -o data/owt

\b
Exit codes: 0 prepare can start, 1 failed or too little disk space, 2 usage,
or a folder that prepare would refuse.
"""


@command(app, "plan", _PLAN, declared.OPTIONS)
def plan(options: dict[str, Any]) -> int:
    from tokenmill.build.preview import plan

    _tell_variables(options)
    preview = plan(**library_arguments(options))
    if options["json"]:
        show.as_json(dataclasses.asdict(preview) | {"disk_missing": preview.disk_missing})
    elif not options["quiet"]:
        show.preview(preview)
    if preview.conflict:
        return 2
    return 1 if preview.disk_missing else 0


_VERIFY = """
Check a dataset against its manifest: every size, every index, every SHA-256.

\b
Examples:
  tokenmill verify data/owt
  tokenmill verify data/owt --quick            sizes and structure only
  tokenmill verify data/owt --source sample    tokenize some of the sources again and compare
"""


@command(app, "verify", _VERIFY, declared.VERIFY_OPTIONS)
def verify(options: dict[str, Any]) -> int:
    from tokenmill.maintenance.verify import verify

    report = verify(**library_arguments(options))
    if options["json"]:
        show.as_json({"ok": report.ok, **dataclasses.asdict(report)})
    else:
        show.report(report)
    return 0 if report.ok else 4


_REPAIR = """
Restore a damaged dataset: damaged files move to .build/quarantine, and only their units are built again.

\b
Example:
  tokenmill repair data/owt
"""


@command(app, "repair", _REPAIR, declared.REPAIR_OPTIONS)
def repair(options: dict[str, Any]) -> int:
    from tokenmill.maintenance.repair import repair
    from tokenmill.maintenance.verify import verify

    with ProgressDisplay("", progress=False) as watcher:
        problems = repair(watch=watcher, **library_arguments(options))
    after = verify(options["path"], workers=options["workers"])
    if options["json"]:
        show.as_json({"ok": after.ok, "repaired": [dataclasses.asdict(problem) for problem in problems]})
    else:
        show.repaired(problems, after)
    return 0 if after.ok else 4


_REPORT = """
Write a page about a dataset, report.html: totals, charts, sources, drops, checks, the recipe and samples. It is one
file that needs no network. README.md beside it is a card for the Hugging Face hub; one that you changed is kept.

\b
Examples:
  tokenmill report data/owt
  tokenmill report data/owt --license cc-by-4.0
  tokenmill report out/nanogpt -o nanogpt.html
"""


@command(app, "report", _REPORT, declared.REPORT_OPTIONS)
def report(options: dict[str, Any]) -> int:
    from tokenmill.inspection.report import report

    written = report(**library_arguments(options))
    if options["json"]:
        show.as_json(dataclasses.asdict(written))
    else:
        show.written_report(written)
    return 0


_INSPECT = """
Show what a dataset contains, and the text of its first documents.

\b
Examples:
  tokenmill inspect data/owt
  tokenmill inspect data/owt --split val --documents 5
"""


@command(app, "inspect", _INSPECT, declared.INSPECT_OPTIONS)
def inspect(options: dict[str, Any]) -> int:
    path = options["path"]
    record = show.describe(path)
    has_tokens = "tokens" in record
    split, texts = show.first_texts(path, options["split"], options["documents"]) if has_tokens else ("", [])
    if options["json"]:
        show.as_json({**record, "texts": texts})
    else:
        show.dataset(record, split, texts)
    return 0


_PEEK = """
Show the text of documents or samples, with the boundaries between tokens and between documents.

\b
Examples:
  tokenmill peek data/owt                                the first document
  tokenmill peek data/owt --random --count 5 --seed 1    five documents
  tokenmill peek data/owt --sample 7 --seq-len 2048      what a row of a batch has
  tokenmill peek out/nanogpt/val.bin --ids               a line for each token
"""


@command(app, "peek", _PEEK, declared.PEEK_OPTIONS)
def peek(options: dict[str, Any]) -> int:
    from tokenmill.inspection.peek import peek

    found = peek(**library_arguments(options))
    if options["json"]:
        show.as_json({"excerpts": [show.excerpt_record(excerpt) for excerpt in found]})
    else:
        show.excerpts(found, with_ids=options["ids"])
    return 0


_TRACE = """
Show which rows of the sources a training step had, or where a row of a source is: its tokens, samples and steps.

\b
Examples:
  tokenmill trace data/owt --step 1200 --rank 1 --world-size 4 --batch-size 8 --seq-len 1024
  tokenmill trace data/owt --source corpus/a.parquet:12
  tokenmill trace data/owt --document 12 --seq-len 1024 --batch-size 8 --world-size 4
  tokenmill trace data/owt --sample 7 --seq-len 1024 --packing best_fit

Give the options of the loader that trains: they decide which sample comes when. In Python, `loader.trace(step)` knows
them, and `tokenmill.trace` takes mixtures, too.
"""


@command(app, "trace", _TRACE, declared.TRACE_OPTIONS)
def trace(options: dict[str, Any]) -> int:
    from tokenmill.inspection.trace import trace

    found = trace(**library_arguments(options))
    if options["json"]:
        show.as_json(show.trace_record(found))
    elif options["step"] is None and options["sample"] is None:
        show.traced_document(found)
    else:
        show.traced_samples(found)
    return 0


_VIEW = """
Show a dataset, or a build in progress, as web pages on this machine. Needs pip install 'tokenmill[view]'.

Prints the address to open in a browser. The address contains a token: only this machine can connect, and only with it.
On a remote machine, forward the port over SSH: ssh -L 8008:127.0.0.1:8008 HOST. Ctrl-C ends the viewer.

\b
Examples:
  tokenmill view data/owt
  tokenmill view data/owt --port 8008 --beside data/owt-filtered
  tokenmill view out/nanogpt --tokenizer gpt2
"""


@command(app, "view", _VIEW, declared.VIEW_OPTIONS)
def view(options: dict[str, Any]) -> int:
    from tokenmill.inspection.viewer import view

    with view(**library_arguments(options)) as viewer:
        print(f"Viewing {show.printable(options['dataset'])}. Ctrl-C ends it. Open:\n{viewer.url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            viewer.wait()
    return 0


_COMPARE = """
Show what differs between two datasets or recipes: settings, sources, counts, and the first document.

\b
Examples:
  tokenmill compare data/owt data/owt-filtered
  tokenmill compare data/owt out/nanogpt         tokens of a layout
  tokenmill compare old.yaml new.yaml            recipes, by their fields

\b
Exit codes: 0 equal, 1 different.
"""


@command(app, "compare", _COMPARE, declared.COMPARE_OPTIONS)
def compare(options: dict[str, Any]) -> int:
    from tokenmill.inspection.compare import compare

    found = compare(options["a"], options["b"])
    if options["json"]:
        show.as_json({"equal": found.equal, **dataclasses.asdict(found)})
    else:
        show.comparison(found)
    return 0 if found.equal else 1


_TOKENIZERS = """
Compare tokenizers on a sample of a corpus: bytes per token, tokens per word, and speed.

\b
Example:
  tokenmill tokenizers corpus/*.parquet --tokenizer gpt2 --tokenizer llama3/tokenizer.json
"""


@command(app, "tokenizers", _TOKENIZERS, declared.TOKENIZERS_OPTIONS)
def tokenizers(options: dict[str, Any]) -> int:
    from tokenmill.inspection.compare_tokenizers import compare_tokenizers

    found = compare_tokenizers(options["sources"], options["tokenizers"] or ["gpt2"], **{
        name: options[name] for name in ("text_column", "seed")
    })  # fmt: skip
    if options["json"]:
        show.as_json({"tokenizers": [show.tokenizer_record(one) for one in found]})
    else:
        show.tokenizers(found)
    return 0


_DOCTOR = """
Check this machine, and that a corpus or a dataset works on it. Takes some seconds, and needs no network.

\b
Examples:
  tokenmill doctor                          this machine
  tokenmill doctor corpus/*.parquet         and what prepare would meet
  tokenmill doctor data/owt                 and what a trainer would read
  tokenmill doctor -o /nfs/owt --scratch /local/tmp

\b
Exit codes: 0 ok, with or without warnings, 4 a check failed.
"""


@command(app, "doctor", _DOCTOR, declared.DOCTOR_OPTIONS)
def doctor(options: dict[str, Any]) -> int:
    from tokenmill.inspection.doctor import doctor

    targets = options.pop("target")
    target = targets[0] if targets and len(targets) == 1 else targets or None
    report = doctor(target, **library_arguments(options))
    if options["json"]:
        show.as_json({"ok": report.ok, **dataclasses.asdict(report)})
    else:
        show.doctor_report(report)
    return 0 if report.ok else 4


_BENCH = """
Measure how quickly the loader feeds a trainer with this dataset on this machine. Writes nothing.

\b
Example:
  tokenmill bench data/owt --seq-len 2048 --batch-size 32
"""


@command(app, "bench", _BENCH, declared.BENCH_OPTIONS)
def bench(options: dict[str, Any]) -> int:
    record = measure(**library_arguments(options))
    if options["json"]:
        show.as_json(record)
    else:
        show.rates(record)
    return 0


# A batch of no more samples is measured on any dataset, which repeats.
_SMALL_BATCH = 4096


def measure(path: str, *, split: str, seq_len: int, batch_size: int, seconds: float) -> dict[str, Any]:
    """Rates of a shuffled loader over some seconds, and the time from opening to the first batch."""
    from tokenmill.formats.open import open as open_dataset
    from tokenmill.loader.loader import DataLoader

    begin = time.perf_counter()
    dataset = open_dataset(path)
    if split not in dataset.splits:
        raise RecipeError(f"there is no split {split!r}", hint=f"there are {', '.join(dataset.splits)}")
    loader = DataLoader(dataset, seq_len, batch_size, split=split)
    if batch_size > max(loader.num_samples, _SMALL_BATCH):
        raise RecipeError(
            f"batch_size {batch_size} is more than the {loader.num_samples} samples of split {split}",
            hint="use a smaller `batch_size`",
        )
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


@command(app, "export", _EXPORT.format(layouts=declared.LAYOUTS), declared.EXPORT_OPTIONS)
def export(options: dict[str, Any]) -> int:
    from tokenmill.formats.convert import export

    with ProgressDisplay.of(options, "exporting") as watcher:
        result = export(watch=watcher, expected=_expected(options, options["to"]), **library_arguments(options))
    if options["json"]:
        show.as_json(show.export_record(result))
    elif not options["quiet"]:
        show.exported(result)
        show.checks(result)
    return 0


def _expected(options: dict[str, Any], layout: str) -> dict[str, Any]:
    """What files must hash to, by `--expect` and `--checksums`."""
    from tokenmill.formats.base import load_checked_format

    if options["skip_validation"] or (not options["expect"] and options["checksums"] is None):
        return {}
    return dict(load_checked_format(layout).read_expected(options["expect"] or (), options["checksums"]))


_IMPORT = """
Make a dataset from the files of a trainer's layout, with the same documents in the same order.

If a layout does not store where documents end, pass the end-of-text id or the tokenizer.

\b
Examples:
  tokenmill import out/nanogpt --from nanogpt -o data/owt --tokenizer gpt2
  tokenmill import shards/ --from templar -o data/dclm --eot-id 2
"""


@command(app, "import", _IMPORT, declared.IMPORT_OPTIONS)
def import_(options: dict[str, Any]) -> int:
    from tokenmill.formats.convert import import_

    with ProgressDisplay.of(options, "importing") as watcher:
        result = import_(watch=watcher, **library_arguments(options))
    if options["json"]:
        show.as_json({**show.result_record(result), "layout": result.layout, "notes": list(result.notes)})
    elif not options["quiet"]:
        show.result(result)
    return 0


_CONSOLIDATE = """
Join Templar's train_000000.npy shards into tokens.bin, and write the ids of their samples to sample_ids.bin.

Prints the SHA-256 and the number of elements of both, and compares them with what you expect. If you expect the ids
that Templar's own script wrote, pass --templar-compat: each of its ids is of two samples.

\b
Examples:
  tokenmill consolidate --data_root shards/ --seq_len 2048 --expect tokens=4c53...:161061273600
  tokenmill consolidate --data_root shards/ --seq_len 2048 --checksums expected.json
  tokenmill consolidate --data_root shards/ --seq_len 2048 --skip-validation
"""


@command(app, "consolidate", _CONSOLIDATE, declared.CONSOLIDATE_OPTIONS)
def consolidate(options: dict[str, Any]) -> int:
    from tokenmill.formats.templar import consolidate

    expected = _expected(options, "templar")
    with ProgressDisplay.of(options, "writing") as watcher:
        result = consolidate(watch=watcher, expected=expected, **library_arguments(options))
    if options["json"]:
        show.as_json(show.export_record(result))
    elif not options["quiet"]:
        show.exported(result)
        show.checks(result)
        if not expected and not options["skip_validation"]:
            show.sentence("Pass --expect or --checksums to compare them.")
        for note in result.notes:
            show.sentence(f"{note}.")
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


@command(app, "push", _PUSH, declared.PUSH_OPTIONS)
def push(options: dict[str, Any]) -> int:
    from tokenmill.maintenance.push_pull import push

    return _transfer(push, options, "uploading")


@command(app, "pull", _PULL, declared.PULL_OPTIONS)
def pull(options: dict[str, Any]) -> int:
    from tokenmill.maintenance.push_pull import pull

    return _transfer(pull, options, "downloading")


def _transfer(move: Callable[..., TransferResult], options: dict[str, Any], label: str) -> int:
    with ProgressDisplay.of(options, label) as watcher:
        moved = move(watch=watcher, **library_arguments(options))
    if options["json"]:
        show.as_json(dataclasses.asdict(moved))
    elif not options["quiet"]:
        show.moved(moved)
    return 0


_CLUSTER = """
Print a cluster file for `ray up` from a file with one `host slots` line per host. The first host is the head.

\b
Example:
  tokenmill cluster hosts.txt > cluster.yaml
  ray up cluster.yaml
"""


@command(app, "cluster", _CLUSTER, declared.CLUSTER_OPTIONS)
def cluster(options: dict[str, Any]) -> int:
    from tokenmill.executors.hosts import cluster

    print(cluster(**library_arguments(options)), end="")
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
    if isinstance(error, MemoryError):
        show.error("there is not enough memory", for_shell(MORE_MEMORY))
        return 1
    show.error(redact(f"unexpected {type(error).__name__}: {error}"), "please report this, with what -v prints")
    return 1
