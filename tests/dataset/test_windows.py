from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill.dataset import windows as module
from tokenmill.dataset.dataset import TokenSplit
from tokenmill.dataset.windows import Windows


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    write_jsonl(folder / "a.jsonl", make_texts(120, seed=6, words=20))
    tokenmill.prepare(str(folder / "a.jsonl"), folder / "out", tokenizer="byte", unit_bytes=800, workers=1)
    return folder / "out"


@pytest.fixture
def split(path: Path) -> TokenSplit:
    return tokenmill.open(path)["train"]


def test_shards_are_reached_in_whatever_order_they_are_asked_for(split: TokenSplit) -> None:
    tokens = split.tokens(0, split.num_tokens).tolist()
    starts = np.random.default_rng(1).permutation(split.num_tokens - 33)
    assert len(split.token_ends) > 8
    windows = Windows(split, 32)
    for part in np.array_split(starts, 400):
        assert windows.gather(part).tolist() == [tokens[start : start + 33] for start in part.tolist()]
    assert windows.gather(starts[:0]).shape == (0, 33)


@pytest.mark.parametrize("start", [-1, -(10**12)])
def test_rows_outside_the_split_are_refused(split: TokenSplit, start: int) -> None:
    windows = Windows(split, 32)
    last = split.num_tokens - 33
    windows.gather(np.array([0, last]))
    for outside in (start, last + 1, last - start, 10**12):
        with pytest.raises(IndexError):
            windows.gather(np.array([0, outside]))


def test_rows_that_are_very_long_are_the_same(split: TokenSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = np.arange(0, split.num_tokens - 65, 7)
    expected = Windows(split, 64).gather(starts)
    monkeypatch.setattr(module, "_MAX_VIEW_WIDTH", 64)
    assert (Windows(split, 64).gather(starts) == expected).all()


def test_windows_go_to_another_process_without_their_maps(split: TokenSplit) -> None:
    windows = Windows(split, 32)
    starts = np.arange(0, split.num_tokens - 33, 11)
    expected = windows.gather(starts)
    packed = pickle.dumps(windows)
    assert len(packed) < 100_000
    assert (pickle.loads(packed).gather(starts) == expected).all()


def test_threads_may_gather_from_the_same_windows_while_shards_are_mapped(split: TokenSplit) -> None:
    starts = np.random.default_rng(2).permutation(split.num_tokens - 33)
    expected = Windows(split, 32).gather(starts)
    windows = Windows(split, 32)
    wrong = []

    def work(first: int) -> None:
        for begin in range(first, len(starts) - 4, 16):
            if not (windows.gather(starts[begin : begin + 4]) == expected[begin : begin + 4]).all():
                wrong.append(begin)

    threads = [threading.Thread(target=work, args=(4 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="only Linux tells what is mapped")
def test_shards_that_had_to_go_are_let_go_and_come_again(split: TokenSplit, path: Path) -> None:
    """As with a cache that is too small for a dataset in an object store."""
    windows = Windows(split, 32)
    starts = np.array([0, *split.token_ends[:-1]])
    expected = windows.gather(starts)
    old = windows.gather_batches(np.stack((starts, starts)))
    next(old)
    split.unmap(["train/00000", "train/00001"])
    assert (next(old) == expected).all(), "who began before goes on with what it had"
    del old
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".bin")]
    names = {line.rpartition("/")[2] for line in mapped if str(path) in line}
    assert "00002.bin" in names
    assert names.isdisjoint({"00000.bin", "00001.bin"})
    assert (windows.gather(starts) == expected).all()
