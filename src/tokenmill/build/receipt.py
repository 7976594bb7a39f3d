"""Receipts: the small record that says a unit is done, and what it must look like on disk."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenmill.build import quick
from tokenmill.errors import BuildError, DatasetError
from tokenmill.manifest import Shard, SourceTotal, check_split_name
from tokenmill.storage import Digest, Folder
from tokenmill.typed import MAX_INT

PIECES = ".build/pieces"
RECEIPTS = ".build/receipts"
REJECTS = ".build/rejects"
NO_LIMIT = -1
MAX_RECEIPT_BYTES = 1 << 26
# A unit, and the token limit that it was cut to.
Key = tuple[int, int]
_SUM = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one unit read, dropped and wrote. `token_limit` is -1 but for the unit that ends a token budget."""

    fingerprint: str
    unit: int
    token_limit: int
    documents_read: int
    dropped: dict[str, int]
    pieces: dict[str, Shard]
    sources: tuple[SourceTotal, ...]
    read_sum: str
    written_sum: str
    files: dict[str, Digest]

    @property
    def key(self) -> Key:
        return self.unit, self.token_limit

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces.values())

    @property
    def documents(self) -> int:
        return sum(piece.documents for piece in self.pieces.values())

    @property
    def provenance(self) -> str:
        """The file that says where the unit's documents came from."""
        return f"{PIECES}/{unit_name(self.unit, self.token_limit)}.provenance.parquet"

    def rejects(self) -> dict[str, Digest]:
        """The file of bad documents, if there were any."""
        return {name: digest for name, digest in self.files.items() if name != self.provenance}

    def all_files(self) -> dict[str, Digest]:
        """Every file that the unit wrote."""
        found = dict(self.files)
        for piece in self.pieces.values():
            found[f"{piece.name}.bin"] = piece.bin
            found[f"{piece.name}.idx"] = piece.idx
        return found


def unit_name(unit: int, token_limit: int) -> str:
    """How the files of a unit are called; a unit that was cut to a budget is another one."""
    return f"{unit:06d}" if token_limit == NO_LIMIT else f"{unit:06d}.cut-{token_limit}"


def receipt_name(unit: int, token_limit: int) -> str:
    return f"{RECEIPTS}/{unit_name(unit, token_limit)}.json"


def check_books(receipt: Receipt) -> None:
    """Documents read are kept or dropped, and what was read is what was written. Else `BuildError`."""
    dropped = sum(receipt.dropped.values())
    if receipt.documents_read != receipt.documents + dropped:
        raise BuildError(
            f"unit {receipt.unit}: {receipt.documents_read} documents read, but {receipt.documents} kept "
            f"and {dropped} dropped",
            hint="please report this, with the recipe",
        )
    if receipt.read_sum != receipt.written_sum:
        raise BuildError(
            f"unit {receipt.unit}: the documents written ({receipt.written_sum}) are not those read "
            f"({receipt.read_sum})",
            hint="please report this, with the recipe",
        )


def read_receipt(folder: Folder, name: str) -> Receipt:
    """The receipt in a file, or an error, as `open_receipt` has it."""
    return open_receipt(folder.read(name, max_bytes=MAX_RECEIPT_BYTES), where=name)


def open_receipt(data: bytes, *, where: str) -> Receipt:
    """A receipt that is sealed, balances and speaks of its own files only; else `DatasetError` or `BuildError`."""
    receipt = quick.unseal(Receipt, data, where=where)
    if wrong := _untrue(receipt, where=where):
        raise DatasetError(f"{where}: {wrong}", hint="the receipt is damaged or was not written by tokenmill")
    check_books(receipt)
    return receipt


def _untrue(receipt: Receipt, *, where: str) -> str:
    """What a sealed receipt says that cannot be; nothing if all of it can."""
    own = unit_name(receipt.unit, receipt.token_limit)
    counts = [receipt.unit, receipt.documents_read, *receipt.dropped.values()]
    sums = [receipt.read_sum]
    provenance = receipt.provenance
    is_foreign = provenance not in receipt.files or not receipt.files.keys() <= {provenance, f"{REJECTS}/{own}.jsonl"}
    for split, piece in receipt.pieces.items():
        check_split_name(split, where=where)
        counts += (piece.tokens, piece.documents)
        is_foreign = is_foreign or piece.name != f"{PIECES}/{own}.{split}"
    for source in receipt.sources:
        counts += (source.bytes, source.documents)
        sums.append(source.text_sum)
    if min(counts) < 0 or max(counts) >= MAX_INT:
        return "a count is out of range"
    if not all(map(_SUM.fullmatch, sums)):
        return "a sum is no sum"
    return "a file of another unit" if is_foreign else ""


def hex_sum(total: npt.NDArray[np.uint64]) -> str:
    return f"{int(total[0]):016x}{int(total[1]):016x}"
