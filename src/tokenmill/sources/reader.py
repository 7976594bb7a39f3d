"""Reading a unit: the documents of its slice, whatever kind its source is.

What a file holds, by the end of its name.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

from tokenmill.errors import RecipeError, SourceError
from tokenmill.sources import arrow, jsonl, parquet, small_files, text
from tokenmill.sources.base import BATCH_BYTES, Batch, Source, Unit, even
from tokenmill.sources.files import check_unchanged, pin_of, pinned
from tokenmill.sources.text_columns import UNREAD
from tokenmill.storage.base import is_url


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
        number = 0
        while number < len(paths):
            index, path, source = unit.source + number, paths[number], sources[number]
            if (unit.start, unit.stop) == (0, -1):
                batches, count = small_files.read(
                    paths, sources, number, unit.source, documents=documents, limit=limit, most=batch_bytes
                )
                yield from batches
                number += count
                if count:
                    continue
            check_unchanged(path, source)
            with pinned(path, source):
                yield from _read_source(path, index, source, unit, documents, limit, batch_bytes)
            check_unchanged(path, source)
            number += 1

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
    separator = separator_of(documents)
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
        hint="resume with `update=True`: it is planned anew",
    )


KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
}
COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
# What the kinds are called in messages: .json is a stranger's name for JSON lines.
KNOWN = ", ".join(ending for ending in KINDS if ending != ".json")
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz")
_TABLES_AS_TEXT = (".csv", ".tsv")
# Files that others leave beside their data.
_COMPANIONS = ("dataset_info.json", "dataset_dict.json", "state.json", "_SUCCESS")


def kind_of(name: str) -> tuple[str | None, str]:
    """Kind and compression that a file's name tells; the kind is None if it tells none."""
    stem, ending = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(ending, "")
    return KINDS.get(os.path.splitext(stem)[1] if compression else ending), compression


def read_as(path: str, *, documents: str) -> tuple[str, str]:
    """Kind and compression of a source. Where files or parts of them are documents, .json is text like any other."""
    kind, compression = kind_of(path)
    is_text = kind is None or (kind == "jsonl" and documents != "lines" and _is_json(path))
    return "text" if is_text else str(kind), compression


def _is_json(name: str) -> bool:
    return ending_of(name.lower()).startswith(".json") and not ending_of(name.lower()).startswith(".jsonl")


def check_json(path: str) -> None:
    """Refuse a file that has no line with an object in it, though its name says JSON."""
    if _is_json(path):
        raise RecipeError(
            f"{path} is not JSON lines: it has no line that is an object",
            hint="put one object on each line: jq -c '.[]' FILE > FILE.jsonl",
        )


def is_known(name: str) -> bool:
    """Whether a file that lies in a folder is taken for a source. A plain .json is more often something else."""
    return kind_of(name)[0] is not None and not name.lower().endswith(".json")


def is_companion(name: str) -> bool:
    """Whether it is no loss to anybody if a file of this name is passed over."""
    return name in _COMPANIONS


def ending_of(name: str) -> str:
    """The end of a name, with that of its compression."""
    stem, ending = os.path.splitext(name)
    return os.path.splitext(stem)[1] + ending if ending.lower() in COMPRESSIONS else ending


def check_kind(path: str, *, documents: str) -> None:
    """Refuse what is not read, or would be read as something that it is not."""
    kind, compression = kind_of(path)
    if kind is not None and not compression:
        return
    if path.lower().removesuffix(".gz").removesuffix(".zst").endswith(_ARCHIVES):
        raise RecipeError(f"{path}: archives are not read", hint="unpack it first")
    if compression and kind in ("parquet", "arrow"):
        raise RecipeError(
            f"{path}: a compressed {kind} file is not read", hint="decompress it: it is compressed inside"
        )
    if ending_of(path).lower().startswith(_TABLES_AS_TEXT) and documents == "lines":
        raise RecipeError(
            f"{path}: tables as text are not read", hint="make it parquet or JSON lines, or use `documents='files'`"
        )


def separator_of(documents: str) -> bytes:
    """What stands between the texts of a file; nothing where a file is one text."""
    return b"\n" if documents == "lines" else documents.removeprefix("separator:").encode() * (documents != "files")


def count_endings(endings: Counter[str]) -> str:
    """`3 .png, 1 .json, 2 without any`."""
    return ", ".join(f"{count:,} {ending or 'without any'}" for ending, count in endings.most_common())
