"""Finding sources: files, folders, globs and URLs of them become a table of pinned files in a fixed order.

Names are relative to the folder that holds all of them, so the same corpus in another place
has the same names. A folder gives the files of kinds that tokenmill knows; a file that is
named, or matched by a glob, is text if its ending says nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tokenmill.errors import RecipeError, SourceError
from tokenmill.planning import EXPANSION, Extent, Source
from tokenmill.sources import arrow, jsonl, parquet, places, walking
from tokenmill.sources.columns import Rule, find_rule, unseen_rule
from tokenmill.sources.places import Pin
from tokenmill.storage.hub import is_hub, plain_name
from tokenmill.storage.urls import is_url
from tokenmill.typed import make_table

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
_REQUESTS_AT_ONCE = 16
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz")


@dataclass(frozen=True, slots=True)
class Listing:
    """Sources in order, where they may be cut, and the folder that their names start from."""

    root: str
    sources: Sequence[Source]
    extents: Sequence[Extent]
    notes: tuple[str, ...] = ()

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.sources[index].name)


def list_sources(recipe: Recipe, *, output: str | None = None) -> Listing:
    """Every file that the recipe's sources name, sorted by name, with its shape and its size.

    What lies in `output` is no source, even if that is inside of one.
    """
    found: dict[str, str] = {}
    pins: dict[str, Pin] = {}  # of objects, which their listing tells
    for split, arguments in (("", recipe.sources), ("val", recipe.val_sources)):
        for path, pin in _expand(arguments, any_ending=recipe.documents != "lines"):
            if output is not None and path.startswith(os.path.join(output, "")):
                continue
            if found.setdefault(path, split) != split:
                raise RecipeError(f"{path} is a source and a validation source", hint="name it once")
            if pin is not None:
                pins[path] = pin
    if not found:
        others = " but what lies in the output" if recipe.sources else ""
        raise RecipeError(f"there are no sources{others}", hint="give files, folders or globs, outside of the output")
    root = _root(list(found))
    extents: list[Extent] = []
    ordered = sorted(found, key=lambda path: os.fsencode(_name(path, root)))
    # Objects are asked for side by side: each answer takes its time, whatever its size.
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) if is_url(root) else contextlib.nullcontext() as pool:
        describe = partial(_describe, root=root, splits=found, pins=pins, recipe=recipe)
        described = pool.map(describe, ordered) if pool else map(describe, ordered)

        def described_sources() -> Iterator[Source]:
            for source, extent in described:
                extents.append(extent)
                yield source

        sources = make_table(Source, described_sources())
    return Listing(root, sources, extents, tuple(_notes((*recipe.sources, *recipe.val_sources), root)))


def _notes(arguments: Sequence[str], root: str) -> Iterator[str]:
    """Which of the places that a name may mean was taken."""
    for argument in arguments:
        if is_hub(root):
            yield f"{argument} is taken from the hub: {root}"
        elif plain_name(argument) and os.path.isdir(argument):
            yield f"{argument} is taken from the folder of that name, not from the hub"


def _name(path: str, root: str) -> str:
    return path.removeprefix(f"{root}/") if is_url(root) else os.path.relpath(path, root)


def _expand(arguments: Sequence[str], *, any_ending: bool) -> Iterator[tuple[str, Pin | None]]:
    """Files, and what tells them from what they may become, where that is known already."""
    for argument in arguments:
        path = os.path.abspath(os.path.expanduser(argument))
        if is_url(argument):
            yield from _expand_url(argument, any_ending=any_ending)
        elif os.path.isdir(path):
            files = list(_walk(path, any_ending=any_ending))
            if not files:
                raise _no_files(argument)
            yield from ((file, None) for file in files)
        elif os.path.exists(path):
            yield path, None
        else:
            matches = walking.matches(path)
            dataset = plain_name(argument)
            if not matches and dataset and not _is_a_path(argument):
                yield from _expand_url(str(dataset), any_ending=any_ending)
            elif not matches:
                on_hub = f"; {dataset} would be one on the hub" if dataset else ""
                raise RecipeError(f"no source matches {argument!r}", hint=f"check the path; quote globs{on_hub}")
            yield from ((match, None) for match in matches)


def _is_a_path(argument: str) -> bool:
    """Whether what could name a dataset of the hub is rather a file that is not there."""
    return os.path.splitext(argument)[1] in (*KINDS, *COMPRESSIONS) or os.path.isdir(argument.partition("/")[0])


def _expand_url(argument: str, *, any_ending: bool) -> Iterator[tuple[str, Pin]]:
    """The objects that a URL names, by the rules of folders and files."""
    found, is_prefix = places.expand(argument)
    if not found:
        raise RecipeError(f"no source matches {argument!r}", hint="check the URL; quote globs")
    if is_prefix:
        start = "" if is_hub(argument) else argument
        found = {path: found[path] for path in found if _is_wanted(path.removeprefix(start), any_ending=any_ending)}
        if not found:
            raise _no_files(argument)
    for path, pin in sorted(found.items(), key=lambda item: item[0]):
        if not is_hub(argument):
            places.check_name(path)
        yield path, pin


def _no_files(argument: str) -> RecipeError:
    return RecipeError(
        f"{argument} holds no files of a known kind ({', '.join(KINDS)}, also with .gz or .zst)",
        hint="name the files with a glob, or say --documents files",
    )


def _walk(folder: str, *, any_ending: bool) -> Iterator[str]:
    """The files of a folder. A dataset that lies in it is no source."""
    for parent, folders, files in walking.walk(folder):
        if "dataset.json" in files and "provenance" in folders:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not walking.is_passed_over(name)]
        for name in files:
            if _is_wanted(name, any_ending=any_ending):
                yield os.path.join(parent, name)


def _is_wanted(name: str, *, any_ending: bool) -> bool:
    """Whether a file in a folder is a source: not hidden, and of a known kind."""
    *folders, last = name.split("/")
    is_hidden = last.startswith((".", "cache-")) or any(map(walking.is_passed_over, folders))
    return not is_hidden and (any_ending or kind_of(last)[0] is not None)


def kind_of(name: str) -> tuple[str | None, str]:
    """Kind and compression that a file's name tells; the kind is None if it tells none."""
    stem, ending = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(ending, "")
    return KINDS.get(os.path.splitext(stem)[1] if compression else ending), compression


def _describe(
    path: str, *, root: str, splits: Mapping[str, str], pins: Mapping[str, Pin], recipe: Recipe
) -> tuple[Source, Extent]:
    name = _name(path, root)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise SourceError(f"the name of {path!r} is not UTF-8", hint="rename the file") from None
    found = pins.get(path) or places.find(path)
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
        columns = _columns(path, kind, compression, found)
        if columns or kind != "jsonl":
            rule = find_rule(columns, text_column=recipe.text_column, template=recipe.template, where=path)
        else:
            rule = unseen_rule(text_column=recipe.text_column, template=recipe.template)
    source = Source(
        name=name.replace(os.sep, "/"),
        kind=kind,
        compression=compression,
        bytes=found.bytes,
        modified=found.modified,
        split=splits[path],
        text=rule,
        etag=found.etag,
    )
    return source, _extent(path, source, recipe)


def _extent(path: str, source: Source, recipe: Recipe) -> Extent:
    if source.kind == "parquet":
        return parquet.extent(path, source.text, places.pin_of(source))
    if source.kind == "arrow":
        return arrow.extent(path, source.text, places.pin_of(source))
    if source.compression:
        return Extent(text_bytes=source.bytes * EXPANSION)
    whole = source.kind == "text" and recipe.documents == "files"
    return Extent(text_bytes=source.bytes, divisible=not whole)


def _columns(path: str, kind: str, compression: str, pin: Pin) -> list[str]:
    if kind == "jsonl":
        return jsonl.columns(path, compression, pin)
    return parquet.columns(path, pin) if kind == "parquet" else arrow.columns(path, pin)


def _root(paths: list[str]) -> str:
    if any(is_url(path) for path in paths):
        return places.common_root(paths)
    return os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath([os.path.dirname(p) for p in paths])
