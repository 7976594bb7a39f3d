"""The order of samples: a keyed permutation that is computed, not stored.

    position in the stream  ->  epoch, position in it  ->  keyed permutation  ->  sample

The permutation is a Feistel network over the next power of two, applied repeatedly until the result is below the
number of samples (cycle walking). It needs a few bytes for any number of samples, and every rank computes it alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Order = Literal["sequential", "shuffled", "random"]
ORDERS: tuple[str, ...] = get_args(Order)
Numbers = npt.NDArray[np.int64]
Mixed = npt.NDArray[np.uint64]
Round = Callable[[Numbers], Numbers]

# Halves of only a few bits mix slowly, so they get more rounds.
_ROUNDS, _ROUNDS_OF_FEW_BITS, _FEW_BITS = 6, 24, 12
_FEW_VALUES = 1 << 12
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def permute(positions: npt.ArrayLike, count: int, key: bytes) -> Numbers:
    """The images of these positions under a keyed permutation of `range(count)`."""
    found = np.asarray(positions, np.int64)
    if count <= 1:
        return found.copy()
    bits = (count - 1).bit_length()
    rounds = _rounds(key, bits)
    found = _feistel(found, bits, rounds)
    outside = np.flatnonzero(found >= count)
    while len(outside):
        # Less than half of all numbers are outside, and each cycle leads back inside.
        found[outside] = _feistel(found[outside], bits, rounds)
        outside = outside[found[outside] >= count]
    return found


def positions_of(samples: npt.ArrayLike, count: int, key: bytes) -> Numbers:
    """The positions that `permute` maps to these samples: its inverse."""
    found = np.asarray(samples, np.int64)
    if count <= 1:
        return found.copy()
    bits = (count - 1).bit_length()
    rounds = _rounds(key, bits)
    found = _inverse_feistel(found, bits, rounds)
    outside = np.flatnonzero(found >= count)
    while len(outside):  # back along the same cycle
        found[outside] = _inverse_feistel(found[outside], bits, rounds)
        outside = outside[found[outside] >= count]
    return found


def sample_with_replacement(positions: npt.ArrayLike, count: int, key: bytes) -> Numbers:
    """A number below `count` for each position, chosen independently: some are repeated, some never chosen."""
    mixed = _mix(_mix(np.asarray(positions, np.uint64) ^ _keys(key, 1)[0]))
    # The high half of a product spreads evenly over the range, where a remainder would not.
    high, low = mixed >> np.uint64(32), mixed & np.uint64(0xFFFFFFFF)
    n_high, n_low = np.uint64(count >> 32), np.uint64(count & 0xFFFFFFFF)
    middle = (low * n_low >> np.uint64(32)) + (high * n_low & np.uint64(0xFFFFFFFF)) + (low * n_high)
    result: Numbers = (high * n_high + (high * n_low >> np.uint64(32)) + (middle >> np.uint64(32))).astype(np.int64)
    return result


def make_key(*parts: object) -> bytes:
    """A key for `permute` and `sample_with_replacement`; different parts give unrelated keys."""
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).digest()


def _feistel(numbers: Numbers, bits: int, rounds: Sequence[Round]) -> Numbers:
    """A permutation of all `bits`-bit numbers. If `bits` is odd, the halves differ by one bit and swap sizes."""
    low_bits = bits // 2
    left, right = numbers >> low_bits, numbers & ((1 << low_bits) - 1)
    for mixed in rounds:
        left, right = right, left ^ mixed(right)
    # After an even number of rounds the halves have their original sizes again.
    joined: Numbers = (left << low_bits) | right
    return joined


def _inverse_feistel(numbers: Numbers, bits: int, rounds: Sequence[Round]) -> Numbers:
    low_bits = bits // 2
    left, right = numbers >> low_bits, numbers & ((1 << low_bits) - 1)
    for mixed in reversed(rounds):
        left, right = right ^ mixed(left), left
    joined: Numbers = (left << low_bits) | right
    return joined


@functools.lru_cache(maxsize=64)
def _rounds(key: bytes, bits: int) -> tuple[Round, ...]:
    """The function that each round applies to a half. For small halves a lookup table is several times as fast."""
    sizes = (bits - bits // 2, bits // 2)
    rounds = []
    for i, round_key in enumerate(_keys(key, _ROUNDS if bits > _FEW_BITS else _ROUNDS_OF_FEW_BITS)):
        mixed = functools.partial(_mix_half, key=round_key, mask=np.uint64((1 << sizes[i % 2]) - 1))
        values = 1 << sizes[(i + 1) % 2]
        rounds.append(mixed(np.arange(values)).take if values <= _FEW_VALUES else mixed)
    return tuple(rounds)


def _mix_half(half: Numbers, *, key: np.uint64, mask: np.uint64) -> Numbers:
    result: Numbers = (_mix(half.view(np.uint64) ^ key) & mask).view(np.int64)
    return result


def _mix(numbers: Mixed) -> Mixed:
    """Mix a number so that every bit of the result depends on every bit of it (the finalizer of SplitMix64)."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    result: Mixed = mixed ^ (mixed >> np.uint64(31))
    return result


def _keys(key: bytes, count: int) -> Mixed:
    return np.frombuffer(hashlib.shake_256(key).digest(8 * count), "<u8").astype(np.uint64)
