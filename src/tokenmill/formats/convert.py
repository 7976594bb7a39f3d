"""export: a dataset's tokens as the files of a layout.

import: the files of a layout as a dataset.

    files -> splits -> ranges of whole documents -> shards, each with its receipt -> manifest

The end of text comes to stand last in every document, whatever the layout does. Where documents end is read from the
layout, or told by the end-of-text id; it is never guessed.

The fingerprint of documents and tokens, whatever layout they stand in and whatever dtype they have.

    splits, in order of name -> ranges of whole documents, of about 2^27 tokens each
    a range -> SHA-256 over its tokens as 32-bit numbers, the end of text last, then its documents' lengths

It is the fingerprint of an imported dataset, so that the same documents have the same one from wherever they
were imported, and the loader gives them in the same order. A prepared dataset has another, that of its recipe.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tokenmill import arguments, records
from tokenmill.dataset import manifest as manifests
from tokenmill.dataset.bin_idx import MAX_DOCUMENT_TOKENS, ShardWriter, Tokens, dtype_for, index_bytes, numpy_dtype
from tokenmill.dataset.dataset import Dataset, Starts, TokenSplit
from tokenmill.dataset.manifest import Manifest, Shard, Split
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats.base import (
    SIZES,
    ExportResult,
    Facts,
    Files,
    Hints,
    Options,
    OutputPart,
    PartReceipt,
    TokenStream,
    check_num_files,
    check_options,
    check_outline,
    cut_at_documents,
    document_lengths,
    filled_splits,
    load_format,
    outline_of,
)
from tokenmill.formats.open import InPlaceDataset
from tokenmill.formats.open import open as open_dataset
from tokenmill.formats.resumable import Watcher, check_free, make_request, start_over, transfer
from tokenmill.formats.rows import StoredDataset
from tokenmill.formats.templar import Expected, compare
from tokenmill.resources import resolve_workers
from tokenmill.sizes import parse_size
from tokenmill.storage.base import local_folder
from tokenmill.storage.output import Digest

RECORD = ".build/export.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """What an export is, written last: where its tokens came from, and what every file must hash to."""

    layout: str
    options: dict[str, Any]
    dataset: str
    notes: tuple[str, ...]
    files: dict[str, Digest]


def export(
    dataset: str | os.PathLike[str] | Dataset,
    output: str | os.PathLike[str],
    *,
    to: str,
    workers: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    restart: bool = False,
    watch: Watcher | None = None,
    expected: Mapping[str, Expected] | None = None,
    **options: Any,
) -> ExportResult:
    """Write a dataset as the files of the layout `to`. Called again, it goes on where it stopped.

    `dataset` may also be token files of another layout. `options` are those of the layout: `shard_size` (tokens),
    `seq_len`, `order`, `seed`, `name`, ... `expected` are checksums that Templar's files must have.
    """
    begin = time.monotonic()
    arguments.text("to", to, hint="name a layout, like nanogpt")
    arguments.function_or_none("watch", watch)
    restart, folder = arguments.flag("restart", restart), local_folder(output, name="output")
    source = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
    layout, wanted = load_format(to), check_options(to, _options(options))
    manifest = source.manifest
    outline = outline_of(source)
    check_outline(to, wanted, outline, vocab_size=manifest.tokenizer["vocab_size"], where=source.path)
    if expected and (to != "templar" or "train" not in source.splits):
        raise RecipeError(f"{to} has no tokens.bin to compare", hint="checksums are expected of templar's alone")
    check_num_files(to, wanted, (source[name].num_tokens for name in source.splits))
    planned = layout.write(source, wanted)
    if not planned.parts:
        raise RecipeError(f"{source.path} has no tokens to export", hint="check the dataset")
    request = make_request(layout=to, options=wanted.given(), dataset=manifest.fingerprint, **source.pins())
    if restart:
        start_over(folder, watch)
    check_free(folder, request, what="export")
    if watch is not None:
        for note in planned.notes:
            watch({"kind": "note", "message": note})
    done = transfer(
        folder,
        request,
        planned.parts,
        planned.finish,
        threads=resolve_workers(workers),
        scratch=None if scratch is None else local_folder(scratch, name="scratch").path,
        watch=watch,
    )
    record = ExportRecord(
        layout=to,
        options=wanted.given(),
        dataset=manifest.fingerprint,
        notes=planned.notes,
        files=done.files,
    )
    sealed = records.seal(record)
    stood = folder.exists(RECORD) and folder.read(RECORD) == sealed
    folder.write(RECORD, sealed)
    compare(done.files, expected or {}, manifest.dtype)
    return ExportResult(
        output=folder.path,
        layout=to,
        files=done.files,
        notes=planned.notes,
        already_complete=stood and done.num_kept == len(planned.parts),
        seconds=time.monotonic() - begin,
    )


def _options(given: dict[str, Any]) -> Options:
    known = Options.__dataclass_fields__
    if unknown := sorted(given.keys() - known.keys()):
        raise RecipeError(f"there is no option {unknown[0]!r}", hint=f"there are {', '.join(known)}")
    wanted = {name: value for name, value in given.items() if value is not None}
    readers: dict[str, Callable[[Any], Any]] = {name: partial(parse_size, name=name, of="tokens") for name in SIZES}
    readers |= {name: partial(arguments.text, name) for name in ("name", "order")}
    readers |= {"seed": partial(arguments.whole, "seed"), "templar_compat": partial(arguments.flag, "templar_compat")}
    return Options(**{name: readers[name](value) for name, value in wanted.items()})


_FACTS: dict[str, type[int] | type[str]] = {
    **dict.fromkeys(("tokens", "documents", "eots", "ended", "max_id"), int),
    "content": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """A dataset that was imported. `notes` say what was found and what could not be kept."""

    output: str
    layout: str
    manifest: Manifest
    notes: tuple[str, ...]
    already_complete: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """What the shards of an import share."""

    dtype: str
    vocab_size: int
    eot_id: int | None
    tokenizer: dict[str, Any]
    tokenizer_file: bytes | None


def import_(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    layout: str,
    tokenizer: str | None = None,
    eot_id: int | None = None,
    dtype: str | None = None,
    workers: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    restart: bool = False,
    watch: Watcher | None = None,
) -> ImportResult:
    """Make a dataset of the files of a layout. Called again, it goes on where it stopped.

    `tokenizer` names the one that made the tokens, so that they can be decoded; it also tells the end of text, which
    `eot_id` tells otherwise where the files do not.
    """
    begin = time.monotonic()
    arguments.text("layout", layout, hint="name a layout, like nanogpt")
    arguments.text_or_none("tokenizer", tokenizer)
    arguments.text_or_none("dtype", dtype)
    arguments.function_or_none("watch", watch)
    restart, eot_id = arguments.flag("restart", restart), arguments.whole_or_none("eot_id", eot_id)
    folder = local_folder(output, name="output")
    target = _target(tokenizer, eot_id)
    source = load_format(layout).read(local_folder(path).path, Hints(layout=layout, dtype=dtype, eot_id=target.eot_id))
    target = _settled(target, source)
    splits = filled_splits(source)
    for name in splits:
        manifests.check_split_name(name, where=source.path)
    manifests.check_case(splits, where=source.path)
    parts = tuple(
        _part(f"{name}/{number:05d}", split, bounds, target)
        for name, split in splits.items()
        for number, bounds in enumerate(cut_at_documents(split, RANGE_TOKENS))
    )
    if not parts:
        raise RecipeError(f"{source.path} has no tokens to import", hint="check the path")
    request = make_request(
        layout=layout,
        source=source.manifest.fingerprint,
        **source.pins(),
        dtype=target.dtype,
        eot_id=target.eot_id,
        tokenizer=target.tokenizer["fingerprint"],
    )
    if restart:
        start_over(folder, watch)
    check_free(folder, request, what="import")
    notes = list(_notes(source, target))
    if watch is not None:
        for note in notes:
            watch({"kind": "note", "message": note})
    manifest: list[Manifest] = []

    def finish(receipts: Sequence[PartReceipt]) -> Mapping[str, bytes]:
        manifest.append(_manifest(source, target, receipts, notes))
        files = {} if target.tokenizer_file is None else {target.tokenizer["file"]: target.tokenizer_file}
        return {**files, manifests.MANIFEST: manifests.seal_manifest(manifest[0])}

    stood = folder.exists(manifests.MANIFEST)
    done = transfer(
        folder,
        request,
        parts,
        finish,
        threads=resolve_workers(workers),
        scratch=None if scratch is None else local_folder(scratch, name="scratch").path,
        watch=watch,
    )
    return ImportResult(
        output=folder.path,
        layout=layout,
        manifest=manifest[0],
        notes=tuple(notes),
        already_complete=stood and done.num_kept == len(parts),
        seconds=time.monotonic() - begin,
    )


def _target(tokenizer: str | None, eot_id: int | None) -> _Target:
    """What is known of the tokens before the files are looked at."""
    if tokenizer is None:
        return _Target(
            dtype="",
            vocab_size=0,
            eot_id=eot_id,
            tokenizer={**manifests.UNKNOWN_TOKENIZER, "eot_id": eot_id},
            tokenizer_file=None,
        )
    from tokenmill.tokenizers.spec import resolve

    spec = resolve(tokenizer)
    if spec.kind == "char":
        raise RecipeError("char has no vocabulary before its texts are read", hint="leave the tokenizer out")
    found = spec.eot_id if eot_id is None else eot_id
    return _Target(
        dtype=dtype_for(spec.vocab_size),
        vocab_size=spec.vocab_size,
        eot_id=found,
        tokenizer={**spec.describe(), "eot_id": found},
        tokenizer_file=spec.content if spec.file_name else None,
    )


def _settled(target: _Target, source: Dataset) -> _Target:
    """The same with what the files told: an end of text, and a dtype where no tokenizer decides it."""
    eot_id = source.manifest.tokenizer["eot_id"] if target.eot_id is None else target.eot_id
    dtype = target.dtype or source.manifest.dtype
    return _Target(
        dtype=dtype,
        vocab_size=target.vocab_size or 1 << (16 if dtype == "uint16" else 31),
        eot_id=eot_id,
        tokenizer={**target.tokenizer, "eot_id": eot_id},
        tokenizer_file=target.tokenizer_file,
    )


def _part(name: str, split: TokenSplit, bounds: tuple[int, int], target: _Target) -> OutputPart:
    start, stop = bounds
    size = (stop - start) * numpy_dtype(target.dtype).itemsize

    def write(files: Files) -> Facts:
        lengths = document_lengths(split, start, stop)
        if (lengths < 0).any() or int(lengths.sum()) != stop - start:
            raise DatasetError(f"{name}: its documents do not lie end to end", hint="is the index of the files whole?")
        lengths = lengths[lengths > 0]
        if int(lengths.max()) > MAX_DOCUMENT_TOKENS:
            raise DatasetError(f"{name}: a document has 2^31 tokens or more", hint="is the end-of-text id right?")
        ends = np.cumsum(lengths) + start
        writer = ShardWriter(files.create, name, target.dtype)
        writer.expect(lengths.astype(np.int32))
        content = ContentHash()
        at, num_eots, num_ended, largest = start, 0, 0, 0
        for tokens in TokenStream(split, "append" if split.eot != "none" else "").blocks(start, stop):
            largest = max(largest, max_id(tokens))
            _check_range(largest, target, where=f"{name} of {split.dtype}, from token {at} on")
            content.add(tokens)
            if target.eot_id is not None:
                num_eots += int(np.count_nonzero(tokens == target.eot_id))
                inside = ends[np.searchsorted(ends, at, "right") : np.searchsorted(ends, at + len(tokens), "right")]
                num_ended += int(np.count_nonzero(tokens[inside - 1 - at] == target.eot_id))
            writer.append(tokens.astype(numpy_dtype(target.dtype), copy=False).data.cast("B"))
            at += len(tokens)
        if split.eot == "prepend" and not num_eots == num_ended == len(lengths):
            raise DatasetError(
                f"{name}: the end of text {target.eot_id} does not stand first in every document, and nowhere else",
                hint="import without --eot-id or --tokenizer: then documents are as the layout has them",
            )
        writer.outputs()
        return {
            "tokens": writer.tokens,
            "documents": writer.documents,
            "content": content.digest(lengths),
            "eots": num_eots,
            "ended": num_ended,
            "max_id": largest,
        }

    files = (f"{name}.bin", f"{name}.idx")
    return OutputPart(name=name, num_bytes=size + index_bytes(0), write=write, files=files, facts=_FACTS)


def _check_range(largest: int, target: _Target, *, where: str) -> None:
    if largest >= target.vocab_size:
        raise DatasetError(
            f"{where}: id {largest} is beyond the vocabulary of {target.vocab_size}",
            hint="is it the right tokenizer, and the right dtype?",
        )


def _manifest(source: Dataset, target: _Target, receipts: Sequence[PartReceipt], notes: list[str]) -> Manifest:
    facts = [receipt.facts for receipt in receipts]
    marked = target.eot_id is not None and all(one["eots"] == one["ended"] == one["documents"] for one in facts)
    if target.eot_id is not None and not marked:
        notes.append(f"not every document ends with {target.eot_id}, or some have it inside: only the index tells ends")
    shards: dict[str, list[Shard]] = {}
    contents: dict[str, list[str]] = {}
    for receipt in receipts:
        name, split = receipt.part, receipt.part.partition("/")[0]
        shards.setdefault(split, []).append(
            Shard(
                name=name,
                tokens=receipt.facts["tokens"],
                documents=receipt.facts["documents"],
                bin=receipt.files[f"{name}.bin"],
                idx=receipt.files[f"{name}.idx"],
            )
        )
        contents.setdefault(split, []).append(receipt.facts["content"])
    splits = {
        name: Split(
            tokens=sum(shard.tokens for shard in found),
            documents=sum(shard.documents for shard in found),
            shards=tuple(found),
        )
        for name, found in shards.items()
    }
    known = target.tokenizer["vocab_size"]
    return Manifest(
        format=manifests.FORMAT,
        fingerprint=combine(contents),
        identity={
            "eot": "append" if marked else "none",
            "imported": {"layout": source.manifest.identity.get("layout", ""), "files": _files(source)},
        },
        tokenizer={**target.tokenizer, "vocab_size": known or 1 + max(one["max_id"] for one in facts)},
        parity={},
        dtype=target.dtype,
        splits=splits,
        documents_read=sum(split.documents for split in splits.values()),
        dropped={},
        text_sum="0" * 32,
        sources=(),
        files=_tokenizer_digest(target),
    )


def _tokenizer_digest(target: _Target) -> dict[str, Digest]:
    if target.tokenizer_file is None:
        return {}
    sha = hashlib.sha256(target.tokenizer_file).hexdigest()
    return {target.tokenizer["file"]: Digest(bytes=len(target.tokenizer_file), sha256=sha)}


def _files(source: Dataset) -> dict[str, int]:
    """The files that tokens came from, with how many each has."""
    if isinstance(source, StoredDataset):
        return source.tokens_by_file
    if not isinstance(source, InPlaceDataset):
        return {}
    return {
        f"{split}/{os.path.basename(file.path)}": file.num_tokens
        for split, files in source.found.files.items()
        for file in files
    }


def _notes(source: Dataset, target: _Target) -> list[str]:
    notes = list(source.notes) if isinstance(source, StoredDataset) else []
    if isinstance(source, InPlaceDataset):
        if source.found.inner is None:
            notes.append(
                f"{source.found.layout} does not store where documents end: they are recovered from the end-of-text id "
                f"{target.eot_id}"
            )
        if source.found.eot == "prepend":
            notes.append("the end of text stands first in the files, and last in the dataset")
        notes += _short_shards(source)
    if target.eot_id is None:
        notes.append("no end-of-text id is known, so the dataset has its documents by the index alone")
    return notes


def _short_shards(source: InPlaceDataset) -> list[str]:
    """Shards of llm.c and Templar have one size, but for the last: others that are short may have changed places."""
    if source.found.layout not in ("llmc", "templar"):
        return []
    return [
        f"{file.path} is not the last of its shards, and has only {file.num_tokens} tokens: are they in their order?"
        for files in source.found.files.values()
        for file in files[:-1]
        if file.num_tokens < max(one.num_tokens for one in files)
    ]


FORMAT = 1
RANGE_TOKENS = 1 << 27


class ContentHash:
    """The digest of one range, fed block by block."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, tokens: Tokens) -> None:
        self._sha.update(tokens.astype("<u4", copy=False).data.cast("B"))

    def digest(self, lengths: Starts) -> str:
        self._sha.update(lengths.astype("<i8").data.cast("B"))
        return self._sha.hexdigest()


def combine(splits: Mapping[str, Sequence[str]]) -> str:
    """One fingerprint from the digests of all ranges."""
    return records.digest({"content": FORMAT, "splits": {name: list(found) for name, found in splits.items()}})


def content_fingerprint(dataset: Dataset) -> str:
    """The fingerprint that the dataset's documents and tokens have, read from beginning to end."""
    found: dict[str, list[str]] = {}
    for name in dataset.splits:
        split = dataset[name]
        stream = TokenStream(split, "append" if split.eot != "none" else "")
        for start, stop in cut_at_documents(split, RANGE_TOKENS):
            content = ContentHash()
            for tokens in stream.blocks(start, stop):
                content.add(tokens)
            lengths = document_lengths(split, start, stop)
            found.setdefault(name, []).append(content.digest(lengths[lengths > 0]))
    return combine(found)


def max_id(tokens: Tokens) -> int:
    """The largest id, where a 32-bit number that looks negative is one beyond all vocabularies."""
    return int(tokens.view(np.uint32 if tokens.itemsize == 4 else np.uint16).max())
