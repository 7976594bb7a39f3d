"""The recipe: what the user asks for, validated.

A recipe says which bytes come out; how fast, where and with how many workers is not
part of it. `identity()` is the part that a dataset's fingerprint covers.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tokenmill.errors import RecipeError
from tokenmill.filters import code_digest
from tokenmill.sizes import parse_fraction, parse_size
from tokenmill.template import template_columns

DEFAULT_MAX_DOCUMENT_BYTES = 64_000_000
_NOT_IN_IDENTITY = ("sources", "val_sources", "tokenizer", "eot_token", "on_bad")


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
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    min_chars: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES
    filter: str | None = None
    on_bad: Literal["quarantine", "fail"] = "quarantine"

    def __post_init__(self) -> None:
        """Refuse what makes no sense, by itself or together."""
        self._check_documents()
        self._check_split()
        if self.text_column is not None and self.template is not None:
            raise RecipeError("--text-column and --template exclude each other", hint="a template can name one column")
        if self.template is not None:
            template_columns(self.template)
        if self.eot == "none" and self.eot_token is not None:
            raise RecipeError("--eot-token needs --eot append or prepend", hint="drop one of the two")

    def _check_documents(self) -> None:
        is_separator = self.documents.startswith("separator:") and self.documents != "separator:"
        if self.documents not in ("lines", "files") and not is_separator:
            raise RecipeError(f"--documents {self.documents!r} is not known", hint="use lines, files or separator:TEXT")

    def _check_split(self) -> None:
        if self.split and self.val_sources:
            raise RecipeError(
                "--split and --val-source exclude each other", hint="validation is a share or a source, not both"
            )
        if self.split == "nanogpt":
            self._check_nanogpt()
            return
        for name, share in self.split.items():
            if not (name.isascii() and name.isidentifier()) or name in ("train", "provenance"):
                raise RecipeError(f"{name!r} cannot name a split", hint="write it like --split val=0.0005")
            parse_fraction(share)
        if sum(self.split.values()) >= 1:
            raise RecipeError("the shares of --split leave nothing for train", hint="they must sum to less than 1")

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
        return whole


def make_recipe(fields: Mapping[str, Any], *, config: str | os.PathLike[str] | None = None) -> Recipe:
    """A recipe from the fields that were given, on top of a YAML file if there is one."""
    given = {name: value for name, value in fields.items() if value is not None and value != ()}
    if config is not None:
        given = {**_load_yaml(Path(config)), **given}
    known = [known.name for known in dataclasses.fields(Recipe)]
    if unknown := sorted(given.keys() - set(known)):
        raise RecipeError(f"{unknown[0]}: there is no such field", hint=f"fields of a recipe: {', '.join(known)}")
    if not given.get("sources"):
        raise RecipeError("no sources are given", hint="name files, folders, globs or URLs")
    for name, (kinds, parse) in _AS_WRITTEN.items():
        if isinstance(given.get(name), kinds):
            given[name] = parse(given[name])
    try:
        return msgspec.convert(given, Recipe, strict=False)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        raise RecipeError(f"{place.rstrip('`') or 'recipe'}: {what}", hint="see tokenmill prepare --help") from None


def parse_split(text: str) -> dict[str, float] | Literal["nanogpt"]:
    """`val=0.0005,test=0.001` as a mapping; nanoGPT's own split is known by its name."""
    if text == "nanogpt":
        return "nanogpt"
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, share = part.strip().partition("=")
        if not equals or name in shares:
            raise RecipeError(f"{text!r} is not a split", hint="write it like --split val=0.0005")
        shares[name] = parse_fraction(share)
    return shares


def _load_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # PyYAML lets some of a date's through
        raise RecipeError(f"cannot read the recipe {path}: {error}", hint="a recipe is a YAML mapping") from None
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise RecipeError(f"{path} is not a YAML mapping", hint="write lines like `tokenizer: gpt2`")
    return loaded


# Fields that people write in more than one way, and what reads them.
_AS_WRITTEN: dict[str, tuple[tuple[type, ...], Callable[[Any], Any]]] = {
    "unit_bytes": ((str, int), parse_size),
    "max_tokens": ((str, int), parse_size),
    "max_document_bytes": ((str, int), parse_size),
    "sample": ((str, int, float), parse_fraction),
    "split": ((str,), parse_split),
}
