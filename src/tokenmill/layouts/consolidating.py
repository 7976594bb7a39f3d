"""consolidate: Templar's shards, wherever they came from, joined to tokens.bin with the ids of their samples.

Its users then delete the shards. Called without them, it checks what it wrote when they were there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill import records
from tokenmill.cores import resolve_workers
from tokenmill.data.bare import Hints, open_bare
from tokenmill.errors import DatasetError
from tokenmill.layouts.expecting import NAMES, Expected, compare
from tokenmill.layouts.exporting import Exported
from tokenmill.layouts.shape import Facts, Files, Part
from tokenmill.layouts.templar import consolidated
from tokenmill.layouts.transfer import (
    PINS,
    REQUEST,
    Request,
    Watcher,
    check_free,
    is_of_other_content,
    make_request,
    start_over,
    transfer,
)
from tokenmill.sizes import parse_size
from tokenmill.storage import Folder, local_folder


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
    seq_len = parse_size(seq_len, of="tokens")
    options = {"seq_len": seq_len, "templar_compat": compat}
    if shards:
        _check_numbers(shards, folder.path)
        source = open_bare(folder.path, Hints(layout="templar"))
        parts = consolidated(source["train"], seq_len, compat=compat)
        about = {"source": source.manifest.fingerprint, "dtype": source.manifest.dtype, **source.pins("train")}
    else:
        parts, about = _parts_without_shards(folder)
    request = make_request(layout="templar", options=options, **about)
    if shards and is_of_other_content(folder, request):
        start_over(folder)  # shards that were fetched again may be others
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
    compare(result.files, expected or {}, about["dtype"])
    return result


def _parts_without_shards(folder: Folder) -> tuple[list[Part], dict[str, Any]]:
    """The files that an earlier call wrote, to be checked and not written again, and what that call was about."""
    if not folder.exists(REQUEST):
        raise DatasetError(f"{folder.path} has no train_000000.npy", hint="give the folder with Templar's shards")
    before = records.unseal(Request, folder.read(REQUEST, max_bytes=1 << 26), where=folder.at(REQUEST)).about
    parts = [Part(name=name, num_bytes=0, write=_refuse) for name in NAMES.values()]
    pins = {name: before[name] for name in PINS if name in before}
    return parts, {"source": str(before.get("source")), "dtype": str(before.get("dtype", "uint16")), **pins}


def _refuse(_: Files) -> Facts:
    raise DatasetError(
        "tokens.bin or sample_ids.bin is not what was written, and the shards to write it from are gone",
        hint="fetch the train_*.npy shards again, then run the same command",
    )


def _check_numbers(shards: Sequence[str], where: str) -> None:
    """Refuse to close a gap: all tokens behind it would be other samples."""
    for number, name in enumerate(shards):
        if name != f"train_{number:06d}.npy":
            raise DatasetError(f"{where} has {name} where train_{number:06d}.npy should be", hint="is a shard missing?")
