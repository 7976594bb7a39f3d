"""The protocol of formats, and what they share. Options call a format a layout: `--to`, `--layout`, `layout=`.

Each format is one module of this package, named in `FORMATS` and loaded only when it is used:

    TRAITS                   its options, and what it needs of a dataset                     all formats
    detect(path, hints)      its files, to be opened in place: memory-mapped, not copied     formats of `IN_PLACE`
    read(path, hints)        its files as a dataset with splits, for import                  all other formats
    check(options, outline)  refuse options that do not fit a dataset, built or not yet      all formats
    write(source, options)   an `Export`: the parts to write, and notes for the user         all formats

A part is the unit of work and of resume: one thread writes it, in blocks of bounded size, and it is complete when its
receipt exists. `check` refuses what the format cannot hold before anything is written, and before a build that is to be
exported; so `write` refuses only what the documents themselves do not allow.

Exports and imports read splits through `TokenStream`, which moves the end of text where a format wants it:

    append    d d E  d d d E  d E        every document ends with it
    prepend   E d d  E d d d  E d        the same tokens one position later: documents keep their length
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, cast

import numpy as np

from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
from tokenmill.dataset.dataset import BLOCK_TOKENS, Dataset, Starts, TokenSplit
from tokenmill.dataset.manifest import is_name
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats.results import FileCheck
from tokenmill.sizes import counted, parse_size
from tokenmill.storage.output import Digest, Output

_MAX_DIGITS = 19  # of a whole number of 64 bits
FORMATS = (
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
# Those that are opened in place, in the order of detection: each has something that the ones after it do not have.
IN_PLACE = ("megatron", "llmc", "templar", "datatrove", "olmo", "nanogpt")
# Options that are numbers of tokens.
SIZES = ("shard_size", "seq_len")
MAX_FILES = 1_000_000

GPT2_EOT = 50256
_FEW_TOKENS = 1024  # of a sample, if it is not given
_FIRST_SEARCH_TOKENS = 1 << 16
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_NAME_HINT = "use letters, digits, dots, dashes and underscores"
_SEED_HINT = "use a whole number, 0 or more, below 2^62"

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatTraits:
    """What a format accepts, needs and takes.

    options          the fields of `Options` that it accepts
    needs            what the tokens must have: "eot" (an end of text after every document), "uint16"
    bytes_per_token  in its files, for tokens that the dataset stores in two bytes and in four
    document_bytes   about how many bytes a document takes besides its tokens
    equal_shards     whether all shards but the last have the same size
    has_columns      whether the tokens are a column of a table, which may have any name
    """

    options: Set[str]
    needs: Set[str] = frozenset()
    bytes_per_token: tuple[int, int] = (2, 4)
    document_bytes: int = 0
    equal_shards: bool = False
    has_columns: bool = False


class Format(Protocol):
    """A module of this package."""

    TRAITS: FormatTraits

    def check(self, options: Options, outline: Outline) -> None:
        """Refuse options that do not fit a dataset, which may not be built yet."""

    def write(self, source: Dataset, options: Options) -> Export:
        """What to write for a dataset."""


class ReadableFormat(Format, Protocol):
    """A format whose files have to be decoded."""

    def read(self, path: str, hints: Hints) -> Dataset:
        """Files of the format as a dataset with splits."""


class InPlaceFormat(Format, Protocol):
    """A format whose files are opened as they are."""

    def detect(self, path: str, hints: Hints) -> DetectedFiles | None:
        """The files of a path: a file, a prefix or a folder. None if it has nothing of this format.

        Files that are of this format and damaged are a `DatasetError`.
        """


class CheckedFormat(Format, Protocol):
    """A format with files whose checksums users know in advance: by name, the file of each."""

    EXPECTED_FILES: Mapping[str, str]

    def read_expected(self, given: Sequence[str], checksums: str | os.PathLike[str] | None) -> dict[str, Expected]:
        """Checksums from the command line and from a file, by name."""

    def check_files(
        self, files: Mapping[str, Digest], expected: Mapping[str, Expected], dtype: str, *, options: Options
    ) -> tuple[FileCheck, ...]:
        """Compare the files with what is expected. Raises `DatasetError` with all of them if one differs."""


def load_format(name: str) -> Format:
    """The module of a format."""
    if name not in FORMATS:
        raise RecipeError(f"there is no layout {name!r}", hint=f"there are {', '.join(FORMATS)}")
    return cast("Format", importlib.import_module(f"tokenmill.formats.{name}"))


def load_readable_format(name: str) -> ReadableFormat:
    """The module of a format whose files have to be decoded."""
    return cast("ReadableFormat", load_format(name))


def load_in_place_format(name: str) -> InPlaceFormat:
    """The module of a format that is opened in place."""
    if name not in IN_PLACE:
        hint = f"read in place: {', '.join(IN_PLACE)}"
        raise RecipeError(f"files of layout {name!r} are not read in place", hint=hint)
    return cast("InPlaceFormat", load_format(name))


def load_checked_format(name: str) -> CheckedFormat:
    """The module of a format whose files can be compared with known checksums."""
    found = load_format(name)
    if not hasattr(found, "check_files"):
        raise RecipeError(f"{name} has no files with known checksums", hint="drop the expected checksums")
    return cast("CheckedFormat", found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What the caller knows about files that do not record it."""

    layout: str | None = None
    dtype: str | None = None
    eot_id: int | None = None
    column: str | None = None

    def stored_dtype(self, *, default: str | None = None, where: str) -> str:
        """The dtype by its name here. uint32 is read as int32, since ids are below 2^31."""
        if self.dtype is None and default is None:
            raise DatasetError(f"{where} does not record its dtype", hint="give `dtype`: uint16 or uint32")
        try:
            return {"uint16": "uint16", "uint32": "int32", "int32": "int32"}[self.dtype or default or ""]
        except KeyError:
            raise RecipeError(f"unknown dtype {self.dtype!r}", hint="use uint16, int32 or uint32") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A file of tokens: the byte at which they begin, and how many there are."""

    path: str
    offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedFiles:
    """Files of a format, by split, to be opened in place.

    `inner_ends` are the ends of documents inside each file, if the format stores them. They count in units, of which
    a token has `units_per_token`: 1 for tokens, or the bytes of a token.
    """

    layout: str
    dtype: str
    eot: str
    eot_id: int | None
    files: Mapping[str, Sequence[TokenFile]]
    inner_ends: Mapping[str, Sequence[Any]] | None = None
    units_per_token: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a file must hash to. `elements` are its tokens or ids; -1 accepts any number."""

    sha256: str
    elements: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of an export. A format accepts some of them; sizes are in tokens."""

    name: str | None = None
    shard_size: int | None = None
    seq_len: int | None = None
    order: str | None = None
    seed: int | None = None
    templar_compat: bool | None = None
    consolidated: bool | None = None

    def given(self) -> dict[str, Any]:
        """The options that are set."""
        pairs = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in pairs.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is known about a dataset, built or not yet. It has at most `most_tokens`; None if that is unknown."""

    dtype: str
    eot: str
    splits: frozenset[str]
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReceipt:
    """The record of a complete part: its files with their digests, and the facts that `write` returned."""

    fingerprint: str
    part: str
    files: dict[str, Digest]
    facts: dict[str, Any]


class Files(Protocol):
    """Where a part creates its files. They appear under their names when the part is complete."""

    def create(self, name: str) -> Output: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPart:
    """Files that are written together. `num_bytes` is an estimate; `write` returns facts for the receipt.

    The files that summarize the parts rely on `files` and `facts` in the receipts: a receipt without them is not used.
    """

    name: str
    num_bytes: int
    write: Callable[[Files], Facts]
    files: tuple[str, ...] = ()
    facts: Mapping[str, type[int] | type[str]] = field(default_factory=dict)

    def is_served_by(self, receipt: PartReceipt) -> bool:
        """Whether a receipt has the files and facts that are needed."""
        return all(name in receipt.files for name in self.files) and all(
            type(receipt.facts.get(name)) is kind for name, kind in self.facts.items()
        )


def file_part(name: str, num_bytes: int, blocks: Callable[[], Iterable[bytes | memoryview]]) -> OutputPart:
    """A part of a single file."""

    def write(files: Files) -> Facts:
        output = files.create(name)
        for block in blocks():
            output.write(block)
        return {}

    return OutputPart(name=name, num_bytes=num_bytes, write=write)


def check_nothing(_: Options, __: Outline) -> None:
    """The check of a format that accepts every dataset with all of its options."""


def no_more_files(_: Sequence[PartReceipt]) -> Mapping[str, bytes]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What an export writes: parts, then small files that summarize them. `notes` say what is not preserved."""

    parts: tuple[OutputPart, ...]
    notes: tuple[str, ...] = ()
    finish: Callable[[Sequence[PartReceipt]], Mapping[str, bytes]] = no_more_files


def parse_format(text: str) -> tuple[str, Options]:
    """`templar:seq_len=2048,shard_size=1Gi` as the name of a format and its options."""
    name, _, rest = text.partition(":")
    load_format(name)
    given: dict[str, object] = {}
    for pair in filter(None, rest.split(",")):
        option, equals, value = pair.partition("=")
        option = option.strip().replace("-", "_")
        if not equals or option not in Options.__dataclass_fields__ or option in given:
            raise RecipeError(f"{text!r} is not a layout", hint="write it like templar:seq_len=2048,shard_size=1Gi")
        given[option] = _parse_option(option, value.strip())
    return name, check_options(name, Options(**given))  # type: ignore[arg-type]  # _parse_option checks each


def _parse_option(option: str, text: str) -> object:
    if option in SIZES:
        return parse_size(text, of="tokens", name=f"layout: {option}")
    if option in ("templar_compat", "consolidated"):
        if text.lower() not in _FLAGS:
            raise RecipeError(f"layout: {option}: {text!r} is neither yes nor no", hint="write yes or no")
        return _FLAGS[text.lower()]
    if option == "seed":
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
            raise RecipeError(f"layout: seed: {text!r} is not a seed", hint=_SEED_HINT)
        return int(text)
    return text


def check_options(name: str, options: Options) -> Options:
    """Refuse options that a format would ignore, and values that none has."""
    accepted = load_format(name).TRAITS.options | {"order", "seed"}
    if unknown := sorted(options.given().keys() - accepted):
        refused = ", ".join(f"`{option}`" for option in unknown)
        known = ", ".join(f"`{option}`" for option in sorted(accepted)) or "none"
        raise RecipeError(f"{refused} does not apply to {name}", hint=f"options of {name}: {known}")
    if options.name is not None and not is_name(options.name):
        raise RecipeError(f"`name`: {options.name!r} cannot begin the name of a file", hint=_NAME_HINT)
    if options.order not in (None, "source", "shuffled"):
        raise RecipeError(f"`order={options.order!r}` is unknown", hint="use source or shuffled")
    if options.seed is not None and options.order != "shuffled":
        raise RecipeError("`seed` needs `order='shuffled'`", hint="add it, or drop `seed`")
    if options.seed is not None and not 0 <= options.seed < 1 << 62:
        raise RecipeError(f"`seed={options.seed}` is out of range", hint=_SEED_HINT)
    return options


def check_num_files(name: str, options: Options, num_tokens: Iterable[int]) -> None:
    """Refuse a shard size that gives too many files for splits of these sizes."""
    size, splits = options.shard_size, tuple(num_tokens)
    if size is not None and (count := sum(-(-split // size) for split in splits)) > MAX_FILES:
        raise RecipeError(
            f"{name} with a shard size of {counted(size, 'token')} has about {count:,} files, more than {MAX_FILES:,}",
            hint=f"give a shard size of {sum(splits) // MAX_FILES + 1:,} tokens or more; 100M are 100 million",
        )


def check_outline(name: str, options: Options, outline: Outline, *, vocab_size: int, where: str) -> None:
    """Refuse what an export would refuse of such a dataset, which may not be built yet."""
    check_needs(name, dtype=outline.dtype, vocab_size=vocab_size, eot=outline.eot, where=where)
    load_format(name).check(options, outline)


def check_needs(name: str, *, dtype: str, vocab_size: int, eot: str, where: str) -> None:
    """Refuse tokens that a format cannot hold."""
    needs = load_format(name).TRAITS.needs
    if "uint16" in needs and dtype != "uint16":
        wide = ", ".join(one for one in FORMATS if "uint16" not in load_format(one).TRAITS.needs)
        size = f" of {vocab_size:,}" if vocab_size else ""
        raise RecipeError(
            f"{name} stores tokens as uint16, and the vocabulary{size} does not fit",
            hint=f"layouts with 32-bit tokens: {wide}",
        )
    if "eot" in needs and eot == "none":
        raise RecipeError(
            f"{name} separates documents by an end of text, and the documents of {where} have none",
            hint="prepare the dataset with `eot='append'`",
        )


def format_bytes_of(name: str, dtype: str, num_tokens: int, num_documents: int, options: Options | None = None) -> int:
    """An upper estimate of the size of this many tokens and documents of a dataset in a format."""
    traits = load_format(name).TRAITS
    if options is not None and options.consolidated:  # the tokens once, and eight bytes for a sample
        return numpy_dtype(dtype).itemsize * num_tokens + 8 * num_tokens // (options.seq_len or _FEW_TOKENS)
    return traits.bytes_per_token[dtype != "uint16"] * num_tokens + traits.document_bytes * num_documents


def filled_splits(source: Dataset) -> dict[str, TokenSplit]:
    """The splits that have tokens. An empty file cannot be mapped."""
    return {name: source[name] for name in source.splits if source[name].num_tokens}


def outline_of(source: Dataset) -> Outline:
    """The outline of a dataset that is built, with the splits that have tokens."""
    splits = filled_splits(source)
    return Outline(
        dtype=source.manifest.dtype,
        eot=source.manifest.identity.get("eot", "none"),
        splits=frozenset(splits),
        most_tokens=sum(split.num_tokens for split in splits.values()),
    )


def require_train_and_val(outline: Outline, *, layout: str) -> None:
    """Refuse other splits, for a format without them."""
    if others := sorted(outline.splits - {"train", "val"}):
        raise RecipeError(f"{layout} has no split {others[0]!r}", hint="it only has train and val")


def require_shard_size(options: Options, *, most: int, layout: str, why: str) -> None:
    """Refuse a shard size that readers of the format cannot seek in."""
    if options.shard_size is not None and options.shard_size > most:
        size = f"{options.shard_size:,}"
        raise RecipeError(f"{layout} cannot have shards of {size} tokens: {why}", hint=f"use at most {most:,}")


def require_rows(options: Options, outline: Outline, *, layout: str) -> None:
    """Refuse packed rows of documents without an end of text, and rows that are longer than the whole text."""
    if options.seq_len is None:
        return
    if outline.eot == "none":
        raise RecipeError(
            f"packed rows of {layout} need an end of text after every document, and the documents have none",
            hint="drop `seq_len` to write a document in a row, or prepare the dataset with `eot='append'`",
        )
    require_sample(options.seq_len, outline, lack="do not fill a row")


def require_sample(seq_len: int, outline: Outline, *, lack: str = "make no sample") -> None:
    """Refuse samples that are longer than the whole text."""
    if outline.most_tokens is not None and outline.most_tokens < seq_len:
        raise RecipeError(
            f"there are at most {outline.most_tokens:,} tokens, which {lack} of {seq_len:,}",
            hint="use a smaller `seq_len`",
        )


@dataclass(frozen=True, slots=True)
class TokenStream:
    """A split's tokens with the end of text at the end that `eot` says; "" leaves it where it is."""

    split: TokenSplit
    eot: str = ""

    @property
    def num_tokens(self) -> int:
        return self.split.num_tokens

    @property
    def itemsize(self) -> int:
        return numpy_dtype(self.split.dtype).itemsize

    def blocks(self, start: int, stop: int) -> Iterator[Tokens]:
        """Tokens [start, stop), mapped block by block."""
        shift = {("append", "prepend"): -1, ("prepend", "append"): 1}.get(
            (self.split.eot, self.eot or self.split.eot), 0
        )
        eot: Any = np.array([self.split.eot_id or 0], numpy_dtype(self.split.dtype))
        first, last = start + shift, stop + shift
        if first < 0 and start < stop:
            yield eot
        yield from self.split.blocks(max(first, 0), min(last, self.num_tokens))
        if last > self.num_tokens and start < stop:
            yield eot

    def data(self, start: int, stop: int) -> Iterator[memoryview]:
        """The same as bytes."""
        for tokens in self.blocks(start, stop):
            yield tokens.data.cast("B")


def cut_anywhere(num_tokens: int, size: int) -> list[tuple[int, int]]:
    """Ranges of exactly `size` tokens, except the last."""
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def cut_at_documents(split: TokenSplit, size: int) -> list[tuple[int, int]]:
    """Ranges of whole documents: each ends with the first document that reaches the next multiple of `size`."""
    split.document_ends(0, 1)  # raises if document ends are unknown
    cuts = [0]
    for multiple in range(size, split.num_tokens, size):
        if multiple > cuts[-1]:
            cuts.append(_first_end(split, multiple))
    if cuts[-1] < split.num_tokens:
        cuts.append(split.num_tokens)
    return list(itertools.pairwise(cuts))


def document_lengths(split: TokenSplit, start: int, stop: int) -> Starts:
    """Tokens of the documents in a range that they fill."""
    return np.diff(split.document_ends(start, stop), prepend=start)


def lengths_by_block(split: TokenSplit, start: int, stop: int, *, block_tokens: int = BLOCK_TOKENS) -> Iterator[Starts]:
    """The same, in blocks: an index of any size takes little memory."""
    before = start
    for at in range(start, stop, block_tokens):
        ends = split.document_ends(at, min(at + block_tokens, stop))
        if len(ends):
            yield np.diff(ends, prepend=before)
            before = int(ends[-1])


def _first_end(split: TokenSplit, at: int) -> int:
    """The first end of a document at a token or behind it."""
    search_tokens = _FIRST_SEARCH_TOKENS
    while True:
        found = split.document_ends(at - 1, min(at - 1 + search_tokens, split.num_tokens))
        if len(found):
            return int(found[0])
        if at - 1 + search_tokens >= split.num_tokens:
            return split.num_tokens
        search_tokens *= 4
