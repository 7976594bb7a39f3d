"""What is advised to the system: rows are read before they are touched, and memory does not grow with what was read."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill
from tokenmill.dataset.dataset import TokenSplit
from tokenmill.dataset.windows import Windows, read_ahead
from tokenmill.loader.loader import DataLoader
from tokenmill.storage import memory_maps

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux takes the advice")
PAGE_TOKENS = mmap.PAGESIZE // 2


def resident_bytes() -> int:
    (found,) = re.findall(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found)


@pytest.mark.parametrize("bound", [16 << 20, 1 << 40])
def test_memory_stays_flat_while_a_larger_dataset_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    dataset_bytes = 192 << 20
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(dataset_bytes)
    monkeypatch.setattr(memory_maps, "MAX_RESIDENT_BYTES", bound)
    loader = DataLoader(tokenmill.open(tmp_path / "train.bin", dtype="uint16"), 1 << 14, 16, epochs=1, prefetch=0)
    before = resident_bytes()
    peak = max(resident_bytes() for _ in loader)
    # A chunk of batches comes on top of what may stay.
    assert (peak - before < 64 << 20) == (bound < dataset_bytes)


@pytest.fixture
def cold(tmp_path: Path) -> TokenSplit:
    """A split that is on disk only."""
    path = tmp_path / "train.bin"
    path.write_bytes(np.arange(1 << 22, dtype=np.uint16).tobytes())
    split = tokenmill.open(path, dtype="uint16")["train"]
    evict(split)
    return split


def evict(split: TokenSplit) -> None:
    """Have the system drop the file's pages, all of them: it may keep some for a moment, under load or while mapped."""
    deadline = time.monotonic() + 5
    while True:
        with open(split.shard_location(0)[0], "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not cached_pages(split).any():
            return
        if time.monotonic() > deadline:
            pytest.skip("this file system keeps everything in memory")


def is_cached(split: TokenSplit, page: int) -> bool:
    return bool(cached_pages(split)[page])


def cached_pages(split: TokenSplit) -> Any:
    """Which pages of the file are in memory, asked without touching them."""
    with (
        open(split.shard_location(0)[0], "rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped,
    ):
        found = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), found) == 0
    return np.frombuffer(found, np.uint8) & 1


def test_rows_that_are_not_in_memory_are_read_before_they_are_touched(
    cold: TokenSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_maps, "machine_memory", lambda: 0)
    windows = Windows(cold, PAGE_TOKENS - 1)
    batches = np.array([[1000, 40], [7, 500]]) * PAGE_TOKENS
    assert len(list(read_ahead(cold, list(batches), lambda starts: windows.token_ranges(starts[None])))) == 2
    deadline = time.monotonic() + 20
    while not all(is_cached(cold, page) for page in (7, 40, 500, 1000)):
        assert time.monotonic() < deadline
    assert not any(is_cached(cold, page) for page in (300, 700, 1700))


@pytest.mark.parametrize("memory_bytes", [0, 1 << 50])
def test_a_row_of_a_dataset_that_has_no_room_in_memory_brings_nothing_from_around_it(
    cold: TokenSplit, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    monkeypatch.setattr(memory_maps, "machine_memory", lambda: memory_bytes)
    windows = Windows(cold, PAGE_TOKENS - 1)
    cold.shard_bytes(0)
    far = np.array([1000 * PAGE_TOKENS])
    list(read_ahead(cold, [far], lambda starts: windows.token_ranges(starts[None])))
    windows.gather(np.array([40 * PAGE_TOKENS]))
    assert is_cached(cold, 40)
    assert any(is_cached(cold, page) for page in (39, 41, 44)) == (memory_bytes > 0)


def test_nothing_is_said_of_rows_that_are_in_memory(cold: TokenSplit) -> None:
    cold.tokens(0, cold.num_tokens).sum()
    windows = Windows(cold, 64)
    batches = list(np.arange(0, cold.num_tokens - 65, 4096).reshape(-1, 1))
    assert not list(read_ahead(cold, batches, lambda starts: windows.token_ranges(starts[None])))


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_loader_announces_its_batches(
    cold: TokenSplit, monkeypatch: pytest.MonkeyPatch, packing: Any, mixed: bool
) -> None:
    asked: list[int] = []
    advise = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *run: asked.append(run[1]) or advise(*run))
    dataset = tokenmill.open(cold.shard_location(0)[0], dtype="uint16", eot_id=65535)
    source = tokenmill.Mixture({"a": (dataset, 0.5), "b": (dataset, 0.5)}) if mixed else dataset
    for _ in range(20):  # a quick disk may have the probed pages in memory before the question is answered
        loader = DataLoader(source, 512, 4, packing=packing, prefetch=0)
        evict(cold)
        asked.clear()
        next(iter(loader))
        if asked:
            break
    assert len(asked) >= 4


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=30), st.sampled_from([1, 8, 64])
)
def test_ranges_are_merged_into_whole_blocks_that_do_not_touch(ranges: list[tuple[int, int]], block: int) -> None:
    begins, sizes = np.array(ranges).T
    merged = list(memory_maps.merge(begins, begins + sizes, block))
    wanted = {place // block for begin, size in ranges for place in range(begin, begin + size)}
    assert [number for begin, end in merged for number in range(begin // block, end // block)] == sorted(wanted)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(merged))
