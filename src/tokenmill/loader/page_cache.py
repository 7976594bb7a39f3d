"""The page cache: pages of mapped shards are read ahead, and released when there are too many.

A row that is not in memory stalls its reader, one disk access after another. So the system is told about the rows
of many batches at once, and reads them while others are in use. A few rows are probed first: if they are in memory,
nothing is announced. A dataset larger than the available memory is never completely cached. Its rows are announced
one by one, without readahead around them, which would evict other rows.

Mapped pages count as memory of the process while they are mapped. Beyond a limit, all of them are released at once;
the system keeps them in its cache as long as it has memory to spare.

All of this is advice to Linux. Elsewhere nothing is done, and batches are the same.
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
# A dataset that fits into memory will be read completely, and a few large reads are faster than many small ones.
_BLOCK_BYTES = 1 << 16
_CAN_READ_AHEAD = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT") and hasattr(mmap, "MADV_RANDOM")
_CAN_RELEASE = hasattr(mmap, "MADV_DONTNEED") and os.path.exists("/proc/self/statm")


def read_ahead(split: TokenSplit, batches: Sequence[Numbers], find: Callable[[Numbers], TokenRanges]) -> Iterator[None]:
    """With each step, have the system read the tokens of one more batch; `find` gives the tokens of samples.

    There are no steps if the dataset fits into memory and a few probed samples are already there.
    """
    samples = np.concatenate(batches)
    if not _CAN_READ_AHEAD or not len(samples):
        return
    if not _fits_in_memory(split):
        for mapped in find_maps(split.maps()):
            mapped.madvise(mmap.MADV_RANDOM)
    elif all(_is_cached(split, token) for token in find(samples[:: -(-len(samples) // _NUM_PROBES)]).starts.tolist()):
        return
    for batch in batches:
        for descriptor, begin, end in _find_runs(split, find(batch)):
            os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)
        yield


def release(maps: Iterable[Mapped], others_bytes: int = 0) -> int:
    """Release the pages of these maps once there are too many. Other maps of the process have `others_bytes`.

    Returns what the others have, which is known exactly after a release, for the next call.
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
    """Bytes of mapped files that are in memory for this process."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 256).split()[2]) * mmap.PAGESIZE
    finally:
        os.close(descriptor)


def _find_runs(split: TokenSplit, wanted: TokenRanges) -> Iterator[tuple[int, int, int]]:
    """The runs of blocks that contain these tokens: descriptor of a file, first byte, end."""
    slices = slice_ranges(split, wanted)
    block_bytes = _BLOCK_BYTES if _fits_in_memory(split) else mmap.PAGESIZE
    for number in distinct(slices.shards):
        mine = slices.shards == number
        path, offset = split.shard_location(number)
        try:
            descriptor = open_plain(path)
        except OSError:
            continue  # the read itself reports the error; a shard of a URL may not be copied yet
        try:
            for begin, end in merge(slices.begins[mine] + offset, slices.ends[mine] + offset, block_bytes):
                yield descriptor, begin, end
        finally:
            os.close(descriptor)


def merge(begins: Numbers, ends: Numbers, block_bytes: int) -> Iterator[tuple[int, int]]:
    """These ranges of bytes as whole blocks. Ranges that touch are merged."""
    by_begin = np.argsort(begins)
    begins = begins[by_begin] // block_bytes * block_bytes
    ends = np.maximum.accumulate(-(-ends[by_begin] // block_bytes) * block_bytes)
    firsts = np.flatnonzero(np.append(True, begins[1:] > ends[:-1]))
    lasts = np.append(firsts[1:], len(begins)) - 1
    return zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True)


def _is_cached(split: TokenSplit, token: int) -> bool:
    """Whether a token can be read without waiting. False if the file system cannot tell."""
    number = bisect.bisect_right(split.token_ends, token)
    path, offset = split.shard_location(number)
    first = split.token_ends[number - 1] if number else 0
    try:
        descriptor = open_plain(path)
        try:
            position = offset + (token - first) * numpy_dtype(split.dtype).itemsize
            return os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT) == 1
        finally:
            os.close(descriptor)
    except OSError:
        return False


def _fits_in_memory(split: TokenSplit) -> bool:
    """Whether the tokens of a split take at most half of the memory."""
    return split.num_tokens * numpy_dtype(split.dtype).itemsize <= _memory_bytes() // 2


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
