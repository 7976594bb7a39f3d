"""Reading a unit: the documents of its slice, whatever kind its source is."""

from __future__ import annotations

from collections.abc import Iterator

from tokenmill.planning import Source, Unit
from tokenmill.sources import arrow, jsonl, parquet, text
from tokenmill.sources.batch import BATCH_BYTES, Batch, even
from tokenmill.sources.places import check_unchanged, pinned


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

    return even(read(), max_documents=max_documents, max_bytes=batch_bytes)


def _read_source(
    path: str, index: int, source: Source, unit: Unit, documents: str, limit: int, batch_bytes: int
) -> Iterator[Batch]:
    start, stop = unit.start, unit.stop
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
