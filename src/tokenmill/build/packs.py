"""Receipts in packs: a thousand of them in one file, for a build that goes on would have to open a million.

    receipts   000000.json ... 001023.json   001024.json ...   one a unit: the truth
    packs      000000.jsonl                                    the same texts, once all of a run are there

A pack saves time and nothing else. It holds copies, whose seals are checked as those of the receipts are; where
there is none, or it is damaged, or a receipt is not as large as its copy, the receipts are read one by one. Whoever
distrusts a receipt takes its pack away.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from tokenmill.build.receipt import MAX_RECEIPT_BYTES, NO_LIMIT, receipt_name
from tokenmill.errors import TokenmillError
from tokenmill.storage import Folder

PACKS = ".build/packs"
PACK_UNITS = 1 << 10
# Receipts of units of many small files are large: to open each of those is no matter.
MAX_PACK_BYTES = 1 << 24


def pack_name(unit: int) -> str:
    """The pack in which the receipt of a unit is, if it is in one."""
    return f"{PACKS}/{_number(unit):06d}.jsonl"


def runs(units: Iterable[int]) -> Iterator[list[int]]:
    """Units in order, those together that share a pack."""
    return (list(run) for _, run in groupby(units, key=_number))


def read_pack(folder: Folder, run: list[int]) -> dict[int, bytes]:
    """Receipts of a run by their units, as texts that nobody has looked at yet; none if they are not packed."""
    if len(run) < PACK_UNITS:  # nobody has packed it
        return {}
    try:
        data = folder.read(pack_name(run[0]), max_bytes=MAX_PACK_BYTES)
    except TokenmillError:
        return {}
    return dict(enumerate(data.splitlines(keepends=True), start=run[0]))


def write_pack(folder: Folder, number: int) -> None:
    """Pack the receipts of a run, all of which are there."""

    def read(unit: int) -> bytes:
        return folder.read(receipt_name(unit, NO_LIMIT), max_bytes=MAX_RECEIPT_BYTES)

    with contextlib.suppress(TokenmillError):  # without a pack it goes as well
        texts = list(folder.each(read, range(number * PACK_UNITS, (number + 1) * PACK_UNITS)))
        if sum(map(len, texts)) <= MAX_PACK_BYTES:
            folder.make(PACKS)
            folder.write(pack_name(number * PACK_UNITS), b"".join(texts))


@contextlib.contextmanager
def packing(folder: Folder, done: Iterable[int]) -> Iterator[Callable[[int], None]]:
    """Gives what to call with each unit that is done after those that are `done` already."""
    counts = Counter(map(_number, done))
    beside = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-packs")

    def note(unit: int) -> None:
        number = _number(unit)
        counts[number] += 1
        if counts[number] < PACK_UNITS:
            return
        if folder.is_local:
            write_pack(folder, number)
        else:  # a store answers in its own time, and the caller has others to listen to
            beside.submit(write_pack, folder, number)

    try:
        yield note
    except BaseException:
        beside.shutdown(wait=False, cancel_futures=True)  # nobody waits for a pack who wants to stop
        raise
    beside.shutdown()


def _number(unit: int) -> int:
    """Of the run of units that share a pack."""
    return unit // PACK_UNITS
