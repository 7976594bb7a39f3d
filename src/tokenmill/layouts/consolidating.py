"""consolidate: Templar's shards, wherever they came from, joined to tokens.bin with the ids of their samples."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill import records
from tokenmill.cores import resolve_workers
from tokenmill.data.bare import BareDataset, Hints, open_bare
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.layouts.exporting import Exported
from tokenmill.layouts.templar import consolidated
from tokenmill.layouts.transfer import Watcher, check_free, make_request, transfer
from tokenmill.shards.layout import numpy_dtype
from tokenmill.storage import local_folder

NAMES = {"tokens": "tokens.bin", "sample_ids": "sample_ids.bin"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a file must be. `elements` are tokens or ids; -1 if it does not matter."""

    sha256: str
    elements: int = -1


def read_expected(given: Sequence[str], checksums: str | os.PathLike[str] | None) -> dict[str, Expected]:
    """What was expected on the command line and in a file, by name: tokens, sample_ids."""
    expected: dict[str, Expected] = {}
    if checksums is not None:
        try:
            found = records.parse(Path(checksums).read_bytes(), where=str(checksums))
            expected = {
                str(name): Expected(sha256=str(one["sha256"]), elements=int(one.get("elements", -1)))
                for name, one in found.items()
            }
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecipeError(f"{checksums} holds no checksums: {error}", hint=_FILE_HINT) from None
    for text in given:
        name, _, rest = text.partition("=")
        sha, _, count = rest.partition(":")
        if not sha or (count and not count.isdecimal()):
            raise RecipeError(f"{text!r} is nothing to expect", hint="write it like tokens=SHA256:COUNT")
        expected[name] = Expected(sha256=sha, elements=int(count) if count else -1)
    if unknown := sorted(expected.keys() - NAMES.keys()):
        raise RecipeError(f"there is no {unknown[0]!r} to expect", hint=f"there are {', '.join(NAMES)}")
    return expected


def consolidate(
    data_root: str | os.PathLike[str],
    seq_len: int = 2048,
    *,
    expected: Mapping[str, Expected] | None = None,
    compat: bool = False,
    workers: int | None = None,
    watch: Watcher | None = None,
) -> Exported:
    """Write tokens.bin and sample_ids.bin beside the shards. Called again, it checks them."""
    begin = time.monotonic()
    folder = local_folder(data_root)
    shards = [name for name in folder.names() if name.startswith("train_") and name.endswith(".npy")]
    if not shards:
        raise DatasetError(f"{folder.path} has no train_000000.npy", hint="give the folder with Templar's shards")
    source = open_bare(folder.path, Hints(layout="templar"))
    _check_numbers(shards, folder.path)
    parts = consolidated(source["train"], seq_len, compat=compat)
    request = make_request(
        layout="templar", source=source.manifest.fingerprint, options={"seq_len": seq_len, "templar_compat": compat}
    )
    check_free(folder, request, what="consolidation", beside=set(folder.names()) - {".build"})
    done = transfer(folder, request, parts, lambda _: {}, threads=resolve_workers(workers), scratch=None, watch=watch)
    result = Exported(
        output=folder.path,
        layout="templar",
        files=done.files,
        notes=(),
        already_complete=done.num_kept == len(parts),
        seconds=time.monotonic() - begin,
    )
    _compare(source, result, expected or {})
    return result


def _check_numbers(shards: Sequence[str], where: str) -> None:
    """Refuse to close a gap: all tokens behind it would be other samples."""
    for number, name in enumerate(shards):
        if name != f"train_{number:06d}.npy":
            raise DatasetError(f"{where} has {name} where train_{number:06d}.npy should be", hint="is a shard missing?")


def _compare(source: BareDataset, result: Exported, expected: Mapping[str, Expected]) -> None:
    sizes = {"tokens": numpy_dtype(source.manifest.dtype).itemsize, "sample_ids": 8}
    for name, wanted in expected.items():
        found = result.files[NAMES[name]]
        elements = found.bytes // sizes[name]
        if wanted.elements not in (-1, elements) or wanted.sha256.lower() != found.sha256:
            raise DatasetError(
                f"{NAMES[name]} has {elements} elements and SHA-256 {found.sha256}, expected "
                f"{wanted.elements if wanted.elements >= 0 else 'any number of'} elements and {wanted.sha256}",
                hint="are the shards whole, and is --seq_len right? --skip-validation compares with nothing",
            )


_FILE_HINT = 'write it like {"tokens": {"sha256": "4c53...", "elements": 161061273600}}'
