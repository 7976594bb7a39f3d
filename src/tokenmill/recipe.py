"""The recipe: what the user asks for, validated.

A recipe says which bytes come out; how fast, where and with how many workers is not
part of it. `identity()` is the part that a dataset's fingerprint covers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic

from tokenmill.errors import RecipeError
from tokenmill.filters import code_digest
from tokenmill.sizes import parse_fraction, parse_size
from tokenmill.template import template_columns

DEFAULT_MAX_DOCUMENT_BYTES = 64_000_000


class Recipe(pydantic.BaseModel):
    """Sources, text, tokenizer, split and sizes of a dataset."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    sources: tuple[str, ...] = pydantic.Field(min_length=1)
    val_sources: tuple[str, ...] = ()
    tokenizer: str = "gpt2"
    text_column: str | None = None
    template: str | None = None
    documents: str = "lines"
    eot: Literal["append", "prepend", "none"] = "append"
    eot_token: str | None = None
    split: dict[str, float] | Literal["nanogpt"] = {}
    unit_bytes: int | None = None
    max_tokens: int | None = None
    sample: float | None = None
    seed: int = pydantic.Field(default=0, ge=0, lt=1 << 62)
    min_chars: int = pydantic.Field(default=0, ge=0)
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES
    filter: str | None = None
    on_bad: Literal["quarantine", "fail"] = "quarantine"

    @pydantic.field_validator("unit_bytes", "max_tokens", "max_document_bytes", mode="before")
    @classmethod
    def _sizes(cls, value: Any) -> Any:
        return parse_size(value) if isinstance(value, str | int) else value

    @pydantic.field_validator("sample", mode="before")
    @classmethod
    def _share(cls, value: Any) -> Any:
        return parse_fraction(value) if isinstance(value, str | float | int) else value

    @pydantic.field_validator("split", mode="before")
    @classmethod
    def _parse_split(cls, value: Any) -> Any:
        return parse_split(value) if isinstance(value, str) and value != "nanogpt" else value

    @pydantic.field_validator("split")
    @classmethod
    def _check_split(cls, split: dict[str, float] | Literal["nanogpt"]) -> dict[str, float] | Literal["nanogpt"]:
        if split == "nanogpt":
            return split
        for name, share in split.items():
            if not (name.isascii() and name.isidentifier()) or name in ("train", "provenance"):
                raise RecipeError(f"{name!r} cannot name a split", hint="write it like --split val=0.0005")
            parse_fraction(share)
        if sum(split.values()) >= 1:
            raise RecipeError("the shares of --split leave nothing for train", hint="they must sum to less than 1")
        return split

    @pydantic.field_validator("documents")
    @classmethod
    def _check_documents(cls, documents: str) -> str:
        if documents not in ("lines", "files") and not (
            documents.startswith("separator:") and len(documents) > len("separator:")
        ):
            raise RecipeError(f"--documents {documents!r} is not known", hint="use lines, files or separator:TEXT")
        return documents

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> Recipe:
        if self.text_column is not None and self.template is not None:
            raise RecipeError("--text-column and --template exclude each other", hint="a template can name one column")
        if self.template is not None:
            template_columns(self.template)
        if self.split and self.val_sources:
            raise RecipeError(
                "--split and --val-source exclude each other", hint="validation is a share or a source, not both"
            )
        if self.split == "nanogpt":
            self._check_nanogpt()
        if self.eot == "none" and self.eot_token is not None:
            raise RecipeError("--eot-token needs --eot append or prepend", hint="drop one of the two")
        return self

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
        whole = self.model_dump(exclude={"sources", "val_sources", "tokenizer", "eot_token", "on_bad"})
        if self.filter is not None:
            whole["filter"] = {"name": self.filter, "code": code_digest(self.filter)}
        return whole


def make_recipe(fields: Mapping[str, Any], *, config: str | os.PathLike[str] | None = None) -> Recipe:
    """A recipe from the fields that were given, on top of a YAML file if there is one."""
    given = {name: value for name, value in fields.items() if value is not None and value != ()}
    if config is not None:
        given = {**_load_yaml(Path(config)), **given}
    try:
        return Recipe(**given)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "recipe"
        known = ", ".join(Recipe.model_fields)
        hint = f"fields of a recipe: {known}" if first["type"] == "extra_forbidden" else "see tokenmill prepare --help"
        what = "there is no such field" if first["type"] == "extra_forbidden" else first["msg"]
        raise RecipeError(f"{place}: {what}", hint=hint) from None


def parse_split(text: str) -> dict[str, float]:
    """`val=0.0005,test=0.001` as a mapping."""
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
