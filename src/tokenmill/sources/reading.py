"""Reading a unit: the documents of its slice, whatever kind its source is."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

from tokenmill.errors import SourceError
from tokenmill.planning import Source, Unit
from tokenmill.sources import arrow, jsonl, parquet, text
from tokenmill.sources.batch import BATCH_BYTES, Batch, even
from tokenmill.sources.columns import UNREAD
from tokenmill.sources.places import check_unchanged, pin_of, pinned
from tokenmill.storage.urls import is_url


def read_unit(
    unit: Unit,
    paths: list[str],
    sources: list[Source],
    *,
    documents: str,
    limit: int,
    max_documents: int | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> Iterator[Batch]:
    """The documents of a unit in order. `paths` and `sources` are those of the unit alone.

    `documents` says what a document is in text files; none is larger than `limit` bytes. Each
    source is checked against its pin before and after it is read. `batch_bytes` is how much a look
    at the beginning reads at once.
    """

    def read() -> Iterator[Batch]:
        for index, (path, source) in enumerate(zip(paths, sources, strict=True), start=unit.source):
            check_unchanged(path, source)
            with pinned(path, source):
                yield from _read_source(path, index, source, unit, documents, limit, batch_bytes)
            check_unchanged(path, source)

    batches = even(read(), max_documents=max_documents, max_bytes=batch_bytes)
    return _ahead(batches) if any(map(is_url, paths)) else batches


def sections(path: str, source: Source) -> list[tuple[int, int]]:
    """Text bytes and rows of the row groups or record batches of a table."""
    _check_read(path, source)
    if source.kind == "parquet":
        return parquet.sections(path, source.text, pin_of(source))
    return arrow.sections(path, source.text, pin_of(source))


def _ahead(batches: Generator[Batch]) -> Iterator[Batch]:
    """The same batches, each of them on its way from the store while the one before is used."""
    with ThreadPoolExecutor(1) as reader:
        try:
            coming = reader.submit(next, batches, None)
            while (batch := coming.result()) is not None:
                coming = reader.submit(next, batches, None)
                yield batch
        finally:
            reader.submit(batches.close)


def _read_source(
    path: str, index: int, source: Source, unit: Unit, documents: str, limit: int, batch_bytes: int
) -> Iterator[Batch]:
    start, stop = unit.start, unit.stop
    _check_read(path, source)
    if source.kind == "parquet":
        return parquet.read(path, index, source, start, stop, batch_bytes=batch_bytes)
    if source.kind == "arrow":
        return arrow.read(path, index, source, start, stop)
    if source.kind == "jsonl":
        return jsonl.read(path, index, source, start, stop, limit=limit, chunk=batch_bytes)
    if documents == "files":
        return text.read_file(path, index, source, limit=limit)
    if documents == "lines":
        return text.read_lines(path, index, source, start, stop, limit=limit, chunk=batch_bytes)
    separator = documents.removeprefix("separator:").encode()
    return text.read_separated(path, index, source, start, stop, separator=separator, limit=limit, chunk=batch_bytes)


def _check_read(path: str, source: Source) -> None:
    """Refuse a source that was planned without being read: where it may be cut, and where its text is, nobody knows."""
    if source.text != UNREAD:
        return
    # Raises what is wrong with it, if anything still is.
    if source.kind == "jsonl":
        for _ in jsonl.fields(path, source.compression, pin_of(source)):
            pass
    else:
        (parquet if source.kind == "parquet" else arrow).columns(path, pin_of(source))
    raise SourceError(
        f"{path} could not be read when the plan was made, and can be now",
        hint="go on with --update: it is planned anew",
    )
