"""Export and import: a dataset as the files of another format, and back.

    export   dataset -> parts of the format, each with its receipt -> files that summarize them
    import   files -> splits -> ranges of whole documents -> shards, each with its receipt -> manifest

An import puts the end of text behind every document, wherever the format has it. Document ends are read from the
format, or found by the end-of-text id; they are never guessed.

An imported dataset has the fingerprint of its documents and tokens, whatever format and dtype they were stored in:

    splits, in order of name -> ranges of whole documents, of about 2^27 tokens each
    a range -> SHA-256 over its tokens as 32-bit numbers, the end of text last, then its document lengths

So the same documents have the same fingerprint, and the loader gives them in the same order, from wherever they were
imported. A prepared dataset has another fingerprint, that of its recipe.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from tokenmill import arguments, records
from tokenmill.arguments import Watcher
from tokenmill.dataset import manifest as manifests
from tokenmill.dataset.bin_idx import MAX_DOCUMENT_TOKENS, ShardWriter, Tokens, dtype_for, index_bytes, numpy_dtype
from tokenmill.dataset.dataset import Dataset, Starts, TokenSplit
from tokenmill.dataset.manifest import Manifest, Shard, Split
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats.base import (
    SIZES,
    Expected,
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
    load_checked_format,
    load_format,
    load_in_place_format,
    outline_of,
)
from tokenmill.formats.open import InPlaceDataset, read_files
from tokenmill.formats.open import open as open_dataset
from tokenmill.formats.results import ExportResult, ImportResult
from tokenmill.formats.resumable import ExportRecord, check_output, make_request, run_conversion, start_over
from tokenmill.formats.rows import RowsDataset
from tokenmill.resources import resolve_workers
from tokenmill.sizes import parse_size
from tokenmill.storage.base import local_folder
from tokenmill.storage.output import Digest

RECORD = manifests.EXPORT_RECORD
# Of the content fingerprint.
FORMAT = 1
RANGE_TOKENS = 1 << 27


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
    shard_size: int | str | None = None,
    seq_len: int | str | None = None,
    name: str | None = None,
    order: Literal["source", "shuffled"] | None = None,
    seed: int | None = None,
    templar_compat: bool | None = None,
    consolidated: bool | None = None,
) -> ExportResult:
    """Write a dataset as the files of the layout `to`. Called again after an interruption, it resumes.

    `dataset` may also be files of another layout. `expected` are known checksums of its files, for layouts that have
    some.

    A layout refuses options that it does not have: `shard_size` and `seq_len` are numbers of tokens, `name` is the
    prefix of file names, `order` and `seed` are those of the documents, and `templar_compat` computes sample ids as
    Templar's own script does. `consolidated` leaves out Templar's shards, whose tokens are in tokens.bin.
    """
    begin = time.monotonic()
    arguments.text("to", to, hint="name a layout, like nanogpt")
    arguments.function_or_none("watch", watch)
    restart, folder = arguments.flag("restart", restart), local_folder(output, name="output")
    source = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
    options = _read_options(
        shard_size=shard_size,
        seq_len=seq_len,
        name=name,
        order=order,
        seed=seed,
        templar_compat=templar_compat,
        consolidated=consolidated,
    )
    layout, wanted = load_format(to), check_options(to, options)
    manifest = source.manifest
    outline = outline_of(source)
    check_outline(to, wanted, outline, vocab_size=manifest.tokenizer["vocab_size"], where=source.path)
    check_num_files(to, wanted, (source[name].num_tokens for name in source.splits))
    # A format with an order of its own shuffles by itself.
    if wanted.order == "shuffled" and "order" not in layout.TRAITS.options:
        from tokenmill.formats.shuffled import ShuffledDataset

        source = ShuffledDataset(source, wanted.seed or 0)
    planned = layout.write(source, wanted)
    if not planned.parts:
        raise RecipeError(f"{source.path} has no tokens to export", hint="check the dataset")
    checked = load_checked_format(to) if expected else None
    for file in expected or {}:
        if checked is not None and checked.EXPECTED_FILES.get(file) not in {part.name for part in planned.parts}:
            raise RecipeError(f"this export has no file {file!r} to compare", hint="drop the expected checksums")
    request = make_request(layout=to, options=wanted.given(), dataset=manifest.fingerprint, **source.pins())
    if restart:
        start_over(folder, watch)
    check_output(folder, request, what="export")
    if watch is not None:
        for note in planned.notes:
            watch({"kind": "note", "message": note})
    done = run_conversion(
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
    was_complete = folder.exists(RECORD) and folder.read(RECORD) == sealed
    folder.write(RECORD, sealed)
    checks = () if checked is None else checked.check_files(done.files, expected or {}, manifest.dtype, options=wanted)
    return ExportResult(
        output=folder.path,
        layout=to,
        files=done.files,
        notes=planned.notes,
        already_complete=was_complete and done.num_kept == len(planned.parts),
        seconds=time.monotonic() - begin,
        checks=checks,
    )


def _read_options(**given: Any) -> Options:
    wanted = {name: value for name, value in given.items() if value is not None}
    readers: dict[str, Callable[[Any], Any]] = {name: partial(parse_size, name=name, of="tokens") for name in SIZES}
    readers |= {name: partial(arguments.text, name) for name in ("name", "order")}
    readers |= {"seed": partial(arguments.whole, "seed")}
    readers |= {name: partial(arguments.flag, name) for name in ("templar_compat", "consolidated")}
    return Options(**{name: readers[name](value) for name, value in wanted.items()})


_FACTS: dict[str, type[int] | type[str]] = {
    **dict.fromkeys(("tokens", "documents", "eots", "ended", "max_id"), int),
    "content": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImportTarget:
    """What all shards of an import have in common."""

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
    column: str | None = None,
    workers: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    restart: bool = False,
    watch: Watcher | None = None,
) -> ImportResult:
    """Make a dataset of the files of a layout. Called again after an interruption, it resumes.

    `tokenizer` names the tokenizer of the tokens, so that they can be decoded. It also determines the end of text;
    otherwise give `eot_id` if the files do not record it. `column` names the column of tokens in a table (`input_ids`).
    """
    begin = time.monotonic()
    arguments.text("layout", layout, hint="name a layout, like nanogpt")
    arguments.text_or_none("tokenizer", tokenizer)
    arguments.text_or_none("dtype", dtype)
    if arguments.name_or_none("column", column) is not None and not load_format(layout).TRAITS.has_columns:
        raise RecipeError(f"`column` does not apply to {layout}", hint="drop it: the tokens are not in a table")
    arguments.function_or_none("watch", watch)
    restart, eot_id = arguments.flag("restart", restart), _check_eot_id(eot_id)
    folder = local_folder(output, name="output")
    target = _target(tokenizer, eot_id)
    source = read_files(local_folder(path).path, layout, Hints(dtype=dtype, eot_id=target.eot_id, column=column))
    target = _complete_target(target, source)
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
        **({} if column is None else {"column": column}),
    )
    if restart:
        start_over(folder, watch)
    check_output(folder, request, what="import")
    notes = list(_notes(source, target))
    if watch is not None:
        for note in notes:
            watch({"kind": "note", "message": note})
    manifest: list[Manifest] = []

    def finish(receipts: Sequence[PartReceipt]) -> Mapping[str, bytes]:
        manifest.append(_manifest(source, target, receipts, notes))
        files = {} if target.tokenizer_file is None else {target.tokenizer["file"]: target.tokenizer_file}
        return {**files, manifests.MANIFEST: manifests.seal_manifest(manifest[0])}

    was_complete = folder.exists(manifests.MANIFEST)
    done = run_conversion(
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
        already_complete=was_complete and done.num_kept == len(parts),
        seconds=time.monotonic() - begin,
    )


def _check_eot_id(eot_id: int | None) -> int | None:
    most = np.iinfo(np.int32).max
    hint = f"give an id of the vocabulary, up to {most}"
    return None if eot_id is None else arguments.whole("eot_id", eot_id, most=int(most), hint=hint)


def _target(tokenizer: str | None, eot_id: int | None) -> _ImportTarget:
    """What is known about the tokens before the files are opened."""
    if tokenizer is None:
        return _ImportTarget(
            dtype="",
            vocab_size=0,
            eot_id=eot_id,
            tokenizer={**manifests.UNKNOWN_TOKENIZER, "eot_id": eot_id},
            tokenizer_file=None,
        )
    from tokenmill.tokenizers.spec import resolve

    spec = resolve(tokenizer)
    if spec.needs_texts:
        raise RecipeError(
            "the char tokenizer has no vocabulary before its texts are read", hint="leave the tokenizer out"
        )
    found = spec.eot_id if eot_id is None else eot_id
    return _ImportTarget(
        dtype=dtype_for(spec.vocab_size),
        vocab_size=spec.vocab_size,
        eot_id=found,
        tokenizer={**spec.describe(), "eot_id": found},
        tokenizer_file=spec.content if spec.file_name else None,
    )


def _complete_target(target: _ImportTarget, source: Dataset) -> _ImportTarget:
    """The target with what the files record: an end of text, and a dtype if no tokenizer determines it."""
    eot_id = source.manifest.tokenizer["eot_id"] if target.eot_id is None else target.eot_id
    dtype = target.dtype or source.manifest.dtype
    return _ImportTarget(
        dtype=dtype,
        vocab_size=target.vocab_size or 1 << (16 if dtype == "uint16" else 31),
        eot_id=eot_id,
        tokenizer={**target.tokenizer, "eot_id": eot_id},
        tokenizer_file=target.tokenizer_file,
    )


def _part(name: str, split: TokenSplit, bounds: tuple[int, int], target: _ImportTarget) -> OutputPart:
    start, stop = bounds
    size = (stop - start) * numpy_dtype(target.dtype).itemsize

    def write(files: Files) -> Facts:
        lengths = document_lengths(split, start, stop)
        if (lengths < 0).any() or int(lengths.sum()) != stop - start:
            raise DatasetError(f"{name}: its documents are not contiguous", hint="is the index of the files complete?")
        lengths = lengths[lengths > 0]
        if int(lengths.max()) > MAX_DOCUMENT_TOKENS:
            raise DatasetError(f"{name}: a document has 2^31 tokens or more", hint="is the end-of-text id right?")
        ends = np.cumsum(lengths) + start
        writer = ShardWriter(files.create, name, target.dtype)
        writer.add_lengths(lengths.astype(np.int32))
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
                f"{name}: the end of text {target.eot_id} does not begin every document, or occurs elsewhere",
                hint="import without `eot_id` and `tokenizer`: then documents are those that the layout stores",
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


def _check_range(largest: int, target: _ImportTarget, *, where: str) -> None:
    if largest >= target.vocab_size:
        raise DatasetError(
            f"{where}: id {largest} is beyond the vocabulary of {target.vocab_size}",
            hint="is it the right tokenizer, and the right dtype?",
        )


def _manifest(source: Dataset, target: _ImportTarget, receipts: Sequence[PartReceipt], notes: list[str]) -> Manifest:
    facts = [receipt.facts for receipt in receipts]
    marked = target.eot_id is not None and all(one["eots"] == one["ended"] == one["documents"] for one in facts)
    if target.eot_id is not None and not marked:
        notes.append(
            f"not every document ends with {target.eot_id}, or some contain it: only the index tells where they end"
        )
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


def _tokenizer_digest(target: _ImportTarget) -> dict[str, Digest]:
    if target.tokenizer_file is None:
        return {}
    sha = hashlib.sha256(target.tokenizer_file).hexdigest()
    return {target.tokenizer["file"]: Digest(bytes=len(target.tokenizer_file), sha256=sha)}


def _files(source: Dataset) -> dict[str, int]:
    """The number of tokens of each file that was imported."""
    if isinstance(source, RowsDataset):
        return source.tokens_by_file
    if not isinstance(source, InPlaceDataset):
        return {}
    return {
        f"{split}/{os.path.basename(file.path)}": file.num_tokens
        for split, files in source.detected.files.items()
        for file in files
    }


def _notes(source: Dataset, target: _ImportTarget) -> list[str]:
    notes = list(source.notes) if isinstance(source, RowsDataset) else []
    if isinstance(source, InPlaceDataset):
        if source.detected.inner_ends is None:
            notes.append(
                f"{source.detected.layout} does not store where documents end: they are recovered from the end-of-text "
                f"id {target.eot_id}"
            )
        if source.detected.eot == "prepend":
            notes.append("the end of text is first in the documents of the files, and last in those of the dataset")
        notes += _short_shards(source)
    if target.eot_id is None:
        notes.append("no end-of-text id is known: only the index of the dataset tells where documents end")
    return notes


def _short_shards(source: InPlaceDataset) -> list[str]:
    """If all shards but the last should have the same size, shorter ones may be out of order."""
    if not load_in_place_format(source.detected.layout).TRAITS.equal_shards:
        return []
    return [
        f"{file.path} is not the last shard, and has only {file.num_tokens} tokens: are the shards in order?"
        for files in source.detected.files.values()
        for file in files[:-1]
        if file.num_tokens < max(one.num_tokens for one in files)
    ]


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
    """The fingerprint of a dataset's documents and tokens. Reads all of them."""
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
    """The largest id. 32-bit ids are read as unsigned: a negative one is beyond every vocabulary."""
    return int(tokens.view(f"u{tokens.itemsize}").max())
