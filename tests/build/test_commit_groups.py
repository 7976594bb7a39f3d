from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.build.commit import ShardGroup, group_pieces
from tokenmill.dataset.manifest import Shard
from tokenmill.storage.output import Digest
from tokenmill.units.receipts import NO_LIMIT, Receipt

SIZES = st.lists(st.integers(1, 50), max_size=40)
TARGET = st.integers(1, 60)


def receipt(unit: int, **tokens: int) -> Receipt:
    """A unit that has pieces of so many tokens."""
    digest = Digest(bytes=0, sha256="0" * 64)
    return Receipt(
        fingerprint="",
        unit=unit,
        token_limit=NO_LIMIT,
        documents_read=1,
        dropped={},
        pieces={
            split: Shard(name=f"{unit:06d}.{split}", tokens=count, documents=1, bin=digest, idx=digest)
            for split, count in tokens.items()
        },
        sources=(),
        read_sum="",
        written_sum="",
        files={},
    )


def group(sizes: list[int], target: int) -> list[ShardGroup]:
    return list(group_pieces((receipt(unit, train=size) for unit, size in enumerate(sizes)), ["train"], target))


def groups_of(sizes: list[int], target: int) -> list[list[int]]:
    return [[piece.tokens for piece in one.pieces] for one in group(sizes, target)]


@given(sizes=SIZES, target=TARGET)
@settings(deadline=None)
def test_groups_keep_the_order_and_lose_nothing(sizes: list[int], target: int) -> None:
    groups = group(sizes, target)
    assert [piece.name for one in groups for piece in one.pieces] == [f"{unit:06d}.train" for unit in range(len(sizes))]
    assert [key for one in groups for key in one.keys] == [(unit, NO_LIMIT) for unit in range(len(sizes))]
    assert [one.name for one in groups] == [f"train/{number:05d}" for number in range(len(groups))]
    assert all(one.pieces for one in groups)


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


def test_splits_are_grouped_each_for_itself_and_others_left_out() -> None:
    receipts = [receipt(0, train=9, val=1, test=9), receipt(1, train=9), receipt(2, train=9, val=1)]
    groups = [(one.name, [unit for unit, _ in one.keys]) for one in group_pieces(receipts, ["train", "val"], 9)]
    assert groups == [("train/00000", [0]), ("train/00001", [1]), ("train/00002", [2]), ("val/00000", [0, 2])]


def test_a_group_is_there_as_soon_as_it_is_whole() -> None:
    asked = []

    def receipts() -> Iterator[Receipt]:
        for unit in range(4):
            asked.append(unit)
            yield receipt(unit, train=5)

    assert next(group_pieces(receipts(), ["train"], 10)).name == "train/00000"
    assert asked == [0, 1]


def test_only_a_piece_that_is_alone_is_linked() -> None:
    alone, joined = group([10, 1, 2], 10)
    names = [(f"000000.train{ending}", f"train/00000{ending}") for ending in (".bin", ".idx")]
    assert [link[:2] for link in alone.links()] == names
    assert joined.links() == []
