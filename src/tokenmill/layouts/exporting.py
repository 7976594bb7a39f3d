"""export: a dataset's tokens as the files of a layout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenmill import arguments, records
from tokenmill.cores import resolve_workers
from tokenmill.data.dataset import Dataset
from tokenmill.data.dataset import open as open_dataset
from tokenmill.errors import RecipeError
from tokenmill.layouts.expecting import Expected, compare
from tokenmill.layouts.registry import SIZES, check_needs, check_num_files, check_options, load_layout
from tokenmill.layouts.shape import Options
from tokenmill.layouts.transfer import Watcher, check_free, make_request, start_over, transfer
from tokenmill.sizes import parse_size
from tokenmill.storage import Digest, local_folder

RECORD = ".build/export.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What an export is, written last: where its tokens came from, and what every file must hash to."""

    layout: str
    options: dict[str, Any]
    dataset: str
    notes: tuple[str, ...]
    files: dict[str, Digest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A finished export. `already_complete` means that all files stood, and hashed to what they should."""

    output: str
    layout: str
    files: dict[str, Digest]
    notes: tuple[str, ...]
    already_complete: bool
    seconds: float

    @property
    def num_bytes(self) -> int:
        return sum(digest.bytes for digest in self.files.values())


def export(
    dataset: str | os.PathLike[str] | Dataset,
    output: str | os.PathLike[str],
    *,
    to: str,
    workers: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    restart: bool = False,
    watch: Watcher | None = None,
    expected: Mapping[str, Expected] | None = None,
    **options: Any,
) -> Exported:
    """Write a dataset as the files of the layout `to`. Called again, it goes on where it stopped.

    `dataset` may also be token files of another layout. `options` are those of the layout: `shard_size` (tokens),
    `seq_len`, `order`, `seed`, `name`, ... `expected` are checksums that Templar's files must have.
    """
    begin = time.monotonic()
    arguments.text("to", to, hint="name a layout, like nanogpt")
    arguments.function_or_none("watch", watch)
    restart, folder = arguments.flag("restart", restart), local_folder(output, name="output")
    source = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
    layout, wanted = load_layout(to), check_options(to, _options(options))
    manifest = source.manifest
    check_needs(
        to,
        dtype=manifest.dtype,
        vocab_size=manifest.tokenizer["vocab_size"],
        eot=manifest.identity.get("eot", "none"),
        where=source.path,
    )
    if expected and (to != "templar" or "train" not in source.splits):
        raise RecipeError(f"{to} has no tokens.bin to compare", hint="checksums are expected of templar's alone")
    check_num_files(to, wanted, (source[name].num_tokens for name in source.splits))
    planned = layout.plan(source, wanted)
    if not planned.parts:
        raise RecipeError(f"{source.path} has no tokens to export", hint="check the dataset")
    request = make_request(layout=to, options=wanted.given(), dataset=manifest.fingerprint, **source.pins())
    if restart:
        start_over(folder)
    check_free(folder, request, what="export")
    if watch is not None:
        for note in planned.notes:
            watch({"kind": "note", "message": note})
    done = transfer(
        folder,
        request,
        planned.parts,
        planned.finish,
        threads=resolve_workers(workers),
        scratch=None if scratch is None else local_folder(scratch, name="scratch").path,
        watch=watch,
    )
    record = Record(
        layout=to,
        options=wanted.given(),
        dataset=manifest.fingerprint,
        notes=planned.notes,
        files=done.files,
    )
    sealed = records.seal(record)
    stood = folder.exists(RECORD) and folder.read(RECORD) == sealed
    folder.write(RECORD, sealed)
    compare(done.files, expected or {}, manifest.dtype)
    return Exported(
        output=folder.path,
        layout=to,
        files=done.files,
        notes=planned.notes,
        already_complete=stood and done.num_kept == len(planned.parts),
        seconds=time.monotonic() - begin,
    )


def _options(given: dict[str, Any]) -> Options:
    known = Options.__dataclass_fields__
    if unknown := sorted(given.keys() - known.keys()):
        raise RecipeError(f"there is no option {unknown[0]!r}", hint=f"there are {', '.join(known)}")
    wanted = {name: value for name, value in given.items() if value is not None}
    readers: dict[str, Callable[[Any], Any]] = {name: partial(parse_size, name=name, of="tokens") for name in SIZES}
    readers |= {name: partial(arguments.text, name) for name in ("name", "order")}
    readers |= {"seed": partial(arguments.whole, "seed"), "templar_compat": partial(arguments.flag, "templar_compat")}
    return Options(**{name: readers[name](value) for name, value in wanted.items()})
