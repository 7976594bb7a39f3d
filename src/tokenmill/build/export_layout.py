"""The option `layout`: exports a finished build into a folder inside the dataset, named after the layout."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from tokenmill.arguments import Watcher
from tokenmill.build.preflight import Estimate
from tokenmill.dataset.bin_idx import dtype_for
from tokenmill.errors import OutputError, RecipeError, TokenmillError, from_record, to_record
from tokenmill.formats.base import (
    Options,
    Outline,
    check_num_files,
    check_outline,
    format_bytes_of,
    load_format,
    parse_format,
)
from tokenmill.formats.convert import export
from tokenmill.formats.results import ExportResult
from tokenmill.recipe import Recipe
from tokenmill.storage.base import Storage, require_space, same_disk
from tokenmill.storage.local import Folder
from tokenmill.tokenizers.spec import resolve


@dataclass(frozen=True, slots=True)
class LayoutExport:
    """The export that follows a build."""

    layout: str
    options: Options
    outline: Outline

    def bytes_needed(self, folder: Storage | None, dtype: str, found: Estimate, share: float) -> int:
        """The bytes that the export of a share of the estimate will still write, if it is on the dataset's disk.

        Refuses what the export would refuse because of the number of tokens, and too little space on another disk.
        """
        num_tokens, num_documents = round(found.tokens * share), round(found.documents * share)
        check_num_files(self.layout, self.options, [num_tokens])
        if found.tokens:  # the estimate may be wrong, and a build must not be refused that could be exported
            most = 2 * num_tokens + found.error
            load_format(self.layout).check(self.options, replace(self.outline, dtype=dtype, most_tokens=most))
        need = format_bytes_of(self.layout, dtype, num_tokens, num_documents)
        if folder is None:
            return need
        target = Folder(folder.at(self.layout), folder.fs)
        if same_disk(target, folder):
            return max(0, need - _bytes_in(target))
        require_space(target, need - _bytes_in(target))
        return 0


def plan_layout_export(text: str, recipe: Recipe) -> LayoutExport:
    """The export that `layout` asks for. Raises before the build what the export would raise after it."""
    name, options = parse_format(text)
    if taken := [split for split in recipe.splits if split.lower() == name]:
        raise RecipeError(
            f"layout: {name} would be written to the folder of the split {taken[0]!r}",
            hint=f"give the split another name, or export afterwards: `tokenmill.export('OUT', 'DIR', to={name!r})`",
        )
    spec = resolve(recipe.tokenizer, eot_token=recipe.eot_token)
    outline = Outline(dtype=dtype_for(spec.vocab_size), eot=recipe.eot, splits=frozenset(recipe.splits))
    check_outline(name, options, outline, vocab_size=spec.vocab_size, where="this recipe")
    return LayoutExport(name, options, outline)


def _bytes_in(folder: Storage) -> int:
    parents = [name for name in folder.names() if name != ".build" and folder.size_of(name) is None]
    return sum(sum(folder.sizes(parent).values()) for parent in ("", *parents))


def export_layout(
    output: str,
    text: str,
    *,
    workers: int,
    scratch: str | os.PathLike[str] | None,
    restart: bool,
    watch: Watcher | None,
) -> ExportResult:
    """Export the dataset at `output` into a folder inside it."""
    name, options = parse_format(text)
    target = os.path.join(output, name)
    try:
        return export(
            output,
            target,
            to=name,
            workers=workers,
            scratch=scratch,
            restart=restart,
            watch=watch,
            **options.given(),
        )
    except TokenmillError as error:
        done = f"the dataset at {output} is finished and complete, but its export to {name} is not"
        if isinstance(error, RecipeError) and not isinstance(error, OutputError):
            hint = f"{error.hint}; to export the dataset with other options: {_call(output, target, to=name)}"
        else:
            hint = f"{error.hint}; to resume the export alone: {_call(output, target, to=name, **options.given())}"
        raise from_record({**to_record(error), "message": f"{done}: {error.message}", "hint": hint}) from None


def _call(output: str, target: str, **options: object) -> str:
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"`tokenmill.export({output!r}, {target!r}{given})`"
