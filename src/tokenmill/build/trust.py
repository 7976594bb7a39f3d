"""Which receipts can be trusted: those that are whole, of this plan, and whose files are what they say.

    by digest   each file is hashed again: units since the last clean stop, each by the worker that has it
    by size     for all others, and a receipt's own text may come from its pack

What cannot be trusted is moved to quarantine, and the unit is as if it had never run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from tokenmill.build.packs import pack_name, read_pack, runs
from tokenmill.build.receipt import (
    NO_LIMIT,
    PIECES,
    RECEIPTS,
    REJECTS,
    Key,
    Receipt,
    open_receipt,
    read_receipt,
    receipt_name,
)
from tokenmill.errors import BuildError, DatasetError, MissingFileError
from tokenmill.storage import Digest, Folder
from tokenmill.storage.folder import SizeOf


def load_receipt(folder: Folder, unit: int, token_limit: int, fingerprint: str, *, rehash: bool) -> Receipt | None:
    """The receipt of a unit if it and its files can be trusted, by their sizes or by their digests."""
    receipt = _read(folder, (unit, token_limit), fingerprint)
    if receipt is None or not _stand(folder, receipt, receipt.all_files(), folder.size_of, rehash=rehash):
        return None
    return receipt


def load_receipts(
    folder: Folder, units: Iterable[int], fingerprint: str, *, look: bool = True
) -> Iterator[Receipt | None]:
    """Receipts of whole units, in order, by the sizes of their files; None for each that cannot be trusted.

    Without a `look`, only files of bad documents are looked at: the others are those that a commit will read.
    """
    size_of = folder.sizes_in([PIECES, RECEIPTS, REJECTS]) if look else folder.size_of
    for run in runs(units):
        packed = read_pack(folder, run)

        def load(unit: int, packed: dict[int, bytes] = packed) -> Receipt | None:
            text = packed.get(unit)
            if look and text is not None and size_of(receipt_name(unit, NO_LIMIT)) != len(text):
                text = None  # the receipt itself is gone, or another one
            receipt = _read(folder, (unit, NO_LIMIT), fingerprint, text)
            if receipt is None:
                return None
            files = receipt.all_files() if look else receipt.rejects()
            return receipt if _stand(folder, receipt, files, size_of, rehash=False) else None

        to_read = run if packed else folder.announce(run, lambda unit: receipt_name(unit, NO_LIMIT))
        yield from folder.each(load, to_read)


def _read(folder: Folder, key: Key, fingerprint: str, packed: bytes | None = None) -> Receipt | None:
    """The receipt of a unit, from its pack or its file; None if it has none."""
    name = receipt_name(*key)
    if packed is not None:
        with contextlib.suppress(DatasetError, BuildError):
            return _owned(open_receipt(packed, where=name), key, fingerprint)
        folder.quarantine(pack_name(key[0]))
    try:
        return _owned(read_receipt(folder, name), key, fingerprint)
    except MissingFileError:
        return None
    except (DatasetError, BuildError):
        folder.quarantine(name)
        return None


def _owned(receipt: Receipt, key: Key, fingerprint: str) -> Receipt:
    if (receipt.key, receipt.fingerprint) != (key, fingerprint):
        raise DatasetError(f"{receipt_name(*key)} belongs to another unit or another plan")
    return receipt


def _stand(folder: Folder, receipt: Receipt, files: dict[str, Digest], size_of: SizeOf, *, rehash: bool) -> bool:
    """Whether files of a receipt are there as it says. If not, they go, and it with them."""
    damaged = list(_damaged(folder, files, size_of, rehash=rehash))
    # What is there and wrong cannot stay under a receipt. What is only gone is made again: another build may have
    # finished behind our back, and its receipts must stay as they are.
    if wrong := [file for file in damaged if folder.exists(file)]:
        for file in (pack_name(receipt.unit), receipt_name(*receipt.key), *wrong):
            folder.quarantine(file)
    return not damaged


def _damaged(folder: Folder, files: dict[str, Digest], size_of: SizeOf, *, rehash: bool) -> Iterator[str]:
    for name, digest in files.items():
        if size_of(name) != digest.bytes or (rehash and folder.digest(name) != digest):
            yield name
