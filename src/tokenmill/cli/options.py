"""The options that `prepare` and `plan` share, each said once."""

from __future__ import annotations

import codecs
import contextlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any

import typer

from tokenmill.errors import RecipeError


def _option(*names: str, metavar: str | None = None, help: str, callback: Callable[..., Any] | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, show_default=False, callback=callback)


def with_modules_here(given: Any) -> Any:
    """An option that may name a filter lets it be a module of the current folder; installed ones come before it."""
    if given is not None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return given


_TEXT = str | None
_FLAG = bool

OPTIONS: dict[str, Any] = {
    "sources": Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE...", help="files, folders or globs, also s3://, gs://, az://, hf://", show_default=False
        ),
    ],
    "output": Annotated[_TEXT, _option("-o", "--output", metavar="OUT", help="the dataset's folder or URL")],
    "tokenizer": Annotated[
        _TEXT,
        _option(
            metavar="NAME",
            help="gpt2 (the default), byte, char, a tokenizer.json, a .tiktoken[:SCHEME], a SentencePiece .model, "
            "or a name on the hub",
        ),
    ],
    "text_column": Annotated[_TEXT, _option(metavar="NAME", help="the column or field that holds the text")],
    "template": Annotated[_TEXT, _option(metavar="TEXT", help='text from several columns: "{title}\\n\\n{body}"')],
    "documents": Annotated[
        _TEXT, _option(metavar="WHAT", help="in text files: lines (the default), files or separator:TEXT")
    ],
    "eot": Annotated[_TEXT, _option(metavar="WHERE", help="end of text: append (the default), prepend or none")],
    "eot_token": Annotated[
        _TEXT,
        _option(metavar="TOKEN", help="which token ends a text; a .tiktoken file of your own gets it as a new one"),
    ],
    "split": Annotated[
        list[str] | None,
        _option(
            metavar="NAME=SHARE",
            help="hold documents out by their content: val=0.0005, or val=1%,test=2%; may be repeated. "
            "nanogpt: those that nanoGPT's own script holds out",
        ),
    ],
    "val_source": Annotated[
        list[str] | None, _option(metavar="SOURCE", help="a source that is the validation split; may be repeated")
    ],
    "unit_bytes": Annotated[_TEXT, _option(metavar="SIZE", help="text of one unit of work, like 256MB")],
    "workers": Annotated[
        int | None,
        _option(
            "-j",
            "--workers",
            metavar="N",
            help="as cores and memory allow by default; 0 or less: three quarters of the cores",
        ),
    ],
    "scratch": Annotated[
        _TEXT, _option(metavar="DIR", help="write here first, where OUT is a slow network drive or a URL")
    ],
    "max_tokens": Annotated[_TEXT, _option(metavar="N", help="stop at exactly so many tokens, like 150G")],
    "sample": Annotated[_TEXT, _option(metavar="SHARE", help="a seeded share of the units, like 1%, for a trial")],
    "seed": Annotated[int | None, _option(metavar="N", help="of the split and of the sample (0)")],
    "min_chars": Annotated[int | None, _option(metavar="N", help="drop documents of fewer characters")],
    "max_document_bytes": Annotated[_TEXT, _option(metavar="SIZE", help="drop larger documents (64MB)")],
    "filter": Annotated[
        _TEXT,
        _option(
            metavar="MODULE:FUNCTION",
            help="keep the documents for which your function is true; it gets the text, one str. The module is in the "
            "current folder or on the Python path",
            callback=with_modules_here,
        ),
    ],
    "on_bad": Annotated[
        _TEXT, _option(metavar="WHAT", help="bad documents: quarantine (the default), or fail at the first one")
    ],
    "config": Annotated[
        _TEXT,
        _option(
            metavar="FILE",
            help="a recipe in YAML: sources, tokenizer, split, max_tokens, ...; options win over it",
            callback=with_modules_here,
        ),
    ],
    "layout": Annotated[
        _TEXT,
        _option(
            metavar="LAYOUT",
            help="export as well, to OUT/LAYOUT: nanogpt, or with options templar:seq_len=2048,shard_size=1Gi",
        ),
    ],
    "executor": Annotated[
        _TEXT,
        _option(
            metavar="WHAT",
            help="what runs the units: local (worker processes, the default), or ray (tasks of a cluster)",
        ),
    ],
    "restart": Annotated[_FLAG, _option("--restart", help="throw away what OUT holds, and start over")],
    "update": Annotated[
        _FLAG, _option("--update", help="sources of an unfinished build changed: keep what was made of the others")
    ],
    "as_json": Annotated[_FLAG, _option("--json", help="print the result as JSON")],
    "quiet": Annotated[_FLAG, _option("-q", "--quiet", help="print nothing but errors")],
    "verbose": Annotated[_FLAG, _option("-v", "--verbose", help="tell of every unit; show tracebacks")],
    "no_progress": Annotated[_FLAG, _option("--no-progress", help="no bar and no progress lines")],
}
PREPARE_OPTIONS = {
    **OPTIONS,
    "ray_address": Annotated[
        _TEXT,
        _option(
            metavar="ADDRESS",
            help="the Ray cluster: HOST:PORT or auto; without it the one that is found, else a local Ray for the while",
        ),
    ],
    "placement": Annotated[
        _TEXT,
        _option(
            metavar="WHERE",
            help="with ray: shared (all nodes reach OUT, the default), or node-local (every node keeps a part in OUT "
            "on its own disk; '$VARIABLES' in OUT are those of the node)",
        ),
    ],
    "wait": Annotated[_FLAG, _option("--wait", help="if another process builds OUT, wait for it")],
}
_FLAGS = ("restart", "update", "as_json", "quiet", "verbose", "no_progress", "wait")


def with_options(options: dict[str, Any]) -> Callable[[Callable[[dict[str, Any]], int]], Callable[..., int]]:
    """A command that takes all of these options, and gets them as one dict."""

    def decorate(command: Callable[[dict[str, Any]], int]) -> Callable[..., int]:
        def wrapper(**given: Any) -> int:
            return command(given)

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


@contextlib.contextmanager
def naming_options(options: Collection[str] = OPTIONS) -> Iterator[None]:
    """Errors of a recipe begin with its field, which is an option here. Those of a file begin with the file's name."""
    try:
        yield
    except RecipeError as error:
        field, _, what = error.message.partition(": ")
        name = "val_source" if field == "val_sources" else field
        if not what or name not in options:
            raise
        option = "SOURCE" if name == "sources" else f"--{name.replace('_', '-')}"
        raise type(error)(f"{option}: {what}", hint=error.hint) from None


def unescape(text: str | None) -> str | None:
    """`\\n`, `\\t` and the like as a shell passes them on, turned into what they mean."""
    if text is None:
        return None
    return re.sub(
        r"\\(?:[nrt\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})", lambda found: codecs.decode(found[0], "unicode_escape"), text
    )
