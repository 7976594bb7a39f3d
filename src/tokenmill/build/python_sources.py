"""Texts from Python: what a function or a `datasets.Dataset` gives, stored in `.build/sources` before the build.

    function() -> "text", {"text": ...}, ...  ->  .build/sources/00000.jsonl  00001.jsonl  ...  ->  sources of the build

Each file is durable before the next one is begun, and is never written again. A resumed build calls the function again
and compares what it gives with the files, so other texts are an error and never half of a dataset.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tokenmill import arguments
from tokenmill.build import workspace
from tokenmill.errors import RecipeError, SourceChangedError
from tokenmill.recipe import columns_of_filter, load_filter
from tokenmill.sources.text_columns import columns_to_read, find_rule, with_filter_columns
from tokenmill.storage.base import Storage

PART_BYTES = 32_000_000
_HINT = "a function gives texts (str) or rows (dict), and the same ones each time that it is called"


def store(
    given: Any, folder: Storage, *, text_column: str | None, template: str | None, filter: object, restart: bool
) -> list[str]:
    """Store the texts, and give the paths of their files. Texts that an earlier call has stored are compared."""
    workspace.check_ours(folder)
    if restart:
        folder.remove_tree(workspace.SOURCES)
    folder.make(workspace.SOURCES)
    folder.sweep(workspace.SOURCES)
    stored = [name for name in folder.names(workspace.SOURCES) if name.endswith(".jsonl")]
    names: list[str] = []
    first = 0
    for lines in _parts(_rows(given, text_column, template, filter)):
        name = f"{len(names):05d}.jsonl"
        path, data = f"{workspace.SOURCES}/{name}", b"".join(lines)
        if name not in stored:
            folder.write(path, data)
        elif folder.digest(path).sha256 != hashlib.sha256(data).hexdigest():
            raise _changed(folder, f"one of the texts {first:,} to {first + len(lines) - 1:,} is another one")
        names.append(name)
        first += len(lines)
    if len(stored) > len(names):
        raise _changed(folder, f"there are only {first:,}")
    if not names:
        raise RecipeError("the function gave no texts", hint=_HINT)
    return [folder.at(f"{workspace.SOURCES}/{name}") for name in names]


def _changed(folder: Storage, what: str) -> SourceChangedError:
    return SourceChangedError(
        f"the texts are not those with which {folder.path} was begun: {what}",
        hint="give the same texts in the same order, or start over with `restart=True`",
    )


def _rows(given: Any, text_column: str | None, template: str | None, filter: object) -> Iterable[object]:
    if isinstance(given, Mapping):
        raise RecipeError(f"the sources are several splits: {', '.join(map(str, given))}", hint="give one of them")
    if names := getattr(given, "column_names", None):
        rule = find_rule(names, text_column=text_column, template=template, where="the dataset")
        function = load_filter(filter) if isinstance(filter, str) else filter
        if callable(function) and (wanted := columns_of_filter(function)):
            rule = with_filter_columns(rule, wanted, names, where="the dataset")
        return given.select_columns(columns_to_read(rule))  # type: ignore[no-any-return]  # a datasets.Dataset
    rows = given() if callable(given) else given
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise RecipeError(f"the function gave {arguments.show(rows)}", hint=_HINT)
    return rows


def _parts(rows: Iterable[object]) -> Iterator[Sequence[bytes]]:
    """The rows as lines of JSON, about `PART_BYTES` at a time."""
    lines: list[bytes] = []
    size = 0
    for number, row in enumerate(rows):
        if not isinstance(row, str | Mapping):
            raise RecipeError(f"text {number:,} is {arguments.show(row)}", hint=_HINT)
        line = _line({"text": row} if isinstance(row, str) else dict(row), number)
        if lines and size + len(line) > PART_BYTES:
            yield lines
            lines, size = [], 0
        lines.append(line)
        size += len(line)
    if lines:
        yield lines


def _line(row: dict[str, Any], number: int) -> bytes:
    try:
        return msgspec.json.encode(row) + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair: the reader quarantines this text
        return json.dumps(row, default=str).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise RecipeError(f"row {number:,}: {error}", hint="leave the field out, or make it a text") from None
