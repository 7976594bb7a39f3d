"""prepare --layout: the files of a layout beside the dataset, in a folder of the layout's name inside it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tokenmill.build.preflight import Estimate
from tokenmill.dataset.bin_idx import dtype_for
from tokenmill.errors import OutputError, RecipeError, TokenmillError, from_record, to_record
from tokenmill.formats.base import (
    ExportResult,
    Options,
    Outline,
    check_num_files,
    check_outline,
    format_bytes_of,
    load_format,
    parse_format,
)
from tokenmill.formats.convert import export
from tokenmill.formats.resumable import Watcher
from tokenmill.recipe import Recipe
from tokenmill.storage.base import require_space, same_disk
from tokenmill.storage.local import Folder
from tokenmill.tokenizers.spec import resolve


@dataclass(frozen=True, slots=True)
class Beside:
    """An export that a build is to be followed by."""

    layout: str
    options: Options
    outline: Outline

    def bytes_needed(self, folder: Folder | None, dtype: str, found: Estimate, share: float) -> int:
        """How many bytes the export of a share of what was estimated will still write on the disk of the dataset.

        What it would refuse because of their number it refuses now.
        """
        num_tokens, num_documents = round(found.tokens * share), round(found.documents * share)
        check_num_files(self.layout, self.options, [num_tokens])
        if found.tokens:  # the estimate may be wrong, and a build must not be refused that could be exported
            most = 2 * num_tokens + found.error
            load_format(self.layout).check(self.options, replace(self.outline, dtype=dtype, most_tokens=most))
        need = format_bytes_of(self.layout, dtype, num_tokens, num_documents)
        if folder is None:
            return need
        place = Folder(folder.at(self.layout), folder.fs)
        if same_disk(place, folder):
            return max(0, need - _bytes_in(place))
        require_space(place, need - _bytes_in(place))
        return 0


def beside(text: str, recipe: Recipe) -> Beside:
    """The export that `--layout` asks for. Refuses what the export would refuse after the build."""
    name, options = parse_format(text)
    if taken := [split for split in recipe.splits if split.lower() == name]:
        raise RecipeError(
            f"layout: {name} would be written to the folder of the split {taken[0]!r}",
            hint=f"give the split another name, or export afterwards: tokenmill export OUT --to {name} DIR",
        )
    spec = resolve(recipe.tokenizer, eot_token=recipe.eot_token)
    outline = Outline(dtype=dtype_for(spec.vocab_size), eot=recipe.eot, splits=frozenset(recipe.splits))
    check_outline(name, options, outline, vocab_size=spec.vocab_size, where="what is asked for")
    return Beside(name, options, outline)


def _bytes_in(place: Folder) -> int:
    parents = [name for name in place.names() if name != ".build" and place.size_of(name) is None]
    return sum(sum(place.sizes(parent).values()) for parent in ("", *parents))


def export_beside(
    output: str,
    text: str,
    *,
    workers: int,
    scratch: str | os.PathLike[str] | None,
    restart: bool,
    watch: Watcher | None,
) -> ExportResult:
    """Export the dataset at `output`, into it."""
    name, options = parse_format(text)
    place = os.path.join(output, name)
    try:
        return export(
            output,
            place,
            to=name,
            workers=workers,
            scratch=scratch,
            restart=restart,
            watch=watch,
            **options.given(),
        )
    except TokenmillError as error:
        done = f"the dataset at {output} is finished and complete, but its export to {name} is not"
        again = ["tokenmill", "export", output, place, "--to", name]
        if isinstance(error, RecipeError) and not isinstance(error, OutputError):
            hint = f"{error.hint}; to export the dataset with other options: {shlex.join(again)} ..."
        else:
            hint = f"{error.hint}; to resume the export alone: {shlex.join([*again, *_as_flags(options)])}"
        raise from_record({**to_record(error), "message": f"{done}: {error.message}", "hint": hint}) from None


def _as_flags(options: Options) -> Iterator[str]:
    for name, value in options.given().items():
        if value is not False:
            yield f"--{name.replace('_', '-')}"
            yield from () if value is True else (str(value),)
