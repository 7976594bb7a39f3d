"""A batch: some documents with where each of them stands, and what was skipped among them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.arrow_text import text_array

BATCH_BYTES = 8_000_000
# Documents of a byte, or none at all, would make batches that are small by their text and large by all else.
MAX_DOCUMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class Skip:
    """A document that is not kept: its source, its row or byte offset there, and why."""

    source: int
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents in order. `text` is Arrow text or bytes; `positions` are rows or byte offsets in `sources`."""

    text: pa.Array
    sources: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    skips: tuple[Skip, ...] = ()

    @property
    def num_read(self) -> int:
        return len(self.text) + len(self.skips)


def make_batch(source: int, text: pa.Array, positions: npt.NDArray[np.int64], skips: Iterable[Skip] = ()) -> Batch:
    """A batch of documents of a single source."""
    return Batch(text, np.full(len(text), source, np.int32), positions, tuple(skips))


def judged_batch(source: int, judged: Iterable[tuple[int, str, str]]) -> Batch:
    """A batch of documents that were looked at one by one: position, text, and the reason if it has none."""
    texts: list[str] = []
    kept: list[int] = []
    skips: list[Skip] = []
    for position, text, reason in judged:
        if reason:
            skips.append(Skip(source, position, reason))
        else:
            texts.append(text)
            kept.append(position)
    return make_batch(source, text_array(texts), np.array(kept, np.int64), skips)


def even(
    batches: Iterable[Batch], *, max_documents: int | None = None, max_bytes: int = BATCH_BYTES
) -> Generator[Batch]:
    """The same documents in batches of about `max_bytes`: small ones joined, large ones cut."""
    most = min(max_documents or MAX_DOCUMENTS, MAX_DOCUMENTS)
    held: list[Batch] = []
    size = count = 0
    for batch in batches:
        for part in _cut(batch, most, max_bytes):
            if held and (size + part.text.nbytes > max_bytes or count + part.num_read > most):
                yield _join(held)
                held, size, count = [], 0, 0
            held.append(part)
            size += part.text.nbytes
            count += part.num_read
    if held:
        yield _join(held)


def _cut(batch: Batch, max_documents: int, max_bytes: int) -> Iterator[Batch]:
    count = len(batch.text)
    if count < 2 or (batch.text.nbytes <= max_bytes and count <= max_documents):
        yield batch
        return
    half = count // 2
    border = (int(batch.sources[half]), int(batch.positions[half]))
    before = tuple(skip for skip in batch.skips if (skip.source, skip.position) < border)
    after = tuple(skip for skip in batch.skips if (skip.source, skip.position) >= border)
    first = Batch(batch.text[:half], batch.sources[:half], batch.positions[:half], before)
    rest = Batch(batch.text[half:], batch.sources[half:], batch.positions[half:], after)
    yield from _cut(first, max_documents, max_bytes)
    yield from _cut(rest, max_documents, max_bytes)


def _join(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return Batch(
        _concatenated([batch.text for batch in batches]),
        np.concatenate([batch.sources for batch in batches]),
        np.concatenate([batch.positions for batch in batches]),
        tuple(skip for batch in batches for skip in batch.skips),
    )


def _concatenated(texts: list[pa.Array]) -> pa.Array:
    """By way of bytes: nobody has checked yet that the texts are valid."""
    if all(pa.types.is_string(text.type) for text in texts):
        return pa.concat_arrays([text.view(pa.binary()) for text in texts]).view(pa.string())
    return pa.concat_arrays([_as_large_binary(text) for text in texts]).view(pa.large_string())


def _as_large_binary(text: pa.Array) -> pa.Array:
    # To cast loads a great deal, so it is not done for nothing.
    return text.view(pa.large_binary()) if pa.types.is_large_string(text.type) else text.cast(pa.large_binary())
