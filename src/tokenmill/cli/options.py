"""The options of all commands, each declared once, and the translation of Python names in messages.

    fields of a recipe, as `RecipeOptions` types them   -> options of prepare and plan
    keywords of the library's functions                 -> options of the other commands

An option has the name of its keyword, so a command hands on what it is given (`library_arguments`).
"""

from __future__ import annotations

import ast
import codecs
import functools
import inspect
import os
import re
import shlex
import sys
import traceback
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from tokenmill.arguments import RecipeOptions
from tokenmill.errors import TokenmillError, redact

DATASET, TEXT, TOKENIZER, LAYOUT, RUN, PRINT = "Dataset", "Text", "Tokenizer", "Layout", "Run", "Output"
REQUIRED = inspect.Parameter.empty
SEVERAL = list[str]


@dataclass(frozen=True, slots=True)
class Option:
    """An option, or with `is_argument` an argument. It is called `--like-this` unless `names` says otherwise.

    A field of a recipe needs no `kind`: its type is the recipe's. Paths are texts, for a `Path` makes an empty one
    the current folder.
    """

    group: str
    metavar: str | None
    help: str
    names: tuple[str, ...] = ()
    kind: Any = str
    default: Any = None
    is_argument: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def parameter(self, name: str) -> inspect.Parameter:
        """The option as a parameter that typer understands."""
        is_flag = self.kind is bool
        default = False if is_flag and self.default is None else self.default
        declare: Any = typer.Argument if self.is_argument else typer.Option
        option = declare(
            *self.names,
            metavar=self.metavar,
            help=self.help,
            rich_help_panel=self.group,
            show_default=default not in (None, False, REQUIRED),
            **self.settings,
        )
        kind = self.kind if is_flag or default is not None else self.kind | None
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )


def _argument(metavar: str, help: str, kind: Any = str, default: Any = REQUIRED) -> Option:
    return Option("Arguments", metavar, help, kind=kind, default=default, is_argument=True)


def _flag(group: str, help: str, *names: str) -> Option:
    return Option(group, None, help, names, kind=bool)


def _workers(help: str) -> Option:
    help = f"{help}; 0 or less: three quarters of the cores"
    return Option(RUN, "N", help, ("-j", "--workers"), kind=int)


def with_modules_here(given: Any) -> Any:
    """Let a filter be a module of the current folder. Installed modules come first."""
    if given is not None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return given


def _recipe_field(name: str, group: str, metavar: str, help: str, *names: str, **settings: Any) -> Option:
    """The option of a field of a recipe: one number, or several texts, or a text that the recipe reads."""
    hint = _FIELD_TYPES[name]
    is_many = any(get_origin(kind) in (abc.Sequence, abc.Mapping) for kind in get_args(hint))
    kind = int if hint is int else SEVERAL if is_many else str
    return Option(group, metavar, help, names, kind=kind, settings=settings)


_FIELD_TYPES = get_type_hints(RecipeOptions)
_MODULES = {"callback": with_modules_here}
_FILTER = "MODULE:FUNCTION"

VERBOSE = _flag(PRINT, "report every unit; show tracebacks", "-v", "--verbose")
JSON = _flag(PRINT, "print the result as JSON", "--json")
QUIET = _flag(PRINT, "print only errors", "-q", "--quiet")
NO_PROGRESS = _flag(PRINT, "no progress bar and no progress lines", "--no-progress")
# What a command prints. The library does not get these.
PRINTED = {"json": JSON, "quiet": QUIET, "no_progress": NO_PROGRESS}

# What `prepare` and `plan` share.
OPTIONS: dict[str, Option] = {
    "sources": _argument(
        "SOURCE...", "files, folders or globs, also s3://, gs://, az://, hf://", kind=SEVERAL, default=None
    ),
    "output": Option(DATASET, "OUT", "the dataset's folder or URL", ("-o", "--output")),
    "config": Option(
        DATASET,
        "FILE",
        "a recipe in YAML: sources, tokenizer, split, max_tokens, ...; options override it",
        settings=_MODULES,
    ),
    "split": _recipe_field(
        "split",
        DATASET,
        "NAME=SHARE",
        "hold out documents by their content: val=0.0005, or val=1%,test=2%; may be repeated. nanogpt: those that "
        "nanoGPT's own script holds out",
    ),
    "val_sources": _recipe_field(
        "val_sources", DATASET, "SOURCE", "a source that is the validation split; may be repeated", "--val-source"
    ),
    "max_tokens": _recipe_field("max_tokens", DATASET, "N", "stop at exactly this many tokens, like 150G"),
    "sample": _recipe_field(
        "sample",
        DATASET,
        "SHARE",
        "a seeded share for a trial: of the units, like 1%, which are not read otherwise; or of the documents, like "
        "documents:1%",
    ),
    "seed": _recipe_field("seed", DATASET, "N", "seed of the split and of the sample (0)"),
    "layout": Option(
        DATASET,
        "LAYOUT",
        "also export to OUT/LAYOUT: nanogpt, or with options templar:seq_len=2048,shard_size=1Gi",
    ),
    "only_layout": _flag(
        DATASET,
        "remove the dataset when the export of --layout is complete, so that the tokens are stored once; there is no "
        "repair then, and no other export",
        "--only-layout",
    ),
    "text_column": _recipe_field("text_column", TEXT, "NAME", "the column or field that contains the text"),
    "template": _recipe_field("template", TEXT, "TEXT", 'text from several columns: "{title}\\n\\n{body}"'),
    "documents": _recipe_field(
        "documents",
        TEXT,
        "WHAT",
        "what a document is in text files: auto (the default: a line, or the whole file for .md, .html, .py, ...), "
        "lines, files or separator:TEXT",
    ),
    "filter": _recipe_field(
        "filter",
        TEXT,
        _FILTER,
        "keep the documents for which this function is true; it is called with the text, a str, and with the columns "
        "that its other parameters name. The module is in the current folder or on the Python path",
        **_MODULES,
    ),
    "min_chars": _recipe_field("min_chars", TEXT, "N", "drop documents with fewer characters"),
    "max_document_bytes": _recipe_field("max_document_bytes", TEXT, "SIZE", "drop larger documents (64MB)"),
    "on_bad": _recipe_field(
        "on_bad", TEXT, "WHAT", "bad documents: quarantine (the default), or fail at the first one"
    ),
    "tokenizer": _recipe_field(
        "tokenizer",
        TOKENIZER,
        "NAME",
        "gpt2 (the default), byte, char, a tokenizer.json, a .tiktoken[:SCHEME], a SentencePiece .model, or a name on "
        "the hub",
    ),
    "eot": _recipe_field("eot", TOKENIZER, "WHERE", "end of text: append (the default), prepend or none"),
    "eot_token": _recipe_field(
        "eot_token", TOKENIZER, "TOKEN", "the token that ends a text; added as a new token to a custom .tiktoken file"
    ),
    "workers": _workers("by default as many as cores and memory allow"),
    "unit_bytes": _recipe_field("unit_bytes", RUN, "SIZE", "text in one unit of work, like 256MB"),
    "scratch": Option(RUN, "DIR", "write here first, if OUT is a slow network drive or a URL"),
    "executor": Option(
        RUN, "WHAT", "what runs the units: local (worker processes, the default), or ray (tasks of a cluster)"
    ),
    "restart": _flag(RUN, "delete what OUT contains, and start over", "--restart"),
    "update": _flag(RUN, "sources of an unfinished build changed: keep the units of the unchanged ones", "--update"),
    "json": JSON,
    "quiet": QUIET,
    "verbose": VERBOSE,
    "no_progress": NO_PROGRESS,
}
PREPARE_OPTIONS = {
    **OPTIONS,
    "ray_address": Option(
        RUN,
        "ADDRESS",
        "the Ray cluster: HOST:PORT or auto. By default the one that is found, else a temporary local Ray",
    ),
    "hosts": Option(
        RUN,
        "FILE",
        "start a temporary Ray cluster over SSH on these hosts, one [user@]host[:port] [slots] a line, and stop it at "
        "the end",
    ),
    "env_setup": Option(RUN, "COMMAND", "with hosts: what to run there first, like 'source venv/bin/activate'"),
    "ssh_key": Option(RUN, "FILE", "with hosts: the private key for SSH, if its configuration does not name it"),
    "placement": Option(
        RUN,
        "WHERE",
        "with ray: shared (all nodes reach OUT, the default), or node-local (every node stores a part in OUT on its "
        "own disk; '$VARIABLES' in OUT are those of the node)",
    ),
    "part": Option(
        RUN,
        "I/N",
        "do only the units of part I of N, on any machine that reaches OUT; when all parts are done, tokenmill join "
        "makes the dataset",
    ),
    "no_report": _flag(PRINT, "do not write report.html and README.md into OUT", "--no-report"),
    "wait": _flag(RUN, "if another process is building OUT, wait for it", "--wait"),
}
JOIN_OPTIONS = {
    "output": _argument("OUT", "the folder or URL that the parts were given"),
    "workers": _workers("threads that hash files of parts that were cut off; all cores by default"),
    **PRINTED,
}
_FINISHED = {"path": _argument("OUT", "folder or URL of a dataset")}
_REBUILD = {
    "filter": Option(RUN, _FILTER, "the filter that the dataset was made with, if any", settings=_MODULES),
    "workers": _workers("all cores by default"),
    "json": JSON,
}
VERIFY_OPTIONS = {
    **_FINISHED,
    "quick": _flag(RUN, "sizes and structure only", "--quick"),
    "source": Option(RUN, None, "tokenize the sources again and compare", kind=Literal["sample", "all"]),
    **_REBUILD,
}
REPAIR_OPTIONS = {**_FINISHED, **_REBUILD}
REPORT_OPTIONS = {
    "dataset": _argument("OUT", "a dataset, or token files of a layout"),
    "output": Option(DATASET, "FILE", "write the page to this file only, and no README.md", ("-o", "--output")),
    "license": Option(DATASET, "NAME", "the license in README.md, as on the hub, like cc-by-4.0"),
    "json": JSON,
}
INSPECT_OPTIONS = {
    **_FINISHED,
    "split": Option(PRINT, "NAME", "which split to show texts of (train if there is one)"),
    "documents": Option(PRINT, "N", "how many texts to show", kind=int, default=3, settings={"min": 0}),
    "json": JSON,
}
PEEK_OPTIONS = {
    "dataset": _argument("OUT", "a dataset, or token files of a layout"),
    "split": Option(DATASET, "NAME", "which split (train if there is one)"),
    "document": Option(DATASET, "N", "from this document on", kind=int, settings={"min": 0}),
    "sample": Option(DATASET, "N", "from this sample on, of --seq-len tokens", kind=int, settings={"min": 0}),
    "seq_len": Option(DATASET, "N", "tokens in a sample", kind=int, default=1024, settings={"min": 1}),
    "count": Option(DATASET, "N", "how many documents or samples", kind=int, default=1, settings={"min": 1}),
    "random": _flag(DATASET, "draw documents; with --sample 0, samples", "--random"),
    "seed": Option(DATASET, "N", "seed of --random", kind=int, default=0),
    "tokenizer": Option(DATASET, "NAME", "the tokenizer, if files of a layout do not say it"),
    "max_tokens": Option(PRINT, "N", "tokens to show of each", kind=int, default=256, settings={"min": 1}),
    "ids": _flag(PRINT, "a line for each token, with its id", "--ids"),
    "json": JSON,
}
TRAINING = "Training, as the loader has it"
TRACE_OPTIONS = {
    "dataset": _argument("DATASET", "a dataset, or token files of a layout"),
    "step": Option(DATASET, "N", "the samples of this step, counted from 0", kind=int, settings={"min": 0}),
    "rank": Option(DATASET, "N", "of this rank alone; by default of all", kind=int, settings={"min": 0}),
    "sample": Option(DATASET, "N", "this sample: a number as in the field sample_index", kind=int, settings={"min": 0}),
    "document": Option(DATASET, "N", "this document of the split", kind=int, settings={"min": 0}),
    "source": Option(DATASET, "FILE:N", "the document at this row of a source, or in text and JSON lines at this byte"),
    "split": Option(DATASET, "NAME", "which split (train, or the one that the document of --source is in)"),
    "seq_len": Option(TRAINING, "N", "tokens in a sample", kind=int, settings={"min": 1}),
    "batch_size": Option(TRAINING, "N", "samples in a batch of one rank", kind=int, settings={"min": 1}),
    "world_size": Option(TRAINING, "N", "number of ranks", kind=int, default=1, settings={"min": 1}),
    "packing": Option(TRAINING, "KIND", "concat, document_start, best_fit, padded or truncated", default="concat"),
    "order": Option(
        TRAINING, None, "order of samples", kind=Literal["sequential", "shuffled", "random"], default="shuffled"
    ),
    "seed": Option(TRAINING, "N", "seed of the order", kind=int, default=0),
    "max_seq_len": Option(TRAINING, "N", "the longest sample of a run in stages", kind=int, settings={"min": 1}),
    "epochs": Option(
        TRAINING, "N", "the loader's epochs, if it does not repeat endlessly", kind=int, settings={"min": 1}
    ),
    "epoch": Option(
        TRAINING, "N", "in which epoch to search a document or sample", kind=int, default=0, settings={"min": 0}
    ),
    "json": JSON,
}
VIEW_OPTIONS = {
    "dataset": _argument("DATASET", "a dataset, a build in progress, or token files of a layout"),
    "beside": Option(DATASET, "DATASET", "a second dataset, to compare documents with"),
    "tokenizer": Option(DATASET, "NAME", "a second tokenizer, to compare texts with; or that of files of a layout"),
    "port": Option(RUN, "N", "the port; any free one by default", kind=int, default=0, settings={"min": 0}),
}
DOCTOR_OPTIONS = {
    "target": _argument("PATH...", "a dataset, or files, folders or globs of text", kind=SEVERAL, default=None),
    "tokenizer": Option(TOKENIZER, "NAME", "the tokenizer for the text", default="gpt2"),
    "text_column": Option(TEXT, "NAME", "the column or field that contains the text"),
    "output": Option(RUN, "OUT", "the output of a build, whose disk is checked", ("-o", "--output")),
    "scratch": Option(RUN, "DIR", "the scratch folder of a build, whose disk is checked"),
    "network": _flag(RUN, "also ask the hub and the Ray cluster that are configured", "--network"),
    "json": JSON,
}
COMPARE_OPTIONS = {
    "a": _argument("A", "a dataset, token files of a layout, or a recipe (.yaml)"),
    "b": _argument("B", "another one"),
    "json": JSON,
}
TOKENIZERS_OPTIONS = {
    "sources": _argument("TEXT...", "files, folders or globs of text", kind=SEVERAL),
    "tokenizers": Option(TOKENIZER, "NAME", "a tokenizer; may be repeated", ("--tokenizer",), kind=SEVERAL),
    "text_column": Option(TEXT, "NAME", "the column or field that contains the text"),
    "seed": Option(TEXT, "N", "seed of the sample", kind=int, default=0, settings={"min": 0}),
    "json": JSON,
}
BENCH_OPTIONS = {
    **_FINISHED,
    "split": Option(RUN, "NAME", "which split to read", default="train"),
    "seq_len": Option(RUN, "N", "tokens in a sample", kind=int, default=1024, settings={"min": 1}),
    "batch_size": Option(RUN, "N", "samples in a batch", kind=int, default=64, settings={"min": 1}),
    "seconds": Option(RUN, "N", "how long to measure", kind=float, default=3.0, settings={"min": 0.01}),
    "json": JSON,
}
# Repeated here so that --help loads no layout.
LAYOUTS = "catid, datatrove, huggingface, litdata, llmc, mds, megatron, nanogpt, olmo, templar"
_CONVERT = {
    "workers": _workers("threads; all cores by default"),
    "scratch": Option(RUN, "DIR", "write here first, if the output is a slow network drive"),
    "restart": _flag(RUN, "delete what an earlier run wrote there", "--restart"),
    **PRINTED,
}
_TEMPLAR_COMPAT = _flag(
    LAYOUT, "sample ids as Templar's own script computes them: of two samples each, the second half of nothing",
    "--templar-compat",
)  # fmt: skip
EXPECTED = {
    "expect": Option(
        LAYOUT, "NAME=SHA256[:COUNT]", "what tokens or sample_ids must be (templar); may be repeated", kind=SEVERAL
    ),
    "checksums": Option(LAYOUT, "FILE", 'the same as JSON: {"tokens": {"sha256": ..., "elements": ...}}'),
    "skip_validation": _flag(LAYOUT, "skip the comparison", "--skip-validation", "--skip_validation"),
}
EXPORT_OPTIONS = {
    "dataset": _argument("DATASET", "a dataset, or token files of a layout"),
    "output": _argument("OUT", "a folder of its own"),
    "to": Option(LAYOUT, "LAYOUT", f"one of {LAYOUTS}", default=REQUIRED),
    "shard_size": Option(LAYOUT, "N", "tokens in a file, like 100M or 1Gi"),
    "seq_len": Option(LAYOUT, "N", "tokens in a sample (templar: 2048), or in a packed row (mds, huggingface)"),
    "name": Option(LAYOUT, "NAME", "what file names begin with"),
    "order": Option(
        LAYOUT,
        None,
        "order of the documents: source (the default), or shuffled, for trainers that read in order",
        kind=Literal["source", "shuffled"],
    ),
    "seed": Option(LAYOUT, "N", "seed of --order shuffled (0)", kind=int),
    "templar_compat": _TEMPLAR_COMPAT,
    "consolidated": _flag(LAYOUT, "templar: only tokens.bin and sample_ids.bin, without the shards", "--consolidated"),
    **EXPECTED,
    **_CONVERT,
}
IMPORT_OPTIONS = {
    "path": _argument("PATH", "files of the layout, or one of them"),
    "layout": Option(LAYOUT, "LAYOUT", f"one of {LAYOUTS}", ("--from",), default=REQUIRED),
    "eot_id": Option(LAYOUT, "N", "the id that ends a text", kind=int, settings={"min": 0}),
    "dtype": Option(LAYOUT, None, "of files that do not store it", kind=Literal["uint16", "uint32", "int32"]),
    "column": Option(LAYOUT, "NAME", "the column of tokens (huggingface), input_ids by default"),
    "output": Option(DATASET, "DATASET", "the dataset's folder", ("-o", "--output"), default=REQUIRED),
    "tokenizer": Option(DATASET, "NAME", "the tokenizer of the tokens, so that the dataset can be decoded"),
    **_CONVERT,
}
CONSOLIDATE_OPTIONS = {
    "data_root": Option(
        LAYOUT, "DIR", "the folder with train_000000.npy, ...", ("--data_root", "--data-root"), default=REQUIRED
    ),
    "seq_len": Option(LAYOUT, "N", "tokens of a sample", ("--seq_len", "--seq-len"), default="2048"),
    **EXPECTED,
    "templar_compat": _TEMPLAR_COMPAT,
    "workers": _CONVERT["workers"],
    "restart": _flag(RUN, "write both files again, also if the shards were replaced", "--restart"),
    **PRINTED,
}
_TRANSFER = {
    "split": Option(RUN, "NAME", "only this split; may be repeated", kind=SEVERAL),
    "shards": Option(RUN, "NUMBERS", "only these shards of each split, like 0-9 or 0,3,5-7"),
    "workers": Option(RUN, "N", "files at once, 1 or more (4)", ("-j", "--workers"), kind=int),
    **PRINTED,
}
_URL = _argument("URL", "s3://, gs:// or az://")
PUSH_OPTIONS = {"dataset": _argument("DATASET", "a dataset's folder"), "url": _URL, **_TRANSFER}
PULL_OPTIONS = {"url": _URL, "folder": _argument("DIR", "the dataset's folder"), **_TRANSFER}
CLUSTER_OPTIONS = {
    "hosts": _argument("HOSTS", "a file like: node1 16"),
    "user": Option(RUN, "NAME", "user on the hosts; you by default"),
}


class GroupedCommand(typer.core.TyperCommand):
    """A command whose help lists its options in groups, as plain text: that is quick, and goes into docs/cli.md."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if (record := option.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def summary(help: str) -> str:
    """The first sentence of a command's help, for the list of commands. Without it, click would cut the help short."""
    return " ".join(help.split()).partition(". ")[0].partition(" \b")[0].rstrip(".") + "."


Run = Callable[[dict[str, Any]], int]


def command(app: typer.Typer, name: str, help: str, options: Mapping[str, Option]) -> Callable[[Run], Run]:
    """Register a command, which is called with its options as one dict."""

    def register(run: Run) -> Run:
        def call(**given: Any) -> int:
            try:
                return run(given)
            except (TokenmillError, OSError):
                raise
            except Exception:
                if given.get("verbose"):
                    print(redact(traceback.format_exc()), file=sys.stderr)
                raise

        parameters = [option.parameter(name) for name, option in options.items()]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect looks for first
        app.command(name, cls=GroupedCommand, help=help, short_help=summary(help))(call)
        return run

    return register


def library_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the library's function takes them: nothing for an option that is not given."""
    found = {name: value for name, value in given.items() if name not in _FOR_THE_COMMAND}
    found = {name: value for name, value in found.items() if value is not None and value is not False}
    for name in ("template", "documents"):
        if isinstance(found.get(name), str):
            found[name] = unescape(found[name])
    return found


_FOR_THE_COMMAND = (*PRINTED, "verbose", "ids", "no_report", *EXPECTED)

_QUOTED = re.compile(r"`([^`\n]{1,4000})`")
_FIELD = re.compile(r"(\w+)(?=: | is )")
# `--expect` and `--checksums` are one argument of the library.
_PYTHON_NAMES = {"expect": "expected"}


def for_shell(text: str, *, begins_with_field: bool = False) -> str:
    """A message or hint as a shell user needs it. The library writes Python in backquotes:

    `restart=True` -> --restart    `eot='none'` -> --eot none    `tokenmill.export('a', 'b', to='mds')` -> a command

    What a recipe is refused for begins with the name of its field, which is an option here.
    """
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    names = shell_names(command)
    if begins_with_field:
        text = _FIELD.sub(lambda found: names.get(found[1], found[1]), text, count=1) if _FIELD.match(text) else text
    return _QUOTED.sub(lambda found: _translated(found[1], names) or found[0], text)


@functools.cache
def shell_names(command: str) -> dict[str, str]:
    """The option for each name in Python: those of a command, then those that only other commands have."""
    commands = _commands()
    found: dict[str, str] = {}
    for name in sorted(commands, key=lambda name: name != command):
        for option in commands[name].params:
            found.setdefault(_PYTHON_NAMES.get(option.name, option.name), _shown(option))
    return found


@functools.cache
def _commands() -> dict[str, Any]:
    from tokenmill.cli.commands import app

    found: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    return found


def _shown(option: Any) -> str:
    """`--seq-len` of an option; `SOURCE` of an argument."""
    if option.param_type_name == "argument":
        return str(option.metavar or option.name.upper()).rstrip(".")
    return max((name for name in option.opts if "_" not in name), key=len, default=str(option.opts[0]))


def _translated(code: str, names: Mapping[str, str]) -> str:
    """Options or a command for a piece of Python that names them; "" for anything else, like another program."""
    try:
        match ast.parse(code).body:
            case [ast.Assign(targets=[ast.Name(name)], value=value)] if name in names:
                return " ".join(_option_words(names[name], ast.literal_eval(value)))
            case [ast.Expr(ast.Name(name))]:
                return names.get(name, "")
            case [ast.Expr(ast.Attribute(ast.Name("tokenmill"), function))] if function.rstrip("_") in _commands():
                return f"tokenmill {function.rstrip('_')}"
            case [ast.Expr(ast.Call(ast.Attribute(ast.Name("tokenmill"), function), values, keywords))]:
                return _command_line(function.rstrip("_"), values, keywords)
    except (SyntaxError, ValueError, TypeError, LookupError, RecursionError, MemoryError):
        pass  # a name of a file may be anything
    return ""


def _command_line(command: str, values: list[ast.expr], keywords: list[ast.keyword]) -> str:
    names = shell_names(_commands()[command].name)
    arguments = [param for param in _commands()[command].params if param.param_type_name == "argument"]
    words = ["tokenmill", command, *(_quoted(ast.literal_eval(value)) for value in values[: len(arguments)])]
    if len(values) > len(arguments):  # the output is an option of some commands
        words += _option_words("-o", ast.literal_eval(values[-1]))
    for keyword in keywords:
        words += _option_words(names[str(keyword.arg)], ast.literal_eval(keyword.value))
    return " ".join(words)


def _option_words(option: str, value: object) -> list[str]:
    return [option] if value is True else [option, _quoted(value)]


def _quoted(value: object) -> str:
    return shlex.quote(str(value).replace("\n", "\\n"))


def unescape(text: str) -> str:
    """Interpret `\\n`, `\\t` and the like, which a shell passes on as they are."""
    return re.sub(
        r"\\(?:[nrt\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})", lambda found: codecs.decode(found[0], "unicode_escape"), text
    )
