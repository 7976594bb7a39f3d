"""CityHash64 of many strings at once: each step is done for all strings that are as long, as arrays of numbers.

Strings of up to 64 bytes have a formula for their length. Longer ones go in steps of 64 bytes with a state of seven
numbers; those with the most steps stand first, so that the ones still at work are always the first so many. When few
are left, a step on plain numbers is quicker than one on arrays; the formulas are the same.

The function is Geoff Pike's and Jyrki Alakuijala's, of Google, version 1.1. Numbers are 64 bits wide, and wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
N = TypeVar("N", Hashes, int)
State = tuple[N, N, N, N, N, N, N]

_K0 = 0xC3A5C85C97CB3127
_K1 = 0xB492B66FBE98F273
_K2 = 0x9AE16A3B2F90404F
_MUL = 0x9DDFEA08EB382D69
_MASK = (1 << 64) - 1
_FEW = 12


def cityhash64(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Hashes:
    """The hashes of the strings that lie at `starts` in some bytes."""
    found = np.empty(len(starts), np.uint64)
    classes: list[tuple[int, int, Callable[..., Any]]] = [
        (0, 0, lambda _, at, size: np.full(len(at), _K2, np.uint64)),
        (1, 3, _up_to_3),
        (4, 7, _up_to_7),
        (8, 16, _up_to_16),
        (17, 32, _up_to_32),
        (33, 64, _up_to_64),
        (65, int(sizes.max(initial=0)), _longer),
    ]
    for least, most, formula in classes:
        mine = np.flatnonzero((sizes >= least) & (sizes <= most))
        if len(mine):
            found[mine] = formula(data, starts[mine], sizes[mine])
    return found


def hash_one(data: bytes) -> int:
    """The hash of a single string."""
    return int(cityhash64(np.frombuffer(data, np.uint8), np.array([0]), np.array([len(data)]))[0])


def _wide(value: Hashes) -> Hashes:
    """Arrays wrap by themselves."""
    return value


def _narrow(value: int) -> int:
    return value & _MASK


def _fetch(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: int = 8) -> Any:
    """Words of eight bytes at some places, one after the other: an array for each."""
    words = _strings(data, at, size).view("<u8")
    return np.ascontiguousarray(words.reshape(len(at), -1).T) if size > 8 else words


def _fetch32(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64]) -> Any:
    return _strings(data, at, 4).view("<u4").astype(np.uint64)


def _strings(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.void]:
    """As many bytes from each of some places, copied as if they were one item."""
    every = np.ndarray(len(data) - size + 1, f"V{size}", data, strides=(1,))
    return every[at]


def _rotate(value: Any, by: int, wrap: Callable[[Any], Any]) -> Any:
    return wrap(value >> by | value << (64 - by))


def _mix(value: Any) -> Any:
    return value ^ value >> 47


def _pair(u: Any, v: Any, mul: Any = _MUL) -> Any:
    a = _mix((u ^ v) * mul)
    return _mix((v ^ a) * mul) * mul


def _mul_of(size: npt.NDArray[np.int64]) -> Any:
    return 2 * size.astype(np.uint64) + _K2


def _up_to_3(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Any:
    a, b, c = (data[at + place].astype(np.uint64) for place in (0, size >> 1, size - 1))
    return _mix((a + (b << 8)) * _K2 ^ (size.astype(np.uint64) + (c << 2)) * _K0) * _K2


def _up_to_7(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Any:
    first = size.astype(np.uint64) + (_fetch32(data, at) << 3)
    return _pair(first, _fetch32(data, at + size - 4), _mul_of(size))


def _up_to_16(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Any:
    mul = _mul_of(size)
    a, b = _fetch(data, at) + _K2, _fetch(data, at + size - 8)
    return _pair(_rotate(b, 37, _wide) * mul + a, (_rotate(a, 25, _wide) + b) * mul, mul)


def _up_to_32(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Any:
    mul = _mul_of(size)
    a, b = _fetch(data, at) * _K1, _fetch(data, at + 8)
    c, d = _fetch(data, at + size - 8) * mul, _fetch(data, at + size - 16) * _K2
    return _pair(_rotate(a + b, 43, _wide) + _rotate(c, 30, _wide) + d, a + _rotate(b + _K2, 18, _wide) + c, mul)


def _up_to_64(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Any:
    mul = _mul_of(size)
    a, b, e, f = _fetch(data, at, 32)
    d, c, h, g = _fetch(data, at + size - 32, 32)
    a, e, f, h = a * _K2, e * _K2, f * 9, h * mul
    u = _rotate(a + g, 43, _wide) + (_rotate(b, 30, _wide) + c) * 9
    v = ((a + g) ^ d) + f + 1
    w = ((u + v) * mul).byteswap() + h
    x = _rotate(e + f, 42, _wide) + c
    y = (((v + w) * mul).byteswap() + g) * mul
    z = e + f + c
    a = ((x + z) * mul + y).byteswap() + b
    return _mix((z + a) * mul + d + h) * mul + x


def _longer(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Hashes:
    order = np.argsort(-size, kind="stable")
    at, size = at[order], size[order]
    steps = (size - 1) >> 6
    last = _fetch(data, at + size - 64, 64)
    length = size.astype(np.uint64)
    x, y, z = last[3], last[6] + last[1], _pair(last[2] + length, last[5])
    v, second = _weak(last[0], last[1], last[2], last[3], length, z, _wide)
    w, fourth = _weak(last[4], last[5], last[6], last[7], y + _K1, x, _wide)
    x = x * _K1 + _fetch(data, at)
    state = np.stack((x, y, z, v, second, w, fourth))
    for step in range(int(steps[0])):
        active = int(np.searchsorted(-steps, -step))
        if active < _FEW:
            for number in range(active):
                state[:, number] = _finish(data, int(at[number]), step, int(steps[number]), state[:, number].tolist())
            break
        words = _fetch(data, at[:active] + 64 * step, 64)
        state[:, :active] = _step(tuple(state[:, :active]), words, _wide)
    x, y, z, v, second, w, fourth = state
    found = np.empty(len(at), np.uint64)
    found[order] = _pair(_pair(v, w) + _mix(y) * _K1 + z, _pair(second, fourth) + x)
    return found


def _finish(data: npt.NDArray[np.uint8], at: int, step: int, last: int, state: list[int]) -> State[int]:
    """The rest of the steps of one long string, on plain numbers."""
    words = data[at + 64 * step : at + 64 * last].tobytes()
    found: State[int] = tuple(state)  # type: ignore[assignment]  # seven numbers
    for row in np.frombuffer(words, "<u8").reshape(-1, 8).tolist():
        found = _step(found, row, _narrow)
    return found


def _weak(p: N, q: N, r: N, s: N, a: N, b: N, wrap: Callable[[N], N]) -> tuple[N, N]:
    """A pair of numbers from four words and two seeds."""
    a = wrap(a + p)
    b = _rotate(wrap(b + a + s), 21, wrap)
    total = wrap(a + q + r)
    return wrap(total + s), wrap(wrap(b + _rotate(total, 44, wrap)) + a)


def _step(state: State[N], words: Any, wrap: Callable[[N], N]) -> State[N]:
    """Eight words into the state."""
    x, y, z, v, second, w, fourth = state
    x = wrap(_rotate(wrap(x + y + v + words[1]), 37, wrap) * _K1)
    y = wrap(_rotate(wrap(y + second + words[6]), 42, wrap) * _K1)
    x = x ^ fourth
    y = wrap(y + v + words[5])
    z = wrap(_rotate(wrap(z + w), 33, wrap) * _K1)
    v, second = _weak(words[0], words[1], words[2], words[3], wrap(second * _K1), wrap(x + w), wrap)
    w, fourth = _weak(words[4], words[5], words[6], words[7], wrap(z + fourth), wrap(y + words[2]), wrap)
    return z, y, x, v, second, w, fourth
