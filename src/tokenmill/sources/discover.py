"""Finding sources: files, folders, globs and URLs become a table of pinned files in a fixed order, with notes.

Names are relative to the common folder of all sources, so a copy of the corpus elsewhere has the same names. A folder
gives its files of known kinds; those of second choice, such as .csv, if it has no others. A file that is named, or
matched by a glob, is read as text if its ending is unknown.

The notes tell the user before the build what was skipped or guessed, and what cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from tokenmill.errors import NotTextError, RecipeError, SourceError, StorageError
from tokenmill.recipe import BY_ROW, columns_of_filter, load_filter
from tokenmill.records import make_table
from tokenmill.sources.base import (
    Extent,
    Rule,
    Source,
    SourceFormat,
    SourceSlice,
    default_unit_bytes,
    naming_what_needs_memory,
)
from tokenmill.sources.files import (
    COMPRESSIONS,
    Pin,
    check_name,
    common_root,
    ending_of,
    expand,
    find,
    is_plain_json,
    pin_of,
    require,
    wrong_kind,
)
from tokenmill.sources.reader import (
    KINDS,
    KNOWN,
    check_kind,
    count_endings,
    format_of,
    is_companion,
    is_known,
    kind_of,
    read_as,
)
from tokenmill.sources.text_columns import UNREAD, no_filter_column, parts_left_out, with_filter_columns
from tokenmill.storage import globs
from tokenmill.storage.base import is_hub, is_url
from tokenmill.storage.hub import plain_name

if TYPE_CHECKING:
    from tokenmill.recipe import Recipe


# Where a build stores the texts that it gets from Python: the only sources that may be in its output.
IN_WORKSPACE = ".build/sources"
_REQUESTS_AT_ONCE = 16
# A short error must not lead to another plan. No pause between the tries: object stores have their own retries below.
_TRIES = 3
# How many text files have their first bytes checked while planning, besides those that will be cut. The others are
# checked when they are read: a request for each of a million objects would take too long.
_MAX_HEADS = 1000
_MAX_REMOTE_HEADS = 16
# Datasets of the hub that are widely known by a name without an organization.
_OWNERS = {
    "bookcorpus": "bookcorpus/bookcorpus",
    "c4": "allenai/c4",
    "gsm8k": "openai/gsm8k",
    "imdb": "stanfordnlp/imdb",
    "lambada": "cimec/lambada",
    "openwebtext": "Skylion007/openwebtext",
    "oscar": "oscar-corpus/oscar",
    "ptb_text_only": "ptb-text-only/ptb_text_only",
    "squad": "rajpurkar/squad",
    "tiny_shakespeare": "karpathy/tiny_shakespeare",
    "wikipedia": "wikimedia/wikipedia",
    "wikitext": "Salesforce/wikitext",
}
# A name has fewer.
_MANY_SPACES = 8
# How much of a source is read to see what is left out of its conversations.
_LOOK_BYTES, _LOOK_ROWS = 1 << 20, 100
# How many files that are not text an error names.
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Listing:
    """Sources in order, where each can be cut, and the folder that their names are relative to."""

    root: str
    sources: Sequence[Source]
    extents: Sequence[Extent]
    notes: tuple[str, ...] = ()

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.sources[index].name)


def list_sources(recipe: Recipe, *, output: str | None = None) -> Listing:
    """Every file that the recipe's sources name, sorted by name, with its text rule and size.

    Files in `output` are not sources, even if it is inside of a source folder.
    """
    passed_over = PassedOver()
    found, pins = _find_files(recipe, output, passed_over)
    require(found)
    root = _root(list(found))
    if recipe.val_sources and not is_url(root):
        _check_apart(found)
    _check_utf8(root, hint="rename that folder, or name the sources by a link from elsewhere")
    extents: list[Extent] = []
    troubles = _Troubles()
    named = [(_name(path, root), path) for path in found]
    ordered = [(name, path) for _, name, path in sorted((os.fsencode(name), name, path) for name, path in named)]
    most = _MAX_REMOTE_HEADS if is_url(root) else _MAX_HEADS
    to_check = frozenset(path for _, path in ordered[:: -(-len(ordered) // most)])
    # Objects are described concurrently, because each request takes its time.
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) if is_url(root) else contextlib.nullcontext() as pool:
        wanted = columns_of_filter(load_filter(recipe.filter)) if recipe.filter else []
        describe = partial(_describe, splits=found, pins=pins, recipe=recipe, wanted=wanted, to_check=to_check)
        described = pool.map(describe, ordered) if pool else map(describe, ordered)

        def described_sources() -> Iterator[Source]:
            for source, extent, trouble in described:
                extents.append(extent)
                if trouble:
                    format = format_of(source.kind, recipe.documents)
                    troubles.add(trouble, is_document=format.is_one_document)
                yield source

        sources = make_table(Source, described_sources())
    troubles.check(len(sources))
    if output is not None:
        passed_over.datasets[:] = [place for place in passed_over.datasets if not _is_same(place, output)]
    said = notes(recipe, root, sources, passed_over, troubles.unread, troubles.quarantined)
    return Listing(root, sources, extents, tuple(said))


def _find_files(recipe: Recipe, output: str | None, passed_over: PassedOver) -> tuple[dict[str, str], dict[str, Pin]]:
    """The split of each file ("" for train and what is divided later), and the pins that listings of stores tell."""
    found: dict[str, str] = {}
    pins: dict[str, Pin] = {}
    inside = None if output is None else os.path.join(output, "")
    for split, arguments in (("", recipe.sources), ("val", recipe.val_sources)):
        for path, pin in _expand(arguments, passed_over, any_ending=recipe.documents not in BY_ROW):
            if inside is not None and path.startswith(inside) and not path.startswith(f"{inside}{IN_WORKSPACE}/"):
                continue
            if found.setdefault(path, split) != split:
                raise RecipeError(f"{path} is a source and a validation source", hint="name it once")
            if pin is not None:
                pins[path] = pin
    if not found:
        others = " but what lies in the output" if recipe.sources else ""
        raise RecipeError(f"there are no sources{others}", hint="give files, folders or globs, outside of the output")
    return found, pins


def _check_apart(splits: Mapping[str, str]) -> None:
    """Refuse a validation source that is also a source by another name: a link would leak it into training."""
    seen: dict[tuple[int, int], str] = {}
    for path, split in splits.items():
        with contextlib.suppress(OSError):  # its reader reports the error
            about = os.stat(path)
            other = seen.setdefault((about.st_dev, about.st_ino), path)
            if splits[other] != split:
                raise RecipeError(f"{path} and {other} are the same file, one of them for validation", hint="drop one")


@dataclass(frozen=True, slots=True)
class _Troubles:
    """Errors of sources: those that cannot be read, files that are not text, and single documents that are not."""

    unread: list[SourceError] = field(default_factory=list)
    not_text: list[SourceError] = field(default_factory=list)
    quarantined: list[SourceError] = field(default_factory=list)

    def add(self, trouble: SourceError, *, is_document: bool) -> None:
        if not isinstance(trouble, NotTextError):
            self.unread.append(trouble)
        else:
            (self.quarantined if is_document else self.not_text).append(trouble)

    def check(self, num_sources: int) -> None:
        """Raise an error if no source can be read, or some are not text."""
        if len(self.unread) == num_sources:
            raise self.unread[0]
        found = self.quarantined if len(self.quarantined) == num_sources else self.not_text
        if found:
            named = "; ".join(error.message for error in found[:_MAX_NAMED])
            more = f"; and {len(found) - _MAX_NAMED:,} more are not text" if len(found) > _MAX_NAMED else ""
            raise RecipeError(f"{named}{more}", hint=found[0].hint)


def _is_same(folder: str, output: str) -> bool:
    return os.path.realpath(folder) == os.path.realpath(output)


def _name(path: str, root: str) -> str:
    prefix = os.path.join(root, "")
    return path.removeprefix(prefix) if path.startswith(prefix) else os.path.relpath(path, root)


def _check_utf8(path: str, *, hint: str) -> None:
    """Refuse a name that cannot be stored in records."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise SourceError(f"the name of {path!r} is not UTF-8", hint=hint) from None


def _expand(arguments: Sequence[str], passed_over: PassedOver, *, any_ending: bool) -> Iterator[tuple[str, Pin | None]]:
    """Files, and their pins where these are known already.

    Files of unknown kinds in folders are counted in `passed_over`.
    """
    for argument in arguments:
        path = os.path.abspath(os.path.expanduser(argument))
        if is_url(argument):
            yield from _expand_url(argument, passed_over, any_ending=any_ending)
        elif os.path.isdir(path) and globs.is_dataset(path):
            raise RecipeError(
                f"{argument} is a dataset, finished or not, and not a folder of texts",
                hint="name the sources that it was made from, or some of its files by a pattern",
            )
        elif os.path.isdir(path):
            files = _chosen(argument, passed_over, partial(_walk, path), any_ending=any_ending)
            yield from ((file, None) for file in files)
        elif os.path.exists(path):
            yield path, None
        else:
            matches = globs.matches(path, passed_over.datasets)
            dataset = plain_name(argument)
            if not matches and dataset and not _is_a_path(argument):
                try:
                    yield from list(_expand_url(str(dataset), passed_over, any_ending=any_ending))
                except (SourceError, StorageError) as error:
                    said = f"{argument!r} is not a local path; as a dataset of the hub: {error.message}"
                    raise type(error)(said, hint=error.hint) from None
            elif not matches:
                raise RecipeError(
                    f"no source matches {argument!r}", hint=f"check the path; quote globs{_hub_hint(argument)}"
                )
            yield from ((match, None) for match in matches)


def _hub_hint(argument: str) -> str:
    """What an argument that names nothing could be."""
    if argument.count(" ") >= _MANY_SPACES or "\n" in argument:
        return "; `sources` names files: for texts, give `tokenmill.prepare` a function that returns them"
    if dataset := plain_name(argument):
        return f"; {dataset} would be one on the hub"
    name, _, config = argument.partition(":")
    if not name.replace("_", "").replace("-", "").isalnum():
        return ""
    owner = _OWNERS.get(name)
    known = f"{owner}{':' if config else ''}{config}" if owner else f"ORGANIZATION/{argument}"
    return f"; datasets of the hub are named with their organization: {known}"


def _is_a_path(argument: str) -> bool:
    """Whether an argument that looks like a dataset of the hub rather names a missing local file."""
    return os.path.splitext(argument)[1] in (*KINDS, *COMPRESSIONS) or os.path.isdir(argument.partition("/")[0])


def _expand_url(argument: str, passed_over: PassedOver, *, any_ending: bool) -> Iterator[tuple[str, Pin]]:
    """The objects that a URL names, by the same rules as for folders and files."""
    found, is_prefix = expand(argument)
    if not found:
        raise RecipeError(f"no source matches {argument!r}", hint="check the URL; quote globs")
    if is_prefix:
        start = "" if is_hub(argument) else argument

        def files_in(noted: PassedOver, is_wanted: IsWanted) -> list[str]:
            return [path for path in found if _is_wanted(path.removeprefix(start), noted, is_wanted)]

        chosen = _chosen(argument, passed_over, files_in, any_ending=any_ending)
        found = {path: found[path] for path in chosen}
    for path, pin in sorted(found.items(), key=lambda item: item[0]):
        check_name(path)
        yield path, pin


IsWanted = Callable[[str], bool]


def _chosen(
    argument: str,
    passed_over: PassedOver,
    files_in: Callable[[PassedOver, IsWanted], Iterable[str]],
    *,
    any_ending: bool,
) -> list[str]:
    """The files of a folder that are sources: those of first choice, or else those of second choice."""
    kinds: tuple[IsWanted, ...] = (is_known, partial(is_known, is_second=True))
    for is_wanted in ((lambda name: True),) if any_ending else kinds:
        noted = PassedOver()
        if files := list(files_in(noted, is_wanted)):
            passed_over.endings.update(noted.endings)
            passed_over.datasets.extend(noted.datasets)
            return files
    raise RecipeError(
        f"{argument} has no files of a known kind ({KNOWN}, also compressed)",
        hint="name the files with a glob, or use `documents='files'`",
    )


def _walk(folder: str, passed_over: PassedOver, is_wanted: IsWanted) -> Iterator[str]:
    """The files of a folder, without those of datasets in it."""
    for parent, folders, files in globs.walk(folder):
        if globs.is_dataset(parent):
            passed_over.datasets.append(parent)
            folders.clear()
            continue
        folders[:] = [name for name in folders if not globs.is_passed_over(name)]
        for name in files:
            if _is_wanted(name, passed_over, is_wanted):
                yield os.path.join(parent, name)


def _is_wanted(name: str, passed_over: PassedOver, is_wanted: IsWanted) -> bool:
    """Whether a file in a folder is a source: not hidden, and of a kind that is wanted."""
    *folders, last = name.split("/")
    # Hugging Face stores computed results next to a dataset.
    is_cache = last.startswith("cache-") and last.endswith(".arrow")
    if last.startswith(".") or is_cache or any(map(globs.is_passed_over, folders)):
        return False
    if is_wanted(last):
        return True
    if not is_companion(last):
        passed_over.endings[ending_of(last)] += 1
    return False


def _describe(
    named: tuple[str, str],
    *,
    splits: Mapping[str, str],
    pins: Mapping[str, Pin],
    recipe: Recipe,
    wanted: Sequence[str] = (),
    to_check: Collection[str] = (),
) -> tuple[Source, Extent, SourceError | None]:
    """A source, where it can be cut, and the error if it cannot be read; its unit will fail with it.

    `wanted` are the columns that the filter asks for.
    """
    name, path = named
    _check_utf8(path, hint="rename the file")
    found = pins.get(path) or find(path)
    check_kind(path, documents=recipe.documents)
    kind, compression = read_as(path, documents=recipe.documents)
    if recipe.documents in BY_ROW and is_plain_json(path):
        from tokenmill.sources.json_array import kind_of_json

        kind = kind_of_json(path, compression, found, text_column=recipe.text_column, template=recipe.template)
    source = Source(
        name=name.replace(os.sep, "/"),
        kind=kind,
        compression=compression,
        bytes=found.bytes,
        modified=found.modified,
        split=splits[path],
        text={},
        etag=found.etag,
    )
    format = format_of(kind, recipe.documents)
    if not format.has_columns:  # it is planned without being opened
        if wanted:
            raise no_filter_column(wanted[0], where=path, has="all of the file is text")
        extent = format.extent(path, source)
        is_cut = extent.divisible and source.bytes >= _least_unit_bytes(recipe)
        return source, extent, _not_text(path, source, format) if is_cut or path in to_check else None
    with naming_what_needs_memory(lambda: path):  # never a trouble of the source, which would be planned otherwise
        for _ in range(_TRIES):
            try:
                rule = format.find_text(path, source, text_column=recipe.text_column, template=recipe.template)
                if wanted:
                    rule = with_filter_columns(rule, wanted, format.columns(path, source), where=path)
                planned = replace(source, text=rule)
                return planned, format.extent(path, planned), None
            except NotTextError as error:
                trouble: SourceError = error
                break
            except SourceError as error:
                trouble = error
    if format.has_sections:
        with contextlib.suppress(SourceError):
            trouble = wrong_kind(path, pin_of(source)) or trouble
    return replace(source, text=UNREAD), Extent(text_bytes=max(1, source.expanded_bytes)), trouble


def _least_unit_bytes(recipe: Recipe) -> int:
    """Smaller files are whole in one unit, which reads and checks their first bytes."""
    return recipe.unit_bytes or default_unit_bytes(0, sample=recipe.unit_sample)


def _not_text(path: str, source: Source, format: SourceFormat) -> NotTextError | None:
    """The error for a text file that is not text. Its unit reports any other error."""
    try:
        format.check(path, source)
    except NotTextError as error:
        return error
    except SourceError:
        pass
    return None


def _root(paths: list[str]) -> str:
    if any(is_url(path) for path in paths):
        return common_root(paths)
    return os.path.commonpath({os.path.dirname(path) for path in paths})


_SPLITS_FILE = "dataset_dict.json"
_MOST = 10


@dataclass(frozen=True, slots=True)
class PassedOver:
    """What was skipped in folders: the number of files by ending, and the paths of datasets."""

    endings: Counter[str] = field(default_factory=Counter)
    datasets: list[str] = field(default_factory=list)


def notes(
    recipe: Recipe,
    root: str,
    sources: Iterable[Source],
    passed_over: PassedOver,
    unread: Sequence[SourceError],
    not_text: Sequence[SourceError] = (),
) -> Iterator[str]:
    """One sentence each. `unread` are the errors of sources; each of `not_text` is a document for quarantine."""
    for argument in (*recipe.sources, *recipe.val_sources):
        if is_hub(root):
            yield f"{argument} is taken from the hub: {root}"
        elif os.path.isfile(os.path.join(argument, _SPLITS_FILE)):
            yield f"{argument} has several splits, and all of them are used: name the folders inside to choose"
    if endings := passed_over.endings:
        yield f"{_files(endings.total())} of other kinds in the folders passed over: {count_endings(endings)}"
    yield from (f"the dataset {place} among the sources is passed over" for place in passed_over.datasets[:_MOST])
    yield from _text_notes(recipe, root, sources)
    if not_text:
        yield f"{_files(len(not_text))} will be quarantined, like this one: {not_text[0].message}"
    yield from (error.message for error in unread[:_MOST])
    if len(unread) > _MOST:
        yield f"and {len(unread) - _MOST} more that cannot be read"


def _text_notes(recipe: Recipe, root: str, sources: Iterable[Source]) -> Iterator[str]:
    """Where a text was found that could be meant otherwise."""
    unknown: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    examples: dict[str, Source] = {}
    for source in sources:
        if recipe.documents in BY_ROW and kind_of(source.name)[0] is None:
            (whole if source.kind == "document" else unknown)[ending_of(source.name)] += 1
        if source.text and recipe.text_column is None and recipe.template is None:
            rules[json.dumps(source.text)] += 1
            examples.setdefault(json.dumps(source.text), source)
    if unknown:
        yield f"{_files(unknown.total())} of unknown kind read as text, a document a line: {count_endings(unknown)}"
    if whole:
        said = f"each of {_files(whole.total())} is one document: {count_endings(whole)}"
        yield f"{said}; `documents='lines'` makes it one a line"
    for rule, count in rules.most_common():
        yield from (f"the text of {_files(count)} is {what}" for what in _guessed(json.loads(rule)))
        yield from _left_out(os.path.join(root, examples[rule].name), examples[rule], recipe)


def _left_out(path: str, source: Source, recipe: Recipe) -> Iterator[str]:
    """What is not text in the first conversations of a source."""
    name = source.text.get("turns") or (source.text["chosen"][-1] if "chosen" in source.text else None)  # type: ignore[index]  # a list
    if name is None:
        return
    # A template shows any value as JSON.
    whole = replace(source, text={"template": f"{{{name}}}"})
    part = SourceSlice(path=path, index=0, source=whole)
    counts: Counter[str] = Counter()
    texts: list[str] = []
    with contextlib.suppress(SourceError, ValueError):
        read = format_of(source.kind, recipe.documents).read(
            part, limit=recipe.max_document_bytes, batch_bytes=_LOOK_BYTES
        )
        first = next(iter(read), None)
        texts = [] if first is None else first.text.to_pylist()[:_LOOK_ROWS]
        for text in texts:
            counts.update(parts_left_out(json.loads(text)))
    if counts:
        parts = ", ".join(f"{part} in {count:,}" for part, count in counts.most_common(_MAX_NAMED))
        yield f"parts that are not text are left out; of the first {len(texts):,} in {source.name}: {parts}"


def _guessed(rule: Rule) -> Iterator[str]:
    """How the text is made, if it is not simply one column."""
    if "join" in rule:
        parts = (f"{name[:-1]} (if it is there)" if name.endswith("?") else name for name in rule["join"])
        yield f"{' and '.join(parts)}, with a blank line between"
    elif "turns" in rule:
        yield f"what is said in {rule['turns']}, with a blank line between the turns; who says it is left out"
    elif "chosen" in rule:
        *asked, chosen = rule["chosen"]
        behind = f", behind {asked[0]} unless it repeats that" if asked else ""
        yield f"{chosen}, the preferred answer{behind}; rejected is left out"


def _files(count: int) -> str:
    return f"{count:,} file" if count == 1 else f"{count:,} files"
