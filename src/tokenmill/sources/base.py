"""What a source format can do: the `SourceFormat` protocol, and its values `Source`, `Unit`, `Batch` and `Skip`.

    Source  -> find_text, extent -> Unit  -> read -> Batch, Batch, ...
    a file     how it is planned    a slice          documents with their positions, and what was skipped

Arrow text is built from bytes and split into them here too, without a copy where possible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.errors import MORE_MEMORY, SourceError
from tokenmill.records import Int
from tokenmill.sizes import format_time

MIN_UNIT_BYTES = 32_000_000
MAX_UNIT_BYTES = 2_000_000_000
UNITS_WANTED = 256
SAMPLE_UNITS_WANTED = 64

BATCH_BYTES = 8_000_000
# Documents of one byte, or empty ones, would make batches that are small in text and large in everything else.
MAX_DOCUMENTS = 1 << 17

# A compressed file expands to a few times its size. Plans need a guess, but results do not depend on it.
EXPANSION = 4

# How the text of a document is made of columns or fields: see text_columns.py.
Rule = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file to read: its kind, where its text is, and its pin: its time, or its etag in an object store."""

    name: str
    kind: str
    compression: str
    bytes: Int
    modified: Int
    split: str
    # A `Rule`; these types have one spelling as JSON.
    text: dict[str, str | bool | list[str]]
    etag: str = ""

    @property
    def expanded_bytes(self) -> int:
        """The bytes of the file, decompressed; a guess if it is compressed."""
        return self.bytes * (EXPANSION if self.compression else 1)

    def pin(self) -> str:
        """What must not change between planning and reading, in words."""
        return f"{self.bytes} bytes and {f'etag {self.etag}' if self.etag else f'time {format_time(self.modified)}'}"

    def identity(self) -> dict[str, Any]:
        """The fields that a copy of the same file shares."""
        return {
            "name": self.name,
            "kind": self.kind,
            "bytes": self.bytes,
            "split": self.split,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A slice of one source, from `start` to `stop` in sections or bytes, or a run of whole small sources."""

    index: Int
    source: Int
    num_sources: Int
    start: Int
    stop: Int
    text_bytes: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How large a source is and where it can be cut.

    `sections` are the text bytes of its row groups or record batches. A source without sections is cut at any byte if
    it is `divisible`, otherwise only at its `cuts`: bytes at which documents begin, from 0 to the end of the file.
    """

    text_bytes: int
    sections: tuple[int, ...] = ()
    divisible: bool = False
    cuts: tuple[int, ...] = ()


class Section(NamedTuple):
    """A row group or a record batch."""

    text_bytes: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSlice:
    """Sections or bytes [start, stop) of a source, which is number `index` of the plan. A `stop` of -1 is its end."""

    path: str
    index: int
    source: Source
    start: int = 0
    stop: int = -1


class SourceFormat(Protocol):
    """How documents are found in a file. Each format implements this in its own module; reader.py chooses it.

                 a unit is                 a position is    documents are counted by
        parquet  a run of row groups       a row            the footer
        arrow    a run of record batches   a row            the headers of the batches
        jsonl    a range of bytes          a byte offset    reading them
        csv      a range of bytes          a byte offset    reading them
        json     a file                    a byte offset    reading them
        text     a range of bytes, a file  a byte offset    reading them; by files, where a file is a document

    Planning, probing and reading ask for these properties, never for the kind of a source. The defaults are those of a
    file of plain text.
    """

    has_columns: ClassVar[bool] = False
    """The text is in named columns or fields. Otherwise all of the file is text."""
    has_sections: ClassVar[bool] = False
    """Rows are stored in sections (row groups, record batches), which tell their sizes. A unit is a run of sections."""
    positions_are_bytes: ClassVar[bool] = True
    """The position of a document is its byte offset in the decompressed text. Otherwise it is its row."""
    is_one_document: ClassVar[bool] = False
    """The whole file is one document."""
    starts_anywhere: ClassVar[bool] = True
    """Documents are found from any byte of a plain file on. Otherwise only from where the plan cuts it."""
    joins_small_files: ClassVar[bool] = False
    """Small files can be read many at a time: see small_files.py."""

    def find_text(self, path: str, source: Source, *, text_column: str | None, template: str | None) -> Rule:
        """Where the text of a document is, from the beginning of the file or its schema."""
        return {}

    def columns(self, path: str, source: Source) -> Iterable[str]:
        """The names of the columns; those of the fields of objects, one object after the other."""
        return ()

    def check(self, path: str, source: Source) -> None:
        """Raise `SourceError` if what a plan needs of the file cannot be read; `NotTextError` if it is not text."""

    def extent(self, path: str, source: Source) -> Extent:
        """The size of the text and where it can be cut. The `text` of the source is known."""
        divisible = not source.compression and not self.is_one_document
        return Extent(text_bytes=source.expanded_bytes, divisible=divisible)

    def sections(self, path: str, source: Source) -> list[Section]:
        """The sections of the file, in order; none if the format has none."""
        return []

    def read(self, part: SourceSlice, *, limit: int, batch_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
        """The documents of a slice. Those that begin in it are read to their end.

        Documents larger than `limit` bytes are skipped. About `batch_bytes` are read at a time.
        """


def default_unit_bytes(total: int, *, sample: float | None = None) -> int:
    """A unit size that gives enough units to distribute, but not so many that shards become tiny."""
    if sample is not None:
        return max(1_000_000, min(_in_steps(int(total * sample) // SAMPLE_UNITS_WANTED), MAX_UNIT_BYTES))
    return max(MIN_UNIT_BYTES, min(_in_steps(total // UNITS_WANTED), MAX_UNIT_BYTES))


def _in_steps(size: int) -> int:
    """The size rounded down to a coarse step, so that sources that grow a little are cut as before."""
    step = 1 << max(0, size.bit_length() - 3)
    return size // step * step


class Skip(NamedTuple):  # there may be millions, and a tuple is made in half the time of a frozen dataclass
    """A document that is not kept: its source, its position (row or byte offset), and the reason."""

    source: int
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents in order. `text` is an Arrow array of strings or bytes; `positions` are rows or byte offsets.

    `beside` has the values that a filter asks for, by column, of each document; nothing if it asks for none.
    """

    text: pa.Array
    sources: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    skips: tuple[Skip, ...] = ()
    beside: tuple[dict[str, Any], ...] = ()

    @property
    def num_read(self) -> int:
        return len(self.text) + len(self.skips)


def make_batch(source: int, text: pa.Array, positions: npt.NDArray[np.int64], skips: Iterable[Skip] = ()) -> Batch:
    """A batch of documents from one source."""
    return Batch(text, np.full(len(text), source, np.int32), positions, tuple(skips))


def judged_batch(source: int, judged: Iterable[tuple[int, str, str]]) -> Batch:
    """A batch of documents that were examined one by one: position, text, and the reason if it is skipped."""
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
    """The same documents in batches of about `max_bytes`: small batches are joined, large ones are split.

    Batches with values for a filter are not joined: the values may be much larger than the text.
    """
    most = min(max_documents or MAX_DOCUMENTS, MAX_DOCUMENTS)
    pending: list[Batch] = []
    size = count = 0
    for batch in batches:
        for part in _cut(batch, most, max_bytes):
            if pending and (part.beside or size + part.text.nbytes > max_bytes or count + part.num_read > most):
                yield _join(pending)
                pending, size, count = [], 0, 0
            pending.append(part)
            size += part.text.nbytes
            count += part.num_read
    if pending:
        yield _join(pending)


def _cut(batch: Batch, max_documents: int, max_bytes: int) -> Iterator[Batch]:
    count = len(batch.text)
    if count <= 1 or (batch.text.nbytes <= max_bytes and count <= max_documents):
        yield batch
        return
    half = count // 2
    boundary = (int(batch.sources[half]), int(batch.positions[half]))
    before = tuple(skip for skip in batch.skips if (skip.source, skip.position) < boundary)
    after = tuple(skip for skip in batch.skips if (skip.source, skip.position) >= boundary)
    first = Batch(batch.text[:half], batch.sources[:half], batch.positions[:half], before, batch.beside[:half])
    rest = Batch(batch.text[half:], batch.sources[half:], batch.positions[half:], after, batch.beside[half:])
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
        tuple(values for batch in batches for values in batch.beside),
    )


def _concatenated(texts: list[pa.Array]) -> pa.Array:
    """Texts end to end, joined as bytes: they have not been checked yet to be valid UTF-8."""
    if all(pa.types.is_string(text.type) for text in texts):
        return pa.concat_arrays([text.view(pa.binary()) for text in texts]).view(pa.string())
    return pa.concat_arrays([_as_large_binary(text) for text in texts]).view(pa.large_string())


def _as_large_binary(text: pa.Array) -> pa.Array:
    # A cast imports a large part of Arrow, so it is avoided where a view will do.
    return text.view(pa.large_binary()) if pa.types.is_large_string(text.type) else text.cast(pa.large_binary())


def text_array(texts: Sequence[str]) -> pa.Array:
    """Texts as an Arrow array: faster than `pa.array`, which also imports pandas if it is installed."""
    return unchecked_array([text.encode() for text in texts])


def unchecked_array(texts: Sequence[bytes]) -> pa.Array:
    """Bytes as an Arrow array of strings that are not checked to be valid UTF-8."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(data) for data in texts], out=offsets[1:])
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(b"".join(texts)))


def text_buffers(text: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Offsets and bytes of an Arrow array of strings, without a copy of the text."""
    wide = pa.types.is_large_string(text.type) or pa.types.is_large_binary(text.type)
    _, offsets_buffer, data_buffer = text.buffers()
    stored = np.frombuffer(offsets_buffer, np.int64 if wide else np.int32, len(text) + 1 + text.offset)
    offsets: npt.NDArray[np.int64] = stored[text.offset :].astype(np.int64)
    if data_buffer is None:
        return offsets, np.zeros(0, np.uint8)
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    return offsets - offsets[0], data


@contextlib.contextmanager
def naming_what_needs_memory(where: Callable[[], str]) -> Iterator[None]:
    """Memory that runs out inside of this (in Python, numpy or Arrow) is a `SourceError` that names a source."""
    try:
        yield
        return
    except MemoryError:
        pass  # raised below: with this error in its context, the new one would keep all that is in memory
    raise SourceError(f"{where()}: there is not enough memory for its documents", hint=MORE_MEMORY)
