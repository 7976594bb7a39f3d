"""The recipe: what the user asks for, validated.

A recipe says which bytes come out; how fast, where and with how many workers is not
part of it. `identity()` is the part that a dataset's fingerprint covers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from tokenmill import arguments
from tokenmill.errors import RecipeError
from tokenmill.filters import code_digest
from tokenmill.sizes import parse_fraction, parse_size
from tokenmill.template import template_columns
from tokenmill.typed import MAX_INT

DEFAULT_MAX_DOCUMENT_BYTES = 64_000_000
_NOT_IN_IDENTITY = ("sources", "val_sources", "tokenizer", "eot_token", "on_bad")
# How a build runs and what it prints, which people look for in a recipe as well.
NOT_IN_A_RECIPE = (
    "output", "workers", "scratch", "config", "restart", "update", "layout", "executor", "ray_address", "placement",
    "wait", "json", "quiet", "verbose", "no_progress",
)  # fmt: skip
# As long as a manifest takes it, and as many as there are numbers for in the provenance of a document.
_MAX_SPLIT_CHARS = 64
_MAX_SPLITS = 127
# Folders that a dataset has beside its splits.
_FOLDERS = ("provenance",)
_SPLIT_HINT = "write it like val=0.0005, or val=1%,test=2%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Sources, text, tokenizer, split and sizes of a dataset. `make_recipe` makes it, and checks the types."""

    sources: tuple[str, ...]
    val_sources: tuple[str, ...] = ()
    tokenizer: str = "gpt2"
    text_column: str | None = None
    template: str | None = None
    documents: str = "lines"
    eot: Literal["append", "prepend", "none"] = "append"
    eot_token: str | None = None
    split: dict[str, float] | Literal["nanogpt"] = field(default_factory=dict)
    unit_bytes: int | None = None
    max_tokens: int | None = None
    sample: float | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, lt=MAX_INT)] = 0
    min_chars: Annotated[int, msgspec.Meta(ge=0, lt=MAX_INT)] = 0
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES
    filter: str | None = None
    on_bad: Literal["quarantine", "fail"] = "quarantine"

    def __post_init__(self) -> None:
        """Refuse fields that do not go together."""
        if self.text_column is not None and self.template is not None:
            raise RecipeError("--text-column and --template exclude each other", hint="a template can name one column")
        if self.eot == "none" and self.eot_token is not None:
            raise RecipeError("--eot-token needs --eot append or prepend", hint="drop one of the two")
        if self.split and self.val_sources:
            raise RecipeError(
                "--split and --val-source exclude each other", hint="validation is a share or a source, not both"
            )
        if self.split == "nanogpt":
            self._check_nanogpt()

    def _check_nanogpt(self) -> None:
        """Refuse what nanoGPT's own split cannot go with: it is drawn from the number of all documents."""
        if self.max_tokens is not None:
            raise RecipeError("--split nanogpt needs all documents, --max-tokens cuts them", hint="drop one of the two")
        if self.eot != "append":
            raise RecipeError("--split nanogpt ends every document with an end of text", hint="use --eot append")
        if self.documents.startswith("separator:"):
            raise RecipeError(
                "--split nanogpt keeps empty documents, and separated texts end with one that is none",
                hint="use parquet, JSON lines, Arrow files, lines or files",
            )

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, train first."""
        if self.val_sources or self.split == "nanogpt":
            return ("train", "val")
        return ("train", *sorted(self.split))

    def identity(self) -> dict[str, Any]:
        """Whatever changes the bytes of the dataset, but for the sources and the tokenizer's content."""
        whole = {name: value for name, value in dataclasses.asdict(self).items() if name not in _NOT_IN_IDENTITY}
        if self.filter is not None:
            whole["filter"] = {"name": self.filter, "code": code_digest(self.filter)}
        if self.sample is None and self.split in ({}, "nanogpt"):
            whole["seed"] = 0  # nothing is drawn: any seed gives the same bytes
        return whole


# Where documents come from, as callers may give it.
Sources = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def make_recipe(fields: Mapping[str, Any], *, config: str | os.PathLike[str] | None = None) -> Recipe:
    """A recipe from the fields that were given, on top of a YAML file if there is one."""
    given = _read_fields(fields)
    if config is None:
        return _make(given)
    from tokenmill.recipe_file import read_recipe_file  # PyYAML takes its time to load

    name = arguments.place("config", config)
    told = read_recipe_file(config)
    with _at(name):
        told = _read_fields(told)
    with _at(f"with {name}"):
        return _make({**told, **given})


def parse_split(split: object) -> dict[str, float] | Literal["nanogpt"]:
    """`val=0.0005,test=1%`, a list of such, or a mapping, as a mapping; nanoGPT's own split is known by its name."""
    if split in ("nanogpt", ["nanogpt"], ("nanogpt",)):
        return "nanogpt"
    pairs = split.items() if isinstance(split, Mapping) else _split_pairs(split)
    shares: dict[str, float] = {}
    for name, share in pairs:
        is_name = isinstance(name, str) and name.isascii() and name.isidentifier()
        if not is_name or name == "train" or name.lower() in _FOLDERS:
            raise RecipeError(f"{name!r} cannot name a split", hint=_SPLIT_HINT)
        if len(name) > _MAX_SPLIT_CHARS:
            said = f"the name of a split has {len(name)} characters, and {_MAX_SPLIT_CHARS} at most"
            raise RecipeError(f"{said}: {name}", hint="give it a shorter name")
        if name in shares:
            raise RecipeError(f"{name!r} stands twice", hint=_SPLIT_HINT)
        if twins := [other for other in ("train", *shares) if other.lower() == name.lower()]:
            raise RecipeError(
                f"the splits {twins[0]!r} and {name!r} differ in case alone",
                hint="rename one of them: they would be the same folder on many disks",
            )
        with _at(name):
            shares[name] = parse_fraction(share)
    if len(shares) > _MAX_SPLITS:
        raise RecipeError(
            f"{len(shares)} splits beside train are more than {_MAX_SPLITS}",
            hint="hold out fewer, or prepare more datasets",
        )
    if sum(shares.values()) >= 1:
        raise RecipeError("the shares leave nothing for train", hint="they must sum to less than 1")
    return shares


def _split_pairs(split: object) -> Iterator[tuple[str, str]]:
    texts = split if isinstance(split, list | tuple) else [split]
    for text in texts:
        for part in text.split(",") if isinstance(text, str) else [""]:
            name, equals, share = part.partition("=")
            if not equals:
                raise RecipeError(f"{text!r} is not a split", hint=_SPLIT_HINT)
            yield name.strip(), share.strip()


def _parse_documents(documents: object) -> object:
    is_separator = str(documents).startswith("separator:") and documents != "separator:"
    if documents not in ("lines", "files") and not is_separator:
        raise RecipeError(f"{documents!r} is not known", hint="use lines, files or separator:TEXT")
    return documents


def _parse_template(template: object) -> object:
    if isinstance(template, str):
        template_columns(template)
    return template


def _parse_sources(sources: object) -> object:
    is_many = isinstance(sources, Iterable) and not isinstance(sources, str | os.PathLike | Mapping)
    given: Iterable[object] = sources if is_many else (sources,)  # type: ignore[assignment]  # is_many says it
    return [os.fspath(source) if isinstance(source, os.PathLike) else source for source in given]


# Fields that people write in more than one way, or that not every text is good for, and what reads them.
_AS_WRITTEN: dict[str, Callable[[Any], Any]] = {
    "sources": _parse_sources,
    "val_sources": _parse_sources,
    "template": _parse_template,
    "documents": _parse_documents,
    "split": parse_split,
    "unit_bytes": parse_size,
    "max_tokens": partial(parse_size, of="tokens"),
    "max_document_bytes": parse_size,
    "sample": parse_fraction,
}


# Kinds of fields that are whole numbers, and read as they are.
_WHOLE = (get_type_hints(Recipe, include_extras=True)["seed"],)


def _make(fields: dict[str, Any]) -> Recipe:
    if "sources" not in fields:
        raise RecipeError("no sources are given", hint="name files, folders, globs or URLs")
    return Recipe(**fields)


def _read_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Every field that has a value, checked by itself."""
    kinds = get_type_hints(Recipe, include_extras=True)
    found = {}
    for name, value in fields.items():
        if name not in kinds:
            raise _unknown(name, list(kinds))
        if value is not None and not (isinstance(value, tuple | list) and not value):
            with _at(name):
                found[name] = _read_field(name, kinds[name], value)
    return found


def _read_field(name: str, kind: Any, value: Any) -> Any:
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    hints = [f"use one of {', '.join(choices)}"] if choices else []
    if isinstance(value, bool):
        hints.append("YAML takes a bare yes, no, on or off for true or false: put it in quotes")
        raise RecipeError(f"{str(value).lower()} makes no sense here", hint="; ".join(hints))
    parse = _AS_WRITTEN.get(name)
    if kind in _WHOLE and not isinstance(value, int | str):
        if (number := arguments.as_int(value)) is None:
            raise RecipeError(f"{arguments.show(value)} is not a whole number", hint="write it like 0 or 42")
        value = number
    try:
        if choices and value not in choices:
            raise RecipeError(f"{value!r} is not known", hint=hints[0])
        if isinstance(value, str) and parse is not _parse_sources:  # paths may have other bytes in them
            _check_text(value)
        return msgspec.convert(parse(value) if parse else value, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:  # Python refuses to show integers of thousands of digits
        what = str(error).partition(" - at ")[0]
        raise RecipeError(what, hint="see tokenmill prepare --help; in YAML, put a text in quotes") from None


def _check_text(text: str) -> None:
    """Refuse what no record can hold. A shell passes on any bytes, and a YAML file may name any character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RecipeError(f"{text!r} is no valid UTF-8", hint="write it in UTF-8") from None


def _unknown(name: str, known: list[str]) -> RecipeError:
    import difflib

    plain = name.strip().lower().replace("-", "_")
    if plain in NOT_IN_A_RECIPE:
        option = f"--{plain.replace('_', '-')}"
        return RecipeError(f"{name}: it is no part of a recipe", hint=f"give it on the command line: {option}")
    close = "".join(f"did you mean {one}? " for one in difflib.get_close_matches(plain, known, 1))
    return RecipeError(f"{name}: there is no such field", hint=f"{close}fields of a recipe: {', '.join(known)}")


@contextlib.contextmanager
def _at(place: str) -> Iterator[None]:
    """Errors say where they are."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{place}: {error.message}", hint=error.hint) from None
