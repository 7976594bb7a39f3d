"""Finding sources: files, folders and globs become a table of pinned files in a fixed order.

Names are relative to the folder that holds all of them, so the same corpus in another place
has the same names. A folder gives the files of kinds that tokenmill knows; a file that is
named, or matched by a glob, is text if its ending says nothing else.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.errors import RecipeError, SourceChangedError, SourceError
from tokenmill.planning import EXPANSION, Extent, Source
from tokenmill.sources import arrow, jsonl, parquet
from tokenmill.sources.columns import Rule, find_rule, unseen_rule

if TYPE_CHECKING:  # workers read sources too, and need not load what checks recipes
    from tokenmill.recipe import Recipe

KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
}
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz")


@dataclass(frozen=True, slots=True)
class Listing:
    """Sources in order, where they may be cut, and the folder that their names start from."""

    root: str
    sources: tuple[Source, ...]
    extents: tuple[Extent, ...]

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.sources[index].name)


def list_sources(recipe: Recipe, *, output: str | None = None) -> Listing:
    """Every file that the recipe's sources name, sorted by name, with its shape and its size.

    What lies in `output` is no source, even if that is inside of one.
    """
    found: dict[str, str] = {}
    for split, arguments in (("", recipe.sources), ("val", recipe.val_sources)):
        for path in _expand(arguments, any_ending=recipe.documents != "lines"):
            if output is not None and path.startswith(os.path.join(output, "")):
                continue
            if found.setdefault(path, split) != split:
                raise RecipeError(f"{path} is a source and a validation source", hint="name it once")
    root = _root(list(found))
    sources, extents = [], []
    for path in sorted(found, key=lambda path: os.fsencode(os.path.relpath(path, root))):
        source, extent = _describe(path, root, found[path], recipe)
        sources.append(source)
        extents.append(extent)
    return Listing(root, tuple(sources), tuple(extents))


def check_unchanged(path: str, source: Source) -> None:
    """Raise `SourceChangedError` unless the file is still the one that the plan pinned."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}", hint="bring it back, then run again") from None
    if (found.st_size, max(0, found.st_mtime_ns)) != (source.bytes, source.modified):
        raise SourceChangedError(
            f"{path} changed since the plan was made: it had {source.bytes} bytes and time {source.modified}, "
            f"now {found.st_size} bytes and time {found.st_mtime_ns}",
            hint="put the old file back, or start over with --restart",
        )


def _expand(arguments: Sequence[str], *, any_ending: bool) -> Iterator[str]:
    for argument in arguments:
        path = os.path.abspath(os.path.expanduser(argument))
        if "://" in argument:
            raise RecipeError(
                f"{argument.partition('://')[0]}:// sources are not read by this version: local files only",
                hint="copy the source to a local disk first",
            )
        if os.path.isdir(path):
            files = list(_walk(path, any_ending=any_ending))
            if not files:
                raise RecipeError(
                    f"{argument} holds no files of a known kind ({', '.join(KINDS)}, also with .gz or .zst)",
                    hint="name the files with a glob, or say --documents files",
                )
            yield from files
        elif os.path.exists(path):
            yield path
        else:
            matches = sorted(
                match for match in glob.glob(path, recursive=True) if os.path.isfile(match) and not _hidden(match, path)
            )
            if not matches:
                raise RecipeError(f"no source matches {argument!r}", hint="check the path; quote globs")
            yield from matches


def _walk(folder: str, *, any_ending: bool) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in files:
            known = kind_of(name)[0] is not None or any_ending
            if known and not name.startswith((".", "cache-")):
                yield os.path.join(parent, name)


def _hidden(match: str, pattern: str) -> bool:
    return "__pycache__" in match and "__pycache__" not in pattern


def kind_of(name: str) -> tuple[str | None, str]:
    """Kind and compression that a file's name tells; the kind is None if it tells none."""
    stem, ending = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(ending, "")
    return KINDS.get(os.path.splitext(stem)[1] if compression else ending), compression


def _describe(path: str, root: str, split: str, recipe: Recipe) -> tuple[Source, Extent]:
    name = os.path.relpath(path, root)
    try:
        name.encode()
        found = os.stat(path)
    except UnicodeEncodeError:
        raise SourceError(f"the name of {path!r} is not UTF-8", hint="rename the file") from None
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    if not stat.S_ISREG(found.st_mode):
        raise SourceError(f"{path} is not a plain file", hint="tokenmill reads no pipes or devices")
    if path.lower().removesuffix(".gz").removesuffix(".zst").endswith(_ARCHIVES):
        raise RecipeError(f"{path}: archives are not read", hint="unpack it first")
    kind, compression = kind_of(path)
    kind = kind or "text"
    if compression and kind in ("parquet", "arrow"):
        raise RecipeError(
            f"{path}: a compressed {kind} file is not read", hint="decompress it: it is compressed inside"
        )
    rule: Rule = {}
    if kind != "text":
        columns = _columns(path, kind, compression)
        if columns or kind != "jsonl":
            rule = find_rule(columns, text_column=recipe.text_column, template=recipe.template, where=path)
        else:
            rule = unseen_rule(text_column=recipe.text_column, template=recipe.template)
    source = Source(
        name=name.replace(os.sep, "/"),
        kind=kind,
        compression=compression,
        bytes=found.st_size,
        modified=max(0, found.st_mtime_ns),
        split=split,
        text=rule,
    )
    return source, _extent(path, source, recipe)


def _extent(path: str, source: Source, recipe: Recipe) -> Extent:
    if source.kind == "parquet":
        return parquet.extent(path, source.text)
    if source.kind == "arrow":
        return arrow.extent(path, source.text)
    if source.compression:
        return Extent(text_bytes=source.bytes * EXPANSION)
    whole = source.kind == "text" and recipe.documents == "files"
    return Extent(text_bytes=source.bytes, divisible=not whole)


def _columns(path: str, kind: str, compression: str) -> list[str]:
    if kind == "jsonl":
        return jsonl.columns(path, compression)
    return parquet.columns(path) if kind == "parquet" else arrow.columns(path)


def _root(paths: list[str]) -> str:
    return os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath([os.path.dirname(p) for p in paths])
