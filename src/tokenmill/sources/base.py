"""A batch: some documents with where each of them stands, and what was skipped among them.

Arrow text made of its bytes, and taken apart into them, without a copy of the text where there need be none.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.sizes import format_time

MIN_UNIT_BYTES = 32_000_000
MAX_UNIT_BYTES = 2_000_000_000


UNITS_WANTED = 256
SAMPLE_UNITS_WANTED = 64


# A compressed file holds a few times its own size of text; plans need a guess, results do not depend on it.
EXPANSION = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file to read: what it is, how its text is found, and what pins it: its time, or its etag in a store."""

    name: str
    kind: str
    compression: str
    bytes: int
    modified: int
    split: str
    text: dict[str, Any]
    etag: str = ""

    def pin(self) -> str:
        """What must not change between the plan and the reading, in words."""
        return f"{self.bytes} bytes and {f'etag {self.etag}' if self.etag else f'time {format_time(self.modified)}'}"

    def identity(self) -> dict[str, Any]:
        """Source without what a copy of the same file would not share."""
        return {
            "name": self.name,
            "kind": self.kind,
            "bytes": self.bytes,
            "split": self.split,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A slice of one source (`start` to `stop` in its own measure), or a run of whole small ones."""

    index: int
    source: int
    num_sources: int
    start: int
    stop: int
    text_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How large a source is and where it may be cut.

    `sections` are the text bytes of its row groups or record batches. Without sections a
    source is cut at any byte if `divisible`, else never.
    """

    text_bytes: int
    sections: tuple[int, ...] = ()
    divisible: bool = False


def default_unit_bytes(total: int, *, sample: float | None = None) -> int:
    """A unit size that gives enough units to share out, and not so many that shards become dust."""
    if sample is not None:
        return max(1_000_000, min(_in_steps(int(total * sample) // SAMPLE_UNITS_WANTED), MAX_UNIT_BYTES))
    return max(MIN_UNIT_BYTES, min(_in_steps(total // UNITS_WANTED), MAX_UNIT_BYTES))


def _in_steps(size: int) -> int:
    """A size or a little less: sources that grow by little are cut as they were."""
    step = 1 << max(0, size.bit_length() - 3)
    return size // step * step


# Kinds of sources that say how many rows they have, and how large those are.
TABLES = ("parquet", "arrow")


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


def text_array(texts: Sequence[str]) -> pa.Array:
    """Texts as Arrow text: quicker than `pa.array`, which would load pandas too, if that is installed."""
    return unchecked_array([text.encode() for text in texts])


def unchecked_array(texts: Sequence[bytes]) -> pa.Array:
    """Bytes as Arrow text that is not known to be valid yet."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(data) for data in texts], out=offsets[1:])
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(b"".join(texts)))


def text_buffers(text: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Offsets and bytes of an Arrow text array, without a copy of the text."""
    wide = pa.types.is_large_string(text.type) or pa.types.is_large_binary(text.type)
    _, offsets_buffer, data_buffer = text.buffers()
    stored = np.frombuffer(offsets_buffer, np.int64 if wide else np.int32, len(text) + 1 + text.offset)
    offsets: npt.NDArray[np.int64] = stored[text.offset :].astype(np.int64)
    if data_buffer is None:
        return offsets, np.zeros(0, np.uint8)
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    return offsets - offsets[0], data
