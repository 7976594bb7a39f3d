"""From a file to its format, by the end of its name; and `read_unit`, the documents of a unit in any format.

    a.jsonl.gz  ->  kind "jsonl", compression "gz"  ->  JsonLinesFormat  ->  read(start, stop)  ->  batches

A format's module is imported when the first file of its kind is met.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from tokenmill.errors import RecipeError, SourceError
from tokenmill.recipe import BY_ROW
from tokenmill.sources.base import BATCH_BYTES, Batch, Section, Source, SourceFormat, SourceSlice, Unit, even
from tokenmill.sources.files import COMPRESSIONS, check_unchanged, ending_of, is_plain_json, pinned
from tokenmill.sources.text_columns import UNREAD
from tokenmill.storage.base import is_url

KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".csv": "csv",
    ".tsv": "csv",
}
# A .json or .csv file in a folder may describe the other files, so it is a source only where there are no others.
_SECOND_CHOICE = (".json", ".csv", ".tsv")
_SECOND_COMPRESSIONS = (".bz2", ".xz", ".lz4")
KNOWN = ", ".join(KINDS)
_UNPACK = {
    **dict.fromkeys((".tar", ".tgz", ".tbz2", ".txz"), "tar"),
    ".zip": "unzip",
    ".7z": "7z",
    ".rar": "unrar",
}
# Prose with markup, and source code: files of which a line alone says little.
_WHOLE = frozenset((
    ".md", ".markdown", ".mdx", ".rst", ".html", ".htm", ".xhtml", ".tex", ".adoc", ".asciidoc", ".org", ".wiki",
    ".ipynb", ".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx", ".cu", ".cuh", ".rs",
    ".go", ".java", ".kt", ".kts", ".scala", ".js", ".jsx", ".mjs", ".cjs", ".ts", ".tsx", ".vue", ".svelte",
    ".css", ".scss", ".less", ".rb", ".php", ".pl", ".pm", ".lua", ".jl", ".r", ".m", ".mm", ".swift", ".hs", ".ml",
    ".mli", ".ex", ".exs", ".erl", ".clj", ".cljs", ".lisp", ".el", ".scm", ".sh", ".bash", ".zsh", ".fish", ".ps1",
    ".bat", ".sql", ".cs", ".fs", ".vb", ".dart", ".zig", ".nim", ".d", ".f", ".f90", ".f95", ".asm", ".s", ".v",
    ".sv", ".vhd", ".vhdl", ".proto", ".thrift", ".cmake", ".gradle", ".tf", ".nix", ".lean", ".thy", ".sol",
))  # fmt: skip
# Files that other programs leave beside their data.
_COMPANIONS = ("dataset_info.json", "dataset_dict.json", "state.json", "_SUCCESS")


@lru_cache
def format_of(kind: str, documents: str = "lines") -> SourceFormat:
    """The format of a kind of source. `documents`, from the recipe, says what a document is in text files."""
    if kind == "parquet":
        from tokenmill.sources.parquet import ParquetFormat

        return ParquetFormat()
    if kind == "arrow":
        from tokenmill.sources.arrow import ArrowFormat

        return ArrowFormat()
    if kind == "jsonl":
        from tokenmill.sources.jsonl import JsonLinesFormat

        return JsonLinesFormat()
    if kind == "csv":
        from tokenmill.sources.csv import CsvFormat

        return CsvFormat()
    if kind == "json":
        from tokenmill.sources.json_array import JsonArrayFormat

        return JsonArrayFormat()
    if kind in ("text", "document"):
        from tokenmill.sources.text import text_format

        return text_format("files" if kind == "document" else documents)
    raise SourceError(
        f"sources of kind {kind!r} are not read by this version", hint="use the tokenmill that made the plan"
    )


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
    """The documents of a unit in order. `paths` and `sources` are those of this unit alone.

    `documents` says what a document is in text files; documents larger than `limit` bytes are skipped. Each source is
    compared with its pin before and after it is read. A probe reads `batch_bytes` at a time.
    """

    def read() -> Iterator[Batch]:
        number = 0
        while number < len(paths):
            index, path, source = unit.source + number, paths[number], sources[number]
            format = format_of(source.kind, documents)
            if format.joins_small_files and (unit.start, unit.stop) == (0, -1):
                from tokenmill.sources import small_files

                batches, count = small_files.read(
                    format, paths, sources, number, unit.source, limit=limit, max_bytes=batch_bytes
                )
                yield from batches
                number += count
                if count:
                    continue
            check_unchanged(path, source)
            with pinned(path, source):
                _check_planned(path, source, format)
                part = SourceSlice(path=path, index=index, source=source, start=unit.start, stop=unit.stop)
                yield from format.read(part, limit=limit, batch_bytes=batch_bytes)
            check_unchanged(path, source)
            number += 1

    batches = even(read(), max_documents=max_documents, max_bytes=batch_bytes)
    return _read_ahead(batches) if any(map(is_url, paths)) else batches


def sections(path: str, source: Source) -> list[Section]:
    """Text bytes and rows of the row groups or record batches of a source whose format has sections."""
    format = format_of(source.kind)
    with pinned(path, source):
        _check_planned(path, source, format)
        return format.sections(path, source)


def _read_ahead(batches: Generator[Batch]) -> Iterator[Batch]:
    """The same batches. While one is used, a thread fetches the next one from the store."""
    with ThreadPoolExecutor(1) as reader:
        try:
            coming = reader.submit(next, batches, None)
            while (batch := coming.result()) is not None:
                coming = reader.submit(next, batches, None)
                yield batch
        finally:
            reader.submit(batches.close)


def _check_planned(path: str, source: Source, format: SourceFormat) -> None:
    """Refuse a source that was planned without being read: where to cut it and where its text is, is unknown."""
    if source.text != UNREAD:
        return
    format.check(path, source)
    raise SourceError(
        f"{path} could not be read when the plan was made, and can be now",
        hint="prepare again with `update=True`: it is planned anew",
    )


def kind_of(name: str) -> tuple[str | None, str]:
    """Kind and compression by the name of a file; the kind is None if the ending is unknown."""
    stem, ending = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(ending, "")
    return KINDS.get(os.path.splitext(stem)[1] if compression else ending), compression


def positions_are_bytes(name: str) -> bool:
    """Whether the position of a document of this file is a byte offset in its text. Otherwise it is a row."""
    return format_of(kind_of(name)[0] or "text").positions_are_bytes


def read_as(path: str, *, documents: str) -> tuple[str, str]:
    """Kind and compression of a source. Of .json and .csv files, all is text unless a document is a row."""
    kind, compression = kind_of(path)
    if kind is None:
        return "document" if documents == "auto" and is_whole(path) else "text", compression
    is_text = documents not in BY_ROW and (kind == "csv" or is_plain_json(path))
    return "text" if is_text else kind, compression


def is_whole(name: str) -> bool:
    """Whether a file is one document unless the user says otherwise: prose with markup, or source code."""
    ending = ending_of(name.lower())
    return f".{ending.split('.')[1]}" in _WHOLE if ending else False


def is_known(name: str, *, is_second: bool = False) -> bool:
    """Whether a file in a folder is taken as a source, or as one of second choice, if there are no others."""
    if kind_of(name)[0] is None:
        return False
    lower = name.lower()
    return is_second or not (lower.endswith((*_SECOND_CHOICE, *_SECOND_COMPRESSIONS)) or _is_table(lower))


def _is_table(name: str) -> bool:
    return ending_of(name).startswith((".csv", ".tsv"))


def is_companion(name: str) -> bool:
    """Whether a file can be ignored without telling the user."""
    return name in _COMPANIONS


def check_kind(path: str, *, documents: str) -> None:
    """Refuse files that cannot be read, or that would be read as something that they are not."""
    kind, compression = kind_of(path)
    lower = path.lower()
    stem = os.path.splitext(lower)[0] if compression else lower
    if unpack := _UNPACK.get(os.path.splitext(stem)[1]):
        raise RecipeError(f"{path}: archives are not read", hint=f"unpack it with {unpack}, then name the folder")
    if compression and kind is not None and format_of(kind).has_sections:
        raise RecipeError(
            f"{path}: a compressed {kind} file is not read", hint="decompress it: it is compressed inside"
        )


def count_endings(endings: Counter[str]) -> str:
    """`3 .png, 1 .json, 2 without any`."""
    return ", ".join(f"{count:,} {ending or 'without any'}" for ending, count in endings.most_common())
