"""What Templar's miners and validators agree upon: ids of samples, who trains on which, receipts.

Its samples have no token in common: sample i is tokens [i * T, (i + 1) * T).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.data.dataset import TokenSplit
from tokenmill.errors import RecipeError

Numbers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint64]


class SampleReceipt(NamedTuple):
    """What stands for a set of samples, whatever their order."""

    digest: str
    num_samples: int


def num_samples(split: TokenSplit, seq_len: int) -> int:
    return split.num_tokens // seq_len


def sample_ids(split: TokenSplit, seq_len: int, samples: Iterable[int]) -> Ids:
    """The id of each sample: eight bytes of BLAKE2b over its tokens as stored."""
    found = []
    for sample in samples:
        tokens = split.tokens(sample * seq_len, (sample + 1) * seq_len)
        found.append(hashlib.blake2b(tokens.data, digest_size=8).digest())
    return np.frombuffer(b"".join(found), "<u8").astype(np.uint64)


def draw_samples(uid: int, window: int, count: int, total: int, *, rank: int = 0, world_size: int = 1) -> Numbers:
    """The samples that miner `uid` trains on in a window: `count` of `total`, and of these the rank's share."""
    if count > total:
        raise RecipeError(f"{count} samples of {total} cannot be drawn without a repeat", hint="draw fewer")
    chance = np.random.default_rng((uid * 1000003 ^ window) & 0xFFFFFFFF)
    return chance.choice(total, size=count, replace=False)[rank::world_size]


def make_receipt(ids: Iterable[int] | Ids) -> SampleReceipt:
    """The receipt over a set of samples, from their ids."""
    in_order = np.sort(np.fromiter((int(one) for one in ids), np.uint64))
    return SampleReceipt(hashlib.blake2b(in_order.astype("<u8").data, digest_size=16).hexdigest(), len(in_order))
