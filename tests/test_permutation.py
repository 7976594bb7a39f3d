from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.permutation import make_key, permute, positions_of, sample_with_replacement


@given(count=st.integers(1, 3000), key=st.binary(max_size=8))
@settings(deadline=None, database=None)
def test_every_sample_comes_once_an_epoch(count: int, key: bytes) -> None:
    assert sorted(permute(np.arange(count), count, key).tolist()) == list(range(count))


@given(count=st.integers(1, 1 << 62), positions=st.lists(st.integers(0, (1 << 62) - 1), min_size=1, max_size=20))
@settings(deadline=None, database=None)
def test_any_position_is_computed_alone_for_any_number_of_samples(count: int, positions: list[int]) -> None:
    inside = [position % count for position in positions]
    together = permute(inside, count, b"key").tolist()
    assert together == [int(permute([position], count, b"key")[0]) for position in inside]
    assert all(0 <= sample < count for sample in together)
    assert len(set(together)) == len(set(inside))


@given(count=st.integers(1, 1 << 62), positions=st.lists(st.integers(0, (1 << 62) - 1), min_size=1, max_size=20))
@settings(deadline=None, database=None)
def test_the_position_of_a_sample_is_found_without_a_search(count: int, positions: list[int]) -> None:
    inside = [position % count for position in positions]
    assert positions_of(permute(inside, count, b"key"), count, b"key").tolist() == inside


@pytest.mark.parametrize("count", [7, 8, 9])
def test_every_position_maps_everywhere_equally_often(count: int) -> None:
    keys = 4000
    seen = np.zeros((count, count))
    for number in range(keys):
        seen[np.arange(count), permute(np.arange(count), count, make_key(number))] += 1
    expected = keys / count
    chi_square = ((seen - expected) ** 2 / expected).sum()
    freedom = (count - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_neighbours_do_not_stay_neighbours() -> None:
    steps = np.diff(permute(np.arange(10_000), 10_000, b"key"))
    assert (np.abs(steps) < 100).mean() < 0.03
    assert abs(np.corrcoef(np.arange(9_999), steps)[0, 1]) < 0.05


def test_keys_of_other_parts_are_other_orders() -> None:
    orders = {
        tuple(permute(np.arange(100), 100, make_key(*parts)).tolist()) for parts in [(0, 1), (1, 0), (0, 11), ("0", 1)]
    }
    assert len(orders) == 4


@given(count=st.integers(1, 1 << 62), key=st.binary(max_size=8))
@settings(deadline=None, database=None)
def test_draws_are_in_range_and_the_high_half_of_the_product(count: int, key: bytes) -> None:
    found = sample_with_replacement(np.arange(50), count, key)
    assert ((found >= 0) & (found < count)).all()
    # With 2^62 the result is the random 64 bits themselves, shifted; any other range scales them.
    bits = [int(value) for value in sample_with_replacement(np.arange(50), 1 << 62, key)]
    for value, bit in zip(found.tolist(), bits, strict=True):
        assert (4 * bit * count) >> 64 <= value <= ((4 * bit + 3) * count) >> 64


def test_draws_are_even() -> None:
    counts = np.bincount(sample_with_replacement(np.arange(200_000), 1000, b"key"), minlength=1000)
    assert abs(((counts - 200) ** 2 / 200).sum() - 999) < 5 * (2 * 999) ** 0.5
