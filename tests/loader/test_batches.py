"""Batches: what a BatchSpec asks for, document boundaries inside rows, the order of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import RecipeError
from tokenmill.loader import batches
from tokenmill.loader.batches import IGNORED, BatchSpec, WindowLayout, find_boundaries, find_runs, samples_in_order

EOT = 99
FIELDS = ("positions", "document_ids", "cu_seqlens")
ORDER_OF_0_1 = [3, 0, 5, 6, 8, 9, 7, 1, 2, 4, 6, 1]


class Documents:
    """A document index over tokens in memory, of documents with these lengths (their end of text included)."""

    def __init__(self, lengths: list[int], eot: str) -> None:
        self.eot = eot
        self.eot_id = None if eot == "none" else EOT
        self.ends = np.cumsum(lengths)
        self.starts = self.ends - lengths
        self.owners = np.repeat(np.arange(len(lengths)), lengths)
        self.tokens = np.arange(len(self.owners), dtype=np.uint16) % 90
        marks = {"append": self.ends - 1, "prepend": self.starts}.get(eot)
        if marks is not None:
            self.tokens[marks] = EOT

    def document_at(self, tokens: Any) -> Any:
        return self.owners[tokens]

    def document_starts(self, documents: Any) -> Any:
        return self.starts[documents]

    def rows(self, starts: Any, width: int) -> Any:
        return self.tokens[np.asarray(starts)[:, None] + np.arange(width)]


cases = st.tuples(
    st.lists(st.integers(1, 9), min_size=2, max_size=30), st.sampled_from(["append", "prepend", "none"]), st.randoms()
)


@given(case=cases, seq_len=st.integers(1, 8))
@settings(max_examples=150, deadline=None, database=None)
def test_fields_and_masks_are_those_of_a_plain_loop(case: Any, seq_len: int) -> None:
    lengths, eot, chance = case
    split = Documents(lengths, eot)
    last = len(split.tokens) - seq_len - 1
    if last < 0:
        return
    starts = np.array([chance.randint(0, last) for _ in range(3)])
    layout = WindowLayout(BatchSpec(fields=FIELDS, mask_boundaries=True), np.dtype(np.uint16))
    batch = layout.batch(split, starts, split.rows(starts, seq_len + 1), split.document_at(starts))
    edges = []
    for row, start in enumerate(starts.tolist()):
        begin = start
        for column in range(seq_len):
            at = start + column
            if column and split.owners[at] != split.owners[at - 1]:
                begin = at
            if at == begin:
                edges.append(row * seq_len + column)
            same = split.owners[at + 1] == split.owners[at]
            assert batch["input_ids"][row, column] == split.tokens[at]
            assert batch["labels"][row, column] == (split.tokens[at + 1] if same else IGNORED)
            assert batch["positions"][row, column] == at - begin
            assert batch["document_ids"][row, column] == split.owners[at]
    assert batch["cu_seqlens"].tolist() == [*edges, 3 * seq_len]
    assert batch["cu_seqlens"].dtype == np.int32


def test_boundaries_are_the_same_from_tokens_and_from_the_index() -> None:
    lengths = [3, 1, 4, 2, 5]
    starts = np.array([0, 2, 5])
    expected = [[3, 4], [3 - 2 + 6, 4 - 2 + 6], [8 - 5 + 12, 10 - 5 + 12]]
    for eot in ("append", "prepend", "none"):
        split = Documents(lengths, eot)
        found = find_boundaries(split, split.rows(starts, 6), starts)
        assert sorted(found.tolist()) == sorted(expected[0] + expected[1] + expected[2]), eot


def test_a_boundary_at_the_last_target_begins_no_run() -> None:
    runs = find_runs(np.array([4, 5 + 2]), np.array([7, 9]), 4)  # rows of 5 tokens: column 4 of the first is a target
    assert runs.edges.tolist() == [0, 4, 6, 8]
    assert runs.documents.tolist() == [7, 9, 10]


def test_unmasked_labels_share_memory_and_masked_ones_do_not() -> None:
    split = Documents([3, 3, 3], "append")
    starts = np.array([0, 2])
    rows = split.rows(starts, 5)
    plain = WindowLayout(BatchSpec(), np.dtype(np.uint16)).batch(split, starts, rows, starts)
    assert set(plain) == {"input_ids", "labels"} and np.shares_memory(plain["input_ids"], plain["labels"])
    masked = WindowLayout(BatchSpec(mask_boundaries=True), np.dtype(np.uint16)).batch(split, starts, rows, starts)
    assert not np.shares_memory(masked["input_ids"], masked["labels"])
    assert (masked["input_ids"] == plain["input_ids"]).all()


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_document_ids_have_64_bits_whatever_the_dtype_of_ids(dtype: Any) -> None:
    split = Documents([3, 3, 3], "append")
    starts = np.array([1, 3])
    layout = WindowLayout(BatchSpec(fields=("document_ids", "positions"), dtype=dtype), np.dtype(np.uint16))
    batch = layout.batch(split, starts, split.rows(starts, 5), split.document_at(starts))
    assert batch["input_ids"].dtype == batch["labels"].dtype == dtype
    assert batch["document_ids"].dtype == np.int64
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 2]]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fields": ("part",)}, r"unknown fields \['part'\]"),
        ({"fields": ("positions", "nope")}, r"unknown fields \['nope'\]"),
        ({"fields": "positions"}, "fields is 'positions'"),
        ({"mask_boundaries": "no"}, "mask_boundaries is 'no'"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        BatchSpec(**options)


def test_the_old_name_of_a_field_is_answered_with_the_new_one() -> None:
    with pytest.raises(RecipeError) as caught:
        BatchSpec(fields=("part",))
    assert "component" in caught.value.hint


@pytest.mark.parametrize(
    ("dtype", "masked", "told"),
    [
        ("nope", False, "dtype is 'nope'"),
        (np.int8, False, "do not fit"),
        (np.float32, False, "do not fit"),
        (np.uint32, True, "cannot be masked"),
        (None, True, "cannot be masked"),
    ],
)
def test_a_dtype_that_cannot_hold_ids_or_masks_is_refused(dtype: Any, masked: bool, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        BatchSpec(dtype=dtype, mask_boundaries=masked).label_dtype(np.dtype(np.uint16))


@given(count=st.integers(1, 50), positions=st.lists(st.integers(0, 400), max_size=30))
@settings(max_examples=100, deadline=None, database=None)
def test_samples_come_epoch_by_epoch_in_any_grouping(count: int, positions: list[int]) -> None:
    identity = {"fingerprint": "f"}
    every = samples_in_order(np.arange(401), count, "shuffled", identity)
    found = samples_in_order(np.array(positions, np.int64), count, "shuffled", identity)
    assert found.tolist() == every[positions].tolist() if positions else not len(found)
    for epoch in range(401 // count):
        assert sorted(every[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))
    assert samples_in_order(np.array(positions, np.int64), count, "sequential", identity).tolist() == [
        position % count for position in positions
    ]


def test_the_order_is_that_of_0_1() -> None:
    """Keys are hashed from the identity: its keys and their order are part of every checkpoint."""
    identity = {
        "fingerprint": "f", "split": "train", "packing": "concat", "seq_len": 8, "order": "shuffled", "seed": 0,
    }  # fmt: skip
    assert samples_in_order(np.arange(12), 10, "shuffled", identity).tolist() == ORDER_OF_0_1
    with pytest.raises(RecipeError, match="unknown order 'random '"):
        batches.check_order("random ")


@given(case=cases, seq_len=st.integers(1, 8), masked=st.booleans())
@settings(max_examples=150, deadline=None, database=None)
def test_aligned_labels_are_the_inputs_but_for_what_is_not_a_target(case: Any, seq_len: int, masked: bool) -> None:
    lengths, eot, chance = case
    split = Documents(lengths, eot)
    last = len(split.tokens) - seq_len - 1
    if last < 0:
        return
    starts = np.array([chance.randint(0, last) for _ in range(3)])
    spec = BatchSpec(labels="aligned", mask_boundaries=masked, fields=("attention_mask",))
    layout = WindowLayout(spec, np.dtype(np.uint16))
    batch = layout.batch(split, starts, split.rows(starts, seq_len + 1), split.document_at(starts))
    for row, start in enumerate(starts.tolist()):
        for column in range(seq_len):
            at = start + column
            begins = column == 0 or split.owners[at] != split.owners[at - 1]
            assert batch["input_ids"][row, column] == split.tokens[at]
            assert batch["labels"][row, column] == (IGNORED if masked and begins else split.tokens[at])
    assert batch["attention_mask"].tolist() == [[1] * seq_len] * 3


@pytest.mark.parametrize("labels", ["Shifted", "none", None, 1])
def test_unknown_labels_are_refused(labels: Any) -> None:
    with pytest.raises(RecipeError, match="labels is") as caught:
        BatchSpec(labels=labels)
    assert "'aligned'" in caught.value.hint


def test_position_ids_are_the_positions_under_another_name() -> None:
    split = Documents([3, 1, 4, 2, 5], "append")
    starts = np.array([0, 2, 5])
    layout = WindowLayout(BatchSpec(fields=("positions", "position_ids")), np.dtype(np.uint16))
    batch = layout.batch(split, starts, split.rows(starts, 6), split.document_at(starts))
    assert batch["position_ids"].tolist() == batch["positions"].tolist() != []
    assert not np.shares_memory(batch["position_ids"], batch["positions"])
