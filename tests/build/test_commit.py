from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.build.commit import group_pieces
from tokenmill.manifest import Shard
from tokenmill.storage import Digest

SIZES = st.lists(st.integers(1, 50), max_size=40)
TARGET = st.integers(1, 60)


def pieces(sizes: list[int]) -> list[Shard]:
    digest = Digest(bytes=0, sha256="0" * 64)
    return [
        Shard(name=f"{unit:06d}", tokens=size, documents=1, bin=digest, idx=digest) for unit, size in enumerate(sizes)
    ]


def groups_of(sizes: list[int], target: int) -> list[list[int]]:
    return [[piece.tokens for piece in group] for group in group_pieces(pieces(sizes), target)]


@given(sizes=SIZES, target=TARGET)
@settings(deadline=None)
def test_groups_keep_the_order_and_lose_nothing(sizes: list[int], target: int) -> None:
    given_pieces = pieces(sizes)
    groups = list(group_pieces(given_pieces, target))
    assert [piece for group in groups for piece in group] == given_pieces
    assert all(groups)


@given(sizes=SIZES, target=TARGET)
@settings(deadline=None)
def test_a_split_never_becomes_a_forest_of_tiny_files(sizes: list[int], target: int) -> None:
    assert len(groups_of(sizes, target)) <= -(-sum(sizes) // target) + 1


@given(sizes=SIZES, target=TARGET)
@settings(deadline=None)
def test_every_group_but_the_last_reaches_the_target_with_its_last_piece(sizes: list[int], target: int) -> None:
    groups = groups_of(sizes, target)
    assert all(sum(group) >= target for group in groups[:-1])
    assert all(sum(group[:-1]) < target for group in groups)


@given(sizes=SIZES, target=TARGET)
@settings(deadline=None)
def test_a_large_piece_that_starts_a_group_stays_alone(sizes: list[int], target: int) -> None:
    for group in groups_of(sizes, target):
        if group[0] >= target:
            assert len(group) == 1


@given(sizes=st.lists(st.integers(10, 50)), target=st.integers(1, 10))
@settings(deadline=None)
def test_large_pieces_are_never_joined(sizes: list[int], target: int) -> None:
    assert groups_of(sizes, target) == [[size] for size in sizes]


def test_small_pieces_are_joined_with_their_neighbours() -> None:
    assert groups_of([10, 3, 3, 4, 12, 9, 11, 2, 2], 10) == [[10], [3, 3, 4], [12], [9, 11], [2, 2]]


def test_no_pieces_give_no_groups() -> None:
    assert groups_of([], 10) == []
