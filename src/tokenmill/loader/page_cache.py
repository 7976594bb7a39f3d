"""Pages of mapped shards: those that come are read ahead of time, and those that were used do not pile up.

A row that is not in memory stalls whoever touches it, one disk access after another. So the system is
told of the rows of many batches at once, and reads them while others are in use. It is asked about
a few of them first: where all is in memory, there is nothing to tell. A dataset that has no room in
memory is never all there; and what it lacks is read row by row, with nothing around it that would
drive other rows out.

Mapped pages count as memory of the process as long as they stay mapped. So beyond a bound all of
them are given back at once; the system keeps them in its cache as long as it has room.

All of it is advice to Linux. Elsewhere nothing is done, and no batch is any different.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.bin_idx import numpy_dtype
from tokenmill.dataset.dataset import TokenSplit, distinct
from tokenmill.dataset.windows import TokenRanges, slice_ranges
from tokenmill.storage.memory_maps import find_maps, open_plain

Numbers = npt.NDArray[np.int64]
Mapped = npt.NDArray[Any]

MAX_RESIDENT_BYTES = 1 << 30
_NUM_PROBES = 4
# A dataset that has room in memory is read whole at last, and sooner by few large reads than by many small ones.
_BLOCK_BYTES = 1 << 16
_CAN_READ_AHEAD = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT") and hasattr(mmap, "MADV_RANDOM")
_CAN_RELEASE = hasattr(mmap, "MADV_DONTNEED") and os.path.exists("/proc/self/statm")


def read_ahead(split: TokenSplit, batches: Sequence[Numbers], find: Callable[[Numbers], TokenRanges]) -> Iterator[None]:
    """With each step, have the system read the tokens that `find` finds for the samples of one more batch.

    There are no steps if a few of the samples are found in memory, and all of the dataset has room there.
    """
    samples = np.concatenate(batches)
    if not _CAN_READ_AHEAD or not len(samples):
        return
    if not _has_room(split):
        for mapped in find_maps(split.maps()):
            mapped.madvise(mmap.MADV_RANDOM)
    elif all(_is_cached(split, token) for token in find(samples[:: -(-len(samples) // _NUM_PROBES)]).starts.tolist()):
        return
    for batch in batches:
        for descriptor, begin, end in _find_runs(split, find(batch)):
            os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)
        yield


def release(maps: Iterable[Mapped], others_bytes: int = 0) -> int:
    """Give back the pages of these maps once they are too many; the rest of the process has `others_bytes` of files.

    What the rest has is known after that, and returned for the next time.
    """
    maps = list(maps)
    if not _CAN_RELEASE or sum(mapped.nbytes for mapped in maps) <= MAX_RESIDENT_BYTES:
        return others_bytes
    if resident_bytes() - others_bytes <= MAX_RESIDENT_BYTES:
        return others_bytes
    for mapped in find_maps(maps):
        mapped.madvise(mmap.MADV_DONTNEED)
    return resident_bytes()


def resident_bytes() -> int:
    """What the process has of mapped files in memory."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 256).split()[2]) * mmap.PAGESIZE
    finally:
        os.close(descriptor)


def _find_runs(split: TokenSplit, wanted: TokenRanges) -> Iterator[tuple[int, int, int]]:
    """The runs of blocks that these stretches lie in: descriptor of a file, first byte, end."""
    slices = slice_ranges(split, wanted)
    block_bytes = _BLOCK_BYTES if _has_room(split) else mmap.PAGESIZE
    for number in distinct(slices.shards):
        mine = slices.shards == number
        path, offset = split.shard_place(number)
        try:
            descriptor = open_plain(path)
        except OSError:
            continue  # whoever reads it will say what is wrong; a shard of a URL may not be here yet
        try:
            for begin, end in merge(slices.begins[mine] + offset, slices.ends[mine] + offset, block_bytes):
                yield descriptor, begin, end
        finally:
            os.close(descriptor)


def merge(begins: Numbers, ends: Numbers, block_bytes: int) -> Iterator[tuple[int, int]]:
    """These ranges of bytes as whole blocks; those that touch are one."""
    in_turn = np.argsort(begins)
    begins = begins[in_turn] // block_bytes * block_bytes
    ends = np.maximum.accumulate(-(-ends[in_turn] // block_bytes) * block_bytes)
    firsts = np.flatnonzero(np.append(True, begins[1:] > ends[:-1]))
    lasts = np.append(firsts[1:], len(begins)) - 1
    return zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True)


def _is_cached(split: TokenSplit, token: int) -> bool:
    """Whether a token can be had without waiting. A file system that cannot tell says no."""
    number = bisect.bisect_right(split.token_ends, token)
    path, offset = split.shard_place(number)
    first = split.token_ends[number - 1] if number else 0
    try:
        descriptor = open_plain(path)
        try:
            place = offset + (token - first) * numpy_dtype(split.dtype).itemsize
            return os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT) == 1
        finally:
            os.close(descriptor)
    except OSError:
        return False


def _has_room(split: TokenSplit) -> bool:
    """Whether memory holds all tokens of a split, and as much besides."""
    return split.num_tokens * numpy_dtype(split.dtype).itemsize <= _memory_bytes() // 2


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
