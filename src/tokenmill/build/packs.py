"""Receipts in packs: a thousand of them in one file, for a build that goes on would have to open a million.

    receipts   000000.json ... 001023.json   001024.json ...   one a unit: the truth
    packs      000000.jsonl                                    the same texts, once all of a run are there

A pack saves time and nothing else. It holds copies, whose seals are checked as those of the receipts are; where
there is none, or it is damaged, the receipts are read one by one. Whoever distrusts a receipt takes its pack away.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from tokenmill.build.receipt import MAX_RECEIPT_BYTES, NO_LIMIT, receipt_name
from tokenmill.errors import TokenmillError
from tokenmill.storage import Folder

PACKS = ".build/packs"
PACK_UNITS = 1 << 10
# Receipts of units of many small files are large: to open each of those is no matter.
MAX_PACK_BYTES = 1 << 24


def run_of(unit: int) -> int:
    """The number of the run of units that shares a pack."""
    return unit // PACK_UNITS


def pack_name(unit: int) -> str:
    """The pack in which the receipt of a unit is, if it is in one."""
    return f"{PACKS}/{run_of(unit):06d}.jsonl"


def read_pack(folder: Folder, run: int) -> dict[int, bytes]:
    """Receipts of a run by their units, as texts that nobody has looked at yet; none if they are not packed."""
    try:
        data = folder.read(pack_name(run * PACK_UNITS), max_bytes=MAX_PACK_BYTES)
    except TokenmillError:
        return {}
    return dict(enumerate(data.splitlines(keepends=True), start=run * PACK_UNITS))


def write_pack(folder: Folder, run: int) -> None:
    """Pack the receipts of a run, all of which are there."""

    def read(unit: int) -> bytes:
        return folder.read(receipt_name(unit, NO_LIMIT), max_bytes=MAX_RECEIPT_BYTES)

    with contextlib.suppress(TokenmillError):  # without a pack it goes as well
        texts = list(folder.each(read, range(run * PACK_UNITS, (run + 1) * PACK_UNITS)))
        if sum(map(len, texts)) <= MAX_PACK_BYTES:
            folder.make(PACKS)
            folder.write(pack_name(run * PACK_UNITS), b"".join(texts))


@contextlib.contextmanager
def packing(folder: Folder, done: Iterable[int]) -> Iterator[Callable[[int], None]]:
    """Gives what to call with each unit that is done after those that are `done` already."""
    counts = Counter(map(run_of, done))
    beside = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-packs")

    def note(unit: int) -> None:
        run = run_of(unit)
        counts[run] += 1
        if counts[run] < PACK_UNITS:
            return
        if folder.is_local:
            write_pack(folder, run)
        else:  # a store answers in its own time, and the caller has others to listen to
            beside.submit(write_pack, folder, run)

    try:
        yield note
    except BaseException:
        beside.shutdown(wait=False, cancel_futures=True)  # nobody waits for a pack who wants to stop
        raise
    beside.shutdown()
