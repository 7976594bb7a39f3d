"""The option `layout`: exports a finished build into a folder inside the dataset, named after the layout.

With `only_layout` the dataset is removed afterwards, so that its tokens are on the disk once:

    build -> export -> read back and compare -> .build/only_layout.json -> remove dataset.json, then its files

Until the export was compared the dataset is whole; from the record on, the export is what counts. A call that was
interrupted between the two continues with the removal.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any

from tokenmill import records
from tokenmill.arguments import Watcher
from tokenmill.build import workspace
from tokenmill.build.pipeline import BuildOptions, build
from tokenmill.build.preflight import Estimate
from tokenmill.build.resolve import resolve_build
from tokenmill.dataset import manifest as manifests
from tokenmill.dataset.bin_idx import dtype_for
from tokenmill.dataset.folder_kinds import ONLY_LAYOUT
from tokenmill.dataset.manifest import Manifest
from tokenmill.errors import DatasetError, OutputError, RecipeError, TokenmillError, from_record, to_record
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
from tokenmill.formats.resumable import recorded_digests
from tokenmill.recipe import Recipe
from tokenmill.storage.base import Storage, require_space, same_disk
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import locked, telling
from tokenmill.storage.memory_maps import fast_digest
from tokenmill.storage.output import Digest
from tokenmill.tokenizers.spec import resolve
from tokenmill.units.receipts import REJECTS


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
        need = format_bytes_of(self.layout, dtype, num_tokens, num_documents, self.options)
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


def build_and_export(
    recipe: Recipe, folder: Storage, options: BuildOptions, layout: str, *, only_layout: bool, workers: int
) -> tuple[Manifest, bool, ExportResult]:
    """Build a dataset and export it; whether it was complete already. With `only_layout` the dataset is removed."""
    if only_layout and options.watch is not None:
        options.watch({"kind": "note", "message": GIVEN_UP})
    if only_layout and not options.restart and folder.exists(ONLY_LAYOUT):
        return _find_only_layout(recipe, folder, layout, options.watch)
    found, already_complete = build(recipe, folder, options)
    try:
        export = export_layout(
            folder.path,
            layout,
            workers=workers,
            scratch=options.scratch,
            restart=options.restart,
            watch=options.watch,
        )
    except DatasetError:
        if not only_layout or not folder.exists(ONLY_LAYOUT):
            raise
        return _find_only_layout(recipe, folder, layout, options.watch)  # another rank was faster
    if only_layout:
        _keep_only_layout(folder, layout, found, options.watch)
    return found, already_complete, export


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


GIVEN_UP = (
    "only the export is kept, which can be verified; given up with the dataset: repair, comparing with the sources, "
    "provenance, other exports"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyLayout:
    """The record that of a dataset only an export is kept. `plan` is the fingerprint of its plan."""

    layout: str
    options: dict[str, Any]
    plan: str
    manifest: Manifest


def _keep_only_layout(folder: Storage, text: str, found: Manifest, watch: Watcher | None) -> None:
    """Remove a dataset whose export is complete, after the files of the export were read back and compared."""
    name, options = parse_format(text)
    _compare_export(folder, name, hint="run the same command again: it writes what is damaged, and keeps the rest")
    record = OnlyLayout(layout=name, options=options.given(), plan=found.fingerprint, manifest=found)
    with locked(folder, tell=telling(watch)):
        folder.replace(ONLY_LAYOUT, records.seal(record))
        _remove_dataset(folder)


def _find_only_layout(
    recipe: Recipe, folder: Storage, text: str, watch: Watcher | None
) -> tuple[Manifest, bool, ExportResult]:
    """The export that was kept of a dataset, checked, and the manifest that the dataset had."""
    begin = time.monotonic()
    plan = resolve_build(recipe, output=folder.path).plan
    record = records.unseal(OnlyLayout, folder.read(ONLY_LAYOUT), where=folder.at(ONLY_LAYOUT))
    name, options = parse_format(text)
    before = (record.layout, record.options, record.plan)
    if before != (name, options.given(), plan.fingerprint):
        is_same = before[:2] == (name, options.given())
        what = "of other sources or options" if is_same else f"to {record.layout} with other options"
        hint = "choose another output, or make the dataset again with `restart=True`"
        raise OutputError(f"{folder.path} has only an export {what}", hint=hint)
    with locked(folder, tell=telling(watch)):
        _remove_dataset(folder)
    files = _compare_export(folder, name, hint="its dataset was removed: make it again with `restart=True`")
    seconds = time.monotonic() - begin
    found = ExportResult(
        output=folder.at(name), layout=name, files=files, notes=(), already_complete=True, seconds=seconds
    )
    return record.manifest, True, found


def _compare_export(folder: Storage, name: str, *, hint: str) -> dict[str, Digest]:
    """The files of the export, each as its record says."""
    target = Folder(folder.at(name), folder.fs)
    files = recorded_digests(target)
    for file, digest in files.items():
        if target.size_of(file) != digest.bytes or fast_digest(target, file) != digest:
            raise DatasetError(f"{target.at(file)} is missing or damaged", hint=hint)
    if not files:
        raise DatasetError(f"{target.path} has no record of its files", hint=hint)
    return files


def _remove_dataset(folder: Storage) -> None:
    """Remove all but the export, the tokenizer, the rejects and the record. `dataset.json` is the first to go."""
    workspace.start_over(folder, but=(ONLY_LAYOUT, REJECTS, *manifests.TOKENIZER_FILES))
