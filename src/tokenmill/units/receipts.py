"""Receipts: the records of complete units and their files, how they are verified and how they are packed.

A receipt is valid if it is intact, belongs to this plan, and its files are what it says:

    by digest   every file is hashed again: units since the last clean stop, each by the worker that gets it
    by size     all others; the text of such a receipt may come from a pack

A receipt that is not valid is moved to quarantine with its files, and its unit runs again.

Packs hold the receipts of a thousand units in one file, since a resumed build may have a million of them to read:

    receipts   000000.json ... 001023.json   001024.json ...   one a unit: the truth
    packs      000000.jsonl                                    the same texts, once a run of units is complete

A pack only saves time. Its copies are sealed like the receipts. If a pack is missing or damaged, or a receipt differs
in size from its copy, the receipts are read one by one. A receipt that goes to quarantine takes its pack along.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from tokenmill import records
from tokenmill.arguments import MAX_INT
from tokenmill.dataset.manifest import Shard, SourceTotal, check_split_name
from tokenmill.dataset.statistics import NUM_EXAMPLES, UnitStatistics, wrong_counts
from tokenmill.errors import BuildError, DatasetError, MissingFileError, TokenmillError
from tokenmill.records import Int
from tokenmill.storage.base import Storage
from tokenmill.storage.local import SizeOf
from tokenmill.storage.output import Digest

PLAN = ".build/plan.json"
PIECES = ".build/pieces"
RECEIPTS = ".build/receipts"
REJECTS = ".build/rejects"
NO_LIMIT = -1
MAX_RECEIPT_BYTES = 1 << 26
# A unit, and the token limit that it was cut to.
Key = tuple[int, int]
_SUM_LETTERS = 32
_SUM = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one unit read, dropped and wrote. `token_limit` is -1 except for the unit that ends a token budget.

    Receipts of older versions have no statistics.
    """

    fingerprint: str
    unit: Int
    token_limit: Int
    documents_read: Int
    dropped: dict[str, Int]
    pieces: dict[str, Shard]
    sources: tuple[SourceTotal, ...]
    read_sum: str
    written_sum: str
    files: dict[str, Digest]
    statistics: UnitStatistics | None = None

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
    """The name of a unit in file names. A unit that was cut to a budget has another name."""
    return f"{unit:06d}" if token_limit == NO_LIMIT else f"{unit:06d}.cut-{token_limit}"


def receipt_name(unit: int, token_limit: int) -> str:
    return f"{RECEIPTS}/{unit_name(unit, token_limit)}.json"


def check_totals(receipt: Receipt) -> None:
    """Raise `BuildError` unless every document read was kept or dropped, and the texts written are those read."""
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


def read_receipt(folder: Storage, name: str) -> Receipt:
    """The receipt in a file; errors as of `open_receipt`."""
    return open_receipt(folder.read(name, max_bytes=MAX_RECEIPT_BYTES), where=name)


def open_receipt(data: bytes, *, where: str) -> Receipt:
    """A receipt whose seal and totals hold and that names its own files only; else `DatasetError` or `BuildError`."""
    receipt = records.unseal(Receipt, data, where=where)
    if wrong := _impossible(receipt, where=where):
        raise DatasetError(f"{where}: {wrong}", hint="the receipt is damaged or was not written by tokenmill")
    check_totals(receipt)
    return receipt


def _impossible(receipt: Receipt, *, where: str) -> str:
    """What is impossible in a sealed receipt; an empty string if nothing is."""
    own = unit_name(receipt.unit, receipt.token_limit)
    counts = [receipt.unit, receipt.documents_read, *receipt.dropped.values()]
    sums = [receipt.read_sum]
    provenance = receipt.provenance
    has_other_files = provenance not in receipt.files or not receipt.files.keys() <= {
        provenance,
        f"{REJECTS}/{own}.jsonl",
    }
    for split, piece in receipt.pieces.items():
        check_split_name(split, where=where)
        counts += (piece.tokens, piece.documents)
        has_other_files = has_other_files or piece.name != f"{PIECES}/{own}.{split}"
    for source in receipt.sources:
        counts += (source.bytes, source.documents)
        sums.append(source.text_sum)
    if min(counts) < 0 or max(counts) >= MAX_INT:
        return "a count is out of range"
    if not all(map(_SUM.fullmatch, sums)):
        return "a sum is malformed"
    if has_other_files:
        return "a file of another unit"
    return "" if receipt.statistics is None else _impossible_statistics(receipt, receipt.statistics)


def _impossible_statistics(receipt: Receipt, found: UnitStatistics) -> str:
    """What is impossible in the statistics of a unit; an empty string if nothing is."""
    if found.splits.keys() != receipt.pieces.keys() or any(
        wrong_counts(
            counts,
            sources=len(receipt.sources),
            documents=receipt.pieces[split].documents,
            tokens=receipt.pieces[split].tokens,
        )
        for split, counts in found.splits.items()
    ):
        return "its statistics are not those of its pieces"
    is_known = found.examples.keys() <= receipt.dropped.keys()
    if not is_known or any(len(examples) > NUM_EXAMPLES for examples in found.examples.values()):
        return "its examples are not of documents that it dropped"
    return ""


def hex_sum(total: npt.NDArray[np.uint64]) -> str:
    return hex_sums(total.reshape(1, 2))[0]


def hex_sums(totals: npt.NDArray[np.uint64]) -> list[str]:
    """Sums of hashes as text: there may be one for each of a million sources."""
    text = totals.astype(">u8").tobytes().hex()
    return [text[start : start + _SUM_LETTERS] for start in range(0, len(text), _SUM_LETTERS)]


def parse_sums(texts: Iterable[str]) -> npt.NDArray[np.uint64]:
    """The sums that were written as texts, a row for each."""
    return np.frombuffer(bytes.fromhex("".join(texts)), ">u8").astype(np.uint64).reshape(-1, 2)


def load_receipt(folder: Storage, unit: int, token_limit: int, fingerprint: str, *, rehash: bool) -> Receipt | None:
    """The receipt of a unit, if the sizes (or with `rehash` the digests) of its files are right; else None."""
    if folder.stat_is_cheap and not folder.exists(receipt_name(unit, token_limit)):
        return None
    receipt = _read(folder, (unit, token_limit), fingerprint)
    if receipt is None or not _are_intact(folder, receipt, receipt.all_files(), folder.size_of, rehash=rehash):
        return None
    return receipt


def load_receipts(
    folder: Storage, units: Iterable[int], fingerprint: str, *, check_files: bool = True
) -> Iterator[Receipt | None]:
    """Receipts of whole units, in order, verified by the sizes of their files; None for each that is not valid.

    Without `check_files`, only the sizes of the files of bad documents are compared: the commit reads the others.
    """
    size_of = folder.sizes_in([PIECES, RECEIPTS, REJECTS]) if check_files else folder.size_of
    for run in runs(units):
        packed = read_pack(folder, run)

        def load(unit: int, packed: dict[int, bytes] = packed) -> Receipt | None:
            text = packed.get(unit)
            if check_files and text is not None and size_of(receipt_name(unit, NO_LIMIT)) != len(text):
                text = None  # the receipt itself is gone or has changed
            receipt = _read(folder, (unit, NO_LIMIT), fingerprint, text)
            if receipt is None:
                return None
            files = receipt.all_files() if check_files else receipt.rejects()
            return receipt if _are_intact(folder, receipt, files, size_of, rehash=False) else None

        to_read = run if packed else folder.announce(run, lambda unit: receipt_name(unit, NO_LIMIT))
        yield from folder.each(load, to_read)


def _read(folder: Storage, key: Key, fingerprint: str, packed: bytes | None = None) -> Receipt | None:
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


def _are_intact(folder: Storage, receipt: Receipt, files: dict[str, Digest], size_of: SizeOf, *, rehash: bool) -> bool:
    """Whether files of a receipt are as it says. If not, they go to quarantine together with the receipt."""
    damaged = list(_damaged(folder, files, size_of, rehash=rehash))
    # A wrong file must not stay beside a receipt. If files are only missing, the receipt stays: another process may
    # have finished the build since, and its receipts must not be touched.
    if wrong := [file for file in damaged if folder.exists(file)]:
        for file in (pack_name(receipt.unit), receipt_name(*receipt.key), *wrong):
            folder.quarantine(file)
    return not damaged


def _damaged(folder: Storage, files: dict[str, Digest], size_of: SizeOf, *, rehash: bool) -> Iterator[str]:
    for name, digest in files.items():
        if size_of(name) != digest.bytes or (rehash and folder.digest(name) != digest):
            yield name


PACKS = ".build/packs"
PACK_UNITS = 1 << 10
# Units of many small files have large receipts, for which packs save no time.
MAX_PACK_BYTES = 1 << 24


def pack_name(unit: int) -> str:
    """The pack in which the receipt of a unit is, if it is in one."""
    return f"{PACKS}/{_number(unit):06d}.jsonl"


def runs(units: Iterable[int]) -> Iterator[list[int]]:
    """Units in order, grouped by pack."""
    return (list(run) for _, run in groupby(units, key=_number))


def read_pack(folder: Storage, run: list[int]) -> dict[int, bytes]:
    """The unchecked texts of the receipts of a run, by unit; empty if they are not packed."""
    if len(run) < PACK_UNITS:  # only whole runs are packed
        return {}
    try:
        data = folder.read(pack_name(run[0]), max_bytes=MAX_PACK_BYTES)
    except TokenmillError:
        return {}
    return dict(enumerate(data.splitlines(keepends=True), start=run[0]))


def write_pack(folder: Storage, number: int) -> None:
    """Pack the receipts of a complete run."""

    def read(unit: int) -> bytes:
        return folder.read(receipt_name(unit, NO_LIMIT), max_bytes=MAX_RECEIPT_BYTES)

    with contextlib.suppress(TokenmillError):  # a pack is not required
        texts = list(folder.each(read, range(number * PACK_UNITS, (number + 1) * PACK_UNITS)))
        if sum(map(len, texts)) <= MAX_PACK_BYTES:
            folder.make(PACKS)
            folder.write(pack_name(number * PACK_UNITS), b"".join(texts))


@contextlib.contextmanager
def packing(folder: Storage, done: Iterable[int]) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with each unit that finishes after those that are `done` already."""
    counts = Counter(map(_number, done))
    background = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-packs")

    def note(unit: int) -> None:
        number = _number(unit)
        counts[number] += 1
        if counts[number] < PACK_UNITS:
            return
        if folder.writes_are_fast:
            write_pack(folder, number)
        else:  # an object store is slow, and the caller has to listen to its workers
            background.submit(write_pack, folder, number)

    try:
        yield note
    except BaseException:
        background.shutdown(wait=False, cancel_futures=True)  # do not delay shutdown
        raise
    background.shutdown()


def _number(unit: int) -> int:
    """The number of the pack of a unit."""
    return unit // PACK_UNITS
