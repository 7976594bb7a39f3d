"""Which receipts can be trusted: those that are whole, of this plan, and whose files are what they say."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby

from tokenmill.build import packs
from tokenmill.build.packs import pack_name, read_pack, run_of
from tokenmill.build.receipt import NO_LIMIT, PIECES, Receipt, open_receipt, read_receipt, receipt_name
from tokenmill.errors import BuildError, DatasetError, MissingFileError
from tokenmill.storage import Digest, Folder

# How large a plain file is; None if there is none.
SizeOf = Callable[[str], int | None]


def load_receipt(
    folder: Folder,
    unit: int,
    token_limit: int,
    fingerprint: str,
    *,
    rehash: bool,
    look: bool = True,
    packed: bytes | None = None,
    size_of: SizeOf | None = None,
) -> Receipt | None:
    """The receipt of a unit if it and its files can be trusted. Without a `look`, those that a commit needs are: it
    will notice. `packed` is its text, if it was read already.

    Whatever cannot be is moved to quarantine, and the unit is as if it had never run.
    """
    name = receipt_name(unit, token_limit)
    try:
        receipt = _read(folder, name, packed, (unit, token_limit, fingerprint))
    except MissingFileError:
        return None
    except (DatasetError, BuildError):
        folder.quarantine(name)
        return None
    files = receipt.all_files() if look else receipt.rejects()
    damaged = list(_damaged(folder, files, size_of or partial(_size, folder), rehash=rehash))
    if not damaged:
        return receipt
    # What is there and wrong cannot stay under a receipt. What is only gone is made again: another build may have
    # finished behind our back, and its receipts must stay as they are.
    if wrong := [file for file in damaged if folder.exists(file)]:
        for file in (pack_name(unit), name, *wrong):
            folder.quarantine(file)
    return None


def load_receipts(
    folder: Folder, units: Iterable[int], fingerprint: str, *, look: bool = True, size_of: SizeOf | None = None
) -> Iterator[Receipt | None]:
    """Receipts of whole units, in order, by the sizes of their files; None for each that cannot be trusted."""
    for run, some in groupby(units, key=run_of):
        wanted = list(some)
        packed = read_pack(folder, run) if len(wanted) == packs.PACK_UNITS else {}

        def load(unit: int, packed: dict[int, bytes] = packed) -> Receipt | None:
            text = packed.get(unit)
            return load_receipt(
                folder, unit, NO_LIMIT, fingerprint, rehash=False, look=look, packed=text, size_of=size_of
            )

        to_read = wanted if packed else folder.announce(wanted, lambda unit: receipt_name(unit, NO_LIMIT))
        yield from folder.each(load, to_read)


def listed_sizes(folder: Folder) -> SizeOf:
    """The sizes of all pieces, of a store by one listing: a look at each would be a request."""
    if folder.is_local:
        return partial(_size, folder)
    listed = folder.sizes(PIECES)

    def size_of(name: str) -> int | None:
        parent, child = os.path.split(name)
        return listed.get(child) if parent == PIECES else _size(folder, name)

    return size_of


def _read(folder: Folder, name: str, packed: bytes | None, whose: tuple[int, int, str]) -> Receipt:
    """The receipt of this unit, limit and plan; any other one is an error."""
    if packed is not None:
        with contextlib.suppress(DatasetError, BuildError):
            return _owned(open_receipt(packed, where=name), name, whose)
        folder.quarantine(pack_name(whose[0]))
    return _owned(read_receipt(folder, name), name, whose)


def _owned(receipt: Receipt, name: str, whose: tuple[int, int, str]) -> Receipt:
    if (receipt.unit, receipt.token_limit, receipt.fingerprint) != whose:
        raise DatasetError(f"{name} belongs to another unit or another plan")
    return receipt


def _size(folder: Folder, name: str) -> int | None:
    found = folder.stat(name)
    return found.size if found is not None and found.is_file else None


def _damaged(folder: Folder, files: dict[str, Digest], size_of: SizeOf, *, rehash: bool) -> Iterator[str]:
    for name, digest in files.items():
        if size_of(name) != digest.bytes or (rehash and folder.digest(name) != digest):
            yield name
