"""The recipe: everything that decides the bytes of a dataset, parsed and validated.

    keywords or options  |
    YAML file            |->  fields, each checked alone      ->  Recipe, checked as a whole  ->  identity

A recipe decides the bytes of a dataset. How fast, where and with how many workers it is built is not part of it.
`identity()` is what a dataset's fingerprint covers.

A template builds a text from columns: `"{title}\\n\\n{body}"`, with plain names in braces. A filter is a function
of the user, named `module:function`. It is called with the text of a document, and returns whether to keep it. Its
other parameters are names of columns: it gets their values of the row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import os
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from tokenmill import arguments, records
from tokenmill.arguments import MAX_INT
from tokenmill.errors import RecipeError, hint_for, is_failure
from tokenmill.sizes import parse_fraction, parse_size

DEFAULT_MAX_DOCUMENT_BYTES = 64_000_000
# The values of `documents` with which the rows of tables, and the lines of texts, are documents.
BY_ROW = ("auto", "lines")
_NOT_IN_IDENTITY = ("sources", "val_sources", "tokenizer", "eot_token", "on_bad")
# How a build runs and what it prints. Users put these into recipes by mistake.
NOT_IN_A_RECIPE = (
    "output", "workers", "scratch", "config", "restart", "update", "layout", "executor", "ray_address", "placement",
    "only_layout", "part", "hosts", "ssh_key", "env_setup", "wait", "json", "quiet", "verbose", "no_progress",
    "no_report",
)  # fmt: skip
# The limits of a manifest, and of the number of a split in the provenance of a document.
_MAX_SPLIT_CHARS = 64
_MAX_SPLITS = 127
# Folders of a dataset that are not splits.
_FOLDERS = ("provenance",)
_OF_DOCUMENTS = "documents:"
_SPLIT_HINT = "write it like val=0.0005, or val=1%,test=2%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Sources, text, tokenizer, split and sizes of a dataset. `make_recipe` checks the types."""

    sources: tuple[str, ...]
    val_sources: tuple[str, ...] = ()
    tokenizer: str = "gpt2"
    text_column: str | None = None
    template: str | None = None
    documents: str = "auto"
    eot: Literal["append", "prepend", "none"] = "append"
    eot_token: str | None = None
    split: dict[str, float] | Literal["nanogpt"] = field(default_factory=dict)
    unit_bytes: int | None = None
    max_tokens: int | None = None
    sample: float | str | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, lt=MAX_INT)] = 0
    min_chars: Annotated[int, msgspec.Meta(ge=0, lt=MAX_INT)] = 0
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES
    filter: str | None = None
    on_bad: Literal["quarantine", "fail"] = "quarantine"

    def __post_init__(self) -> None:
        """Refuse fields that exclude each other."""
        if self.text_column is not None and self.template is not None:
            raise RecipeError("`text_column` and `template` exclude each other", hint="a template can name one column")
        if self.eot == "none" and self.eot_token is not None:
            raise RecipeError("`eot_token` needs `eot='append'` or `eot='prepend'`", hint="drop one of the two")
        if self.split and self.val_sources:
            raise RecipeError(
                "`split` and `val_sources` exclude each other", hint="validation is a share or a source, not both"
            )
        if self.split == "nanogpt":
            self._check_nanogpt()

    def _check_nanogpt(self) -> None:
        """Refuse what excludes nanoGPT's own split, which depends on the number of all documents."""
        if self.max_tokens is not None:
            raise RecipeError(
                "`split='nanogpt'` needs all documents, `max_tokens` cuts them", hint="drop one of the two"
            )
        if self.document_sample is not None:
            raise RecipeError(
                "`split='nanogpt'` needs all documents, and `sample` leaves some out", hint="drop one of the two"
            )
        if self.eot != "append":
            raise RecipeError("`split='nanogpt'` ends every document with an end of text", hint="use `eot='append'`")
        if self.documents.startswith("separator:"):
            raise RecipeError(
                "`split='nanogpt'` keeps empty documents, and separated texts end with one that is not a document",
                hint="use parquet, JSON lines, Arrow files, lines or files",
            )

    @property
    def unit_sample(self) -> float | None:
        """The share of the units that is sampled; None if it is not units."""
        return self.sample if isinstance(self.sample, float) else None

    @property
    def document_sample(self) -> float | None:
        """The share of the documents that is sampled; None if it is not documents."""
        return float(self.sample.removeprefix(_OF_DOCUMENTS)) if isinstance(self.sample, str) else None

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, train first."""
        if self.val_sources or self.split == "nanogpt":
            return ("train", "val")
        return ("train", *sorted(self.split))

    def identity(self) -> dict[str, Any]:
        """Everything that changes the bytes of the dataset, except the sources and the tokenizer's content."""
        whole = {name: value for name, value in dataclasses.asdict(self).items() if name not in _NOT_IN_IDENTITY}
        if self.documents == "auto":  # which files are whole documents, their sources say
            whole["documents"] = "lines"
        if self.filter is not None:
            whole["filter"] = {"name": self.filter, "code": code_digest(self.filter)}
        if self.sample is None and self.split in ({}, "nanogpt"):
            whole["seed"] = 0  # nothing is random: every seed gives the same bytes
        return whole


def make_recipe(fields: Mapping[str, Any], *, config: str | os.PathLike[str] | None = None) -> Recipe:
    """A recipe from the fields that were given, on top of a YAML file if there is one."""
    given = _read_fields(fields)
    if config is None:
        return _make(given)

    name = arguments.place("config", config)
    written = read_recipe_file(config)
    with _at(name):
        written = _read_fields(written)
    with _at(f"with {name}"):
        return _make({**written, **given})


def parse_split(split: object) -> dict[str, float] | Literal["nanogpt"]:
    """`val=0.0005,test=1%`, a list of such texts, or a mapping, as a mapping; or the name of nanoGPT's own split."""
    if split in ("nanogpt", ["nanogpt"], ("nanogpt",)):
        return "nanogpt"
    pairs = split.items() if isinstance(split, Mapping) else _split_pairs(split)
    shares: dict[str, float] = {}
    for name, share in pairs:
        is_name = isinstance(name, str) and name.isascii() and name.isidentifier()
        if not is_name or name == "train" or name.lower() in _FOLDERS:
            raise RecipeError(f"{name!r} cannot name a split", hint=_SPLIT_HINT)
        if len(name) > _MAX_SPLIT_CHARS:
            said = f"the name of a split has {len(name)} characters, more than {_MAX_SPLIT_CHARS}"
            raise RecipeError(f"{said}: {name}", hint="give it a shorter name")
        if name in shares:
            raise RecipeError(f"{name!r} is given twice", hint=_SPLIT_HINT)
        if twins := [other for other in ("train", *shares) if other.lower() == name.lower()]:
            raise RecipeError(
                f"the splits {twins[0]!r} and {name!r} differ only in case",
                hint="rename one of them: they would be the same folder on many disks",
            )
        with _at(name):
            shares[name] = parse_fraction(share)
    if len(shares) > _MAX_SPLITS:
        raise RecipeError(
            f"{len(shares)} splits besides train are more than {_MAX_SPLITS}",
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
    if documents not in (*BY_ROW, "files") and not is_separator:
        raise RecipeError(f"{documents!r} is not known", hint="use auto, lines, files or separator:TEXT")
    return documents


def _parse_sample(sample: object) -> float | str:
    """A share of the units; or `documents:1%`, of the documents."""
    if isinstance(sample, str) and sample.startswith(_OF_DOCUMENTS):
        return f"{_OF_DOCUMENTS}{parse_fraction(sample.removeprefix(_OF_DOCUMENTS))!r}"
    return parse_fraction(sample)  # type: ignore[arg-type]  # it refuses what is not a share


def _parse_template(template: object) -> object:
    if isinstance(template, str):
        template_columns(template)
    return template


def _parse_sources(sources: object) -> object:
    is_many = isinstance(sources, Iterable) and not isinstance(sources, str | os.PathLike | Mapping)
    given: Iterable[object] = sources if is_many else (sources,)  # type: ignore[assignment]  # is_many says it
    return [_parse_source(source) for source in given]


def _parse_source(source: object) -> object:
    """A path, a pattern, a URL or a name on the hub. The caller refuses anything that is not text."""
    return arguments.place("a source", source) if isinstance(source, str | os.PathLike) else source


def _parse_filter(given: object) -> object:
    """The name of a filter. A function is found again by its name, in other processes too."""
    if not callable(given):
        return given
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", "")
    if module == "__main__" or getattr(sys.modules.get(str(module)), name, None) is not given:
        where = "is in the script itself" if module == "__main__" else "is not at the top of a module"
        raise RecipeError(f"the function {name or given!r} {where}, so workers cannot import it", hint=_FILTER_HINT)
    return f"{module}:{name}"


# Parsers of the fields that can be written in several ways, or that accept only some texts.
_AS_WRITTEN: dict[str, Callable[[Any], Any]] = {
    "sources": _parse_sources,
    "filter": _parse_filter,
    "val_sources": _parse_sources,
    "template": _parse_template,
    "documents": _parse_documents,
    "split": parse_split,
    "unit_bytes": parse_size,
    "max_tokens": partial(parse_size, of="tokens"),
    "max_document_bytes": parse_size,
    "sample": _parse_sample,
}


# The types of fields that are plain whole numbers.
_WHOLE = (get_type_hints(Recipe, include_extras=True)["seed"],)


def _make(fields: dict[str, Any]) -> Recipe:
    if "sources" not in fields:
        raise RecipeError("no sources are given", hint="name files, folders, globs or URLs")
    return Recipe(**fields)


def _read_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Every field that has a value, checked alone."""
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
        hints.append("YAML reads a bare yes, no, on or off as true or false: put it in quotes")
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
        raise RecipeError(what, hint="see the help of `tokenmill.prepare`; in YAML, put a text in quotes") from None


def _check_text(text: str) -> None:
    """Refuse what cannot be written as JSON. A shell passes on any bytes, and YAML may name any character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RecipeError(f"{text!r} is not valid UTF-8", hint="write it in UTF-8") from None


def _unknown(name: str, known: list[str]) -> RecipeError:
    import difflib

    plain = name.strip().lower().replace("-", "_")
    if plain in NOT_IN_A_RECIPE:
        hint = f"leave it out of the recipe; it is a separate option: `{plain}`"
        return RecipeError(f"{name}: it is not part of a recipe", hint=hint)
    close = "".join(f"did you mean {one}? " for one in difflib.get_close_matches(plain, known, 1))
    return RecipeError(f"{name}: unknown option", hint=f"{close}fields of a recipe: {', '.join(known)}")


@contextlib.contextmanager
def _at(place: str) -> Iterator[None]:
    """Put the place before the message of an error."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{place}: {error.message}", hint=error.hint) from None


_FILE_HINT = "a recipe is a YAML mapping, with lines like `tokenizer: gpt2`"


class _Loader(yaml.SafeLoader):
    """Plain values only, and no duplicate keys: YAML forbids them, and PyYAML would take the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    where = f"{self.name}, line {key.start_mark.line + 1}"
                    raise RecipeError(f"{where}: {key.value!r} is given twice", hint="keep one of the two")
                seen.add(key.value)
        return node


def read_recipe_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a recipe file, as they are written there."""
    name = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            fields = _Loader(file).get_single_data()
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe file {name}", hint="`config` takes the path of a YAML file") from None
    except (
        OSError,
        ValueError,
        RecursionError,
        yaml.YAMLError,
    ) as error:  # dates raise ValueError
        hint = hint_for(error, _FILE_HINT) if isinstance(error, OSError) else _FILE_HINT
        raise RecipeError(f"cannot read the recipe {name}: {_cause(error)}", hint=hint) from None
    if not isinstance(fields, dict):
        raise RecipeError(f"{name} is not a YAML mapping", hint=_FILE_HINT)
    if odd := [type(key).__name__ for key in fields if not isinstance(key, str)]:
        raise RecipeError(f"{name}: the name of a field must be a text, not {odd[0]}", hint=_FILE_HINT)
    return fields


def _cause(error: Exception) -> str:
    """What is wrong, and in which line if that is known."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


_TEMPLATE_HINT = 'write it like "{title}\\n\\n{body}"'


def template_columns(template: str) -> list[str]:
    """The columns that a template names, in order."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise RecipeError(f"{template!r}: {error}", hint=_TEMPLATE_HINT) from None
    fields = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
    plain = all(
        name and not spec and conversion is None and not set(name) & set(".[]") for name, spec, conversion in fields
    )
    if not fields or not plain:
        raise RecipeError(f"{template!r} must have plain column names in its braces", hint=_TEMPLATE_HINT)
    return [name for name, _, _ in fields]


def fill(template: str, values: dict[str, object]) -> str:
    """The template with the columns' values in place of their names."""
    return "".join(
        literal + (_as_text(values[name]) if name is not None else "")
        for literal, name, _, _ in string.Formatter().parse(template)
    )


def _as_text(value: object) -> str:
    """A text or a number as it is, anything else as JSON: what other tools do."""
    if isinstance(value, bool | list | tuple | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


_FILTER_HINT = (
    "put the function in a module, and write it like `filter='mymodule:keep'`; PYTHONPATH=DIR finds modules that are "
    "in the folder DIR"
)


def load_filter(name: str) -> Callable[..., object]:
    """The function that `module:function` names."""
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise RecipeError(f"`filter={name!r}` does not name a function", hint=_FILTER_HINT)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"`filter={name!r}`: {error}", hint=_FILTER_HINT) from None
    except BaseException as error:  # a module is code, and may raise anything
        if not is_failure(error):
            raise
        said = f"`filter={name!r}`: {module_name} cannot be imported: {type(error).__name__}: {error}"
        raise RecipeError(said, hint="fix the module") from None
    if not callable(function):
        raise RecipeError(f"`filter={name!r}` is not a function", hint=_FILTER_HINT)
    return function  # type: ignore[no-any-return]  # getattr has no signature


def columns_of_filter(function: Callable[..., object]) -> list[str]:
    """The columns that a filter asks for: its parameters behind the text, except those with a default value."""
    try:
        _, *others = inspect.signature(function, follow_wrapped=False).parameters.values()
    except ValueError:  # it has no parameters, or is written in C
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in others if one.kind in named and one.default is inspect.Parameter.empty]


def gives_reasons(function: Callable[..., object]) -> bool:
    """Whether a text that a filter returns is the reason to drop a document: if it is annotated `-> bool | str`."""
    try:
        returned = get_type_hints(function).get("return")
    except Exception:  # an annotation may name anything
        return False
    return returned is str or str in get_args(returned)


def code_digest(name: str) -> str:
    """A digest of the module of a filter: other code may keep other documents."""
    function = load_filter(name)
    try:
        return records.digest(inspect.getsource(inspect.getmodule(function) or function))
    except (OSError, TypeError):
        return "no source"


def check_filter(made_with: object, named: str | None, *, where: str) -> None:
    """Refuse to build units of a dataset again without its filter, or after the code of the filter has changed."""
    before = made_with if isinstance(made_with, dict) else {"name": None}
    name = before.get("name")
    if name != named:
        raise RecipeError(
            f"{where} was made with {f'the filter {name}' if name else 'no filter'}, and {named or 'none'} is named",
            hint=f"add `filter={name!r}`, if you trust that function" if name else "drop `filter`",
        )
    if named is not None and before.get("code") != code_digest(named):
        raise RecipeError(
            f"the code of the filter {named} has changed since {where} was made",
            hint="restore its module as it was then, or prepare the dataset again",
        )
