"""The options that `prepare` and `plan` share, each declared once; and what Python calls them, in messages."""

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
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from tokenmill.errors import TokenmillError, redact

DATASET, TEXT, TOKENIZER, RUN, PRINT = "Dataset", "Text", "Tokenizer", "Run", "Output"


def _option(group: str, metavar: str | None, help: str, *names: str, kind: Any = str | None, **settings: Any) -> Any:
    """An option that is named like its parameter unless `names` says otherwise."""
    option = typer.Option(*names, metavar=metavar, help=help, show_default=False, rich_help_panel=group, **settings)
    return Annotated[kind, option]


def _flag(group: str, help: str, *names: str) -> Any:
    return _option(group, None, help, *names, kind=bool)


class GroupedCommand(typer.core.TyperCommand):
    """A command whose help lists its options in groups, as plain text: that is quick, and goes into docs/cli.md."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            group = "Arguments" if option.param_type_name == "argument" else getattr(option, "rich_help_panel", None)
            if (record := option.get_help_record(ctx)) is not None:
                groups.setdefault(group or "Options", []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def summary(help: str) -> str:
    """The first sentence of a command's help, for the list of commands. Without it, click would cut the help short."""
    return " ".join(help.split()).partition(". ")[0].partition(" \b")[0].rstrip(".") + "."


def with_modules_here(given: Any) -> Any:
    """Let a filter be a module of the current folder. Installed modules come first."""
    if given is not None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return given


SEVERAL, NUMBER, FILE = list[str] | None, int | None, str | None  # not a Path: an empty one means the current folder

# What `prepare` and `plan` share. Fields of a recipe have the names that they have there, but for `val_source`.
OPTIONS: dict[str, Any] = {
    "sources": Annotated[
        SEVERAL,
        typer.Argument(
            metavar="SOURCE...", help="files, folders or globs, also s3://, gs://, az://, hf://", show_default=False
        ),
    ],
    "output": _option(DATASET, "OUT", "the dataset's folder or URL", "-o", "--output"),
    "config": _option(
        DATASET,
        "FILE",
        "a recipe in YAML: sources, tokenizer, split, max_tokens, ...; options override it",
        kind=FILE,
        callback=with_modules_here,
    ),
    "split": _option(
        DATASET,
        "NAME=SHARE",
        "hold out documents by their content: val=0.0005, or val=1%,test=2%; may be repeated. nanogpt: those that "
        "nanoGPT's own script holds out",
        kind=SEVERAL,
    ),
    "val_source": _option(DATASET, "SOURCE", "a source that is the validation split; may be repeated", kind=SEVERAL),
    "max_tokens": _option(DATASET, "N", "stop at exactly this many tokens, like 150G"),
    "sample": _option(DATASET, "SHARE", "a seeded share of the units, like 1%, for a trial"),
    "seed": _option(DATASET, "N", "seed of the split and of the sample (0)", kind=NUMBER),
    "layout": _option(
        DATASET,
        "LAYOUT",
        "also export to OUT/LAYOUT: nanogpt, or with options templar:seq_len=2048,shard_size=1Gi",
    ),
    "text_column": _option(TEXT, "NAME", "the column or field that contains the text"),
    "template": _option(TEXT, "TEXT", 'text from several columns: "{title}\\n\\n{body}"'),
    "documents": _option(
        TEXT, "WHAT", "what a document is in text files: lines (the default), files or separator:TEXT"
    ),
    "filter": _option(
        TEXT,
        "MODULE:FUNCTION",
        "keep the documents for which this function is true; it is called with the text, a str. The module is in the "
        "current folder or on the Python path",
        callback=with_modules_here,
    ),
    "min_chars": _option(TEXT, "N", "drop documents with fewer characters", kind=NUMBER),
    "max_document_bytes": _option(TEXT, "SIZE", "drop larger documents (64MB)"),
    "on_bad": _option(TEXT, "WHAT", "bad documents: quarantine (the default), or fail at the first one"),
    "tokenizer": _option(
        TOKENIZER,
        "NAME",
        "gpt2 (the default), byte, char, a tokenizer.json, a .tiktoken[:SCHEME], a SentencePiece .model, or a name on "
        "the hub",
    ),
    "eot": _option(TOKENIZER, "WHERE", "end of text: append (the default), prepend or none"),
    "eot_token": _option(
        TOKENIZER, "TOKEN", "the token that ends a text; added as a new token to a custom .tiktoken file"
    ),
    "workers": _option(
        RUN,
        "N",
        "by default as many as cores and memory allow; 0 or less: three quarters of the cores",
        "-j",
        "--workers",
        kind=NUMBER,
    ),
    "unit_bytes": _option(RUN, "SIZE", "text in one unit of work, like 256MB"),
    "scratch": _option(RUN, "DIR", "write here first, if OUT is a slow network drive or a URL", kind=FILE),
    "executor": _option(
        RUN, "WHAT", "what runs the units: local (worker processes, the default), or ray (tasks of a cluster)"
    ),
    "restart": _flag(RUN, "delete what OUT contains, and start over", "--restart"),
    "update": _flag(RUN, "sources of an unfinished build changed: keep the units of the unchanged ones", "--update"),
    "as_json": _flag(PRINT, "print the result as JSON", "--json"),
    "quiet": _flag(PRINT, "print only errors", "-q", "--quiet"),
    "verbose": _flag(PRINT, "report every unit; show tracebacks", "-v", "--verbose"),
    "no_progress": _flag(PRINT, "no progress bar and no progress lines", "--no-progress"),
}
PREPARE_OPTIONS = {
    **OPTIONS,
    "ray_address": _option(
        RUN,
        "ADDRESS",
        "the Ray cluster: HOST:PORT or auto. By default the one that is found, else a temporary local Ray",
    ),
    "placement": _option(
        RUN,
        "WHERE",
        "with ray: shared (all nodes reach OUT, the default), or node-local (every node stores a part in OUT on its "
        "own disk; '$VARIABLES' in OUT are those of the node)",
    ),
    "wait": _flag(RUN, "if another process is building OUT, wait for it", "--wait"),
}
_FLAGS = ("restart", "update", "as_json", "quiet", "verbose", "no_progress", "wait")


def with_options(options: dict[str, Any]) -> Callable[[Callable[[dict[str, Any]], int]], Callable[..., int]]:
    """A command that takes all of these options as one dict."""

    def decorate(command: Callable[[dict[str, Any]], int]) -> Callable[..., int]:
        def wrapper(**given: Any) -> int:
            try:
                return command(given)
            except (TokenmillError, OSError):
                raise
            except Exception:
                if given["verbose"]:
                    print(redact(traceback.format_exc()), file=sys.stderr)
                raise

        wrapper.__name__ = command.__name__
        wrapper.__annotations__ = {**options, "return": int}
        wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what inspect looks for first
            [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=False if name in _FLAGS else None, annotation=kind
                )
                for name, kind in options.items()
            ]
        )
        return wrapper

    return decorate


def library_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The options as `tokenmill.prepare` and `tokenmill.plan` take them."""
    arguments = {name: value for name, value in given.items() if name not in _FLAGS}
    arguments["sources"] = tuple(arguments["sources"] or ())
    arguments["val_sources"] = tuple(arguments.pop("val_source") or ())
    arguments["split"] = tuple(arguments["split"] or ())
    arguments["template"] = unescape(arguments["template"])
    arguments["documents"] = unescape(arguments["documents"])
    arguments |= {name: given[name] for name in ("restart", "update")}
    for name in ("output", "executor", "placement"):
        if given.get(name) is None:
            arguments.pop(name, None)
    return arguments


_QUOTED = re.compile(r"`([^`\n]{1,4000})`")
_FIELD = re.compile(r"(\w+)(?=: | is )")
# What the command line calls otherwise than Python does, beside the dashes.
_PYTHON_NAMES = {"val_source": "val_sources", "expect": "expected", "as_json": "json"}


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
    """The options that Python's names stand for: those of a command, then those that only other commands have."""
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
    words = ["tokenmill", command, *(_quoted(ast.literal_eval(value)) for value in values)]
    for keyword in keywords:
        words += _option_words(names[str(keyword.arg)], ast.literal_eval(keyword.value))
    return " ".join(words)


def _option_words(option: str, value: object) -> list[str]:
    return [option] if value is True else [option, _quoted(value)]


def _quoted(value: object) -> str:
    return shlex.quote(str(value).replace("\n", "\\n"))


def unescape(text: str | None) -> str | None:
    """Interpret `\\n`, `\\t` and the like, which a shell passes on as they are."""
    if text is None:
        return None
    return re.sub(
        r"\\(?:[nrt\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})", lambda found: codecs.decode(found[0], "unicode_escape"), text
    )
