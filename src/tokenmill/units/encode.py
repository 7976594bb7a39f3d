"""Filters, splits and encodes a batch of text, in memory only.

    check UTF-8 -> drop or keep -> hash -> encode -> split -> end of text -> check the range, narrow

A build and a text stream both use these functions, so a trainer gets the same tokens from either.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
from tokenmill.dataset.manifest import BAD, DROPS, NOT_SAMPLED
from tokenmill.errors import (
    BadDocumentError,
    BuildError,
    RecipeError,
    SourceChangedError,
    TokenizerError,
    is_failure,
)
from tokenmill.recipe import gives_reasons, load_filter
from tokenmill.sources.base import Batch, Skip, text_buffers
from tokenmill.sources.files import bring
from tokenmill.sources.reader import read_unit
from tokenmill.storage.base import Storage, local_folder
from tokenmill.tokenizers.base import LARGE_BYTES, Encoded, Engine
from tokenmill.units.receipts import NO_LIMIT
from tokenmill.units.task import BuildConfig, UnitTask

Filter = Callable[..., object]
# The name of a reason of a filter.
_REASON = re.compile(r"[a-z][a-z_]{0,39}")


@dataclass(frozen=True, slots=True)
class Kept:
    """The documents of a batch that are kept, with their hashes. The others are among `skips`."""

    text: pa.Array
    sources: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]
    skips: tuple[Skip, ...]
    skipped_hashes: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Documents:
    """The kept documents of a batch, encoded. `splits` has the number of each document's split.

    `read_sum` is the sum of the hashes of all documents that were read, before any was dropped.
    """

    kept: Kept
    encoded: Encoded
    splits: npt.NDArray[np.int8]
    read_sum: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SplitTokens:
    """The documents of one split: their tokens end to end, the length of each, and the sum of their hashes."""

    tokens: Tokens
    lengths: npt.NDArray[np.int64]
    hash_sum: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPiece:
    """What one batch of a unit adds to a split: the tokens of its documents end to end, and the length of each.

    `begin` and `end` count the documents read of the unit, before and after the batch. `all_tokens` are those of all
    splits, and `dropped` counts dropped documents by reason.
    """

    begin: int
    end: int
    tokens: Tokens
    lengths: npt.NDArray[np.int64]
    all_tokens: int
    dropped: dict[str, int]


def encode_unit(
    config: BuildConfig, task: UnitTask, engine: Callable[[], Engine], split: int, *, first: int = 0
) -> Generator[TokenPiece]:
    """The tokens of one split of a unit, piece by piece, from document `first` on, where a piece begins."""
    keep = load_filter(config.filter) if config.filter else None
    tokens_left = None if task.token_limit == NO_LIMIT else task.token_limit
    folder, end = local_folder(tempfile.gettempdir()), 0
    for batch in read_batches(config, task):
        begin, end = end, end + batch.num_read
        if end <= first:
            continue
        if begin < first:
            raise SourceChangedError(
                f"{task.sources[0].name}: its documents are read in other batches than before",
                hint="start again from the last state; if this repeats, please report it",
            )
        if tokens_left == 0:
            return
        with memory_for(batch.text, engine(), folder, where=first_document(batch, task)):
            found = encode_batch(batch, config, task, engine(), keep=keep, tokens_left=tokens_left)
        all_tokens = len(found.encoded.ids) + num_eot(config) * len(found.encoded.lengths)
        if tokens_left is not None:
            tokens_left -= all_tokens
        part = tokens_of_split(found, split, config)
        yield TokenPiece(
            begin=begin,
            end=end,
            tokens=np.zeros(0, numpy_dtype(config.dtype)) if part is None else part.tokens,
            lengths=np.zeros(0, np.int64) if part is None else part.lengths,
            all_tokens=all_tokens,
            dropped=dict(Counter(skip.reason for skip in found.kept.skips)),
        )


def read_batches(config: BuildConfig, task: UnitTask) -> Iterator[Batch]:
    """The text of a unit, batch by batch."""
    paths = [f"{config.root}/{source.name}" for source in task.sources]
    for path in paths:
        bring(path)
    return read_unit(
        task.unit,
        paths,
        list(task.sources),
        documents=config.documents,
        limit=config.max_document_bytes,
        max_documents=config.max_documents,
    )


def memory_for(text: pa.Array, engine: Engine, folder: Storage, *, where: str) -> AbstractContextManager[None]:
    """A context in which to encode a batch. A large document waits for its turn, and is refused if it would not fit."""
    if text.nbytes < LARGE_BYTES:
        return nullcontext()
    from tokenmill.units.memory import reserve_memory

    return reserve_memory(text, engine, folder, where=where)


def encode_batch(
    batch: Batch, config: BuildConfig, task: UnitTask, engine: Engine, *, keep: Filter | None, tokens_left: int | None
) -> Documents:
    """Encode a batch of a unit. `keep` is the user's filter, `tokens_left` those of a budget."""
    hashes = hash_documents(batch.text)
    kept = _keep(batch, hashes, config, task, keep)
    check_bad(kept.skips, config, task)
    encoded = _encode(kept, task, engine)
    kept, encoded = _with_tokens(kept, encoded, config)
    if tokens_left is not None:
        kept, encoded = _within_budget(kept, encoded, config, tokens_left)
    return Documents(kept, encoded, _splits(kept, config, task), hashes.sum(axis=0, dtype=np.uint64))


def _encode(kept: Kept, task: UnitTask, engine: Engine) -> Encoded:
    if not len(kept.text):
        return Encoded(np.zeros(0, np.uint32), np.zeros(0, np.int64))
    try:
        return engine.encode(kept.text)
    except TokenizerError as error:
        from tokenmill.tokenizers.engine import culprit  # here the engine is loaded already

        place = culprit(engine, kept.text)
        at = place or 0
        where = f"{_name(int(kept.sources[at]), task)} at {kept.positions[at]}"
        raise TokenizerError(
            f"{where}: {error.message}" if place is not None else f"{where}, or behind it: {error.message}",
            hint=f"leave the document out with `filter` or a lower `max_document_bytes`, or {error.hint}",
        ) from None


def tokens_of_split(documents: Documents, split: int, config: BuildConfig) -> SplitTokens | None:
    """The tokens of one split as they are stored; None if it has no document in this batch."""
    chosen = documents.splits == split
    if not chosen.any():
        return None
    part = select(documents.encoded, chosen)
    tokens = place_eot(part, eot=config.eot, eot_id=config.eot_id, vocab_size=config.vocab_size, dtype=config.dtype)
    return SplitTokens(
        tokens, part.lengths + num_eot(config), documents.kept.hashes[chosen].sum(axis=0, dtype=np.uint64)
    )


def num_eot(config: BuildConfig) -> int:
    """The number of end-of-text tokens per document."""
    return int(config.eot != "none")


def check_bad(skips: tuple[Skip, ...], config: BuildConfig, task: UnitTask) -> None:
    """Raise `BadDocumentError` for the first bad document, if the recipe says so."""
    if config.on_bad != "fail":
        return
    for skip in skips:
        if skip.reason in BAD:
            raise BadDocumentError(
                f"{name_of(skip, task)} at {skip.position}: {skip.reason.replace('_', ' ')}",
                hint="fix the document, or leave `on_bad='fail'` out to quarantine it and continue",
            )


def name_of(skip: Skip, task: UnitTask) -> str:
    """The name of the source of a skipped document."""
    return _name(skip.source, task)


def first_document(batch: Batch, task: UnitTask) -> str:
    """Source and position of the first document of a batch."""
    return f"{_name(int(batch.sources[0]), task)} at {batch.positions[0]}" if len(batch.text) else ""


def _name(source: int, task: UnitTask) -> str:
    return task.sources[source - task.unit.source].name


def _keep(
    batch: Batch, hashes: npt.NDArray[np.uint64], config: BuildConfig, task: UnitTask, keep: Filter | None
) -> Kept:
    bad = np.zeros(len(batch.text), np.bool_)
    skips = list(batch.skips)
    for reason, found in _reasons(batch, hashes, config, task, keep):
        fresh = found & ~bad
        bad |= found
        skips += [Skip(int(batch.sources[i]), int(batch.positions[i]), reason) for i in np.flatnonzero(fresh)]
    skips.sort(key=lambda skip: (skip.source, skip.position))
    whole = Kept(batch.text, batch.sources, batch.positions, hashes, tuple(skips), hashes[:0])
    return _without(whole, bad, ()) if bad.any() else whole


def _with_tokens(kept: Kept, encoded: Encoded, config: BuildConfig) -> tuple[Kept, Encoded]:
    """Drop documents that encode to nothing, where no end-of-text token would mark them."""
    has_tokens = encoded.lengths > 0
    if config.eot != "none" or has_tokens.all():
        return kept, encoded
    return _drop(kept, ~has_tokens, "no_tokens"), Encoded(encoded.ids, encoded.lengths[has_tokens])


def _within_budget(kept: Kept, encoded: Encoded, config: BuildConfig, tokens_left: int) -> tuple[Kept, Encoded]:
    if len(encoded.ids) + num_eot(config) * len(encoded.lengths) <= tokens_left:
        return kept, encoded
    nothing = Encoded(encoded.ids[:0], encoded.lengths[:0])
    cut = cut_to(encoded, tokens_left=tokens_left, eot=config.eot != "none") if tokens_left else nothing
    return _drop(kept, np.arange(len(kept.text)) >= len(cut.lengths), "over_budget"), cut


def _splits(kept: Kept, config: BuildConfig, task: UnitTask) -> npt.NDArray[np.int8]:
    """The split of every document: by its source, by its position, or by its content, so that copies stay together."""
    names = config.split_names
    if any(source.split for source in task.sources):
        by_source = np.array([names.index(source.split or "train") for source in task.sources], np.int8)
        return by_source[kept.sources - task.unit.source]
    splits = np.zeros(len(kept.text), np.int8)
    if config.held_out is not None:
        for number, source in enumerate(task.sources, start=task.unit.source):
            chosen = np.isin(kept.positions, config.held_out.get(source.name, ()))
            splits[chosen & (kept.sources == number)] = names.index("val")
        return splits
    keys = kept.hashes[:, 0] ^ np.uint64(_mixed(config.seed))
    low = 0.0
    for name, share in config.split.items():
        bounds = [np.uint64(min(int(edge * 2**64), 2**64 - 1)) for edge in (low, low + share)]
        splits[(keys >= bounds[0]) & (keys < bounds[1])] = names.index(name)
        low += share
    return splits


def _drop(kept: Kept, dropped: npt.NDArray[np.bool_], reason: str) -> Kept:
    """Turn some documents into skips."""
    places = zip(kept.sources[dropped].tolist(), kept.positions[dropped].tolist(), strict=True)
    return _without(kept, dropped, tuple(Skip(source, position, reason) for source, position in places))


def _without(kept: Kept, dropped: npt.NDArray[np.bool_], skips: tuple[Skip, ...]) -> Kept:
    good = ~dropped
    return Kept(
        kept.text.filter(pa.array(good)),
        kept.sources[good],
        kept.positions[good],
        kept.hashes[good],
        kept.skips + skips,
        np.concatenate((kept.skipped_hashes, kept.hashes[dropped])),
    )


def _reasons(
    batch: Batch, hashes: npt.NDArray[np.uint64], config: BuildConfig, task: UnitTask, keep: Filter | None
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """The reasons for which documents are dropped, each with the documents that it applies to."""
    text = batch.text
    offsets, _ = text_buffers(text)
    lengths = np.diff(offsets)
    invalid = _invalid_utf8(text)
    if invalid.any():
        yield "invalid_utf8", invalid
        valid = _blanked(text, invalid)
    else:
        valid = text
    candidates = _candidates(valid, lengths, hashes, config)
    for reason, found in candidates.items():
        if found.any():
            yield reason, found
    if keep is not None:
        left = ~np.logical_or.reduce([invalid, *candidates.values()])
        yield from _filtered(batch, valid, left, config, task, keep=keep)


def _filtered(
    batch: Batch, text: pa.Array, left: npt.NDArray[np.bool_], config: BuildConfig, task: UnitTask, *, keep: Filter
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """What the user's filter drops of the documents that are `left`, by reason."""
    unwanted = {"filtered": np.zeros(len(text), np.bool_)}
    reasons = gives_reasons(keep)
    for place, document in zip(np.flatnonzero(left).tolist(), text.filter(pa.array(left)).to_pylist(), strict=True):
        try:
            answer = keep(document, **batch.beside[place]) if batch.beside else keep(document)
            is_wanted = bool(answer)
        except BaseException as error:
            if not is_failure(error):
                raise
            where = Skip(int(batch.sources[place]), int(batch.positions[place]), "filtered")
            raise _filter_failed(error, where, config, task) from error
        if reasons and isinstance(answer, str) and answer:
            if answer not in unwanted:
                _check_reason(answer, config)
                unwanted[answer] = np.zeros(len(text), np.bool_)
            unwanted[answer][place] = True
        elif not is_wanted:
            unwanted["filtered"][place] = True
    yield from unwanted.items()


def _check_reason(reason: str, config: BuildConfig) -> None:
    """Refuse a reason that cannot be counted among the others."""
    if not _REASON.fullmatch(reason) or reason in (*DROPS, *BAD, NOT_SAMPLED):
        raise RecipeError(
            f"the filter {config.filter} gave the reason {reason[:60]!r}",
            hint="a reason has up to 40 letters from a to z or underscores, and is not one that tokenmill gives itself",
        )


def _candidates(
    text: pa.Array, lengths: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64], config: BuildConfig
) -> dict[str, npt.NDArray[np.bool_]]:
    """The documents that the recipe leaves out by their size, or by chance."""
    found = {"too_large": lengths > config.max_document_bytes}
    if not config.keep_empty:
        found["empty"] = lengths == 0
    if config.min_chars:
        found["too_short"] = _num_chars(text) < config.min_chars
    if config.document_sample is not None:
        found[NOT_SAMPLED] = ~_is_sampled(hashes, config.document_sample, config.seed)
    return found


def _is_sampled(hashes: npt.NDArray[np.uint64], share: float, seed: int) -> npt.NDArray[np.bool_]:
    """The documents of a sample, by the half of their hash that no split depends on."""
    found: npt.NDArray[np.bool_] = hashes[:, 1] ^ np.uint64(_mixed(seed)) < np.uint64(
        min(int(share * 2**64), 2**64 - 1)
    )
    return found


def _filter_failed(error: BaseException, where: Skip, config: BuildConfig, task: UnitTask) -> RecipeError:
    raised = f"{type(error).__name__}: {error}"
    return RecipeError(
        f"{name_of(where, task)} at {where.position}: the filter {config.filter} raised {raised}",
        hint="fix the function, and start over with `restart=True`: it may keep other documents now",
    )


def _blanked(text: pa.Array, which: npt.NDArray[np.bool_]) -> pa.Array:
    """The texts, with some replaced by the empty string."""
    import pyarrow.compute as pc

    return pc.if_else(pa.array(which), pa.scalar("", text.type), text)


def _num_chars(text: pa.Array) -> npt.NDArray[np.int64]:
    import pyarrow.compute as pc

    found: npt.NDArray[np.int64] = pc.utf8_length(text).to_numpy()
    return found


_COUNTED_BYTES = 1 << 20
_CONTINUATION = -64  # as signed bytes, those of UTF-8 that do not begin a character are below it


def chars_of_groups(text: pa.Array, groups: npt.NDArray[np.int64], num_groups: int) -> npt.NDArray[np.int64]:
    """The number of characters of the texts of each group. The texts are valid UTF-8.

    All bytes are counted together, then runs of texts of all groups but the largest. Counting each text by itself
    would take three times as long.
    """
    found = np.zeros(num_groups, np.int64)
    if not len(text):
        return found
    offsets, data = text_buffers(text)
    largest = int(np.bincount(groups).argmax())
    begins = np.flatnonzero(np.diff(groups, prepend=-1))
    ends = np.append(begins[1:], len(groups))
    others = groups[begins] != largest
    for begin, end in zip(begins[others].tolist(), ends[others].tolist(), strict=True):
        found[groups[begin]] += _count_chars(data[offsets[begin] : offsets[end]])
    found[largest] = _count_chars(data) - found.sum()
    return found


def _count_chars(data: npt.NDArray[np.uint8]) -> int:
    signed, num_chars = data.view(np.int8), len(data)
    for start in range(0, len(data), _COUNTED_BYTES):  # a mask of all bytes would not stay in the cache
        num_chars -= int(np.count_nonzero(signed[start : start + _COUNTED_BYTES] < _CONTINUATION))
    return num_chars


def _invalid_utf8(text: pa.Array) -> npt.NDArray[np.bool_]:
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        binary = pa.large_binary() if pa.types.is_large_string(text.type) else pa.binary()
        return np.array([not _is_utf8(document) for document in text.view(binary).to_pylist()], np.bool_)
    return np.zeros(len(text), np.bool_)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def hash_documents(text: pa.Array) -> npt.NDArray[np.uint64]:
    """A 128-bit hash of every document, as two columns of 64 bits."""
    offsets, data = text_buffers(text)
    view = data.data
    digest = xxhash.xxh3_128_digest
    bounds = offsets.tolist()
    joined = b"".join([digest(view[a:b]) for a, b in itertools.pairwise(bounds)])
    return np.frombuffer(joined, ">u8").astype(np.uint64).reshape(-1, 2)


def _mixed(seed: int) -> int:
    """The seed, mixed to 64 bits. Seed 0 stays 0."""
    return xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little")) if seed else 0


def place_eot(encoded: Encoded, *, eot: str, eot_id: int | None, vocab_size: int, dtype: str) -> Tokens:
    """The tokens of documents end to end, each with its end-of-text id where the policy wants it."""
    ids, lengths = encoded.ids, encoded.lengths
    largest = int(ids.max()) if len(ids) else -1
    if largest >= vocab_size:
        raise BuildError(
            f"the tokenizer gave id {largest}, beyond its vocabulary of {vocab_size}",
            hint="please report this, with the tokenizer",
        )
    narrow: Tokens = ids.astype(np.uint16) if dtype == "uint16" else ids.astype(np.int32)
    if eot == "none":
        return narrow
    assert eot_id is not None, "resolve_build refuses a tokenizer without an end of text"
    # A text that encodes to this id would look like two documents.
    if largest >= eot_id and (narrow == eot_id).any():
        raise TokenizerError(
            f"a text encodes to the end-of-text id {eot_id}", hint="choose an `eot_token` that no text encodes to"
        )
    ends = np.cumsum(lengths)
    return cast("Tokens", np.insert(narrow, ends if eot == "append" else ends - lengths, eot_id))


def cut_to(encoded: Encoded, *, tokens_left: int, eot: bool) -> Encoded:
    """The first documents, cut to exactly this many tokens, ends of text included. The last may be cut short."""
    sizes = encoded.lengths + int(eot)
    kept = int(np.searchsorted(np.cumsum(sizes), tokens_left, side="left")) + 1
    lengths = encoded.lengths[:kept].copy()
    lengths[-1] -= int(sizes[:kept].sum()) - tokens_left
    return Encoded(encoded.ids[: int(lengths.sum())], lengths)


def select(encoded: Encoded, chosen: npt.NDArray[np.bool_]) -> Encoded:
    """Some of the documents, in order. Neighbours are copied together."""
    if chosen.all():
        return encoded
    boundaries = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    ends = np.concatenate(([0], np.cumsum(encoded.lengths)))
    runs = [encoded.ids[ends[first] : ends[last]] for first, last in boundaries.reshape(-1, 2)]
    return Encoded(np.concatenate(runs) if runs else encoded.ids[:0], encoded.lengths[chosen])
