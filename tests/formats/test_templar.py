from __future__ import annotations

import hashlib
import random
import struct
from pathlib import Path

import numpy as np
import pytest

import tokenmill
from tokenmill.dataset.dataset import TokenSplit
from tokenmill.errors import RecipeError
from tokenmill.formats.templar import draw_samples, make_receipt, num_samples, sample_ids


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> TokenSplit:
    path: Path = tmp_path_factory.mktemp("templar")
    (path / "a.txt").write_text("".join(f"line {i} of the text\n" for i in range(100)))
    tokenmill.prepare(str(path / "a.txt"), path / "out", tokenizer="byte", unit_bytes=300, workers=1)
    return tokenmill.open(path / "out")["train"]


def test_the_id_of_a_sample_hashes_its_own_tokens_alone(split: TokenSplit) -> None:
    tokens = [token for document in split for token in document.tolist()]
    assert num_samples(split, 40) == len(tokens) // 40
    for sample, found in enumerate(sample_ids(split, 40, range(num_samples(split, 40))).tolist()):
        data = struct.pack("<40H", *tokens[40 * sample : 40 * sample + 40])
        assert struct.pack("<Q", found) == hashlib.blake2b(data, digest_size=8).digest()


def test_the_draw_of_a_miner_is_numpys_own(split: TokenSplit) -> None:
    expected = np.random.default_rng((77 * 1000003 ^ 1234) & 0xFFFFFFFF).choice(500, 60, replace=False)
    assert draw_samples(77, 1234, 60, 500).tolist() == expected.tolist()
    parts = [draw_samples(77, 1234, 60, 500, rank=rank, world_size=4) for rank in range(4)]
    assert [part.tolist() for part in parts] == [expected[rank::4].tolist() for rank in range(4)]
    assert draw_samples(77, 1235, 60, 500).tolist() != expected.tolist()


def test_more_samples_than_there_are_cannot_be_drawn() -> None:
    with pytest.raises(RecipeError, match="6 samples of 5"):
        draw_samples(1, 1, 6, 5)


def test_a_receipt_does_not_depend_on_the_order(split: TokenSplit) -> None:
    ids = sample_ids(split, 40, [5, 1, 9]).tolist()
    receipt = make_receipt(ids)
    random.Random(0).shuffle(ids)
    assert make_receipt(np.array(ids, np.uint64)) == receipt
    packed = struct.pack("<3Q", *sorted(ids))
    assert receipt == (hashlib.blake2b(packed, digest_size=16).hexdigest(), 3)
    assert make_receipt(ids[:2]) != receipt
