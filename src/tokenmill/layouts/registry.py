"""The layouts by name. A module is loaded when its layout is asked for, not before."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import cast

from tokenmill.errors import RecipeError
from tokenmill.layouts.shape import Layout, Options
from tokenmill.sizes import counted, parse_size

LAYOUTS = (
    "catid",
    "datatrove",
    "huggingface",
    "litdata",
    "llmc",
    "mds",
    "megatron",
    "nanogpt",
    "olmo",
    "templar",
)
SIZES = ("shard_size", "seq_len")
MAX_FILES = 1_000_000


def load_layout(name: str) -> Layout:
    """The module of a layout."""
    if name not in LAYOUTS:
        raise RecipeError(f"there is no layout {name!r}", hint=f"there are {', '.join(LAYOUTS)}")
    return cast("Layout", importlib.import_module(f"tokenmill.layouts.{name}"))


def check_options(name: str, options: Options) -> Options:
    """Refuse what a layout would ignore."""
    takes = load_layout(name).OPTIONS
    if unknown := sorted(options.given().keys() - takes):
        flags = ", ".join(f"--{option.replace('_', '-')}" for option in unknown)
        known = ", ".join(f"--{option.replace('_', '-')}" for option in sorted(takes)) or "none"
        raise RecipeError(f"{flags} does not apply to {name}", hint=f"options of {name}: {known}")
    if options.seq_len is not None and options.seq_len < 1:
        raise RecipeError(f"seq_len is {options.seq_len}", hint="give a positive number of tokens")
    if options.order not in (None, "source", "shuffled"):
        raise RecipeError(f"order {options.order!r} is not known", hint="use source or shuffled")
    if options.seed is not None and not 0 <= options.seed < 1 << 62:
        raise RecipeError(f"seed {options.seed} is out of range", hint="use a number from 0 on")
    return options


def check_num_files(name: str, options: Options, num_tokens: Iterable[int]) -> None:
    """Refuse a shard size that makes too many files of splits with so many tokens."""
    size, splits = options.shard_size, tuple(num_tokens)
    if size is not None and (count := sum(-(-split // size) for split in splits)) > MAX_FILES:
        raise RecipeError(
            f"{name} with a shard size of {counted(size, 'token')} has about {count:,} files, more than {MAX_FILES:,}",
            hint=f"give a shard size of {sum(splits) // MAX_FILES + 1:,} tokens or more; 100M are 100 million",
        )


def layout_bytes(name: str, dtype: str, num_tokens: int) -> int:
    """About how many bytes so many tokens of a dataset have in a layout, at most."""
    return load_layout(name).WIDTHS[dtype != "uint16"] * num_tokens


def check_needs(name: str, *, dtype: str, vocab_size: int, eot: str, where: str) -> None:
    """Refuse tokens that a layout cannot hold."""
    needs = load_layout(name).NEEDS
    if "uint16" in needs and dtype != "uint16":
        wide = ", ".join(one for one in LAYOUTS if "uint16" not in load_layout(one).NEEDS)
        size = f" of {vocab_size:,}" if vocab_size else ""
        raise RecipeError(
            f"{name} stores tokens as uint16, and the vocabulary{size} does not fit",
            hint=f"layouts with 32-bit tokens: {wide}",
        )
    if "eot" in needs and eot == "none":
        raise RecipeError(
            f"{name} marks documents by an end of text, and the documents of {where} have none",
            hint="prepare the dataset with --eot append",
        )


def parse_layout(text: str) -> tuple[str, Options]:
    """`templar:seq_len=2048,shard_size=1Gi` as a layout and its options."""
    name, _, rest = text.partition(":")
    load_layout(name)
    given: dict[str, object] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        option = option.strip().replace("-", "_")
        if not equals or option not in Options.__dataclass_fields__ or option in given:
            raise RecipeError(f"{text!r} is not a layout", hint="write it like templar:seq_len=2048,shard_size=1Gi")
        given[option] = _value(option, value.strip())
    return name, check_options(name, Options(**given))  # type: ignore[arg-type]  # each is checked by _value


def _value(option: str, text: str) -> object:
    if option in SIZES:
        return parse_size(text, of="tokens")
    if option == "templar_compat":
        return text not in ("0", "false", "no")
    if option == "seed":
        if not text.isdecimal():
            raise RecipeError(f"seed {text!r} is not a number", hint="use a number from 0 on")
        return int(text)
    return text
