"""The shape of a layout: a module with a few names in it.

    SUMMARY                  one line for people
    OPTIONS                  which options of `Options` it takes
    NEEDS                    what the tokens must have: "eot" (documents with an end of text), "uint16"
    WIDTHS                   bytes that a token takes here if the dataset has it in two, and in four
    DOCUMENT_BYTES           bytes that a document takes beside its tokens, about
    check(options, outline)  refuse options that do not fit a dataset, which need not have been built yet
    plan(source, options)    what to write: parts, each with the files that belong together, and notes
    open(path, hints)        files of the layout as a dataset with splits, for import

A part is the atom of work and of resume: it is written by one thread, in pieces of bounded size, and done when its
receipt stands. `check` comes before `plan`, and both before anything is written. What `check` refuses is refused before
a build that is to be exported as well; so `plan` refuses only what the documents themselves do not allow.

The layouts by name. A module is loaded when its layout is asked for, not before.

The tokens of a split as a layout wants them: with the end of text first or last, cut where it may be cut.

    append    d d E  d d d E  d E        every document ends with it
    prepend   E d d  E d d d  E d        the same tokens, one place later: a document is as long as before

So one form is made from the other without a look at documents.

Token files of others, listed: which there are by split, whether some are missing, how large they are.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
from tokenmill.dataset.dataset import BLOCK_TOKENS, Dataset, Starts, TokenSplit
from tokenmill.dataset.manifest import is_name
from tokenmill.errors import DatasetError, RecipeError, hint_for
from tokenmill.sizes import counted, parse_size
from tokenmill.storage import memory_maps
from tokenmill.storage.memory_maps import map_file, open_plain
from tokenmill.storage.output import Digest, Output


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What the caller knows of files that do not tell it themselves."""

    layout: str | None = None
    dtype: str | None = None
    eot_id: int | None = None

    def stored_dtype(self, *, default: str | None = None, where: str) -> str:
        """The dtype as ours are named: ids have no sign to lose, so uint32 is read as int32."""
        if self.dtype is None and default is None:
            raise DatasetError(f"{where} does not tell its dtype", hint="give dtype: uint16 or uint32")
        try:
            return {"uint16": "uint16", "uint32": "int32", "int32": "int32"}[self.dtype or default or ""]
        except KeyError:
            raise RecipeError(f"dtype {self.dtype!r} is not known", hint="use uint16, int32 or uint32") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """Tokens in a file: from which byte on, and how many."""

    path: str
    offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """What was found in files of another layout. `inner` are the ends of documents inside each file, if stored."""

    layout: str
    dtype: str
    eot: str
    eot_id: int | None
    files: Mapping[str, Sequence[TokenFile]]
    inner: Mapping[str, Sequence[Any]] | None = None
    unit: int = 1


def map_token_file(file: TokenFile, dtype: str) -> Tokens:
    """The tokens of a file, mapped."""
    kind = numpy_dtype(dtype)
    try:
        if os.path.getsize(file.path) < file.offset + file.num_tokens * kind.itemsize:
            raise DatasetError(f"{file.path} has become shorter", hint="is it still being written?")
        return memory_maps.map_file(file.path, kind, offset=file.offset, count=file.num_tokens)
    except OSError as error:
        raise DatasetError(
            f"{file.path} cannot be read: {error.strerror}", hint=hint_for(error, "check the path")
        ) from None


GPT2_EOT = 50256


NPY_MAGIC = b"\x93NUMPY"


DTYPE_HINT = "is it whole? else give dtype: uint16 or uint32"


def fitting_dtype(size: int, table: npt.NDArray[np.int64] | None) -> str | None:
    """The dtype of which so many bytes are as many tokens as the table has."""
    count = int(table[-1]) if table is not None else 0
    return {2 * count: "uint16", 4 * count: "int32"}.get(size) if count else None


def eot_policy(
    files: dict[str, list[TokenFile]], dtype: str, eot_id: int | None, inner: dict[str, list[Any]], unit: int
) -> str:
    """Where the end of text stands in the first document of each split, if all agree."""
    if eot_id is None:
        return "none"
    seen = set()
    for split, parts in files.items():
        end = int(inner[split][0][0]) // unit if len(inner[split][0]) else parts[0].num_tokens
        document = map_token_file(parts[0], dtype)[:end]
        seen.add("append" if document[-1] == eot_id else "prepend" if document[0] == eot_id else "none")
    return seen.pop() if len(seen) == 1 else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """A finished export. `already_complete` means that all files stood, and hashed to what they should."""

    output: str
    layout: str
    files: dict[str, Digest]
    notes: tuple[str, ...]
    already_complete: bool
    seconds: float

    @property
    def num_bytes(self) -> int:
        return sum(digest.bytes for digest in self.files.values())


Facts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be asked of an export. A layout takes some of them; sizes are in tokens."""

    name: str | None = None
    shard_size: int | None = None
    seq_len: int | None = None
    order: str | None = None
    seed: int | None = None
    templar_compat: bool | None = None

    def given(self) -> dict[str, Any]:
        """Options that were set."""
        pairs = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in pairs.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What a dataset is like, before or after it is built. It has `most_tokens` at most; None if that is not known."""

    dtype: str
    eot: str
    splits: frozenset[str]
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReceipt:
    """A part that is done: its files with their digests, and what the part said of itself."""

    fingerprint: str
    part: str
    files: dict[str, Digest]
    facts: dict[str, Any]


class Files(Protocol):
    """Where a part puts its files; they appear under their names when the part is done."""

    def create(self, name: str) -> Output: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPart:
    """Files that belong together. `num_bytes` is about how many; `write` gives facts for its receipt.

    What is made of receipts in the end relies on `files` and `facts` in them: one without is of no use.
    """

    name: str
    num_bytes: int
    write: Callable[[Files], Facts]
    files: tuple[str, ...] = ()
    facts: Mapping[str, type[int] | type[str]] = field(default_factory=dict)

    def is_served_by(self, receipt: PartReceipt) -> bool:
        """Whether a receipt says all that is needed of it."""
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
    """The check of a layout that takes any dataset with any of its options."""


def no_more_files(_: Sequence[PartReceipt]) -> Mapping[str, bytes]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What an export writes: its parts, then small files that sum them up. `notes` say what is not kept."""

    parts: tuple[OutputPart, ...]
    notes: tuple[str, ...] = ()
    finish: Callable[[Sequence[PartReceipt]], Mapping[str, bytes]] = no_more_files


class Format(Protocol):
    """A layout module."""

    SUMMARY: str
    OPTIONS: frozenset[str]
    NEEDS: frozenset[str]
    WIDTHS: tuple[int, int]
    DOCUMENT_BYTES: int

    def check(self, options: Options, outline: Outline) -> None: ...
    def write(self, source: Dataset, options: Options) -> Export: ...
    def read(self, path: str, hints: Hints) -> Dataset: ...


def filled_splits(source: Dataset) -> dict[str, TokenSplit]:
    """The splits that have tokens: no reader can map an empty file."""
    return {name: source[name] for name in source.splits if source[name].num_tokens}


def outline_of(source: Dataset) -> Outline:
    """The outline of a dataset that is there, with the splits that have tokens."""
    splits = filled_splits(source)
    return Outline(
        dtype=source.manifest.dtype,
        eot=source.manifest.identity.get("eot", "none"),
        splits=frozenset(splits),
        most_tokens=sum(split.num_tokens for split in splits.values()),
    )


def require_train_and_val(outline: Outline, *, layout: str) -> None:
    """Refuse other splits for a layout that has none."""
    if others := sorted(outline.splits - {"train", "val"}):
        raise RecipeError(f"{layout} has no place for the split {others[0]!r}", hint="it has train and val alone")


def require_shard_size(options: Options, *, most: int, layout: str, why: str) -> None:
    """Refuse a shard size that the layout's readers cannot seek in."""
    if options.shard_size is not None and options.shard_size > most:
        size = f"{options.shard_size:,}"
        raise RecipeError(f"{layout} cannot have shards of {size} tokens: {why}", hint=f"use at most {most:,}")


def require_rows(options: Options, outline: Outline, *, layout: str) -> None:
    """Refuse packed rows that no end of text would separate, and those that are longer than all of the text."""
    if options.seq_len is None:
        return
    if outline.eot == "none":
        raise RecipeError(
            f"packed rows of {layout} tell documents by an end of text, and the documents have none",
            hint="drop --seq-len for a row a document, or prepare the dataset with --eot append",
        )
    require_sample(options.seq_len, outline, what="row")


def require_sample(seq_len: int, outline: Outline, *, what: str = "sample") -> None:
    if outline.most_tokens is not None and outline.most_tokens < seq_len:
        raise RecipeError(
            f"there are at most {outline.most_tokens:,} tokens, which fill no {what} of {seq_len:,}",
            hint="use a smaller --seq-len",
        )


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
SIZES = ("shard_size", "seq_len")
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_NAME_HINT = "use letters, digits, dots, dashes and underscores"
_SEED_HINT = "use a whole number from 0 on, below 2^62"
MAX_FILES = 1_000_000


def load_format(name: str) -> Format:
    """The module of a layout."""
    if name not in FORMATS:
        raise RecipeError(f"there is no layout {name!r}", hint=f"there are {', '.join(FORMATS)}")
    return cast("Format", importlib.import_module(f"tokenmill.formats.{name}"))


def check_options(name: str, options: Options) -> Options:
    """Refuse what a layout would ignore."""
    takes = load_format(name).OPTIONS
    if unknown := sorted(options.given().keys() - takes):
        flags = ", ".join(f"--{option.replace('_', '-')}" for option in unknown)
        known = ", ".join(f"--{option.replace('_', '-')}" for option in sorted(takes)) or "none"
        raise RecipeError(f"{flags} does not apply to {name}", hint=f"options of {name}: {known}")
    if options.name is not None and not is_name(options.name):
        raise RecipeError(f"name: {options.name!r} cannot begin the name of a file", hint=_NAME_HINT)
    if options.order not in (None, "source", "shuffled"):
        raise RecipeError(f"order: {options.order!r} is not known", hint="use source or shuffled")
    if options.seed is not None and not 0 <= options.seed < 1 << 62:
        raise RecipeError(f"seed: {options.seed} is out of range", hint=_SEED_HINT)
    return options


def check_num_files(name: str, options: Options, num_tokens: Iterable[int]) -> None:
    """Refuse a shard size that makes too many files of splits with so many tokens."""
    size, splits = options.shard_size, tuple(num_tokens)
    if size is not None and (count := sum(-(-split // size) for split in splits)) > MAX_FILES:
        raise RecipeError(
            f"{name} with a shard size of {counted(size, 'token')} has about {count:,} files, more than {MAX_FILES:,}",
            hint=f"give a shard size of {sum(splits) // MAX_FILES + 1:,} tokens or more; 100M are 100 million",
        )


def format_bytes_of(name: str, dtype: str, num_tokens: int, num_documents: int) -> int:
    """About how many bytes so many tokens and documents of a dataset have in a layout, at most."""
    layout = load_format(name)
    return layout.WIDTHS[dtype != "uint16"] * num_tokens + layout.DOCUMENT_BYTES * num_documents


def check_outline(name: str, options: Options, outline: Outline, *, vocab_size: int, where: str) -> None:
    """Refuse what an export would refuse of a dataset of which only this is known, be it because there is none yet."""
    check_needs(name, dtype=outline.dtype, vocab_size=vocab_size, eot=outline.eot, where=where)
    load_format(name).check(options, outline)


def check_needs(name: str, *, dtype: str, vocab_size: int, eot: str, where: str) -> None:
    """Refuse tokens that a layout cannot hold."""
    needs = load_format(name).NEEDS
    if "uint16" in needs and dtype != "uint16":
        wide = ", ".join(one for one in FORMATS if "uint16" not in load_format(one).NEEDS)
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


def parse_format(text: str) -> tuple[str, Options]:
    """`templar:seq_len=2048,shard_size=1Gi` as a layout and its options."""
    name, _, rest = text.partition(":")
    load_format(name)
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
        return parse_size(text, of="tokens", name=f"layout: {option}")
    if option == "templar_compat":
        if text.lower() not in _FLAGS:
            raise RecipeError(f"layout: templar_compat: {text!r} is neither yes nor no", hint="write yes or no")
        return _FLAGS[text.lower()]
    if option == "seed":
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise RecipeError(f"layout: seed: {text!r} is not a seed", hint=_SEED_HINT)
        return int(text)
    return text


_LOOK = 1 << 16


@dataclass(frozen=True, slots=True)
class TokenStream:
    """A split's tokens with the end of text where `eot` says; "" leaves it where it is."""

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
        turn = {("append", "prepend"): -1, ("prepend", "append"): 1}.get(
            (self.split.eot, self.eot or self.split.eot), 0
        )
        end: Any = np.array([self.split.eot_id or 0], numpy_dtype(self.split.dtype))
        begin, last = start + turn, stop + turn
        if begin < 0 and start < stop:
            yield end
        yield from self.split.blocks(max(begin, 0), min(last, self.num_tokens))
        if last > self.num_tokens and start < stop:
            yield end

    def data(self, start: int, stop: int) -> Iterator[memoryview]:
        """The same as bytes."""
        for tokens in self.blocks(start, stop):
            yield tokens.data.cast("B")


def cut_anywhere(num_tokens: int, size: int) -> list[tuple[int, int]]:
    """Ranges of exactly `size` tokens, but for the last."""
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def cut_at_documents(split: TokenSplit, size: int) -> list[tuple[int, int]]:
    """Ranges of whole documents: each ends with the first document that reaches the next multiple of `size`."""
    split.document_ends(0, 1)  # does anybody know where documents end?
    cuts = [0]
    for multiple in range(size, split.num_tokens, size):
        if multiple > cuts[-1]:
            cuts.append(_first_end(split, multiple))
    if cuts[-1] < split.num_tokens:
        cuts.append(split.num_tokens)
    return list(itertools.pairwise(cuts))


def document_lengths(split: TokenSplit, start: int, stop: int) -> Starts:
    """Tokens of the documents that fill a range."""
    return np.diff(split.document_ends(start, stop), prepend=start)


def lengths_by_block(split: TokenSplit, start: int, stop: int, *, block_tokens: int = BLOCK_TOKENS) -> Iterator[Starts]:
    """The same, some at a time: an index of any size takes little memory."""
    before = start
    for at in range(start, stop, block_tokens):
        ends = split.document_ends(at, min(at + block_tokens, stop))
        if len(ends):
            yield np.diff(ends, prepend=before)
            before = int(ends[-1])


def _first_end(split: TokenSplit, at: int) -> int:
    """The first end of a document that is not before a token."""
    look = _LOOK
    while True:
        found = split.document_ends(at - 1, min(at - 1 + look, split.num_tokens))
        if len(found):
            return int(found[0])
        if at - 1 + look >= split.num_tokens:
            return split.num_tokens
        look *= 4


def groups_by_name(paths: Sequence[str]) -> dict[str, list[str]]:
    """Files by split, as their names tell it: `val` in a name is validation, `test` a test, all else is training."""
    groups: dict[str, list[str]] = {}
    for path in sorted(paths):
        parts = re.split(r"[_.-]", os.path.basename(path))
        groups.setdefault(next((part for part in parts if part in ("val", "test")), "train"), []).append(path)
    return groups


def files_by_folder(path: str, ending: str, beside: str) -> dict[str, list[str]]:
    """A file, the files of a folder, or those of the folders in it, which are splits then.

    `beside` is how the file ends that says where the documents of another are.
    """
    if os.path.isfile(path):
        return {"train": [path]} if path.endswith(ending) else {}
    folders = {"train": path}
    if not any(name.endswith(ending) for name in names_in(path)):
        folders = {name: f"{path}/{name}" for name in names_in(path) if name.isidentifier()}
    found = {}
    for split, folder in folders.items():
        inside = [f"{folder}/{name}" for name in names_in(folder) if name.endswith(ending)]
        if inside or any(name.endswith(beside) for name in names_in(folder)):
            found[split] = inside
    if any(found.values()):
        for split in found:
            check_pairs(folders[split], beside, ending)
    return {split: inside for split, inside in found.items() if inside}


def check_pairs(folder: str, ending: str, other: str) -> None:
    """Refuse a file whose other half is missing: its tokens would be left out without a word."""
    names = set(names_in(folder))
    for name in sorted(names):
        if name.endswith(ending) and (missing := f"{name.removesuffix(ending)}{other}") not in names:
            raise DatasetError(f"{folder} has {name} without {missing}", hint="is a file missing? else move it away")


def check_numbers(paths: Sequence[str]) -> None:
    """Refuse to close a gap between numbered files: a document may go on from one to the next."""
    numbers = [int(found[-1]) for path in paths if (found := re.findall(r"\d+", os.path.basename(path)))]
    for before, number, path in zip(numbers, numbers[1:], paths[1:], strict=False):
        if number != before + 1:
            raise DatasetError(f"{path} comes after number {before}", hint="is a file missing between them?")


def names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if isinstance(error, PermissionError):
            raise DatasetError(f"{folder} cannot be read: {error.strerror}", hint=hint_for(error, "")) from None
        return []


def size_of(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read: {error.strerror}", hint=hint_for(error, "is a file missing?")
        ) from None


def head_of(path: str, size: int) -> bytes:
    try:
        with open(path, "rb", opener=open_plain) as file:
            return file.read(size)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}", hint=hint_for(error, "check the path")) from None


def mapped(path: str, kind: str, offset: int = 0, count: int | None = None) -> npt.NDArray[Any]:
    try:
        return map_file(path, kind, offset=offset, count=count)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be mapped: {error}", hint="is it whole?") from None
